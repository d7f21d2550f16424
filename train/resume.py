"""Going on from a training checkpoint: which one, whether it is whole and fits, and where what it contradicts goes."""

import errno
import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from data.store import FeatureSource
from data.tracking import METRICS
from models.drafter_files import step_folders
from models.files import sha256_file, sha256_text, write_atomic
from train.checkpoint import FORMAT_VERSION, TRAINER, Progress, link_best, read_sealed
from train.config import ONLINE, TrainConfig
from train.optim import Schedule
from train.tracking import WANDB_RUN

log = logging.getLogger(__name__)

T = TypeVar("T")
LOCK = ".train.lock"
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


def fingerprint(store: FeatureSource) -> str:
    """Of the records that a run draws from: their ids and lengths, wherever the store lies."""
    return sha256_text(json.dumps([store.ids, store.lengths.tolist()]))


@dataclass(frozen=True)
class Found:
    """A whole checkpoint that fits the run which goes on from it, and who wrote it."""

    folder: Path
    progress: Progress
    num_processes: int
    launcher: str

    def is_in(self, root: Path) -> bool:
        return self.folder.parent.resolve() == root.resolve()


@contextmanager
def alone_in(output_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run folder's lock, which ends with the main process. Raises ValueError where another run holds it: a
    launcher that was killed may leave its processes behind, and two runs would write the same checkpoints."""
    with ExitStack() as stack:
        on_main(accelerator, lambda: _lock(stack, output_dir))
        yield


def _lock(stack: ExitStack, output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((output_dir / LOCK).open("w"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise ValueError(
                f"output_dir={output_dir}: another run trains there now; wait for it, stop its processes, or use "
                "another name="
            ) from error
        log.warning("train: %s has no locks (%s): do not start a second run there", output_dir, error.strerror)


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """What `work` returns or raises (ValueError) on the main process, on every process: what a file system shows may
    differ between nodes, and reading all of a checkpoint once is enough."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = str(error)
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def find_checkpoint(resume: str, root: Path) -> Path | None:
    """`auto`: the newest checkpoint, if any. `none`: start anew. Anything else: that folder.

    Raises ValueError where it is not a training checkpoint, or is damaged; the newest whole one before it is named
    then.
    """
    folders = step_folders(root)
    if resume == "none" or (resume == "auto" and not folders):
        return None
    # resolved: a link (best) may have gone when the run starts to write
    folder = folders[-1] if resume == "auto" else Path(resume).resolve()
    if not (folder / TRAINER).is_file() and folder not in step_folders(folder.parent):
        raise ValueError(
            f"resume={resume}: {folder} is not a training checkpoint (no {TRAINER}); use auto, none or a folder"
        )
    if problem := damage(folder):
        older = [other for other in step_folders(folder.parent) if other.name < folder.name]
        whole = next((other for other in reversed(older) if damage(other) is None), None)
        way_out = "resume=none starts anew" if whole is None else f"resume={whole} goes on from one before it"
        raise ValueError(f"{problem}; {way_out}")
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None where every byte is as it was written."""
    try:
        saved = read_sealed(folder / TRAINER)
    except ValueError as error:
        return str(error)
    if (version := saved.get("format_version")) != FORMAT_VERSION:
        return (
            f"{folder / TRAINER} has format_version {version}, this version reads {FORMAT_VERSION}: go on with the "
            f"version that wrote it, or init={folder} starts from its weights with a fresh optimiser"
        )
    for name, (size, digest) in saved["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size or sha256_file(path) != digest:
            return f"{path} is damaged (not the bytes that {TRAINER} lists)"
    return None


def read_progress(folder: Path, options: Mapping[str, Any], *, num_steps: int, extend: bool) -> Found:
    """Where the run at `folder` goes on. Raises ValueError on other options, and on another length without `extend`,
    which gives the steps beyond it a schedule of their own: a finished one has ended at a rate of zero."""
    saved = read_sealed(folder / TRAINER)
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
    return Found(folder, Progress(step, schedule), saved["num_processes"], saved["launcher"])


def put_aside(output_dir: Path, *, found: Found | None) -> None:
    """Move what the run will contradict to before_<n>/: checkpoints newer than the one it goes on from, or all of them
    where that is elsewhere or none. The metrics are copied first, so that a kill loses nothing."""
    root = output_dir / "checkpoints"
    is_own = found is not None and found.is_in(root)
    moved = [folder for folder in step_folders(root) if not (found and is_own and folder.name <= found.folder.name)]
    files = [path for path in (output_dir / METRICS, output_dir / WANDB_RUN) if path.is_file()]
    if not moved and (is_own or not files):
        return
    number = 1
    while (aside := output_dir / f"before_{number}").exists():
        number += 1
    aside.mkdir()
    for path in files:
        write_atomic(aside / path.name, lambda copy, path=path: shutil.copyfile(path, copy))
    for folder in reversed(moved):
        folder.rename(aside / folder.name)
    if not is_own:
        for path in files:
            path.unlink()
    link_best(root)
    log.info("train: moved %d checkpoints that this run does not go on from to %s", len(moved), aside)
