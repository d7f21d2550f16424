"""The dense passes that the benchmark compares with are the same loss: equal gradients, at a small vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import bench_losses


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
