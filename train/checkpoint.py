"""Training checkpoints: a folder is whole or absent, and holds everything a run needs to go on bit for bit.

checkpoints/step_00000100/   config.json, model.safetensors   the drafter (see models/checkpoint.py)
                             optimizer.safetensors            AdamW of one process or DDP, or
                             optimizer/                       of FSDP2 (torch's distributed checkpoint) or ZeRO, sharded
                             process_00000.pt                 of every process: random state, and the metrics since the
                                                              last report
                             trainer.json                     step, schedule, data position, the options that fix the
                                                              trajectory; size and sha256 of all files above
                             probe.json                       acceptance on held-out prompts, where it was measured
checkpoints/best             a link to the one with the best probe, which is never deleted
before_1/                    what a run that was started with another `resume` than auto contradicts, and its metrics

A folder is written, and deleted, under a name that begins with a dot; a kill leaves at most such a folder, which the
next start removes.
"""

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from models.checkpoint import save_drafter
from models.drafter_files import step_folder, step_folders
from models.files import fsync, sha256_file, sha256_text, write_atomic, write_json
from models.target import TargetIdentity
from train.metrics import Window
from train.optim import Schedule
from train.parallel import Shared

FORMAT_VERSION = 1  # of trainer.json, of what it lists, and of probe.json
TRAINER, PROBE, BEST = "trainer.json", "probe.json", "best"


@dataclass(frozen=True)
class Progress:
    """How far a run is, and by which schedule it goes on."""

    step: int
    schedule: Schedule

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
    window: Window,
) -> Path:
    """All processes write under a temporary name, then the main one lists, syncs and renames.

    Raises ValueError where a process cannot write; those before it are whole then, and the launcher ends the others.
    """
    accelerator = shared.accelerator
    folder, is_main = step_folder(root, progress.step), accelerator.is_main_process
    temporary = root / f".{folder.name}.tmp"
    with writing(folder):
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        weights = shared.weights()
        if is_main:
            save_drafter(shared.drafter, temporary, target=asdict(identity), weights=weights)
        shared.save_optimizer(temporary)
        state = {"random": random_state(), "window": window}
        write_atomic(temporary / process_name(accelerator.process_index), lambda path: torch_save(state, path))
        accelerator.wait_for_everyone()
        if is_main:
            values = {
                "step": progress.step,
                "schedule": asdict(progress.schedule),
                "num_processes": accelerator.num_processes,
                "launcher": shared.name,
                "data": position,
                "options": options,
            }
            publish(temporary, folder, values)
    accelerator.wait_for_everyone()
    return folder


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around the writing of a checkpoint. A full or failing disk becomes a ValueError, and its room is freed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder.with_name(f".{folder.name}.tmp"), ignore_errors=True)
        whole = [other for other in step_folders(folder.parent) if other.name <= folder.name]
        way_out = f"{whole[-1]} is whole, resume=auto goes on from there" if whole else "no checkpoint is before it"
        raise ValueError(f"cannot write {folder}: {error}. Make room or repair the disk; {way_out}") from error


def torch_save(value: Any, path: Path) -> None:
    """Raises OSError where the disk is full: torch's own call may do so, or raise some RuntimeError."""
    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise OSError(f"{path}: {str(error).splitlines()[0]}") from error


def publish(temporary: Path, folder: Path, values: Mapping[str, Any]) -> None:
    """List what was written in trainer.json, and give the folder its name once all of it is on the disk."""
    paths = sorted(temporary.rglob("*"))
    for path in paths:
        fsync(path)
    files = {str(path.relative_to(temporary)): path for path in paths if path.is_file()}
    listed = {name: [path.stat().st_size, sha256_file(path)] for name, path in files.items()}
    write_sealed(temporary / TRAINER, {**values, "files": listed})
    if folder.exists():  # the same step, trained again
        drop(folder)
    temporary.replace(folder)
    fsync(folder.parent)


def tidy(root: Path, keep: int) -> None:
    """Drop all but the newest `keep` and the best, and what a kill left half written or half deleted."""
    link_best(root)  # first: at no time it points to what is gone
    best = best_checkpoint(root)
    for old in step_folders(root)[:-keep]:
        if old != best:
            drop(old)
    for leftover in root.glob(".step_*"):
        shutil.rmtree(leftover)


def drop(folder: Path) -> None:
    """Delete a checkpoint, which is gone at once."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.replace(hidden)
    shutil.rmtree(hidden)


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """JSON with its format version and a hash of its values."""
    values = {**values, "format_version": FORMAT_VERSION}
    write_json(path, {**values, "seal": seal(values)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Raises ValueError that names the file where it is missing, or not what `write_sealed` wrote.

    The caller looks at `format_version`, which is absent where a version before the first wrote the file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        values = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if "seal" not in values and "format_version" not in values:
        return values
    if values.pop("seal", None) != seal(values):
        raise ValueError(f"{path} is damaged (not the values that it was written with)")
    return values


def seal(values: Mapping[str, Any]) -> str:
    return sha256_text(json.dumps(values, sort_keys=True))


def best_checkpoint(root: Path) -> Path | None:
    """The one with the greatest acceptance length, if any was measured; the newest of equals."""
    measured = {
        folder: read_probe(folder)["acceptance_length"] for folder in step_folders(root) if (folder / PROBE).is_file()
    }
    return max(measured, key=lambda folder: (measured[folder], folder.name), default=None)


def read_probe(folder: Path) -> dict[str, float]:
    """What was measured of a checkpoint. Raises ValueError where the file is damaged or of another version."""
    path = folder / PROBE
    try:
        values = read_sealed(path)
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ValueError(f"{path} has format_version {version}, this version reads {FORMAT_VERSION}")
    except ValueError as error:
        raise ValueError(f"{error}: remove the file, and the run goes on without this measurement") from error
    return values


def save_probe(folder: Path, values: Mapping[str, float]) -> None:
    """Keep what was measured of a checkpoint, and let `best` point to the best one."""
    with writing(folder):
        write_sealed(folder / PROBE, values)
        link_best(folder.parent)


def link_best(root: Path) -> None:
    best, link, temporary = best_checkpoint(root), root / BEST, root / f".{BEST}.tmp"
    if best is None:
        link.unlink(missing_ok=True)
    elif not link.is_symlink() or link.readlink() != Path(best.name):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(best.name)
        temporary.replace(link)


def process_name(process_index: int) -> str:
    return f"process_{process_index:05d}.pt"


def random_state() -> dict[str, Any]:
    """Of this process: torch, CUDA, Python and numpy; tensors and plain values only."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def restore_process(folder: Path, process_index: int) -> Window | None:
    """Restore the random state of the same process; returns its metrics since the last report. One that did not exist
    then keeps the state of its seed, and has none."""
    path = folder / process_name(process_index)
    if not path.is_file():
        return None
    state = torch.load(path, weights_only=True)
    set_random_state(state["random"])
    return state["window"]


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
