"""What fields of config files must be, so that a damaged one is named and never taken for another value."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in value)


KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: is_whole(value) and value > 0,
    "a whole number": lambda value: is_whole(value) and value >= 0,
    "a number above 0": lambda value: (is_whole(value) or isinstance(value, float)) and value > 0,
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "an object": lambda value: isinstance(value, Mapping),
    "a list of whole numbers": lambda value: is_list_of(value, is_whole),
    "a list of texts": lambda value: is_list_of(value, lambda item: isinstance(item, str)),
    "an activation of transformers": lambda value: isinstance(value, str) and value in ACT2FN,
    "a type of rotary positions": lambda value: isinstance(value, str) and value in {"default", *ROPE_INIT_FUNCTIONS},
    "vanilla, gated or rnn": lambda value: value in ("vanilla", "gated", "rnn"),
    "a float type": lambda value: value in ("float32", "bfloat16", "float16", "auto"),
    "a list of objects": lambda value: is_list_of(value, lambda item: isinstance(item, Mapping)),
    "full_attention or sliding_attention, layer by layer": lambda value: is_list_of(
        value, lambda item: item in ("full_attention", "sliding_attention")
    ),
}
# Names in the files of all formats, ours too; ? = null says what absence says.
FIELDS = {
    "a whole number above 0": "block_size draft_num_hidden_layers draft_vocab_size? global_head_dim? head_dim "
    "hidden_size intermediate_size max_position_embeddings num_attention_heads num_aux_hidden_states? num_draft_tokens "
    "num_fused_layers? sampled_vocabulary? conv_kernel_size conv_group_size selector_rank selector_top_k "
    "num_global_key_value_heads? num_global_kv_heads num_heads num_hidden_layers num_key_value_heads num_kv_heads "
    "num_layers num_target_layers? sliding_window? speculative_tokens target_hidden_size? ttt_length vocab_size",
    "a whole number": "mask_token_id markov_rank",
    "a number above 0": "embedding_scale final_logit_softcapping? initializer_range logit_softcap? rms_norm_eps "
    "rope_theta? step_loss_decay",
    "true or false": "attention_bias attention_k_eq_v causal confidence_head_with_markov dspark_bonus_anchor "
    "enable_confidence_head fc_norm? is_causal? keys_are_values norm_before_fc norm_before_residual norm_output "
    "sample_from_anchor sliding_window_non_causal tie_embeddings use_aux_norm use_sliding_window?",
    "a text": "drafter model_type speculators_model_type",
    "an object": "dflash_config? eagle_config? loss rope_parameters? rope_scaling? spec speculators_config target "
    "transformer_layer_config",
    "a list of whole numbers": "aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids? eos_token_ids "
    "target_layer_ids",
    "a list of texts": "architectures",
    "vanilla, gated or rnn": "markov_head markov_head_type",
    "a float type": "dtype? torch_dtype?",
    "a list of objects": "proposal_methods",
    "an activation of transformers": "hidden_act hidden_activation",
    "a type of rotary positions": "rope_type",
    "full_attention or sliding_attention, layer by layer": "layer_types?",
}
EXPECTED = {name: kind for kind, names in FIELDS.items() for name in names.split()}


def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first field, here or in an object inside, that cannot be what it must be."""
    for name, value in config.items():
        kind = EXPECTED.get(name) or ("anything" if value is None else EXPECTED.get(f"{name}?"))
        if kind in KINDS and not KINDS[kind](value):
            raise ValueError(f"{name}={value!r} must be {kind}")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                check_fields(inner)
