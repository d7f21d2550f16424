"""One launch per launcher: packed or not, in one or several micro-batches, all give the weights of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data.store import FeatureStore
from models.files import read_json
from models.target import TargetConfig
from tests.launched_training import MODELS, NUM_STEPS, RUNS, SETTINGS, num_micro_batches

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "launch" / "accelerate"
# What Accelerate takes itself for; FSDP2 shards behind a process group of its kind MULTI_CPU.
TYPES = {"ddp": "MULTI_CPU", "fsdp2": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def launch(
    out: Path, config: TargetConfig, store: FeatureStore, *, launcher: str | None, precision: str = "no"
) -> None:
    """Run tests/launched_training.py under a launcher's CPU twin, or (None) as a plain process."""
    program = ["-m", "tests.launched_training", config.path, str(store.folder), str(out), precision]
    command = [sys.executable, *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    if launcher is not None:
        # sys.executable's own accelerate, whatever PATH says
        module = [sys.executable, "-m", "accelerate.commands.launch"]
        command = [*module, "--config_file", str(CONFIGS / f"{launcher}_cpu.yaml"), *program]
        if TYPES[launcher] == "MULTI_CPU":
            environment["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_target_config: TargetConfig, tiny_store: FeatureStore) -> Path:
    out = tmp_path_factory.mktemp("alone")
    launch(out, tiny_target_config, tiny_store, launcher=None)
    assert read_json(out / "world.json") == {
        "num_processes": 1,
        "type": "DistributedType.NO",
        "launcher": "one process",
    }
    return out


def assert_same_training(out: Path, alone: Path) -> None:
    """Against one process, packed, one micro-batch a step: float32 sums in another order."""
    for setting, model in RUNS:
        folder, reference = out / f"{setting}_{model}", alone / f"packed_{model}"
        ours, theirs = metrics(folder), metrics(reference)
        assert len(ours) == len(theirs) == NUM_STEPS
        for one, other in zip(ours, theirs, strict=True):
            for name in ("loss", "grad_norm", "learning_rate", "accept_rate@0", "accept_rate@3"):
                assert one[name] == pytest.approx(other[name], rel=1e-5), (setting, model, name, one["step"])
            assert one["padding_share"] == 0 or setting.startswith("rows")
        checkpoint = f"checkpoints/step_{NUM_STEPS:08d}/model.safetensors"
        ours, theirs = load_file(folder / checkpoint), load_file(reference / checkpoint)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert (ours[name] - theirs[name]).abs().max() < 1e-5, (setting, model, name)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", TYPES)
def test_every_launcher_trains_what_one_process_trains(
    launcher: str, tmp_path: Path, alone: Path, tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> None:
    launch(tmp_path, tiny_target_config, tiny_store, launcher=launcher)
    world = {"num_processes": 2, "type": f"DistributedType.{TYPES[launcher]}", "launcher": NAMES[launcher]}
    assert read_json(tmp_path / "world.json") == world
    assert_same_training(tmp_path, alone)


@pytest.mark.slow
def test_one_process_trains_the_same_however_a_step_is_split(alone: Path) -> None:
    assert_same_training(alone, alone)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", TYPES)
def test_bf16_keeps_float32_weights(
    launcher: str, tmp_path: Path, alone: Path, tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> None:
    """Layers compute in bf16; what is saved and summed stays float32, so the losses stay close over 20 steps."""
    launch(tmp_path, tiny_target_config, tiny_store, launcher=launcher, precision="bf16")
    for model in MODELS:
        folder = tmp_path / f"packed_{model}"
        weights = load_file(folder / f"checkpoints/step_{NUM_STEPS:08d}/model.safetensors")
        assert all(tensor.dtype.itemsize == 4 for tensor in weights.values())
        assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())
        for ours, theirs in zip(metrics(folder), metrics(alone / f"packed_{model}"), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2), (model, ours["step"])


def test_settings_are_what_they_say(tiny_store: FeatureStore) -> None:
    for setting in SETTINGS:
        for num_processes in (1, 2):
            counts = num_micro_batches(tiny_store, setting, num_processes)
            assert counts == {1} if not setting.endswith("_4") else min(counts) >= 4


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_configs_are_read_by_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.mixed_precision == ("no" if path.stem.endswith("_cpu") else "bf16")
    kind, _, where = path.stem.partition("_")
    processes = {"gpu": 1, "8gpu": 8, "nodes": 16, "cpu": 2}[where]
    assert (config.num_processes, config.num_machines) == (processes, 2 if where == "nodes" else 1)
    wanted = {"one": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}[kind]
    assert str(config.distributed_type).removeprefix("DistributedType.") == wanted
    if wanted == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(kind[-1])
    if wanted == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
