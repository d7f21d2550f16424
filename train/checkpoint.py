"""Training checkpoints: a folder is whole or absent, and holds everything a run needs to go on bit for bit.

checkpoints/step_00000100/   config.json, model.safetensors   the drafter (see models/checkpoint.py)
                             optimizer.pt                     AdamW state, tensors and numbers only
                             trainer.json                     step and the options that fix the trajectory
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from models.base import Drafter
from models.checkpoint import WEIGHTS, load_weights, read_weights, save_drafter, step_folder, step_folders
from models.files import fsync, read_json, write_json
from models.target import TargetIdentity
from train.config import ONLINE, TrainConfig

# A resumed run may change these; anything else would make it another run than the one it claims to continue.
FREE_OPTIONS = {"name", "output_dir", "resume", "log_every", "checkpoint_every", "keep_checkpoints", "num_workers"}
FREE_OPTIONS |= {"tracker", "wandb", "store", "micro_batch_size"}


def trajectory(config: TrainConfig, num_steps: int) -> dict[str, Any]:
    """The options that decide what a run computes."""
    values = {key: value for key, value in asdict(config).items() if key not in FREE_OPTIONS | {"target", "model"}}
    if config.store == ONLINE:  # what a store fixes otherwise
        values["online"] = {key: values["online"][key] for key in ("feature_dtype", "last_hidden_dtype")}
    else:
        del values["online"], values["chats"]
    return {**values, "num_steps": num_steps, "model": dict(config.model), "target": dict(config.target)}


def save_checkpoint(
    root: Path,
    *,
    step: int,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    identity: TargetIdentity,
    options: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `step` under a temporary name, fsync, rename; then drop all but the newest `keep`."""
    folder = step_folder(root, step)
    temporary = root / f".{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    save_drafter(drafter, temporary, target=asdict(identity))
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    fsync(temporary / "optimizer.pt")
    write_json(temporary / "trainer.json", {"step": step, "options": options})
    fsync(temporary)
    if folder.exists():  # a run that was told to start anew in an old folder
        shutil.rmtree(folder)
    temporary.replace(folder)
    fsync(root)
    for old in step_folders(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def find_checkpoint(resume: str, root: Path) -> Path | None:
    """`auto`: the newest whole checkpoint, if any. `none`: start anew. Anything else: that folder."""
    if resume == "none":
        return None
    if resume == "auto":
        folders = step_folders(root)
        return folders[-1] if folders else None
    folder = Path(resume)
    if not (folder / "trainer.json").is_file():
        raise ValueError(f"resume={resume}: not a training checkpoint (no trainer.json); use auto, none or a folder")
    return folder


def load_checkpoint(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> int:
    """Restore weights and optimiser; returns the step to go on from. Raises ValueError on other options."""
    saved = read_json(folder / "trainer.json")
    before, now = saved["options"], options
    differing = [
        f"{key} (was {before.get(key)}, now {now.get(key)})" for key in sorted(now) if before.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(
            f"cannot resume {folder} with other options: {'; '.join(differing)}; use resume=none or a new name"
        )
    load_weights(drafter, read_weights(folder / WEIGHTS), folder / WEIGHTS)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"))
    return saved["step"]
