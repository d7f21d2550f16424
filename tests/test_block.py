"""Tests of models/block.py: what a block may see, which slots are supervised, and that decoding equals training."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models import masks
from models.base import DraftBatch, SlotLayout
from models.block import BlockDrafter
from models.cache import KVCache
from models.dspark import DSpark, MarkovHeadType
from models.layers import rotate
from models.target import Target, TargetConfig
from tests.conftest import build_dspark, planted_fault
from tests.draft_batches import greedy_sampler, lively_dspark, mixed_batch, ragged_state, stochastic_sampler
from tests.training_logits import check_training_equals_decoding, used_anchors

LAYOUTS = list(SlotLayout)
HEADS = list(MarkovHeadType)


@pytest.fixture(params=LAYOUTS)
def drafter(request: pytest.FixtureRequest, tiny_target: Target, tiny_target_config: TargetConfig) -> DSpark:
    """Two layers, so that information could also leak from slot to slot between them."""
    return lively_dspark(tiny_target, tiny_target_config, slot_layout=request.param, num_layers=2)


@torch.no_grad()
def perturbed_states(drafter: BlockDrafter, batch: DraftBatch, row: int, positions: slice) -> Tensor:
    """Block states [B, A, K, D] with other features at some positions of a row."""
    features = batch.features.clone()
    features[row, positions] = -7.0 * features[row, positions] + 3.0
    return drafter.block_states(replace(batch, features=features))


def check_no_leak(drafter: BlockDrafter) -> None:
    """Exactly equal, not close: what is masked must not enter any sum with a weight but zero."""
    batch = mixed_batch(drafter)
    states = drafter.block_states(batch).detach()
    for row, index, anchor in used_anchors(batch):
        after = perturbed_states(drafter, batch, row, slice(anchor, None))
        assert torch.equal(after[row, index], states[row, index]), f"the block at {anchor} sees what follows"
        before = perturbed_states(drafter, batch, row, slice(anchor - 1, anchor))
        assert (before[row, index] != states[row, index]).any(-1).all(), f"the block at {anchor} misses {anchor - 1}"


@torch.no_grad()
def loop_states(drafter: BlockDrafter, batch: DraftBatch, row: int, anchor: int) -> Tensor:
    """One block by itself [K, D]: known token, masks, its own document's features before it, one softmax a slot."""
    in_place = drafter.slot_layout is SlotLayout.in_place
    num_slots = drafter.num_draft_tokens + in_place
    tokens = torch.tensor([batch.input_ids[row, anchor].item(), *[drafter.mask_token_id] * (num_slots - 1)])
    same = batch.document_ids[row, :anchor] == batch.document_ids[row, anchor]
    context = drafter.hidden_norm(drafter.fc(batch.features[row, :anchor][same]))
    positions = torch.arange(len(context) + num_slots)  # a document's positions start at 0
    cos, sin = drafter.rotary(positions[None])
    x = drafter.embedding[tokens]
    for layer in drafter.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        size = attention.head_dim
        both = torch.cat((context, normed))
        keys = rotate(attention.k_norm(attention.k_proj(both).view(1, len(both), -1, size)), cos, sin)[0]
        values = attention.v_proj(both).view(len(both), -1, size)
        queries = attention.q_norm(attention.q_proj(normed).view(1, num_slots, -1, size))
        queries = rotate(queries, cos[:, len(context) :], sin[:, len(context) :])[0]
        group = queries.shape[1] // keys.shape[1]
        heads = [
            (queries[:, h] @ keys[:, h // group].T / size**0.5).softmax(-1) @ values[:, h // group]
            for h in range(queries.shape[1])
        ]
        x = x + attention.o_proj(torch.cat(heads, dim=-1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    # in place, the known token's own slot predicts nothing
    return drafter.norm(x)[1 if in_place else 0 :]


def test_block_states_equal_a_block_computed_by_itself(drafter: DSpark) -> None:
    batch = mixed_batch(drafter)
    states = drafter.block_states(batch).detach()
    for row, index, anchor in used_anchors(batch):
        # normed states of order 1, through two layers with sums in another order
        torch.testing.assert_close(states[row, index], loop_states(drafter, batch, row, anchor), rtol=1e-4, atol=1e-4)


def test_a_block_sees_no_feature_at_or_after_its_anchor_and_the_one_before(drafter: DSpark) -> None:
    check_no_leak(drafter)


def test_a_leaking_mask_is_noticed(monkeypatch: pytest.MonkeyPatch, drafter: DSpark) -> None:
    def off_by_one(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
        return position <= anchor

    with planted_fault(monkeypatch, masks, "sees_context", off_by_one):
        check_no_leak(drafter)


def test_anchors_one_apart_differ_by_the_feature_between_them(drafter: DSpark) -> None:
    batch = mixed_batch(drafter)
    states = drafter.block_states(batch).detach()
    assert batch.anchors[0, :2].tolist() == [3, 4]
    changed = perturbed_states(drafter, batch, 0, slice(3, 4))
    assert torch.equal(changed[0, 0], states[0, 0])
    assert not torch.equal(changed[0, 1], states[0, 1])


def test_a_block_sees_no_other_document_row_or_token(drafter: DSpark) -> None:
    batch = mixed_batch(drafter)
    states = drafter.block_states(batch).detach()
    first_document = perturbed_states(drafter, batch, 1, slice(0, 11))
    assert torch.equal(first_document[1, 3:], states[1, 3:])  # anchors 13 and 17 are in the second document
    assert torch.equal(first_document[[0, 2]], states[[0, 2]])
    for row, index, anchor in used_anchors(batch):
        tokens = (batch.input_ids + 1) % drafter.spec.vocab_size
        tokens[row, anchor] = batch.input_ids[row, anchor]
        others = drafter.block_states(replace(batch, input_ids=tokens)).detach()
        assert torch.equal(others[row, index], states[row, index])
    assert not torch.equal(drafter.block_states(replace(batch, input_ids=tokens)), states)


def loop_supervision(
    drafter: BlockDrafter, batch: DraftBatch
) -> tuple[Tensor, list[tuple[int, int, Tensor, float, int]]]:
    """Slot by slot, left to right, until the first one that has no supervised token of its own document."""
    mask = torch.zeros(*batch.anchors.shape, drafter.num_draft_tokens, dtype=torch.bool)
    rows = []
    for row, index, anchor in used_anchors(batch):
        for slot in range(drafter.num_draft_tokens):
            label = anchor + 1 + slot
            if label >= batch.input_ids.shape[1] or not batch.loss_mask[row, label]:
                break
            if batch.document_ids[row, label] != batch.document_ids[row, anchor]:
                break
            mask[row, index, slot] = True
            teacher = batch.last_hidden[batch.last_hidden_ids[row, label - 1]]
            weight = float(torch.tensor(-slot / drafter.decay).exp()) if drafter.decay else 1.0
            previous = batch.input_ids[row, label - 1].item()
            rows.append((batch.input_ids[row, label].item(), previous, teacher, weight, slot))
    return mask, rows


@pytest.mark.parametrize("decay", [0.0, 4.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 9])
def test_supervised_slots_equal_a_loop(
    tiny_target: Target, tiny_target_config: TargetConfig, num_draft_tokens: int, decay: float
) -> None:
    """Both layouts label slot k of a block at a with token a + 1 + k."""
    for layout in LAYOUTS:
        changes = {"num_draft_tokens": num_draft_tokens, "decay": decay, "slot_layout": layout}
        drafter = build_dspark(tiny_target, tiny_target_config, **changes)
        batch = mixed_batch(drafter)
        slots, (mask, rows) = drafter.supervised_slots(batch), loop_supervision(drafter, batch)
        assert torch.equal(slots.mask, mask)
        assert 0 < mask.sum() < mask.numel()
        labels, previous, teacher, weights, slot_ids = zip(*rows, strict=True)
        assert slots.labels.tolist() == list(labels)
        assert slots.previous.tolist() == list(previous)
        assert torch.equal(batch.last_hidden[slots.teacher_rows], torch.stack(teacher))
        torch.testing.assert_close(slots.weights, torch.tensor(weights), rtol=1e-6, atol=0)
        assert slots.slot_ids.tolist() == list(slot_ids)
        assert drafter.slot_weight(batch).item() == pytest.approx(sum(weights), rel=1e-6)


def test_a_supervised_token_without_a_stored_state_is_an_error(drafter: DSpark) -> None:
    batch = mixed_batch(drafter)
    batch.last_hidden_ids[0, 4] = -1
    with pytest.raises(AssertionError, match="no stored last hidden state"):
        drafter.supervised_slots(batch)


def gradients(drafter: DSpark, batch: DraftBatch) -> tuple[float, dict[str, Tensor]]:
    drafter.zero_grad()
    loss, denominators = drafter(batch), drafter.denominators(batch)
    total = torch.stack([value / denominators[term].clamp(min=1) for term, value in loss.numerators.items()]).sum()
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def test_an_unused_anchor_contributes_nothing(drafter: DSpark) -> None:
    batch = mixed_batch(drafter)
    wider = replace(batch, anchors=torch.cat((batch.anchors, torch.full((3, 2), -1)), dim=1))
    loss, grads = gradients(drafter, batch)
    wider_loss, wider_grads = gradients(drafter, wider)
    assert wider_loss == pytest.approx(loss, rel=1e-6)
    assert drafter.slot_weight(wider) == drafter.slot_weight(batch)
    for name, grad in grads.items():  # sums over another number of zeros
        torch.testing.assert_close(wider_grads[name], grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())


def test_a_batch_without_anchors_has_no_loss_and_no_gradient(drafter: DSpark) -> None:
    batch = mixed_batch(drafter)
    loss, grads = gradients(drafter, replace(batch, anchors=torch.full((3, 2), -1)))
    assert loss == 0.0
    assert all(bool((grad == 0).all()) for grad in grads.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rank", [0, 8])
def test_training_and_decoding_give_the_same_logits(
    tiny_target: Target, tiny_target_config: TargetConfig, head: MarkovHeadType, layout: SlotLayout, rank: int
) -> None:
    changes = {"num_layers": 2, "slot_layout": layout, "markov_head": head, "markov_rank": rank}
    changes |= {"confidence_with_markov": rank > 0}
    check_training_equals_decoding(lively_dspark(tiny_target, tiny_target_config, **changes))


def test_a_position_off_by_one_in_decoding_is_noticed(monkeypatch: pytest.MonkeyPatch, drafter: DSpark) -> None:
    """Rotary positions are relative, so it is context against block that is shifted."""
    right = KVCache.begin
    with planted_fault(monkeypatch, KVCache, "begin", lambda self, num_new: right(self, num_new) + 1):
        check_training_equals_decoding(drafter)


@torch.no_grad()
def test_ragged_rows_propose_what_each_proposes_alone(drafter: DSpark) -> None:
    counts, last = [9, 2, 5], torch.tensor([4, 8, 15])
    state, tokens, features = ragged_state(drafter, counts)
    together = drafter.propose(state, last, stochastic_sampler(torch.tensor([30, 10, 20])), 4)
    for row, (count, request) in enumerate(zip(counts, [30, 10, 20], strict=True)):
        own = drafter.start(tokens[row : row + 1, :count], features[row : row + 1, :count], torch.tensor([count]), 64)
        alone = drafter.propose(own, last[row : row + 1], stochastic_sampler(torch.tensor([request])), 4)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.probs[0], together.probs[row], rtol=0, atol=1e-5)  # sums of other widths
        torch.testing.assert_close(alone.confidence[0], together.confidence[row], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_shorter_proposal_is_a_prefix_of_the_full_one(drafter: DSpark) -> None:
    state, _, _ = ragged_state(drafter, [9, 2, 5])
    last, sampler = torch.tensor([4, 8, 15]), stochastic_sampler(torch.arange(3))
    full = drafter.propose(state, last, sampler, 4)
    for num in (1, 2, 3):
        short = drafter.propose(state, last, sampler, num)
        assert short.lengths.tolist() == [num] * 3
        assert torch.equal(short.tokens, full.tokens[:, :num])
        for name in ("probs", "confidence"):  # the head is multiplied with another number of rows
            torch.testing.assert_close(getattr(short, name), getattr(full, name)[:, :num], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_proposal_leaves_the_state_alone(drafter: DSpark) -> None:
    state, _, _ = ragged_state(drafter, [9, 2, 5])
    before = [tuple(x.clone() for x in state.cache.read(layer)) for layer in range(2)]
    drafter.propose(state, torch.tensor([4, 8, 15]), greedy_sampler(3), 4)
    assert state.lengths.tolist() == [9, 2, 5]
    for layer in range(2):
        assert all(torch.equal(a, b) for a, b in zip(before[layer], state.cache.read(layer), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kept", [[5, 5, 5], [1, 5, 3]])
def test_after_a_round_the_cache_equals_a_fresh_start(drafter: DSpark, kept: list[int]) -> None:
    """All 4 drafts accepted, where a drafter that skips the last one's features would fall behind; then a mix."""
    state, tokens, features = ragged_state(drafter, [6, 6, 6])
    drafter.advance(state, tokens[:, 6:11], features[:, 6:11], torch.tensor(kept))
    lengths = [6 + count for count in kept]
    assert state.lengths.tolist() == lengths
    fresh, _, _ = ragged_state(drafter, lengths)
    for layer in range(2):
        for ours, expected in zip(state.cache.read(layer), fresh.cache.read(layer), strict=True):
            for row, length in enumerate(lengths):
                torch.testing.assert_close(ours[row, :, :length], expected[row, :, :length], rtol=1e-5, atol=1e-5)
    last = torch.tensor([4, 8, 15])
    ours, expected = (drafter.propose(s, last, greedy_sampler(3), 4) for s in (state, fresh))
    assert torch.equal(ours.tokens, expected.tokens)


@torch.no_grad()
def test_selecting_rows_keeps_their_proposals(drafter: DSpark) -> None:
    state, _, _ = ragged_state(drafter, [9, 2, 5])
    last, rows = torch.tensor([4, 8, 15]), torch.tensor([2, 0])
    full = drafter.propose(state, last, greedy_sampler(3), 4)
    state.select(rows)
    assert state.lengths.tolist() == [5, 9]
    assert torch.equal(drafter.propose(state, last[rows], greedy_sampler(2), 4).tokens, full.tokens[rows])
