"""GGUF files, which llama.cpp loads: a plain writer, and drafters in the shape of llama.cpp's architecture `dflash`.

What to write comes from `Drafter.serving("gguf")`; embedding and head are left out, since llama.cpp lends the target's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from torch import Tensor

from models.base import Drafter, Serving, SlotLayout
from models.block import BlockDrafter
from models.files import write_atomic
from models.layers import Rotary
from models.spec import TargetSpec

ARCHITECTURE, TOKENS = "general.architecture", "tokenizer.ggml.tokens"
_TENSOR_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
_SCALAR_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
_ITEM_TYPES = {int: GGUFValueType.INT32, str: GGUFValueType.STRING}
# Names inside a decoder layer: Hugging Face's and llama.cpp's. Both rotate halves here, so nothing is permuted.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Targets whose hidden states llama.cpp hands to a drafter; with others it ends its process at the first draft.
TARGETS = ("llama", "mistral", "qwen3", "qwen3_moe")
ROTARY_TYPES = ("default", "linear", "llama3")  # those that only divide frequencies


def write_gguf_drafter(drafter: Drafter, path: Path, *, dtype: torch.dtype, tokens: Sequence[str | None]) -> None:
    """Write one drafter file. `tokens`: the target's token strings by id; ids without one get a stand-in.

    A drafter that predicts from the anchor without a Markov head gets a zero one of rank 1. It changes no draft, and
    its name is what llama.cpp tells the slot layout by.
    """
    serving = drafter.serving("gguf")
    assert not serving.with_embedding, "llama.cpp takes embedding and head from the target"
    tensors = {serving.renames[name]: tensor for name, tensor in drafter.state_dict().items()}
    vocab_size = drafter.spec.vocab_size
    if serving.config["dflash.sample_from_anchor"] and "markov_w1.weight" not in tensors:
        tensors |= {name: torch.zeros(vocab_size, 1) for name in ("markov_w1.weight", "markov_w2.weight")}
    if drafter.spec.rope_parameters.get("rope_type", "default") != "default":
        tensors["rope_freqs.weight"] = rotary_factors(drafter.spec)
    write_gguf(path, {**serving.config, TOKENS: distinct_tokens(tokens, vocab_size)}, tensors, dtype=dtype)


def distinct_tokens(tokens: Sequence[str | None], vocab_size: int) -> list[str]:
    """`vocab_size` distinct strings, by id: a missing, empty or repeated one becomes a stand-in that names its id."""
    if len(tokens) > vocab_size:
        raise ValueError(f"{len(tokens)} token strings for a vocabulary of {vocab_size}")
    seen: set[str | None] = {None, ""}
    reserved, distinct = set(tokens), []
    for index in range(vocab_size):
        token = tokens[index] if index < len(tokens) else None
        if token is None or token in seen:
            token = f"[UNUSED{index}]"
            while token in reserved:
                token += "_"
        seen.add(token)
        distinct.append(token)
    return distinct


def rotary_factors(spec: TargetSpec) -> Tensor:
    """[head_dim / 2] what llama.cpp divides the plain rotary frequencies by, whatever the kind of scaling."""
    plain = {"rope_type": "default", "rope_theta": spec.rope_parameters["rope_theta"]}
    return Rotary(replace(spec, rope_parameters=plain)).inv_freq / Rotary(spec).inv_freq


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Write a GGUF file, re-read it and compare every key and tensor; only then does `path` exist.

    bool, int (uint32), float (float32), str, list[int] (int32) and list[str] are what metadata may hold. Matrices are
    written as `dtype`, vectors (norms, biases) always as float32.
    """
    if dtype not in _TENSOR_TYPES:
        raise ValueError(f"dtype={dtype} cannot be written to GGUF; choose float32, bfloat16 or float16")
    arrays = {name: _array(tensor, dtype if tensor.ndim > 1 else torch.float32) for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        writer = GGUFWriter(temporary, metadata[ARCHITECTURE])
        for key, value in metadata.items():
            if key != ARCHITECTURE:  # GGUFWriter's own
                value_type, item_type = _types(key, value)
                writer.add_key_value(key, value, value_type, item_type)
        for name, (array, tensor_type) in arrays.items():
            writer.add_tensor(name, array, raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        _compare(temporary, metadata, arrays)

    write_atomic(path, write)


def dflash_backbone(drafter: BlockDrafter) -> Serving:
    """Metadata and tensor names of a block drafter's backbone; heads are added by the drafter.

    An entry k of target_layers means the stream that enters layer k, which is the output of our layer k - 1.
    Raises ValueError on a target or an option that llama.cpp cannot serve.
    """
    check_backbone(drafter)
    spec, in_place = drafter.spec, drafter.slot_layout is SlotLayout.in_place
    own = {
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": drafter.config.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "attention.causal": False,
        "rope.freq_base": float(spec.rope_parameters["rope_theta"]),
        "rope.dimension_count": spec.head_dim,
        "block_size": drafter.num_draft_tokens + in_place,
        "sample_from_anchor": not in_place,
        "target_layers": [index + 1 for index in drafter.target_layer_ids],
    }
    metadata = {
        ARCHITECTURE: "dflash",
        "tokenizer.ggml.model": "llama",  # any type that keeps the mask id: drafts are token ids, not text
        "tokenizer.ggml.mask_token_id": drafter.mask_token_id,
        **{f"dflash.{key}": value for key, value in own.items()},
    }
    renames = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    for index in range(drafter.config.num_layers):
        renames |= {f"layers.{index}.{ours}": f"blk.{index}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    renames = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in renames.items()}
    return Serving(config=metadata, renames=renames, with_embedding=False)


def check_backbone(drafter: BlockDrafter) -> None:
    """Raises ValueError naming the first thing that llama.cpp would refuse, abort on or silently compute otherwise."""
    spec, layer_ids = drafter.spec, list(drafter.target_layer_ids)
    last, rope_type = spec.num_layers - 1, spec.rope_parameters.get("rope_type", "default")
    window, partial = drafter.config.sliding_window, spec.rope_parameters.get("partial_rotary_factor", 1)
    problems = [
        (last in layer_ids, f"target_layer_ids={layer_ids}", f"it needs layers below {last}: train with such layers"),
        (
            spec.model_type not in TARGETS,
            f"target model_type={spec.model_type}",
            f"it needs one of {', '.join(TARGETS)}",
        ),
        (window is not None, f"model.sliding_window={window}", "it needs null"),
        (partial != 1, f"target partial_rotary_factor={partial}", "it needs 1"),
        (spec.hidden_act != "silu", f"target hidden_act={spec.hidden_act}", "it needs silu"),
        (rope_type not in ROTARY_TYPES, f"target rope_type={rope_type}", f"it needs one of {', '.join(ROTARY_TYPES)}"),
        (spec.embedding_scale != 1, f"target embedding_scale={spec.embedding_scale}", "it needs 1"),
        (spec.logit_softcap is not None, f"target logit_softcap={spec.logit_softcap}", "it needs none"),
    ]
    for wrong, what, need in problems:
        if wrong:
            raise ValueError(f"engine=gguf cannot write a drafter with {what}: {need}, or choose engine=deepspec")


def _types(key: str, value: Any) -> tuple[GGUFValueType, GGUFValueType | None]:
    if isinstance(value, list):
        assert value and len({type(item) for item in value}) == 1, f"{key}: {value} is no list of one type"
        return GGUFValueType.ARRAY, _ITEM_TYPES[type(value[0])]
    return _SCALAR_TYPES[type(value)], None


def _array(tensor: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, GGMLQuantizationType]:
    """numpy has no bfloat16: its bytes are handed over as they are."""
    assert tensor.is_floating_point(), tensor.dtype
    tensor = tensor.detach().to("cpu", dtype).contiguous()
    raw = tensor.view(torch.uint8) if dtype is torch.bfloat16 else tensor
    return raw.numpy(), _TENSOR_TYPES[dtype]


def _compare(
    path: Path, metadata: Mapping[str, Any], arrays: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]]
) -> None:
    """Raises AssertionError naming the first key or tensor that is not as it was handed over, bit by bit."""
    reader = GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(fields) == set(metadata), f"{path}: keys {sorted(set(fields) ^ set(metadata))}"
    for key, value in metadata.items():
        expected = float(np.float32(value)) if isinstance(value, float) else value
        value_types = [value_type for value_type in _types(key, value) if value_type is not None]
        same = fields[key].types == value_types and fields[key].contents() == expected
        assert same, f"{key}={value} changed on the way to {path}"
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert set(found) == set(arrays), f"{path}: tensors {sorted(set(found) ^ set(arrays))}"
    for name, (array, tensor_type) in arrays.items():
        same = found[name].tensor_type == tensor_type and found[name].data.shape == array.shape
        assert same and found[name].data.tobytes() == array.tobytes(), f"{name} changed on the way to {path}"
