"""Why an acceptance length is what it is: what stood where drafts were rejected, how far better choices would go."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.rounds import NUM_RANKED, Generation, Round

CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)  # positions at which a class of contexts begins


def evidence(generations: Sequence[Generation], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """JSON values, None or empty where nothing was recorded.

    acceptance_estimate[k]: mean of sum min(target, draft) at slot k over rounds whose drafts before k were accepted,
    which is what `conditional_acceptance` estimates, with less noise (sampled rows). rejections: of the tokens that
    corrected a draft, how many the drafter had among its likeliest 16 and how many not. recall_at_1, recall_at_16 [k]:
    how often slot k's token was the likeliest, or among 16, over rounds that reached it. oracle_length: tokens a round
    if of the likeliest 16 the right one were always drafted (behind the drafter's own tokens, so only parallel slots
    know it exactly). acceptance_by_context: by the position at which a round began.
    """
    rounds = [r for g in generations for r in g.rounds]
    longest = max((r.proposed for r in rounds), default=0)
    rejected = [r.ranks[r.accepted] for r in rounds if r.accepted < min(r.proposed, len(r.ranks))]
    missed = sum(rank == NUM_RANKED for rank in rejected)
    ranked = [r for r in rounds if r.ranks]
    return {
        "acceptance_estimate": [
            _mean([r.overlap[k] for r in _reached(rounds, k) if len(r.overlap) > k]) for k in range(longest)
        ],
        "rejections": {"in_top_16": len(rejected) - missed, "not_in_top_16": missed} if ranked else None,
        "recall_at_1": [_recall(rounds, k, 1) for k in range(longest)],
        "recall_at_16": [_recall(rounds, k, NUM_RANKED) for k in range(longest)],
        "oracle_length": _mean([1 + _run_of_hits(r) for r in ranked if len(r.ranks) >= r.proposed]),
        "acceptance_by_context": by_context(generations, prompts),
    }


def by_context(generations: Sequence[Generation], prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Pooled acceptance length of the rounds that began in each class of positions."""
    tokens, counts = np.zeros(len(CONTEXTS)), np.zeros(len(CONTEXTS), dtype=int)
    for generation, prompt in zip(generations, prompts, strict=True):
        place = len(prompt) + 1
        for r in generation.rounds:
            index = int(np.searchsorted(CONTEXTS, place, side="right")) - 1
            tokens[index] += r.accepted + r.bonus
            counts[index] += 1
            place += r.accepted + r.bonus
    ends = [*CONTEXTS[1:], None]
    return [
        {"from": start, "to": end, "rounds": int(count), "acceptance_length": float(total / count)}
        for start, end, total, count in zip(CONTEXTS, ends, tokens, counts, strict=True)
        if count
    ]


def _reached(rounds: Sequence[Round], slot: int) -> list[Round]:
    return [r for r in rounds if r.accepted >= slot and r.proposed > slot]


def _recall(rounds: Sequence[Round], slot: int, count: int) -> float | None:
    return _mean([float(r.ranks[slot] < count) for r in _reached(rounds, slot) if len(r.ranks) > slot])


def _run_of_hits(r: Round) -> int:
    return next((k for k, rank in enumerate(r.ranks) if rank == NUM_RANKED), len(r.ranks))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
