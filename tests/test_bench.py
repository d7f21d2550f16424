"""The dense passes that the benchmark compares with are the same loss: equal gradients, at a small vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.decode import decode
from models.dspark import DSpark
from models.target import Target, TargetConfig
from tests import bench_decoding, bench_extract, bench_losses, bench_packing
from tests.huggingface_loop import decode_greedily


@pytest.mark.parametrize(
    ("make", "dense"),
    [(bench_losses.dspark, bench_losses.dense_dspark), (bench_losses.eagle, bench_losses.dense_eagle)],
    ids=["dspark", "eagle3"],
)
def test_the_dense_pass_has_the_gradients_of_the_chunked_one(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], dense: Callable[..., Any]
) -> None:
    monkeypatch.setattr(bench_losses, "VOCAB_SIZE", 499)
    monkeypatch.setattr(bench_losses, "SPEC", replace(bench_losses.SPEC, vocab_size=499))
    torch.manual_seed(0)
    drafter, batch = make()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter *= 3  # fresh weights hardly move anything
    bench_losses.step(drafter, batch)
    ours = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    dense(drafter, batch)
    for name, parameter in drafter.named_parameters():
        error = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


def test_a_row_of_the_bench_names_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_losses, "VOCAB_SIZE", 499)
    monkeypatch.setattr(bench_losses, "SPEC", replace(bench_losses.SPEC, vocab_size=499))
    monkeypatch.setattr(bench_losses, "ROUNDS", 1)
    made = bench_losses.dspark(num_anchors=4)
    row = bench_losses.measure("dspark", made, bench_losses.dense_dspark, bench_losses.floor_dspark)
    assert set(row) == {"name", "ours_s", "dense_s", "floor_s", "ours_peak_mb", "dense_peak_mb"}
    assert min(row["ours_s"], row["dense_s"], row["floor_s"]) > 0


def test_a_row_without_a_dense_pass_is_shown() -> None:
    row = {"ours_s": 2.0, "dense_s": None, "floor_s": 1.0, "ours_peak_mb": None, "dense_peak_mb": None}
    shown = [cell.strip() for cell in bench_losses.cells(row)]
    assert shown == ["2.00s", "", "1.00s", "", "2.00", "", ""]


def test_the_bench_of_extraction_names_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    monkeypatch.setattr(bench_extract, "embedded_target", lambda: tiny_target_config)
    monkeypatch.setattr(bench_extract, "load_target", lambda *_: tiny_target)
    monkeypatch.setattr(bench_extract, "NUM_CHATS", 6)
    monkeypatch.setattr(bench_extract, "ROUNDS", 1)
    row, lengths = bench_extract.measure()
    assert set(row) == {"name", "ours_s", "dense_s", "floor_s", "ours_peak_mb", "dense_peak_mb"}
    assert row["ours_s"] > 0 and row["floor_s"] > 0 and row["dense_s"] is None
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lengths[1:]) == 6


@pytest.mark.slow
def test_the_packing_row_compares_equal_losses_of_equal_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the row asserts before it measures, at a small size; that times fall in line is the bench's own matter."""
    for name, value in {"VOCAB_SIZE": 99, "FIXED_ANCHORS": 192, "ROUNDS": 1}.items():
        monkeypatch.setattr(bench_packing, name, value)
    row, lines = bench_packing.packing_row(bench_losses.SPEC, count=4)
    assert row["dense_s"] > row["ours_s"] > 0
    assert any("times" in line for line in lines)
    wrong = bench_packing.one_chat_a_row
    monkeypatch.setattr(bench_packing, "one_chat_a_row", lambda chats: wrong(chats[:-1]))
    with pytest.raises(AssertionError):
        bench_packing.packing_row(bench_losses.SPEC, count=4)


def test_growth_is_told_beside_the_first_row_of_its_kind() -> None:
    rows = [
        {"name": "1x anchors", "count": 4, "seconds": 1.0, "ms_each": 250.0},
        {"name": "8x anchors", "count": 32, "seconds": 6.0, "ms_each": 187.5},
        {"name": "1x tokens", "count": 10, "seconds": 1.0, "ms_each": 100.0},
    ]
    lines = bench_losses.growth_lines(rows)
    assert [line.split(", ")[1] for line in lines] == ["1.00 of 1x", "0.75 of 1x", "1.00 of 1x"]


@pytest.mark.parametrize("num_draft_tokens", [0, 2, 4])
def test_the_loop_over_single_sequences_is_plain_decoding_and_this_runtimes_rounds(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_dspark: DSpark, tiny_prompts: Any, num_draft_tokens: int
) -> None:
    """What the benchmark compares speeds with decodes what is decoded here, in as many forward passes."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32)
    config = bench_decoding.settings(1, num_draft_tokens, max_new_tokens=12)
    ours = decode(tiny_target, tiny_dspark, tiny_prompts, config).generations
    stops, calls = tiny_target.spec.eos_token_ids, list[int]()
    with model.register_forward_pre_hook(lambda *_: calls.append(1)):
        for prompt, generation in zip(tiny_prompts, ours, strict=True):
            options = {"max_new_tokens": 12, "num_draft_tokens": num_draft_tokens, "eos_token_ids": stops}
            assert decode_greedily(model, tiny_dspark, prompt, **options) == generation.tokens
    assert len(calls) == sum(1 + len(generation.rounds) for generation in ours)


@pytest.mark.slow
def test_the_rows_of_decoding_compare_equal_outputs(
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_dspark: DSpark,
    tiny_prompts: list[list[int]],
) -> None:
    monkeypatch.setattr(bench_decoding, "ROUNDS", 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32)
    rows, lines = bench_decoding.compare(tiny_target, tiny_dspark, model, tiny_prompts[:3])
    assert [row["name"] for row in rows] == ["decode, batch 1", "decode, batch 8"]
    assert all(row["ours_s"] > 0 and row["dense_s"] > 0 and row["floor_s"] > 0 for row in rows)
    assert sum("of the loop's speed with the same drafter" in line for line in lines) == 2
    monkeypatch.setattr(bench_decoding, "decode_greedily", lambda *_, **__: [0])
    with pytest.raises(AssertionError, match="loop gives other tokens than generate"):
        bench_decoding.compare(tiny_target, tiny_dspark, model, tiny_prompts[:3])


def test_decoding_is_not_measured_without_a_drafter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_decoding, "DEMO", tmp_path / "none")
    assert bench_decoding.measure() == (
        [],
        [f"decoding: not measured, {tmp_path / 'none'} holds no drafter (make demo)"],
    )
