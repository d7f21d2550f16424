"""Extraction: rows that line up with the target's own predictions, estimates, and targets that processes share."""

import json
import logging
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from torch import Tensor

import data.estimate as estimate_module
import data.extract as extract_module
import models.target as target_module
from data.chat import RenderedChat
from data.extract import extract
from data.responses import RenderedRecord, batches_by_length
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
    extracted,
    files_of,
    make_store,
    planted_fault,
    tiny_header,
    tiny_tokenizer,
)
from tests.extraction_cases import (  # noqa: F401 (fixtures among them)
    NUM_CHATS,
    RECORDS_PER_SHARD,
    Run,
    chats_config,
    chats_of,
    config_of,
    rendered,
    run,
    wanted,
    write_responses,
)
from tests.tiny_families import FAMILIES, VOCAB_SIZE, build


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
        assert len(found.features) == len(found.input_ids)
        again = extracted(tiny_target, [record])[0]  # a second time: nothing is left of the first
        assert torch.equal(again.features, alone.features) and torch.equal(again.last_hidden, alone.last_hidden)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "chat-1/2"}, r"ids 'chat-1' and 'chat-1/2' may clash"),
        ({"finish_reason": "eos"}, r"responses\.jsonl:10: finish_reason must be one of .* got 'eos'"),
        ({"messages": [{"role": "user", "content": "1"}]}, r"responses\.jsonl:10: nothing to learn without"),
        ({"id": ["a"]}, r"responses\.jsonl:10: id must be a text or a number"),
    ],
)
def test_records_that_would_stop_the_work_later_are_named_at_once(
    run: Run, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = config_of(tmp_path)
    lines = [json.loads(line) for line in Path(config.responses).read_text().splitlines()]
    lines[-1] |= changes
    Path(config.responses).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.slow
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
