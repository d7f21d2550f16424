"""GGUF files, which llama.cpp loads: a plain writer, and drafters as its architectures `dflash` and `eagle3`.

What to write comes from `Drafter.serving(Engine.gguf)`; embedding and head are left out where they are the target's,
which llama.cpp lends. An entry k of target_layers means the stream that enters layer k: the output of our layer k - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from torch import Tensor

from models.base import Drafter, Engine, Serving, SlotLayout
from models.block import BlockDrafter
from models.engines import check_served, refusal
from models.files import write_atomic
from models.layers import Rotary
from models.spec import TargetSpec

ARCHITECTURE, TOKENIZER, TOKENS = "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"
_TENSOR_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.int64: GGMLQuantizationType.I64,
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
BIASED = ("conf_proj",)
# Targets whose hidden states llama.cpp hands to a drafter; with others it ends its process at the first draft.
TARGETS = ("llama", "mistral", "qwen3", "qwen3_moe")
ROTARY_TYPES = ("default", "linear", "llama3")  # those that only divide frequencies


def write_gguf_drafter(
    drafter: Drafter, path: Path, *, dtype: torch.dtype, vocabulary: Mapping[str, Any] | None = None
) -> None:
    """Write one drafter file. `vocabulary`: the target's tokenizer as GGUF keys (models/gguf_target.py); None:
    stand-ins, which are all that llama.cpp needs, since drafts are token ids."""
    serving = drafter.serving(Engine.gguf)
    if vocabulary is None:
        vocabulary = {TOKENIZER: "llama", TOKENS: distinct_tokens((), drafter.spec.vocab_size)}
    tensors = serving.tensors
    if drafter.spec.rope_type != "default":
        tensors = {**tensors, "rope_freqs.weight": rotary_factors(drafter.spec)}
    write_gguf(path, {**vocabulary, **serving.config}, tensors, dtype=dtype)


def speculative_type(metadata: Mapping[str, Any]) -> str:
    """llama.cpp's --spec-type for a drafter file. Without it an EAGLE-3 drafts nothing; block drafters it tells apart
    by their Markov head."""
    if metadata[ARCHITECTURE] == "eagle3":
        return "draft-eagle3"
    return "draft-dspark" if metadata["dflash.sample_from_anchor"] else "draft-dflash"


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
    written as `dtype`, vectors (norms, biases) always as float32, token ids as int64.
    """
    if dtype not in _TENSOR_TYPES or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} cannot be written to GGUF; choose float32, bfloat16 or float16")
    arrays = {name: _array(tensor, _stored_as(tensor, dtype)) for name, tensor in tensors.items()}

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


def layer_keys(spec: TargetSpec, *, num_layers: int) -> dict[str, Any]:
    """Sizes of decoder layers under llama.cpp's names, without the architecture in front."""
    return {
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "rope.freq_base": float(spec.rope_parameters["rope_theta"]),
        "rope.dimension_count": spec.head_dim,
    }


def layer_names(num_layers: int) -> dict[str, str]:
    """Modules of decoder layers: our names and llama.cpp's."""
    return {
        f"layers.{index}.{ours}": f"blk.{index}.{theirs}"
        for index in range(num_layers)
        for ours, theirs in LAYER_NAMES.items()
    }


def renamed(tensors: Mapping[str, Tensor], modules: Mapping[str, str]) -> dict[str, Tensor]:
    """Every tensor under its module's other name. Raises ValueError where `modules` lacks one."""
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module not in modules or (kind == "bias" and modules[module] not in BIASED):
            raise ValueError(f"engine=gguf cannot write {name}: llama.cpp has no such tensor in layers of this kind")
        found[f"{modules[module]}.{kind}"] = tensor
    return found


def neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Rows [H*d, ...] of a projection to queries or keys, for attention that rotates neighbours instead of halves."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def dflash_file(drafter: BlockDrafter, heads: Mapping[str, str], own: Mapping[str, Any]) -> Serving:
    """A block drafter. `heads`: our modules beyond the backbone and llama.cpp's names; `own`: their keys.

    One that predicts from the anchor without a Markov head gets a zero one of rank 1. It changes no draft, and its name
    is what llama.cpp tells the slot layout by. Raises ValueError on what llama.cpp cannot serve.
    """
    layer_ids, window = list(drafter.target_layer_ids), drafter.config.sliding_window
    check_target(drafter.spec, layer_ids)
    if window is not None:
        raise refusal(Engine.gguf, f"model.sliding_window={window}", "it needs null, or choose another engine")
    spec, in_place = drafter.spec, drafter.slot_layout is SlotLayout.in_place
    keys = layer_keys(spec, num_layers=drafter.config.num_layers) | {
        "attention.causal": False,
        "block_size": drafter.num_draft_tokens + in_place,
        "sample_from_anchor": not in_place,
        "has_confidence_head": False,  # absent would mean true
        "target_layers": [index + 1 for index in layer_ids],
        **own,
    }
    modules = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    modules |= {**layer_names(drafter.config.num_layers), **heads}
    tensors = renamed(drafter.state_dict(), modules)
    if not in_place and "markov_w1.weight" not in tensors:
        tensors |= {name: torch.zeros(spec.vocab_size, 1) for name in ("markov_w1.weight", "markov_w2.weight")}
    metadata = {ARCHITECTURE: "dflash", "tokenizer.ggml.mask_token_id": drafter.mask_token_id}
    return Serving(metadata | {f"dflash.{key}": value for key, value in keys.items()}, tensors)


def pair_layer_file(
    spec: TargetSpec, layer_ids: tuple[int, ...], weights: Mapping[str, Tensor], own: Mapping[str, Any]
) -> Serving:
    """An EAGLE-3 drafter from its weights under published names; `own` are keys of its options. A reduced vocabulary is
    a list of token ids here, not of offsets, and positions rotate neighbours, not halves."""
    check_target(spec, list(layer_ids))
    keys = {
        **layer_keys(spec, num_layers=1),
        "target_hidden_size": spec.hidden_size,
        "target_layers": [index + 1 for index in layer_ids],
        **own,
    }
    modules = {"fc": "fc", "input_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output"}
    modules |= {**layer_names(1), "layers.0.hidden_norm": "blk.0.attn_norm_2"}
    tensors = renamed({name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")}, modules)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        tensors[name] = neighbours(tensors[name], spec.head_dim)
    if "d2t" in weights:
        tensors["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]), device=weights["d2t"].device)
    return Serving({ARCHITECTURE: "eagle3"} | {f"eagle3.{key}": value for key, value in keys.items()}, tensors)


def check_target(spec: TargetSpec, layer_ids: list[int]) -> None:
    """Raises ValueError naming the first thing that llama.cpp would refuse, abort on or silently compute otherwise."""
    last = spec.num_layers - 1
    problems = [
        (last in layer_ids, f"target_layer_ids={layer_ids}", f"layers below {last}: train with such layers"),
        (spec.model_type not in TARGETS, f"target model_type={spec.model_type}", f"one of {', '.join(TARGETS)}"),
        (
            spec.rope_type not in ROTARY_TYPES,
            f"target rope_type={spec.rope_type}",
            f"one of {', '.join(ROTARY_TYPES)}",
        ),
    ]
    for wrong, what, need in problems:
        if wrong:
            raise refusal(Engine.gguf, what, f"it needs {need}, or choose another engine")
    check_served(spec, Engine.gguf)


def _types(key: str, value: Any) -> tuple[GGUFValueType, GGUFValueType | None]:
    if isinstance(value, list):
        assert value and len({type(item) for item in value}) == 1, f"{key}: {value} is no list of one type"
        return GGUFValueType.ARRAY, _ITEM_TYPES[type(value[0])]
    return _SCALAR_TYPES[type(value)], None


def _stored_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.int64
    return dtype if tensor.ndim > 1 else torch.float32


def _array(tensor: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, GGMLQuantizationType]:
    """numpy has no bfloat16: its bytes are handed over as they are."""
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
