"""How many of the drafted tokens are sent to verification. Decisions look only at what precedes the cut.

Where a block is cut must not depend on the token that is cut away or on any behind it, or the output would follow the
decision (DSpark paper, appendix A). Confidences of slot j know the tokens before j only, so a search that admits slots
in the order of their survival and stops at the first that does not pay is safe, and one that looks over the whole curve
is safe only with confidences of earlier rounds.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from eval.costs import CostTable
from models.base import Proposal

STALE_ROUNDS = 2  # age of the confidences that decide on a whole round: those of the last one may still be computed
PROBE_SHARE, PROBE_ROUNDS = 0.01, 256  # of the time, to see by a full draft whether it pays by now; rounds between
MEAN_SHARE = 0.1  # of a round in what is known of the mean confidences


# fixed: every drafted token. confidence: up to the first slot whose confidence is under the threshold. algorithm1: the
# DSpark paper's, over all requests. async: as many tokens as paid two rounds ago, likeliest first. (Not written as a
# class, because `async` is a word of Python.)
ScheduleName = StrEnum("ScheduleName", ["fixed", "confidence", "algorithm1", "async"])
ASYNC = ScheduleName["async"]


@dataclass(frozen=True)
class Scaling:
    """Numbers of each slot for `scaled`: the logit is divided by a temperature and a bias is added, and what follows
    fills the part above a floor."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    floors: tuple[float, ...]


@dataclass(frozen=True)
class Schedule:
    """Options of a schedule. All but fixed need a drafter with a confidence head, algorithm1 and async a cost table."""

    name: ScheduleName
    threshold: float
    costs: CostTable | None = None
    scaling: Scaling | None = None  # of confidences, where calibrated
    gate: bool = False  # draft only where confidences of two rounds ago say that it pays
    # algorithm1 and async also draft no more than paid two rounds ago

    def __post_init__(self) -> None:
        needs_costs = self.gate or self.name in (ScheduleName.algorithm1, ASYNC)
        if needs_costs and self.costs is None:
            raise ValueError(f"schedule={self.name} with gate={str(self.gate).lower()} needs a cost table")


FIXED = Schedule(ScheduleName.fixed, 0.0)


class _Plan(NamedTuple):
    """Of a round: expected tokens a second, seconds, tokens that are verified."""

    rate: float
    seconds: float
    tokens: int


@dataclass
class Scheduler:
    """A schedule at work on the requests of one run; remembers what earlier rounds were sure of."""

    schedule: Schedule
    past: dict[int, deque[tuple[int, list[float]]]] = field(default_factory=dict)  # of requests: (round, survival)
    mean: list[float] = field(default_factory=list)  # confidence of each slot over the requests of late
    round: int = 0
    shortened: int = 0  # rounds since the last one that drafted in full
    capacity: int | None = None  # tokens to verify in this round by what was known two rounds ago; None = as drafted
    seconds: dict[tuple[int, int, int], float] = field(default_factory=dict)  # of steps that were looked at

    def draft_length(self, request_ids: Sequence[int], num_draft_tokens: int) -> int:
        """Begin a round; how many tokens to draft in it, of at most so many. By what was known two rounds ago: the
        length at which most expected tokens a second come out, which the gate alone may set to none."""
        self.round, self.capacity = self.round + 1, None
        if self.schedule.costs is None or not (self._cuts or self.schedule.gate):
            return num_draft_tokens
        known = self._stale(request_ids)
        if known is None:
            return num_draft_tokens
        candidates = ([0] if self.schedule.gate else []) + (list(range(1, num_draft_tokens)) if self._cuts else [])
        plans = {length: self._plan(known, length) for length in [*candidates, num_draft_tokens]}
        best = max(plans, key=lambda length: (plans[length].rate, length))
        full, chosen = plans[num_draft_tokens].seconds, plans[best].seconds
        is_due = self.shortened >= min(PROBE_ROUNDS, (full / chosen - 1) / PROBE_SHARE)
        self.shortened = 0 if is_due or best == num_draft_tokens else self.shortened + 1
        length = best if self.shortened else num_draft_tokens
        self.capacity = plans[length].tokens
        return length

    def lengths(self, proposal: Proposal, request_ids: Sequence[int]) -> Tensor:
        """[B] int64 of this round's proposal."""
        name = self.schedule.name
        if name is ScheduleName.fixed and not self.schedule.gate:
            return proposal.lengths
        if proposal.confidence is None:
            raise ValueError(f"schedule={name} needs a drafter with a confidence head; use schedule=fixed")
        confidence = calibrated(proposal.confidence, self.schedule.scaling)
        survival = confidence.double().cumprod(1)
        slots = torch.arange(survival.shape[1], device=survival.device)
        survival = survival.masked_fill(slots >= proposal.lengths[:, None], 0.0)
        rows = survival.tolist()
        self._remember(request_ids, rows, confidence.double().mean(0).tolist())
        if name is ScheduleName.fixed or (name is ASYNC and self.capacity is None):
            return proposal.lengths
        if name is ScheduleName.confidence:
            confident = (confidence >= self.schedule.threshold).long().cumprod(1).sum(1)
            return torch.minimum(confident, proposal.lengths)
        count, num_drafts = survival.shape
        if name is ScheduleName.algorithm1:
            found = algorithm1(rows, lambda tokens: 1 / self._seconds(count, tokens, num_drafts))
        else:
            assert self.capacity is not None
            found = allocate(rows, self.capacity - count)
        lengths = torch.tensor(found, device=proposal.lengths.device)
        return torch.minimum(lengths, proposal.lengths)

    def forget(self, request_id: int) -> None:
        self.past.pop(request_id, None)

    @property
    def _cuts(self) -> bool:
        """Whether the schedule weighs every token against its cost."""
        return self.schedule.name in (ScheduleName.algorithm1, ASYNC)

    def _plan(self, known: list[list[float]], num_drafts: int) -> _Plan:
        """What a round of so many drafts is worth."""
        survival, count = [row[:num_drafts] for row in known], len(known)

        def seconds(tokens: int) -> float:
            return self._seconds(count, tokens, num_drafts)

        if self._cuts:
            tokens, rate = best_capacity(survival, seconds)
            return _Plan(rate, seconds(tokens), tokens)
        lengths = self._lengths_by_threshold(survival)
        expected = count + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
        tokens = count + sum(lengths)
        return _Plan(expected / seconds(tokens), seconds(tokens), tokens)

    def _lengths_by_threshold(self, survival: list[list[float]]) -> list[int]:
        """Lengths that `fixed` and `confidence` would take of such survivals."""
        if self.schedule.name is ScheduleName.fixed:
            return [len(row) for row in survival]
        confidences = [[b / a if a else 0.0 for a, b in pairwise([1.0, *row])] for row in survival]
        unsure = ((k for k, c in enumerate(row) if c < self.schedule.threshold) for row in confidences)
        return [next(slots, len(row)) for slots, row in zip(unsure, confidences, strict=True)]

    def _extended(self, survival: list[float]) -> list[float]:
        return [*survival[:-1], *accumulate(self.mean[len(survival) :], mul, initial=survival[-1])]

    def _seconds(self, count: int, tokens: int, num_drafts: int) -> float:
        """Of a whole step: the draft is paid for, however few of its tokens are verified."""
        key = (count, tokens, num_drafts)
        if key not in self.seconds:
            costs = self.schedule.costs
            assert costs is not None
            self.seconds[key] = costs.draft_seconds(count, num_drafts) + costs.verify_seconds(count, tokens)
        return self.seconds[key]

    def _remember(self, request_ids: Sequence[int], survival: list[list[float]], mean: list[float]) -> None:
        for request, row in zip(request_ids, survival, strict=True):
            self.past.setdefault(request, deque(maxlen=STALE_ROUNDS + 1)).append((self.round, row))
        kept = self.mean or mean
        self.mean = [old + MEAN_SHARE * (new - old) for old, new in zip(kept, mean, strict=False)] + kept[len(mean) :]

    def _stale(self, request_ids: Sequence[int]) -> list[list[float]] | None:
        """Each request's newest survival that is two rounds old or more, beyond what it drafted then by the mean
        confidences of late; that of the others' mean where a request has none yet; None where nobody has."""
        found = []
        for request in request_ids:
            old = [row for number, row in self.past.get(request, ()) if number <= self.round - STALE_ROUNDS]
            found.append(self._extended(old[-1]) if old else None)
        known = [row for row in found if row is not None]
        if not known:
            return None
        mean = [sum(values) / len(values) for values in zip(*known, strict=True)]
        return [mean if row is None else row for row in found]


def calibrated(confidence: Tensor, scaling: Scaling | None) -> Tensor:
    """Confidences [B, K] with `scaling`, float64 then."""
    if scaling is None:
        return confidence
    numbers = (scaling.temperatures, scaling.biases, scaling.floors)
    of_slots = torch.tensor(numbers, dtype=torch.float64, device=confidence.device)[:, : confidence.shape[1]]
    return scaled(torch.logit(confidence.double()), *of_slots)


def scaled(logits: Tensor, temperature: Tensor | float, bias: Tensor | float, floor: Tensor | float) -> Tensor:
    """The probability that a `Scaling` makes of a confidence's logit."""
    return floor + (1 - floor) * torch.sigmoid(logits / temperature + bias)


def algorithm1(survival: Sequence[Sequence[float]], steps_per_second: Callable[[int], float]) -> list[int]:
    """The DSpark paper's Algorithm 1: admit slots of all requests by descending survival while the expected tokens a
    second, (requests + sum of survivals) * steps_per_second(tokens), rise; stop at the first that does not raise them.

    survival [R][K] is non-increasing in each row -> lengths [R]. A slot of survival 0 is never admitted.
    """
    count = len(survival)
    lengths, expected, tokens = [0] * count, float(count), count
    best = expected * steps_per_second(tokens)
    for value, row in by_survival(survival):
        expected, tokens = expected + value, tokens + 1
        if not expected * steps_per_second(tokens) > best:
            break
        best = expected * steps_per_second(tokens)
        lengths[row] += 1
    return lengths


def best_capacity(survival: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> tuple[int, float]:
    """Over the whole curve, which need not be smooth: the number of tokens, the requests' newest ones among them, that
    gives most expected tokens a second, and how many. For survivals that this round's tokens cannot have changed."""
    count = len(survival)
    expected, tokens = float(count), count
    best = tokens, expected / seconds(tokens)
    for value, _ in by_survival(survival):
        expected, tokens = expected + value, tokens + 1
        if (rate := expected / seconds(tokens)) > best[1]:
            best = tokens, rate
    return best


def allocate(survival: Sequence[Sequence[float]], num_drafts: int) -> list[int]:
    """Lengths [R] of the `num_drafts` slots that survive likeliest."""
    lengths = [0] * len(survival)
    for _, row in by_survival(survival)[: max(0, num_drafts)]:
        lengths[row] += 1
    return lengths


def by_survival(survival: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """(survival, row) of all slots with any, descending; equal ones by slot, then by row. So a row's slots come in
    their order, and none before what it stands behind."""
    slots = [
        (-value, slot, row) for row, values in enumerate(survival) for slot, value in enumerate(values) if value > 0
    ]
    return [(-value, row) for value, _, row in sorted(slots)]
