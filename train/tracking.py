"""Where training metrics go: always a local JSONL, and Weights & Biases on request (offline unless told otherwise)."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from train.config import TrackerName, WandbConfig


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object a line. Lines of steps that a resumed run trains again are dropped first."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= first_step]
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(line + "\n" for line in kept)
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbTracker:
    """One W&B run per run folder; resuming continues the same run id."""

    def __init__(self, config: WandbConfig, folder: Path, run_config: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_run_id"
        run_id = id_file.read_text().strip() if id_file.is_file() else secrets.token_hex(4)
        id_file.write_text(run_id)
        self._run = wandb.init(
            project=config.project,
            mode=config.mode,  # type: ignore[arg-type]
            dir=str(folder),
            id=run_id,
            resume="allow",
            name=folder.name,
            config=dict(run_config),
        )
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
    name: TrackerName, wandb: WandbConfig, folder: Path, run_config: Mapping[str, Any], *, first_step: int
) -> list[Tracker]:
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl", first_step=first_step)]
    if name is TrackerName.wandb:
        trackers.append(WandbTracker(wandb, folder, run_config))
    return trackers


def _lines(path: Path) -> list[str]:
    """Whole lines of a JSONL that a crash may have torn at the end."""
    if not path.is_file():
        return []
    content = path.read_text(encoding="utf-8")
    return content[: content.rfind("\n") + 1].splitlines()
