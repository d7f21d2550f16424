"""Rendered chats against spans marked by hand, for small byte-level tokenizers with templates of several kinds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.chat import RenderedChat, render_chats, render_prompt
from data.messages import Chat, Message
from tests.chat_templates import (
    CHATML,
    DEFAULT_SYSTEM,
    MARKED,
    NO_ENDS,
    NO_HEADERS,
    SPACED,
    STRIPPING,
    THINKING_BLOCK,
    THINKING_PROMPT,
    TWO_ENDS,
    assistant,
    build_tokenizer,
    marked,
    user,
)


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], finish_reason: str | None = "stop", **options: Any
) -> list[RenderedChat]:
    return render_chats(tokenizer, Chat(messages, options.pop("tools", None)), finish_reason=finish_reason, **options)


def render_one(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], finish_reason: str | None = "stop", **options: Any
) -> RenderedChat:
    """The record of a chat whose every answer stands in one."""
    chats = render(tokenizer, messages, finish_reason, **options)
    assert len(chats) == 1, [marked(tokenizer, chat) for chat in chats]
    return chats[0]


TWO_TURNS = [{"role": "system", "content": "s"}, user("hi"), assistant("ok then"), user("more"), assistant("no")]
TWO_TURNS_IN_CHATML = (
    "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[ok then<|im_end|>]\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n[no<|im_end|>]\n"
)


@pytest.mark.parametrize("template", [CHATML, MARKED, STRIPPING, DEFAULT_SYSTEM])
def test_every_answer_is_supervised_up_to_its_end_of_turn(template: str) -> None:
    tokenizer = build_tokenizer(template)
    chat = render_one(tokenizer, TWO_TURNS)
    assert marked(tokenizer, chat) == TWO_TURNS_IN_CHATML
    assert chat.input_ids == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]


def test_mask_equals_the_generation_markers_of_a_template_that_has_them() -> None:
    tokenizer = build_tokenizer(MARKED)
    for messages in (TWO_TURNS, [user("hi"), assistant(" ok\n"), user("q"), assistant("")]):
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ours = render_one(tokenizer, messages, None)
        assert ours.input_ids == theirs["input_ids"]
        assert [int(on) for on in ours.loss_mask] == theirs["assistant_masks"]


def test_end_of_turn_is_supervised_and_end_of_text_is_not() -> None:
    tokenizer = build_tokenizer(TWO_ENDS)
    chat = render_one(tokenizer, [user("hi"), assistant("ok"), user("q"), assistant("no")])
    assert marked(tokenizer, chat) == (
        "<|bos|><|user|>hi<|eot|><|assistant|>[ok<|eot|>]<|user|>q<|eot|><|assistant|>[no<|eot|>]<|eos|>"
    )


def test_space_that_the_target_writes_before_its_answer_is_supervised() -> None:
    tokenizer = build_tokenizer(SPACED)
    messages = [user("hi"), assistant("ok"), user("q"), assistant("no")]
    assert tokenizer.decode(render_prompt(tokenizer, messages[:1])) == "Q hi A"
    chat = render_one(tokenizer, messages)
    assert marked(tokenizer, chat) == "Q hi A[ ok <|eos|>]Q q A[ no <|eos|>]"
    cut = render_one(tokenizer, messages, "length")
    assert marked(tokenizer, cut) == "Q hi A[ ok <|eos|>]Q q A[ no]"


def test_one_token_answer_at_index_zero_has_nothing_that_predicts_it() -> None:
    tokenizer = build_tokenizer(NO_HEADERS)
    alone = render_one(tokenizer, [assistant("ok")])
    assert alone.loss_mask == [False, True]
    assert marked(tokenizer, alone) == "ok[<|eot|>]"
    assert render_one(tokenizer, [assistant("")]).loss_mask == [False]
    longer = render_one(tokenizer, [assistant("ok"), user("hi"), assistant("no")])
    assert marked(tokenizer, longer) == "ok[<|eot|>]hi<|eot|>[no<|eot|>]"


def test_chat_that_an_assistant_opens_is_marked_after_its_header() -> None:
    tokenizer = build_tokenizer(DEFAULT_SYSTEM)
    chat = render_one(tokenizer, [assistant("ok"), user("hi"), assistant("no")])
    assert marked(tokenizer, chat) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n[ok<|im_end|>]\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[no<|im_end|>]\n"
    )


@pytest.mark.parametrize("content", ["ok  ", "ok\n", "ok \n\n", " ok", "é😀 ", "[ok"])
def test_white_space_of_answers_is_supervised_where_the_template_keeps_it(content: str) -> None:
    messages = [user("hi"), assistant(content), user("q"), assistant(content)]
    for template, kept in ((CHATML, content), (STRIPPING, content.strip())):
        tokenizer = build_tokenizer(template)
        chat = render_one(tokenizer, messages)
        supervised = [id for id, on in zip(chat.input_ids, chat.loss_mask, strict=True) if on]
        assert tokenizer.decode(supervised) == f"{kept}<|im_end|>" * 2


def test_answer_that_writes_an_end_of_turn_is_supervised_to_its_real_end() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = render_one(tokenizer, [user("hi"), assistant("a<|im_end|>b")])
    assert marked(tokenizer, chat).endswith("assistant\n[a<|im_end|>b<|im_end|>]\n")


@pytest.mark.parametrize("template", [CHATML, MARKED, STRIPPING, TWO_ENDS, THINKING_BLOCK])
def test_cut_answers_get_no_end_of_turn(template: str) -> None:
    tokenizer = build_tokenizer(template)
    messages = [user("hi"), assistant("ok"), user("q"), assistant("to be")]
    cut = render_one(tokenizer, messages, "length")
    whole = render_one(tokenizer, messages)
    assert marked(tokenizer, cut).endswith("[to be]")
    num_kept = len(cut.input_ids)
    assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[:num_kept], whole.loss_mask[:num_kept])
    assert sum(whole.loss_mask) == sum(cut.loss_mask) + 1, "the earlier answer keeps its end of turn"


def test_empty_answer_is_one_supervised_end_of_turn() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = render_one(tokenizer, [user("hi"), assistant("")])
    assert marked(tokenizer, chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]\n"
    with pytest.raises(ValueError, match="the last answer has no token"):
        render_one(tokenizer, [user("hi"), assistant("")], "length")


def test_prompt_ids_equal_inference_where_a_joint_tokenisation_would_merge() -> None:
    tokenizer = build_tokenizer(CHATML)
    messages = [user("hi"), assistant("\n\nok")]
    prompt = render_prompt(tokenizer, messages[:1])
    joint = tokenizer.apply_chat_template(messages)["input_ids"]
    assert joint[: len(prompt)] != prompt, "this tokenizer must merge over the boundary, or the test shows nothing"
    chat = render_one(tokenizer, messages)
    assert chat.input_ids[: len(prompt)] == prompt
    assert chat.loss_mask[: len(prompt)] == [False] * len(prompt)
    assert marked(tokenizer, chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[\n\nok<|im_end|>]\n"


def test_token_merged_across_the_start_of_an_earlier_answer_is_not_supervised() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = render_one(tokenizer, [user("hi"), assistant("\n\nok"), user("q"), assistant("no")])
    assert "assistant\n\n[\nok<|im_end|>]\n" in marked(tokenizer, chat)


def test_answer_gets_no_space_that_the_tokenizer_puts_before_any_text_it_sees_alone() -> None:
    tokenizer = build_tokenizer(TWO_ENDS)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("Ġ", prepend_scheme="first")
    assert tokenizer("no<|eot|>", add_special_tokens=False)["input_ids"][0] == tokenizer.convert_tokens_to_ids("Ġ")
    chat = render_one(tokenizer, [user("hi"), assistant("no")])
    assert marked(tokenizer, chat) == "<|bos|><|user|>hi<|eot|><|assistant|>[no<|eot|>]<|eos|>"


def test_space_that_ends_a_prompt_is_not_learnt_where_offsets_leave_spaces_out() -> None:
    tokenizer = build_tokenizer(
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Q' + message['content'] + 'A ' }}"
        "{% else %}{{ message['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat = render_one(tokenizer, [user("hi"), assistant("no"), user("q"), assistant(" on")])
    assert marked(tokenizer, chat) == "QhiA [no<|eot|>]QqA [ on<|eot|>]"


def test_end_of_turn_is_an_added_token_special_or_not_but_no_white_space() -> None:
    tokenizer = build_tokenizer(
        "Q{{ messages[0]['content'] }}A{% if messages[1:] %}{{ messages[1]['content'] }}  <e>{% endif %}"
    )
    tokenizer.add_tokens(["  ", "<e>"])
    chat = render_one(tokenizer, [user("hi"), assistant("no")])
    assert marked(tokenizer, chat) == "QhiA[no  <e>]"


TOKENIZER = build_tokenizer(CHATML)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(contents=st.lists(st.text("ok é😀\n", min_size=1, max_size=8), min_size=2, max_size=6))
def test_ids_begin_with_the_prompt_and_the_rest_is_the_answer(contents: list[str]) -> None:
    messages = [(user, assistant)[index % 2](content) for index, content in enumerate(contents)]
    messages = messages[: len(messages) // 2 * 2]
    chat = render_one(TOKENIZER, messages)
    prompt = render_prompt(TOKENIZER, messages[:-1])
    assert prompt == TOKENIZER.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert chat.input_ids[: len(prompt)] == prompt
    answer, mask = chat.input_ids[len(prompt) :], chat.loss_mask[len(prompt) :]
    assert TOKENIZER.decode(answer) == messages[-1]["content"] + "<|im_end|>\n"
    assert mask == [True] * (len(answer) - 1) + [False]


def test_messages_after_the_last_answer_are_left_out() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = render_one(tokenizer, [*TWO_TURNS, user("bye")])
    assert chat == render_one(tokenizer, TWO_TURNS)


def test_system_prompt_comes_from_the_messages_or_the_template_only() -> None:
    plain, default = build_tokenizer(CHATML), build_tokenizer(DEFAULT_SYSTEM)
    assert "system" not in plain.decode(render_prompt(plain, [user("hi")]))
    for messages, expected in (([user("hi")], "Be kind."), (TWO_TURNS, "s")):
        in_prompt = default.decode(render_prompt(default, messages[: messages.index(user("hi")) + 1]))
        in_chat = default.decode(render_one(default, [*messages, assistant("ok")], None).input_ids)
        for text in (in_prompt, in_chat):
            assert text.startswith(f"<|im_start|>system\n{expected}<|im_end|>\n<|im_start|>user")


def test_thinking_block_that_the_template_adds_to_the_last_answer_is_not_learnt() -> None:
    tokenizer = build_tokenizer(THINKING_BLOCK)
    assert "<think>" in tokenizer.decode(tokenizer.apply_chat_template([user("hi"), assistant("ok")])["input_ids"])
    chat = render_one(tokenizer, [user("hi"), assistant("ok"), user("q"), assistant("no")])
    assert "<think>" not in marked(tokenizer, chat)
    thought = render_one(tokenizer, [user("hi"), assistant("<think>\nhm")], "length")
    assert marked(tokenizer, thought).endswith("assistant\n[<think>\nhm]")


def test_answer_that_a_template_rewrites_in_history_gets_its_own_record() -> None:
    tokenizer = build_tokenizer(THINKING_BLOCK.replace("loop.last and ", ""))
    last, first = render(tokenizer, [user("hi"), assistant("ok"), user("q"), assistant("no")])
    hi, q = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nq<|im_end|>\n"
    block = "<think>\n\n</think>\n\n"
    assert marked(tokenizer, last) == f"{hi}{block}ok<|im_end|>\n{q}<|im_start|>assistant\n[no<|im_end|>]\n"
    assert marked(tokenizer, first) == f"{hi}[ok<|im_end|>]\n"


def test_answer_stands_after_what_the_generation_prompt_opens() -> None:
    tokenizer = build_tokenizer(THINKING_PROMPT)
    chat = render_one(tokenizer, [user("hi"), assistant("hm</think>ok\n")])
    assert marked(tokenizer, chat).endswith("<|im_start|>assistant\n<think>\n[hm</think>ok\n<|im_end|>]\n")
    chats = render(tokenizer, [user("hi"), assistant("ok"), user("q"), assistant("no")])
    last, first = (marked(tokenizer, chat) for chat in chats)
    assert last.endswith(
        "assistant\nok<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n[no<|im_end|>]\n"
    )
    assert first == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n[ok<|im_end|>]\n"


@pytest.mark.parametrize(
    ("template", "messages", "finish_reason", "message"),
    [
        (None, [user("hi"), assistant("ok")], None, "has no chat template"),
        (CHATML, [], None, "a chat needs an assistant turn"),
        (CHATML, [user("hi")], None, r"a chat needs an assistant turn, got roles \['user'\]"),
        (CHATML, [user("hi"), assistant("ok")], "max_tokens", "finish_reason must be one of .* got 'max_tokens'"),
        (NO_ENDS, [user("hi"), assistant("ok")], "stop", "no end-of-turn token"),
        ("{{ raise_exception('no roles') }}", [user("hi"), assistant("ok")], None, "refuses the chat: no roles"),
        ("{{ messages[0]['content'] }}", [user("hi"), assistant("ok")], None, "message 1 0 times, expected once"),
    ],
)
def test_unusable_chats_and_templates_are_one_clear_error(
    template: str | None, messages: list[dict[str, str]], finish_reason: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        render_one(build_tokenizer(template), messages, finish_reason=finish_reason)


def test_empty_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        render_prompt(build_tokenizer(CHATML), [])
