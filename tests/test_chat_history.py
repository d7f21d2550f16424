"""Chats with several answers, reasoning and tool calls, in templates after those of well-known targets."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data.chat import RenderedChat, Supervise, render_chats, render_prompt
from data.messages import Chat, Message
from tests.chat_templates import (
    DEEPSEEK_R1,
    GEMMA,
    LLAMA3,
    MARKED,
    MISTRAL,
    QWEN3,
    SMOLLM3,
    assistant,
    build_tokenizer,
    call,
    marked,
    runs_of,
    system,
    tool,
    user,
)

HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
Q = HI.replace("hi", "q")
BLOCK = "<think>\n\n</think>\n\n"
TWO_ANSWERS = [user("hi"), assistant("ok"), user("q"), assistant("no")]


def render(
    template: str, messages: list[Message], finish_reason: str | None = "stop", tools: Any = None, **options: Any
) -> list[str]:
    """The records as marked text."""
    tokenizer = build_tokenizer(template)
    chats = render_chats(tokenizer, Chat(messages, tools), finish_reason=finish_reason, **options)
    return [marked(tokenizer, chat) for chat in chats]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, f"{HI}[ok<|im_end|>]\n{Q}[no<|im_end|>]\n"),
        (
            LLAMA3,
            "<|bos|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[ok<|eot_id|>]"
            "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[no<|eot_id|>]",
        ),
        (
            GEMMA,
            "<|bos|><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n[ok<end_of_turn>]\n"
            "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n[no<end_of_turn>]\n",
        ),
        (MISTRAL, "<|bos|>[INST] hi[/INST][ ok</s>][INST] q[/INST][ no</s>]"),
        (
            SMOLLM3,
            f"<|im_start|>system\nReasoning Mode: /think<|im_end|>\n{HI}[ok<|im_end|>]\n{Q}[no<|im_end|>]\n",
        ),
    ],
    ids=["qwen3", "llama3", "gemma", "mistral", "smollm3"],
)
def test_answers_that_stand_in_history_as_written_share_one_record(template: str, expected: str) -> None:
    assert render(template, TWO_ANSWERS) == [expected]


def test_prompt_that_opens_a_thinking_block_gives_each_answer_its_own_record() -> None:
    messages = [user("hi"), assistant("hm\n</think>\n\nok"), user("q"), assistant("so\n</think>\n\nno")]
    hi = "<|bos|><｜User｜>hi<｜Assistant｜>"
    assert render(DEEPSEEK_R1, messages) == [
        f"{hi}\n\nok<｜end▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>\n[so\n</think>\n\nno<｜end▁of▁sentence｜>]",
        f"{hi}<think>\n[hm\n</think>\n\nok<｜end▁of▁sentence｜>]",
    ]


def test_thinking_that_history_drops_is_learnt_after_its_own_prompt() -> None:
    thought = "<think>\nhm\n</think>\n\nok"
    for first in (assistant(thought), assistant("ok", reasoning_content="hm")):
        assert render(QWEN3, [user("hi"), first, user("q"), assistant("no")]) == [
            f"{HI}ok<|im_end|>\n{Q}[no<|im_end|>]\n",
            f"{HI}[{thought}<|im_end|>]\n",
        ]


@pytest.mark.parametrize("thinking", [None, True])
def test_thinking_is_part_of_the_answer_where_the_target_wrote_it(thinking: bool | None) -> None:
    whole = render(QWEN3, [user("hi"), assistant("ok", reasoning_content="hm")], thinking=thinking)
    assert whole == [f"{HI}[<think>\nhm\n</think>\n\nok<|im_end|>]\n"]
    cut = render(QWEN3, [user("hi"), assistant("to be", reasoning_content="hm")], "length", thinking=thinking)
    assert cut == [f"{HI}[<think>\nhm\n</think>\n\nto be]"]
    cut_in_thought = render(QWEN3, [user("hi"), assistant("", reasoning_content="t")], "length", thinking=thinking)
    assert cut_in_thought == [f"{HI}[<think>\nt]"]


def test_thinking_switched_off_stands_in_the_prompt_and_is_not_learnt() -> None:
    assert render(QWEN3, TWO_ANSWERS, thinking=False) == [
        f"{HI}ok<|im_end|>\n{Q}{BLOCK}[no<|im_end|>]\n",
        f"{HI}{BLOCK}[ok<|im_end|>]\n",
    ]
    head = "<|im_start|>system\nReasoning Mode: /no_think<|im_end|>\n"
    block = "<think>\n\n</think>\n"
    assert render(SMOLLM3, TWO_ANSWERS, thinking=False) == [
        f"{head}{HI}{block}[ok<|im_end|>]\n{Q}{block}[no<|im_end|>]\n"
    ]


def test_tool_calls_are_answers_and_tool_results_are_prompt() -> None:
    messages = [
        user("hi"),
        assistant("", tool_calls=[call("add", a=1, b="x")], reasoning_content="hm"),
        tool("2"),
        tool("3"),
        assistant("ok", reasoning_content="so"),
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    head = '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "add"}}<|im_end|>\n'
    request = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    results = "\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert render(QWEN3, messages, tools=tools) == [
        f"{head}{HI}[<think>\nhm\n</think>\n\n{request}<|im_end|>]\n<|im_start|>user{results}<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\nso\n</think>\n\nok<|im_end|>]\n"
    ]
    ends_with_call = render(QWEN3, messages[:2], "tool_calls", tools=tools)
    assert ends_with_call == [f"{head}{HI}[<think>\nhm\n</think>\n\n{request}<|im_end|>]\n"]


def test_thinking_block_that_the_template_adds_before_tool_calls_is_not_learnt() -> None:
    """Neither where the call ends the chat nor in history, which shows no such block; a block that was written is."""
    request = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    asked = [user("hi"), assistant("a", tool_calls=[call("add")])]
    assert render(QWEN3, asked) == [f"{HI}[a\n{request}<|im_end|>]\n"]
    assert render(QWEN3, [user("hi"), assistant("", tool_calls=[call("add")])]) == [f"{HI}[{request}<|im_end|>]\n"]
    whole = [*asked, tool("2"), assistant("ok")]
    assert render(QWEN3, whole) == [
        f"{HI}[a\n{request}<|im_end|>]\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[ok<|im_end|>]\n"
    ]
    for written in (assistant(f"{BLOCK}a", tool_calls=[call("add")]), assistant("a", reasoning_content="hm")):
        [text] = render(QWEN3, [user("hi"), written])
        assert text.startswith(f"{HI}[<think>\n")


def test_markers_fit_tool_calls_whose_added_thinking_block_is_left_out() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>' + message.content }}{% else %}"
        "{{ '<|assistant|><think></think>' }}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% for call in message.tool_calls or [] %}{{ '<tool_call>' }}{% generation %}{{ call.function.name }}"
        "{% endgeneration %}{% endfor %}{% generation %}{{ '<|eot|>' }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    texts = render(template, [user("hi"), assistant("ok", tool_calls=[call("add")])])
    assert texts == ["<|user|>hi<|assistant|>[ok]<tool_call>[add<|eot|>]"]


def test_tool_call_that_closes_its_turn_otherwise_ends_with_its_last_end_token() -> None:
    other_end = QWEN3.replace("{{- '<|im_end|>\n' }}", "{{- '<|eot|>' if message.tool_calls else '<|im_end|>' }}")
    [text] = render(other_end, [user("hi"), assistant("a", tool_calls=[call("add")])], thinking=False)
    assert text.endswith('[a\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|eot|>]')


def test_system_prompt_that_moves_to_the_last_user_turn_gives_each_answer_its_own_record() -> None:
    assert render(MISTRAL, [system("s"), *TWO_ANSWERS]) == [
        "<|bos|>[INST] hi[/INST] ok</s>[INST] s\n\nq[/INST][no</s>]",
        "<|bos|>[INST] s\n\nhi[/INST][ok</s>]",
    ]


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, SMOLLM3, MISTRAL, DEEPSEEK_R1])
def test_only_the_last_answer_is_learnt_on_request(template: str) -> None:
    tokenizer = build_tokenizer(template)
    first, *_ = render_chats(tokenizer, Chat(TWO_ANSWERS, None), finish_reason=None)
    [last] = render_chats(tokenizer, Chat(TWO_ANSWERS, None), finish_reason=None, supervise=Supervise.last)
    assert last.input_ids == first.input_ids
    assert learnt(tokenizer, last) == learnt(tokenizer, first)[-1:]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("{% generation %}{{ text }}{% endgeneration %}{{ end }}", "[no<|im_end|>]"),
        ("{% generation %}{{ text + end }}{% endgeneration %}", "[no<|im_end|>]"),
        ("{{ text[:1] }}{% generation %}{{ text[1:] + end }}{% endgeneration %}", "n[o<|im_end|>]"),
        ("{% generation %}{{ text[:1] }}{% endgeneration %}{{ text[1:] + end }}", "[n]o<|im_end|>"),
    ],
)
def test_only_what_the_markers_enclose_is_learnt(marks: str, expected: str) -> None:
    template = marked_by(marks)
    [chat] = render(template, [user("hi"), assistant("no"), user("q"), assistant("no")])
    assert chat == f"{HI}{expected}\n{Q}{expected}\n"
    [cut] = render(template, [user("hi"), assistant("no")], "length")
    assert cut == HI + expected.replace("<|im_end|>", "")


def test_empty_answer_between_markers_is_its_end_of_turn() -> None:
    template = marked_by("{% generation %}{{ text }}{% endgeneration %}{{ end }}")
    assert render(template, [user("hi"), assistant("")]) == [f"{HI}[<|im_end|>]\n"]


def test_answer_as_given_is_learnt_whatever_the_markers_of_its_rendering() -> None:
    template = marked_by("{{ '<think>\n\n</think>\n\n' }}{% generation %}{{ text + end }}{% endgeneration %}")
    assert render(template, [user("hi"), assistant("no")]) == [f"{HI}[no<|im_end|>]\n"]


def test_markers_that_leave_every_answer_out_are_an_error() -> None:
    template = marked_by("{{ text + end }}{% generation %}{% endgeneration %}")
    with pytest.raises(ValueError, match=r"generation markers of the chat template of .* leave every answer out"):
        render(template, [user("hi"), assistant("no")])


def marked_by(marks: str) -> str:
    return MARKED.replace(
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{% set text = message['content'] %}{% set end = '<|im_end|>' %}" + marks,
    )


@pytest.mark.parametrize(
    ("template", "message", "options", "error"),
    [
        (
            DEEPSEEK_R1,
            assistant("ok", reasoning_content="hm"),
            {},
            "does not show the reasoning_content and content of",
        ),
        (LLAMA3, assistant("", tool_calls=[call("add")]), {}, "does not show the tool_calls of message 1"),
        (QWEN3, assistant("ok", reasoning_content="hm"), {"thinking": False}, "does not show the reasoning_content"),
        (
            QWEN3.replace("content = message.content", "content = '' if message.tool_calls else message.content"),
            assistant("ok", tool_calls=[call("add")]),
            {},
            "does not show the content of message 1",
        ),
        (
            QWEN3,
            assistant("", tool_calls=[call("add")]),
            {"finish_reason": "length"},
            "message 1 has tool calls and finish_reason='length'",
        ),
        (QWEN3, assistant("ok"), {"finish_reason": "abort"}, "finish_reason must be one of .* got 'abort'"),
        (GEMMA, user("q"), {}, "a chat needs an assistant turn"),
    ],
)
def test_answers_that_no_record_can_show_as_written_are_one_error(
    template: str, message: Message, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        render(template, [user("hi"), message], **options)


def test_tools_and_thinking_reach_the_prompt() -> None:
    tokenizer = build_tokenizer(QWEN3)
    tools = [{"type": "function", "function": {"name": "add"}}]
    for thinking in (None, True, False):
        ids = render_prompt(tokenizer, [user("hi")], tools=tools, thinking=thinking)
        assert tokenizer.decode(ids) == (
            '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "add"}}<|im_end|>\n'
            f"{HI}{BLOCK if thinking is False else ''}"
        )


def learnt(tokenizer: PreTrainedTokenizerFast, chat: RenderedChat) -> list[str]:
    return [text for on, text in runs_of(tokenizer, chat) if on]


TARGETS = {
    "qwen3": (build_tokenizer(QWEN3), "<|im_end|>"),
    "llama3": (build_tokenizer(LLAMA3), "<|eot_id|>"),
    "gemma": (build_tokenizer(GEMMA), "<end_of_turn>"),
    "mistral": (build_tokenizer(MISTRAL), "</s>"),
    "smollm3": (build_tokenizer(SMOLLM3), "<|im_end|>"),
    "deepseek_r1": (build_tokenizer(DEEPSEEK_R1), "<｜end▁of▁sentence｜>"),
}
# No letter of a prompt occurs in an answer or an end of turn.
PROMPT_TEXTS, ANSWER_TEXTS = st.text("UVW \n", max_size=6), st.text("ok é😀\n", max_size=6)
THOUGHTS = st.text("hm\n", min_size=1, max_size=5).filter(lambda text: text.strip() != "")


@st.composite
def chats(draw: st.DrawFn) -> tuple[str, bool | None, list[Message]]:
    """A target, its thinking switch, and a chat that ends with an answer."""
    name, thinking = draw(st.sampled_from(list(TARGETS))), draw(st.sampled_from([None, True, False]))
    messages = [system(draw(PROMPT_TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user("U" + draw(PROMPT_TEXTS)))
        answer = assistant(draw(ANSWER_TEXTS))
        if name == "qwen3" and thinking is not False and draw(st.booleans()):
            answer["reasoning_content"] = draw(THOUGHTS)
        if name == "qwen3" and draw(st.booleans()):
            messages += [answer | {"tool_calls": [call("get", key="é")]}, tool(draw(PROMPT_TEXTS))]
            answer = assistant(draw(ANSWER_TEXTS))
        messages.append(answer)
    return name, thinking, messages


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(case=chats())
def test_every_answer_is_learnt_once_after_what_inference_shows(case: tuple[str, bool | None, list[Message]]) -> None:
    name, thinking, messages = case
    tokenizer, end = TARGETS[name]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    records = render_chats(tokenizer, Chat(messages, None), finish_reason="stop", thinking=thinking)
    prompts = {index: render_prompt(tokenizer, messages[:index], thinking=thinking) for index in turns}

    ends_with = []
    for record in records:
        last = len(record.loss_mask) - record.loss_mask[::-1].index(True)
        first = last - record.loss_mask[:last][::-1].index(False)
        ends_with += [index for index in turns if prompts[index] == record.input_ids[:first]]
    assert ends_with[0] == turns[-1] and len(ends_with) == len(records)

    runs = [run for record in records for run in learnt(tokenizer, record)]
    for run in runs:
        assert run.endswith(end) and not set(run) & set("UVW")
    assert sorted(visible(run.removesuffix(end)) for run in runs) == sorted(visible_answer(messages[i]) for i in turns)


def visible(text: str) -> str:
    """Templates strip answers, and a token merged across the start of an earlier one is not learnt."""
    return "".join(text.replace("<think>\n\n</think>", "").split())


def visible_answer(message: Message) -> str:
    thought = f"<think>{message['reasoning_content']}</think>" if "reasoning_content" in message else ""
    request = '<tool_call>{"name": "get", "arguments": {"key": "é"}}</tool_call>' if "tool_calls" in message else ""
    return visible(thought + message["content"] + request)
