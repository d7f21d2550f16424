"""Where training metrics go: always a local JSONL, and Weights & Biases on request (offline unless told otherwise)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from data.run import read_lines
from data.tracking import METRICS, PROBE_PREFIX, TrackerName, WandbConfig, open_wandb
from models.files import write_text

WANDB_RUN = "wandb_run_id"  # of the run folder


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object a line. Lines of steps that a resumed run trains again are dropped first, and the probe of the
    checkpoint that it goes on from, which it logs again."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = [line for line in read_lines(path, repair=False) if _is_before(line, first_step)]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))  # whole at any time, also for a kill
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbTracker:
    """One W&B run per run folder; resuming continues the same run id."""

    def __init__(self, config: WandbConfig, folder: Path, run_config: Mapping[str, Any]) -> None:
        self._run = open_wandb(config, folder, folder / WANDB_RUN, run_config, job="train")
        # Its own step only counts up, so one that a resumed run logs again would be lost.
        self._run.define_metric("*", step_metric="step")
        self._by_position: dict[str, dict[int, float]] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})
        for key, value in values.items():
            name, at, position = key.partition("@")
            if at:
                self._by_position.setdefault(name, {})[int(position)] = value

    def close(self) -> None:
        import wandb

        for name, values in self._by_position.items():
            rows: list[Any] = [[position, value] for position, value in sorted(values.items())]
            table = wandb.Table(columns=["position", name], data=rows)
            self._run.log(
                {f"by_position/{name}": wandb.plot.line(table, "position", name, title=f"{name} by position")}
            )
        self._run.finish()


def build_trackers(
    name: TrackerName | None, wandb: WandbConfig, folder: Path, run_config: Mapping[str, Any], *, first_step: int
) -> list[Tracker]:
    trackers: list[Tracker] = [JsonlTracker(folder / METRICS, first_step=first_step)]
    if name is TrackerName.wandb:
        trackers.append(WandbTracker(wandb, folder, run_config))
    return trackers


def _is_before(line: Mapping[str, Any], first_step: int) -> bool:
    is_probe = any(name.startswith(PROBE_PREFIX) for name in line)
    return line["step"] < first_step + (not is_probe)
