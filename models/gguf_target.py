"""A target and its tokenizer as a GGUF file, so that llama.cpp serves what a drafter was trained for.

Llama's and Qwen3's layers only; llama.cpp's own converter knows the rest. Weights go out as they are, in one type.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import TokenType
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from models.gguf import (
    ARCHITECTURE,
    ROTARY_TYPES,
    TOKENIZER,
    TOKENS,
    distinct_tokens,
    layer_keys,
    layer_names,
    neighbours,
    renamed,
    rotary_factors,
    write_gguf,
)
from models.spec import TargetSpec
from models.target import TargetConfig, load_hf_config, load_spec, load_tokenizer
from models.target_files import decoder_tensors, load_frozen

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}  # llama.cpp's, by model_type
# How llama.cpp names what a byte-level tokenizer splits text by: a part of the pattern tells them apart.
SPLITS = {r"\p{N}{1,3}": "llama-bpe", r"|\p{N}|": "qwen2"}


def write_gguf_target(config: TargetConfig, path: Path, *, dtype: torch.dtype) -> None:
    """The target's weights and tokenizer as one file. Raises ValueError on another family, or another tokenizer."""
    spec = load_spec(config)
    check_family(spec, load_hf_config(config).get_text_config(decoder=True).to_dict().get("sliding_window"))
    vocabulary = tokenizer_keys(load_tokenizer(config), spec.vocab_size)
    if vocabulary is None:
        raise ValueError(
            f"target={config.name}: its tokenizer is none that this project writes to GGUF; "
            "use llama.cpp's convert_hf_to_gguf.py, and with_target=false here"
        )
    stored = decoder_tensors(config).items()
    weights = {
        name: tensor.read() for name, tensor in stored if not name.endswith((".inv_freq", "embed_tokens.weight"))
    }
    weights["embed_tokens.weight"], head = load_frozen(config, spec)
    if not spec.tie_embeddings:
        weights["lm_head.weight"] = head
    metadata, tensors = target_file(spec, weights)
    write_gguf(path, {**vocabulary, **metadata, "general.name": config.name}, tensors, dtype=dtype)


def target_file(spec: TargetSpec, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors, from weights by Hugging Face's names behind `model.` and `lm_head.weight` where the head is
    not the embedding."""
    architecture = ARCHITECTURES[spec.model_type]
    modules = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"} | layer_names(spec.num_layers)
    tensors = renamed(weights, modules)
    if architecture == "llama":  # rotates neighbours, not halves
        for index in range(spec.num_layers):
            for name in (f"blk.{index}.attn_q.weight", f"blk.{index}.attn_k.weight"):
                tensors[name] = neighbours(tensors[name], spec.head_dim)
    if spec.rope_type != "default":
        tensors["rope_freqs.weight"] = rotary_factors(spec)
    keys = layer_keys(spec, num_layers=spec.num_layers) | {"vocab_size": spec.vocab_size}
    return {ARCHITECTURE: architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}, tensors


def check_family(spec: TargetSpec, window: int | None) -> None:
    if spec.model_type not in ARCHITECTURES or spec.rope_type not in ROTARY_TYPES or window is not None:
        raise ValueError(
            f"with_target=true cannot write a target of model_type={spec.model_type}, rope_type={spec.rope_type}, "
            f"sliding_window={window}, only {', '.join(ARCHITECTURES)} with {', '.join(ROTARY_TYPES)} positions and no "
            "window; use llama.cpp's convert_hf_to_gguf.py"
        )


def tokenizer_keys(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any] | None:
    """A byte-level BPE tokenizer as GGUF keys; None for one of another kind.

    Embedding rows without a token get a stand-in of the type `unused`.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    split = split_name(parts.get("pre_tokenizer") or {})
    if parts["model"]["type"] != "BPE" or split is None:
        return None
    added = {token["id"]: token for token in parts["added_tokens"]}
    strings = {index: token for token, index in parts["model"]["vocab"].items()}
    strings |= {index: token["content"] for index, token in added.items()}
    types = [TokenType.NORMAL if index in strings else TokenType.UNUSED for index in range(vocab_size)]
    for index, token in added.items():
        types[index] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]]
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    keys = {
        TOKENIZER: "gpt2",
        "tokenizer.ggml.pre": split,
        TOKENS: distinct_tokens([strings.get(index) for index in range(vocab_size)], vocab_size),
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,  # a chat template writes it where it belongs
        **{f"tokenizer.ggml.{name}_token_id": index for name, index in special.items() if index is not None},
    }
    template = tokenizer.chat_template
    return keys | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def drafter_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
    """Of a drafter's file: the target's tokenizer, or where GGUF keys of it are not known here its token strings."""
    keys = tokenizer_keys(tokenizer, vocab_size)
    if keys is not None:
        return keys
    tokens = tokenizer.convert_ids_to_tokens(list(range(vocab_size)))
    assert isinstance(tokens, list)
    return {TOKENIZER: "llama", TOKENS: distinct_tokens(tokens, vocab_size)}


def split_name(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of what the text is split by, from tokenizer.json's own description."""
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if any(step.get("type") == "Digits" for step in steps):
        return "smollm"
    for step in steps:
        pattern = (step.get("pattern") or {}).get("Regex", "")
        if named := next((name for part, name in SPLITS.items() if part in pattern), None):
            return named
    return "gpt-2" if any(step.get("type") == "ByteLevel" and step.get("use_regex") for step in steps) else None
