"""Extraction: rows that line up with the target's own predictions, and a store that is the same however it was made."""

import json
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import data.estimate as estimate_module
import data.extract as extract_module
import data.extraction as extraction_module
import data.shards as shards_module
import models.files as files_module
import models.target as target_module
from data.chat import RenderedChat, Supervise
from data.extract import ExtractConfig, extract
from data.inspect import verify
from data.responses import ChatOptions, RenderedRecord, Responses, batches_by_length
from data.run import start_processes
from data.store import FeatureStore, supervised_rows
from models.target import (
    Target,
    TargetConfig,
    TargetIdentity,
    TargetOutput,
    check_sharing,
    load_spec,
    load_target,
)
from tests.conftest import (
    counting_chat,
    extracted,
    files_of,
    make_store,
    planted_fault,
    run_killed,
    tiny_header,
    tiny_tokenizer,
)
from tests.tiny_families import FAMILIES, VOCAB_SIZE, build

NUM_CHATS = 10
RECORDS_PER_SHARD = 4


def write_responses(path: Path, chats: list[list[dict[str, str]]]) -> None:
    lines = [
        {"id": f"chat-{index}", "messages": chat, "finish_reason": "length" if index % 4 == 3 else "stop"}
        for index, chat in enumerate(chats)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def chats_of(seed: int, count: int = NUM_CHATS) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    return [counting_chat(rng) for _ in range(count)]


def config_of(folder: Path, **changes: Any) -> ExtractConfig:
    """Three shards of ragged chats, several batches a shard."""
    responses = folder / "responses.jsonl"
    if not responses.exists():
        write_responses(responses, chats_of(1))
    base = ExtractConfig(
        name="tiny",
        output_dir=str(folder),
        responses=str(responses),
        captured=str(folder / "captured"),
        store=str(folder / "store"),
        target=None,
        chats=chats_config(),
        feature_dtype="float32",
        last_hidden_dtype="float32",
        records_per_shard=RECORDS_PER_SHARD,
        tokens_per_batch=60,
        repair=False,
        verify=False,
        verify_records=4,
        stats=False,
        preview=0,
    )
    return replace(base, **changes)


def chats_config(**changes: Any) -> ChatOptions:
    return replace(ChatOptions(Supervise.all, max_length=64, min_supervised_tokens=2), **changes)


def rendered(config: ExtractConfig) -> list[RenderedRecord]:
    responses = Responses(
        config.responses, tiny_tokenizer(), config.chats, thinking=None, context=512, records_per_shard=100
    )
    return responses.shard(0).records


Run = Callable[[ExtractConfig], None]


@pytest.fixture
def run(tiny_target: Target, tiny_target_config: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(extraction_module, "POLL_SECONDS", 0.02)
    return lambda config: extract(config, tiny_target_config, Accelerator(cpu=True), lambda *_, **__: tiny_target)


@pytest.fixture(scope="module")
def wanted(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_target_config: TargetConfig
) -> dict[str, bytes]:
    """Files of the store that an undisturbed run makes."""
    config = config_of(tmp_path_factory.mktemp("undisturbed"))
    extract(config, tiny_target_config, Accelerator(cpu=True), lambda *_, **__: tiny_target)
    return files_of(Path(config.store))


def test_a_ragged_batch_equals_one_by_one(tiny_target: Target, tmp_path: Path) -> None:
    """Float32 sums over another width differ by some 1e-6."""
    records = rendered(config_of(tmp_path))
    together = extracted(tiny_target, records)
    assert [record.id for record in together] == [record.id for record in records]
    assert len({len(record.input_ids) for record in together}) > 3
    for record, found in zip(records, together, strict=True):
        alone = extracted(tiny_target, [record])[0]
        assert torch.equal(found.input_ids, alone.input_ids) and torch.equal(found.loss_mask, alone.loss_mask)
        torch.testing.assert_close(found.features, alone.features, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.last_hidden, alone.last_hidden, atol=1e-5, rtol=1e-5)


def test_features_are_the_outputs_of_the_captured_layers(tiny_target: Target, tmp_path: Path) -> None:
    """Against transformers' own list, in which entry i + 1 is the output of layer i for all but the last layer."""
    record = rendered(config_of(tmp_path))[0]
    found = extracted(tiny_target, [record])[0]
    ids = torch.tensor([record.chat.input_ids])
    with torch.no_grad():
        hidden = tiny_target.backbone(ids, output_hidden_states=True).hidden_states
    layers = [hidden[layer + 1][0] for layer in tiny_target.layer_ids]
    torch.testing.assert_close(found.features, torch.cat(layers, dim=-1), atol=1e-5, rtol=1e-5)
    rows = supervised_rows(found.loss_mask)
    torch.testing.assert_close(found.last_hidden, hidden[-1][0, rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_stored_rows_is_the_models_own_logits(family: str, tmp_path: Path) -> None:
    """Through batches, files and the soft-cap, against each chat alone; float32 sums in another order."""
    target, rng = build(family), random.Random(0)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (9, 14, 6)]
    records = [
        RenderedRecord(str(index), RenderedChat(text, [False] * 3 + [True] * (len(text) - 3)))
        for index, text in enumerate(texts)
    ]
    header = tiny_header(target, TargetIdentity(family, "", ""))
    make_store(tmp_path, header, extracted(target, records, tokens_per_batch=30), shard_size=2)
    store = FeatureStore(tmp_path)
    for record in (store[index] for index in range(len(store))):
        with torch.inference_mode():
            own = target.model(input_ids=record.input_ids[None].long(), use_cache=False).logits[0]
        error = target.logits(record.last_hidden) - own[supervised_rows(record.loss_mask)]
        assert error.abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_final_norm_is_noticed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Target.forward_whole

    def without_norm(target: Target, input_ids: Tensor) -> TargetOutput:
        last = len(target.layers) - 1
        with target_module._capture(target.layers, (last,)) as captured:
            output = right(target, input_ids)
        return replace(output, hidden=captured[last])

    with planted_fault(monkeypatch, Target, "forward_whole", without_norm):
        test_head_of_stored_rows_is_the_models_own_logits(family, tmp_path)


def test_stored_rows_predict_the_tokens_that_the_target_generated(
    run: Run, tiny_target: Target, tmp_path: Path, tiny_prompts: list[list[int]]
) -> None:
    """Greedy answers of the target itself: head(row) names every supervised token, end of turn included."""
    tokenizer = tiny_tokenizer()
    config = config_of(tmp_path)
    lines, answers = [], []
    for index, prompt in enumerate(tiny_prompts):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 16, "attention_mask": torch.ones_like(ids)}
        answer = tiny_target.model.generate(ids, **options)[0, len(prompt) :].tolist()  # type: ignore[operator]
        stopped = answer[-1] in tiny_target.spec.eos_token_ids
        text = tokenizer.decode(answer[:-1] if stopped else answer)
        user = tokenizer.decode(prompt[1:-2])
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": text}]
        lines.append({"id": str(index), "messages": messages, "finish_reason": "stop" if stopped else "length"})
        answers.append(answer)
    assert {line["finish_reason"] for line in lines} == {"stop", "length"}
    Path(config.responses).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(config)
    store = FeatureStore(Path(config.store))
    for record, prompt, answer in zip(store, tiny_prompts, answers, strict=False):
        assert record.input_ids.tolist() == prompt + answer
        assert record.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert tiny_target.logits(record.last_hidden).argmax(-1).tolist() == answer


def test_equal_work_gives_equal_bytes(run: Run, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    config = config_of(tmp_path)
    run(config)
    assert files_of(Path(config.store)) == wanted
    assert set(wanted) == {"manifest.json", *(f"shard-0000{index}.safetensors" for index in range(3))}


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


def kill_at_random(run: Run, config: ExtractConfig, delay: float) -> bool:
    """Kill a run on a slow disk after `delay` seconds; True where a shard was half written then."""
    child = os.fork()
    if child == 0:
        try:
            shards_module.save_file = slow_save
            run(config)
        finally:
            os._exit(0)
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
    rng, num_half = random.Random(0), 0
    for kill in range(num_kills):
        folder = tmp_path / str(kill)
        folder.mkdir()
        config = config_of(folder)
        num_half += kill_at_random(run, config, rng.uniform(0.05, 0.45))
        resume(config, run, num_processes=1 + kill % 2)
        assert files_of(Path(config.store)) == wanted, kill
    return num_half


def test_three_kills_at_random_times_change_no_byte(run: Run, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    kills_at_random(run, tmp_path, wanted, 3)


@pytest.mark.slow
def test_twenty_kills_at_random_times_change_no_byte_and_a_quarter_cut_a_write(
    run: Run, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    assert kills_at_random(run, tmp_path, wanted, 20) >= 5


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


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shard files that are written from now on."""
    names: list[str] = []
    save = shards_module.save_file

    def recorded(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        names.append(path.name)
        save(tensors, path, **options)

    monkeypatch.setattr(shards_module, "save_file", recorded)
    return names


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


def test_responses_that_hold_nothing_are_refused(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    path = Path(config.responses)
    path.write_text("")
    with pytest.raises(ValueError, match=r"responses=.* is empty"):
        run(config)
    path.unlink()
    with pytest.raises(ValueError, match=r"no such file; run generate\.py first"):
        run(config)
    write_responses(path, [[{"role": "user", "content": "1 2"}, {"role": "assistant", "content": ""}]])
    with pytest.raises(ValueError, match="no chat has 2 supervised tokens"):
        run(config)
    assert not Path(config.store).exists()


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


def test_long_chats_are_cut_and_short_ones_left_out(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path, chats=chats_config(max_length=14, min_supervised_tokens=9))
    whole = rendered(replace(config, chats=chats_config()))
    kept = [record for record in whole if sum(record.chat.loss_mask[:14]) >= 9]
    assert 0 < len(kept) <= len(whole)
    run(config)
    store = FeatureStore(Path(config.store))
    assert store.ids == [record.id for record in kept]
    assert [record.input_ids.tolist() for record in (store[i] for i in range(len(store)))] == [
        record.chat.input_ids[:14] for record in kept
    ]


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


def test_the_estimate_is_near_what_is_written(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    right = extract_module.estimate
    monkeypatch.setattr(extract_module, "estimate", lambda *a: seen.append(right(*a)) or seen[-1])
    for dtype in ("bf16", "fp8", "nf4"):
        config = config_of(tmp_path, feature_dtype=dtype, last_hidden_dtype=dtype, store=str(tmp_path / dtype))
        with caplog.at_level(logging.INFO):
            run(config)
        store = FeatureStore(Path(config.store))
        assert seen[-1].num_tokens == store.manifest.num_tokens and seen[-1].num_chats == len(store)
        overhead = 1000 * len(store.manifest.shards)  # headers and offsets
        written = sum(shard.bytes for shard in store.manifest.shards)
        assert 0 < written - seen[-1].bytes < overhead
    assert "tokens/s" in caplog.text and "padding" in caplog.text and "to go" in caplog.text


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"needs .* more, its disk has 1\.0 kB free"):
        run(config)
    assert not Path(config.store).exists()


def test_equal_ids_are_named_before_anything_is_computed(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    lines = Path(config.responses).read_text().splitlines()
    Path(config.responses).write_text("\n".join([*lines, lines[2]]))
    with pytest.raises(ValueError, match=r"equal ids \['chat-2'\]"):
        run(config)
    assert not Path(config.store).exists()


def test_a_chat_beyond_the_context_is_cut_there(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, chats=chats_config(max_length=4096))
    words = " ".join("1" for _ in range(600))
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": words}]
    write_responses(Path(config.responses), [chat])
    with caplog.at_level(logging.INFO):
        run(config)
    store = FeatureStore(Path(config.store))
    assert store.lengths.tolist() == [512] and store.header.chats["max_length"] == 512
    assert "1 of them cut at chats.max_length" in caplog.text


def test_a_group_of_unusable_chats_leaves_no_shard(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    chats = chats_of(1)
    for index in range(RECORDS_PER_SHARD, 2 * RECORDS_PER_SHARD):
        chats[index][1] = {"role": "assistant", "content": ""}
    write_responses(Path(config.responses), chats)
    run(config)
    store = FeatureStore(Path(config.store))
    assert [shard.file for shard in store.manifest.shards] == ["shard-00000.safetensors", "shard-00002.safetensors"]
    assert store.ids == [f"chat-{index}" for index in (0, 1, 2, 3, 8, 9)]
    run(config)


def test_batches_hold_every_record_once_within_their_size() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 40) for _ in range(200)]
    batches = list(batches_by_length(lengths, tokens_per_batch=64))
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(len(batch) * max(lengths[index] for index in batch) <= 64 for batch in batches)
    assert list(batches_by_length([100], tokens_per_batch=64)) == [[0]], "a record longer than a batch is its own"


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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_target_that_two_processes_share_gives_the_features_of_one(
    run: Run, tmp_path: Path, tiny_target_config: TargetConfig
) -> None:
    """Sums over heads and neurons in two parts; the two write one store."""
    config = config_of(tmp_path)
    alone = replace(config, store=str(tmp_path / "alone"))
    run(alone)
    AcceleratorState._reset_state(reset_partial_state=True)  # the children must not inherit a world of one
    shared = replace(tiny_target_config, tp_size=2)

    def work() -> None:
        accelerator = start_processes(os.environ)

        def load(*arguments: Any, **options: Any) -> Target:
            target = load_target(*arguments, **options)
            weight = target.layers[0].self_attn.q_proj.weight
            (tmp_path / f"rank{accelerator.process_index}").write_text(str(tuple(weight.to_local().shape)))
            return target

        extract(config, shared, accelerator, load)

    debug_launcher(work, num_processes=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["(64, 64)", "(64, 64)"], "halves of 128"
    one, two = FeatureStore(Path(alone.store)), FeatureStore(Path(config.store))
    assert one.ids == two.ids and len(one) == NUM_CHATS
    for ours, theirs in zip(two.read_many(range(NUM_CHATS)), one.read_many(range(NUM_CHATS)), strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.loss_mask, theirs.loss_mask)
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.last_hidden, theirs.last_hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [(2, "the launcher must start a multiple of them, got 1"), (0, r"target\.tp_size=0"), (3, "got 1")],
)
def test_processes_that_cannot_share_a_target_are_refused(
    run: Run, tmp_path: Path, tiny_target_config: TargetConfig, tp_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        extract(config_of(tmp_path), replace(tiny_target_config, tp_size=tp_size), Accelerator(cpu=True))
    assert not (tmp_path / "store").exists()


def test_only_extraction_shares_a_target_and_only_by_whole_heads(tiny_target_config: TargetConfig) -> None:
    with pytest.raises(ValueError, match=r"target\.tp_size=2: only extract\.py shares a target"):
        load_target(replace(tiny_target_config, tp_size=2), torch.device("cpu"))
    spec = load_spec(tiny_target_config)
    with pytest.raises(ValueError, match="tp_size=4 does not divide the target's 4 heads and 2 key/value heads"):
        check_sharing(replace(tiny_target_config, tp_size=4), spec, object())  # type: ignore[arg-type]


@pytest.mark.gpu
def test_extraction_on_a_gpu_gives_the_features_of_the_cpu(
    run: Run, tmp_path: Path, tiny_target_config: TargetConfig
) -> None:
    """TensorFloat-32 is off by default; sums are taken in another order."""
    config = config_of(tmp_path)
    run(config)
    there = replace(config, store=str(tmp_path / "gpu"))
    AcceleratorState._reset_state(reset_partial_state=True)
    extract(there, tiny_target_config, Accelerator())
    stores = [FeatureStore(Path(folder)).read_many(range(NUM_CHATS)) for folder in (config.store, there.store)]
    for ours, theirs in zip(*stores, strict=True):
        torch.testing.assert_close(theirs.features, ours.features, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(theirs.last_hidden, ours.last_hidden, rtol=1e-3, atol=1e-3)
