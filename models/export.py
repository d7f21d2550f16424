"""Drafters in an engine's layout: what engines load, written from `Drafter.serving` and read back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.base import Drafter
from models.checkpoint import CALIBRATION, CONFIG, WEIGHTS, load_drafter
from models.files import write_atomic, write_json, write_text
from models.gguf import write_gguf_drafter
from models.spec import TargetSpec


@dataclass
class ExportConfig:
    """Options of export.py; conf/export.yaml lists every value with a remark."""

    name: str
    output_dir: str
    target: Any
    draft: str
    engine: str
    dtype: str
    out: str


def export_drafter(
    drafter: Drafter,
    folder: Path,
    *,
    engine: str,
    dtype: torch.dtype,
    card: str,
    tokens: Sequence[str | None] = (),  # of the target, by id; only GGUF lists them
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Write the model card README.md and the drafter: `<drafter>.gguf`, or config.json and model.safetensors; beside it
    calibration.json, the temperatures of its confidences, where it has been calibrated.

    What was written is re-read and compared with the drafter before this returns.
    """
    foreign = next(folder.glob(CONFIG if engine == "gguf" else "*.gguf"), None)
    if foreign is not None:
        raise ValueError(f"out={folder} holds {foreign.name}, made for another engine: choose a folder for this one")
    if calibration is not None:
        write_json(folder / CALIBRATION, calibration)
    else:
        (folder / CALIBRATION).unlink(missing_ok=True)  # of what was exported here before
    if engine == "gguf":
        path = folder / f"{type(drafter).__name__.lower()}.gguf"
        write_gguf_drafter(drafter, path, dtype=dtype, tokens=tokens)
        write_text(folder / "README.md", card)
    else:
        _export_folder(drafter, folder, engine=engine, dtype=dtype, card=card)


def _export_folder(drafter: Drafter, folder: Path, *, engine: str, dtype: torch.dtype, card: str) -> None:
    serving = drafter.serving(engine)
    weights = {serving.renames.get(name, name): tensor for name, tensor in drafter.state_dict().items()}
    if serving.with_embedding:
        weights |= {"embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    # clone: a tied target's embedding and head share memory, which safetensors refuses
    weights = {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in weights.items()}
    config = {**deepspec_base_config(drafter.spec), **serving.config, "dtype": str(dtype).removeprefix("torch.")}
    write_atomic(folder / WEIGHTS, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    write_text(folder / "README.md", card)
    write_json(folder / CONFIG, config)  # last: without it no loader takes the folder for a drafter
    again = load_drafter(folder).drafter
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.cpu().to(dtype)), f"{name} changed on the way to {folder}"


def deepspec_base_config(spec: TargetSpec) -> dict[str, Any]:
    """The fields that DeepSpec copies from a Qwen3 target config, filled from any target's sizes."""
    rope = dict(spec.rope_parameters)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_target_layers": spec.num_layers,
        "pad_token_id": spec.pad_token_id,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # transformers 4 reads it here and would otherwise use 10,000
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": spec.vocab_size,
    }
