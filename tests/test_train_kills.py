"""Killed at any moment, a run goes on to the bits of an undisturbed one, alone or in two processes."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models.checkpoint
import models.files
import train.checkpoint
import train.parallel
from models.drafter_files import step_folders
from tests.conftest import planted_fault, run_killed
from tests.resumed_training import (  # noqa: F401 (fixtures among them)
    Runs,
    assert_same_run,
    config_of,
    ended,
    kill_group,
    killed_at_call,
    runs,
    started,
    steps_of,
    whole,
)
from train import trainer
from train.config import TrainConfig
from train.resume import damage

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
    """False where the run ended before its kill came. In between, what has a checkpoint's name is a whole one."""
    code = run_killed(lambda: runs.train(config), kill_at=kill_at, before=before)
    assert code in (0, -9)
    assert_all_whole(Path(config.output_dir) / "checkpoints")
    runs.train(config)
    return code == -9


def assert_all_whole(root: Path) -> None:
    best = [root / "best"] if (root / "best").is_symlink() else []
    for path in step_folders(root) + best:
        assert damage(path) is None


@pytest.mark.parametrize(
    ("write", "call", "before"),
    [
        ("weights", 2, False),
        ("process", 2, True),
        ("replace", 10, True),  # of the second checkpoint's folder, say
        ("link", 1, True),  # the probe is saved, `best` does not exist yet
        ("link", 2, False),
        ("unlink", 6, False),  # some files of a checkpoint are deleted
        ("rmtree", 5, False),  # the second of two, and the best moved
        ("probe", 2, True),  # it was logged already
        ("probe", 3, True),  # of a run that has no step left to train
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
    num_calls = count_calls(runs, tmp_path / "counted", WRITES[write])
    kills = 0
    for call in range(1, num_calls + 1):
        folder = tmp_path / str(call)
        kills += kill_and_resume(runs, config_of(folder), (*WRITES[write], call), before=before)
        assert_same_run(folder, whole)
    # after a call that raised (what should be deleted is not there) the run goes on
    assert 0 < num_calls - (3 if write == "unlink" and not before else 0) == kills


def count_calls(runs: Runs, folder: Path, write: tuple[Any, str]) -> int:
    """Of an undisturbed run."""
    calls, original = [], getattr(*write)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*write, counted)
        runs.train(config_of(folder))
    return len(calls)


def kill_at_random(work: Callable[[], object], rng: random.Random, longest: float) -> bool:
    """Whether the kill came before the end."""
    child = started(work)
    time.sleep(rng.uniform(0, 0.8 * longest))  # the run may be quicker than the one that was timed
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
    assert kills >= num_trials / 3


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
    assert steps_of(tmp_path / "killed") == [2, 4]  # the best, and the newest
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
@pytest.mark.parametrize(("write", "calls"), [("replace", 12), ("process", 3), ("fsync of a file", 8), ("rmtree", 4)])
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
        assert_all_whole(tmp_path / str(call) / "checkpoints")
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
