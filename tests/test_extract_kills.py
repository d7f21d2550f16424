"""Killed anywhere and resumed by any number of processes, a store has the bytes of an undisturbed run."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import debug_launcher
from accelerate.state import AcceleratorState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import data.extraction as extraction_module
import data.shards as shards_module
import models.files as files_module
from data.extract import ExtractConfig, extract
from data.run import start_processes
from models.target import (
    Target,
    TargetConfig,
)
from tests.conftest import (
    files_of,
    run_killed,
)
from tests.extraction_cases import (  # noqa: F401 (fixtures among them)
    NUM_CHATS,
    RECORDS_PER_SHARD,
    Run,
    chats_of,
    config_of,
    run,
    wait_until,
    wanted,
    write_responses,
)


def resume(config: ExtractConfig, run: Run, num_processes: int) -> None:
    """Run to the end, in processes that know of each other only through the store."""
    children = []
    for _ in range(num_processes):
        if (child := os.fork()) == 0:
            status = 1
            try:
                run(config)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * num_processes


KillAt = tuple[Any, str, int]


def kill_and_resume(run: Run, config: ExtractConfig, kill_at: KillAt, *, before: bool, num_processes: int) -> bool:
    """False where the run ended before its kill came."""
    code = run_killed(lambda: run(config), kill_at=kill_at, before=before)
    assert code in (0, -9)
    resume(config, run, num_processes)
    return code == -9


@pytest.mark.parametrize(
    ("kill_at", "before", "num_processes"),
    [
        ((files_module, "fsync", 1), True, 1),  # before the first shard is on disk
        ((Path, "replace", 1), False, 2),  # between a shard and its sidecar
        ((Path, "replace", 7), True, 1),  # before the manifest
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], kill_at: KillAt, before: bool, num_processes: int
) -> None:
    config = config_of(tmp_path)
    assert kill_and_resume(run, config, kill_at, before=before, num_processes=num_processes)
    assert files_of(Path(config.store)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (files_module, "fsync"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "chmod"),
        (shards_module, "save_file"),
        (Path, "write_text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_killed_around_any_write_resumes_to_the_same_bytes(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], owner: Any, name: str, before: bool, num_processes: int
) -> None:
    call, killed = 1, True
    while killed:
        folder = tmp_path / str(call)
        folder.mkdir()
        config = config_of(folder)
        killed = kill_and_resume(run, config, (owner, name, call), before=before, num_processes=num_processes)
        assert files_of(Path(config.store)) == wanted, call
        call += 1
    assert call > 3


def slow_save(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
    """A slow disk: the file grows in pieces."""
    whole = path.with_suffix(".whole")
    save_file(tensors, whole, **options)
    content = whole.read_bytes()
    whole.unlink()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), 1 + len(content) // 20):
            file.write(content[start : start + 1 + len(content) // 20])
            time.sleep(0.005)


def start_on_a_slow_disk(run: Run, config: ExtractConfig) -> int:
    child = os.fork()
    if child == 0:
        try:
            shards_module.save_file = slow_save
            run(config)
        finally:
            os._exit(0)
    return child


def kill_at_random(run: Run, config: ExtractConfig, delay: float) -> bool:
    """Kill a run on a slow disk after `delay` seconds; True where a shard was half written then."""
    child = start_on_a_slow_disk(run, config)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return any(is_half_written(path) for path in Path(config.store).glob(".shard-*.tmp"))


def is_half_written(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return False
    except (SafetensorError, ValueError):
        return path.stat().st_size > 0


def kills_at_random(run: Run, tmp_path: Path, wanted: dict[str, bytes], num_kills: int) -> int:
    """How many of the kills came in the middle of a write; each is resumed and compared."""
    folders = [tmp_path / str(kill) for kill in range(num_kills + 1)]
    for folder in folders:
        folder.mkdir()
    began = time.perf_counter()
    os.waitpid(start_on_a_slow_disk(run, config_of(folders.pop())), 0)
    whole = time.perf_counter() - began
    rng, num_half = random.Random(0), 0
    for kill, folder in enumerate(folders):
        config = config_of(folder)
        num_half += kill_at_random(run, config, whole * rng.uniform(0.1, 1.0))
        resume(config, run, num_processes=1 + kill % 2)
        assert files_of(Path(config.store)) == wanted, kill
    return num_half


@pytest.mark.slow
def test_three_kills_at_random_times_change_no_byte(run: Run, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    kills_at_random(run, tmp_path, wanted, 3)


@pytest.mark.slow
def test_twenty_kills_at_random_times_change_no_byte_and_a_quarter_cut_a_write(
    run: Run, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    num_half = kills_at_random(run, tmp_path, wanted, 20)
    assert num_half >= 5, num_half


def test_a_run_that_is_asked_to_stop_ends_with_whole_shards(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    right = extraction_module.extract_records

    def terminated(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(extraction_module, "extract_records", terminated)
        run(config)
    names = {path.name for path in Path(config.store).iterdir()}
    assert names == {".claims", "shard-00000.json", "shard-00000.safetensors"}, "the shard in progress, and no other"
    run(config)
    assert files_of(Path(config.store)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("num_chats", [NUM_CHATS, RECORDS_PER_SHARD])
def test_two_processes_make_the_bytes_of_one(
    run: Run, tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig, num_chats: int
) -> None:
    """Also where there are fewer shards than processes."""
    config = config_of(tmp_path)
    write_responses(Path(config.responses), chats_of(1, num_chats))
    alone = replace(config, store=str(tmp_path / "alone"))
    run(alone)
    AcceleratorState._reset_state(reset_partial_state=True)  # the children must not inherit a world of one

    def work() -> None:
        accelerator = start_processes(os.environ)
        (tmp_path / f"rank{accelerator.process_index}").write_text(str(accelerator.num_processes))
        extract(config, tiny_target_config, accelerator, lambda *_, **__: tiny_target)

    debug_launcher(work, num_processes=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert files_of(Path(config.store)) == files_of(Path(alone.store))


def test_a_process_that_dies_leaves_its_shards_to_the_others(
    run: Run, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    """One is stuck in its first shard and has claimed the next; another does the rest, waits, and takes over."""
    config, is_stuck = config_of(tmp_path), tmp_path / "is_stuck"
    stuck = os.fork()
    if stuck == 0:
        extraction_module.extract_records = lambda *_: (is_stuck.touch(), time.sleep(60))
        run(config)
        os._exit(1)
    try:
        wait_until(is_stuck.is_file)
        other = os.fork()
        if other == 0:
            try:
                run(config)
            finally:
                os._exit(0)
        wait_until((Path(config.store) / "shard-00002.json").is_file)
        time.sleep(0.2)
        assert not (Path(config.store) / "manifest.json").exists(), "two shards are still held"
    finally:
        os.kill(stuck, signal.SIGKILL)
        os.waitpid(stuck, 0)
    os.waitpid(other, 0)
    assert files_of(Path(config.store)) == wanted
