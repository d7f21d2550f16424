"""Tests of train/checkpoint.py: killed at any moment, on a full disk or with damaged files, a run goes on to the same
bits from whole checkpoints, or says what is wrong."""

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models.checkpoint
import models.files
import train.checkpoint
import train.parallel
from data.store import FeatureStore
from models.checkpoint import step_folders
from models.files import read_json, write_json
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import planted_fault, run_killed
from tests.resumed_training import (
    PROBES,
    Runs,
    assert_same_run,
    ended,
    kill_group,
    killed_at_call,
    logged,
    noisy_step,
    started,
)
from tests.test_train import train_config
from train import trainer
from train.checkpoint import random_state, read_sealed, seal, set_random_state, tidy, write_sealed
from train.config import TrainConfig
from train.resume import damage, find_checkpoint


@pytest.fixture
def runs(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_store: FeatureStore,
    tiny_identity: TargetIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    monkeypatch.setattr(trainer, "optimiser_step", noisy_step)
    return Runs(tiny_target, tiny_target_config, tiny_store, tiny_identity)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """8 steps, checkpoints and probes at every second, reports at other steps; the newest is kept, and the best."""
    values: dict[str, Any] = {"num_steps": 8, "keep_checkpoints": 1, "log_every": 3, "probe": PROBES}
    return train_config(folder, **values | changes)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_store: FeatureStore,
    tiny_identity: TargetIdentity,
) -> Path:
    """The run that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "optimiser_step", noisy_step)
        runs = Runs(tiny_target, tiny_target_config, tiny_store, tiny_identity)
        return runs.train(config_of(tmp_path_factory.mktemp("whole")))


def names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in step_folders(folder / "checkpoints")]


WRITES: dict[str, tuple[Any, str]] = {
    "fsync of a file": (models.files, "fsync"),
    "fsync of a checkpoint": (train.checkpoint, "fsync"),
    "replace": (Path, "replace"),
    "weights": (models.checkpoint, "save_file"),
    "optimiser": (train.parallel, "save_file"),
    "process": (torch, "save"),
    "text": (Path, "write_text"),
    "mkdir": (Path, "mkdir"),
    "link": (Path, "symlink_to"),
    "rmtree": (shutil, "rmtree"),
    "unlink": (os, "unlink"),  # inside rmtree, and of Path
    "rmdir": (os, "rmdir"),
    "probe": (trainer, "save_probe"),
    "metrics": (trainer, "build_trackers"),
}


def kill_and_resume(runs: Runs, config: TrainConfig, kill_at: tuple[Any, str, int], *, before: bool) -> bool:
    """False where the run ended before its kill came. No half checkpoint has a name in between."""
    code = run_killed(lambda: runs.train(config), kill_at=kill_at, before=before)
    assert code in (0, -9)
    assert [damage(path) for path in step_folders(Path(config.output_dir) / "checkpoints")].count(None) == len(
        step_folders(Path(config.output_dir) / "checkpoints")
    )
    runs.train(config)
    return code == -9


@pytest.mark.parametrize(
    ("write", "call", "before"),
    [
        ("weights", 2, False),
        ("process", 2, True),
        ("replace", 10, True),  # of the second checkpoint's folder, say
        ("link", 1, True),  # the probe is saved, `best` does not exist yet
        ("link", 2, False),
        ("unlink", 3, False),  # some files of a checkpoint are deleted
        ("probe", 2, True),  # it was logged already
        ("probe", 4, True),  # of a run that has no step left to train
    ],
)
def test_a_run_killed_in_a_write_resumes_to_the_same_bits(
    runs: Runs, tmp_path: Path, whole: Path, write: str, call: int, before: bool
) -> None:
    assert kill_and_resume(runs, config_of(tmp_path), (*WRITES[write], call), before=before)
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_run_killed_around_any_write_resumes_to_the_same_bits(
    runs: Runs, tmp_path: Path, whole: Path, write: str, before: bool
) -> None:
    call, killed = 1, True
    while killed:
        folder = tmp_path / str(call)
        killed = kill_and_resume(runs, config_of(folder), (*WRITES[write], call), before=before)
        assert_same_run(folder, whole)
        call += 1
    assert call > (2 if write == "metrics" else 3)


def kill_at_random(work: Callable[[], object], rng: random.Random, longest: float) -> bool:
    """Whether the kill came before the end."""
    child = started(work)
    time.sleep(rng.uniform(0, longest))
    return kill_group(child) == -signal.SIGKILL


def check_random_kills(runs: Runs, folder: Path, whole: Path, *, num_trials: int, seed: int) -> None:
    rng, kills = random.Random(seed), 0
    began = time.perf_counter()
    assert ended(started(lambda: runs.train(config_of(folder / "timed")))) == 0
    longest = time.perf_counter() - began
    for trial in range(num_trials):
        config = config_of(folder / str(trial))
        for _ in range(1 + trial % 3):  # some runs are killed again and again
            kills += kill_at_random(lambda: runs.train(config), rng, longest)  # noqa: B023
        runs.train(config)
        assert_same_run(folder / str(trial), whole)
    assert kills > num_trials / 2


def test_runs_killed_at_random_times_resume_to_the_same_bits(runs: Runs, tmp_path: Path, whole: Path) -> None:
    check_random_kills(runs, tmp_path, whole, num_trials=3, seed=0)


@pytest.mark.slow
def test_many_runs_killed_at_random_times_resume_to_the_same_bits(runs: Runs, tmp_path: Path, whole: Path) -> None:
    check_random_kills(runs, tmp_path, whole, num_trials=20, seed=1)


@pytest.mark.parametrize("keep", ["weights", "random", "window", "optimizer"])
def test_a_run_that_forgets_part_of_its_state_is_noticed(
    runs: Runs, tmp_path: Path, whole: Path, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison has teeth: each part of a checkpoint changes what follows."""
    faults: dict[str, tuple[Any, str, Any]] = {
        "weights": (train.parallel, "load_weights", lambda *_: None),
        "optimizer": (train.parallel, "load_optimizer", lambda *_: None),
        "random": (train.checkpoint, "set_random_state", lambda _: None),
        "window": (trainer, "restore_process", lambda *_: None),
    }
    with planted_fault(monkeypatch, *faults[keep]):
        kill_and_resume(runs, config_of(tmp_path), (*WRITES["process"], 3), before=True)
        assert_same_run(tmp_path, whole)


# ---- two processes


def test_two_processes_killed_in_one_of_them_resume_to_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    whole = runs.train_together(config_of(tmp_path / "whole"), 2)
    assert (step_folders(whole / "checkpoints")[-1] / "process_00001.pt").is_file()
    config = config_of(tmp_path / "killed")

    def work() -> None:
        killed_at_call(torch, "save", 3, rank=1)  # the other waits for it at the barrier after
        runs.train_together(config, 2)

    assert ended(started(work)) != 0
    assert names(tmp_path / "killed") == [2, 4]  # the best, and the newest
    runs.train_together(config, 2)
    assert_same_run(tmp_path / "killed", whole)


@pytest.mark.slow
def test_two_processes_killed_at_random_times_resume_to_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    began = time.perf_counter()
    whole = runs.train_together(config_of(tmp_path / "whole"), 2)
    longest, rng, kills = time.perf_counter() - began, random.Random(2), 0
    for trial in range(20):
        config = config_of(tmp_path / str(trial))
        kills += kill_at_random(lambda: runs.train_together(config, 2), rng, longest)  # noqa: B023
        runs.train_together(config, 2)
        assert_same_run(tmp_path / str(trial), whole)
    assert kills > 10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("write", "calls"), [("replace", 12), ("process", 4), ("fsync of a file", 8), ("rmtree", 4)])
def test_two_processes_killed_in_any_write_of_one_resume_to_the_same_bits(
    runs: Runs, tmp_path: Path, write: str, calls: int, rank: int
) -> None:
    whole = runs.train_together(config_of(tmp_path / "whole"), 2)
    for call in range(1, calls + 1):
        config = config_of(tmp_path / str(call))

        def work() -> None:
            killed_at_call(*WRITES[write], call, rank=rank)  # noqa: B023
            runs.train_together(config, 2)  # noqa: B023

        code = ended(started(work))
        assert code != 0 or rank == 1  # which has fewer writes
        assert all(damage(path) is None for path in step_folders(tmp_path / str(call) / "checkpoints"))
        runs.train_together(config, 2)
        assert_same_run(tmp_path / str(call), whole)


def test_a_second_run_in_the_same_folder_is_refused(runs: Runs, tmp_path: Path) -> None:
    """A killed launcher may leave its processes behind."""
    reader, writer = os.pipe()

    def slow_step(run: trainer.Run, batches: list[Any], step: int) -> None:
        os.write(writer, b"x")
        time.sleep(60)

    def work() -> None:
        trainer.optimiser_step = slow_step
        runs.train(config_of(tmp_path))

    child = started(work)
    assert os.read(reader, 1) == b"x"
    with pytest.raises(ValueError, match=r"output_dir=.* another run trains there now; .* another name="):
        runs.train(config_of(tmp_path))
    kill_group(child)
    runs.train(config_of(tmp_path))


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
    assert names(tmp_path) == [8]


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
    assert names(tmp_path)[-1] == 4 and not list((tmp_path / "checkpoints").glob(".step*"))
    runs.train(config)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("limit", [100, 1 << 14, 1 << 17, 1 << 18])
def test_what_the_libraries_raise_on_a_full_disk_is_understood(runs: Runs, tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands in for the disk: each library meets it in a file of its own."""
    config, (soft, hard) = config_of(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    first = config_of(tmp_path, num_steps=2)
    runs.train(first)
    with pytest.raises(ValueError, match=r"cannot write .*step_00000004.*step_00000002 is whole"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            runs.train(config_of(tmp_path, extend=True))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [2]
    assert config.num_steps == 8


# ---- what is kept


def test_the_newest_and_the_best_are_kept_and_best_is_always_whole(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], str]] = []
    original = trainer.tidy

    def watched(root: Path, keep: int) -> None:
        original(root, keep)
        if (root / "best").exists():
            seen.append((names(tmp_path), (root / "best").readlink().name))
            assert damage(root / "best") is None

    monkeypatch.setattr(trainer, "tidy", watched)
    runs.train(config_of(tmp_path))
    assert seen == [
        ([2], "step_00000002"),
        ([2, 4], "step_00000002"),
        ([2, 6], "step_00000002"),
        ([8], "step_00000008"),
    ]


def test_a_resumed_run_knows_the_best(runs: Runs, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "measure", 3)) == -9
    assert names(tmp_path) == [2, 4, 6]
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "lacks_probe", lambda *_: False)  # measures nothing itself
        runs.train(config)
    seen = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step")]
    assert sorted(seen) == ["step_00000002", "step_00000008"]
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
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return noisy_step(run, batches, step)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "optimiser_step", stopped)
        runs.train(config_of(tmp_path))
    assert names(tmp_path) == [2, 5]
    runs.train(config_of(tmp_path))
    assert logged(tmp_path) == logged(whole)
