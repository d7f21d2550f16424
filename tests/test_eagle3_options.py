"""Tests of models/eagle3.py: reduced draft vocabularies, and that every combination of options works."""

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.store import FeatureStore
from models.checkpoint import load_drafter, save_drafter
from models.eagle3 import Eagle3
from models.losses import LossWeights
from models.spec import fused_layers
from models.target import Target, TargetConfig, load_target
from models.vocab_loss import DraftHead
from tests.chains import chain_output, lively_eagle3
from tests.conftest import build_drafter, eagle3_config, planted_fault
from tests.draft_batches import draw_vocabulary, greedy_sampler, mixed_batch, stochastic_sampler
from tests.draft_checks import IDENTITY, check_a_step_helps, greedy, stored_batch, total_loss

CHOICES: dict[str, list[Any]] = {
    "qk_norm": [False, True],
    "norm_before_residual": [False, True],
    "norm_before_fc": [False, True],
    "fc_norm": [False, True],
    "norm_output": [False, True],
    "own_head": [False, True],
    "draft_vocab_size": [None, 20, 55],
    "sampled_vocabulary": [None, 5],
    "num_fused_layers": [None, 1, 2],
}


def excluded(options: dict[str, Any]) -> bool:
    reduced = options["own_head"] or options["draft_vocab_size"] is not None
    return (options["norm_before_fc"] and options["fc_norm"]) or (options["sampled_vocabulary"] and reduced)


def pairs_of(options: dict[str, Any]) -> set[Any]:
    return set(combinations(options.items(), 2))


def all_pairs() -> list[dict[str, Any]]:
    """Few combinations that hold every pair of values which any may hold, found greedily."""
    allowed = [dict(zip(CHOICES, values, strict=True)) for values in product(*CHOICES.values())]
    allowed = [options for options in allowed if not excluded(options)]
    missing, chosen = set().union(*map(pairs_of, allowed)), []
    while missing:
        chosen.append(max(allowed, key=lambda options: len(pairs_of(options) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


@pytest.mark.parametrize("changes", all_pairs(), ids=lambda c: "-".join(k for k, v in c.items() if v) or "none")
def test_every_pair_of_options_trains_decodes_saves_and_loads(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_prompts: list[list[int]],
    tiny_store: FeatureStore,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config, **changes)
    check_a_step_helps(drafter, stored_batch(tiny_store, drafter.target_layer_ids))
    prompts = tiny_prompts[:3]
    target = load_target(tiny_target_config, torch.device("cpu"), layer_ids=drafter.target_layer_ids)
    expected = [generation.tokens for generation in greedy(target, None, prompts)]
    assert [generation.tokens for generation in greedy(target, drafter, prompts)] == expected
    save_drafter(drafter, tmp_path, target=IDENTITY)
    loaded = load_drafter(tmp_path).drafter
    assert isinstance(loaded, Eagle3) and loaded.config == drafter.config
    assert loaded.target_layer_ids == drafter.target_layer_ids
    state = drafter.state_dict()
    assert list(loaded.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_a_trained_drafter_is_accepted_and_keeps_the_output(
    tiny_target: Target, tiny_eagle3: Eagle3, tiny_prompts: list[list[int]]
) -> None:
    ours, plain = greedy(tiny_target, tiny_eagle3, tiny_prompts), greedy(tiny_target, None, tiny_prompts)
    assert [generation.tokens for generation in ours] == [generation.tokens for generation in plain]
    rounds = [r for generation in ours for r in generation.rounds]
    assert sum(r.accepted for r in rounds) > 0.3 * len(rounds)  # untrained: one in 55 tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_tokens": 0}, r"model\.num_draft_tokens must be at least 1, got 0"),
        ({"step_decay": 0.0}, r"model\.step_decay must be in \(0, 1\], got 0\.0"),
        ({"step_decay": 1.5}, r"model\.step_decay must be in \(0, 1\], got 1\.5"),
        ({"norm_before_fc": True, "fc_norm": True}, r"model\.norm_before_fc=true and model\.fc_norm=true exclude each"),
        (
            {"draft_vocab_size": 1},
            r"model\.draft_vocab_size must be null or more than the 1 stop tokens and .*, got 1",
        ),
        ({"draft_vocab_size": 56}, r"draft_vocab_size must be null or more than .* the target's 55, got 56"),
        ({"sampled_vocabulary": 5, "own_head": True}, r"sampled_vocabulary needs model\.own_head=false and"),
        ({"sampled_vocabulary": 5, "draft_vocab_size": 20}, r"sampled_vocabulary needs .*model\.draft_vocab_size=null"),
        ({"sampled_vocabulary": 0}, r"model\.sampled_vocabulary must be positive or null \(exact\), got 0"),
        ({"loss": LossWeights(cross_entropy=1.0)}, r"model\.loss\.cross_entropy is for block drafters"),
        ({"num_fused_layers": 0}, r"model\.num_fused_layers must be null or 1\.\.3 of the target's \[0, 1, 2\], got 0"),
        ({"num_fused_layers": 4}, r"model\.num_fused_layers must be null or 1\.\.3 of the target's \[0, 1, 2\], got 4"),
    ],
)
def test_contradictory_options_are_named(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_drafter(eagle3_config(**changes), tiny_target, tiny_target_config)


def test_fused_layers_spread_from_the_first_to_the_last() -> None:
    ids = (1, 8, 14, 20, 27)
    assert fused_layers(ids, None) == fused_layers(ids, 5) == ids
    assert fused_layers(ids, 3) == (1, 14, 27)
    assert fused_layers(ids, 2) == (1, 27)
    assert fused_layers(ids, 1) == (14,)
    assert all(len(set(fused_layers(tuple(range(n)), k))) == k for n in range(1, 9) for k in range(1, n + 1))


def test_a_sampled_vocabulary_of_everything_gives_the_exact_loss(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config)
    batch = mixed_batch(drafter)
    expected = total_loss(drafter, batch).item()
    batch.vocabulary = draw_vocabulary(batch, 55)
    assert total_loss(drafter, batch).item() == pytest.approx(expected, rel=1e-6)


def test_a_sampled_vocabulary_is_the_loss_over_its_columns(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config)
    batch = mixed_batch(drafter)
    batch.input_ids %= 20  # leaves 35 tokens to draw from
    batch.vocabulary = columns = draw_vocabulary(batch, 3)
    assert len(columns.ids) < 30 and columns.log_weights.any()
    output, head = chain_output(drafter, batch), drafter.head[columns.ids]
    sums = [0.0] * 4
    for (row, start, step), state in output.states.items():
        teacher = batch.last_hidden[batch.last_hidden_ids[row, start + 1 + step]]
        target, draft = (head @ x + columns.log_weights for x in (teacher, state))
        sums[step] -= (target.softmax(0) * draft.log_softmax(0)).sum().item()
    for step, expected in enumerate(sums):
        ours = output.loss.numerators[f"step_{step}"].item()
        assert ours == pytest.approx(drafter.config.step_decay**step * expected, rel=1e-5)


# ---- reduced vocabulary


@pytest.fixture
def reduced(tiny_target: Target, tiny_target_config: TargetConfig) -> Eagle3:
    return lively_eagle3(tiny_target, tiny_target_config, draft_vocab_size=20, own_head=True)


def test_the_maps_hold_offsets_and_members(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    drafter = build_drafter(eagle3_config(draft_vocab_size=4), tiny_target, tiny_target_config)
    drafter.use_draft_vocabulary(torch.tensor([3, 7, 8, 54]))
    assert drafter.d2t.tolist() == [3, 6, 6, 51]
    assert drafter.t2d.nonzero().flatten().tolist() == [3, 7, 8, 54]
    assert drafter.draft_ids is not None and drafter.draft_ids.tolist() == [3, 7, 8, 54]


@torch.no_grad()
def check_candidates(tiny_target: Target, config: TargetConfig) -> None:
    """The first slot is the whole vocabulary's distribution, renormalised over the draft's tokens."""
    whole, drafter = (lively_eagle3(tiny_target, config, draft_vocab_size=size) for size in (None, 20))
    batch, last = mixed_batch(whole), torch.tensor([4, 8, 15])
    args = batch.input_ids[:, :6], batch.features[:, :6], torch.tensor([6, 2, 4]), 32
    sampler = stochastic_sampler(torch.arange(3))
    expected, proposal = (d.propose(d.start(*args), last, sampler, 4) for d in (whole, drafter))
    ids = proposal.candidate_ids
    assert ids is not None and drafter.draft_ids is not None and expected.candidate_ids is None
    assert ids.shape == proposal.probs.shape == (3, 4, 20)
    assert (ids == drafter.draft_ids).all()
    assert (ids == proposal.tokens[..., None]).any(-1).all()
    kept = expected.probs[:, 0].gather(1, ids[:, 0])
    torch.testing.assert_close(proposal.probs[:, 0], kept / kept.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    best = drafter.propose(drafter.start(*args), last, greedy_sampler(3), 4)
    assert torch.equal(best.tokens[:, 0], ids[:, 0].gather(1, kept.argmax(-1, keepdim=True))[:, 0])


def test_candidates_are_the_draft_tokens_under_their_target_ids(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    check_candidates(tiny_target, tiny_target_config)


def test_offsets_read_as_ids_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    right = Eagle3.draft_head

    def offsets_as_ids(self: Eagle3) -> DraftHead | None:
        head = right(self)
        return None if head is None else DraftHead(head.weight, self.d2t)

    with planted_fault(monkeypatch, Eagle3, "draft_head", offsets_as_ids):
        check_candidates(tiny_target, tiny_target_config)


def test_greedy_output_is_the_targets_even_outside_the_draft_vocabulary(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]]
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config, draft_vocab_size=10)
    drafter.use_draft_vocabulary(torch.tensor([3, *range(5, 14)]))
    expected = [generation.tokens for generation in greedy(tiny_target, None, tiny_prompts)]
    outside = sum(token > 13 for tokens in expected for token in tokens)
    assert outside > 20
    assert [generation.tokens for generation in greedy(tiny_target, drafter, tiny_prompts)] == expected


def test_an_own_head_starts_as_the_targets_rows(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    for size in (None, 20):
        options = eagle3_config(draft_vocab_size=size, own_head=True)
        drafter = build_drafter(options, tiny_target, tiny_target_config)
        rows = tiny_target.head if size is None else tiny_target.head[drafter.draft_ids]
        assert torch.equal(drafter.lm_head.weight, rows)
        frozen = build_drafter(eagle3_config(draft_vocab_size=size), tiny_target, tiny_target_config)
        frozen.load_state_dict({name: x for name, x in drafter.state_dict().items() if name != "lm_head.weight"})
        batch = mixed_batch(drafter)  # so the first loss is that of the target's own head
        assert total_loss(drafter, batch).item() == pytest.approx(total_loss(frozen, batch).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (list(range(19)), r"model\.draft_vocab_size=20, got a vocabulary of 19"),
        (list(range(21)), r"model\.draft_vocab_size=20, got a vocabulary of 21"),
        ([5, *range(5, 24)], r"d2t maps draft tokens to 5\.\.23 with 1 repeats"),
        (
            [*range(19), 55],
            r"d2t maps draft tokens to 0\.\.55 with 0 .* distinct ids of the target's 55 tokens",
        ),
        ([-1, *range(19)], r"d2t maps draft tokens to -1\.\.18"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(reduced: Eagle3, ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduced.use_draft_vocabulary(torch.tensor(ids))


def test_a_drafter_without_a_reduced_vocabulary_takes_none(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = build_drafter(eagle3_config(), tiny_target, tiny_target_config)
    assert not [name for name in drafter.state_dict() if name in ("d2t", "t2d", "lm_head.weight")]
    with pytest.raises(ValueError, match=r"model\.draft_vocab_size=None, got a vocabulary of 3"):
        drafter.use_draft_vocabulary(torch.arange(3))


def test_an_unset_vocabulary_cannot_be_saved(
    tiny_target: Target, tiny_target_config: TargetConfig, tmp_path: Path
) -> None:
    config = eagle3_config(draft_vocab_size=20)
    drafter = config.build(tiny_target.spec, target_layer_ids=(0, 1, 2), mask_token_id=None)
    with pytest.raises(ValueError, match=r"d2t maps draft tokens to -1\.\.18"):
        save_drafter(drafter, tmp_path / "out", target=IDENTITY)
    assert not (tmp_path / "out").exists()


def test_maps_come_back_in_a_fresh_object(reduced: Eagle3, tiny_target: Target, tmp_path: Path) -> None:
    save_drafter(reduced, tmp_path, target=IDENTITY)
    loaded = load_drafter(tmp_path, dtype=torch.bfloat16).drafter.bind(tiny_target.embedding, tiny_target.head)
    assert isinstance(loaded, Eagle3) and loaded.draft_ids is not None and reduced.draft_ids is not None
    for draft_token in (0, 1, 19):
        assert loaded.draft_ids[draft_token] == reduced.draft_ids[draft_token]
        assert loaded.t2d[loaded.draft_ids[draft_token]]
    assert loaded.d2t.dtype == torch.int64 and loaded.t2d.dtype == torch.bool


def repeated(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("d2t"), r"missing d2t \[20\]"),
        (lambda tensors: tensors.pop("t2d"), r"missing t2d \[55\]"),
        (
            lambda tensors: tensors.update(d2t=torch.zeros(20, dtype=torch.int64)),
            "t2d and d2t name different draft tokens",
        ),
        (lambda tensors: tensors.update(d2t=torch.arange(20)), "t2d and d2t name different draft tokens"),
        (lambda tensors: tensors.update(d2t=torch.arange(20) * 3), r"d2t maps draft tokens to 0\.\.76"),
        (lambda tensors: tensors["t2d"].zero_(), "t2d and d2t name different draft tokens"),
        (repeated, "with 1 repeats"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"][:-1].clone()), r"d2t has shape \[19\], expected \[20\]"),
    ],
    ids=["no d2t", "no t2d", "zeros", "arange", "ids", "no member", "repeat", "short"],
)
def test_maps_that_contradict_each_other_are_refused(
    reduced: Eagle3, tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    save_drafter(reduced, tmp_path, target=IDENTITY)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"slot_layout": "None"})
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
