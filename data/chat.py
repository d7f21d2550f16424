"""Chats as the target sees them: its own chat template renders, and render boundaries say which tokens are answers.

Ids. The ids before the last answer are `render_prompt` of the chat up to there, exactly; the last answer is tokenised
on its own where a joint tokenisation would merge across that boundary. An earlier answer stands inside that prompt as
inference sees it, and a token that the tokenizer merged across its start belongs to the prompt.

Boundaries. A chat rendered with a probe in place of one answer shows the text before and after that answer, whatever
the template does to contents. `{% generation %}` markers are therefore not needed: templates with and without them are
read in the same way. Each answer must start where the prompt of its own turn ends, or training would show a prompt that
inference never does.
"""

from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.messages import Message

PROBE = "\ue000answer\ue000"
"""Stands in for an answer; private-use characters, which no template strips and no chat holds."""

FINISH_REASONS = (None, "stop", "length")


@dataclass(frozen=True)
class RenderedChat:
    input_ids: list[int]  # [S]
    loss_mask: list[bool]  # [S], True = the target's own token: answers and their end-of-turn tokens


@dataclass(frozen=True)
class _Tokens:
    """Token ids of a text and the characters at which each token starts and stops."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class _Answer:
    """An answer in a rendered text, in characters. Its end-of-turn token is the first added token from `stop` on."""

    start: int
    stop: int


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Ids that ask the target for the next assistant turn: `apply_chat_template` with a generation prompt.

    Nothing is added to `messages`: a default system prompt comes from the template or not at all.
    """
    if not messages:
        raise ValueError("messages is empty: a prompt needs at least one user turn")
    return _tokenise(tokenizer, _render(tokenizer, messages, generation_prompt=True)).ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, finish_reason: str | None
) -> RenderedChat:
    """The chat up to its last assistant turn, with every answer and its end-of-turn token supervised.

    `finish_reason="length"` says that the last answer was cut: its ids end with its content, as no end of turn was
    generated. An empty answer is allowed unless it was cut; its one supervised token is the end of turn. The last
    answer stands as the template renders it (stripped, say), but as given where the template would put more than the
    answer after the generation prompt (an empty thinking block, say).
    Raises ValueError for a chat without an assistant turn and for a template whose turns cannot be told apart.
    """
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {finish_reason!r}")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"a chat needs an assistant turn, got roles {[message['role'] for message in messages]}")
    *earlier_turns, last_turn = turns
    chat = messages[: last_turn + 1]

    prompt = _prompt_text(tokenizer, chat, last_turn)
    answer, closing = _last_answer(tokenizer, chat, prompt)
    cut = finish_reason == "length"
    tokens = _tokenise_after(tokenizer, prompt, answer if cut else answer + closing)

    loss_mask = [False] * len(tokens.ids)
    end_ids = _end_ids(tokenizer)
    for turn in earlier_turns:
        _supervise(loss_mask, tokens, _earlier_answer(tokenizer, chat, turn, prompt), end_ids)
    last = _Answer(start=len(prompt), stop=len(prompt) + len(answer))
    _supervise(loss_mask, tokens, last, None if cut else end_ids)
    return RenderedChat(tokens.ids, loss_mask)


def _prompt_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], turn: int) -> str:
    """What the target had read when it wrote the assistant turn with index `turn`."""
    if turn > 0:
        return _render(tokenizer, messages[:turn], generation_prompt=True)
    # No inference starts from an empty chat, and templates refuse one: the turn's own header is its prompt.
    return _around(tokenizer, messages[:1], 0, generation_prompt=False)[0]


def _last_answer(tokenizer: PreTrainedTokenizerBase, chat: list[Message], prompt: str) -> tuple[str, str]:
    """The text of the last answer and the text that closes its turn."""
    content = chat[-1]["content"]
    _, closing = _around(tokenizer, chat, len(chat) - 1, generation_prompt=False)
    rendered = _render(tokenizer, chat, generation_prompt=False)
    if rendered.startswith(prompt) and rendered[len(prompt) :].endswith(closing):
        answer = rendered[len(prompt) :].removesuffix(closing)
        if answer.strip() == content.strip():
            return answer, closing
    return content, closing


def _earlier_answer(tokenizer: PreTrainedTokenizerBase, chat: list[Message], turn: int, prompt: str) -> _Answer:
    """Where the assistant turn with index `turn` stands in `prompt`, the text before the last answer of `chat`."""
    before, after = _around(tokenizer, chat[:-1], turn, generation_prompt=True)
    own_prompt = _prompt_text(tokenizer, chat, turn)
    # Some templates put a space before an answer that their generation prompt leaves to the target.
    starts_as_prompted = before.startswith(own_prompt) and not before[len(own_prompt) :].strip()
    if not starts_as_prompted or not prompt.startswith(before) or not prompt[len(before) :].endswith(after):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} renders message {turn} of a longer chat otherwise than"
            f" after its own prompt (...{before[-40:]!r} against ...{own_prompt[-40:]!r}), so training on it would show"
            " a prompt that inference never does; split the chat so that each part ends with its only answer to learn"
        )
    return _Answer(start=len(own_prompt), stop=len(prompt) - len(after))


def _around(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], turn: int, *, generation_prompt: bool
) -> tuple[str, str]:
    """The rendered text before and after the content of the message with index `turn`."""
    probed = [*messages[:turn], {**messages[turn], "content": PROBE}, *messages[turn + 1 :]]
    parts = _render(tokenizer, probed, generation_prompt=generation_prompt).split(PROBE)
    if len(parts) != 2:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} renders the content of message {turn}"
            f" {len(parts) - 1} times, expected once; give the tokenizer another chat_template"
        )
    return parts[0], parts[1]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template;"
            " use an instruction-tuned target, or set tokenizer.chat_template to the format it was tuned on"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except TemplateError as error:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} refuses the chat: {error}") from error
    assert isinstance(text, str), type(text)
    return text


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> _Tokens:
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} gives no character offsets; load it with use_fast=True")
    # The template wrote the special tokens already.
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return _Tokens(encoding["input_ids"], encoding["offset_mapping"])


def _tokenise_after(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> _Tokens:
    """Tokens of `prompt + answer` that begin with exactly the tokens of `prompt`.

    The joint tokenisation is preferred, as some tokenizers put a space before any text that they see alone.
    """
    head = _tokenise(tokenizer, prompt)
    joint = _tokenise(tokenizer, prompt + answer)
    if joint.ids[: len(head.ids)] == head.ids:
        return joint
    tail = _tokenise(tokenizer, answer)
    shifted = [(start + len(prompt), stop + len(prompt)) for start, stop in tail.offsets]
    return _Tokens(head.ids + tail.ids, head.offsets + shifted)


def _end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that can end a turn: those added to the vocabulary, special or not, but for white space."""
    return {id for id, token in tokenizer.added_tokens_decoder.items() if not token.content.isspace()}


def _supervise(loss_mask: list[bool], tokens: _Tokens, answer: _Answer, end_ids: set[int] | None) -> None:
    """Mark the tokens of `answer` up to its end-of-turn token, or to the end of the text where `end_ids` is None.

    What the template writes after the end of turn (a newline, say) is never generated, so it is not supervised.
    """
    first = next((index for index, (start, _) in enumerate(tokens.offsets) if start >= answer.start), None)
    if first is None:
        raise ValueError(
            "the last answer has no token: it is empty and nothing ends it"
            " (finish_reason='length', or a template without end-of-turn token); drop such a chat"
        )
    last = len(tokens.ids) - 1
    if end_ids is not None:
        ends = (
            index
            for index in range(first, len(tokens.ids))
            if tokens.offsets[index][0] >= answer.stop and tokens.ids[index] in end_ids
        )
        end = next(ends, None)
        if end is None:
            raise ValueError("the chat template writes no end-of-turn token after an answer; add one to chat_template")
        last = end
    loss_mask[first : last + 1] = [True] * (last + 1 - first)
