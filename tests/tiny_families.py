"""Random tiny targets of several model families, for tests that need no trained one."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models.spec import TargetSpec
from models.target import Target

VOCAB_SIZE, WINDOW = 50, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,  # far from zero, so that a wrong position or mask shows
}


KINDS = ["sliding_attention", "full_attention"] * 2
GEMMA: dict[str, Any] = {**SIZES, "sliding_window": WINDOW, "layer_types": KINDS, "final_logit_softcapping": 5.0}
GLOBAL_HEAD_DIM = 16
GEMMA4: dict[str, Any] = {
    **GEMMA,
    "global_head_dim": GLOBAL_HEAD_DIM,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
SIGLIP = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
}
MEDIA_TOKENS = {  # outside the vocabulary, so that no random text holds one
    name: VOCAB_SIZE + index
    for index, name in enumerate(
        ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id")
    )
}


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))


def qwen2() -> nn.Module:
    """Biases in q, k and v; the upper two layers have a window."""
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **window))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral() -> nn.Module:
    """A window in every layer, and no layer types in the config."""
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma3() -> nn.Module:
    """Two kinds of layers with rotary bases of their own, scaled embeddings and soft-capped logits."""
    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA))


def gemma3_multimodal() -> nn.Module:
    """transformers leaves the cap out here, and no released checkpoint asks for one."""
    text = {**GEMMA, "model_type": "gemma3_text", "final_logit_softcapping": None}
    config = Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=VOCAB_SIZE)
    return Gemma3ForConditionalGeneration(config)


def gemma4() -> nn.Module:
    """As Gemma 3, and full-attention layers have heads of another size and number whose keys are their values."""
    return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=0))


def gemma4_shared() -> nn.Module:
    """The small ones: a second embedding feeds every layer, and the upper layers have no keys of their own."""
    inputs = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB_SIZE}
    return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA4, **inputs, num_kv_shared_layers=2, use_double_wide_mlp=True))


def gemma4_moe() -> nn.Module:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA4, **experts, hidden_size_per_layer_input=0))


def gemma4_multimodal() -> nn.Module:
    text = {**GEMMA4, "hidden_size_per_layer_input": 0, "model_type": "gemma4_text"}
    vision = {key: value for key, value in SIGLIP.items() if key != "image_size"} | {"head_dim": 4}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **MEDIA_TOKENS)
    return Gemma4ForConditionalGeneration(config)


def gemma4_unified() -> nn.Module:
    text = {**GEMMA4, "model_type": "gemma4_unified_text"}
    vision = {"mm_embed_dim": 8, "mm_posemb_size": 4, "patch_size": 2, "output_proj_dims": 32}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None, **MEDIA_TOKENS)
    return Gemma4UnifiedForConditionalGeneration(config)


FAMILIES = {
    make.__name__: make
    for make in (
        qwen3,
        qwen3_moe,
        qwen2,
        llama,
        mistral,
        gemma3,
        gemma3_multimodal,
        gemma4,
        gemma4_shared,
        gemma4_moe,
        gemma4_multimodal,
        gemma4_unified,
    )
}


@cache
def build(family: str) -> Target:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    roughen(model)
    return Target(model, TargetSpec.from_config(model.config), (0, 2))


def roughen(model: nn.Module) -> None:
    """Norms, biases and layer scales start as ones and zeros, which hide an implementation that leaves them out."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("norm.weight", ".bias", "layer_scalar")):
            tensor.data += 0.3 * torch.rand_like(tensor)


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def check_close(ours: Tensor, reference: Tensor) -> None:
    """To 1e-5 of the largest value: float32 sums in another order, through four layers."""
    assert ours.shape == reference.shape
    error, scale = (ours - reference).abs().max().item(), reference.abs().max().item()
    assert error < 1e-5 * scale, f"{error:.1e} of {scale:.1e}"
