"""The fastest number of draft tokens on this machine, from measured costs and the drafter's own acceptance."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.decode import DecodeConfig, decode
from eval.stats import acceptance_stats
from models.base import Proposer
from models.sampling import Sampler, SamplingConfig
from models.target import Target, pad_rows

REPEATS = 5
GREEDY = SamplingConfig(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True)
class LengthChoice:
    """`table` has one entry a length: milliseconds of drafting and verifying one round, expected tokens per round."""

    num_draft_tokens: int
    batch_size: int
    table: list[dict[str, Any]]


def choose_num_draft_tokens(
    target: Target, drafter: Proposer, prompts: Sequence[list[int]], config: DecodeConfig
) -> LengthChoice:
    """Decode `prompts` greedily once at full length to learn survival, time every length, take the best rate.

    Length 0 is vanilla decoding: it wins where speculation does not pay, and the caller says so.
    """
    full = drafter.num_draft_tokens
    sample = decode(target, drafter, prompts, replace(config, num_draft_tokens=full))
    survival = acceptance_stats(sample.generations).survival
    table: list[dict[str, Any]] = []
    for length, (draft, verify) in enumerate(measure_costs(target, drafter, prompts)):
        expected = 1 + sum(survival[:length])
        rate = len(prompts) * expected / (draft + verify)
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
    return LengthChoice(best["num_draft_tokens"], len(prompts), table)


@torch.inference_mode()
def measure_costs(target: Target, drafter: Proposer, prompts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """Seconds (draft, verify) of one round of all `prompts` for 0, 1, .. num_draft_tokens drafts."""
    tokens, counts = pad_rows(prompts, target.device)
    capacity = tokens.shape[1] + 2 * drafter.num_draft_tokens + 2
    cache = target.new_cache(len(prompts), capacity)
    output = target.forward(tokens, cache)
    cache.advance(counts)
    state = drafter.start(tokens, output.features, counts, capacity)
    last = tokens[:, 0]
    sampler = Sampler(GREEDY, torch.arange(len(prompts), device=target.device))
    nothing = torch.zeros_like(counts)
    costs = []
    for length in range(drafter.num_draft_tokens + 1):
        fed = last[:, None].expand(-1, length + 1)
        features = target.forward(fed, cache).features

        def verify(fed: Tensor = fed) -> None:
            sampler.probs(target.logits(target.forward(fed, cache).hidden))

        def draft(fed: Tensor = fed, features: Tensor = features) -> None:
            drafter.propose(state, last, sampler, fed.shape[1] - 1)
            drafter.advance(state, fed, features, nothing)

        costs.append((seconds_of(draft) if length else 0.0, seconds_of(verify)))
    return costs


def seconds_of(call: Callable[[], object]) -> float:
    """Median over a few calls, after one to warm up. Waits for the device."""
    call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)
