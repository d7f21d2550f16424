"""Features captured while answering are those that extraction would compute, and only fitting ones are used."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.capture import (
    BatchCapture,
    CapturedFeatures,
    CaptureHeader,
    capture_header,
    exact_headers,
    write_captured,
)
from data.chat import RenderedChat
from data.estimate import estimate
from data.extraction import extract_records
from data.generate import answer_batch
from data.responses import RenderedRecord
from models.sampling import SamplingConfig
from models.target import Target, TargetIdentity
from tests.conftest import tiny_header


def settings(temperature: float = 0.0) -> Any:
    """What `answer_batch` reads of a GenerateConfig."""
    return SimpleNamespace(sampling=SamplingConfig(temperature, 0, 1.0, 0.0, 0), max_new_tokens=17)


@pytest.fixture
def header(tiny_target: Target, tiny_identity: TargetIdentity) -> CaptureHeader:
    return capture_header(tiny_target, tiny_identity, "float32")


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Target, tiny_prompts: list[list[int]], header: CaptureHeader) -> Path:
    """Captured answers of the tiny prompts, some of which stop before the limit."""
    capture = BatchCapture(torch.float32, len(tiny_prompts))
    answers = answer_batch(tiny_target, tiny_prompts, range(len(tiny_prompts)), settings(), capture)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    fed = [prompt + answer.tokens for prompt, answer in zip(tiny_prompts, answers, strict=True)]
    write_captured(tmp_path, header, [f"r{i}" for i in range(len(fed))], capture.finish(fed))
    return tmp_path


def records_of(target: Target, prompts: list[list[int]]) -> list[RenderedRecord]:
    answers = answer_batch(target, prompts, range(len(prompts)), settings())
    records = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mask = [False] * len(prompt) + [True] * len(answer.tokens)
        records.append(RenderedRecord(f"r{index}", RenderedChat(prompt + answer.tokens, mask)))
    return records


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_capturing_changes_no_answer(tiny_target: Target, tiny_prompts: list[list[int]], temperature: float) -> None:
    ids = range(len(tiny_prompts))
    plain = answer_batch(tiny_target, tiny_prompts, ids, settings(temperature))
    capture = BatchCapture(torch.float32, len(tiny_prompts))
    assert answer_batch(tiny_target, tiny_prompts, ids, settings(temperature), capture) == plain


def test_captured_features_equal_extracted_ones(
    folder: Path, header: CaptureHeader, tiny_target: Target, tiny_prompts: list[list[int]]
) -> None:
    records = records_of(tiny_target, tiny_prompts)
    captured = CapturedFeatures(folder, [header])
    assert all(captured.find(record.id, record.chat.input_ids) is not None for record in records)
    assert all(captured.holds(record.id, record.chat.input_ids) for record in records)
    taken = dict(extract_records(tiny_target, records, 512, captured))
    computed = dict(extract_records(tiny_target, records, 512))
    assert set(taken) == set(computed) == set(range(len(records)))
    for ours, theirs in ((taken[index], computed[index]) for index in taken):
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.loss_mask, theirs.loss_mask)
        # float32 sums in another order: cached steps against one whole pass
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last_hidden, theirs.last_hidden, rtol=1e-4, atol=1e-4)


def test_other_tokens_ids_targets_layers_and_types_are_not_taken(folder: Path, header: CaptureHeader) -> None:
    captured = CapturedFeatures(folder, [header])
    others = [
        replace(header, target=replace(header.target, weights_sha256="0" * 64)),
        replace(header, layer_ids=(0, 1)),
        replace(header, feature_dtype="bf16"),
    ]
    for other in others:
        assert not CapturedFeatures(folder, [other])._places
    assert captured._places and captured.find("unknown", [1]) is None


@pytest.mark.parametrize(
    ("feature_dtype", "last_hidden_dtype", "target_dtype", "taken"),
    [
        ("bf16", "bf16", "float32", {"float32", "bf16"}),
        ("fp8", "fp8", "float32", {"float32"}),  # rounded to bf16 first, values may land on another fp8 step
        ("bf16", "fp8", "float32", {"float32"}),
        ("fp8", "fp8", "bfloat16", {"float32", "bf16"}),
        ("float32", "float32", "float32", {"float32"}),
    ],
)
def test_only_captures_that_round_like_the_target_itself_are_taken(
    tiny_target: Target,
    tiny_identity: TargetIdentity,
    feature_dtype: str,
    last_hidden_dtype: str,
    target_dtype: str,
    taken: set[str],
) -> None:
    store = tiny_header(tiny_target, tiny_identity, feature_dtype=feature_dtype, last_hidden_dtype=last_hidden_dtype)
    assert {header.feature_dtype for header in exact_headers(tiny_identity, store, target_dtype)} == taken


def test_a_changed_token_is_computed_again(
    folder: Path, header: CaptureHeader, tiny_target: Target, tiny_prompts: list[list[int]]
) -> None:
    record = records_of(tiny_target, tiny_prompts)[0]
    ids = [*record.chat.input_ids[:-1], (record.chat.input_ids[-1] + 1) % 55]
    assert CapturedFeatures(folder, [header]).find(record.id, ids) is None
    assert not CapturedFeatures(folder, [header]).holds(record.id, ids)


def test_an_unknown_type_is_refused(tiny_target: Target, tiny_identity: TargetIdentity) -> None:
    with pytest.raises(ValueError, match="capture=fp16 is unknown"):
        capture_header(tiny_target, tiny_identity, "fp16")


def test_captured_chats_take_no_time_in_the_estimate(
    folder: Path,
    header: CaptureHeader,
    tiny_target: Target,
    tiny_identity: TargetIdentity,
    tiny_prompts: list[list[int]],
) -> None:
    records = records_of(tiny_target, tiny_prompts)
    responses: Any = SimpleNamespace(sample=lambda _size: (len(records), records), records=records)
    store = tiny_header(tiny_target, tiny_identity)
    hours = [
        estimate(responses, store, tiny_target, CapturedFeatures(folder, headers), 512).hours
        for headers in ([header], [])
    ]
    assert hours[0] == 0 and hours[1] > 0
