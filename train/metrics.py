"""Metrics as (sum, count), added over steps, reduced over processes, divided last."""

import torch
from accelerate import Accelerator
from torch import Tensor

from models.base import DraftLoss


class MetricSums:
    """Sums since the last report. Names and shapes are the same on every process: all run the same drafter."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, loss: DraftLoss) -> None:
        for name, (total, count) in loss.metrics.items():
            if name in self._sums:
                before = self._sums[name]
                total, count = before[0] + total, before[1] + count
            self._sums[name] = (total, count)

    def report(self, accelerator: Accelerator) -> dict[str, float]:
        """Global means; per-slot metrics come as name@k. A collective call; starts a new window."""
        names = sorted(self._sums)
        flat = torch.cat(
            [torch.stack([part.double() for part in self._sums[name]]).view(2, -1) for name in names], dim=1
        )
        sums, counts = accelerator.reduce(flat, "sum")  # type: ignore[misc]
        means = (sums / counts.clamp(min=1e-12)).tolist()
        report: dict[str, float] = {}
        place = 0
        for name in names:
            size = self._sums[name][0].numel()
            keys = [name] if self._sums[name][0].dim() == 0 else [f"{name}@{k}" for k in range(size)]
            report.update(zip(keys, means[place : place + size], strict=True))
            place += size
        self._sums = {}
        return report | expected_acceptance_length(report)


def expected_acceptance_length(report: dict[str, float]) -> dict[str, float]:
    """1 + sum of products of mean accept rates: teacher-forced, bonus counted, slots taken as independent."""
    total, survival, slot = 1.0, 1.0, 0
    while f"accept_rate@{slot}" in report:
        survival *= report[f"accept_rate@{slot}"]
        total += survival
        slot += 1
    return {"teacher_forced_acceptance_length": total} if slot else {}
