"""Chats as the target sees them: its own chat template renders, and render boundaries say which tokens are answers.

A training record is what inference shows the target as prompt, followed by what the target then wrote: an answer and
its end-of-turn token.

Ids. The ids before a record's last answer are `render_prompt` of the chat up to there, exactly; that answer is
tokenised on its own where a joint tokenisation would merge across the boundary. An earlier answer stands inside that
prompt as inference sees it, and a token that the tokenizer merged across its start belongs to the prompt.

Boundaries. An answer starts where the prompt of its own turn ends. A chat rendered with a probe in place of its last
answer shows what closes the turn, whatever the template does to contents. `{% generation %}` markers are therefore not
needed; in a template that has them, what they leave out of an answer is not learnt.

History. Templates may show an earlier answer otherwise than the target wrote it (without its thinking, say). A record
would then teach it after a prompt, or in words, that inference never has, so such an answer gets a record of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.messages import Chat, Message

PROBE = "\ue000answer\ue000"
"""Stands in for an answer; private-use characters, which no template strips and no chat holds."""

FINISH_REASONS = (None, "stop", "tool_calls", "length")

Span = tuple[int, int]
"""Characters of a text from the first to before the second."""


class Supervise(StrEnum):
    """Which answers of a chat are learnt."""

    all = "all"
    last = "last"


@dataclass(frozen=True)
class RenderedChat:
    input_ids: list[int]  # [S]
    loss_mask: list[bool]  # [S], True = the target's own token: answers and their end-of-turn tokens


@dataclass(frozen=True)
class _Tokens:
    """Token ids of a text and the characters at which each token starts and stops."""

    ids: list[int]
    offsets: list[Span]


@dataclass(frozen=True)
class _Turn:
    """An assistant turn as it was at inference, in text."""

    prompt: str
    answer: str
    closing: str  # up to and with the end-of-turn token; empty for an answer that was cut
    rest: str  # what the template writes after the end of turn
    unmarked: list[Span]  # parts of prompt + answer + closing that the template's markers leave out

    @property
    def text(self) -> str:
        return self.prompt + self.answer + self.closing


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool | None = None,
) -> list[int]:
    """Ids that ask the target for the next assistant turn: `apply_chat_template` with a generation prompt.

    `thinking` is the template's `enable_thinking`, not given to it where None. Nothing is added to `messages`: a
    default system prompt comes from the template or not at all.
    """
    if not messages:
        raise ValueError("messages is empty: a prompt needs at least one user turn")
    template = _Template(tokenizer, tools, thinking)
    return _tokenise(tokenizer, template.render(messages, generation_prompt=True)).ids


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    finish_reason: str | None,
    thinking: bool | None = None,
    supervise: Supervise = Supervise.all,
) -> list[RenderedChat]:
    """Records in which every answer of the chat is learnt once, with its end-of-turn token.

    The first is the chat up to its last answer, in which the earlier answers are learnt that stand there as the target
    wrote them; each other one follows as a record that ends with it. With `Supervise.last` there is only the first, and
    only its last answer is learnt.

    `finish_reason="length"` says that the last answer was cut: its ids end with its content, as no end of turn was
    generated. An empty answer is allowed unless it was cut; its one supervised token is the end of turn. An answer
    stands as the template renders it (stripped, with its tool calls and reasoning), but without what the template puts
    there that the message does not say (an empty thinking block, say).
    The first token of a record is never supervised: nothing predicts it.

    Raises ValueError for a chat without an assistant turn, for a template whose turns cannot be told apart, and where
    the template does not show the reasoning or the tool calls of an answer.
    """
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {finish_reason!r}")
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"a chat needs an assistant turn, got roles {[message['role'] for message in chat.messages]}")
    template = _Template(tokenizer, chat.tools, thinking)
    last = template.turn(chat.messages[: turns[-1] + 1], cut=finish_reason == "length")
    earlier_turns = [] if supervise is Supervise.last else turns[:-1]
    earlier = [template.turn(chat.messages[: index + 1], cut=False) for index in earlier_turns]
    shown = [turn for turn in earlier if last.prompt.startswith(turn.text)]
    rewritten = [turn for turn in earlier if turn not in shown]
    records = [_record(tokenizer, last, shown), *(_record(tokenizer, turn, []) for turn in rewritten)]
    if template.has_markers and not any(any(record.loss_mask) for record in records):
        raise ValueError(
            f"the generation markers of the chat template of {tokenizer.name_or_path!r} leave every answer out;"
            " move them around the answers in chat_template, or remove them"
        )
    return records


@dataclass(frozen=True)
class _Template:
    """The chat template of a tokenizer, with what one chat and target pass to it."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[dict[str, Any]] | None
    thinking: bool | None

    @property
    def has_markers(self) -> bool:
        return "endgeneration" in self._source()

    def turn(self, chat: list[Message], *, cut: bool) -> _Turn:
        """The last message of `chat`, an assistant turn."""
        message, prompt = chat[-1], self._prompt(chat)
        closing = self._closing(chat, cut=cut)
        rendered, marks = self._render_marked(chat)
        answer = None
        if rendered.startswith(prompt) and rendered[len(prompt) :].endswith(closing):
            answer = rendered[len(prompt) :].removesuffix(closing)
        if "tool_calls" in message or "reasoning_content" in message:
            if answer is None and "tool_calls" in message and rendered.startswith(prompt):
                answer, closing = self._before_last_end(rendered[len(prompt) :])
            inserted = self._inserted(chat, prompt) if answer is not None else ""
            if answer is not None and inserted and answer.startswith(inserted):
                answer, rendered = answer[len(inserted) :], prompt + rendered[len(prompt) + len(inserted) :]
                marks = marks and [(start - len(inserted), stop - len(inserted)) for start, stop in marks]
            self._check_shown(message, answer, len(chat) - 1)
        elif answer is None or answer.strip() != message["content"].strip():
            answer, marks = message["content"], None
        assert answer is not None
        end = 0 if cut else self._end_of_turn(closing)
        stop = len(prompt) + len(answer)
        unmarked = [] if marks is None else list(_gaps(marks, len(prompt), stop, len(rendered)))
        return _Turn(prompt, answer, closing[:end], "" if cut else closing[end:], unmarked)

    def render(self, messages: list[Message], *, generation_prompt: bool) -> str:
        with self._refusals():
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self._tools(),
                chat_template=self._source(),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options(),
            )
        assert isinstance(text, str), type(text)
        return text

    def _prompt(self, chat: list[Message]) -> str:
        """What the target had read when it wrote the last message of `chat`."""
        if len(chat) > 1:
            return self.render(chat[:-1], generation_prompt=True)
        # No inference starts from an empty chat, and templates refuse one: the turn's own header is its prompt.
        return self._around(chat, {"role": "assistant", "content": PROBE})[0]

    def _closing(self, chat: list[Message], *, cut: bool) -> str:
        """What the template writes after the last answer of `chat`; after its reasoning where it was cut in there."""
        message = chat[-1]
        if not cut:
            return self._around(chat, {"role": "assistant", "content": PROBE})[1]
        if "tool_calls" in message:
            raise ValueError(
                f"message {len(chat) - 1} has tool calls and finish_reason='length', so where the target was cut is not"
                " known; drop such a chat"
            )
        field = "content" if message["content"] or "reasoning_content" not in message else "reasoning_content"
        return self._around(chat, {**message, field: PROBE})[1]

    def _around(self, chat: list[Message], probe: Message) -> tuple[str, str]:
        """The rendered text before and after the probe, which stands in for the last message of `chat`."""
        parts = self.render([*chat[:-1], probe], generation_prompt=False).split(PROBE)
        if len(parts) != 2:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} renders the content of message {len(chat) - 1}"
                f" {len(parts) - 1} times, expected once; give the tokenizer another chat_template"
            )
        return parts[0], parts[1]

    def _inserted(self, chat: list[Message], prompt: str) -> str:
        """What the template puts between the prompt and the last answer of `chat` though the message does not say it.

        An empty thinking block, say. It shows before a plain answer too; white space counts as the target's.
        """
        message = chat[-1]
        before, _ = self._around(chat, {"role": "assistant", "content": PROBE})
        inserted = before.removeprefix(prompt) if before.startswith(prompt) else ""
        is_said = "reasoning_content" in message or message["content"].lstrip().startswith(inserted.strip())
        return "" if is_said else inserted

    def _before_last_end(self, text: str) -> tuple[str, str]:
        """The parts of `text` before and from its last end-of-turn token: turns with tool calls may close otherwise."""
        tokens, end_ids = _tokenise(self.tokenizer, text), _end_ids(self.tokenizer)
        starts = [start for id, (start, _) in zip(tokens.ids, tokens.offsets, strict=True) if id in end_ids]
        return (text[: starts[-1]], text[starts[-1] :]) if starts else (text, "")

    def _check_shown(self, message: Message, answer: str | None, index: int) -> None:
        """Raises ValueError where the rendered answer (None: not known) lacks a part of the message."""
        parts = {
            "reasoning_content": [message.get("reasoning_content", "")],
            "tool_calls": [call["function"]["name"] for call in message.get("tool_calls", [])],
            "content": [message["content"]],
        }
        hidden = [
            field
            for field, texts in parts.items()
            if field in message and (answer is None or not all(text.strip() in answer for text in texts))
        ]
        if hidden:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not show the {' and '.join(hidden)} of"
                f" message {index} after the prompt of that turn, so what the target wrote is not known; give the turn"
                " as one content, as the target wrote it, or the `thinking` that the chat was generated with"
            )

    def _end_of_turn(self, closing: str) -> int:
        """Where the end-of-turn token, the first added token of `closing`, stops."""
        tokens, end_ids = _tokenise(self.tokenizer, closing), _end_ids(self.tokenizer)
        for id, (_, stop) in zip(tokens.ids, tokens.offsets, strict=True):
            if id in end_ids:
                return stop
        raise ValueError("the chat template writes no end-of-turn token after an answer; add one to chat_template")

    def _render_marked(self, messages: list[Message]) -> tuple[str, list[Span] | None]:
        """The rendered text and what the template's markers enclose; None for a template without markers."""
        if not self.has_markers:
            return self.render(messages, generation_prompt=False), None
        with self._refusals():
            # What `apply_chat_template` calls: it gives the marked characters, not the tokens that touch them.
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=self._tools(),
                chat_template=self._source(),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self._options()},
            )
        return texts[0], [(int(start), int(stop)) for start, stop in marks[0]]

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (TemplateError, TypeError) as error:
            name = self.tokenizer.name_or_path
            raise ValueError(f"the chat template of {name!r} refuses the chat: {error}") from error

    def _tools(self) -> list[Any] | None:
        return None if self.tools is None else list(self.tools)

    def _options(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    def _source(self) -> str:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer {self.tokenizer.name_or_path!r} has no chat template;"
                " use an instruction-tuned target, or set tokenizer.chat_template to the format it was tuned on"
            )
        return self.tokenizer.get_chat_template(tools=self.tools)


def _gaps(marks: list[Span], start: int, stop: int, end: int) -> Iterator[Span]:
    """The parts of an answer from `start` to `stop` that no mark encloses.

    Marks may begin before the answer, with its header. The end of turn belongs to a mark that goes up to it: some
    templates leave it out. The last gap goes on to `end` where no mark does.
    """
    reached = start
    for first, last in sorted(marks):
        if first > reached:
            yield reached, first
        reached = max(reached, last)
    if not any(first <= stop <= last for first, last in marks):
        yield reached, end


def _record(tokenizer: PreTrainedTokenizerBase, turn: _Turn, shown: list[_Turn]) -> RenderedChat:
    """The record that ends with `turn`, in which the turns that its prompt shows are learnt too."""
    tokens, num_prompt_tokens = _tokenise_after(tokenizer, turn.prompt, turn.answer + turn.closing + turn.rest)
    if num_prompt_tokens == len(tokens.ids):
        raise ValueError("the last answer has no token: it is empty and was cut (finish_reason='length'); drop it")
    loss_mask, end_ids = [False] * len(tokens.ids), _end_ids(tokenizer)
    for earlier in shown:
        _supervise(loss_mask, tokens, earlier, _first_token(tokenizer, tokens, earlier.prompt), end_ids)
    _supervise(loss_mask, tokens, turn, num_prompt_tokens, end_ids)
    loss_mask[0] = False
    return RenderedChat(tokens.ids, loss_mask)


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> _Tokens:
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} gives no character offsets; load it with use_fast=True")
    # The template wrote the special tokens already.
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return _Tokens(encoding["input_ids"], encoding["offset_mapping"])


def _tokenise_after(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[_Tokens, int]:
    """Tokens of `prompt + answer` that begin with exactly the tokens of `prompt`, and the number of those.

    The joint tokenisation is preferred, as some tokenizers put a space before any text that they see alone.
    """
    head = _tokenise(tokenizer, prompt)
    joint = _tokenise(tokenizer, prompt + answer)
    if joint.ids[: len(head.ids)] == head.ids:
        return joint, len(head.ids)
    tail = _tokenise(tokenizer, answer)
    shifted = [(start + len(prompt), stop + len(prompt)) for start, stop in tail.offsets]
    return _Tokens(head.ids + tail.ids, head.offsets + shifted), len(head.ids)


def _first_token(tokenizer: PreTrainedTokenizerBase, tokens: _Tokens, prompt: str) -> int:
    """The first token after `prompt`, with which `tokens` begin but for one merged across its end."""
    if prompt.endswith(" "):
        # Byte-level tokenizers may leave spaces out of offsets, so that a token of spaces would seem to start late.
        ids = _tokenise(tokenizer, prompt).ids
        if tokens.ids[: len(ids)] == ids:
            return len(ids)
    return next(index for index, (start, _) in enumerate(tokens.offsets) if start >= len(prompt))


def _end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that can end a turn: those added to the vocabulary, special or not, but for white space."""
    return _added_ids(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _added_ids(tokenizer: PreTrainedTokenizerBase, _num_tokens: int) -> frozenset[int]:
    """Kept for the next chat: listing a thousand added tokens takes as long as rendering. Grows with the vocabulary."""
    return frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if not token.content.isspace())


def _supervise(loss_mask: list[bool], tokens: _Tokens, turn: _Turn, first: int, end_ids: frozenset[int]) -> None:
    """Mark the tokens of `turn` from `first` up to its end-of-turn token, or to the last one where it was cut.

    What the template writes after the end of turn (a newline, say) is never generated, so it is not supervised.
    """
    stop, last = len(turn.prompt) + len(turn.answer), len(tokens.ids) - 1
    if turn.closing:
        ends = (i for i in range(first, last + 1) if tokens.offsets[i][1] > stop and tokens.ids[i] in end_ids)
        last = next(ends)
    for index in range(first, last + 1):
        start = tokens.offsets[index][0]
        loss_mask[index] = not any(gap[0] <= start < gap[1] for gap in turn.unmarked)
