"""Proposal lengths against a loop over slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.schedule import Schedule, ScheduleName
from models.base import Proposal


def proposal_of(confidences: list[list[float]] | None, lengths: list[int], num_drafts: int) -> Proposal:
    tokens = torch.zeros(len(lengths), num_drafts, dtype=torch.int64)
    confidence = None if confidences is None else torch.tensor(confidences)
    return Proposal(tokens, torch.ones(*tokens.shape, 1), torch.tensor(lengths), tokens[..., None], confidence)


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
    found = Schedule(ScheduleName.confidence, threshold).lengths(
        proposal_of(confidences, lengths, num_drafts=len(confidences[0]))
    )
    wanted = []
    for row, length in zip(confidences, lengths, strict=True):
        cut = 0
        while cut < length and row[cut] >= threshold:
            cut += 1
        wanted.append(cut)
    assert found.tolist() == wanted


def test_fixed_sends_all_that_was_drafted_whatever_the_confidence() -> None:
    proposal = proposal_of([[0.0, 0.0], [1.0, 0.0]], [2, 1], num_drafts=2)
    assert Schedule(ScheduleName.fixed, 0.9).lengths(proposal).tolist() == [2, 1]


def test_a_cut_does_not_depend_on_what_follows_it() -> None:
    schedule = Schedule(ScheduleName.confidence, 0.5)
    lengths = [schedule.lengths(proposal_of([[0.9, 0.1, x, y]], [4], 4)).item() for x in (0.0, 1.0) for y in (0.0, 1.0)]
    assert lengths == [1, 1, 1, 1]


def test_confidence_without_a_confidence_head_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a drafter with a confidence head; use schedule=fixed"):
        Schedule(ScheduleName.confidence, 0.5).lengths(proposal_of(None, [1], num_drafts=1))
