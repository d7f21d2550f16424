"""Drafter folders: save and load our own format, load public ones (models/published.py); refuse what does not fit.

Native folder: config.json (`format_version`, `drafter`, `slot_layout`, `num_draft_tokens`, `target_layer_ids`,
`target`, the drafter's own options), model.safetensors (trained weights only, float32 or as trained; its metadata
repeats the slot layout). The target's embedding and head are not inside; the caller binds them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class
from safetensors.torch import save_file
from torch import Tensor

from models.base import Drafter
from models.drafter_files import CONFIG, WEIGHTS, read_weights, slot_layout_of
from models.fields import check_fields
from models.files import read_json, write_atomic, write_json
from models.published import Published, known_architecture, misfit, read_published
from models.spec import TargetSpec
from models.target import TargetConfig, TargetIdentity, load_spec, quantization_of

FORMAT_VERSION = 3


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter with embedding and head bound where the folder held them."""

    drafter: Drafter
    format: str  # native, or the architecture that a public config names
    bound: bool


def check_target(folder: Path, drafter: Drafter, config: TargetConfig, identity: TargetIdentity) -> None:
    """Raises ValueError when the drafter at `folder` was trained for another target than this one. A quantised one
    passes for the one it was made of: that cannot be told from its files."""
    saved = read_json(folder / CONFIG).get("target") or {}
    own = drafter.spec.vocab_size, drafter.spec.hidden_size, drafter.spec.num_layers
    spec = load_spec(config)
    if own != (spec.vocab_size, spec.hidden_size, spec.num_layers):
        raise ValueError(
            f"draft={folder} was trained for a target with (vocabulary, hidden size, layers) {own}, "
            f"target={config.name} has {(spec.vocab_size, spec.hidden_size, spec.num_layers)}"
        )
    if quantization_of(config) is not None:
        return
    for key in ("config_sha256", "weights_sha256"):
        now = asdict(identity)[key]
        if saved.get(key) and now and saved[key] != now:
            raise ValueError(
                f"draft={folder} was trained for target {saved['name']} with {key} {saved[key][:12]}, "
                f"target={config.name} has {now[:12]}: use that target"
            )


def save_drafter(
    drafter: Drafter, folder: Path, *, target: Mapping[str, str], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors. `target` names it: name, config_sha256, weights_sha256. `weights` are
    the whole ones of a drafter that holds only a part of them."""
    config = {
        "format_version": FORMAT_VERSION,
        "drafter": f"{type(drafter).__module__}.{type(drafter).__qualname__}",
        "target": {**target, "spec": drafter.spec.to_dict()},
        **drafter.native_config(),
    }
    drafter.check_weights()
    weights = drafter.state_dict() if weights is None else weights
    weights = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    # One key only: safetensors writes several in random order, and equal drafters must give equal bytes.
    metadata = {"slot_layout": str(drafter.slot_layout)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS, lambda path: save_file(weights, path, metadata=metadata))
    write_json(folder / CONFIG, config)


def load_drafter(
    folder: Path, *, dtype: torch.dtype | None = None, target: TargetSpec | None = None, allow_pickle: bool = False
) -> LoadedDrafter:
    """Build the drafter that a folder describes and load its weights; the format is read from the config alone.

    `target` completes a public config (stop tokens, number of layers). Raises ValueError on a
    missing file, an unknown format, and missing, extra or misshaped tensors (all listed).
    """
    config = read_json(folder / CONFIG)
    tensors = read_weights(folder, allow_pickle=allow_pickle)
    is_native = "format_version" in config
    try:
        read = Published(_from_native(config), tensors) if is_native else read_published(config, tensors, target)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    kind = "native" if is_native else str(known_architecture(config))
    drafter = read.drafter
    load_weights(drafter, read.tensors, folder / WEIGHTS)
    if is_native:
        _check_layout(drafter, folder)
    if dtype is not None:
        drafter.to(dtype)
    if read.embedding is not None and read.head is not None:
        drafter.bind(*(matrix if dtype is None else matrix.to(dtype) for matrix in (read.embedding, read.head)))
    elif read.embedding is not None:
        drafter.embedding = read.embedding  # `bind` demands that the target has the same
    return LoadedDrafter(drafter.eval(), kind, read.head is not None)


def _check_layout(drafter: Drafter, folder: Path) -> None:
    """Shapes do not tell one slot layout from another, so the weights file names the one it was trained in."""
    trained = slot_layout_of(folder)
    if trained != str(drafter.slot_layout):
        raise ValueError(
            f"{folder / CONFIG}: slot_layout={drafter.slot_layout}, but {WEIGHTS} was trained with {trained}; "
            "served with another layout every draft would be shifted by one token"
        )


def _from_native(config: dict[str, Any]) -> Drafter:
    if config["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"format_version {config['format_version']}, this version reads {FORMAT_VERSION}; "
            "export it again with the version that wrote it"
        )
    _need_fields(config, ("drafter", "target", "slot_layout", "num_draft_tokens", "target_layer_ids"))
    check_fields(config)
    _need_fields(config["target"], ("spec",))
    own = {key: value for key, value in config.items() if key not in ("format_version", "drafter", "target")}
    try:
        drafter_class = get_class(config["drafter"])
    except (ImportError, ValueError):
        drafter_class = None
    if drafter_class is None or not issubclass(drafter_class, Drafter):
        raise ValueError(f"this version has no drafter {config['drafter']}")
    spec = TargetSpec.from_dict(config["target"]["spec"])
    try:
        return drafter_class.from_native(own, spec)
    except (KeyError, ValueError) as error:
        raise ValueError(f"options do not fit {config['drafter']}: {error}") from error


def _need_fields(config: Mapping[str, Any], fields: Sequence[str]) -> None:
    if missing := [field for field in fields if field not in config]:
        raise ValueError(f"missing {', '.join(missing)}")


def load_weights(drafter: Drafter, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Strict: every tensor that is missing, extra, misshaped or of another kind is named in one ValueError, and nothing
    is loaded then."""
    own = drafter.state_dict()
    problems = [f"missing {name} {list(own[name].shape)}" for name in own if name not in tensors]
    problems += [f"unexpected {name} {list(tensors[name].shape)}" for name in tensors if name not in own]
    shared = [name for name in own if name in tensors]
    misfits = (misfit(name, tensors[name], own[name].shape, own[name].dtype) for name in shared)
    problems += [problem for problem in misfits if problem is not None]
    if problems:
        raise ValueError(f"{path} does not fit its config: " + "; ".join(problems))
    drafter.load_state_dict(dict(tensors))
    try:
        drafter.check_weights()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
