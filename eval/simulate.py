"""Throughput of a schedule under load, from measured costs and recorded rounds (DSpark paper, figures 7 and 8).

Requests replay recorded ones round by round: what a round's drafts were worth and how many of them the target took. A
schedule that verifies fewer gets what was accepted of those; a round without a draft gets its one token. The next round
is the next recorded one in either case, so that a request's easy and hard passages stay together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eval.costs import CostTable
from eval.rounds import Generation, Round
from eval.schedule import ASYNC, FIXED, Scaling, Schedule, ScheduleName, Scheduler
from models.base import Proposal

WARM_UP = 10  # rounds that are not counted: schedules that look back have no past in the first ones


@dataclass(frozen=True)
class Load:
    """One schedule at one number of requests."""

    num_requests: int
    tokens_per_second: float
    drafts_per_request: float  # verification budget: drafts sent to verification, a request and round
    tokens_per_round: float  # of one request


@dataclass
class _Stream:
    """One request after another, round by round."""

    requests: Sequence[Sequence[Round]]
    request: int
    place: int = 0

    def next(self, rng: np.random.Generator) -> Round:
        if self.place >= len(self.requests[self.request]):
            self.request, self.place = int(rng.integers(len(self.requests))), 0
        self.place += 1
        return self.requests[self.request][self.place - 1]


def simulate(
    generations: Sequence[Generation],
    schedule: Schedule,
    costs: CostTable,
    num_requests: int,
    *,
    num_draft_tokens: int,
    num_rounds: int,
    seed: int = 0,
) -> Load:
    """`num_draft_tokens` are drafted and, by schedule=fixed, verified; 0 is plain decoding. Rounds whose output ended
    inside the block propose what was proposed then."""
    requests = [rounds for g in generations if (rounds := [r for r in g.rounds if r.confidence])]
    if not requests:
        raise ValueError("a simulation needs recorded rounds with confidences")
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(requests), size=num_requests)
    streams = [_Stream(requests, int(i), int(rng.integers(len(requests[i])))) for i in chosen]
    scheduler, ids = Scheduler(schedule), list(range(num_requests))
    seconds, gained, verified = 0.0, 0, 0
    for round_ in range(WARM_UP + num_rounds):
        if round_ == WARM_UP:
            seconds, gained, verified = 0.0, 0, 0
        rounds = [stream.next(rng) for stream in streams]
        lengths = [0] * num_requests
        if num_draft_tokens:
            drafts = scheduler.draft_length(ids, num_draft_tokens)
            seconds += costs.draft_seconds(num_requests, drafts)
            lengths = scheduler.lengths(_proposal(rounds, drafts), ids).tolist() if drafts else lengths
        seconds += costs.verify_seconds(num_requests, num_requests + sum(lengths))
        gained += sum(1 + min(r.accepted, length) for r, length in zip(rounds, lengths, strict=True))
        verified += sum(lengths)
    count = num_requests * num_rounds
    return Load(num_requests, gained / seconds, verified / count, gained / count)


def _proposal(rounds: Sequence[Round], num_draft_tokens: int) -> Proposal:
    confidence = torch.tensor([r.confidence[:num_draft_tokens] for r in rounds], dtype=torch.float64)
    tokens = torch.zeros(confidence.shape, dtype=torch.int64)
    lengths = torch.tensor([min(r.proposed, num_draft_tokens) for r in rounds])
    return Proposal(tokens, torch.ones(*tokens.shape, 1), lengths, tokens[..., None], confidence)


def compare(
    generations: Sequence[Generation],
    costs: CostTable,
    loads: Sequence[int],
    *,
    scaling: Scaling | None,
    threshold: float,
    num_rounds: int,
) -> dict[str, list[Load]]:
    """Plain decoding, every fixed length, and the schedules with and without the gate, at each load."""
    full = costs.num_draft_tokens
    plans = {"vanilla": (FIXED, 0)} | {f"fixed {k}": (FIXED, k) for k in range(1, full + 1)}
    for name in (ScheduleName.confidence, ScheduleName.algorithm1, ASYNC):
        for gate in (False, True):
            schedule = Schedule(name, threshold, costs, scaling, gate)
            plans[f"{name}{', gate' if gate else ''}"] = (schedule, full)
    return {
        name: [
            simulate(generations, schedule, costs, load, num_draft_tokens=k, num_rounds=num_rounds) for load in loads
        ]
        for name, (schedule, k) in plans.items()
    }
