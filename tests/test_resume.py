"""Tests of train/resume.py: which checkpoint a run goes on from, how long, and that what it contradicts is kept."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from models.drafter_files import step_folders
from tests.conftest import (
    files_of,
    run_killed,
)
from tests.resumed_training import (  # noqa: F401 (fixtures among them)
    Runs,
    assert_same_run,
    config_of,
    largest_difference,
    logged,
    runs,
    steps_of,
    weights,
    whole,
)
from tests.test_train import OPTIM
from tests.test_train_checkpoints import flip
from train import resume, trainer
from train.config import TrainConfig
from train.resume import Found, find_checkpoint, on_main, put_aside


def test_a_finished_run_trains_no_further(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.train(config_of(tmp_path))
    before = files_of(tmp_path)
    monkeypatch.setattr(trainer, "optimiser_step", None)  # would raise if called
    runs.train(config_of(tmp_path))
    assert files_of(tmp_path) == before


def test_resuming_with_other_options_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path))
    with pytest.raises(ValueError, match=r"seed \(was 3, now 4\).*resume=none"):
        runs.train(config_of(tmp_path, seed=4))
    with pytest.raises(ValueError, match=r"learning_rate"):
        runs.train(config_of(tmp_path, optim=replace(OPTIM, learning_rate=1e-3)))
    with pytest.raises(ValueError, match=r"num_steps \(was 6, now 9\).*extend=true goes on from step 6"):
        runs.train(config_of(tmp_path, num_steps=9))


def test_a_resume_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=.*nowhere.*trainer.json"):
        find_checkpoint(str(tmp_path / "nowhere"), tmp_path)


def test_an_error_of_the_main_process_keeps_its_words() -> None:
    def refuse() -> None:
        raise ValueError("seed=4 does not fit")

    assert on_main(Accelerator(cpu=True), lambda: 7) == 7
    with pytest.raises(ValueError, match=r"^seed=4 does not fit$"):
        on_main(Accelerator(cpu=True), refuse)


def test_every_process_raises_what_the_main_one_found(runs: Runs, tmp_path: Path) -> None:
    """None waits for another that has ended."""
    runs.train(config_of(tmp_path))
    messages = runs.train_refused(config_of(tmp_path, seed=4), 2)
    assert messages[0] == messages[1] and "seed (was 3, now 4)" in messages[0]


# ---- longer


def extended(folder: Path, **changes: Any) -> TrainConfig:
    return config_of(folder, num_steps=12, log_every=1, **changes)


def test_extending_trains_on_by_a_schedule_of_its_own(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path, log_every=1))
    before = weights(tmp_path)
    runs.train(extended(tmp_path, extend=True))
    lines = [line for line in logged(tmp_path) if "learning_rate" in line]
    rates = [line["learning_rate"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert min(rates) > 0 and rates[6] == OPTIM.learning_rate > rates[5]  # a warm-up of one step
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert largest_difference(weights(tmp_path), before) > 1e-3


@pytest.mark.parametrize("call", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("says_so_again", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_extension_killed_and_resumed_goes_on_by_the_same_schedule(
    runs: Runs, tmp_path: Path, call: int, says_so_again: bool
) -> None:
    """Once it has a checkpoint, extend=true need not be repeated."""
    for name in ("whole", "killed"):
        runs.train(config_of(tmp_path / name, log_every=1))
    runs.train(extended(tmp_path / "whole", extend=True))
    config = extended(tmp_path / "killed", extend=True)
    assert run_killed(lambda: runs.train(config), kill_at=(torch, "save", call)) == -9
    assert steps_of(tmp_path / "killed")[-1] == 4 + 2 * call
    if call == 1 and not says_so_again:
        with pytest.raises(ValueError, match="extend=true goes on from step 6"):
            runs.train(extended(tmp_path / "killed"))
        return
    runs.train(extended(tmp_path / "killed", extend=says_so_again))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_an_extension_to_no_further_step_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path))
    with pytest.raises(ValueError, match=r"extend=true: num_steps=5 is not beyond step 6"):
        runs.train(config_of(tmp_path, num_steps=5, extend=True))


# ---- back, and anew


def everything(folder: Path) -> set[tuple[str, bytes]]:
    """Files of checkpoints as `step_x/name`, wherever they lie, and every line of metrics."""
    found = set()
    for root in [folder / "checkpoints", *folder.glob("before_*")]:
        for path in step_folders(root):
            found |= {(f"{path.name}/{name}", content) for name, content in files_of(path).items()}
    lines = {line for path in folder.rglob("metrics.jsonl") for line in path.read_bytes().splitlines()}
    return found | {("metrics", line) for line in lines}


def kept(folder: Path, before: set[tuple[str, bytes]]) -> bool:
    return before <= everything(folder)


def test_starting_anew_moves_everything_and_loses_nothing(runs: Runs, tmp_path: Path, whole: Path) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    (tmp_path / "wandb_run_id").write_text("abc")
    before = everything(tmp_path)
    runs.train(config_of(tmp_path, resume="none"))
    assert kept(tmp_path, before) and steps_of(tmp_path) == [6]
    assert (tmp_path / "before_1" / "wandb_run_id").read_text() == "abc" and not (tmp_path / "wandb_run_id").exists()
    assert [path.name for path in step_folders(tmp_path / "before_1")] == [f"step_{step:08d}" for step in (2, 4, 6)]
    assert_same_run(tmp_path, whole)


def test_going_back_moves_what_is_newer_and_loses_nothing(runs: Runs, tmp_path: Path, whole: Path) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    before = everything(tmp_path)
    back = str(tmp_path / "checkpoints" / "step_00000004")
    runs.train(config_of(tmp_path, resume=back, keep_checkpoints=5))
    assert kept(tmp_path, before)
    assert [path.name for path in step_folders(tmp_path / "before_1")] == ["step_00000006"]
    runs.train(config_of(tmp_path))  # keeps fewer
    assert_same_run(tmp_path, whole)


def test_the_best_can_be_gone_back_to_by_its_link(runs: Runs, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 6)) == -9
    assert (tmp_path / "checkpoints" / "best").readlink().name == "step_00000002" and steps_of(tmp_path) == [2, 4]
    before = everything(tmp_path)
    runs.train(config_of(tmp_path, resume=str(tmp_path / "checkpoints" / "best"), keep_checkpoints=5))
    assert kept(tmp_path, before) and steps_of(tmp_path) == [2, 4, 6]
    assert [path.name for path in step_folders(tmp_path / "before_1")] == ["step_00000004"]


def test_the_best_that_is_moved_leaves_the_link_to_the_best_that_stays(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    root = tmp_path / "checkpoints"
    assert (root / "best").readlink().name == "step_00000006"
    put_aside(tmp_path, found=found_at(root / "step_00000004"))
    assert (root / "best").readlink().name == "step_00000002"
    put_aside(tmp_path, found=None)
    assert not (root / "best").is_symlink() and not step_folders(root)


def found_at(folder: Path) -> Found:
    return resume.read_progress(folder, saved_options(folder), num_steps=6, extend=False)


def saved_options(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer.json").read_text())["options"]


def test_a_run_that_goes_on_from_elsewhere_moves_all_of_its_own(runs: Runs, tmp_path: Path, whole: Path) -> None:
    """Those of equal names among them."""
    runs.train(config_of(tmp_path / "other", seed=4, keep_checkpoints=5))
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    before = everything(tmp_path / "other")
    source = tmp_path / "checkpoints" / "step_00000004"
    runs.train(config_of(tmp_path / "other", resume=str(source)))
    assert kept(tmp_path / "other", before)
    assert torch.equal(weights(tmp_path / "other")["norm.weight"], weights(whole)["norm.weight"])
    assert [path.name for path in step_folders(tmp_path / "other" / "before_1")] == [
        f"step_{step:08d}" for step in (2, 4, 6)
    ]
    assert min(line["step"] for line in logged(tmp_path / "other")) > 4  # no metrics of a run that it is not
    # and back to what was put aside
    before = everything(tmp_path / "other")
    aside = tmp_path / "other" / "before_1" / "step_00000006"
    runs.train(config_of(tmp_path / "other", seed=4, resume=str(aside), num_steps=8, extend=True))
    assert kept(tmp_path / "other", before) and steps_of(tmp_path / "other") == [8]


@pytest.mark.parametrize("refused", [{"seed": 4}, {"num_steps": 9}])
def test_a_refused_command_moves_nothing(runs: Runs, tmp_path: Path, refused: dict[str, Any]) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="cannot resume"):
        runs.train(config_of(tmp_path, resume=str(tmp_path / "checkpoints" / "step_00000002"), **refused))
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("back_to", ["none", "step_00000002"])
@pytest.mark.parametrize("before", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(
    "write", [(shutil, "copyfile"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir")]
)
def test_a_kill_while_things_are_moved_loses_nothing(
    tmp_path: Path, kept_all: Path, back_to: str, before: bool, write: tuple[Any, str]
) -> None:
    """Nor does what the user does next: the same command, or resume=auto."""
    for call in range(1, 4):
        folder = tmp_path / str(call)
        shutil.copytree(kept_all, folder, symlinks=True)
        had = everything(folder)
        found = None if back_to == "none" else found_at(folder / "checkpoints" / back_to)
        run_killed(lambda: put_aside(folder, found=found), kill_at=(*write, call), before=before)  # noqa: B023
        assert kept(folder, had)
        steps = steps_of(folder)
        assert steps == [2, 4, 6][: len(steps)]  # the newest went first: what stays is a run
        if steps and back_to != "none":
            assert (folder / "metrics.jsonl").is_file()
        put_aside(folder, found=found)
        assert kept(folder, had)
        assert steps_of(folder) == ([] if back_to == "none" else [2])
        assert (folder / "metrics.jsonl").is_file() == (back_to != "none")


@pytest.fixture
def kept_all(runs: Runs, tmp_path: Path) -> Path:
    return runs.train(config_of(tmp_path / "kept", keep_checkpoints=5))


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_that_is_offered(
    runs: Runs, tmp_path: Path, whole: Path
) -> None:
    """And then by resume=auto again."""
    config = config_of(tmp_path, keep_checkpoints=5)
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 5)) == -9
    damaged = step_folders(tmp_path / "checkpoints")[-1] / "optimizer.safetensors"
    flip(damaged)
    with pytest.raises(ValueError, match=r"step_00000004/optimizer.safetensors is damaged") as error:
        runs.train(config)
    offered = re.search(r"resume=(\S+)", str(error.value))
    assert offered is not None
    config = replace(config, resume=offered[1])
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 4)) == -9
    assert (tmp_path / "before_1" / "step_00000004").is_dir() and steps_of(tmp_path) == [2, 4]
    runs.train(config_of(tmp_path))
    assert_same_run(tmp_path, whole)
