"""Every record format gives the same chat, and what no template could show is one error that names the message."""

from typing import Any

import pytest

from data.messages import Chat, chat_of, normalise_messages
from tests.chat_templates import assistant, call, system, tool, user

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
ADD = assistant("", tool_calls=[call("add", a=1)])


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [user("hi"), assistant("ok")]}, [user("hi"), assistant("ok")]),
        ({"messages": [{"role": "developer", "content": "s"}, user("hi")]}, [system("s"), user("hi")]),
        ({"messages": [user("hi") | {"content": [text("a"), text("b ")]}]}, [user("ab ")]),
        ({"messages": [user("hi") | {"name": "x", "extra": 1, "tool_calls": None}]}, [user("hi") | {"name": "x"}]),
        (
            {"messages": [{"role": None, "content": None, "name": None, "from": "human", "value": "hi"}]},
            [user("hi")],
        ),
        ({"messages": [assistant("ok", reasoning="hm")]}, [assistant("ok", reasoning_content="hm")]),
        ({"messages": [assistant("ok", reasoning_content="", tool_calls=[])]}, [assistant("ok")]),
        ({"messages": [{"role": "assistant", "reasoning_content": "hm"}]}, [assistant("", reasoning_content="hm")]),
        (
            {"messages": [{"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"}]},
            [tool("2") | {"tool_call_id": "c", "name": "add"}],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "hi"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "ok"},
                ]
            },
            [system("s"), user("hi"), ADD, tool("2"), assistant("ok")],
        ),
        (
            {"conversations": [{"from": "tool", "value": "2"}, {"from": "function", "value": "3"}]},
            [tool("2"), tool("3")],
        ),
        ({"conversations": [user("hi"), {"role": "gpt", "content": "ok"}]}, [user("hi"), assistant("ok")]),
        ({"turns": ["hi", "more"]}, [user("hi"), user("more")]),
        ({"prompt": "hi"}, [user("hi")]),
        ({"prompt": "hi", "response": "ok"}, [user("hi"), assistant("ok")]),
        ({"prompt": "hi", "completion": ""}, [user("hi"), assistant("")]),
        ({"prompt": "hi", "response": None}, [user("hi")]),
        (
            {"prompt": [system("s"), user("hi")], "completion": [assistant("ok")]},
            [system("s"), user("hi"), assistant("ok")],
        ),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [user("Add.\n\n1 2"), assistant("3")]),
        ({"instruction": "Add.", "input": "", "output": ""}, [user("Add."), assistant("")]),
        ({"instruction": "Add."}, [user("Add.")]),
        ({"prompt": "hi", "system": "s"}, [system("s"), user("hi")]),
        ({"messages": [system("own"), user("hi")], "system": "s"}, [system("own"), user("hi")]),
        ({"messages": None, "turns": None, "instruction": "x", "prompt": "hi"}, [user("hi")]),
        ({"prompt": "other", "conversations": [user("hi")]}, [user("hi")]),
    ],
)
def test_each_record_format_gives_its_messages(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert chat_of(record, "here") == Chat(messages, None)


@pytest.mark.parametrize(
    "raw",
    [
        [call("add", a=1)],
        [{"name": "add", "arguments": {"a": 1}}],
        [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
        '[{"name": "add", "arguments": {"a": 1}}]',
    ],
)
def test_tool_calls_are_read_into_one_form(raw: object) -> None:
    assert normalise_messages([{"role": "assistant", "content": None, "tool_calls": raw}], "here") == [ADD]


@pytest.mark.parametrize("arguments", [{}, "", "{}", None])
def test_call_without_arguments_has_none(arguments: object) -> None:
    raw = [{"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}]
    [message] = normalise_messages([assistant("", tool_calls=raw)], "here")
    assert message["tool_calls"] == [{"id": "c", **call("now")}]


@pytest.mark.parametrize(
    ("tools", "read"), [([TOOL], [TOOL]), ('[{"name": "add"}]', [{"name": "add"}]), ("", None), ("[]", None)]
)
def test_tools_are_a_list_or_its_json_text(tools: object, read: list[Any] | None) -> None:
    assert chat_of({"prompt": "hi", "tools": tools}, "here").tools == read


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({}, r"none of messages, conversations, turns, prompt, instruction among the fields \[\]"),
        ({"messages": []}, "here, messages: expected a non-empty list of messages"),
        ({"messages": "hi"}, "here, messages: expected a non-empty list of messages, got 'hi'"),
        ({"messages": ["hi"]}, "message 0 must be an object with role and content, got 'hi'"),
        ({"messages": [user("hi"), {"content": "x"}]}, "message 1 has unknown role None; use one of system, developer"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 0 has unknown role 'bot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"message 0 has unknown role \['user'\]"),
        ({"messages": [{"role": "user"}]}, r"message 0 \(user\) must have a text as content, got None"),
        ({"messages": [assistant("") | {"content": None}]}, "must have a text as content, got None"),
        ({"messages": [user("hi") | {"content": 5}]}, "must have a text as content, got 5"),
        ({"messages": [user("hi") | {"content": []}]}, r"must have a text as content, got \[\]"),
        ({"messages": [user("hi") | {"content": ["hi"]}]}, "got the part 'hi'"),
        (
            {"messages": [user("hi") | {"content": [{"type": "image", "url": "x"}]}]},
            "text parts as content, got the part",
        ),
        ({"messages": [user("hi") | {"content": [{"type": "audio", "text": "x"}]}]}, "text parts as content, got the"),
        ({"messages": [user("hi") | {"content": [{"type": "text"}]}]}, "text parts as content, got the part"),
        ({"messages": [user("hi"), assistant("\ud800")]}, r"message 1 \(assistant\) has '\\ud800', half a surrogate"),
        ({"messages": [user("hi") | {"tool_calls": [call("f")]}]}, r"\(user\) has tool_calls; only an assistant turn"),
        ({"messages": [user("hi") | {"reasoning": "hm"}]}, r"\(user\) has reasoning_content; only an assistant turn"),
        ({"messages": [user("hi") | {"name": 3}]}, "name must be a text, got 3"),
        ({"messages": [assistant("a", reasoning_content=[1])]}, r"reasoning_content must be a text, got \[1\]"),
        ({"messages": [assistant("", tool_calls={"name": 1})]}, "tool call 0 must name a function"),
        ({"messages": [assistant("", tool_calls="f(")]}, r"tool_calls: broken JSON .* in 'f\('"),
        ({"messages": [assistant("", tool_calls="3")]}, "tool_calls must be a list of calls, got '3'"),
        ({"messages": [assistant("", tool_calls=[3])]}, "tool call 0 must name a function and its arguments, got 3"),
        (
            {"messages": [assistant("", tool_calls=[call("f"), {"name": "f", "arguments": "{"}])]},
            "tool call 1: arguments: broken",
        ),
        (
            {"messages": [assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])]},
            r"must be an object or .* got '\[1\]'",
        ),
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "tool_calls: broken JSON"),
        ({"conversations": [{"from": "function_call"}]}, "tool_calls must be a list of calls, got None"),
        ({"turns": "hi"}, "turns must be a list of user texts, got 'hi'"),
        ({"turns": []}, "here, turns: expected a non-empty list"),
        ({"turns": ["hi", 3]}, "here, turns: message 1 .* must have a text as content, got 3"),
        ({"prompt": 3}, "here, prompt: message 0 .* must have a text as content, got 3"),
        ({"prompt": "hi", "response": {"a": 1}}, "here, response: message 0 .* must have a text as content"),
        ({"instruction": "x", "input": 3}, "here: input must be a text, got 3"),
        ({"instruction": "x", "output": ["y"]}, r"here: output must be a text, got \['y'\]"),
        ({"prompt": "hi", "system": 3}, "here, system: message 0 .* must have a text as content, got 3"),
        ({"prompt": "hi", "tools": "{"}, "here, tools: broken JSON"),
        ({"prompt": "hi", "tools": ["add"]}, "here, tools must be a list of function descriptions"),
        ({"prompt": "hi", "tools": [{"name": "\udfff"}]}, "here, tools has .* half a surrogate pair"),
    ],
)
def test_each_unreadable_record_is_one_error_that_names_place_and_value(record: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        chat_of(record, "here")
    assert str(caught.value).startswith("here")


def test_messages_are_copies() -> None:
    raw = [user("hi"), assistant("", tool_calls=[call("add", a=1)])]
    read = normalise_messages(raw, "here")
    read[0]["content"] = "changed"
    read[1]["tool_calls"][0]["function"]["name"] = "changed"
    assert raw == [user("hi"), assistant("", tool_calls=[call("add", a=1)])]
