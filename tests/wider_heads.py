"""Models with attention heads of twice the size that compute the same: vLLM's CPU attention has none of 16."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def widen_heads(source: Path, folder: Path) -> Path:
    """A copy of a target's or drafter's folder (Llama or Qwen3, no biases), equal to float32 rounding.

    Rotary pair j of d turns as pair 2j of 2d does, so entries move there and zeros fill the rest. A norm over the head
    then sees half the mean square and gives sqrt(2) times as much, for queries and keys; scores are divided by
    sqrt(2d) in place of sqrt(d). Together they grow by sqrt(2) with both norms and shrink by as much without.
    """
    config = json.loads((source / "config.json").read_text())
    sizes = config.get("transformer_layer_config", config)
    size, sizes["head_dim"] = sizes["head_dim"], 2 * sizes["head_dim"]
    weights = load_file(source / "model.safetensors")
    normed = any(name.endswith("q_norm.weight") for name in weights)
    wider = {name: _widen(name, weights[name], size, normed=normed) for name in weights}
    folder.mkdir(exist_ok=True)
    save_file(wider, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _widen(name: str, weight: Tensor, size: int, *, normed: bool) -> Tensor:
    half = torch.arange(size // 2)
    places = torch.cat([2 * half, 2 * half + size])  # of a head's entries; pair j is j and j + size / 2
    part = name.split(".")[-2]
    if part in ("q_proj", "k_proj", "v_proj"):
        wider = weight.new_zeros(len(weight) // size, 2 * size, weight.shape[1])
        wider[:, places] = weight.unflatten(0, (-1, size))
        return wider.flatten(0, 1) * (2**0.5 if part == "q_proj" and not normed else 1)
    if part == "o_proj":
        wider = weight.new_zeros(len(weight), weight.shape[1] // size, 2 * size)
        wider[:, :, places] = weight.unflatten(1, (-1, size))
        return wider.flatten(1)
    if part in ("q_norm", "k_norm"):
        wider = weight.new_zeros(2 * size)
        wider[places] = weight / (2**0.5 if part == "k_norm" else 1)
        return wider
    return weight
