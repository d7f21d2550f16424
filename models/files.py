"""Files that are either whole or absent: temporary name, fsync, rename; and the hashes that name their content."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

UMASK = os.umask(0)
os.umask(UMASK)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(temporary)` beside `path`, then fsync and rename, so a reader never sees half a file.

    The folder is fsynced after the rename; a crash leaves at most a `.tmp` file, which the next write replaces.
    The file has the user's usual mode: safetensors' own keeps it from everybody else, an engine that serves it under
    another account included.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    temporary.chmod(0o666 & ~UMASK)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Sorted keys and a final newline: equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises ValueError that names the file when it is missing or not JSON."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (line {error.lineno}: {error.msg})") from error


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
