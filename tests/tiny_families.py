"""Random tiny targets of several model families, for tests that need no trained one."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.spec import TargetSpec
from models.target import ATTENTION, Target

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


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral() -> nn.Module:
    """A window in every layer, and no layer types in the config."""
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma3() -> nn.Module:
    """Two kinds of layers with rotary bases of their own, scaled embeddings and soft-capped logits."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=kinds, final_logit_softcapping=5.0)
    return Gemma3ForCausalLM(config)


FAMILIES = {"qwen3": qwen3, "llama": llama, "mistral": mistral, "gemma3": gemma3}


@cache
def build(family: str) -> Target:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    model.set_attn_implementation(ATTENTION)
    return Target(model, TargetSpec.from_config(model.config), (0, 2))


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def check_close(ours: Tensor, reference: Tensor) -> None:
    """To 1e-5 of the largest value: float32 sums in another order, through four layers."""
    assert ours.shape == reference.shape
    error, scale = (ours - reference).abs().max().item(), reference.abs().max().item()
    assert error < 1e-5 * scale, f"{error:.1e} of {scale:.1e}"
