"""A catalogue of bad and odd inputs, from a file to the tokens that are learnt: each has its marked text or one error.

Marks are made by hand. In them `U:`, `A:`, `S:` and `T:` stand for the headers of `SHORT` and `#` for its end of turn;
square brackets enclose what is learnt.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from data.chat import RenderedChat, render_chats
from data.messages import chat_of
from data.prompts import read_prompts
from data.records import open_records
from data.responses import trim
from tests.chat_templates import (
    CHATML,
    GEMMA,
    MARKED,
    NO_ENDS,
    QWEN3,
    TWO_ENDS,
    assistant,
    build_tokenizer,
    call,
    marked,
    system,
    tool,
    user,
)

SHORT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SIGNS = {"<|user|>": "U:", "<|assistant|>": "A:", "<|system|>": "S:", "<|tool|>": "T:", "<|eot|>": "#"}
WHOLE = 100_000


class SlowTokenizer(PreTrainedTokenizer):
    """One token a letter, in Python."""

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(256)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


@dataclass(frozen=True)
class Odd:
    """An input with what comes of it: the marked text of every record, or the one error as a pattern."""

    name: str
    content: bytes | list[Any]  # a file as it is, or the records of one
    texts: list[str] | None = None
    error: str | None = None
    template: str | None = SHORT
    finish_reason: str | None = "stop"
    max_length: int = WHOLE
    eos_token: str | None = "<|eos|>"
    ids: list[str] | None = None


def messages(*turns: dict[str, Any], **fields: Any) -> list[Any]:
    """One record."""
    return [{"messages": list(turns), **fields}]


def answered(content: object) -> list[Any]:
    return [{"messages": [user("hi"), {"role": "assistant", "content": content}]}]


def asked(content: object) -> list[Any]:
    return [{"messages": [{"role": "user", "content": content}, assistant("ok")]}]


PAIR = b'{"prompt": "hi", "response": "ok"}'
PAIR_TEXT = "U:hi#A:[ok#]"
LONG = messages(user("hi"), assistant("no"), user("q"), assistant("on"))
FAMILY = "👩‍👩‍👧"
HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

FILES = [
    Odd("empty file", b"", error="is empty: expected one JSON object a line"),
    Odd("blank lines only", b"\n \r\n\n", error="is empty"),
    Odd("broken JSON", PAIR + b"\n{'prompt': 'hi'}\n", error="x.jsonl:2: broken JSON"),
    Odd("broken JSON after a blank line", PAIR + b"\n\n{\n" + PAIR, error="x.jsonl:3: broken JSON"),
    Odd("JSON that is no object", PAIR + b"\n[1]\n", error=r"x.jsonl:2: expected a JSON object, got \[1\]"),
    Odd("bytes that are no UTF-8", b'{"prompt": "\xff"}\n', error="x.jsonl:1: broken JSON"),
    Odd("windows line ends", PAIR + b"\r\n" + PAIR + b"\r\n", [PAIR_TEXT] * 2),
    Odd("byte order mark", b"\xef\xbb\xbf" + PAIR + b"\n", [PAIR_TEXT]),
    Odd("blank lines between", b"\n" + PAIR + b"\n \n\n" + PAIR + b"\n\n", [PAIR_TEXT] * 2),
    Odd("no newline at the end", PAIR + b"\n" + PAIR, [PAIR_TEXT] * 2),
    Odd("torn last line", PAIR + b"\n" + PAIR[:-5], [PAIR_TEXT]),
    Odd("half a surrogate pair", rb'{"prompt": "hi", "response": "a\ud800"}', error=r"x.jsonl:1, response: message 0"),
    Odd("surrogate pair", rb'{"prompt": "hi", "response": "\ud83d\ude00"}', ["U:hi#A:[😀#]"]),
    Odd("escaped NUL", rb'{"prompt": "hi", "response": "a\u0000b"}', ["U:hi#A:[a\0b#]"]),
    Odd(
        "unicode line separators in a line",
        '{"prompt": "a\u2028b\u0085", "response": "ok"}'.encode(),
        ["U:a\u2028b\u0085#A:[ok#]"],
    ),
    Odd("null columns", [{"messages": None, "tools": None, "prompt": "hi", "response": "ok"}], [PAIR_TEXT]),
    Odd(
        "equal ids",
        [{"id": "a", "prompt": "hi"}, {"id": "a", "prompt": "q"}],
        error="x.jsonl:2: id 'a' is already",
        ids=[],
    ),
    Odd(
        "equal ids of other types",
        [{"id": 1, "prompt": "hi"}, {"id": "1", "prompt": "q"}],
        error="id '1' is already",
        ids=[],
    ),
    Odd("ids that are numbers", [{"id": 7, "prompt": "hi", "response": "ok"}], [PAIR_TEXT], ids=["7"]),
    Odd("ids that are null", [{"id": None, "prompt": "hi", "response": "ok"}], [PAIR_TEXT], ids=["x-1"]),
]

FORMATS = [
    Odd("no chat", [{"text": "hi"}], error=r"x.jsonl:1: none of messages, .* among the fields \['text'\]"),
    Odd("no record at all", [{}], error="none of messages"),
    Odd("no message", messages(), error="x.jsonl:1, messages: expected a non-empty list"),
    Odd("missing role", messages({"content": "hi"}), error="message 0 has unknown role None"),
    Odd(
        "unknown role", messages(user("hi"), {"role": "bot", "content": "ok"}), error="message 1 has unknown role 'bot'"
    ),
    Odd("messages as a text", [{"messages": "hi"}], error="expected a non-empty list of messages, got 'hi'"),
    Odd("number as content", answered(5), error=r"message 1 \(assistant\) must have a text as content, got 5"),
    Odd("null as content", answered(None), error="must have a text as content, got None"),
    Odd("object as content", answered({"text": "ok"}), error="must have a text as content, got {'text': 'ok'}"),
    Odd("image part", asked([{"type": "image", "url": "x"}]), error="must have a text or text parts .* got the part"),
    Odd("text parts", answered([{"type": "text", "text": "n"}, {"type": "text", "text": "o"}]), ["U:hi#A:[no#]"]),
    Odd(
        "developer turn",
        messages({"role": "developer", "content": "s"}, user("hi"), assistant("ok")),
        [f"S:s#{PAIR_TEXT}"],
    ),
    Odd(
        "ShareGPT", [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]}], [PAIR_TEXT]
    ),
    Odd("pair with an empty response", [{"prompt": "hi", "response": ""}], ["U:hi#A:[#]"]),
    Odd("pair with a null response", [{"prompt": "hi", "response": None}], error="a chat needs an assistant turn"),
    Odd("pair of message lists", [{"prompt": [user("hi")], "completion": [assistant("ok")]}], [PAIR_TEXT]),
    Odd("turns without answers", [{"turns": ["hi", "q"]}], error=r"a chat needs .* got roles \['user', 'user'\]"),
    Odd("Alpaca", [{"instruction": "hi", "input": "", "output": "ok"}], [PAIR_TEXT]),
    Odd("Alpaca with input", [{"instruction": "Add.", "input": "1", "output": "ok"}], ["U:Add.\n\n1#A:[ok#]"]),
    Odd(
        "tools as broken JSON", messages(user("hi"), assistant("ok"), tools="[{"), error="x.jsonl:1, tools: broken JSON"
    ),
]

TURNS = [
    Odd(
        "only user turns",
        messages(user("hi"), user("q")),
        error=r"a chat needs an assistant turn, got roles \['user', ",
    ),
    Odd("only a system turn", messages(system("s")), error=r"a chat needs an assistant turn, got roles \['system'\]"),
    Odd("assistant first", messages(assistant("ok"), user("hi"), assistant("no")), ["A:[ok#]U:hi#A:[no#]"]),
    Odd("only an answer", messages(assistant("ok")), ["A:[ok#]"]),
    Odd("answer at index 0", messages(assistant("no")), ["n[o#]"], template="{{ messages[0]['content'] }}<|eot|>"),
    Odd("consecutive user turns", messages(user("hi"), user("q"), assistant("ok")), ["U:hi#U:q#A:[ok#]"]),
    Odd("consecutive answers", messages(user("hi"), assistant("ok"), assistant("no")), ["U:hi#A:[ok#]A:[no#]"]),
    Odd("system in the middle", messages(user("hi"), system("s"), assistant("ok")), ["U:hi#S:s#A:[ok#]"]),
    Odd("ends with a user turn", messages(user("hi"), assistant("ok"), user("q")), [PAIR_TEXT]),
    Odd(
        "roles that the template refuses",
        messages(user("hi"), user("q"), assistant("ok")),
        error="refuses the chat: Conver.* roles must alternate",
        template=GEMMA,
    ),
    Odd("tool result without a call", messages(user("hi"), tool("2"), assistant("ok")), ["U:hi#T:2#A:[ok#]"]),
    Odd(
        "call with arguments as text",
        messages(user("hi"), assistant("", tool_calls=[{"name": "add", "arguments": '{"a":1}'}])),
        [f"{HI}[{ADD}<|im_end|>]"],
        template=QWEN3,
        finish_reason="tool_calls",
    ),
    Odd(
        "call with arguments as an object",
        messages(user("hi"), assistant("", tool_calls=[call("add", a=1)])),
        [f"{HI}[{ADD}<|im_end|>]"],
        template=QWEN3,
    ),
    Odd(
        "call without a name",
        messages(user("hi"), assistant("", tool_calls=[{"arguments": {}}])),
        error="tool call 0 must name a function",
    ),
    Odd(
        "call with broken arguments",
        messages(user("hi"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])),
        error="tool call 0: arguments: broken JSON",
    ),
    Odd(
        "call of a user",
        messages(user("hi") | {"tool_calls": [call("f")]}, assistant("ok")),
        error="only an assistant turn may",
    ),
    Odd(
        "call that the template drops",
        messages(user("hi"), assistant("ok", tool_calls=[call("f")])),
        error="does not show the tool_calls of message 1",
    ),
    Odd(
        "reasoning that the template drops",
        messages(user("hi"), assistant("ok", reasoning_content="hm")),
        error="does not show the reasoning_content of message 1",
    ),
    Odd(
        "reasoning",
        messages(user("hi"), assistant("ok", reasoning="hm")),
        [f"{HI}[<think>\nhm\n</think>\n\nok<|im_end|>]"],
        template=QWEN3,
    ),
    Odd(
        "unknown finish reason",
        answered("ok"),
        error="finish_reason must be one of .* got 'abort'",
        finish_reason="abort",
    ),
]

TEXTS = [
    Odd("empty answer", answered(""), ["U:hi#A:[#]"]),
    Odd("empty answer that was cut", answered(""), error="the last answer has no token", finish_reason="length"),
    Odd("answer that was cut", answered("no"), ["U:hi#A:[no]"], finish_reason="length"),
    Odd("empty user text", asked(""), ["U:#A:[ok#]"]),
    Odd("spaces and newlines around", answered("  ok \n\n"), ["U:hi#A:[  ok \n\n#]"]),
    Odd("spaces and newlines alone", answered(" \n"), ["U:hi#A:[ \n#]"]),
    Odd("emoji with joiners", answered(f"a{FAMILY}b"), [f"U:hi#A:[a{FAMILY}b#]"]),
    Odd("right-to-left text", asked("שלום") + answered("مرحبا"), ["U:שלום#A:[ok#]", "U:hi#A:[مرحبا#]"]),
    Odd("combining marks", answered("e\u0301a\u0308"), ["U:hi#A:[e\u0301a\u0308#]"]),
    Odd("combining mark first", answered("\u0301a"), ["U:hi#A:[\u0301a#]"]),
    Odd("control characters", answered("a\x1b[0m\r\x07"), ["U:hi#A:[a\x1b[0m\r\x07#]"]),
    Odd("very long word", answered("x" * 20_000), [f"U:hi#A:[{'x' * 20_000}#]"]),
    Odd("end of turn in an answer", answered("a<|eot|>b"), ["U:hi#A:[a#b#]"]),
    Odd(
        "end of turn in an earlier answer",
        messages(user("hi"), assistant("a<|eot|>"), user("q"), assistant("ok")),
        ["U:hi#A:[a##]U:q#A:[ok#]"],
    ),
    Odd("end of turn in a question", asked("a<|eot|>b"), ["U:a#b#A:[ok#]"]),
    Odd("header in an answer", answered("<|user|>a<|assistant|>b"), ["U:hi#A:[U:aA:b#]"]),
    Odd("header in a question", asked("<|assistant|>b"), ["U:A:b#A:[ok#]"]),
    Odd("template code in an answer", answered("{{ messages }}{% if %}"), ["U:hi#A:[{{ messages }}{% if %}#]"]),
    Odd("square brackets", answered("[a]"), ["U:hi#A:[[a]#]"]),
]

TARGETS = [
    Odd("no chat template", answered("ok"), error="has no chat template", template=None),
    Odd("broken chat template", answered("ok"), error="refuses the chat", template="{% for %}"),
    Odd("template without end of turn", answered("ok"), error="writes no end-of-turn token", template=NO_ENDS),
    Odd("template without markers", answered("ok"), [f"{HI}[ok<|im_end|>]"], template=CHATML),
    Odd("template with markers", answered("ok"), [f"{HI}[ok<|im_end|>]"], template=MARKED),
    Odd("end of turn unlike end of text", answered("ok"), ["<|bos|>U:hi#A:[ok#]"], template=TWO_ENDS),
    Odd("tokenizer without end of text", answered("ok"), [PAIR_TEXT], eos_token=None),
    Odd("cut within an answer", LONG, ["U:hi#A:[no#]U:q#A:[o]"], max_length=13),
    Odd("cut within a prompt", LONG, ["U:hi#A:[no#]"], max_length=10),
    Odd("cut before the end of turn", LONG, ["U:hi#A:[no]"], max_length=7),
    Odd("cut before every answer", LONG, [""], max_length=5),
    Odd("cut at nothing", LONG, [""], max_length=0),
    Odd("exactly as long as allowed", LONG, ["U:hi#A:[no#]U:q#A:[on#]"], max_length=15),
]


def learnt_texts(path: Path, odd: Odd) -> list[str]:
    tokenizer = build_tokenizer(odd.template, eos_token=odd.eos_token)
    records, texts = open_records(str(path)), []
    for index, record in enumerate(records):
        chats = render_chats(tokenizer, chat_of(record, records.where(index)), finish_reason=odd.finish_reason)
        texts += [shown(tokenizer, trim(chat, odd.max_length)) for chat in chats]
    return texts


def shown(tokenizer: PreTrainedTokenizerFast, chat: RenderedChat) -> str:
    text = marked(tokenizer, chat)
    for token, sign in SIGNS.items():
        text = text.replace(token, sign)
    return text


@pytest.mark.parametrize("odd", [*FILES, *FORMATS, *TURNS, *TEXTS, *TARGETS], ids=lambda odd: odd.name)
def test_odd_input_is_learnt_as_marked_by_hand_or_is_one_error(odd: Odd, tmp_path: Path) -> None:
    path, content = tmp_path / "x.jsonl", odd.content
    lines = content if isinstance(content, bytes) else "".join(json.dumps(row) + "\n" for row in content).encode()
    path.write_bytes(lines)

    def run() -> list[str]:
        if odd.ids is not None:
            assert [prompt.id for prompt in read_prompts(path)] == odd.ids
        return learnt_texts(path, odd)

    if odd.error is None:
        assert run() == odd.texts
        return
    with pytest.raises(ValueError, match=odd.error) as caught:
        run()
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)


def test_slow_tokenizer_is_one_error() -> None:
    tokenizer = SlowTokenizer(name_or_path="slow")
    tokenizer.chat_template = SHORT
    chat = chat_of({"prompt": "hi", "response": "ok"}, "here")
    with pytest.raises(ValueError, match="'slow' gives no character offsets; load it with use_fast=True"):
        render_chats(tokenizer, chat, finish_reason="stop")


def test_catalogue_is_large_and_names_each_case_once() -> None:
    names = [odd.name for odd in (*FILES, *FORMATS, *TURNS, *TEXTS, *TARGETS)]
    assert len(set(names)) == len(names) >= 50
    assert all(re.compile(odd.error) for odd in (*FILES, *FORMATS, *TURNS, *TEXTS, *TARGETS) if odd.error)
