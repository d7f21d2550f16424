"""Tensors of a target read straight from its checkpoint files, without building the model."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from torch import Tensor

from models.spec import TargetSpec
from models.target import TargetConfig, dtype_of

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint file, not read yet."""

    path: Path
    name: str

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


def load_frozen(config: TargetConfig, spec: TargetSpec) -> tuple[Tensor, Tensor]:
    """Embedding and head [V, D] read straight from the checkpoint files, without building the target."""
    stored, dtype = _stored_tensors(config), dtype_of(config.dtype)
    embedding = stored[_only_name(config, stored, EMBEDDING)].read().to(dtype)
    return embedding, embedding if spec.tie_embeddings else stored[_only_name(config, stored, HEAD)].read().to(dtype)


def decoder_tensors(config: TargetConfig) -> dict[str, StoredTensor]:
    """What lies beside the embedding, by names from there on (`layers.0.mlp.up_proj.weight`, `norm.weight`).

    Other towers of a multimodal checkpoint have tensors of the same names, under another root.
    """
    stored = _stored_tensors(config)
    root = _only_name(config, stored, EMBEDDING).removesuffix(EMBEDDING)
    return {name.removeprefix(root): tensor for name, tensor in stored.items() if name.startswith(root)}


def _stored_tensors(config: TargetConfig) -> dict[str, StoredTensor]:
    stored = {}
    for path in weight_files(config):
        with safe_open(path, framework="pt") as file:
            stored |= {name: StoredTensor(path, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return stored


def _only_name(config: TargetConfig, names: Iterable[str], suffix: str) -> str:
    # Layers that predict further tokens keep copies of the embedding.
    found = [name for name in names if f".{name}".endswith(f".{suffix}") and "layers." not in name]
    if len(found) != 1:
        raise ValueError(f"target.path={config.path}: need one tensor named *{suffix} in its files, found {found}")
    return found[0]


def weight_files(config: TargetConfig) -> list[Path]:
    """The target's safetensors files, downloaded first where the path is a Hugging Face name."""
    folder = Path(config.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(config.path, allow_patterns=["*.safetensors", "*.json"]))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"target.path={config.path}: no *.safetensors file in {folder}")
    return files
