"""Draft layers in the style of Gemma 4's global-attention layers, as DeepSpec's Gemma4 drafters and vLLM's have them.

They differ from the plain ones in four things: norms on both sides of attention and MLP; a scalar on the whole output,
which is kept and never trained; values are normed, and where the target says so they are the keys before their norm;
queries are not divided by the root of their size. Norms multiply in float32.
"""

import torch
from torch import Tensor, nn

from models.layers import BlockLayer, DraftAttention, GatedMLP, PairLayer, RMSNorm
from models.spec import TargetSpec


class WideNorm(RMSNorm):
    """Rounds to the input's type after the weight is applied, not before."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


class Gemma4Attention(DraftAttention):
    """Attention of a target's global layers."""

    def __init__(self, spec: TargetSpec, *, input_size: int) -> None:
        super().__init__(spec, input_size=input_size, qk_norm=True)
        self.q_norm, self.k_norm = (WideNorm(spec.head_dim, spec.rms_norm_eps) for _ in range(2))
        self.eps = spec.rms_norm_eps
        if spec.keys_are_values:
            self.v_proj = None

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().queries(x, cos, sin) * self.head_dim**0.5  # which every mixer divides by

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.projected(x)
        values = nn.functional.rms_norm(values.float(), values.shape[-1:], eps=self.eps).to(values.dtype)
        return self.rotated(keys, cos, sin), values


class Sandwich(nn.Module):
    """Norms on both sides of attention and MLP."""

    self_attn: DraftAttention
    mlp: GatedMLP
    layer_scalar: Tensor  # [1]

    def surround(self, spec: TargetSpec) -> None:
        """Replaces the norm behind attention and adds what else such a layer has."""
        self.post_attention_layernorm, self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            WideNorm(spec.hidden_size, spec.rms_norm_eps) for _ in range(3)
        )
        self.register_buffer("layer_scalar", torch.ones(1))

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        x = residual + self.post_attention_layernorm(self.self_attn.o_proj(mixed))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Gemma4BlockLayer(Sandwich, BlockLayer):
    """A layer over draft slots."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(spec)
        self.self_attn = Gemma4Attention(spec, input_size=spec.hidden_size)
        self.input_layernorm = WideNorm(spec.hidden_size, spec.rms_norm_eps)
        self.surround(spec)


class Gemma4PairLayer(Sandwich, PairLayer):
    """A layer over pairs of token and hidden state."""

    def __init__(self, spec: TargetSpec, *, qk_norm: bool, norm_before_residual: bool) -> None:
        if not qk_norm:
            raise ValueError("model.layer_style=gemma4 has norms on queries and keys: set model.qk_norm=true")
        super().__init__(spec, qk_norm=True, norm_before_residual=norm_before_residual)
        self.self_attn = Gemma4Attention(spec, input_size=2 * spec.hidden_size)
        self.input_layernorm, self.hidden_norm = (WideNorm(spec.hidden_size, spec.rms_norm_eps) for _ in range(2))
        self.surround(spec)
