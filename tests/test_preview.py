"""What the preview shows of records: every character, the supervised ones set apart, and true counts."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat import RenderedChat, render_chats
from data.messages import Chat
from data.preview import BLUE, GREEN, PLAIN, preview
from tests.chat_templates import CHATML, QWEN3, assistant, build_tokenizer, user

TOKENIZER = build_tokenizer(CHATML)


def chat_of(content: str) -> RenderedChat:
    [chat] = render_chats(TOKENIZER, Chat([user("hi"), assistant(content)], None), finish_reason="stop")
    return chat


def test_supervised_tokens_stand_in_brackets_under_their_counts() -> None:
    chat = chat_of("no")
    num_tokens = len(chat.input_ids)
    assert preview(TOKENIZER, [chat], colour=False) == (
        f"⟦supervised⟧: 3 of {num_tokens} tokens supervised ({3 / num_tokens:.1%}) in 1 records\n"
        f"--- record 0: 3 of {num_tokens} tokens supervised ({3 / num_tokens:.1%})\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n\n"
    )


def test_supervised_tokens_are_green_and_special_ones_blue() -> None:
    text = preview(TOKENIZER, [chat_of("no\nok")], colour=True)
    legend, _, *rest = text.split("\n")
    assert legend.startswith(f"{GREEN}supervised{PLAIN}, {BLUE}special token{PLAIN}: ")
    start, end = f"{BLUE}<|im_start|>{PLAIN}", f"<|im_end|>{PLAIN}"
    assert "\n".join(rest) == (
        f"{start}user\nhi{BLUE}{end}\n{start}assistant\n{GREEN}no↵{PLAIN}\n{GREEN}ok{PLAIN}{GREEN}{BLUE}{end}\n\n"
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(content=st.text("a é😀👩‍👩‍👧 مرحبا e\u0301\n", max_size=12))
def test_characters_of_several_tokens_are_whole(content: str) -> None:
    shown = preview(TOKENIZER, [chat_of(content)], colour=False)
    assert f"⟦{content}<|im_end|>⟧" in shown
    coloured = preview(TOKENIZER, [chat_of(content)], colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).replace("↵", "").endswith(f"assistant\n{content}<|im_end|>\n\n")


def test_control_characters_cannot_reach_the_terminal() -> None:
    shown = preview(TOKENIZER, [chat_of("a\x1b[2J\x00\r\tb")], colour=False)
    assert "⟦a\\x1b[2J\\x00\\x0d\tb<|im_end|>⟧" in shown


def test_every_record_is_shown_and_counted() -> None:
    tokenizer = build_tokenizer(QWEN3)
    messages = [user("hi"), assistant("ok", reasoning_content="hm"), user("q"), assistant("no")]
    chats = render_chats(tokenizer, Chat(messages, None), finish_reason="stop")
    legend, *lines = preview(tokenizer, chats, colour=False).splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("---")] == ["--- record 0", "--- record 1"]
    total, supervised = sum(len(chat.input_ids) for chat in chats), sum(sum(chat.loss_mask) for chat in chats)
    assert f"{supervised} of {total} tokens" in legend and legend.endswith("in 2 records")


@pytest.mark.parametrize("colour", [False, True])
def test_records_without_supervision_or_tokens_are_shown_too(colour: bool) -> None:
    chats = [RenderedChat([], []), RenderedChat(TOKENIZER("hi")["input_ids"], [False] * 3)]
    shown = preview(TOKENIZER, chats, colour=colour)
    assert "record 0: 0 of 0 tokens supervised\n" in shown
    assert "record 1: 0 of 3 tokens supervised (0.0%)\n" in shown
