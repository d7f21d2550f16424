"""The sizes and conventions of a target that a drafter has to share, read from a Hugging Face config."""

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

NULLABLE = {"logit_softcap", "bos_token_id", "pad_token_id"}


@dataclass(frozen=True)
class TargetSpec:
    """What a drafter's backbone copies from its target. Saved with every checkpoint."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    global_head_dim: int  # of layers with global attention, where those have sizes of their own
    num_global_kv_heads: int
    keys_are_values: bool  # in such layers
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    logit_softcap: float | None
    embedding_scale: float
    tie_embeddings: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @staticmethod
    def from_config(config: PreTrainedConfig) -> "TargetSpec":
        """Takes the text part of a multimodal config. Raises ValueError on a config without the sizes of a decoder."""
        text = config.get_text_config(decoder=True)
        values = text.to_dict()
        missing = [key for key in ("vocab_size", "hidden_size", "num_hidden_layers") if not values.get(key)]
        if missing:
            raise ValueError(f"target config ({config.model_type}) has no {', '.join(missing)}: not a decoder LM")
        num_heads = values["num_attention_heads"]
        eos = values.get("eos_token_id")
        is_gemma = text.model_type.startswith("gemma")  # the only family whose embedding is scaled
        num_kv_heads = values.get("num_key_value_heads") or num_heads
        head_dim = values.get("head_dim") or values["hidden_size"] // num_heads
        of_global = global_layer(values)
        return TargetSpec(
            model_type=text.model_type,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            global_head_dim=of_global.get("head_dim") or head_dim,
            num_global_kv_heads=of_global.get("num_key_value_heads") or num_kv_heads,
            keys_are_values=bool(values.get("attention_k_eq_v")),
            hidden_act=values.get("hidden_act") or values.get("hidden_activation") or "silu",
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            max_position_embeddings=values["max_position_embeddings"],
            rope_parameters=rope_parameters(values),
            logit_softcap=values.get("final_logit_softcapping"),
            embedding_scale=values["hidden_size"] ** 0.5 if is_gemma else 1.0,
            # the head belongs to the outer model of a multimodal one, whose text part may say otherwise
            tie_embeddings=bool(config.to_dict().get("tie_word_embeddings")),
            initializer_range=values.get("initializer_range", 0.02),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (eos,)),
            pad_token_id=values.get("pad_token_id"),
        )

    @property
    def rope_type(self) -> str:
        return self.rope_parameters.get("rope_type", "default")

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "TargetSpec":
        expected = set(TargetSpec.__dataclass_fields__)
        if set(values) != expected:
            missing, extra = sorted(expected - set(values)), sorted(set(values) - expected)
            raise ValueError(f"checkpoint's target section: missing {missing}, unknown {extra}")
        if empty := sorted(key for key in expected - NULLABLE if values[key] is None):
            raise ValueError(f"checkpoint's target section: {', '.join(empty)} must not be null")
        if values["rope_parameters"].get("rope_theta") is None:
            raise ValueError("checkpoint's target section: rope_parameters has no rope_theta")
        return TargetSpec(**{**values, "eos_token_ids": tuple(values["eos_token_ids"])})


def global_layer(values: dict[str, Any]) -> dict[str, Any]:
    """What the first layer with global attention has in place of the sizes of all layers."""
    kinds = values.get("layer_types") or []
    own = {int(index): sizes for index, sizes in (values.get("per_layer_config") or {}).items()}  # "05" among 48
    return own.get(kinds.index("full_attention"), {}) if "full_attention" in kinds else {}


def rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of the full-attention layers; transformers 4 files keep some of them at top level.

    Raises ValueError where only other layers have positions, and on a base that is null.
    """
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    by_layer_type = {key: value for key, value in found.items() if isinstance(value, dict)}
    if by_layer_type and "full_attention" not in by_layer_type:
        raise ValueError(f"target config: rope_parameters={found} has no set for full_attention layers; not supported")
    found = by_layer_type.get("full_attention", found)
    if "rope_theta" in found and found["rope_theta"] is None:
        raise ValueError("rope_parameters: rope_theta must be a number above 0, got null")
    parameters = {"rope_type": found.get("type", "default"), "rope_theta": values.get("rope_theta") or 10000.0}
    if values.get("partial_rotary_factor") is not None:
        parameters["partial_rotary_factor"] = values["partial_rotary_factor"]
    return parameters | {key: value for key, value in found.items() if key != "type"}


def spread_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from the second to the third-to-last (DFlash section 3); one is the middle one."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def fused_layers(layer_ids: tuple[int, ...], count: int | None) -> tuple[int, ...]:
    """`count` of the target's feature layers, spread from the first to the last of them; None = all."""
    if count is None or count == len(layer_ids):
        return layer_ids
    if not 1 <= count < len(layer_ids):
        raise ValueError(
            f"model.num_fused_layers must be null or 1..{len(layer_ids)} of the target's {list(layer_ids)}, got {count}"
        )
    if count == 1:
        return (layer_ids[len(layer_ids) // 2],)
    return tuple(layer_ids[round(i * (len(layer_ids) - 1) / (count - 1))] for i in range(count))
