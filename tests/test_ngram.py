"""Prompt lookup against a naive reference, and as a drafter in the decoding loop."""

import copy
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models.ngram import NgramDrafter, lookup
from models.sampling import Sampler, SamplingConfig
from models.target import Target

GREEDY = SamplingConfig(0.0, 0, 1.0, 0.0, 0)
NO_FEATURES = torch.zeros(1, 1, 0)


def naive_lookup(tokens: list[int], max_ngram: int, num_draft_tokens: int) -> list[int]:
    """Every earlier place that some suffix occurs at, then the best by (suffix length, recency)."""
    places = [
        (size, end)
        for size in range(1, max_ngram + 1)
        for end in range(size, len(tokens))  # the occurrence tokens[end-size:end] ends before the last token
        if tokens[end - size : end] == tokens[len(tokens) - size :]
    ]
    if not places:
        return []
    _, end = max(places)
    return tokens[end : end + num_draft_tokens]


few_words = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(few_words, st.integers(1, 4), st.integers(1, 6))
def test_lookup_equals_a_naive_search(tokens: list[int], max_ngram: int, num_draft_tokens: int) -> None:
    assert lookup(tokens, max_ngram, num_draft_tokens) == naive_lookup(tokens, max_ngram, num_draft_tokens)


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    tokens = [7, 8, 9, 1, 2, 9, 3, 7, 8, 9]
    assert lookup(tokens, max_ngram=3, num_draft_tokens=2) == [1, 2]
    assert lookup(tokens, max_ngram=1, num_draft_tokens=2) == [3, 7]


def test_the_most_recent_occurrence_wins_among_equal_suffixes() -> None:
    assert lookup([5, 1, 5, 2, 5], max_ngram=3, num_draft_tokens=1) == [2]


def test_an_occurrence_may_overlap_the_suffix() -> None:
    assert lookup([4, 4, 4], max_ngram=2, num_draft_tokens=3) == [4]


def test_nothing_is_proposed_without_an_earlier_occurrence() -> None:
    assert lookup([1, 2, 3], max_ngram=3, num_draft_tokens=4) == []
    assert lookup([1], max_ngram=3, num_draft_tokens=4) == []


@given(st.lists(few_words, min_size=1, max_size=4), st.integers(1, 5))
def test_proposals_are_ragged_point_masses_of_each_rows_own_history(rows: list[list[int]], num_drafts: int) -> None:
    drafter = NgramDrafter(num_drafts)
    width = max(len(row) for row in rows)
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    counts = torch.tensor([len(row) - 1 for row in rows])  # the newest token is not verified yet
    state = drafter.start(padded, NO_FEATURES, counts, 64)
    last = torch.tensor([row[-1] for row in rows])
    proposal = drafter.propose(state, last, Sampler(GREEDY, torch.arange(len(rows))), num_drafts)
    assert proposal.tokens.shape == (len(rows), num_drafts) and bool((proposal.probs == 1).all())
    assert proposal.candidate_ids is not None and torch.equal(proposal.candidate_ids[..., 0], proposal.tokens)
    for row, tokens, length in zip(rows, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True):
        assert tokens[:length] == naive_lookup(row, 3, num_drafts)


def test_history_grows_by_kept_tokens_only_and_follows_its_row() -> None:
    drafter = NgramDrafter(2)
    tokens = torch.tensor([[1, 2, 0], [3, 4, 5]])
    state = drafter.start(tokens, NO_FEATURES, torch.tensor([2, 3]), 64)
    drafter.advance(state, torch.tensor([[6, 7, 8], [6, 7, 8]]), NO_FEATURES, torch.tensor([1, 3]))
    assert state.histories == [[1, 2, 6], [3, 4, 5, 6, 7, 8]]
    assert state.lengths.tolist() == [3, 6]
    state.select(torch.tensor([1]))
    assert state.histories == [[3, 4, 5, 6, 7, 8]]


def test_ngram_speculation_equals_plain_decoding_and_accepts_drafts(
    tiny_target: Target, tiny_prompts: list[list[int]]
) -> None:
    """Beyond its stop token the target soon repeats itself, so rounds with and without drafts both occur."""
    target = copy.copy(tiny_target)
    target.spec = replace(tiny_target.spec, eos_token_ids=())
    for temperature, rule in ((0.0, Rule.ratio), (1.0, Rule.match)):
        sampling = SamplingConfig(temperature, 0, 1.0, 0.0, 0)
        config = DecodeConfig(60, 12, 4, rule, Schedule(ScheduleName.fixed, 0.0), sampling)
        drafted = decode(target, NgramDrafter(4), tiny_prompts, config).generations
        vanilla = decode(target, None, tiny_prompts, config).generations
        assert [g.tokens for g in drafted] == [g.tokens for g in vanilla]
        rounds = [round_ for generation in drafted for round_ in generation.rounds]
        assert any(round_.accepted for round_ in rounds) and any(not round_.proposed for round_ in rounds)
