"""Tests of models/dflash.py: both layouts with and without a window train, decode as trained, save and load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.store import FeatureStore
from models import block, masks
from models.base import SlotLayout
from models.checkpoint import load_drafter, save_drafter
from models.dflash import DFlash
from models.losses import LossWeights, dynamic_weights, published_decay
from models.sampling import Purpose, SamplingConfig, draw
from models.target import Target, TargetConfig
from tests.conftest import TINY_LAYER_IDS, build_drafter, dflash_config, planted_fault
from tests.draft_batches import enliven, greedy_sampler, mixed_batch, stochastic_sampler
from tests.draft_checks import IDENTITY, check_a_step_helps, greedy, stored_batch
from tests.training_logits import check_training_equals_decoding, training_logits, used_anchors

WINDOW = 6  # more than a block's 4 or 5 slots, and less than most of the contexts of a mixed batch
LAYOUTS, WINDOWS = list(SlotLayout), [None, WINDOW]


def lively_dflash(target: Target, config: TargetConfig, *, seed: int = 0, **changes: Any) -> DFlash:
    return enliven(build_drafter(dflash_config(**changes), target, config, seed=seed), seed=seed)


@pytest.fixture(params=LAYOUTS)
def drafter(request: pytest.FixtureRequest, tiny_target: Target, tiny_target_config: TargetConfig) -> DFlash:
    return lively_dflash(tiny_target, tiny_target_config, slot_layout=request.param)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_window_trains_decodes_saves_and_loads(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_prompts: list[list[int]],
    tiny_store: FeatureStore,
    tmp_path: Path,
    layout: SlotLayout,
    window: int | None,
) -> None:
    changes: dict[str, Any] = {"slot_layout": layout, "sliding_window": window, "num_layers": 2, "decay": None}
    drafter = lively_dflash(tiny_target, tiny_target_config, **changes)
    check_a_step_helps(drafter, stored_batch(tiny_store, TINY_LAYER_IDS))
    prompts = tiny_prompts[:3]
    expected = [generation.tokens for generation in greedy(tiny_target, None, prompts)]
    assert [generation.tokens for generation in greedy(tiny_target, drafter, prompts)] == expected
    save_drafter(drafter, tmp_path, target=IDENTITY)
    loaded = load_drafter(tmp_path).drafter.bind(tiny_target.embedding, tiny_target.head)
    assert isinstance(loaded, DFlash) and loaded.config == drafter.config and loaded.decay == drafter.decay
    batch = mixed_batch(drafter)
    assert torch.equal(training_logits(loaded, batch).draft, training_logits(drafter, batch).draft)


def test_a_trained_drafter_is_accepted_and_keeps_the_output(
    tiny_target: Target, tiny_dflash: DFlash, tiny_prompts: list[list[int]]
) -> None:
    ours, plain = greedy(tiny_target, tiny_dflash, tiny_prompts), greedy(tiny_target, None, tiny_prompts)
    assert [generation.tokens for generation in ours] == [generation.tokens for generation in plain]
    assert sum(r.accepted for generation in ours for r in generation.rounds) > 0


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_decoding_give_the_same_logits(
    tiny_target: Target, tiny_target_config: TargetConfig, layout: SlotLayout, window: int | None
) -> None:
    """Contexts of 3 to 22 positions, so on both sides of the window."""
    changes: dict[str, Any] = {"slot_layout": layout, "sliding_window": window, "num_layers": 2}
    check_training_equals_decoding(lively_dflash(tiny_target, tiny_target_config, **changes))


def test_a_window_that_only_training_has_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = lively_dflash(tiny_target, tiny_target_config, sliding_window=WINDOW)

    def whole(lengths: Tensor, width: int, **options: Any) -> Tensor:
        return masks.cache_mask(lengths, width)

    with planted_fault(monkeypatch, block, "cache_mask", whole):
        check_training_equals_decoding(drafter)


@torch.no_grad()
def check_window(drafter: DFlash) -> None:
    """One layer: a slot's own window is all it sees. Slot j of the block at a looks on positions above a + j - W."""
    batch, first = mixed_batch(drafter), drafter.num_slots - drafter.num_draft_tokens
    states = drafter.block_states(batch)
    for row, index, anchor in used_anchors(batch):
        document = batch.document_ids[row].tolist()
        for position in range(24):
            features = batch.features.clone()
            features[row, position] = -7.0 * features[row, position] + 3.0
            after = drafter.block_states(replace(batch, features=features))
            for slot in range(drafter.num_draft_tokens):
                sees = position < anchor and document[position] == document[anchor]
                sees = sees and position > anchor + first + slot - WINDOW
                moved = not torch.equal(after[row, index, slot], states[row, index, slot])
                assert moved == sees, f"slot {slot} of the block at {anchor} and the features at {position}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_older_than_the_window_do_not_matter_and_those_inside_do(
    tiny_target: Target, tiny_target_config: TargetConfig, layout: SlotLayout
) -> None:
    check_window(lively_dflash(tiny_target, tiny_target_config, slot_layout=layout, sliding_window=WINDOW))


def test_a_window_that_does_not_move_with_the_slot_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    def fixed(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
        assert window is not None
        return (position < anchor) & (position > anchor + 0 * slot - window)

    drafter = lively_dflash(tiny_target, tiny_target_config, sliding_window=WINDOW)
    with planted_fault(monkeypatch, masks, "sees_context", fixed):
        check_window(drafter)


@torch.no_grad()
def test_decoding_behind_a_long_context_forgets_what_the_window_excludes(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = lively_dflash(tiny_target, tiny_target_config, sliding_window=WINDOW, num_layers=2)
    batch, counts = mixed_batch(drafter), torch.tensor([20, 20, 20])
    # slot 0 sees the last W - 1 positions before the newest token, so 15 to 19
    proposals = []
    for edge in (None, 14, 15):
        features = batch.features[:, :20].clone()
        if edge is not None:
            features[:, : edge + 1] += 1
        state = drafter.start(batch.input_ids[:, :20], features, counts, 32)
        sampler = stochastic_sampler(torch.arange(3))
        proposals.append(drafter.propose(state, batch.input_ids[:, 20], sampler, 4).probs)
    assert torch.equal(proposals[0], proposals[1])
    assert (proposals[0] != proposals[2]).any(-1).all()


@torch.no_grad()
def test_slots_are_independent_given_the_context(drafter: DFlash) -> None:
    """Whatever is drawn in slot 0, the others keep their probabilities; tokens are drawn slot by slot from them."""
    batch, counts = mixed_batch(drafter), torch.tensor([9, 2, 5])
    state = drafter.start(batch.input_ids[:, :9], batch.features[:, :9], counts, 32)
    seen = set()
    proposals = []
    for seed in range(12):
        sampler = replace(stochastic_sampler(torch.arange(3)), config=SamplingConfig(3.0, 0, 1.0, 0.0, seed))
        proposals.append(drafter.propose(state, torch.tensor([4, 8, 15]), sampler, 4))
        uniforms = sampler.uniform(counts[:, None] + 1 + torch.arange(4), Purpose.draft)
        assert torch.equal(proposals[-1].tokens, draw(proposals[-1].probs, uniforms))
        seen.add(int(proposals[-1].tokens[0, 0]))
    assert len(seen) > 1
    for proposal in proposals:
        assert torch.equal(proposal.probs, proposals[0].probs)
        assert proposal.confidence is proposal.candidate_ids is proposal.parents is None
        assert proposal.lengths.tolist() == [4, 4, 4]
    best = drafter.propose(state, torch.tensor([4, 8, 15]), greedy_sampler(3), 4)
    assert torch.equal(best.tokens, proposals[0].probs.argmax(-1))


@torch.no_grad()
def test_the_two_layouts_read_the_same_weights_one_slot_apart(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    """Equal blocks of four slots: in place the slot of the known token predicts nothing, the others the same."""
    first = lively_dflash(tiny_target, tiny_target_config)
    second = lively_dflash(tiny_target, tiny_target_config, slot_layout=SlotLayout.in_place, num_draft_tokens=3)
    assert first.num_slots == second.num_slots == 4
    batch = mixed_batch(first)
    ours, other = first.block_states(batch), second.block_states(batch)
    assert other.shape[2] == 3 and torch.equal(ours[:, :, 1:], other)
    # the same states are trained on tokens one apart
    rows = first.supervised_slots(batch), second.supervised_slots(batch)
    assert rows[0].labels[rows[0].slot_ids == 0].tolist() == rows[1].labels[rows[1].slot_ids == 0].tolist()


@pytest.mark.parametrize(("num_draft_tokens", "decay"), [(7, 4.0), (9, 4.75), (15, 7.0)])
def test_no_decay_given_means_the_published_one(
    tiny_target: Target, tiny_target_config: TargetConfig, num_draft_tokens: int, decay: float
) -> None:
    changes: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "decay": None}
    drafter = build_drafter(dflash_config(**changes), tiny_target, tiny_target_config)
    assert drafter.decay == published_decay(num_draft_tokens) == decay
    slots = drafter.supervised_slots(mixed_batch(drafter))
    expected = torch.exp(-slots.slot_ids / decay)
    torch.testing.assert_close(slots.weights, expected, rtol=1e-6, atol=0)
    assert build_drafter(dflash_config(decay=0.0), tiny_target, tiny_target_config).decay == 0.0


def test_dpace_weighs_slots_by_the_drafts_own_confidence(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    """Dynamic weights in the numerator only: the denominator stays that of the decay."""
    drafter = lively_dflash(tiny_target, tiny_target_config, loss=LossWeights(cross_entropy=1.0), dpace_smoothing=0.5)
    batch = mixed_batch(drafter)
    seen, slots = training_logits(drafter, batch), drafter.supervised_slots(batch)
    rows = torch.nn.functional.cross_entropy(seen.draft, seen.labels, reduction="none")
    weights = dynamic_weights(rows, slots.mask, 0.5)
    assert seen.loss.numerators["tokens"].item() == pytest.approx(float((weights * rows).sum()), rel=1e-4)
    assert drafter.denominators(batch)["tokens"].item() == pytest.approx(float(slots.weights.sum()), rel=1e-6)
    check_a_step_helps(drafter, batch)


def test_the_only_term_is_that_of_the_tokens(drafter: DFlash) -> None:
    batch = mixed_batch(drafter)
    loss = drafter(batch)
    assert set(loss.numerators) == set(drafter.denominators(batch)) == {"tokens"}
    assert not [name for name in drafter.state_dict() if "head" in name or "embed" in name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, r"model\.num_layers must be at least 1, got 0"),
        ({"num_draft_tokens": 0}, r"model\.num_draft_tokens must be at least 1, got 0"),
        ({"decay": -1.0}, r"model\.decay must be positive, 0 \(no decay\) or null .*, got -1\.0"),
        ({"dpace_smoothing": 0.0}, r"model\.dpace_smoothing must be in \(0, 1\] or null \(static decay\), got 0\.0"),
        ({"loss": LossWeights()}, r"model\.loss has no term: give at least one of its weights a value above 0"),
        ({"loss": LossWeights(l1=-1.0)}, r"model\.loss\.l1 must be at least 0 \(0 = off\), got -1\.0"),
        ({"sampled_vocabulary": 0}, r"model\.sampled_vocabulary must be positive or null \(exact\), got 0"),
        ({"sliding_window": 4}, r"model\.sliding_window must be null or more than the 4 slots of a block, got 4"),
        ({"sliding_window": 0}, r"model\.sliding_window must be null or more than the 4 slots of a block, got 0"),
    ],
)
def test_contradictory_options_are_named(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_drafter(dflash_config(**changes), tiny_target, tiny_target_config)
