"""One prompt decoded alone by every drafter, tokens with the times they came at, to be replayed."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.rounds import Generation
from eval.stats import Pass


def replay_of(passes: Sequence[Pass], question: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """JSON values: the question, and a lane for each pass over that one prompt. A lane's steps are (seconds since the
    request was taken, [text, whether the drafter had it] of every token that came then)."""
    lanes = []
    for measured in passes:
        (generation,) = measured.generations
        steps = [{"at_seconds": at, "tokens": tokens} for at, tokens in steps_of(generation, tokenizer)]
        kept = {key: measured.about[key] for key in ("drafter", "temperature", "num_draft_tokens")}
        seconds = steps[-1]["at_seconds"]
        lanes.append({**kept, "num_tokens": len(generation.tokens), "seconds": seconds, "steps": steps})
    return {"question": question, "lanes": lanes}


def steps_of(
    generation: Generation, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[float, list[tuple[str, bool]]]]:
    """The prompt's own token first, then round by round, as far as the output goes."""
    texts = iter(pieces(generation.tokens, tokenizer))
    yield generation.first_token_seconds, [(next(texts), False)]
    left = len(generation.tokens) - 1
    for round_, at in zip(generation.rounds, generation.round_end_seconds, strict=True):
        drafted = [True] * round_.accepted + [False] * round_.bonus
        shown = [(next(texts), was_drafted) for was_drafted in drafted[:left]]
        left -= len(shown)
        if shown:
            yield at, shown


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text; one that ends inside a character adds nothing, and the next the whole of it."""
    found: list[str] = []
    shown = 0
    for count in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(list(tokens[:count]), skip_special_tokens=True))
        is_whole = not text.endswith("\ufffd") or count == len(tokens)
        found.append(text[shown:] if is_whole else "")
        shown = len(text) if is_whole else shown
    return found
