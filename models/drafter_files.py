"""Where the files of a drafter lie: a folder, the newest checkpoint of a run, or a name on the Hugging Face hub.

Weights come from safetensors, whole or in shards. Pickle files (`pytorch_model.bin`) can run code when they are read:
they are read only where the user says so, and even then as tensors only.
"""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from models.files import read_json, sha256_file, sha256_text

CONFIG, WEIGHTS = "config.json", "model.safetensors"
CALIBRATION = "calibration.json"  # beside the weights: what eval/calibrate.py found
INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def step_folders(root: Path) -> list[Path]:
    """Whole checkpoints under `root`, oldest first."""
    found = (path for path in root.glob("step_*") if path.name.removeprefix("step_").isdigit() and path.is_dir())
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def looks_like_hub_name(draft: str) -> bool:
    return draft.count("/") == 1 and not draft.startswith((".", "/", "~", "outputs/")) and not Path(draft).exists()


def resolve_folder(draft: str, *, option: str = "draft", allow_pickle: bool = False) -> Path:
    """A drafter folder, the newest checkpoint of a training run's `checkpoints` folder, or the local copy of what the
    hub has under a name `org/name`. Raises ValueError naming the `option` where there is neither."""
    if looks_like_hub_name(draft):
        patterns = [CONFIG, "*.safetensors", INDEX, CALIBRATION, *([PICKLE] if allow_pickle else [])]
        return download(draft, patterns, option)
    path = Path(draft)
    if not path.is_dir():
        more = ", vanilla, ngram or first_layers:N" if option == "draft" else ""
        raise ValueError(f"{option}={path}: no such folder; name a drafter's, a run's checkpoints/ or org/name{more}")
    if not (path / CONFIG).is_file() and any(path.glob("*.gguf")):
        raise ValueError(f"{option}={path} holds GGUF files, which llama.cpp reads; name what they were exported from")
    folders = step_folders(path)
    return folders[-1] if folders else path


def download(name: str, patterns: Iterable[str], option: str) -> Path:
    """Raises ValueError where the hub cannot be reached and keeps no copy here, or has nothing of that name."""
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # what huggingface_hub raises for networks, names and missing copies
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{option}={name}: no such folder, and it cannot be had from the hub ({reason}); "
            f"download it where there is a network (hf download {name}) or name a folder"
        ) from error


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The files that hold a drafter's weights. Raises ValueError where there are none, or only a pickle file that the
    user has not allowed."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{folder / INDEX} names {', '.join(missing)}, which is not there")
        return [folder / name for name in names]
    if (folder / PICKLE).is_file():
        if not allow_pickle:
            raise ValueError(
                f"{folder} holds its weights as {PICKLE} only, a pickle file, which can run code when it is read: "
                "allow_pickle=true reads it as tensors and nothing else (weights_only), if you trust its source"
            )
        return [folder / PICKLE]
    raise ValueError(f"no such file: {folder / WEIGHTS}")


def read_weights(folder: Path, *, allow_pickle: bool = False) -> dict[str, Tensor]:
    """All tensors of a drafter folder. Raises ValueError naming the file that is missing or damaged."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder, allow_pickle=allow_pickle):
        found = _read_pickle(path) if path.name == PICKLE else _read_safetensors(path)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{path} holds {', '.join(twice[:3])}, which another file holds, too")
        tensors |= found
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} is damaged, or holds more than tensors, which is never run ({reason})") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{path} is no mapping of names to tensors")
    return found


def fingerprint(folder: Path, *, allow_pickle: bool = False) -> str:
    """Names the weights of a folder."""
    files = weight_files(folder, allow_pickle=allow_pickle)
    return sha256_file(files[0]) if len(files) == 1 else sha256_text(json.dumps([sha256_file(file) for file in files]))


def slot_layout_of(folder: Path) -> str | None:
    """The layout that a weights file of ours says it was trained in."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return (file.metadata() or {}).get("slot_layout")
