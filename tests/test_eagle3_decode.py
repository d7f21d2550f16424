"""Tests of models/eagle3.py in decoding: it drafts what training saw, and its cache forgets the chain's own states."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from models.base import DraftBatch
from models.cache import KVCache
from models.eagle3 import Eagle3, Eagle3State
from models.sampling import Purpose, Sampler, draw
from models.target import Target, TargetConfig
from tests.chains import chain_output, gemma_eagle3, lively_eagle3, supervised_chains
from tests.conftest import planted_fault
from tests.draft_batches import greedy_sampler, mixed_batch, ragged_state, stochastic_sampler

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_layer": {"num_fused_layers": 1},
    "two_layers": {"num_fused_layers": 2},
    "qk_norm": {"qk_norm": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "own_head": {"own_head": True},
    "draft_vocabulary": {"draft_vocab_size": 20},
    "all": {
        "qk_norm": True,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "own_head": True,
        "draft_vocab_size": 20,
        "num_fused_layers": 2,
    },
    "reference": {"qk_norm": True, "norm_before_fc": True, "norm_output": True, "draft_vocab_size": 20},
}


@pytest.fixture
def drafter(tiny_target: Target, tiny_target_config: TargetConfig) -> Eagle3:
    return lively_eagle3(tiny_target, tiny_target_config)


# ---- training and decoding


@dataclass
class ForcedRows:
    """A sampler that records the logits it is given and answers with every row's known tokens."""

    columns: Tensor  # [N, K] of the head
    first_positions: Tensor  # [N]
    logits: list[Tensor] = field(default_factory=list)
    ranking = None
    ranked = Sampler.ranked

    def probs(self, logits: Tensor, *_drafted: Tensor, **_options: Any) -> Tensor:
        self.logits.append(logits)
        return logits.softmax(-1)

    def draw(self, probs: Tensor, positions: Tensor, purpose: Any) -> Tensor:
        slot = len(self.logits) - 1
        assert torch.equal(positions, self.first_positions + slot)
        return self.columns[:, slot]


def columns_of(drafter: Eagle3, tokens: Tensor) -> Tensor:
    """Column of the draft's head for each token."""
    if drafter.draft_ids is None:
        return tokens
    place = torch.full((drafter.spec.vocab_size,), -1)
    place[drafter.draft_ids] = torch.arange(len(drafter.draft_ids))
    assert (place[tokens] >= 0).all()
    return place[tokens]


def draftable_batch(drafter: Eagle3) -> DraftBatch:
    """Tokens of the draft vocabulary only, so that all of them can be forced upon a chain."""
    batch = mixed_batch(drafter)
    if drafter.draft_ids is not None:
        batch.input_ids = drafter.draft_ids[batch.input_ids % len(drafter.draft_ids)]
    return batch


def gather_rows(values: Tensor, places: list[tuple[int, int, int]]) -> Tensor:
    """Right-padded values[row, begin:end] of each place."""
    return torch.nn.utils.rnn.pad_sequence([values[row, begin:end] for row, begin, end in places], batch_first=True)


def state_after(drafter: Eagle3, batch: DraftBatch, places: list[tuple[int, int, int]], split: bool) -> Eagle3State:
    """Prompts of all positions of the places, or of half of them, then a verification that keeps the rest."""
    middles = [begin + (end - begin) // 2 if split else end for _, begin, end in places]
    prompts = [(row, begin, middle) for (row, begin, _), middle in zip(places, middles, strict=True)]
    counts = torch.tensor([end - begin for _, begin, end in prompts])
    state = drafter.start(gather_rows(batch.input_ids, prompts), gather_rows(batch.features, prompts), counts, 64)
    if split:
        # what was verified and rejected behind the kept ones is there, too
        rest = [(row, middle, min(end + 3, 24)) for (row, _, end), middle in zip(places, middles, strict=True)]
        kept = torch.tensor([end - middle for (_, _, end), middle in zip(places, middles, strict=True)])
        drafter.advance(state, gather_rows(batch.input_ids, rest), gather_rows(batch.features, rest), kept)
    return state


@torch.no_grad()
def check_training_equals_decoding(drafter: Eagle3) -> None:
    batch, num_steps = draftable_batch(drafter), drafter.num_draft_tokens
    training, chains = chain_output(drafter, batch).logits, supervised_chains(batch, drafter.num_draft_tokens)
    assert sorted(training) == chains
    starts = sorted({chain[:2] for chain in chains})
    begins = [batch.document_ids[row].tolist().index(int(batch.document_ids[row, start])) for row, start in starts]
    places = [(row, begin, start + 1) for (row, start), begin in zip(starts, begins, strict=True)]
    single = [place for place in places if place[2] - place[1] == 1]  # a prompt of one token has no half
    assert len(single) == 4
    compared = []
    for members, split in ((single, False), ([place for place in places if place not in single], True)):
        state = state_after(drafter, batch, members, split)
        assert state.lengths.tolist() == [end - begin for _, begin, end in members]
        padded = torch.nn.functional.pad(batch.input_ids, (0, num_steps + 1), value=3)  # a token that can be forced
        ahead = gather_rows(padded, [(row, end, end + 1 + num_steps) for row, _, end in members])
        forced = ForcedRows(columns_of(drafter, ahead[:, 1:]), state.lengths + 1)
        drafter.propose(state, ahead[:, 0], forced, num_steps)  # type: ignore[arg-type]
        for index, (row, _, end) in enumerate(members):
            for step in range(num_steps):
                if (row, end - 1, step) in training:
                    # the largest logits are 1e1; training takes many chains and longer rows in one product
                    expected = training[row, end - 1, step]
                    torch.testing.assert_close(forced.logits[step][index], expected, rtol=1e-4, atol=1e-4)
                    compared.append((row, end - 1, step))
    assert sorted(compared) == chains
    assert torch.stack(list(training.values())).std() > 0.3


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_training_and_decoding_give_the_same_logits(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any]
) -> None:
    check_training_equals_decoding(lively_eagle3(tiny_target, tiny_target_config, **changes))


@pytest.mark.parametrize("changes", [{}, {"own_head": True, "draft_vocab_size": 20}])
def test_capped_logits_are_capped_in_decoding_too(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any]
) -> None:
    check_training_equals_decoding(gemma_eagle3(tiny_target, tiny_target_config, **changes))


def test_a_position_off_by_one_in_decoding_is_noticed(monkeypatch: pytest.MonkeyPatch, drafter: Eagle3) -> None:
    """Rotary positions are relative, so it is context against chain that is shifted."""
    right = KVCache.begin
    with planted_fault(monkeypatch, KVCache, "begin", lambda self, num_new: right(self, num_new) + 1):
        check_training_equals_decoding(drafter)


def test_a_chain_that_is_not_fed_its_own_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch, drafter: Eagle3) -> None:
    right, first = Eagle3.step, {}

    def stuck(self: Eagle3, tokens: Tensor, hidden: Tensor, positions: Tensor, chain: list[Any], *rest: Any) -> Tensor:
        first["tokens"] = tokens if not chain else first["tokens"]
        return right(self, first["tokens"] if tokens.shape[1] == 1 else tokens, hidden, positions, chain, *rest)

    with planted_fault(monkeypatch, Eagle3, "step", stuck):
        check_training_equals_decoding(drafter)


# ---- the cache


def check_same_state(ours: Eagle3State, expected: Eagle3State) -> None:
    assert torch.equal(ours.lengths, expected.lengths)
    close = {"rtol": 1e-6, "atol": 5e-6}  # keys of up to 1e1, projected with another number of rows
    torch.testing.assert_close(ours.hidden, expected.hidden, **close)
    for mine, fresh in zip(ours.cache.read(0), expected.cache.read(0), strict=True):
        for row, length in enumerate(expected.cache.lengths.tolist()):
            torch.testing.assert_close(mine[row, :, :length], fresh[row, :, :length], **close)


@torch.no_grad()
def check_rounds(drafter: Eagle3, kept: list[int]) -> None:
    """A proposal comes between, whose own states must not stay: every cached pair is made of the target's features."""
    state, tokens, features = ragged_state(drafter, [6, 6, 6])
    drafter.propose(state, tokens[:, 6], greedy_sampler(3), 4)
    drafter.advance(state, tokens[:, 6:11], features[:, 6:11], torch.tensor(kept))
    fresh, _, _ = ragged_state(drafter, [6 + count for count in kept])
    check_same_state(state, fresh)
    last = torch.tensor([4, 8, 15])
    ours, expected = (drafter.propose(s, last, greedy_sampler(3), 4) for s in (state, fresh))
    assert torch.equal(ours.tokens, expected.tokens)
    # a second round, from rows of unequal lengths
    places = torch.tensor([6 + count for count in kept])[:, None] + torch.arange(3)
    more = features.gather(1, places[..., None].expand(-1, -1, features.shape[-1]))
    drafter.advance(state, tokens.gather(1, places), more, torch.tensor([2, 3, 1]))
    check_same_state(state, ragged_state(drafter, [6 + a + b for a, b in zip(kept, [2, 3, 1], strict=True)])[0])


@pytest.mark.parametrize("kept", [[5, 5, 5], [1, 5, 3]], ids=["all accepted", "some accepted"])
def test_after_a_round_the_cache_equals_a_fresh_start(drafter: Eagle3, kept: list[int]) -> None:
    check_rounds(drafter, kept)


def test_a_newest_feature_taken_from_a_rejected_draft_is_noticed(
    monkeypatch: pytest.MonkeyPatch, drafter: Eagle3
) -> None:
    right = Eagle3.advance

    def keeps_the_last(self: Eagle3, state: Eagle3State, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        right(self, state, tokens, features, counts)
        state.hidden = self.fuse(features)[:, -1]

    check_rounds(drafter, [1, 5, 3])
    with planted_fault(monkeypatch, Eagle3, "advance", keeps_the_last):
        check_rounds(drafter, [1, 5, 3])


@torch.no_grad()
def test_a_proposal_leaves_the_state_alone(drafter: Eagle3) -> None:
    state, _, _ = ragged_state(drafter, [9, 1, 5])
    before = [x.clone() for x in (*state.cache.read(0), state.hidden, state.lengths)]
    drafter.propose(state, torch.tensor([4, 8, 15]), greedy_sampler(3), 4)
    after = (*state.cache.read(0), state.hidden, state.lengths)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.no_grad()
def test_ragged_rows_propose_what_each_proposes_alone(drafter: Eagle3) -> None:
    counts, last = [9, 1, 5], torch.tensor([4, 8, 15])
    state, tokens, features = ragged_state(drafter, counts)
    together = drafter.propose(state, last, stochastic_sampler(torch.tensor([30, 10, 20])), 4)
    for row, (count, request) in enumerate(zip(counts, [30, 10, 20], strict=True)):
        own = drafter.start(tokens[row : row + 1, :count], features[row : row + 1, :count], torch.tensor([count]), 64)
        alone = drafter.propose(own, last[row : row + 1], stochastic_sampler(torch.tensor([request])), 4)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.probs[0], together.probs[row], rtol=0, atol=1e-5)  # sums of other widths


@torch.no_grad()
def test_prompts_of_one_token_work(drafter: Eagle3) -> None:
    """Nothing is cached yet: the chain begins with its own pair alone."""
    state, tokens, features = ragged_state(drafter, [1, 1, 1])
    assert state.lengths.tolist() == [1, 1, 1]
    proposal = drafter.propose(state, tokens[:, 1], greedy_sampler(3), 4)
    wider, _, _ = ragged_state(drafter, [1, 1, 5])
    assert torch.equal(drafter.propose(wider, tokens[:, 1], greedy_sampler(3), 4).tokens[:2], proposal.tokens[:2])
    drafter.advance(state, tokens[:, 1:4], features[:, 1:4], torch.tensor([3, 1, 2]))
    check_same_state(state, ragged_state(drafter, [4, 2, 3])[0])


@torch.no_grad()
def test_selecting_rows_keeps_their_proposals(drafter: Eagle3) -> None:
    state, tokens, features = ragged_state(drafter, [9, 2, 5])
    last, rows = torch.tensor([4, 8, 15]), torch.tensor([2, 0])
    full = drafter.propose(state, last, greedy_sampler(3), 4)
    state.select(rows)
    assert state.lengths.tolist() == [5, 9] and len(state.hidden) == len(state.cache.read(0)[0]) == 2
    assert torch.equal(drafter.propose(state, last[rows], greedy_sampler(2), 4).tokens, full.tokens[rows])
    drafter.advance(state, tokens[rows, 9:12], features[rows, 9:12], torch.tensor([1, 1]))
    assert state.lengths.tolist() == [6, 10]


@torch.no_grad()
@pytest.mark.parametrize("num", [1, 3, 6])
def test_a_chain_may_be_cut_or_drawn_out(drafter: Eagle3, num: int) -> None:
    """Also beyond the steps of training."""
    state, _, _ = ragged_state(drafter, [9, 2, 5])
    last, sampler = torch.tensor([4, 8, 15]), stochastic_sampler(torch.arange(3))
    four, other = drafter.propose(state, last, sampler, 4), drafter.propose(state, last, sampler, num)
    shared = min(4, num)
    assert other.tokens.shape == (3, num)
    assert torch.equal(other.tokens[:, :shared], four.tokens[:, :shared])
    torch.testing.assert_close(other.probs[:, :shared], four.probs[:, :shared], rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_tokens_are_drawn_from_their_probabilities_by_request_and_position(
    tiny_target: Target, tiny_target_config: TargetConfig, draft_vocab_size: int | None
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config, draft_vocab_size=draft_vocab_size)
    state, _, _ = ragged_state(drafter, [9, 2, 5])
    sampler = stochastic_sampler(torch.tensor([30, 10, 20]))
    proposal = drafter.propose(state, torch.tensor([4, 8, 15]), sampler, 4)
    positions = torch.tensor([9, 2, 5])[:, None] + 1 + torch.arange(4)
    columns = draw(proposal.probs, sampler.uniform(positions, Purpose.draft))
    assert torch.equal(columns_of(drafter, proposal.tokens), columns)


# ---- stop tokens


@torch.no_grad()
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_nothing_is_proposed_behind_a_drawn_stop_token(
    tiny_target: Target, tiny_target_config: TargetConfig, draft_vocab_size: int | None
) -> None:
    """With a draft vocabulary the stop token is known by its target id, not by its column."""
    drafter = lively_eagle3(tiny_target, tiny_target_config, draft_vocab_size=draft_vocab_size)
    (stop,) = drafter.spec.eos_token_ids
    drawn = torch.tensor([[stop, 40, 41, 42], [40, 41, stop, stop], [40, 41, 42, stop], [40, 41, 42, 43]])
    if drafter.draft_ids is not None:
        assert stop == 3 and drafter.draft_ids[3] != stop
        drawn[3, 0] = drafter.draft_ids[3]
    batch = mixed_batch(drafter)
    rows = torch.tensor([0, 1, 2, 0])
    state = drafter.start(batch.input_ids[rows, :5], batch.features[rows, :5], torch.full((4,), 5), 16)
    forced = ForcedRows(columns_of(drafter, drawn), state.lengths + 1)
    proposal = drafter.propose(state, torch.full((4,), 9), forced, 4)  # type: ignore[arg-type]
    assert torch.equal(proposal.tokens, drawn)
    assert proposal.lengths.tolist() == [1, 3, 4, 4]
