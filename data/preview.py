"""Rendered chats for the eye: what is learnt and what is not, token by token, before hours are spent on it."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from data.chat import RenderedChat

GREEN, BLUE, PLAIN = "\x1b[30;42m", "\x1b[34m", "\x1b[0m"
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\n\t"}
"""Shown by their number: a terminal would obey them."""


def preview(tokenizer: PreTrainedTokenizerBase, chats: Sequence[RenderedChat], *, colour: bool) -> str:
    """The text of each record under a line of counts, supervised tokens set apart, and a legend.

    With `colour` supervised tokens have a green background and special tokens are blue (ANSI); without it supervised
    tokens stand in ⟦ ⟧. Characters are whole where several tokens make one up.
    """
    legend = f"{GREEN}supervised{PLAIN}, {BLUE}special token{PLAIN}" if colour else "⟦supervised⟧"
    parts = [f"{legend}: {_counts(chats)} in {len(chats)} records"]
    for index, chat in enumerate(chats):
        parts.append(f"--- record {index}: {_counts([chat])}\n{''.join(_runs(tokenizer, chat, colour=colour))}")
    return "\n".join(parts) + "\n"


def _counts(chats: Sequence[RenderedChat]) -> str:
    num_tokens = sum(len(chat.input_ids) for chat in chats)
    num_supervised = sum(sum(chat.loss_mask) for chat in chats)
    share = f" ({num_supervised / num_tokens:.1%})" if num_tokens else ""
    return f"{num_supervised} of {num_tokens} tokens supervised{share}"


def _runs(tokenizer: PreTrainedTokenizerBase, chat: RenderedChat, *, colour: bool) -> Iterator[str]:
    """The text of each run of tokens that are all supervised or all not: tokens alone would tear characters apart."""
    pairs = zip(chat.loss_mask, chat.input_ids, strict=True)
    for is_supervised, run in groupby(pairs, key=lambda pair: pair[0]):
        ids = [id for _, id in run]
        if not colour:
            text = _text(tokenizer, ids)
            yield f"⟦{text}⟧" if is_supervised else text
            continue
        special_ids = set(tokenizer.all_special_ids)
        for is_special, part in groupby(ids, key=special_ids.__contains__):
            style = (GREEN if is_supervised else "") + (BLUE if is_special else "")
            yield _styled(_text(tokenizer, list(part)), style)


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), type(text)
    return text.translate(CONTROL)


def _styled(text: str, style: str) -> str:
    """Each line on its own: terminals would paint the rest of a line after a newline in the background colour."""
    return "\n".join(f"{style}{line}{PLAIN}" if style and line else line for line in text.split("\n"))
