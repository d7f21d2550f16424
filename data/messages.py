"""Chats of every record format as one: messages with the fields that chat templates read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content` (a text), and where the chat has them `tool_calls`,
`tool_call_id`, `name` and `reasoning_content`."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Roles of OpenAI and ShareGPT chats, as the chat templates name them."""

ANSWER_FIELDS = ("response", "completion")


@dataclass(frozen=True)
class Chat:
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    """Descriptions of the functions that the target may call, as the chat template shows them."""


def chat_of(record: dict[str, Any], where: str) -> Chat:
    """The chat of a record, whichever of these it holds; one that holds several is read by the first.

    - `messages` or `conversations`: a list of OpenAI or ShareGPT messages;
    - `turns`: a list of user texts;
    - `prompt`, alone or with `response` or `completion`: each a text or a list of messages;
    - `instruction`, with `input` and `output` where there are any.

    Beside them, `system` is a system text for a chat that has none of its own, and `tools` a list of function
    descriptions or its JSON text. Raises one ValueError that begins with `where` (a file and line, say) and names the
    field and message for anything else. The chat need not have a user turn or an answer.
    """
    # Tables exported to JSONL write null for the columns that a row lacks.
    record = {key: value for key, value in record.items() if value is not None}
    field = chat_field(record)
    if field is None:
        raise ValueError(f"{where}: none of {', '.join(_READERS)} among the fields {sorted(record)}")
    messages = _READERS[field](record, where)
    system = record.get("system", "")
    if system and messages[0]["role"] != "system":
        messages = [*normalise_messages([{"role": "system", "content": system}], f"{where}, system"), *messages]
    return Chat(messages, _tools_of(record.get("tools"), f"{where}, tools"))


def chat_field(record: dict[str, Any]) -> str | None:
    """The field that `chat_of` reads the chat from; None where the record has none."""
    return next((field for field in _READERS if record.get(field) is not None), None)


def normalise_messages(raw: object, where: str) -> list[Message]:
    """OpenAI or ShareGPT messages as `Message`s, copied: other fields are left out, null ones too.

    A `developer` turn is read as system, a list of text parts is joined, arguments of tool calls are parsed (templates
    expect objects), and a ShareGPT `function_call` becomes an assistant turn with `tool_calls`. Raises one ValueError
    that begins with `where` and names the message for anything that no template could show.
    """
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{where}: expected a non-empty list of messages, got {raw!r}")
    return [_normalised(item, f"{where}: message {index}") for index, item in enumerate(raw)]


def prompt_part(messages: list[Message]) -> list[Message]:
    """The messages up to and including the last user turn: what the target is asked to answer."""
    user_turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not user_turns:
        raise ValueError(f"a prompt needs a user turn, got roles {[message['role'] for message in messages]}")
    return messages[: user_turns[-1] + 1]


def _from_messages(record: dict[str, Any], where: str) -> list[Message]:
    return normalise_messages(record["messages"], f"{where}, messages")


def _from_conversations(record: dict[str, Any], where: str) -> list[Message]:
    return normalise_messages(record["conversations"], f"{where}, conversations")


def _from_turns(record: dict[str, Any], where: str) -> list[Message]:
    texts = record["turns"]
    if not isinstance(texts, list):
        raise ValueError(f"{where}: turns must be a list of user texts, got {texts!r}")
    return normalise_messages([{"role": "user", "content": text} for text in texts], f"{where}, turns")


def _from_prompt(record: dict[str, Any], where: str) -> list[Message]:
    messages = _one_side(record["prompt"], "user", f"{where}, prompt")
    field = next((field for field in ANSWER_FIELDS if field in record), None)
    return messages if field is None else [*messages, *_one_side(record[field], "assistant", f"{where}, {field}")]


def _one_side(value: object, role: str, where: str) -> list[Message]:
    """A text is one message of the role, a list holds messages."""
    return normalise_messages(value if isinstance(value, list) else [{"role": role, "content": value}], where)


def _from_instruction(record: dict[str, Any], where: str) -> list[Message]:
    for field in ("instruction", "input", "output"):
        if not isinstance(record.get(field, ""), str):
            raise ValueError(f"{where}: {field} must be a text, got {record[field]!r}")
    task = record["instruction"] + (f"\n\n{record['input']}" if record.get("input") else "")
    raw = [{"role": "user", "content": task}]
    if "output" in record:
        raw.append({"role": "assistant", "content": record["output"]})
    return normalise_messages(raw, f"{where}, instruction")


_READERS: dict[str, Callable[[dict[str, Any], str], list[Message]]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "turns": _from_turns,
    "prompt": _from_prompt,
    "instruction": _from_instruction,
}
"""In order of preference: what comes first says the most."""


def _normalised(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise ValueError(f"{where} must be an object with role and content, got {item!r}")
    item = {key: value for key, value in item.items() if value is not None}
    source_role = item.get("role", item.get("from"))
    if not isinstance(source_role, str) or source_role not in ROLES:
        raise ValueError(f"{where} has unknown role {source_role!r}; use one of {', '.join(ROLES)}")
    role, content = ROLES[source_role], item.get("content", item.get("value"))
    where = f"{where} ({source_role})"
    calls, content = (content, "") if source_role == "function_call" else (item.get("tool_calls"), content)
    message: Message = {"role": role}
    if reasoning := item.get("reasoning_content", item.get("reasoning")):
        message["reasoning_content"] = reasoning
    if calls or source_role == "function_call":
        message["tool_calls"] = _tool_calls(calls, where)
    # Servers send null as the content of an answer that only calls tools, or that was cut while it reasoned.
    message["content"] = _text(content, where, may_lack=len(message) > 1)
    if role != "assistant" and len(message) > 2:
        raise ValueError(f"{where} has {', '.join(set(message) - {'role', 'content'})}; only an assistant turn may")
    for field in ("tool_call_id", "name"):
        if field in item:
            message[field] = item[field]
    for field in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(field, ""), str):
            raise ValueError(f"{where}: {field} must be a text, got {message[field]!r}")
    _check_unicode(message, where)
    return message


def _text(content: object, where: str, *, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where} must have a text as content, got {content!r}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} must have a text or text parts as content, got the part {part!r}")
    return "".join(part["text"] for part in content)


def _tool_calls(raw: object, where: str) -> list[dict[str, Any]]:
    """Calls as `{type: function, function: {name, arguments}}`, arguments an object; `id` is kept."""
    calls = _parsed(raw, f"{where}: tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise ValueError(f"{where}: tool_calls must be a list of calls, got {raw!r}")
    return [_tool_call(call, f"{where}: tool call {index}") for index, call in enumerate(calls)]


def _tool_call(raw: object, where: str) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must name a function and its arguments, got {raw!r}")
    # A function without parameters is called with nothing at all by some servers.
    arguments = _parsed(function.get("arguments") or {}, f"{where}: arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments must be an object or its JSON text, got {function['arguments']!r}")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call if raw.get("id") is None else {"id": raw["id"], **call}


def _tools_of(raw: object, where: str) -> list[dict[str, Any]] | None:
    tools = _parsed(raw or [], where)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where} must be a list of function descriptions or its JSON text, got {raw!r}")
    _check_unicode(tools, where)
    return tools or None


def _parsed(value: object, where: str) -> object:
    """The value of a JSON text; anything that is no text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{where}: broken JSON ({error}) in {value!r}") from error


def _check_unicode(value: object, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where} has {half!r}, half a surrogate pair, which is no character: remove it") from error
