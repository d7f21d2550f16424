"""Tests of models/dflash2.py: at first a DFlash; then convolutions and selector, each against a loop."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import Engine, SlotLayout
from models.dflash2 import BlockConv, Codebooks, DFlash2, Gold
from models.sampling import Sampler, SamplingConfig
from models.spec import TargetSpec
from tests.conftest import dflash2_config, dflash_config
from tests.draft_batches import greedy_sampler, mixed_batch, stochastic_sampler
from tests.published_files import SPEC, build

CODEBOOKS = list(Codebooks)


def state_of(drafter: Any, num_rows: int = 3) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = drafter.spec.hidden_size * len(drafter.target_layer_ids)
    tokens = torch.randint(drafter.spec.vocab_size, (num_rows, 7), generator=generator)
    features = torch.randn(num_rows, 6, size, generator=generator)
    counts = torch.tensor([6, 2, 4])[:num_rows]
    return drafter.start(tokens[:, :6], features, counts, 32), tokens[:, 6]


@pytest.mark.parametrize("layout", list(SlotLayout))
@pytest.mark.parametrize("codebooks", CODEBOOKS)
@torch.no_grad()
def test_a_fresh_one_drafts_exactly_what_a_dflash_does(codebooks: Codebooks, layout: SlotLayout) -> None:
    dflash = build(dflash_config(num_layers=2, slot_layout=layout))
    fresh = dflash2_config(num_layers=2, slot_layout=layout, codebooks=codebooks, selector_top_k=60)
    ours = fresh.build(SPEC, target_layer_ids=dflash.target_layer_ids, mask_token_id=4)
    ours.bind(dflash.embedding, dflash.head)
    missing, unexpected = ours.load_state_dict(dflash.state_dict(), strict=False)
    assert not unexpected and all("conv" in name or "selector" in name for name in missing)
    (state, last), (other, _) = state_of(ours), state_of(dflash)
    assert torch.equal(ours.propose_states(state, last, 4), dflash.propose_states(other, last, 4))
    a, b = (d.propose(s, last, greedy_sampler(3), 4) for d, s in ((ours, state), (dflash, other)))
    assert torch.equal(a.tokens, b.tokens)
    a, b = (d.propose(s, last, stochastic_sampler(torch.arange(3)), 4) for d, s in ((ours, state), (dflash, other)))
    torch.testing.assert_close(a.probs, b.probs.gather(-1, a.candidate_ids))  # of all tokens here, in their order


def test_the_published_sizes_are_built_from_the_published_options() -> None:
    spec = TargetSpec(
        **{
            **vars(SPEC),
            "vocab_size": 248_320,
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_layers": 64,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
        }
    )
    options: dict[str, Any] = {"num_layers": 5, "selector_rank": 256, "selector_top_k": 16, "num_draft_tokens": 7}
    with torch.device("meta"):
        drafter = dflash2_config(**options).build(spec, target_layer_ids=(5, 19, 33, 47, 61), mask_token_id=248_070)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 1_924_404_480
    convs = [module for module in drafter.modules() if isinstance(module, BlockConv)]
    assert sum(parameter.numel() for conv in convs for parameter in conv.parameters()) == 65_740_800
    assert sum(parameter.numel() for parameter in drafter.candidate_selector.parameters()) == 128_450_560


# ---- convolutions


def lively_conv(taps: int) -> BlockConv:
    conv = BlockConv(32, taps=taps, group_size=8)
    generator = torch.Generator().manual_seed(0)
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return conv


@pytest.mark.parametrize("taps", [1, 2, 3])
@torch.no_grad()
def test_a_convolution_equals_a_loop_over_blocks_slots_and_channels(taps: int) -> None:
    conv, x = lively_conv(taps), torch.randn(2, 3 * 4, 32, generator=torch.Generator().manual_seed(1))
    got, corrections = conv.before(x, num_blocks=3)
    behind = conv.after(got, corrections, num_blocks=3)
    projected = (x @ conv.kernel_projection.weight.T).view(2, 12, 2, taps, 4)
    for values, side, inputs in ((got, 0, x), (behind, 1, got)):
        expected = torch.zeros_like(x)
        for row in range(2):
            for place in range(12):
                for channel in range(32):
                    for tap in range(min(taps, place % 4 + 1)):  # slot 0 has nothing before it
                        kernel = conv.base_kernel[side, tap, channel] + projected[row, place, side, tap, channel // 8]
                        expected[row, place, channel] += kernel * inputs[row, place - tap, channel]
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_stands_in_one_block_never_reaches_another() -> None:
    conv, x = lively_conv(2), torch.randn(1, 3 * 4, 32)
    changed = x.clone()
    changed[:, 4:8] += 1.0
    for before, after in zip(conv.before(x, 3), conv.before(changed, 3), strict=True):
        same = (before == after).flatten(2).all(-1)[0].view(3, 4)
        assert same[0].all() and same[2].all() and not same[1].any()


# ---- selector


@pytest.mark.parametrize("codebooks", CODEBOOKS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.no_grad()
def test_a_proposal_is_a_walk_through_the_scores_of_candidates(codebooks: Codebooks, temperature: float) -> None:
    drafter = build(dflash2_config(codebooks=codebooks, selector_top_k=5))
    state, last = state_of(drafter)
    logits = drafter.logits(drafter.propose_states(state, last, 4))
    gates = drafter.propose_states(state, last, 4) @ drafter.candidate_selector.hidden_projection.weight.T
    tensors = drafter.engine_tensors()
    before, behind = (tensors[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
    sampler = Sampler(SamplingConfig(temperature, 0, 1.0, 0.0, 7), torch.arange(3))
    proposal = drafter.propose(state, last, sampler, 4)
    assert proposal.candidate_ids is not None and proposal.probs.shape == (3, 4, 5)
    previous = last
    for slot in range(4):
        for row in range(3):
            candidates = proposal.candidate_ids[row, slot]
            assert set(candidates.tolist()) == set(logits[row, slot].topk(5).indices.tolist())
            scores = torch.stack(
                [
                    logits[row, slot, b] + (before[previous[row]] * gates[row, slot] * behind[b]).sum()
                    for b in candidates
                ]
            )
            expected = F.one_hot(scores.argmax(), 5).float() if temperature == 0 else (scores / temperature).softmax(0)
            torch.testing.assert_close(proposal.probs[row, slot], expected, rtol=1e-4, atol=1e-5)
            assert proposal.tokens[row, slot] in candidates[proposal.probs[row, slot] > 0]
        previous = proposal.tokens[:, slot]


@pytest.mark.parametrize("gold", list(Gold))
@pytest.mark.parametrize("codebooks", CODEBOOKS)
def test_the_selectors_loss_equals_a_loop_over_supervised_slots(gold: Gold, codebooks: Codebooks) -> None:
    config = dflash2_config(gold=gold, codebooks=codebooks, selector_top_k=5, selector_weight=0.5)
    drafter: DFlash2 = build(config)
    batch = mixed_batch(drafter)
    loss = drafter(batch)
    slots = drafter.supervised_slots(batch)
    hidden = slots.of(drafter.block_states(batch))
    tensors = drafter.engine_tensors()
    before, behind = (tensors[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
    total, found = torch.zeros(()), torch.zeros(4)
    for row in range(len(slots.labels)):
        label, previous = int(slots.labels[row]), int(slots.previous[row])
        logits = drafter.head @ hidden[row]
        candidates = logits.topk(5).indices.tolist()
        is_among = label in candidates
        found[slots.slot_ids[row]] += is_among
        if not is_among:
            candidates[-1] = label
        gate = before[previous] * (drafter.candidate_selector.hidden_projection.weight @ hidden[row])
        scores = torch.stack([logits[b] + (gate * behind[b]).sum() for b in candidates])
        if is_among or gold is Gold.inject:
            total = total - slots.weights[row] * scores.log_softmax(0)[candidates.index(label)]
    torch.testing.assert_close(loss.numerators["selector"], 0.5 * total, rtol=1e-4, atol=1e-4)
    assert torch.equal(loss.metrics["candidate_recall"][0].float(), found) and 0 < found.sum() < len(slots.labels)
    (loss.numerators["selector"] + loss.numerators["tokens"]).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_projected_codebooks_go_out_as_tables_that_draft_the_same() -> None:
    drafter = build(dflash2_config(codebooks=Codebooks.projected))
    tables = build(dflash2_config())
    tables.load_state_dict(drafter.engine_tensors())
    tables.bind(drafter.embedding, drafter.head)
    (state, last), (other, _) = state_of(drafter), state_of(tables)
    a, b = (d.propose(s, last, greedy_sampler(3), 4) for d, s in ((drafter, state), (tables, other)))
    assert torch.equal(a.tokens, b.tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 5}, r"model\.conv_group_size=5 must divide the target's hidden size 32"),
        ({"conv_kernel_size": 0}, r"model\.conv_kernel_size must be in 1\.\."),
        ({"selector_top_k": 61}, r"model\.selector_top_k must be in 1\.\.60, got 61"),
    ],
)
def test_options_that_make_no_drafter_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(dflash2_config(**changes))


@pytest.mark.parametrize("engine", [Engine.deepspec, Engine.gguf])
def test_engines_without_a_path_selector_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=f"engine={engine} cannot write .*path selector"):
        build(dflash2_config()).serving(engine)
    with pytest.raises(ValueError, match="anchor_first: DFlash 2 is served in_place only"):
        build(replace(dflash2_config(), slot_layout=SlotLayout.anchor_first)).serving(Engine.vllm)
