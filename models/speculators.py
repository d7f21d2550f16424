"""Configs in the format of the speculators project, put in the words of the formats that they share tensors with.

The drafter's sizes stand in `transformer_layer_config`; layers are counted as passed, one more than the id of the
output that is fed. DFlash and DSpark hold copies of the target's embedding and head, EAGLE-3 a copy of the embedding
and a head of its own.
"""

from collections.abc import Mapping
from typing import Any

LAYERS = "transformer_layer_config"


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or LAYERS in config


def as_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter as a DeepSpec or classic EAGLE-3 config. Raises ValueError on a kind that this project does not
    have, and where engines would fill a gap differently; KeyError on a missing field."""
    kind, layers = config["speculators_model_type"], config[LAYERS]
    if layers.get("rope_parameters") is None and layers.get("rope_theta") is None:
        raise ValueError(f"{LAYERS}: missing rope_parameters and rope_theta")
    own = {key: value for key, value in config.items() if key not in (LAYERS, "speculators_config", "model_type")}
    flat = {**layers, **own}
    if kind == "eagle3":
        return flat | _eagle3(config, layers)
    if kind in ("dflash", "dflash2", "dspark"):
        return flat | _block(config, layers)
    raise ValueError(f"speculators_model_type={kind} is not supported, only eagle3, dflash, dflash2 and dspark")


def _eagle3(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    drafts = _num_drafts(config)
    if drafts is None:
        raise ValueError("missing speculators_config.proposal_methods, which says how many tokens are drafted")
    size, whole = config.get("draft_vocab_size"), layers["vocab_size"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "ttt_length": drafts,
        "eagle_aux_hidden_state_layer_ids": _counts(config, "eagle_aux_hidden_state_layer_ids"),
        "norm_before_residual": config["norm_before_residual"],  # where it is absent engines differ
        "draft_vocab_size": None if size in (None, whole) else size,
    }


def _block(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """Without heads it is DFlash to DeepSpec as well."""
    size, whole = config.get("draft_vocab_size"), layers["vocab_size"]
    if size not in (None, whole):
        raise ValueError(
            f"draft_vocab_size={size} of {whole} tokens: block drafters of a reduced vocabulary are not supported"
        )
    in_place = not config["sample_from_anchor"]  # where it is absent engines differ
    kind = config["speculators_model_type"]
    if kind != "dspark" and not in_place:
        raise ValueError(f"speculators_model_type={kind} with sample_from_anchor=true is served by no engine")
    drafts, block_size = _num_drafts(config), config["block_size"]
    if drafts not in (None, block_size - in_place):
        raise ValueError(
            f"block_size={block_size} with sample_from_anchor={not in_place} drafts {block_size - in_place} tokens, "
            f"but speculators_config says {drafts}: one of the three is wrong"
        )
    found = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": block_size - in_place,  # of proposals
        "target_layer_ids": [count - 1 for count in _counts(config, "aux_hidden_state_layer_ids")],
        "is_causal": not config.get("sliding_window_non_causal", False),  # of sliding layers
    }
    if kind == "dflash":
        found |= {"markov_rank": 0, "enable_confidence_head": False}
    if kind == "dflash2":  # whose architecture counts the known token
        found |= {"architectures": ["DFlash2DraftModel"], "block_size": block_size}
    return found


def _num_drafts(config: Mapping[str, Any]) -> int | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    return methods[0]["speculative_tokens"] if methods else None


def _counts(config: Mapping[str, Any], key: str) -> list[int]:
    """Layers passed, in ascending order, as engines feed them."""
    if config.get(key) is None:
        raise KeyError(key)
    counts = list(config[key])
    if counts != sorted(set(counts)) or counts[0] < 1:
        raise ValueError(
            f"{key}={counts} must ascend from 1 or more: 0 is the embedding, and engines sort what they feed"
        )
    return counts
