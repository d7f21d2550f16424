"""Metrics as (sum, count), added over steps, reduced over processes, divided last; and how fast it went."""

import resource
import time
from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from models.base import DraftBatch, DraftLoss
from models.flops import num_tokens

# Dense bf16 operations of one device, by a part of its name (vendors' data sheets, without sparsity).
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}


Window = dict[str, Any]  # what a process has gathered since the last report: tensors in host memory and numbers


class MetricSums:
    """Sums since the last report. Names and shapes are the same on every process: all run the same drafter."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (total, count) in metrics.items():
            if name in self._sums:
                before = self._sums[name]
                total, count = before[0] + total, before[1] + count
            self._sums[name] = (total, count)

    def state(self) -> Window:
        return {name: tuple(part.detach().cpu() for part in parts) for name, parts in self._sums.items()}

    def restore(self, state: Window, device: torch.device) -> None:
        self._sums = {name: (total.to(device), count.to(device)) for name, (total, count) in state.items()}

    def report(self, accelerator: Accelerator) -> dict[str, float]:
        """Global means; per-slot metrics come as name@k. A collective call; starts a new window."""
        names = sorted(self._sums)
        flat = torch.cat(
            [torch.stack([part.double() for part in self._sums[name]]).view(2, -1) for name in names], dim=1
        )
        sums, counts = cast(Tensor, accelerator.reduce(flat, "sum"))
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


class Throughput:
    """Work done since the last report, over all processes."""

    def __init__(self, peak_tflops: float | None, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.peak_flops = find_peak(accelerator.device) if peak_tflops is None else 1e12 * peak_tflops
        self._begin()

    def _begin(self) -> None:
        self._began = self._last = time.perf_counter()
        self._steps, self._slots = 0, torch.zeros((), dtype=torch.float64)
        self._counts = torch.zeros(4, dtype=torch.float64)

    def add(self, batch: DraftBatch, loss: DraftLoss, flops: float) -> None:
        """Counted in host memory, but for the supervised slots, which are read at the report."""
        host = batch.host
        counts = [num_tokens(host), host.input_ids.numel(), int((host.anchors >= 0).sum()), flops]
        self._counts += torch.tensor(counts, dtype=torch.float64)
        self._slots = self._slots.to(batch.input_ids.device) + loss.metrics["accept_rate"][1].sum()

    def step(self) -> None:
        self._steps, self._last = self._steps + 1, time.perf_counter()

    def wait(self) -> None:
        """For steps that the device still computes: they are training time."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
            self._last = time.perf_counter()

    def pause(self) -> None:
        """What was done since the last step (a checkpoint, a probe) is no training time."""
        now = time.perf_counter()
        self._began, self._last = self._began + now - self._last, now

    def state(self) -> Window:
        seconds = self._last - self._began
        return {"counts": self._counts, "slots": self._slots.cpu(), "steps": self._steps, "seconds": seconds}

    def restore(self, state: Window) -> None:
        self._counts, self._slots, self._steps = state["counts"], state["slots"], state["steps"]
        self._last = time.perf_counter()
        self._began = self._last - state["seconds"]

    def report(self) -> dict[str, float]:
        """A collective call; starts a new window. Rates are sums over all processes, memory the most of any."""
        device, accelerator = self.accelerator.device, self.accelerator
        local = torch.cat((self._counts, self._slots.cpu()[None])).to(device)
        tokens, positions, anchors, flops, slots = cast(Tensor, accelerator.reduce(local, "sum")).tolist()
        memory = cast(Tensor, accelerator.gather(torch.tensor([peak_memory_gib(device)], device=device))).max()
        seconds, steps = time.perf_counter() - self._began, max(1, self._steps)
        values = {
            "seconds_per_step": seconds / steps,
            "tokens_per_second": tokens / seconds,
            "supervised_slots_per_second": slots / seconds,
            "anchors_per_step": anchors / steps,
            "padding_share": 1 - tokens / max(1.0, positions),
            "tflops": flops / seconds / 1e12,
            "peak_memory_gib": float(memory),
        }
        if self.peak_flops is not None:
            values["mfu"] = flops / seconds / (self.peak_flops * accelerator.num_processes)
        self._begin()
        return values


def find_peak(device: torch.device) -> float | None:
    """Operations a second of a known GPU; None elsewhere, where `peak_tflops` says it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Of this process: allocated on its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
