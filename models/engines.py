"""What the config files of serving engines say of a drafter, and what no engine can serve.

Read in the sources of vLLM 0.32 and 0.33, SGLang 0.5.23 and speculators 0.9. Engines fill a gap each in its own way, so
everything that they could take for something else is written: the slot layout, causality, both spellings of the rotary
parameters. Layers are ids of outputs (`target_layer_ids`, ours) or counts of layers passed, one more (`aux` names; in
`eagle_config` only SGLang means outputs).
"""

from collections.abc import Mapping
from typing import Any

import torch

from models.base import Drafter, Engine, Serving, SlotLayout
from models.block import BlockDrafter
from models.layer_styles import LayerStyle
from models.spec import TargetSpec

MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
SPECULATORS_VERSION = "0.9.0"  # whose fields these are
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
# Families (model_type) of targets that an engine runs but does not read hidden states out of.
NOT_READ_OUT = {
    Engine.vllm: ("gemma3_text",),
    Engine.speculators: ("gemma3_text",),  # served by vLLM
    Engine.sglang: ("qwen2", "gemma3_text"),
}


# ---- sizes


def layer_fields(spec: TargetSpec, model_type: str, *, num_layers: int) -> dict[str, Any]:
    """Sizes of a drafter's layers, as a Hugging Face config of Llama or Qwen3 names them."""
    rope = dict(spec.rope_parameters)
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    fields = {
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
        "model_type": model_type,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "pad_token_id": spec.pad_token_id,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": rope,  # transformers 5
        "rope_theta": rope["rope_theta"],  # transformers 4, which would otherwise use 10,000
        "rope_scaling": None if spec.rope_type == "default" else scaled,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }
    return fields if model_type == "llama" else fields | {"max_window_layers": 28} | window_fields(num_layers, None)


def window_fields(num_layers: int, window: int | None) -> dict[str, Any]:
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "layer_types": [kind] * num_layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def gemma4_fields(spec: TargetSpec, *, num_layers: int) -> dict[str, Any]:
    """Sizes of layers in the style of Gemma 4's global attention, as its text config names them."""
    fields = layer_fields(spec, "gemma4_text", num_layers=num_layers)
    for name in ("hidden_act", "rope_theta", "rope_scaling", "max_window_layers", "use_sliding_window"):
        del fields[name]
    return fields | {
        "attention_k_eq_v": spec.keys_are_values,
        "enable_moe_block": False,
        "final_logit_softcapping": spec.logit_softcap,
        "global_head_dim": spec.global_head_dim,
        "hidden_activation": spec.hidden_act,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": spec.num_global_kv_heads,
        "rope_parameters": {
            "full_attention": dict(spec.rope_parameters),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},  # of no layer here
        },
        "sliding_window": 1024,  # likewise
    }


# ---- refusals


def check_served(spec: TargetSpec, engine: Engine) -> None:
    """Raises ValueError naming what of the target `engine` would leave out of its drafter."""
    partial = spec.rope_parameters.get("partial_rotary_factor", 1)
    problems = [
        (
            spec.model_type in NOT_READ_OUT.get(engine, ()),
            f"model_type={spec.model_type}",
            "one that it reads out",
        ),
        (spec.embedding_scale != 1, f"embedding_scale={spec.embedding_scale}", "1"),
        (spec.logit_softcap is not None, f"logit_softcap={spec.logit_softcap}", "none"),
        (partial != 1, f"partial_rotary_factor={partial}", "1"),
        (spec.hidden_act != "silu" and engine is not Engine.deepspec, f"hidden_act={spec.hidden_act}", "silu"),
    ]
    for wrong, what, need in problems:
        if wrong:
            raise refusal(engine, f"target {what}", f"it needs {need}; choose another engine, or another target")


def check_style(style: LayerStyle, spec: TargetSpec, engine: Engine, *, served: tuple[Engine, ...]) -> None:
    """Raises ValueError where `engine` is not among those that know the drafter in this style."""
    if style is LayerStyle.qwen3:
        check_served(spec, engine)
    elif engine not in served:
        raise refusal(engine, f"model.layer_style={style}", f"only {' and '.join(served)} know such layers")


def refusal(engine: Engine, what: str, why: str) -> ValueError:
    return ValueError(f"engine={engine} cannot write a drafter with {what}: {why}")


# ---- speculators


def as_speculators(
    kind: str, layers: Mapping[str, Any], own: Mapping[str, Any], *, num_draft_tokens: int
) -> dict[str, Any]:
    """config.json of the speculators format, but for the verifier, which whoever knows the target fills in: `layers`
    from `layer_fields`, `own` of the algorithm."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "architectures": [CLASSES[kind]],
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
        },
        "transformer_layer_config": dict(layers),
        "target_hidden_size": layers["hidden_size"],
        "tie_word_embeddings": False,
        **own,
    }


# ---- block drafters


def block_serving(drafter: BlockDrafter, engine: Engine, heads: Mapping[str, bool | int | str] | None) -> Serving:
    """A block drafter for `engine`, any but gguf. `heads`: flat fields of a DSpark's heads, None = a DFlash.

    Engines have anchor_first only in their DSpark, and without a Markov head it fails there: such a drafter gets a zero
    one of rank 1, which changes no draft. Raises ValueError on what the engine cannot say or serve.
    """
    spec, in_place, style = drafter.spec, drafter.slot_layout is SlotLayout.in_place, drafter.config.layer_style
    check_style(style, spec, engine, served=(Engine.deepspec, Engine.vllm))
    if style is LayerStyle.gemma4 and drafter.config.sliding_window is not None:
        raise refusal(engine, "model.layer_style=gemma4 and a sliding window", "such layers are global; use null")
    if style is LayerStyle.gemma4 and engine is Engine.vllm and not spec.keys_are_values:
        what = "model.layer_style=gemma4 for a target whose keys are not its values (attention_k_eq_v=false)"
        raise refusal(engine, what, "vLLM's loader demands that they are")
    tensors, fields = dict(drafter.state_dict()), block_fields(drafter)
    fields["architectures"] = ["Qwen3DSparkModel" if style is LayerStyle.qwen3 else "Gemma4DSparkModel"]
    if engine is Engine.deepspec:
        return _deepspec(drafter, fields, heads)
    if heads is None and in_place and style is LayerStyle.qwen3:
        return _dflash(drafter, fields, engine, kind="dflash", sizes={}, tensors=tensors)
    if heads is None or not heads["markov_rank"]:
        heads = {
            "enable_confidence_head": False,
            **(heads or {}),
            "confidence_head_with_markov": False,
            "markov_rank": 1,
            "markov_head_type": "vanilla",
        }
        tensors |= {name: torch.zeros(spec.vocab_size, 1) for name in MARKOV}
    if engine is Engine.vllm and heads["markov_head_type"] != "vanilla":
        raise refusal(
            engine,
            f"model.markov_head={heads['markov_head_type']}",
            "vLLM has only vanilla ones; train with model.markov_head=vanilla",
        )
    own = {"draft_vocab_size": spec.vocab_size, "mask_token_id": drafter.mask_token_id, **heads}
    if engine is Engine.speculators:
        return Serving(_speculators_block(drafter, "dspark", fields, own), tensors | frozen_copies(drafter))
    own |= {
        "block_size": drafter.num_draft_tokens,  # proposals, in either layout
        "sample_from_anchor": not in_place,
        "dspark_bonus_anchor": in_place,
        "target_layer_ids": list(drafter.target_layer_ids),
    }
    if engine is Engine.sglang:  # whose parsers look here first, and whose heads only at the root
        nested = {name: value for name, value in own.items() if name != "draft_vocab_size"}
        return Serving(fields | own | {"dflash_config": {**nested, "num_target_layers": spec.num_layers}}, tensors)
    own["dflash_config"] = {"causal": False}
    return Serving(fields | own, tensors | frozen_copies(drafter))


def frozen_copies(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {"embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}


def dflash2_serving(
    drafter: BlockDrafter, engine: Engine, own: Mapping[str, int], tensors: Mapping[str, torch.Tensor]
) -> Serving:
    """A DFlash 2 with `own` sizes; `tensors` under published names."""
    check_served(drafter.spec, engine)
    if engine not in (Engine.vllm, Engine.sglang, Engine.speculators):
        raise refusal(engine, "a path selector", "only vllm, sglang and speculators know DFlash 2")
    return _dflash(drafter, block_fields(drafter), engine, kind="dflash2", sizes=own, tensors=tensors)


def block_fields(drafter: BlockDrafter) -> dict[str, Any]:
    """Sizes of the layers, windows, causality, and what is fed to them."""
    spec, num_layers = drafter.spec, drafter.config.num_layers
    if drafter.config.layer_style is LayerStyle.gemma4:
        fields = gemma4_fields(spec, num_layers=num_layers)
    else:
        fields = layer_fields(spec, "qwen3", num_layers=num_layers)
        fields |= window_fields(num_layers, drafter.config.sliding_window)
    return fields | {"is_causal": False, "num_target_layers": spec.num_layers, "target_hidden_size": spec.hidden_size}


def _dflash(
    drafter: BlockDrafter,
    fields: Mapping[str, Any],
    engine: Engine,
    *,
    kind: str,
    sizes: Mapping[str, int],
    tensors: Mapping[str, torch.Tensor],
) -> Serving:
    """in_place without heads: z-lab's own layout, whose engines lend embedding and head."""
    own = {"draft_vocab_size": drafter.spec.vocab_size, "mask_token_id": drafter.mask_token_id}
    if engine is Engine.speculators:
        return Serving(
            _speculators_block(drafter, kind, fields, {**own, **sizes}), {**tensors, **frozen_copies(drafter)}
        )
    own |= {"block_size": drafter.num_slots, "target_layer_ids": list(drafter.target_layer_ids)}
    nested = {**own, **sizes, "causal": False, "sample_from_anchor": False}
    nested["num_target_layers"] = drafter.spec.num_layers
    config = {**fields, **own, "architectures": [CLASSES[kind]], "sample_from_anchor": False}
    return Serving(config | {"dflash_config": nested}, dict(tensors))


def _speculators_block(
    drafter: BlockDrafter, kind: str, fields: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    apart = ("architectures", "num_target_layers", "target_hidden_size")
    layers = {key: value for key, value in fields.items() if key not in apart}
    own = {
        **own,
        "aux_hidden_state_layer_ids": [index + 1 for index in drafter.target_layer_ids],
        "block_size": drafter.num_slots,
        "sample_from_anchor": drafter.slot_layout is SlotLayout.anchor_first,
        # false, that project's default, would make vLLM run every layer causal, full attention or not
        "sliding_window_non_causal": True,
        "num_target_layers": drafter.spec.num_layers,
    }
    return as_speculators(kind, layers, own, num_draft_tokens=drafter.num_draft_tokens)


def _deepspec(
    drafter: BlockDrafter, fields: Mapping[str, Any], heads: Mapping[str, bool | int | str] | None
) -> Serving:
    """The reference's own file, for its evaluator. It has one layout and no window."""
    if drafter.slot_layout is not SlotLayout.anchor_first:
        raise ValueError("the deepspec format has no slot_layout=in_place; train with model.slot_layout=anchor_first")
    if drafter.config.sliding_window is not None:
        raise ValueError(
            f"the deepspec format has no sliding window (got {drafter.config.sliding_window}); "
            "train with model.sliding_window=null"
        )
    own = {
        "block_size": drafter.num_draft_tokens,
        "mask_token_id": drafter.mask_token_id,
        "num_anchors": 512,  # a training option that the reference requires at load; not used in decoding
        "sample_from_anchor": True,  # explicit: engines disagree on what its absence means
        "target_layer_ids": list(drafter.target_layer_ids),
        **(heads or {"markov_rank": 0, "enable_confidence_head": False}),
    }
    return Serving({**fields, **own}, {**drafter.state_dict(), **frozen_copies(drafter)})
