"""Tests of train/checkpoint.py: damaged files, full disks, what is kept, and random states."""

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train.checkpoint
import train.parallel
from models.drafter_files import step_folders
from models.files import read_json, write_json
from tests.conftest import run_killed
from tests.resumed_training import (  # noqa: F401 (fixtures among them)
    Runs,
    assert_same_run,
    config_of,
    logged,
    noisy_step,
    runs,
    steps_of,
    whole,
)
from tests.test_train_kills import WRITES
from train import trainer
from train.checkpoint import random_state, read_sealed, seal, set_random_state, tidy, write_sealed
from train.resume import damage, find_checkpoint
from train.tracking import JsonlTracker

# ---- damaged files


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "optimizer.safetensors", "process_00000.pt"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named_and_the_whole_checkpoint_before_is_offered(
    tmp_path: Path, whole: Path, name: str, kind: str
) -> None:
    check_damage(tmp_path, whole, name, DAMAGES[kind])


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_trainer_json_is_named_and_the_whole_checkpoint_before_is_offered(
    tmp_path: Path, whole: Path, kind: str
) -> None:
    check_damage(tmp_path, whole, "trainer.json", DAMAGES[kind])


def check_damage(folder: Path, whole: Path, name: str, spoil: Callable[[Path], object]) -> None:
    """With two damaged ones the third newest is offered."""
    root = folder / "checkpoints"
    newest = step_folders(whole / "checkpoints")[-1]
    for step in (2, 4, 6):
        shutil.copytree(newest, root / f"step_{step:08d}")
    for step in (4, 6):
        spoil(root / f"step_{step:08d}" / name)
    for resume in ("auto", str(root / "step_00000006")):
        pattern = rf"step_00000006/{name} is (missing|damaged).*resume=.*step_00000002 goes on from one before it"
        with pytest.raises(ValueError, match=pattern):
            find_checkpoint(resume, root)
    spoil(root / "step_00000002" / name)
    with pytest.raises(ValueError, match=r"is (missing|damaged).*resume=none starts anew"):
        find_checkpoint("auto", root)


def test_every_flipped_byte_of_a_sealed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    write_sealed(path, {"step": 12, "rate": 2e-3, "files": {"a.pt": [17, "0af3"]}})
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"trainer.json is damaged"):
            read_sealed(path)
    path.write_bytes(content)
    assert read_sealed(path)["step"] == 12


@pytest.mark.parametrize("edit", ["older", "newer"])
def test_a_checkpoint_of_another_version_is_refused_with_the_way_out(tmp_path: Path, whole: Path, edit: str) -> None:
    folder = tmp_path / "step_00000008"
    shutil.copytree(step_folders(whole / "checkpoints")[-1], folder)
    values = read_json(folder / "trainer.json")
    del values["seal"], values["format_version"]
    if edit == "newer":
        values |= {"format_version": 99}
        values |= {"seal": seal(values)}
    write_json(folder / "trainer.json", values)
    version = "None" if edit == "older" else "99"
    with pytest.raises(ValueError, match=rf"trainer.json has format_version {version}, .*init=.*step_00000008 starts"):
        find_checkpoint("auto", tmp_path)


def test_a_damaged_probe_is_named_with_the_way_out(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path))
    path = step_folders(tmp_path / "checkpoints")[-1] / "probe.json"
    flip(path)
    with pytest.raises(ValueError, match=r"probe.json is damaged .*: remove the file, and the run goes on"):
        runs.train(config_of(tmp_path))
    path.unlink()
    runs.train(config_of(tmp_path))  # measures it again
    assert (tmp_path / "checkpoints" / "best" / "probe.json").is_file()


def test_a_folder_that_only_looks_like_a_checkpoint_is_none(runs: Runs, tmp_path: Path, whole: Path) -> None:
    shutil.copytree(step_folders(whole / "checkpoints")[-1], tmp_path / "checkpoints" / "step_00000008")
    (tmp_path / "checkpoints" / "step_00000008_backup").mkdir()
    (tmp_path / "checkpoints" / ".step_00000010.tmp").mkdir()
    assert steps_of(tmp_path) == [8]


# ---- full disks


@pytest.mark.parametrize("write", ["weights", "optimiser", "process", "text", "mkdir", "fsync of a file", "replace"])
def test_a_full_disk_ends_the_run_with_the_checkpoint_before_intact(
    runs: Runs, tmp_path: Path, whole: Path, write: str
) -> None:
    config, (owner, name) = config_of(tmp_path), WRITES[write]

    def full(*args: Any, **kwargs: Any) -> Any:
        if (tmp_path / "checkpoints" / "step_00000004").is_dir():
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    original = getattr(owner, name)
    pattern = r"cannot write .*step_0000000[46]: .*No space left .*step_00000004 is whole, resume=auto goes on"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=pattern):
        patch.setattr(owner, name, full)
        runs.train(config)
    assert steps_of(tmp_path)[-1] == 4 and not list((tmp_path / "checkpoints").glob(".step*"))
    runs.train(config)
    assert_same_run(tmp_path, whole)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Stands in for a full disk that the libraries meet themselves."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_what_safetensors_raises_on_a_full_disk_is_understood(runs: Runs, tmp_path: Path, name: str) -> None:
    runs.train(config_of(tmp_path, num_steps=2))
    limit = (tmp_path / "checkpoints" / "step_00000002" / name).stat().st_size - 1
    pattern = r"cannot write .*step_00000004: .*File too large.*step_00000002 is whole"
    with pytest.raises(ValueError, match=pattern), files_limited_to(limit):
        runs.train(config_of(tmp_path, extend=True))
    assert steps_of(tmp_path) == [2]


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_what_torch_raises_on_a_full_disk_is_understood(tmp_path: Path, size: int) -> None:
    with pytest.raises(OSError), files_limited_to(size):
        train.checkpoint.torch_save({"a": torch.zeros(100_000), "b": torch.zeros(3)}, tmp_path / "a.pt")


# ---- metrics


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("before", [True, False])
def test_a_kill_while_metrics_are_cut_back_keeps_those_before(tmp_path: Path, call: int, before: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)) + '{"step": 9, "lo')
    run_killed(lambda: JsonlTracker(path, first_step=5).close(), kill_at=(Path, "open", call), before=before)
    assert path.read_text().startswith("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    JsonlTracker(path, first_step=5).close()
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(1, 6))


# ---- what is kept


def test_the_newest_and_the_best_are_kept_and_best_is_always_whole(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], str]] = []
    original = trainer.tidy

    def watched(root: Path, keep: int) -> None:
        original(root, keep)
        if (root / "best").exists():
            seen.append((steps_of(tmp_path), (root / "best").readlink().name))
            assert damage(root / "best") is None

    monkeypatch.setattr(trainer, "tidy", watched)
    runs.train(config_of(tmp_path))
    assert seen == [([2], "step_00000002"), ([2, 4], "step_00000002"), ([6], "step_00000006")]


def test_a_resumed_run_knows_the_best(runs: Runs, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 5)) == -9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "lacks_probe", lambda *_: False)  # measures nothing itself
        runs.train(config)
    assert steps_of(tmp_path) == [2, 6]
    assert (tmp_path / "checkpoints" / "best").readlink().name == "step_00000002"


def test_equal_probes_make_the_newest_the_best(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"step_{step:08d}").mkdir()
        write_sealed(tmp_path / f"step_{step:08d}" / "probe.json", {"acceptance_length": 1.5})
    tidy(tmp_path, 5)
    assert (tmp_path / "best").readlink().name == "step_00000004"


def test_the_same_step_saved_again_replaces_the_whole_folder(runs: Runs, tmp_path: Path, whole: Path) -> None:
    runs.train(config_of(tmp_path))
    folder = step_folders(tmp_path / "checkpoints")[-1]
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.copytree(folder, temporary)
    (folder / "stale").write_text("")
    values = {k: v for k, v in json.loads((temporary / "trainer.json").read_text()).items() if k != "seal"}
    for name in ("trainer.json", "probe.json"):
        (temporary / name).unlink()
    train.checkpoint.publish(temporary, folder, values)
    assert damage(folder) is None and not (folder / "stale").exists()
    assert not list(folder.parent.glob(".step*"))


@pytest.mark.parametrize("name", ["log_every", "checkpoint_every", "keep_checkpoints"])
def test_intervals_below_one_are_refused(runs: Runs, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=0 must be at least 1"):
        runs.train(config_of(tmp_path, **{name: 0}))


# ---- random numbers


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_a_random_state_comes_back_from_a_file(tmp_path: Path) -> None:
    torch.save(random_state(), tmp_path / "state.pt")
    expected = [draws() for _ in range(3)]
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draws() for _ in range(3)] == expected


def test_a_process_without_a_state_keeps_its_own(runs: Runs, tmp_path: Path, whole: Path) -> None:
    before = random_state()
    assert train.checkpoint.restore_process(step_folders(whole / "checkpoints")[-1], 7) is None
    expected = draws()
    set_random_state(before)
    assert draws() == expected


def test_a_stopped_run_goes_on_with_the_metrics_that_it_had_gathered(
    runs: Runs, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: trainer.Run, batches: Any, step: int) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return noisy_step(run, batches, step)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "optimiser_step", stopped)
        runs.train(config_of(tmp_path))
    assert steps_of(tmp_path) == [2, 3]
    runs.train(config_of(tmp_path))
    assert logged(tmp_path) == logged(whole)
