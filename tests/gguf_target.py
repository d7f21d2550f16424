"""A Qwen3 target as a GGUF file, just enough for llama.cpp to run it on token ids."""

from pathlib import Path

import torch

from models.gguf import ARCHITECTURE, LAYER_NAMES, TOKENS, write_gguf
from models.target import Target


def write_target(target: Target, path: Path, *, end_token_id: int) -> None:
    """Float32, head tied to the embedding. Token strings are stand-ins; `end_token_id` ends generation."""
    spec = target.spec
    assert spec.model_type == "qwen3" and spec.tie_embeddings
    own = {
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "rope.freq_base": float(spec.rope_parameters["rope_theta"]),
    }
    metadata = {
        ARCHITECTURE: "qwen3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.eos_token_id": end_token_id,
        TOKENS: [f"t{index}" for index in range(spec.vocab_size)],
        **{f"qwen3.{key}": value for key, value in own.items()},
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for index in range(spec.num_layers):
        names |= {f"model.layers.{index}.{ours}": f"blk.{index}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    weights = target.model.state_dict()
    tensors = {f"{theirs}.weight": weights[f"{ours}.weight"] for ours, theirs in names.items()}
    write_gguf(path, metadata, tensors, dtype=torch.float32)
