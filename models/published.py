"""Checkpoints of other projects, told apart by what their config.json names.

DeepSpec: Qwen3DSparkModel (DSpark; with both heads off what it calls DFlash) and Qwen3Eagle3Model, and the same of
Gemma4, with copies of the target's embedding and head inside. z-lab: DFlashDraftModel, neither inside. Classic EAGLE-3
(SafeAILab, SpecForge): LlamaForCausalLMEagle3, one `midlayer`, a head of its own. speculators: the same tensors under a
config of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from models.base import Drafter, SlotLayout
from models.block import BlockConfig
from models.dflash import DFlash, DFlashConfig
from models.dflash2 import Codebooks, DFlash2, DFlash2Config, Gold
from models.dspark import DSpark, DSparkConfig, MarkovHeadType
from models.eagle3 import Eagle3, Eagle3Config
from models.engines import MARKOV
from models.fields import check_fields
from models.layer_styles import LayerStyle
from models.losses import LossWeights
from models.spec import TargetSpec, spread_layer_ids
from models.speculators import as_published, is_speculators

# Sizes that transformers would fill with some model's values if they were absent; the last of one family only.
SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES += ("rms_norm_eps", "max_position_embeddings")
OWN_SIZES = {
    "qwen3": ("head_dim", "hidden_act"),
    "gemma4_text": ("head_dim", "hidden_activation", "attention_k_eq_v", "rope_parameters", "layer_types"),
}


# Of dtypes that stand for each other in files.
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64), (torch.int64, torch.int32)


@dataclass(frozen=True)
class Published:
    """A drafter built from a public checkpoint, its tensors under our names, and the matrices that came with it."""

    drafter: Drafter
    tensors: dict[str, Tensor]
    embedding: Tensor | None = None  # [V, D]
    head: Tensor | None = None  # [V, D] the target's


def read_published(config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetSpec | None) -> Published:
    """Build the drafter of a public config. `target` gives the stop tokens, and its number of layers where the config
    is silent.

    Raises ValueError on an unknown architecture, a missing field, and what this project cannot run.
    """
    check_fields(config)
    architecture = known_architecture(config)
    if architecture is None:
        raise ValueError(
            "neither format_version (ours) nor speculators_model_type nor a known architecture "
            f"({', '.join(READERS)}); got architectures={config.get('architectures')}"
        )
    try:
        if is_speculators(config):
            config = as_published(config)
            architecture = config["architectures"][0]
        return READERS[architecture](config, tensors, _spec(config, target))
    except KeyError as error:
        raise ValueError(f"missing {error}") from error


def known_architecture(config: Mapping[str, Any]) -> str | None:
    """Of a drafter, or the format that says its kind elsewhere."""
    if is_speculators(config):
        return "speculators"
    return next((name for name in config.get("architectures") or [] if name in READERS), None)


def _spec(config: Mapping[str, Any], target: TargetSpec | None) -> TargetSpec:
    """The sizes of the drafter's own layers, which the config gives as those of a target."""
    model_type = config.get("model_type")
    if missing := [field for field in (*SIZES, *OWN_SIZES.get(str(model_type), ())) if field not in config]:
        raise ValueError(f"missing {', '.join(missing)}")
    config = {key: value for key, value in config.items() if (key, value) != ("rope_theta", None)}
    if model_type in OWN_SIZES and "rope_parameters" not in config and "rope_theta" not in config:
        raise ValueError("missing rope_parameters and rope_theta")
    num_layers = config.get("num_target_layers") or (target.num_layers if target else None)
    if num_layers is None:
        raise ValueError("missing num_target_layers (the number of layers of the target)")
    if config.get("target_hidden_size", config["hidden_size"]) not in (None, config["hidden_size"]):
        raise ValueError(
            f"target_hidden_size={config['target_hidden_size']}, the drafter's hidden_size={config['hidden_size']}: "
            "another width than the target's is not supported"
        )
    # Without a stop token in the file transformers would take Llama's 2 for one, and chains would end behind it.
    own = {"eos_token_id": None, **config}
    if model_type != "gemma4_text":  # whose kinds of layers have sizes of their own
        own |= {"num_hidden_layers": num_layers, "layer_types": None}
    try:
        built = AutoConfig.for_model(**own)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"model_type={model_type}: {' '.join(str(error).split())[:300]}") from error
    spec = replace(TargetSpec.from_config(built), num_layers=num_layers)
    return spec if target is None else replace(spec, eos_token_ids=target.eos_token_ids)


def misfit(name: str, found: Tensor, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    """In words where a tensor of a file cannot be one of such shape and kind. Any whole float will do for a float;
    8 bits mean something only with their scales."""
    if list(found.shape) != list(shape):
        return f"{name} has shape {list(found.shape)}, expected {list(shape)}"
    wanted = next((kind for kind in KINDS if dtype in kind), (dtype,))
    if found.dtype not in wanted:
        return f"{name} is {found.dtype}, expected {' or '.join(map(str, wanted))}"
    return None


def _with_frozen_copies(drafter: Drafter, tensors: dict[str, Tensor]) -> Published:
    """Both or, for engines that lend the target's, neither."""
    rest = dict(tensors)
    embedding, head = rest.pop("embed_tokens.weight", None), rest.pop("lm_head.weight", None)
    if embedding is None and head is None:
        return Published(drafter, rest)
    if embedding is None or head is None:
        raise ValueError("of embed_tokens.weight and lm_head.weight one is missing: a checkpoint holds both or neither")
    shape = drafter.spec.vocab_size, drafter.spec.hidden_size
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    problems = [misfit(name, copy, shape, torch.float32) for name, copy in copies.items()]
    if found := [problem for problem in problems if problem is not None]:
        raise ValueError("; ".join(found))
    return Published(drafter, rest, embedding, head)


# ---- block drafters


def _read_dspark(config: Mapping[str, Any], tensors: dict[str, Tensor], spec: TargetSpec) -> Published:
    """Here block_size counts proposals, in either layout."""
    in_place = not config.get("sample_from_anchor", True)
    if config.get("dspark_bonus_anchor", in_place) != in_place:
        raise ValueError(
            f"sample_from_anchor={not in_place} and dspark_bonus_anchor={not in_place} contradict each other: one of "
            "them must be false"
        )
    rank, confidence = config["markov_rank"], config["enable_confidence_head"]
    if rank == 1 and _is_zero(tensors, MARKOV):  # what engines get that cannot do without one
        rank, tensors = 0, {name: tensor for name, tensor in tensors.items() if name not in MARKOV}
    options = _block_options(config, in_place=in_place, num_draft_tokens=config["block_size"])
    places = {"target_layer_ids": tuple(config["target_layer_ids"]), "mask_token_id": config["mask_token_id"]}
    if not rank and not confidence:
        return _with_frozen_copies(DFlash(DFlashConfig(**options), spec, **places), tensors)
    options |= {"decay": 4.0, "loss": LossWeights(cross_entropy=0.1, l1=0.9)}  # as published; the file is silent
    own = DSparkConfig(
        **options,
        markov_rank=rank,
        markov_head=MarkovHeadType(config.get("markov_head_type", "vanilla")),
        confidence=confidence,
        confidence_with_markov=config.get("confidence_head_with_markov", False) and rank > 0,
        confidence_weight=1.0,
    )
    return _with_frozen_copies(DSpark(own, spec, **places), tensors)


def _read_zlab(config: Mapping[str, Any], tensors: dict[str, Tensor], spec: TargetSpec) -> Published:
    merged = _merged(config, "DFlashDraftModel")
    own = DFlashConfig(**_block_options(merged, in_place=True, num_draft_tokens=merged["block_size"] - 1))
    layer_ids = merged.get("target_layer_ids") or spread_layer_ids(spec.num_layers, own.num_layers)
    return Published(
        DFlash(own, spec, target_layer_ids=tuple(layer_ids), mask_token_id=merged["mask_token_id"]), tensors
    )


def _merged(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """z-lab's fields in one place. Raises ValueError where they deny its one layout."""
    merged = {**config, **(config.get("dflash_config") or {})}
    if merged.get("sample_from_anchor"):
        raise ValueError(f"architecture {architecture} is in_place, but sample_from_anchor=true says anchor_first")
    return merged


def _style(config: Mapping[str, Any]) -> LayerStyle:
    return LayerStyle.gemma4 if config["model_type"] == "gemma4_text" else LayerStyle.qwen3


def _is_zero(tensors: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    return all(name in tensors and not tensors[name].any() for name in names)


def _read_dflash2(config: Mapping[str, Any], tensors: dict[str, Tensor], spec: TargetSpec) -> Published:
    """z-lab's layout with convolutions and a selector; in the speculators format with copies of the frozen matrices."""
    merged = _merged(config, "DFlash2DraftModel")
    for name, plain in (("output_multiplier", 1), ("input_embedding_scale", 1), ("final_logit_softcapping", 0)):
        if (merged.get(name) or plain) != plain:
            raise ValueError(f"{name}={merged[name]} of a DFlash 2 is not supported")
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    own = DFlash2Config(
        **_block_options(merged, in_place=True, num_draft_tokens=merged["block_size"] - 1),
        **{name: merged[name] for name in sizes},
        codebooks=Codebooks.tables,
        gold=Gold.inject,
        selector_weight=1.0,
    )
    places = {"target_layer_ids": tuple(merged["target_layer_ids"]), "mask_token_id": merged["mask_token_id"]}
    return _with_frozen_copies(DFlash2(own, spec, **places), tensors)


def _block_options(config: Mapping[str, Any], *, in_place: bool, num_draft_tokens: int) -> dict[str, Any]:
    """The fields of `BlockConfig`; loss options, which no file holds, as published for DFlash."""
    options = BlockConfig(
        num_layers=config["num_hidden_layers"],
        layer_style=_style(config),
        num_draft_tokens=num_draft_tokens,
        slot_layout=SlotLayout.in_place if in_place else SlotLayout.anchor_first,
        sliding_window=_window(config),
        decay=None,
        dpace_smoothing=None,
        loss=LossWeights(cross_entropy=1.0),
        sampled_vocabulary=None,
    )
    return dict(vars(options))


def _window(config: Mapping[str, Any]) -> int | None:
    """The window where all layers have one and look both ways inside a block; None = no window.

    Raises ValueError on what the reference runs otherwise: its sliding layers are causal unless a flag denies it.
    """
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ValueError(f"layer_types mixes {sorted(kinds)}: only drafters whose layers are all alike are supported")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        raise ValueError("layer_types has sliding_attention, but sliding_window or use_sliding_window denies it")
    if config.get("is_causal", config.get("causal", True)):
        raise ValueError(
            "sliding_attention layers without is_causal=false are causal inside a block, which is not supported"
        )
    return config["sliding_window"]


# ---- EAGLE-3


def _read_deepspec_eagle3(config: Mapping[str, Any], tensors: dict[str, Tensor], spec: TargetSpec) -> Published:
    _need_one_layer(config.get("draft_num_hidden_layers", 1))
    options = _eagle3_options(
        config, num_draft_tokens=config["ttt_length"], step_decay=config["step_loss_decay"], qk_norm=True
    )
    drafter = Eagle3(options, spec, target_layer_ids=tuple(config["target_layer_ids"]))
    return _with_frozen_copies(drafter, tensors)


def _read_classic_eagle3(config: Mapping[str, Any], tensors: dict[str, Tensor], spec: TargetSpec) -> Published:
    """`midlayer.` is the one layer; the head covers the draft vocabulary, which d2t (offsets) maps to the target's."""
    _need_one_layer(config.get("num_hidden_layers", 1))
    rest = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    embedding = rest.pop("embed_tokens.weight", None)
    if embedding is not None:
        shape = spec.vocab_size, spec.hidden_size
        if problem := misfit("embed_tokens.weight", embedding, shape, torch.float32):
            raise ValueError(problem)
    draft_size = config.get("draft_vocab_size") or spec.vocab_size
    if "d2t" not in rest and draft_size != spec.vocab_size:
        raise ValueError(f"draft_vocab_size={draft_size} of {spec.vocab_size} tokens, but no tensor d2t says which")
    if "d2t" in rest and "t2d" not in rest:
        if draft_size != spec.vocab_size and not rest["d2t"].any():
            raise ValueError(f"d2t is all zero, which would make the first {draft_size} tokens the draft vocabulary")
        rest["t2d"] = torch.isin(torch.arange(spec.vocab_size), rest["d2t"] + torch.arange(len(rest["d2t"])))
    elif "d2t" not in rest:
        rest.pop("t2d", None)
    options = _eagle3_options(
        config,
        num_draft_tokens=config.get("ttt_length", 7),
        qk_norm=config.get("model_type") == "qwen3",
        draft_vocab_size=draft_size if "d2t" in rest else None,
        own_head="lm_head.weight" in rest,
    )
    layer_ids = _classic_layer_ids(config, spec.num_layers)
    if config.get("num_aux_hidden_states") not in (None, len(layer_ids)):
        raise ValueError(
            f"num_aux_hidden_states={config['num_aux_hidden_states']}, but {len(layer_ids)} layers are fused"
        )
    drafter = Eagle3(options, spec, target_layer_ids=layer_ids)
    return Published(drafter, rest, embedding)


def _need_one_layer(num_layers: int) -> None:
    if num_layers != 1:
        raise ValueError(f"an EAGLE-3 drafter of {num_layers} layers is not supported, only one of 1 layer")


def _eagle3_options(config: Mapping[str, Any], **own: Any) -> Eagle3Config:
    nested = config.get("eagle_config") or {}
    options: dict[str, Any] = {
        "num_fused_layers": None,
        "step_decay": 0.8,
        "loss": LossWeights(soft_cross_entropy=1.0),
        "layer_style": _style(config),
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", nested.get("norm_before_fc", False)),
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        "norm_output": config.get("norm_output", False),
        "draft_vocab_size": None,
        "own_head": False,
        "sampled_vocabulary": None,
    }
    return Eagle3Config(**{**options, **own})


def _classic_layer_ids(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Fused layers as ids of outputs.

    `target_layer_ids` means outputs. A top-level `eagle_aux_hidden_state_layer_ids` counts the layers passed (vLLM,
    speculators, llama.cpp), one more than the output's id. The same name inside `eagle_config` means that in vLLM and
    outputs in SGLang; only both engines' defaults tell them apart. Without any, the paper's layers are taken.
    """
    key, outputs = "eagle_aux_hidden_state_layer_ids", (1, num_layers // 2 - 1, num_layers - 4)
    ids = (config.get("eagle_config") or {}).get(key)
    if "target_layer_ids" in config:
        given = list(config["target_layer_ids"])
        passed = [i + 1 for i in given]
        if config.get(key, passed) != passed or ids not in (None, given, passed):
            raise ValueError(
                f"target_layer_ids={given} (outputs) and {key}={config.get(key)} (layers passed, one more), in "
                f"eagle_config {ids}, contradict each other"
            )
        return tuple(given)
    if config.get(key):
        return tuple(i - 1 for i in config[key])
    if not ids or tuple(ids) in (outputs, tuple(i + 1 for i in outputs)):
        return outputs
    raise ValueError(
        f"eagle_config.{key}={ids} means layers passed to vLLM and layer outputs to SGLang: add target_layer_ids "
        "(0-based ids of the layers whose output is fused) to config.json"
    )


READERS: dict[str, Callable[[Mapping[str, Any], dict[str, Tensor], TargetSpec], Published]] = {
    "Qwen3DSparkModel": _read_dspark,
    "Gemma4DSparkModel": _read_dspark,
    "DFlashDraftModel": _read_zlab,
    "DFlash2DraftModel": _read_dflash2,
    "Qwen3Eagle3Model": _read_deepspec_eagle3,
    "Gemma4Eagle3Model": _read_deepspec_eagle3,
    "LlamaForCausalLMEagle3": _read_classic_eagle3,
    "Eagle3Qwen3ForCausalLM": _read_classic_eagle3,  # vLLM's, with norms on queries and keys
}
