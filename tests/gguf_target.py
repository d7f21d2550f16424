"""A tiny target as a GGUF file, just enough for llama.cpp to run it on token ids."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.gguf import TOKENIZER, TOKENS, write_gguf
from models.gguf_target import target_file
from models.target import Target


def write_target(target: Target, path: Path, *, end_token_id: int, vocabulary: Mapping[str, Any] | None = None) -> None:
    """Float32. Token strings are stand-ins where no vocabulary is given; `end_token_id` ends generation."""
    weights = {name.removeprefix("model."): tensor for name, tensor in target.model.state_dict().items()}
    if target.spec.tie_embeddings:
        del weights["lm_head.weight"]
    metadata, tensors = target_file(target.spec, weights)
    vocabulary = vocabulary or {
        TOKENIZER: "llama",
        "tokenizer.ggml.eos_token_id": end_token_id,
        TOKENS: [f"t{index}" for index in range(target.spec.vocab_size)],
    }
    write_gguf(path, {**vocabulary, **metadata}, tensors, dtype=torch.float32)
