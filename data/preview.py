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
    """The text of each run of like tokens: tokens alone would tear characters apart."""
    added_ids = set(tokenizer.added_tokens_decoder) if colour else set()
    kinds = [(on, id in added_ids) for on, id in zip(chat.loss_mask, chat.input_ids, strict=True)]
    for (is_supervised, is_special), run in groupby(range(len(kinds)), key=kinds.__getitem__):
        text = tokenizer.decode([chat.input_ids[index] for index in run])
        assert isinstance(text, str), type(text)
        text = text.translate(CONTROL)
        if colour:
            yield _styled(text, (GREEN if is_supervised else "") + (BLUE if is_special else ""))
        else:
            yield f"⟦{text}⟧" if is_supervised else text


def _styled(text: str, style: str) -> str:
    """Line by line, as terminals paint on to the right of a newline; a supervised newline is shown by an arrow."""
    if not style:
        return text
    lines = text.replace("\n", "↵\n" if GREEN in style else "\n").split("\n")
    return "\n".join(f"{style}{line}{PLAIN}" if line else line for line in lines)
