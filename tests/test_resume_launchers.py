"""Going on under another launcher or in another number of processes: what gives equal weights, and what is refused."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from models.checkpoint import load_drafter
from models.drafter_files import step_folders
from models.files import read_json, write_json
from tests.resumed_training import (  # noqa: F401 (a fixture among them)
    Runs,
    assert_same_run,
    config_of,
    ended,
    killed_at_call,
    largest_difference,
    logged,
    plain_step,
    runs,
    started,
    steps_of,
    weights,
)
from tests.test_train import train_config
from train import parallel, trainer
from train.checkpoint import read_sealed, write_sealed
from train.resume import damage, find_checkpoint

ROOT = Path(__file__).parents[1]


# ---- other numbers of processes, other launchers


@contextmanager
def one_leg(num_processes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs end after the next two steps, as if told to stop. Steps draw no noise, which is another in each process."""
    answers = iter([num_processes > 1, True])  # one process asks after every step, several at every second one
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "agreed", lambda *_: next(answers))
        patch.setattr(trainer, "optimiser_step", plain_step)
        yield


Leg = tuple[int, bool]  # number of processes, FSDP2


def run_legs(runs: Runs, folder: Path, legs: list[Leg], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    config = train_config(folder, num_steps=2 * len(legs))
    for number, (num_processes, fsdp) in enumerate(legs):
        with one_leg(num_processes, monkeypatch):
            if num_processes == 1:
                runs.train(config)
            else:
                runs.train_together(config, num_processes, fsdp=fsdp)
        assert steps_of(folder)[-1] == 2 * number + 2
    return weights(folder)


def check_legs(runs: Runs, folder: Path, legs: list[Leg], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "optimiser_step", plain_step)
        alone = weights(runs.train(train_config(folder / "alone", num_steps=2 * len(legs))))
    elsewhere = run_legs(runs, folder / "elsewhere", legs, monkeypatch)
    assert largest_difference(elsewhere, alone) < 1e-5  # float32 sums in another order
    first = run_legs(runs, folder / "first", [(1, False)], monkeypatch)
    assert largest_difference(first, alone) > 1e-4  # the legs after it did change the weights


def test_one_process_then_two_then_one_train_what_one_does(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_legs(runs, tmp_path, [(1, False), (2, False), (1, False)], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "legs",
    [
        [(2, False), (2, True), (1, False)],  # DDP, FSDP2, one process
        [(2, True), (3, True), (2, True)],
        [(1, False), (3, True), (2, False), (2, True)],
    ],
)
def test_any_order_of_launchers_trains_what_one_process_does(
    runs: Runs, tmp_path: Path, legs: list[Leg], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_legs(runs, tmp_path, legs, monkeypatch)


@pytest.mark.slow
def test_an_optimiser_that_is_forgotten_between_legs_is_noticed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "load_optimizer", lambda *_: None)
    with pytest.raises(AssertionError):
        check_legs(runs, tmp_path, [(1, False), (2, True), (1, False)], monkeypatch)


@pytest.mark.slow
def test_sharded_processes_killed_or_with_damaged_files_resume_to_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    whole = runs.train_together(config_of(tmp_path / "whole"), 2, fsdp=True)
    config = config_of(tmp_path / "killed")

    def work() -> None:
        killed_at_call(parallel, "save_sharded", 2, rank=1)
        runs.train_together(config, 2, fsdp=True)

    assert ended(started(work)) != 0
    assert steps_of(tmp_path / "killed") == [2]
    runs.train_together(config, 2, fsdp=True)
    assert_same_run(tmp_path / "killed", whole)
    root = tmp_path / "killed" / "checkpoints"
    for path in (root / "step_00000006" / "optimizer").iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(ValueError, match=rf"step_00000006/optimizer/{re.escape(path.name)} is damaged"):
            find_checkpoint("auto", root)
        path.write_bytes(content)
    find_checkpoint("auto", root)


@pytest.mark.slow
def test_a_shard_that_cannot_be_written_ends_every_process_with_its_reason(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, *args: Any) -> Any:
        if torch.distributed.get_rank() == 1 and (tmp_path / "checkpoints" / "step_00000002").is_dir():
            raise OSError(28, "No space left on device")
        return original(self, *args)

    original = FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    for message in runs.train_refused(config_of(tmp_path), 2, fsdp=True):
        assert re.search(r"cannot write .*step_00000004: .*No space left.*step_00000002 is whole", message), message
    assert steps_of(tmp_path) == [2] and not list((tmp_path / "checkpoints").glob(".step*"))


def launch(jobs: dict[str, Any], runs: Runs, folder: Path, *, launcher: str) -> subprocess.Popen[bytes]:
    """Start tests/resumed_training.py under a launcher's CPU twin; it will write folder/outcomes.json."""
    write_json(folder / "jobs.json", jobs)
    program = ["-m", "tests.resumed_training", runs.config.path, str(runs.store.folder), str(folder)]
    config = ROOT / "launch" / "accelerate" / f"{launcher}_cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    if not launcher.startswith("zero"):
        environment["ACCELERATE_USE_CPU"] = "true"
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def outcomes(jobs: dict[str, Any], runs: Runs, folder: Path, *, launcher: str) -> dict[str, str | None]:
    assert launch(jobs, runs, folder, launcher=launcher).wait(timeout=600) == 0, (folder / "log").read_text()[-3000:]
    return read_json(folder / "outcomes.json")


def written_by(folder: Path, source: Path, *, launcher: str, num_processes: int) -> Path:
    """A checkpoint whose trainer.json names another writer."""
    shutil.copytree(source, folder)
    values = {**read_sealed(folder / "trainer.json"), "launcher": launcher, "num_processes": num_processes}
    write_sealed(folder / "trainer.json", values)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_resumes_its_own_checkpoints_only(runs: Runs, tmp_path: Path, stage: int) -> None:
    """On as many processes to the same bits; anything else is refused with the conversion."""
    alone = runs.train(train_config(tmp_path / "alone", num_steps=8))
    checkpoint = step_folders(alone / "checkpoints")[-1]
    foreign = {
        "one process": checkpoint,
        "DDP": written_by(tmp_path / "ddp", checkpoint, launcher="DDP", num_processes=2),
        "three": written_by(tmp_path / "three", checkpoint, launcher=f"ZeRO-{stage}", num_processes=3),
        "stage": written_by(tmp_path / "stage", checkpoint, launcher=f"ZeRO-{5 - stage}", num_processes=2),
    }
    jobs = {
        "whole": {"folder": str(tmp_path / "whole"), "num_steps": 8},
        "stopped": {"folder": str(tmp_path / "stopped"), "num_steps": 8, "stop_at": 4},
        "resumed": {"folder": str(tmp_path / "stopped"), "num_steps": 8},
    }
    for name, path in foreign.items():
        jobs[name] = {"folder": str(tmp_path / name), "num_steps": 10, "extend": True, "resume": str(path)}
    found = outcomes(jobs, runs, tmp_path, launcher=f"zero{stage}")
    assert [found[name] for name in ("whole", "stopped", "resumed")] == [None] * 3
    assert largest_difference(weights(tmp_path / "stopped"), weights(tmp_path / "whole")) == 0
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")
    for name, path in foreign.items():
        pattern = (
            rf"ZeRO-{stage} resumes only its own .*, on as many processes, not on 2\..*init={re.escape(str(path))}"
        )
        assert re.search(pattern, found[name] or ""), (name, found[name])
    sharded = step_folders(tmp_path / "whole" / "checkpoints")[-1]
    config = train_config(tmp_path / "other", num_steps=10, extend=True, resume=str(sharded))
    with pytest.raises(ValueError, match=rf"optimiser of DeepSpeed ZeRO.*init={sharded} starts from its weights"):
        runs.train(config)
    load_drafter(sharded)
    damaged = sharded / "optimizer" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"optimizer/{damaged.name} is damaged.*resume=.*step_00000006"):
        find_checkpoint("auto", sharded.parent)


@pytest.mark.slow
def test_a_launched_run_whose_processes_are_killed_resumes_to_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    """Launcher and processes at once, when the second checkpoint is there."""
    jobs = {"killed": {"folder": str(tmp_path / "killed"), "num_steps": 60}}
    launched = launch(jobs, runs, tmp_path, launcher="ddp")
    while len(step_folders(tmp_path / "killed" / "checkpoints")) < 2:
        assert launched.poll() is None, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.02)
    parent = psutil.Process(launched.pid)
    for process in [parent, *parent.children(recursive=True)]:  # the launcher's processes have groups of their own
        process.kill()
    launched.wait()
    assert 4 <= steps_of(tmp_path / "killed")[-1] < 60
    assert all(damage(path) is None for path in step_folders(tmp_path / "killed" / "checkpoints"))
    jobs["whole"] = {"folder": str(tmp_path / "whole"), "num_steps": 60}
    assert outcomes(jobs, runs, tmp_path, launcher="ddp") == {"killed": None, "whole": None}
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
