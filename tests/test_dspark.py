"""Tests of models/dspark.py: every combination of heads works, and contradictory options are refused."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from data.store import FeatureStore
from models.base import DraftBatch, SlotLayout
from models.checkpoint import load_drafter, save_drafter
from models.dspark import DSpark, MarkovHeadType
from models.losses import LossWeights
from models.target import Target, TargetConfig
from tests.conftest import TINY_LAYER_IDS, build_dspark
from tests.draft_batches import draw_vocabulary, greedy_sampler, lively_dspark, mixed_batch
from tests.draft_checks import IDENTITY, check_a_step_helps, greedy, stored_batch, total_loss
from tests.training_logits import training_logits

NO_HEAD = [(0, MarkovHeadType.vanilla, confidence, False) for confidence in (False, True)]
WITH_HEAD = list(product([8], MarkovHeadType, [False, True], [False, True]))
COMBINATIONS = [(*heads, layout) for heads, layout in product(NO_HEAD + WITH_HEAD, SlotLayout)]


@pytest.fixture(scope="session")
def real_batch(tiny_store: FeatureStore) -> DraftBatch:
    return stored_batch(tiny_store, TINY_LAYER_IDS)


@pytest.mark.parametrize(("rank", "head", "confidence", "with_markov", "layout"), COMBINATIONS)
def test_every_combination_of_heads_trains_decodes_saves_and_loads(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_prompts: list[list[int]],
    real_batch: DraftBatch,
    tmp_path: Path,
    rank: int,
    head: MarkovHeadType,
    confidence: bool,
    with_markov: bool,
    layout: SlotLayout,
) -> None:
    changes: dict[str, Any] = {"markov_rank": rank, "markov_head": head, "slot_layout": layout}
    changes |= {"confidence": confidence, "confidence_with_markov": with_markov}
    drafter = lively_dspark(tiny_target, tiny_target_config, **changes)
    check_a_step_helps(drafter, real_batch)
    prompts = tiny_prompts[:3]
    expected = [generation.tokens for generation in greedy(tiny_target, None, prompts)]
    assert [generation.tokens for generation in greedy(tiny_target, drafter, prompts)] == expected
    save_drafter(drafter, tmp_path, target=IDENTITY)
    loaded = load_drafter(tmp_path).drafter
    assert isinstance(loaded, DSpark) and loaded.config == drafter.config
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), loaded.parameters(), strict=True))


def test_a_trained_drafter_is_accepted_and_keeps_the_output(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    ours, plain = greedy(tiny_target, tiny_dspark, tiny_prompts), greedy(tiny_target, None, tiny_prompts)
    assert [generation.tokens for generation in ours] == [generation.tokens for generation in plain]
    assert sum(r.accepted for generation in ours for r in generation.rounds) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": -1}, r"model\.markov_rank must be at least 0 \(0 = no Markov head\), got -1"),
        ({"markov_rank": 0}, r"model\.confidence_with_markov=true needs model\.markov_rank > 0, got 0"),
        ({"sampled_vocabulary": 0}, r"model\.sampled_vocabulary must be positive or null \(exact\), got 0"),
        ({"decay": -4.0}, r"model\.decay must be positive, 0 \(no decay\) or null \(as published .*\), got -4\.0"),
        ({"sliding_window": 4}, r"model\.sliding_window must be null or more than the 4 slots of a block, got 4"),
        ({"num_layers": 0}, r"model\.num_layers must be at least 1, got 0"),
        ({"num_draft_tokens": 0}, r"model\.num_draft_tokens must be at least 1, got 0"),
    ],
)
def test_contradictory_options_are_named(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_dspark(tiny_target, tiny_target_config, **changes)


@pytest.mark.parametrize("layer_ids", [(), (2, 1), (1, 1), (-1, 2), (1, 4)])
def test_layers_that_the_target_cannot_give_are_named(
    tiny_target: Target, tiny_dspark: DSpark, layer_ids: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids must be ascending, unique and in 0\.\.3"):
        tiny_dspark.config.build(tiny_target.spec, target_layer_ids=layer_ids, mask_token_id=4)


@pytest.mark.parametrize("mask_token_id", [-1, 55])
def test_a_mask_token_outside_the_vocabulary_is_named(
    tiny_target: Target, tiny_dspark: DSpark, mask_token_id: int
) -> None:
    with pytest.raises(ValueError, match=rf"mask_token_id must be in 0\.\.54 \(the vocabulary\), got {mask_token_id}"):
        tiny_dspark.config.build(tiny_target.spec, target_layer_ids=(0,), mask_token_id=mask_token_id)


def test_a_target_without_a_spare_token_needs_one_named(tiny_target: Target, tiny_dspark: DSpark) -> None:
    with pytest.raises(
        ValueError, match=r"target\.mask_token_id=null and every embedding row .* is in use: name the id"
    ):
        tiny_dspark.config.build(tiny_target.spec, target_layer_ids=(0,), mask_token_id=None)


def test_an_embedding_of_another_target_is_refused(tiny_target: Target, tiny_dspark: DSpark) -> None:
    drafter = tiny_dspark.config.build(tiny_target.spec, target_layer_ids=(0,), mask_token_id=4)
    with pytest.raises(ValueError, match=r"target head has shape \(54, 64\), the drafter was built for \(55, 64\)"):
        drafter.bind(tiny_target.embedding, tiny_target.head[:-1])


def test_more_drafts_than_trained_are_refused(tiny_dspark: DSpark) -> None:
    batch = mixed_batch(tiny_dspark)
    state = tiny_dspark.start(batch.input_ids[:, :5], batch.features[:, :5], torch.tensor([5, 5, 5]), 16)
    with pytest.raises(ValueError, match=r"num_draft_tokens=5 is more than the 4"):
        tiny_dspark.propose(state, batch.input_ids[:, 5], greedy_sampler(3), 5)


def test_bound_matrices_stay_outside_parameters_and_checkpoints(tiny_target: Target, tiny_dspark: DSpark) -> None:
    frozen = {tiny_target.embedding.data_ptr(), tiny_target.head.data_ptr()}
    assert not frozen & {parameter.data_ptr() for parameter in tiny_dspark.parameters()}
    assert not [name for name in tiny_dspark.state_dict() if "embed" in name or "lm_head" in name]


def test_heads_that_are_off_leave_no_weights(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    changes = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False}
    drafter = build_dspark(tiny_target, tiny_target_config, **changes)
    assert not [name for name in drafter.state_dict() if "head" in name]
    batch = mixed_batch(drafter)
    assert set(drafter(batch).numerators) == set(drafter.denominators(batch)) == {"tokens"}


def test_the_confidence_label_trains_the_head_but_not_through_the_label(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    """Only the label is detached: the head's input gives gradients to backbone and W1, as in the reference."""
    drafter = lively_dspark(tiny_target, tiny_target_config)
    drafter.config = replace(drafter.config, loss=LossWeights())  # the confidence term alone
    total_loss(drafter, mixed_batch(drafter)).backward()
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    assert drafter.markov_head.markov_w1.weight.grad.any() and drafter.fc.weight.grad.any()
    assert not drafter.markov_head.markov_w2.weight.grad.any()  # reached through the label alone


def test_a_sampled_vocabulary_of_everything_gives_the_exact_loss(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    exact = lively_dspark(tiny_target, tiny_target_config)
    batch = mixed_batch(exact)
    expected = total_loss(exact, batch).item()
    batch.vocabulary = draw_vocabulary(batch, tiny_target.spec.vocab_size)
    assert total_loss(exact, batch).item() == pytest.approx(expected, rel=1e-6)


def test_only_the_sample_of_a_vocabulary_is_trained(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    drafter = lively_dspark(tiny_target, tiny_target_config)
    batch = mixed_batch(drafter)
    batch.input_ids %= 20  # leaves 35 tokens to draw from
    batch.vocabulary = draw_vocabulary(batch, 3)
    total_loss(drafter, batch).backward()
    assert drafter.markov_head is not None
    gradient = drafter.markov_head.markov_w2.weight.grad
    assert set(gradient.any(1).nonzero().flatten().tolist()) == set(batch.vocabulary.ids.tolist())


@pytest.mark.parametrize("head", list(MarkovHeadType))
def test_markov_heads_follow_their_formulas(
    tiny_target: Target, tiny_target_config: TargetConfig, head: MarkovHeadType
) -> None:
    """Left to right over two slots, so that the memory of the RNN counts; z stacks memory, embedding, state."""
    drafter = lively_dspark(tiny_target, tiny_target_config, markov_head=head)
    module, states = drafter.markov_head, torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert module is not None
    memory, expected_memory = module.memory(states[0]), torch.zeros(8)
    for token, state in zip((5, 9), states, strict=True):
        embedded = module.markov_w1.weight[token]
        latent, memory = module.latent(module.markov_w1(torch.tensor(token)), state, memory)
        if head is MarkovHeadType.vanilla:
            expected = embedded
        elif head is MarkovHeadType.gated:
            z = torch.cat((state, embedded))
            expected = (module.gate_proj.weight @ z + module.gate_proj.bias).sigmoid() * embedded
        else:
            z = torch.cat((expected_memory, embedded, state))
            gate, candidate, output = (module.joint_proj.weight @ z + module.joint_proj.bias).view(3, 8)
            expected = output.tanh()
            expected_memory = gate.sigmoid() * expected_memory + (1 - gate.sigmoid()) * candidate.tanh()
            torch.testing.assert_close(memory, expected_memory, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-6)


def test_metrics_are_sums_over_supervised_slots(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    drafter = lively_dspark(tiny_target, tiny_target_config)
    batch = mixed_batch(drafter)
    seen = training_logits(drafter, batch)
    slots, metrics = drafter.supervised_slots(batch), seen.loss.metrics
    overlap = torch.minimum(seen.draft.softmax(-1), seen.target.softmax(-1)).sum(-1)
    agrees = seen.draft.argmax(-1) == seen.target.argmax(-1)
    for slot in range(drafter.num_draft_tokens):
        rows = slots.slot_ids == slot
        assert metrics["accept_rate"][0][slot].item() == pytest.approx(overlap[rows].sum().item(), abs=1e-4)
        assert metrics["accept_rate"][1][slot] == metrics["top1_agreement"][1][slot] == rows.sum()
        assert metrics["top1_agreement"][0][slot] == agrees[rows].sum()
    error = seen.confidence.sigmoid() - overlap
    assert metrics["confidence_bias"][0].item() == pytest.approx((error * slots.weights).sum().item(), abs=1e-4)
    assert metrics["confidence_error"][0].item() == pytest.approx((error.abs() * slots.weights).sum().item(), abs=1e-4)
    for name in ("cross_entropy", "l1", "confidence_bce", "confidence_error", "confidence_bias"):
        assert metrics[name][1].item() == pytest.approx(drafter.slot_weight(batch).item(), rel=1e-6)
