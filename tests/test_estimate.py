"""Estimates against what is measured: saved tensors and peak memory of a step, counted operations, a real store."""

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_dir
from torch.utils.flop_counter import FlopCounterMode

from data.collate import collate
from data.dataset import StepPlan, TrainingData
from data.store import FeatureStore
from models.base import DraftBatch, Drafter
from models.block import BlockDrafter
from models.config import to_dataclass, typed
from models.dflash2 import Codebooks, DFlash2
from models.dspark import MarkovHeadType
from models.losses import find_chains
from models.masks import context_spans
from models.target import TargetConfig, load_spec
from tests import bench_losses
from tests.bench_losses import LAYER_IDS, batch_of, dspark, eagle, peak_mb, step
from tests.conftest import dflash2_config, dflash_config, dspark_config, eagle3_config, planted_fault
from tests.test_conf import CONF, load_script
from train import estimate
from train.config import AttentionBackend, TrainConfig
from train.estimate import LAUNCHERS, PUBLISHED, activation_bytes, loss_bytes, memory_of, show_estimate

load_script("train")  # registers its schema
QWEN3_4B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_losses, "VOCAB_SIZE", 2003)
    monkeypatch.setattr(bench_losses, "SPEC", replace(bench_losses.SPEC, vocab_size=2003))


def dflash(num_rows: int = 1, num_anchors: int = 64, **changes: Any) -> tuple[Any, DraftBatch]:
    options: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 7, **changes}
    drafter = dflash_config(**options).build(bench_losses.SPEC, target_layer_ids=LAYER_IDS, mask_token_id=1)
    return drafter, batch_of(drafter, num_supervised=384, num_anchors=num_anchors, num_rows=num_rows)


def dflash2(num_rows: int = 1) -> tuple[Any, DraftBatch]:
    options: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 7}
    drafter = dflash2_config(**options).build(bench_losses.SPEC, target_layer_ids=LAYER_IDS, mask_token_id=1)
    return drafter, batch_of(drafter, num_supervised=384, num_anchors=64, num_rows=num_rows)


def counted_flops(drafter: Drafter, batch: DraftBatch) -> float:
    with FlopCounterMode(display=False) as counter:
        step(drafter, batch)
    return counter.get_total_flops()


def hidden_products(drafter: Drafter, batch: DraftBatch) -> float:
    """What dense attention multiplies although masks hide it: all of a span of context for each of its queries, where
    a block at position p sees p of them at most."""
    spec, anchors, num_layers, queries, window = drafter.spec, batch.anchors, drafter.num_draft_tokens, 1, None
    if isinstance(drafter, BlockDrafter):
        num_layers, queries, window = len(drafter.layers), drafter.num_slots, drafter.config.sliding_window
    else:
        anchors = find_chains(batch, drafter.num_draft_tokens)[0]
    spans = context_spans(anchors, batch.document_ids, num_slots=queries, window=window)
    computed = sum((s.context.stop - s.context.start) * (s.blocks.stop - s.blocks.start) * queries for s in spans)
    seen = sum(float(s.mask.expand(-1, -1, queries, -1).sum()) for s in spans)
    return 12.0 * spec.num_heads * spec.head_dim * num_layers * (computed - seen) + twice(drafter, batch)


def twice(drafter: Drafter, batch: DraftBatch) -> float:
    """What a selector computes again: its forward pass in the backward one. (It looks for candidates with an operator
    that is not counted.)"""
    if not isinstance(drafter, DFlash2):
        return 0.0
    size, rank, candidates = drafter.spec.hidden_size, drafter.config.selector_rank, drafter.config.selector_top_k
    forward = 2.0 * (size * candidates + size * rank + rank * candidates)
    if drafter.config.codebooks is Codebooks.projected:
        forward += 2.0 * size * rank * (1 + candidates)
    return len(drafter.supervised_slots(batch.host).labels) * forward


MADE: dict[str, Callable[[], tuple[Any, DraftBatch]]] = {
    "dspark": lambda: dspark(num_rows=2),
    "dflash": lambda: dflash(num_rows=2),
    "dflash_window": lambda: dflash(num_rows=2, sliding_window=40),
    "eagle3": lambda: eagle(num_rows=2),
}


@pytest.mark.parametrize("kind", MADE)
def test_training_flops_are_those_of_a_real_step_but_for_what_masks_hide(small_vocabulary: None, kind: str) -> None:
    """The rest, under 0.2 %: sums over the vocabulary that torch runs as products of one column, and gradients that
    autograd forms of inputs nobody needs."""
    drafter, batch = MADE[kind]()
    counted = counted_flops(drafter, batch)
    expected = drafter.training_flops(batch) + hidden_products(drafter, batch)
    assert expected == pytest.approx(counted, rel=0.002), (expected / counted, drafter.training_flops(batch) / counted)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gated", lambda: built(dspark_config(markov_rank=64, markov_head=MarkovHeadType.gated))),
        ("rnn", lambda: built(dspark_config(markov_rank=64, markov_head=MarkovHeadType.rnn))),
        ("fc_norm", lambda: built(eagle3_config(fc_norm=True))),
        ("own_head", lambda: built(eagle3_config(own_head=True))),
        ("selector", lambda: built(dflash2_config(num_layers=2))),
        ("projected", lambda: built(dflash2_config(num_layers=2, codebooks=Codebooks.projected))),
    ],
)
def test_training_flops_count_every_option(small_vocabulary: None, name: str, make: Any) -> None:
    drafter, batch = make()
    expected = drafter.training_flops(batch) + hidden_products(drafter, batch)
    assert expected == pytest.approx(counted_flops(drafter, batch), rel=0.002)


def built(config: Any) -> tuple[Any, DraftBatch]:
    drafter = config.build(bench_losses.SPEC, target_layer_ids=LAYER_IDS, mask_token_id=1)
    batch = batch_of(drafter, num_supervised=384, num_anchors=64, num_rows=1)
    drafter.copy_from_bound()
    return drafter, batch


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16"])
def test_activations_are_within_30_percent_of_the_measured_peak(
    small_vocabulary: None, kind: str, narrow: bool
) -> None:
    """Peak resident memory of a real step above weights, gradients and batch, freed blocks given back before."""
    drafter, batch = {"dspark": dspark, "dflash": dflash, "eagle3": eagle}[kind](num_rows=3 if kind == "eagle3" else 8)

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = drafter(batch)
        torch.stack([*loss.numerators.values()]).sum().backward()

    work()  # gradients are there from now on
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    measured = peak_mb(work) * 2**20
    expected = activation_bytes(drafter, batch, 2 if narrow else 4) + loss_bytes(drafter, batch)
    assert expected == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "dflash2", "eagle3"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16"])
def test_activations_are_the_tensors_that_autograd_saves(small_vocabulary: None, kind: str, narrow: bool) -> None:
    """To 16 %: every saved storage is counted once, weights, batch and what the loss itself saves left out."""
    drafter, batch = {"dspark": dspark, "dflash": dflash, "dflash2": dflash2, "eagle3": eagle}[kind](num_rows=4)
    tensors = (*drafter.parameters(), drafter.head, drafter.embedding, *batch.tensors().values())
    ours = {x.untyped_storage().data_ptr() for x in tensors}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        drafter(batch)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert activation_bytes(drafter, batch, 2 if narrow else 4) == pytest.approx(counted, rel=0.16)


def composed(*overrides: str) -> tuple[TrainConfig, Any, TargetConfig]:
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose("train", list(overrides))
    return (
        to_dataclass(TrainConfig, node, section="train"),
        typed(node.model, section="model"),
        typed(node.target, section="target"),
    )


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    """Qwen3-4B's config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return tmp_path


def estimate_of(folder: Path, *overrides: str) -> str:
    config, model, target = composed(
        "target=qwen3_4b", f"target.path={folder}", "experiment=deepspec", f"output_dir={folder}", *overrides
    )
    return show_estimate(config, model, target, Accelerator(cpu=True, mixed_precision="bf16"))


def test_an_estimate_needs_only_the_config_of_the_target(config_alone: Path) -> None:
    """Counts of the published checkpoints (EAGLE-3 with the published options), and of their caches."""
    for model, count in (("dspark", "615,221,249"), ("dflash", "537,427,200"), ("eagle3", "149,432,576")):
        shown = estimate_of(config_alone, f"model={model}")
        assert f"{count} trained parameters; 388,956,160 of the target's embedding" in shown
    assert "1,350,000 of 916 tokens, 60% supervised (assumed" in shown
    assert "26,360 steps of 512 chats" in shown and "40% of 989" in shown
    assert "35.46 TB as feature_dtype=bf16" in shown
    assert len(re.findall(r"^ +(?:none|DDP|FSDP2|ZeRO-2|ZeRO-3) +[128] ", shown, re.MULTILINE)) == 9
    assert [path.name for path in config_alone.iterdir()] == ["config.json"]


def test_an_online_run_has_no_store(config_alone: Path) -> None:
    assert "store      none" in estimate_of(config_alone, "store=online")


def test_a_probe_is_said_to_hold_the_target(config_alone: Path) -> None:
    assert "probe      " not in estimate_of(config_alone)
    assert "holds the target, too" in estimate_of(config_alone, "probe.every=3000")


@pytest.mark.parametrize("option", ["batch_size", "tokens_per_batch", "num_anchors"])
def test_an_estimate_of_nothing_is_refused(config_alone: Path, option: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option}=0 must be at least 1"):
        estimate_of(config_alone, f"{option}=0")


def tiny_estimate(tiny_target_config: TargetConfig, store: Path, *overrides: str) -> str:
    config, model, target = composed(
        "target=custom", f"target.path={tiny_target_config.path}", "target.name=tiny", f"store={store}", *overrides
    )
    target = replace(target, layer_ids=tiny_target_config.layer_ids)
    return show_estimate(config, model, target, Accelerator(cpu=True))


def test_counts_come_from_the_store_where_there_is_one(
    tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> None:
    shown = tiny_estimate(tiny_target_config, tiny_store.folder, "batch_size=8", "num_epochs=2")
    tokens, share = tiny_store.lengths.double().mean(), tiny_store.num_supervised.sum() / tiny_store.lengths.sum()
    assert f"48 of {tokens:.0f} tokens, {float(share):.0%} supervised (of the store)" in shown
    assert "12 steps of 8 chats" in shown and "holds" in shown


def test_operations_of_an_estimate_are_those_of_training(
    tiny_target_config: TargetConfig, tiny_store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the mean step over the store's own chats: only the middling length replaces their lengths."""
    config, model, target = composed(
        "target=custom", f"target.path={tiny_target_config.path}", "target.name=tiny", f"store={tiny_store.folder}"
    )
    target = replace(target, layer_ids=tiny_target_config.layer_ids)
    drafter = estimate.sized_drafter(config, model, target, load_spec(target))
    data = TrainingData(tiny_store, layer_ids=drafter.target_layer_ids, num_anchors=config.num_anchors, seed=0)
    plan = StepPlan(tiny_store.lengths, 48, 4096, packing=True, num_processes=1, seed=0)
    ((part,),) = plan.micro_batches(0)
    real = drafter.training_flops(collate([data[visit] for visit in part], packing=True)) * config.batch_size / 48
    corpus = estimate.find_corpus(config)
    assert estimate.step_flops(config, drafter, corpus) == pytest.approx(real, rel=0.1)
    with planted_fault(monkeypatch, estimate, "num_tokens", lambda batch: 1):
        assert estimate.step_flops(config, drafter, corpus) == pytest.approx(real, rel=0.1)


def test_sharding_divides_what_it_says(config_alone: Path) -> None:
    """Of 8 processes: DDP divides nothing, ZeRO-2 keeps whole weights, FSDP2 and ZeRO-3 divide all of them."""
    config, model, target = composed(
        "target=qwen3_4b", f"target.path={config_alone}", "experiment=deepspec", f"output_dir={config_alone}"
    )
    drafter = estimate.sized_drafter(config, model, target, load_spec(target))
    count = sum(p.numel() for p in drafter.parameters())
    found = {
        sharing.name: memory_of(config, drafter, target, PUBLISHED, sharing, 8, narrow=False) for sharing in LAUNCHERS
    }
    assert (found["DDP"].weights, found["DDP"].gradients, found["DDP"].adamw) == (4 * count, 4 * count, 8 * count)
    for name in ("FSDP2", "ZeRO-2", "ZeRO-3"):
        assert found[name].adamw == count
        assert found[name].activations == found["DDP"].activations
    assert found["ZeRO-2"].weights == 4.5 * count  # whole, and an eighth of masters
    layers = [sum(p.numel() for p in layer.parameters()) for layer in drafter.sharded_layers or ()]
    assert found["FSDP2"].weights == 0.5 * count + 4 * (count - sum(layers[2:]))  # two of five layers at once
    assert found["FSDP2"].gradients == 4.5 * count  # micro-batches are summed before they are shared
    at_once = replace(config, batch_size=16)
    assert memory_of(at_once, drafter, target, PUBLISHED, LAUNCHERS[1], 8, narrow=False).gradients < 2.2 * count
    assert found["FSDP2"].total < found["ZeRO-2"].total < found["DDP"].total


def test_dense_attention_keeps_more_than_flex(config_alone: Path) -> None:
    config, model, target = composed("target=qwen3_4b", f"target.path={config_alone}", "experiment=deepspec")
    dense = replace(config, attention=AttentionBackend.dense)
    kept = []
    for options in (config, dense):
        drafter = estimate.sized_drafter(options, model, target, load_spec(target))
        batch = estimate.middling_batch(options, drafter, PUBLISHED, 1)
        kept.append(activation_bytes(drafter, batch, 2))
    assert kept[1] > 1.4 * kept[0]


@pytest.mark.slow
def test_train_py_prints_the_estimate_and_stops(
    tiny_target_config: TargetConfig, tiny_store: FeatureStore, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "train.py",
            "target=custom",
            f"target.path={tiny_target_config.path}",
            "target.layer_ids=[0,1,2]",
            "target.mask_token_id=4",
            f"store={tiny_store.folder}",
            f"output_dir={tmp_path / 'out'}",
            "estimate=true",
        ],
        cwd=CONF.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("drafter    DSpark for custom:") and "AdamW" not in done.stderr
    assert not (tmp_path / "out").exists()
