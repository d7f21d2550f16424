"""Proposal lengths against loops over slots, non-anticipation by enumeration, and the costs that decide them."""

import itertools
import math
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import eval.schedule as schedule_module
from eval.costs import CostTable, levelled
from eval.schedule import (
    ASYNC,
    PROBE_ROUNDS,
    Scaling,
    Schedule,
    ScheduleName,
    Scheduler,
    algorithm1,
    allocate,
    best_capacity,
    calibrated,
)
from models.base import Proposal
from tests import planted_faults as faults
from tests.test_verify import Case, emitted_distribution


def proposal_of(confidences: list[list[float]] | None, lengths: list[int], num_drafts: int) -> Proposal:
    tokens = torch.zeros(len(lengths), num_drafts, dtype=torch.int64)
    confidence = None if confidences is None else torch.tensor(confidences)
    return Proposal(tokens, torch.ones(*tokens.shape, 1), torch.tensor(lengths), tokens[..., None], confidence)


def lengths_of(schedule: Schedule, proposal: Proposal) -> Tensor:
    """Of a first round."""
    scheduler, requests = Scheduler(schedule), range(len(proposal.tokens))
    assert scheduler.draft_length(requests, proposal.tokens.shape[1]) == proposal.tokens.shape[1]
    return scheduler.lengths(proposal, requests)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    num_drafts, batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    level = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # exact in float32, so the threshold can be met exactly
    block = st.lists(level, min_size=num_drafts, max_size=num_drafts)
    confidences = draw(st.lists(block, min_size=batch_size, max_size=batch_size))
    return confidences, draw(st.lists(st.integers(0, num_drafts), min_size=batch_size, max_size=batch_size))


@given(rows(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_confidence_cuts_at_the_first_slot_under_the_threshold(
    case: tuple[list[list[float]], list[int]], threshold: float
) -> None:
    confidences, lengths = case
    proposal = proposal_of(confidences, lengths, num_drafts=len(confidences[0]))
    found = lengths_of(Schedule(ScheduleName.confidence, threshold), proposal)
    wanted = []
    for row, length in zip(confidences, lengths, strict=True):
        cut = 0
        while cut < length and row[cut] >= threshold:
            cut += 1
        wanted.append(cut)
    assert found.tolist() == wanted


def test_fixed_sends_all_that_was_drafted_whatever_the_confidence() -> None:
    proposal = proposal_of([[0.0, 0.0], [1.0, 0.0]], [2, 1], num_drafts=2)
    assert lengths_of(Schedule(ScheduleName.fixed, 0.9), proposal).tolist() == [2, 1]


def test_a_cut_does_not_depend_on_what_follows_it() -> None:
    schedule = Schedule(ScheduleName.confidence, 0.5)
    blocks = [[0.9, 0.1, x, y] for x in (0.0, 1.0) for y in (0.0, 1.0)]
    lengths = [lengths_of(schedule, proposal_of([block], [4], 4)).item() for block in blocks]
    assert lengths == [1, 1, 1, 1]


def test_confidence_without_a_confidence_head_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a drafter with a confidence head; use schedule=fixed"):
        lengths_of(Schedule(ScheduleName.confidence, 0.5), proposal_of(None, [1], num_drafts=1))


# ---- the DSpark paper's Algorithm 1, and its appendix A


def algorithm1_slowly(survival: list[list[float]], speed: Callable[[int], float]) -> list[int]:
    """One admission after the other, each time looked for among all rows."""
    lengths = [0] * len(survival)
    best = len(survival) * speed(len(survival))
    while True:
        open_rows = [row for row, length in enumerate(lengths) if length < len(survival[row])]
        if not open_rows:
            return lengths
        row = min(open_rows, key=lambda r: (-survival[r][lengths[r]], lengths[r], r))
        lengths[row] += 1
        expected = len(survival) + sum(sum(values[:n]) for values, n in zip(survival, lengths, strict=True))
        rate = expected * speed(len(survival) + sum(lengths))
        if survival[row][lengths[row] - 1] == 0 or rate <= best:
            lengths[row] -= 1
            return lengths
        best = rate


@st.composite
def survivals(draw: st.DrawFn) -> list[list[float]]:
    num_drafts = draw(st.integers(1, 5))
    step = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    row = st.lists(step, min_size=num_drafts, max_size=num_drafts).map(
        lambda r: list(accumulate(r, lambda a, b: a * b))
    )
    return draw(st.lists(row, min_size=1, max_size=4))


@given(survivals(), st.lists(st.sampled_from([1.0, 0.9, 0.6, 0.3]), min_size=24, max_size=24))
def test_algorithm1_admits_by_survival_and_stops_at_the_first_that_does_not_pay(
    survival: list[list[float]], speeds: list[float]
) -> None:
    speeds = list(accumulate(speeds, lambda a, b: a * b))
    assert algorithm1(survival, lambda n: speeds[n - 1]) == algorithm1_slowly(survival, lambda n: speeds[n - 1])


@given(survivals(), st.lists(st.floats(0.1, 2.0), min_size=25, max_size=25))
def test_the_best_capacity_is_the_best_of_all(survival: list[list[float]], costs: list[float]) -> None:
    ordered = sorted((value for row in survival for value in row if value), reverse=True)
    rates = [(len(survival) + sum(ordered[:n])) / costs[len(survival) + n] for n in range(len(ordered) + 1)]
    capacity, rate = best_capacity(survival, lambda n: costs[n])
    assert (capacity, rate) == (len(survival) + rates.index(max(rates)), pytest.approx(max(rates)))


@given(survivals(), st.integers(0, 24))
def test_a_capacity_goes_to_the_likeliest_slots_of_unbroken_blocks(
    survival: list[list[float]], num_drafts: int
) -> None:
    lengths = allocate(survival, num_drafts)
    possible = sum(value > 0 for row in survival for value in row)
    assert sum(lengths) == min(num_drafts, possible)
    taken = [value for row, n in zip(survival, lengths, strict=True) for value in row[:n]]
    left = [value for row, n in zip(survival, lengths, strict=True) for value in row[n:]]
    assert min(taken, default=1.0) >= max(left, default=0.0)


def table(*verify: float, draft: float = 0.0) -> CostTable:
    """Of one request: seconds for 0, 1, .. drafts."""
    return CostTable([1], [[draft] * len(verify)], [list(verify)])


def shares(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


HALVES = shares(0.5, 0.5)
APPENDIX = Case(
    target={(): shares(0.7, 0.3), (0,): HALVES, (1,): shares(1.0, 0.0)}
    | dict.fromkeys(itertools.product((0, 1), repeat=2), HALVES),
    draft={(): HALVES, (0,): HALVES, (1,): shares(0.0, 1.0)},
    num_drafts=2,
    vocab_size=2,
)


def appendix_a() -> list[float]:
    """Distribution of the first token: SPS(1..3) = 1, .5, .45, the first draft accepted with .8, the second for certain
    behind token 0 and never behind token 1."""
    schedule = Schedule(ScheduleName.algorithm1, 0.0, table(1.0, 1 / 0.5, 1 / 0.45))
    lengths = [
        lengths_of(schedule, proposal_of([[0.8, 1.0 if draft[0] == 0 else 0.0]], [2], 2)).item()
        for draft in APPENDIX.drafts()
    ]
    emitted = emitted_distribution(APPENDIX, lengths=lengths)
    return [sum(mass for tokens, mass in emitted.items() if tokens[0] == token) for token in (0, 1)]


def test_the_counter_example_of_the_papers_appendix_keeps_the_distribution() -> None:
    assert appendix_a() == pytest.approx([0.7, 0.3], abs=1e-12)


def test_a_search_that_looks_back_from_the_whole_curve_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "algorithm1", faults.looks_back_from_the_whole_curve)
    assert appendix_a() == pytest.approx([0.85, 0.15], abs=1e-12)


@pytest.mark.parametrize("name", [ScheduleName.algorithm1, ASYNC])
def test_a_cliff_in_the_costs_moves_the_cut(name: ScheduleName) -> None:
    """Verifying more than so many tokens costs a hundred times as much: the cut moves with it."""
    for cliff in range(5):
        costs = table(*[1.0 + 0.01 * k if k <= cliff else 100.0 for k in range(5)])
        scheduler = Scheduler(Schedule(name, 0.0, costs))
        for _ in range(4):
            assert scheduler.draft_length([7], 4) == 4
            lengths = scheduler.lengths(proposal_of([[0.9] * 4], [4], 4), [7])
        assert lengths.tolist() == [cliff]


def test_async_decides_by_what_was_known_two_rounds_ago() -> None:
    costs = table(*[1.0 + 0.3 * k for k in range(5)])
    scheduler, found = Scheduler(Schedule(ASYNC, 0.0, costs)), []
    for confidence in (0.95, 0.95, 0.95, 0.1, 0.1, 0.1, 0.1):
        scheduler.draft_length([3], 4)
        found.append(scheduler.lengths(proposal_of([[confidence] * 4], [4], 4), [3]).item())
    assert found == [4, 4, 4, 4, 4, 0, 0]


def test_async_gives_a_request_without_a_past_what_the_others_were_sure_of() -> None:
    costs = CostTable([1, 2], [[0.0] * 3] * 2, [[1.0, 1.2, 1.4], [1.0, 1.2, 1.4]])
    scheduler = Scheduler(Schedule(ASYNC, 0.0, costs))
    for _ in range(3):
        scheduler.draft_length([0], 2)
        scheduler.lengths(proposal_of([[0.9, 0.9]], [2], 2), [0])
    scheduler.draft_length([0, 5], 2)
    assert scheduler.lengths(proposal_of([[0.9, 0.9], [0.9, 0.9]], [2, 2], 2), [0, 5]).tolist() == [2, 2]
    scheduler.forget(0)
    assert 0 not in scheduler.past


@pytest.mark.parametrize(("draft", "wait"), [(5.0, PROBE_ROUNDS), (2.199, 240)])
@pytest.mark.parametrize("name", list(ScheduleName))
def test_the_gate_stops_drafting_where_it_does_not_pay_and_looks_again(
    name: ScheduleName, draft: float, wait: int
) -> None:
    """A draft that costs 2.4 rounds more takes one hundredth of the time every 240 rounds."""
    dear = table(1.0, 1.1, 1.2, draft=draft)
    dear.draft[0][0] = 0.0
    scheduler, drafted = Scheduler(Schedule(name, 0.0, dear, gate=True)), []
    for _ in range(600):
        drafted.append(scheduler.draft_length([1], 2))
        if drafted[-1]:
            scheduler.lengths(proposal_of([[0.9, 0.9]], [2], 2), [1])
    assert set(drafted) == {0, 2}
    assert [place for place, value in enumerate(drafted) if value] == [0, 1, *range(2 + wait, 600, 1 + wait)]


def test_the_gate_keeps_drafting_where_it_pays() -> None:
    cheap = table(1.0, 1.1, 1.2, draft=0.01)
    scheduler = Scheduler(Schedule(ScheduleName.fixed, 0.0, cheap, gate=True))
    for _ in range(40):
        assert scheduler.draft_length([1], 2) == 2
        assert scheduler.lengths(proposal_of([[0.9, 0.9]], [2], 2), [1]).tolist() == [2]


@pytest.mark.parametrize("name", [ScheduleName.algorithm1, ASYNC])
def test_no_more_is_drafted_than_paid_two_rounds_ago_but_now_and_then(name: ScheduleName) -> None:
    """The third draft costs half a round and is never accepted: two are drafted, and three at times."""
    costs = CostTable([1], [[0.0, 0.1, 0.2, 0.7]], [[1.0, 1.01, 1.02, 1.03]])
    scheduler, drafted = Scheduler(Schedule(name, 0.0, costs)), []
    for _ in range(200):
        drafted.append(scheduler.draft_length([1], 3))
        confidence = [[0.9, 0.8, 0.01][: drafted[-1]]]
        lengths = scheduler.lengths(proposal_of(confidence, [drafted[-1]], drafted[-1]), [1])
        assert lengths.tolist() == [min(2, drafted[-1])] or drafted[-1] == 3
    wait = math.ceil((1.72 / 1.22 - 1) / 0.01)
    assert drafted[:2] == [3, 3] and set(drafted[2:]) == {2, 3}
    places = [place for place, length in enumerate(drafted) if length == 3]
    assert places[2:] == list(range(2 + wait, 200, 1 + wait))


def test_what_is_not_drafted_is_expected_as_it_was_of_late() -> None:
    costs = CostTable([1], [[0.0] * 4], [[1.0, 1.1, 1.2, 1.3]])
    scheduler = Scheduler(Schedule(ScheduleName.algorithm1, 0.0, costs))
    for confidence in ([0.8, 0.5, 0.5], [0.6], [0.6]):
        scheduler.draft_length([1], 3)
        scheduler.lengths(proposal_of([confidence], [len(confidence)], len(confidence)), [1])
    scheduler.round += 1
    (known,) = scheduler._stale([1])  # type: ignore[misc]
    assert known == pytest.approx([0.6, 0.3, 0.15])
    assert scheduler.mean == pytest.approx([0.8 + 0.1 * -0.2 + 0.1 * (0.6 - 0.78), 0.5, 0.5])


def test_temperatures_divide_the_logits_of_their_slots() -> None:
    confidence = torch.tensor([[0.5, 0.9, 0.9]])
    found = calibrated(confidence, Scaling((3.0, 2.0, 0.5), (0.0,) * 3, (0.0,) * 3))
    assert found.tolist()[0] == pytest.approx([0.5, 0.75, 81 / 82], rel=1e-6)
    schedule = Schedule(ScheduleName.confidence, 0.8, scaling=Scaling((1.0, 2.0, 0.5), (0.0,) * 3, (0.0,) * 3))
    assert lengths_of(schedule, proposal_of([[0.9, 0.9, 0.9]], [3], 3)).tolist() == [1]


def test_schedules_that_need_costs_say_so() -> None:
    with pytest.raises(ValueError, match="schedule=algorithm1 with gate=false needs a cost table"):
        Schedule(ScheduleName.algorithm1, 0.0)
    with pytest.raises(ValueError, match="schedule=fixed with gate=true needs a cost table"):
        Schedule(ScheduleName.fixed, 0.0, gate=True)


# ---- costs


def test_costs_are_straight_lines_between_and_beyond_what_was_measured() -> None:
    costs = CostTable([1, 4], [[0.0, 1.0, 2.0], [0.0, 4.0, 8.0]], [[1.0, 2.0, 4.0], [4.0, 8.0, 16.0]])
    assert costs.verify_seconds(1, 2) == 2.0
    assert costs.verify_seconds(1, 2.5) == 3.0
    assert costs.verify_seconds(4, 12) == 16.0
    assert costs.verify_seconds(2, 4) == pytest.approx(2.0 + (8.0 - 2.0) / 3)
    assert costs.verify_seconds(7, 14) == pytest.approx(8.0 + 6.0)
    assert costs.verify_seconds(1, 4) == 6.0
    assert costs.draft_seconds(2, 1) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("loads", "rows"), [([1, 2], [[1.0]]), ([2, 1], [[1.0], [1.0]]), ([0], [[1.0]]), ([1, 2], [[1.0], [1.0, 2.0]])]
)
def test_a_cost_table_that_contradicts_itself_is_refused(loads: list[int], rows: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable(loads, rows, rows)


def test_what_costs_less_with_more_tokens_is_levelled() -> None:
    assert levelled([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
