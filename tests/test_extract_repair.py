"""What is finished is kept, what is damaged or changed is named and made again, and nothing else."""

import errno
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

import data.extract as extract_module
import data.extraction as extraction_module
import data.shards as shards_module
from data.claims import Claims
from data.codecs import CODECS, round_trip
from data.extract import extract
from data.inspect import deviation, inspect, verify
from data.store import FeatureStore
from models.target import (
    Target,
    TargetConfig,
    TargetIdentity,
    TargetOutput,
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
    saved,
    wait_until,
    wanted,
    write_responses,
)


def test_finished_shards_are_not_made_again(
    run: Run, tmp_path: Path, saved: list[str], wanted: dict[str, bytes]
) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_at=(shards_module, "save_file", 3)) == -9
    run(config)
    assert saved == [".shard-00002.safetensors.tmp"]
    assert files_of(Path(config.store)) == wanted


def test_changed_responses_make_only_the_changed_shards_again(run: Run, tmp_path: Path, saved: list[str]) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_at=(Path, "replace", 7)) == -9  # all shards, no manifest
    chats = chats_of(1)
    chats[5] = chats_of(2)[0]
    write_responses(Path(config.responses), chats)
    run(config)
    assert saved == [".shard-00001.safetensors.tmp"]
    fresh = replace(config, store=str(tmp_path / "fresh"))
    run(fresh)
    assert files_of(Path(config.store)) == files_of(Path(fresh.store))


def test_shards_of_responses_that_are_gone_do_not_stay(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_at=(Path, "replace", 7)) == -9
    write_responses(Path(config.responses), chats_of(1)[:RECORDS_PER_SHARD])
    run(config)
    assert FeatureStore(Path(config.store)).ids == [f"chat-{index}" for index in range(RECORDS_PER_SHARD)]
    fresh = replace(config, store=str(tmp_path / "fresh"))
    run(fresh)
    assert files_of(Path(config.store)) == files_of(Path(fresh.store))


def test_a_finished_store_is_kept_for_its_own_target_only(
    run: Run, tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    run(config)
    before = files_of(Path(config.store))
    run(config)
    assert files_of(Path(config.store)) == before
    with pytest.raises(ValueError, match="exists with another feature_dtype"):
        run(replace(config, feature_dtype="bf16"))
    for changes, word in (({"layer_ids": (0, 3)}, "layer_ids"), ({"thinking": True}, "chats")):
        with pytest.raises(ValueError, match=f"exists with another {word}"):
            extract(config, replace(tiny_target_config, **changes), Accelerator(cpu=True), lambda *_, **__: tiny_target)
    with monkeypatch.context() as patch:
        patch.setattr(extract_module, "target_identity", lambda _config: TargetIdentity("tiny", "0" * 64, "0" * 64))
        with pytest.raises(ValueError, match="exists with another target"):
            run(config)
    write_responses(Path(config.responses), chats_of(2))
    with pytest.raises(ValueError, match=r"made from other responses: `repair=true`"):
        run(config)
    assert files_of(Path(config.store)) == before


def damage(store: Path, kind: str) -> str:
    """Damage shard 1 or the manifest; returns what the error must say."""
    path = store / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return r"shard-00001\.safetensors is missing"
    if kind == "truncated":
        path.write_bytes(content[:-7])
        return r"shard-00001\.safetensors is truncated"
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return r"shard-00001\.safetensors is damaged"


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing"])
def test_a_damaged_shard_is_named_and_only_it_is_made_again(
    run: Run,
    tmp_path: Path,
    wanted: dict[str, bytes],
    kind: str,
    tiny_target_config: TargetConfig,
    saved: list[str],
) -> None:
    config = config_of(tmp_path)
    run(config)
    assert "every checksum is right" in verify(config, tiny_target_config, Accelerator(cpu=True))
    message = damage(Path(config.store), kind)
    with pytest.raises(ValueError, match=message) as error:
        verify(config, tiny_target_config, Accelerator(cpu=True))
    assert "repair=true" in str(error.value) and "shard-00000" not in str(error.value)
    saved.clear()
    run(replace(config, repair=True))
    assert saved == [".shard-00001.safetensors.tmp"]
    assert files_of(Path(config.store)) == wanted


@pytest.mark.parametrize(("owner", "name"), [(Path, "replace"), (Path, "unlink")])
def test_a_repair_that_is_killed_loses_nothing(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], owner: Any, name: str
) -> None:
    config = config_of(tmp_path)
    run(config)
    whole = files_of(Path(config.store))
    call = 1
    while True:
        shutil.rmtree(config.store)
        Path(config.store).mkdir()
        for file, content in whole.items():
            (Path(config.store) / file).write_bytes(content)
        damage(Path(config.store), "flipped")
        code = run_killed(lambda: run(replace(config, repair=True)), kill_at=(owner, name, call))
        run(replace(config, repair=True))
        assert files_of(Path(config.store)) == wanted, call
        if code == 0:
            break
        call += 1
    assert call > 3


def test_repair_makes_only_shards_of_changed_responses(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config)
    before = {path.name: path.stat().st_mtime_ns for path in Path(config.store).glob("shard-*")}
    chats = chats_of(1)
    chats[5] = chats_of(2)[0]
    write_responses(Path(config.responses), chats)
    run(replace(config, repair=True))
    after = {path.name: path.stat().st_mtime_ns for path in Path(config.store).glob("shard-*")}
    assert [name for name in sorted(after) if after[name] != before[name]] == ["shard-00001.safetensors"]
    fresh = replace(config, store=str(tmp_path / "fresh"))
    run(fresh)
    assert files_of(Path(config.store)) == files_of(Path(fresh.store))


def test_verify_notices_states_that_the_target_does_not_compute(
    run: Run, tmp_path: Path, tiny_target_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are right, as the wrong values were hashed."""
    right = Target.forward_whole

    def off(target: Target, input_ids: Tensor) -> TargetOutput:
        output = right(target, input_ids)
        return replace(output, features=output.features.roll(1, dims=1))

    for dtype in ("float32", "bf16", "fp8", "nf4"):
        config = config_of(tmp_path, store=str(tmp_path / dtype), feature_dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(Target, "forward_whole", off)
            run(config)
        with pytest.raises(ValueError, match="features deviate from the target's own"):
            verify(config, tiny_target_config, Accelerator(cpu=True))
        verify(replace(config, verify_records=0), tiny_target_config, Accelerator(cpu=True))
        shutil.rmtree(config.store)
        run(config)
        assert "4 chats computed again" in verify(config, tiny_target_config, Accelerator(cpu=True))


def test_another_shard_size_is_refused_instead_of_making_everything_again(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_at=(Path, "replace", 7)) == -9
    other = replace(config, records_per_shard=5)
    with pytest.raises(ValueError, match="belongs to another extraction"):
        run(other)
    run(config)
    before = files_of(Path(config.store))
    for repair in (False, True):
        with pytest.raises(ValueError, match=r"another records_per_shard=4 \(asked for: 5\): give the options"):
            run(replace(other, repair=repair))
    assert files_of(Path(config.store)) == before


def test_a_damaged_shard_of_an_unfinished_store_is_made_again(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], saved: list[str]
) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_at=(Path, "replace", 7)) == -9
    damage(Path(config.store), "flipped")
    run(replace(config, repair=True))
    assert saved == [".shard-00001.safetensors.tmp"]
    assert files_of(Path(config.store)) == wanted


def test_files_that_only_look_like_shards_harm_nothing(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    Path(config.store).mkdir()
    for name in ("shard-00001 (copy).safetensors", "shard-00001.old.json"):
        (Path(config.store) / name).touch()
    run(config)
    assert len(FeatureStore(Path(config.store))) == NUM_CHATS


def test_a_repair_waits_for_nobody_and_disturbs_nobody(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config)
    before = files_of(Path(config.store))
    holder = os.fork()
    if holder == 0:
        claims = Claims(Path(config.store))
        claims.join("another job")
        (tmp_path / "joined").touch()
        time.sleep(60)
    try:
        wait_until((tmp_path / "joined").is_file)
        with pytest.raises(ValueError, match="other processes work on it now"):
            run(replace(config, repair=True))
        run(config)  # looks, and leaves the other's claims alone
        assert files_of(Path(config.store)) == before | {".claims": b"another job"}
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    run(replace(config, repair=True))
    assert files_of(Path(config.store)) == before


def test_two_jobs_on_one_store_are_kept_apart(run: Run, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    config = config_of(tmp_path)
    others = tmp_path / "others.jsonl"
    write_responses(others, chats_of(2))
    is_stuck = tmp_path / "is_stuck"
    stuck = os.fork()
    if stuck == 0:
        extraction_module.extract_records = lambda *_: (is_stuck.touch(), time.sleep(60))
        run(config)
    try:
        wait_until(is_stuck.is_file)
        with pytest.raises(ValueError, match="processes with other responses or options work on it now"):
            run(replace(config, responses=str(others)))
    finally:
        os.kill(stuck, signal.SIGKILL)
        os.waitpid(stuck, 0)
    run(config)
    assert files_of(Path(config.store)) == wanted


def test_a_full_disk_is_one_error_and_loses_nothing(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards_module, "save_file", full)
        with pytest.raises(ValueError, match=r"shard \d cannot be written .*No space left.*make room"):
            run(config)
    run(config)
    assert files_of(Path(config.store)) == wanted


def test_every_damage_is_named_at_once(run: Run, tmp_path: Path, tiny_target_config: TargetConfig) -> None:
    config = config_of(tmp_path)
    run(config)
    damage(Path(config.store), "flipped")
    (Path(config.store) / "shard-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00001\.safetensors is damaged .*00002\.safetensors is missing"):
        verify(config, tiny_target_config, Accelerator(cpu=True))


def test_a_large_value_does_not_hide_the_others_from_verify() -> None:
    own, other = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    own[:, 3] = other[:, 3] = 300.0
    assert deviation(other, own, 64).worst < 0.02 and deviation(other, own, 64).median > 0.5
    for codec in CODECS.values():
        rounded = deviation(round_trip(own, codec, 64), own, 64)
        assert rounded.worst <= codec.tolerance
        assert rounded.median <= codec.median_tolerance
    assert deviation(torch.full_like(own, torch.nan), own, 64).worst == float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verify": True, "repair": True}, "repair=true changes a store and verify= only look"),
        ({"preview": -1}, "preview and verify_records must be 0 or more, got -1 and 4"),
        ({"verify": True, "verify_records": -1}, "must be 0 or more"),
    ],
)
def test_inspections_that_make_no_sense_are_refused(
    tmp_path: Path, tiny_target_config: TargetConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(config_of(tmp_path, **changes), tiny_target_config, Accelerator(cpu=True))


def test_all_inspections_that_are_asked_for_are_made(
    run: Run, tmp_path: Path, tiny_target_config: TargetConfig
) -> None:
    config = config_of(tmp_path, verify=True, stats=True, preview=1)
    assert inspect(config_of(tmp_path), tiny_target_config, Accelerator(cpu=True)) is None
    run(config)
    text = inspect(config, tiny_target_config, Accelerator(cpu=True))
    assert text is not None
    for part in ("record 0", "top tokens", "every checksum is right", "computed again"):
        assert part in text
