"""Extraction: rows that line up with the target's own predictions, and a store that is the same however it was made."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from torch import Tensor

import data.store as store_module
import models.files as files_module
import models.target as target_module
from data.chat import RenderedChat
from data.extract import (
    ExtractConfig,
    RenderedRecord,
    batches_by_length,
    extract,
    extract_shard,
    render_responses,
    verify_store,
)
from data.run import start_processes
from data.store import FeatureStore, StoreHeader, publish, supervised_rows, write_shard
from models.target import Target, TargetIdentity, TargetOutput
from tests.conftest import counting_chat, files_of, planted_fault, run_killed, tiny_tokenizer
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
        feature_dtype="float32",
        max_length=64,
        min_supervised_tokens=2,
        records_per_shard=RECORDS_PER_SHARD,
        tokens_per_batch=60,
        verify=False,
    )
    return replace(base, **changes)


Run = Callable[[ExtractConfig], None]


@pytest.fixture
def run(tiny_target: Target, tiny_identity: TargetIdentity) -> Run:
    return lambda config: extract(config, tiny_target, tiny_tokenizer(), tiny_identity, Accelerator(cpu=True))


@pytest.fixture(scope="module")
def wanted(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_identity: TargetIdentity
) -> dict[str, bytes]:
    """Files of the store that an undisturbed run makes."""
    config = config_of(tmp_path_factory.mktemp("undisturbed"))
    extract(config, tiny_target, tiny_tokenizer(), tiny_identity, Accelerator(cpu=True))
    return files_of(Path(config.store))


def test_a_ragged_batch_equals_one_by_one(tiny_target: Target, tmp_path: Path) -> None:
    """Float32 sums over another width differ by some 1e-6."""
    records = render_responses(config_of(tmp_path), tiny_tokenizer())
    together = extract_shard(tiny_target, records, tokens_per_batch=4096)
    assert [record.id for record in together] == [record.id for record in records]
    assert len({len(record.input_ids) for record in together}) > 3
    for record, found in zip(records, together, strict=True):
        alone = extract_shard(tiny_target, [record], tokens_per_batch=4096)[0]
        assert torch.equal(found.input_ids, alone.input_ids) and torch.equal(found.loss_mask, alone.loss_mask)
        torch.testing.assert_close(found.features, alone.features, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.last_hidden, alone.last_hidden, atol=1e-5, rtol=1e-5)


def test_features_are_the_outputs_of_the_captured_layers(tiny_target: Target, tmp_path: Path) -> None:
    """Against transformers' own list, in which entry i + 1 is the output of layer i for all but the last layer."""
    record = render_responses(config_of(tmp_path), tiny_tokenizer())[0]
    found = extract_shard(tiny_target, [record], tokens_per_batch=4096)[0]
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
    header = StoreHeader(TargetIdentity(family, "", ""), target.layer_ids, target.spec.hidden_size, "float32", "")
    extracted = extract_shard(target, records, tokens_per_batch=30)
    publish(tmp_path, header, [write_shard(tmp_path, header, shard_index=0, records=extracted, inputs_sha256="")])
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


def kill_and_resume(run: Run, config: ExtractConfig, kill_before: tuple[Any, str, int]) -> bool:
    """False where the run ended before its kill came."""
    code = run_killed(lambda: run(config), kill_before=kill_before)
    assert code in (0, -9)
    run(config)
    return code == -9


@pytest.mark.parametrize(
    "kill_before", [(files_module, "fsync", 1), (Path, "replace", 4), (Path, "replace", 7)], ids=str
)
def test_a_killed_run_resumes_to_the_same_bytes(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], kill_before: tuple[Any, str, int]
) -> None:
    """Before the first shard is on disk, between a shard and its sidecar, and before the manifest."""
    config = config_of(tmp_path)
    assert kill_and_resume(run, config, kill_before)
    assert files_of(Path(config.store)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"), [(files_module, "fsync"), (Path, "replace"), (Path, "unlink"), (store_module, "save_file")]
)
def test_a_run_killed_anywhere_resumes_to_the_same_bytes(
    run: Run, tmp_path: Path, wanted: dict[str, bytes], owner: Any, name: str
) -> None:
    call, killed = 1, True
    while killed:
        folder = tmp_path / str(call)
        folder.mkdir()
        config = config_of(folder)
        killed = kill_and_resume(run, config, (owner, name, call))
        assert files_of(Path(config.store)) == wanted, call
        call += 1
    assert call > 3


def test_finished_shards_are_not_made_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, bytes]
) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_before=(store_module, "save_file", 3)) == -9
    written: list[str] = []
    save = store_module.save_file
    monkeypatch.setattr(store_module, "save_file", lambda t, path, **k: (written.append(path.name), save(t, path, **k)))
    run(config)
    assert written == [".shard-00002.safetensors.tmp"]
    assert files_of(Path(config.store)) == wanted


def test_changed_responses_make_only_the_changed_shards_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_before=(Path, "replace", 7)) == -9  # all shards, no manifest
    chats = chats_of(1)
    chats[5] = chats_of(2)[0]
    write_responses(Path(config.responses), chats)
    written: list[str] = []
    save = store_module.save_file
    monkeypatch.setattr(store_module, "save_file", lambda t, path, **k: (written.append(path.name), save(t, path, **k)))
    run(config)
    assert written == [".shard-00001.safetensors.tmp"]
    fresh = replace(config, store=str(tmp_path / "fresh"))
    run(fresh)
    assert files_of(Path(config.store)) == files_of(Path(fresh.store))


def test_shards_of_responses_that_are_gone_do_not_stay(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: run(config), kill_before=(Path, "replace", 7)) == -9
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
    with pytest.raises(ValueError, match=r"responses=.* holds no records"):
        run(config)
    path.unlink()
    with pytest.raises(ValueError, match=r"no such file; run generate\.py first"):
        run(config)
    write_responses(path, [[{"role": "user", "content": "1 2"}, {"role": "assistant", "content": ""}]])
    with pytest.raises(ValueError, match="no chat has 2 supervised tokens"):
        run(config)
    assert not Path(config.store).exists()


def test_a_finished_store_is_kept_for_its_own_target_only(
    run: Run, tmp_path: Path, tiny_target: Target, tiny_identity: TargetIdentity
) -> None:
    config = config_of(tmp_path)
    run(config)
    before = files_of(Path(config.store))
    run(config)
    assert files_of(Path(config.store)) == before
    with pytest.raises(ValueError, match="exists with another feature_dtype"):
        run(replace(config, feature_dtype="bf16"))
    other_layers = Target(tiny_target.model, tiny_target.spec, (0, 3))
    other_weights = replace(tiny_identity, weights_sha256="0" * 64)
    for target, identity, word in ((other_layers, tiny_identity, "layer_ids"), (tiny_target, other_weights, "target")):
        with pytest.raises(ValueError, match=f"exists with another {word}"):
            extract(config, target, tiny_tokenizer(), identity, Accelerator(cpu=True))
    assert files_of(Path(config.store)) == before


def test_long_chats_are_cut_and_short_ones_left_out(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path, max_length=14, min_supervised_tokens=9)
    whole = render_responses(replace(config, max_length=64), tiny_tokenizer())
    kept = [record for record in whole if sum(record.chat.loss_mask[:14]) >= 9]
    assert 0 < len(kept) <= len(whole)
    run(config)
    store = FeatureStore(Path(config.store))
    assert store.ids == [record.id for record in kept]
    assert [record.input_ids.tolist() for record in (store[i] for i in range(len(store)))] == [
        record.chat.input_ids[:14] for record in kept
    ]


def test_a_flipped_byte_is_named_by_verify(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config)
    verify_store(Path(config.store))
    path = Path(config.store) / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is damaged"):
        verify_store(Path(config.store))


def test_batches_hold_every_record_once_within_their_size() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 40) for _ in range(200)]
    batches = list(batches_by_length(lengths, tokens_per_batch=64))
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(len(batch) * max(lengths[index] for index in batch) <= 64 for batch in batches)
    assert list(batches_by_length([100], tokens_per_batch=64)) == [[0]], "a record longer than a batch is its own"


@pytest.mark.parametrize("num_chats", [NUM_CHATS, RECORDS_PER_SHARD])
def test_two_processes_make_the_bytes_of_one(
    run: Run, tmp_path: Path, tiny_target: Target, tiny_identity: TargetIdentity, num_chats: int
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
        extract(config, tiny_target, tiny_tokenizer(), tiny_identity, accelerator)

    debug_launcher(work, num_processes=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert files_of(Path(config.store)) == files_of(Path(alone.store))
