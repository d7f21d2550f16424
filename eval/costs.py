"""What a round costs on this machine: seconds of drafting and verifying, by requests and tokens, measured and kept."""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from scipy.optimize import isotonic_regression

from models.base import Proposer
from models.sampling import GREEDY, Sampler
from models.target import Target, pad_rows

REPEATS = 5
LOADS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class CostTable:
    """Seconds of one round of `loads[i]` requests, each with 0, 1, .. K drafts: drafting (and taking in what was
    verified) and verifying.

    Between measured points costs are straight lines, beyond them the last line goes on. More tokens never cost less:
    what was measured otherwise is noise, and is levelled.
    """

    loads: list[int]
    draft: list[list[float]]  # [loads][K + 1]
    verify: list[list[float]]  # [loads][K + 1]

    def __post_init__(self) -> None:
        sizes = {len(row) for row in (*self.draft, *self.verify)}
        if len(sizes) != 1 or len(self.draft) != len(self.loads) or len(self.verify) != len(self.loads):
            raise ValueError("a cost table needs a row for every load, all of one length")
        if self.loads != sorted(set(self.loads)) or self.loads[0] < 1:
            raise ValueError(f"loads of a cost table must ascend from 1 or more, got {self.loads}")

    @property
    def num_draft_tokens(self) -> int:
        return len(self.verify[0]) - 1

    def verify_seconds(self, num_requests: int, num_tokens: float) -> float:
        """Of num_tokens in all, the newest one of every request among them."""
        return self._at(self.verify, num_requests, num_tokens / num_requests - 1)

    def draft_seconds(self, num_requests: int, num_draft_tokens: int) -> float:
        return self._at(self.draft, num_requests, num_draft_tokens)

    def _at(self, table: list[list[float]], num_requests: int, num_drafts: float) -> float:
        costs = [_on_line(range(len(row)), row, num_drafts) for row in table]
        return _on_line(self.loads, costs, num_requests)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _on_line(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """On the straight lines through (places, values), the first and the last of which go on beyond their ends."""
    if len(places) == 1:
        return values[0]
    index = min(max(bisect_right(places, place), 1), len(places) - 1)
    low, high = places[index - 1], places[index]
    return values[index - 1] + (values[index] - values[index - 1]) * (place - low) / (high - low)


def measure_costs(
    target: Target, drafter: Proposer, prompts: Sequence[list[int]], loads: Sequence[int] = LOADS
) -> CostTable:
    """At each load with as many of the prompts, over again where they are fewer."""
    tables = [round_seconds(target, drafter, list(islice(cycle(prompts), load))) for load in loads]
    draft = [[cost[0] for cost in table] for table in tables]
    verify = [levelled([cost[1] for cost in table]) for table in tables]
    return CostTable(list(loads), draft, verify)


def levelled(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to the values (least squares)."""
    return isotonic_regression(values).x.tolist()


@torch.inference_mode()
def round_seconds(target: Target, drafter: Proposer, prompts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """Seconds (draft, verify) of one round of all `prompts` for 0, 1, .. num_draft_tokens drafts. Without a draft the
    drafter still takes in what was verified."""
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

        def verify(fed: torch.Tensor = fed) -> None:
            sampler.probs(target.logits(target.forward(fed, cache).hidden))

        def draft(fed: torch.Tensor = fed, features: torch.Tensor = features) -> None:
            if fed.shape[1] > 1:
                drafter.propose(state, last, sampler, fed.shape[1] - 1)
            drafter.advance(state, fed, features, nothing)

        costs.append((seconds_of(draft), seconds_of(verify)))
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
