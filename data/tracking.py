"""Weights & Biases for the scripts that report to it, offline unless told otherwise; files that several read."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from models.files import write_text

MODES = ("offline", "online", "disabled", "shared")
METRICS = "metrics.jsonl"  # of a training run, one JSON object a line
PROBE_PREFIX = "probe/"  # of what was decoded during training, in there


class TrackerName(StrEnum):
    """Where figures go besides local files, which are always written."""

    none = "none"
    wandb = "wandb"


@dataclass
class WandbConfig:
    project: str
    mode: str | None


def choose_tracker(
    tracker: TrackerName | None, wandb: WandbConfig, environment: Mapping[str, str]
) -> tuple[TrackerName, WandbConfig]:
    """With what the config leaves to W&B's own variables. Raises ValueError on a mode that does not exist."""
    mode = wandb.mode or environment.get("WANDB_MODE") or "offline"
    if mode not in MODES:
        raise ValueError(f"wandb.mode={mode} does not exist: choose one of {', '.join(MODES)} (WANDB_MODE counts too)")
    if tracker is None:
        asked = bool(environment.get("WANDB_MODE") or environment.get("WANDB_API_KEY")) and mode != "disabled"
        tracker = TrackerName.wandb if asked else TrackerName.none
    return tracker, WandbConfig(wandb.project, mode)


def open_wandb(config: WandbConfig, folder: Path, id_file: Path, run_config: Mapping[str, Any], *, job: str) -> Any:
    """A run of its own for every id file, which a later call goes on with."""
    import wandb

    run_id = id_file.read_text().strip() if id_file.is_file() else secrets.token_hex(4)
    id_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(id_file, run_id)
    return wandb.init(
        project=config.project,
        mode=config.mode,  # type: ignore[arg-type]
        dir=str(folder),
        id=run_id,
        resume="allow",
        name=folder.name,
        group=folder.name,
        job_type=job,
        config=dict(run_config),
    )
