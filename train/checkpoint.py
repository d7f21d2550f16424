"""Training checkpoints: a folder is whole or absent, and holds everything a run needs to go on bit for bit.

checkpoints/step_00000100/   config.json, model.safetensors   the drafter (see models/checkpoint.py)
                             optimizer.safetensors            AdamW of one process or DDP, or
                             optimizer/                       of FSDP2 (torch's distributed checkpoint) or ZeRO, sharded
                             rng_00000.pt                     random state of every process
                             trainer.json                     step, schedule, data position, the options that fix the
                                                              trajectory; size and sha256 of all files above
                             probe.json                       acceptance on held-out prompts, where it was measured
checkpoints/best             a link to the one with the best probe, which is never deleted
"""

import logging
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from models.checkpoint import save_drafter, step_folder, step_folders
from models.files import fsync, read_json, sha256_file, write_json
from models.target import TargetIdentity
from train.config import ONLINE, TrainConfig
from train.optim import Schedule
from train.parallel import Shared

log = logging.getLogger(__name__)

TRAINER, PROBE, BEST = "trainer.json", "probe.json", "best"
# A resumed run may change these; anything else would make it another run than the one it claims to continue.
FREE_OPTIONS = {"name", "output_dir", "resume", "extend", "log_every", "checkpoint_every", "keep_checkpoints"}
FREE_OPTIONS |= {"tracker", "wandb", "store", "tokens_per_batch", "packing", "num_workers", "probe"}
FREE_OPTIONS |= {"attention", "compile", "peak_tflops", "estimate"}


def trajectory(config: TrainConfig) -> dict[str, Any]:
    """The options that decide what a run computes, but for its length."""
    left_out = FREE_OPTIONS | {"target", "model", "num_steps", "num_epochs"}
    values = {key: value for key, value in asdict(config).items() if key not in left_out}
    if config.store == ONLINE:  # what a store fixes otherwise
        values["online"] = {key: values["online"][key] for key in ("feature_dtype", "last_hidden_dtype")}
    else:
        del values["online"], values["chats"]
    return {**values, "model": dict(config.model), "target": dict(config.target)}


@dataclass(frozen=True)
class Progress:
    """How far a run is, and by which schedule it goes on."""

    step: int
    schedule: Schedule
    num_processes: int  # that wrote the checkpoint

    @property
    def is_finished(self) -> bool:
        return self.step >= self.schedule.num_steps


def save_checkpoint(
    root: Path,
    *,
    progress: Progress,
    shared: Shared,
    identity: TargetIdentity,
    options: Mapping[str, Any],
    position: Mapping[str, int],
    keep: int,
) -> Path:
    """All processes write under a temporary name, the main one lists, syncs and renames; then old ones go."""
    accelerator = shared.accelerator
    folder = step_folder(root, progress.step)
    temporary = root / f".{folder.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    weights = shared.weights()
    if accelerator.is_main_process:
        save_drafter(shared.drafter, temporary, target=asdict(identity), weights=weights)
    shared.save_optimizer(temporary)
    torch.save(random_state(), temporary / rng_name(accelerator.process_index))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = {str(path.relative_to(temporary)): path for path in sorted(temporary.rglob("*")) if path.is_file()}
        for path in files.values():
            fsync(path)
        values = {
            "step": progress.step,
            "schedule": asdict(progress.schedule),
            "num_processes": accelerator.num_processes,
            "launcher": shared.name,
            "data": position,
            "options": options,
            "files": {name: [path.stat().st_size, sha256_file(path)] for name, path in files.items()},
        }
        write_json(temporary / TRAINER, values)
        if folder.exists():  # the same step, trained again
            shutil.rmtree(folder)
        temporary.replace(folder)
        fsync(root)
        prune(root, keep)
    accelerator.wait_for_everyone()
    return folder


def prune(root: Path, keep: int) -> None:
    """Drop all but the newest `keep` and the best."""
    best = best_checkpoint(root)
    for old in step_folders(root)[:-keep]:
        if old != best:
            shutil.rmtree(old)


def best_checkpoint(root: Path) -> Path | None:
    """The one with the greatest acceptance length, if any was measured; the newest of equals."""
    measured = [folder for folder in step_folders(root) if (folder / PROBE).is_file()]
    return max(measured, key=lambda folder: (read_json(folder / PROBE)["acceptance_length"], folder.name), default=None)


def save_probe(folder: Path, values: Mapping[str, Any]) -> None:
    """Keep what was measured of a checkpoint, and let `best` point to the best one."""
    write_json(folder / PROBE, values)
    best, link, temporary = best_checkpoint(folder.parent), folder.parent / BEST, folder.parent / f".{BEST}.tmp"
    assert best is not None
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(best.name)
    temporary.replace(link)


def find_checkpoint(resume: str, root: Path) -> Path | None:
    """`auto`: the newest checkpoint, if any. `none`: start anew. Anything else: that folder.

    Raises ValueError where it is not a training checkpoint, or is damaged; the one before it is named then.
    """
    if resume == "none":
        return None
    folder = Path(resume)
    if resume == "auto":
        folders = step_folders(root)
        if not folders:
            return None
        folder = folders[-1]
    if not (folder / TRAINER).is_file():
        raise ValueError(
            f"resume={resume}: {folder} is not a training checkpoint (no {TRAINER}); use auto, none or a folder"
        )
    check_files(folder)
    return folder


def check_files(folder: Path) -> None:
    """Raises ValueError that names the damaged file of a checkpoint and what to go on from instead."""
    older = [str(other) for other in step_folders(folder.parent) if other.name < folder.name]
    way_out = f"resume={older[-1]} goes on from the one before" if older else "resume=none starts anew"
    try:
        files = read_json(folder / TRAINER)["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / TRAINER} is damaged ({error}); {way_out}") from error
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {way_out}")
        if path.stat().st_size != size or sha256_file(path) != digest:
            raise ValueError(f"{path} is damaged (not the bytes that {TRAINER} lists); {way_out}")


def read_progress(folder: Path, options: Mapping[str, Any], *, num_steps: int, extend: bool) -> Progress:
    """Where the run at `folder` goes on. Raises ValueError on other options, and on another length without `extend`,
    which gives the steps beyond it a schedule of their own: a finished one has ended at a rate of zero."""
    saved = read_json(folder / TRAINER)
    before = saved["options"]
    differing = [
        f"{key} (was {before.get(key)}, now {options.get(key)})"
        for key in sorted(options.keys() | before.keys())
        if before.get(key) != options.get(key)
    ]
    if differing:
        raise ValueError(
            f"cannot resume {folder} with other options: {'; '.join(differing)}; use resume=none or a new name"
        )
    step, schedule = saved["step"], Schedule(**saved["schedule"])
    if num_steps != schedule.num_steps:
        if not extend:
            raise ValueError(
                f"cannot resume {folder} with num_steps (was {schedule.num_steps}, now {num_steps}): its learning rate "
                f"falls towards step {schedule.num_steps}. extend=true goes on from step {step} with a schedule of its "
                f"own up to {num_steps}"
            )
        if num_steps <= step:
            raise ValueError(f"extend=true: num_steps={num_steps} is not beyond step {step} of {folder}")
        schedule = Schedule(first_step=step, num_steps=num_steps)
    return Progress(step, schedule, saved["num_processes"])


def put_aside(output_dir: Path, *, newer_than: Path | None) -> None:
    """Move checkpoints that a run will contradict (all of them and the metrics, or only newer ones) to before_<n>/."""
    root = output_dir / "checkpoints"
    moved = [folder for folder in step_folders(root) if newer_than is None or folder.name > newer_than.name]
    if not moved:
        return
    number = 1
    while (aside := output_dir / f"before_{number}").exists():
        number += 1
    aside.mkdir()
    for folder in moved:
        folder.rename(aside / folder.name)
    if (root / BEST).is_symlink() and not (root / BEST).exists():
        (root / BEST).unlink()
    if newer_than is None:
        for name in ("metrics.jsonl", "wandb_run_id"):
            if (output_dir / name).is_file():
                (output_dir / name).rename(aside / name)
    log.info("train: moved %d checkpoints that this run does not go on from to %s", len(moved), aside)


def rng_name(process_index: int) -> str:
    return f"rng_{process_index:05d}.pt"


def random_state() -> dict[str, Any]:
    """Of this process: torch, CUDA, Python and numpy; tensors and plain values only."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def restore_random_state(folder: Path, accelerator: Accelerator) -> None:
    """That of the same process; one that did not exist then keeps its seed."""
    path = folder / rng_name(accelerator.process_index)
    if not path.is_file():
        return
    state = torch.load(path, weights_only=True)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
