"""The fastest number of draft tokens on this machine, from measured costs and the drafter's own acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.costs import round_seconds
from eval.decode import DecodeConfig, decode
from eval.stats import acceptance_stats
from models.base import Proposer
from models.target import Target


@dataclass(frozen=True)
class LengthChoice:
    """`table` has one entry a length: milliseconds of drafting and verifying one round, expected tokens per round."""

    num_draft_tokens: int
    batch_size: int
    table: list[dict[str, Any]]


def choose_num_draft_tokens(
    target: Target, drafter: Proposer, prompts: Sequence[list[int]], config: DecodeConfig
) -> LengthChoice:
    """Decode `prompts` greedily once at full length to learn survival, time every length on as many of them as a batch
    has, take the best rate.

    Length 0 is vanilla decoding: it wins where speculation does not pay, and the caller says so.
    """
    full = drafter.num_draft_tokens
    sample = decode(target, drafter, prompts, replace(config, num_draft_tokens=full))
    survival = acceptance_stats(sample.generations).survival
    batch = prompts[: config.batch_size]
    table: list[dict[str, Any]] = []
    for length, (measured, verify) in enumerate(round_seconds(target, drafter, batch)):
        draft = measured if length else 0.0  # plain decoding has no drafter
        expected = 1 + sum(survival[:length])
        rate = len(batch) * expected / (draft + verify)
        table.append(
            {
                "num_draft_tokens": length,
                "draft_ms": 1e3 * draft,
                "verify_ms": 1e3 * verify,
                "expected_tokens_per_round": expected,
                "expected_tokens_per_second": rate,
            }
        )
    best = max(table, key=lambda row: row["expected_tokens_per_second"])
    return LengthChoice(best["num_draft_tokens"], len(batch), table)
