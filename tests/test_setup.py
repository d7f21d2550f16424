"""Tests of train/setup.py: what a warm start copies, and what it refuses."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from models.dspark import DSpark
from models.target import Target, TargetConfig
from tests.conftest import build_drafter, build_dspark, dspark_config, eagle3_config
from tests.draft_batches import enliven, mixed_batch
from tests.draft_checks import total_loss
from tests.test_train import train_config
from tests.tiny_families import build
from train.config import AttentionBackend
from train.setup import set_up_compute, start_from_target


def saved(family: str, folder: Path) -> tuple[DSpark, TargetConfig]:
    """A tiny target on disk, and an untrained drafter of one layer for it."""
    target = build(family)
    target.model.save_pretrained(folder)
    config = TargetConfig(family, str(folder), target.layer_ids, 0, "float32", None, None, None, 1, None)
    return build_dspark(target, config), config


@pytest.mark.parametrize(("family", "missing"), [("qwen3", set()), ("llama", {"q_norm", "k_norm"})])
def test_a_warm_start_is_the_targets_last_layer(family: str, missing: set[str], tmp_path: Path) -> None:
    """q/k norms that the target lacks stay ones."""
    drafter, config = saved(family, tmp_path)
    start_from_target(drafter, config)
    last = dict(build(family).layers[-1].named_parameters())
    for name, parameter in drafter.layers[0].named_parameters():
        own = name.split(".")[-2] in missing
        assert torch.equal(parameter, torch.ones_like(parameter) if own else last[name]), name
    assert torch.equal(drafter.norm.weight, build(family).backbone.norm.weight)


def test_a_warm_start_passes_other_towers_by(tmp_path: Path) -> None:
    drafter, config = saved("qwen3", tmp_path)
    weights = tmp_path / "model.safetensors"
    text = {name.replace("model.", "model.language_model."): tensor for name, tensor in load_file(weights).items()}
    # Sorted before and behind the text part, as either may be read last.
    towers = {
        f"{root}.layers.3.{name}.weight": torch.zeros(size)
        for root in ("audio", "vision")
        for name, size in (("self_attn.q_proj", (32, 32)), ("input_layernorm", (32,)), ("fc1", (2,)))
    }
    save_file({**text, **towers, "vision.norm.weight": torch.zeros(32)}, weights)
    start_from_target(drafter, config)
    last = build("qwen3").layers[-1]
    assert torch.equal(drafter.get_parameter("layers.0.self_attn.q_proj.weight"), last.self_attn.q_proj.weight)
    assert torch.equal(drafter.norm.weight, build("qwen3").backbone.norm.weight)


def test_the_rotary_buffers_of_old_files_are_no_hindrance(tmp_path: Path) -> None:
    drafter, config = saved("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    buffer = {"model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(weights) | buffer, weights)
    start_from_target(drafter, config)


@pytest.mark.parametrize(
    ("family", "unknown"),
    [
        ("qwen2", r"self_attn\.k_proj\.bias, self_attn\.q_proj\.bias, self_attn\.v_proj\.bias"),
        ("qwen3_moe", r"mlp\.experts\.0\."),
        ("gemma3", r"post_feedforward_layernorm\.weight, pre_feedforward_layernorm\.weight"),
        ("gemma3_multimodal", r"post_feedforward_layernorm\.weight, pre_feedforward_layernorm\.weight"),
        ("gemma4", r"layer_scalar, post_feedforward_layernorm\.weight, pre_feedforward_layernorm\.weight"),
    ],
)
def test_layers_with_more_than_the_drafters_are_refused(family: str, unknown: str, tmp_path: Path) -> None:
    drafter, config = saved(family, tmp_path)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    with pytest.raises(ValueError, match=f"hold {unknown}.*, which the drafter's layers do not have"):
        start_from_target(drafter, config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def test_a_compiler_that_is_missing_is_told_in_one_line_and_trained_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: none of ['g++'] works\nand much more")

    drafter, _ = saved("qwen3", tmp_path)
    monkeypatch.setattr(torch, "compile", broken)
    set_up_compute(drafter, train_config(tmp_path, compile=True), Accelerator(cpu=True))
    assert not drafter.compiled and not drafter.flex_attention
    (message,) = caplog.messages
    assert "compile=true has no effect" in message and "none of ['g++'] works" in message and "\n" not in message


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("model", [dspark_config(), eagle3_config()], ids=["dspark", "eagle3"])
def test_a_compiled_drafter_has_the_gradients_of_the_eager_one(
    tiny_target: Target, tiny_target_config: TargetConfig, tmp_path: Path, model: Any
) -> None:
    grads = []
    for compiled in (False, True):
        drafter = enliven(build_drafter(model, tiny_target, tiny_target_config), scale=0.15)
        set_up_compute(drafter, train_config(tmp_path, compile=compiled), Accelerator(cpu=True))
        assert drafter.compiled is compiled
        total_loss(drafter, mixed_batch(drafter)).backward()
        grads.append([parameter.grad for parameter in drafter.parameters()])
        names = list(drafter.state_dict())
    assert not any("_orig_mod" in name for name in names)
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_flex_attention_on_a_cpu_is_refused(tmp_path: Path) -> None:
    drafter, _ = saved("qwen3", tmp_path)
    with pytest.raises(ValueError, match=r"attention=flex trains on CUDA only"):
        set_up_compute(drafter, train_config(tmp_path, attention=AttentionBackend.flex), Accelerator(cpu=True))
