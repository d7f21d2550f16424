"""Which prompts of all sources are answered, in which order, and which are held out to measure on."""

import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import NamedTuple

from data.conversation import Regenerate, questions
from data.messages import Message
from data.prompts import Prompt, SourcePrompt, Split, check_ids
from models.files import write_text

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class MixOptions:
    """How sources become one list of prompts; conf/generate.yaml holds the values."""

    regenerate: Regenerate
    weights: list[float] | None
    mix_seed: int
    num_prompts: int | None
    min_prompt_tokens: int
    max_prompt_tokens: int | None
    heldout: float


class Mixture(NamedTuple):
    train: list[Prompt]
    heldout: list[Prompt]


def mix(
    sources: Sequence[Sequence[SourcePrompt]],
    options: MixOptions,
    num_tokens: Callable[[Prompt, Regenerate], int],
    *,
    names: Sequence[str],
) -> Mixture:
    """Training prompts in the order of the mixture, and held-out prompts in the order of the sources.

    What is left out is counted in the log, by reason. Other sources never move a prompt to the other split.
    `num_tokens` counts what is asked first; `names` are those of the sources. Raises ValueError on options out of
    range, on an id that two prompts have, when no training prompt is left and when a source with a weight has none.
    """
    check_options(options, len(sources))
    check_ids(sources)
    left_out: Counter[str] = Counter()
    sides = split_sides(sources, options, left_out)
    # Of `turns` a second one can only be asked after an answer of the target.
    whole = options.regenerate is Regenerate.all
    heldout = [[found.first_turn for found in source] for source in sides["heldout"]]
    train = [[found.prompt if whole else found.first_turn for found in source] for source in sides["train"]]
    heldout = drop_duplicates(heldout, options.regenerate, left_out, heldout=[])
    measured = [prompt for part in heldout for prompt in part]
    train = drop_duplicates(train, options.regenerate, left_out, heldout=measured)
    heldout = drop_by_length(heldout, options, lambda prompt: num_tokens(prompt, Regenerate.last), left_out)
    train = drop_by_length(train, options, lambda prompt: num_tokens(prompt, options.regenerate), left_out)
    for reason, count in sorted(left_out.items()):
        log.info("prompts: left out %d %s", count, reason)
    if not any(train):
        num_heldout = sum(len(part) for part in heldout)
        raise ValueError(f"prompts: none is left to answer; {num_heldout} are held out, left out are {dict(left_out)}")
    if options.weights is not None:
        check_not_empty(train, options.weights, names, left_out)
    return Mixture(mixed(train, options, names), [prompt for part in heldout for prompt in part])


def write_heldout(path: Path, prompts: Sequence[Prompt]) -> None:
    """A file of prompts that eval.py reads as a task; untouched where it is right already, and none for no prompts."""
    lines = []
    for prompt in prompts:
        [asked] = questions(prompt, Regenerate.last)
        line = {"id": prompt.id, "domain": prompt.domain, "split": prompt.split, "messages": asked}
        lines.append(line if prompt.tools is None else {**line, "tools": prompt.tools})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if not lines:
        path.unlink(missing_ok=True)
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
        log.info("prompts: %d held-out prompts in %s", len(lines), path)


def check_options(options: MixOptions, num_sources: int) -> None:
    limits = {
        "heldout": (0 <= options.heldout < 1, "in [0, 1)"),
        "min_prompt_tokens": (options.min_prompt_tokens >= 0, ">= 0"),
        "max_prompt_tokens": (
            options.max_prompt_tokens is None or options.max_prompt_tokens >= options.min_prompt_tokens,
            f"null or >= min_prompt_tokens={options.min_prompt_tokens}",
        ),
        "num_prompts": (options.num_prompts is None or options.num_prompts > 0, "null or > 0"),
        "weights": (
            options.weights is None or (len(options.weights) == num_sources and all(w > 0 for w in options.weights)),
            f"null or {num_sources} numbers > 0, one per source of prompts=",
        ),
    }
    for name, (holds, limit) in limits.items():
        if not holds:
            raise ValueError(f"{name} must be {limit}, got {getattr(options, name)}")


def check_not_empty(
    train: Sequence[Sequence[Prompt]], weights: Sequence[float], names: Sequence[str], left_out: Counter[str]
) -> None:
    """Raises ValueError where a source has nothing for its share, which would end the mixture before it begins."""
    for index, (part, name) in enumerate(zip(train, names, strict=True)):
        if not part:
            raise ValueError(
                f"prompts[{index}]={name} with weights[{index}]={weights[index]} has no training prompt left, so there "
                f"is no mixture; take it out of prompts= and weights=, or change what was left out of all sources: "
                f"{dict(left_out)}"
            )


def split_sides(
    sources: Sequence[Sequence[SourcePrompt]], options: MixOptions, left_out: Counter[str]
) -> dict[Split, list[list[SourcePrompt]]]:
    """The prompts of each side, by source: by their own split, else by a hash of their group.

    A group that records place on one side by their own split has no place on the other: a prompt that would stand
    there is left out. Where records name both, the group is held out.
    """
    named: dict[Split, set[str]] = {"train": set(), "heldout": set()}
    groups = [[group_of(found, options.regenerate) for found in source] for source in sources]
    for source, keys in zip(sources, groups, strict=True):
        for found, key in zip(source, keys, strict=True):
            if found.own_split is not None:
                named[found.own_split].add(key)
    named["train"] -= named["heldout"]
    sides: dict[Split, list[list[SourcePrompt]]] = {"train": [], "heldout": []}
    for source, keys in zip(sources, groups, strict=True):
        for side in sides.values():
            side.append([])
        for found, key in zip(source, keys, strict=True):
            split = found.own_split or ("heldout" if share_of(key) < options.heldout else "train")
            other: Split = "heldout" if split == "train" else "train"
            if key in named[other]:
                left_out[f"for the {split} split: their group is in the {other} split by a record's own field"] += 1
            else:
                sides[split][-1].append(replace(found, prompt=replace(found.prompt, split=split)))
    return sides


def group_of(found: SourcePrompt, regenerate: Regenerate) -> str:
    """Equal for variants of one template: its own group, else its text with every number masked."""
    if found.group is not None:
        return f"group {found.group}"
    return "text " + re.sub(r"\d+", "0", first_text(found.first_turn, regenerate))


def share_of(group: str) -> float:
    """A number in [0, 1) that only depends on the group."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big") / 2**32


def first_text(prompt: Prompt, regenerate: Regenerate) -> str:
    """What the target is asked first. With `all` the whole chat would not show that training asks what a held-out
    prompt asks too."""
    return text_of(questions(prompt, regenerate)[0])


def text_of(messages: Sequence[Message]) -> str:
    """Case-folded and with white space collapsed."""
    return json.dumps([[message["role"], " ".join(message["content"].casefold().split())] for message in messages])


def drop_duplicates(
    parts: Sequence[Sequence[Prompt]], regenerate: Regenerate, left_out: Counter[str], *, heldout: Iterable[Prompt]
) -> list[list[Prompt]]:
    """Without prompts whose text an earlier one of any part has, or that ask first what a prompt of `heldout` does."""
    asked = {_digest(first_text(prompt, regenerate)) for prompt in heldout}
    seen: set[bytes] = set()
    kept: list[list[Prompt]] = []
    for part in parts:
        kept.append([])
        for prompt in part:
            key = _digest(text_of([message for part in questions(prompt, regenerate) for message in part]))
            if key in seen:
                left_out["with the text of an earlier prompt"] += 1
            elif _digest(first_text(prompt, regenerate)) in asked:
                left_out["that ask what a held-out prompt asks"] += 1
            else:
                seen.add(key)
                kept[-1].append(prompt)
    return kept


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def drop_by_length(
    parts: list[list[Prompt]], options: MixOptions, num_tokens: Callable[[Prompt], int], left_out: Counter[str]
) -> list[list[Prompt]]:
    """Without prompts outside the limits; tokens are only counted where a limit could matter."""
    low, high = options.min_prompt_tokens, options.max_prompt_tokens
    if low <= 1 and high is None:
        return parts
    kept: list[list[Prompt]] = []
    for part in parts:
        kept.append([])
        for prompt in part:
            length = num_tokens(prompt)
            if length < low:
                left_out[f"of fewer than min_prompt_tokens={low}"] += 1
            elif high is not None and length > high:
                left_out[f"of more than max_prompt_tokens={high}"] += 1
            else:
                kept[-1].append(prompt)
    return kept


def mixed(sources: Sequence[Sequence[Prompt]], options: MixOptions, names: Sequence[str]) -> list[Prompt]:
    """All of all sources in order; with weights each shuffled, and interleaved until the first is used up at its share.

    At most `num_prompts`, of which fewer are a prefix of more.
    """
    if options.weights is None:
        return [prompt for source in sources for prompt in source][: options.num_prompts]
    # A source's shuffle is keyed by its place in the list alone, so that another one behind it changes nothing.
    shuffled = [
        random.Random(f"{options.mix_seed}/{i}").sample(source, len(source)) for i, source in enumerate(sources)
    ]
    prompts: list[Prompt] = []
    counts = [0] * len(sources)
    for index in interleaved(options.weights):
        if len(prompts) == options.num_prompts:
            return prompts
        if counts[index] == len(shuffled[index]):
            log.info(
                "prompts: prompts[%d]=%s is used up and ends the mixture at %d prompts; %d of all are not asked",
                *(index, names[index], len(prompts), sum(map(len, shuffled)) - len(prompts)),
            )
            return prompts
        prompts.append(shuffled[index][counts[index]])
        counts[index] += 1
    raise AssertionError("interleaved ended")


def interleaved(weights: Sequence[float]) -> Iterator[int]:
    """Indices without end, in whose every prefix of n each weight w of sum 1 has more than w*n - 1 and less than
    w*n + 1 of them.

    The j-th item of a weight may come at n > (j-1)/w and is due by j/w; taking what is due first meets every due date
    (earliest deadline first, which is optimal for tasks of one unit).
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    shares = [int(fraction * scale) for fraction in fractions]
    total, counts, length = sum(shares), [0] * len(shares), 0
    while True:
        length += 1
        ready = [i for i, share in enumerate(shares) if counts[i] * total < share * length]
        index = min(ready, key=lambda i: -(-(counts[i] + 1) * total // shares[i]))
        counts[index] += 1
        yield index
