"""Building blocks with Hugging Face's parameter names: RMSNorm, rotary positions, block attention, gated MLP."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.attention import Mixer
from models.packed import Linear
from models.spec import TargetSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, cast back before the weight is applied (as Qwen3 and Llama do)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Rotary position embedding, rotate-half form. Not a module: frequencies stay float32 whatever the weights are."""

    def __init__(self, spec: TargetSpec) -> None:
        parameters = spec.rope_parameters
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "default":
            size = int(spec.head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, size, 2, dtype=torch.int64).float() / size
            self.inv_freq, self.scale = 1.0 / parameters["rope_theta"] ** exponent, 1.0
        else:
            values = {name: getattr(spec, name) for name in ("hidden_size", "head_dim", "max_position_embeddings")}
            values |= {"num_attention_heads": spec.num_heads, "rope_parameters": parameters}
            config = PreTrainedConfig.from_dict(values)
            # Types that change with the length (dynamic, longrope) keep the frequencies of short texts: keys of a
            # cache must not change under it, and a drafter learns with what it is given.
            self.inv_freq, self.scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [...] -> cos, sin [..., r] in float32; r is head_dim, or less where only part of it rotates."""
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, d], cos and sin [B, S, r] -> x with its first r entries rotated by its position, in x's type."""
    size = cos.shape[-1]
    part = x[..., :size].float()
    first, second = part.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = (part * cos[:, :, None] + turned * sin[:, :, None]).to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=False)
        self.act: Callable[[Tensor], Tensor] = ACT2FN[spec.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DraftAttention(nn.Module):
    """Projections of a drafter's attention; models/attention.py does the mixing.

    Context and draft slots share k_proj and v_proj (K/V injection, DFlash section 3).
    """

    def __init__(self, spec: TargetSpec, *, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads = spec.head_dim, spec.num_kv_heads
        self.q_proj = Linear(input_size, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = Linear(input_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj: Linear | None = Linear(input_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if qk_norm else nn.Identity()

    @property
    def context_size(self) -> int:
        """Weights that a position of the context is multiplied by."""
        return self.k_proj.weight.numel() + (0 if self.v_proj is None else self.v_proj.weight.numel())

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, input] at the positions of cos and sin [B, S, d] -> rotated queries [B, S, H, d]."""
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # also of no position at all
        return rotate(queries, cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, input] -> rotated keys and values, each [B, S, H_kv, d]."""
        keys, values = self.projected(x)
        return self.rotated(keys, cos, sin), values

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, input] -> keys and values [B, S, H_kv, d] before norms; the same where there is no v_proj."""
        shape = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        keys = self.k_proj(x).view(shape)
        return keys, keys if self.v_proj is None else self.v_proj(x).view(shape)

    def rotated(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.k_norm(keys), cos, sin)

    def context(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values laid out for `Mixer`s and caches, each [B, H_kv, S, d]."""
        keys, values = self.keys_values(x, cos, sin)
        return keys.transpose(1, 2), values.transpose(1, 2)


class BlockLayer(nn.Module):
    """Pre-norm decoder layer over draft slots; the context enters attention only and is never updated.

    Attention inside a block is bidirectional; blocks never see each other.
    """

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec, input_size=spec.hidden_size, qk_norm=True)
        self.mlp = GatedMLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # [B, A*Q, D]
        rotary: tuple[Tensor, Tensor],  # each [B, A*Q, d]
        fused: Tensor,  # [B, S, D] the row's features
        fused_rotary: tuple[Tensor, Tensor],  # each [B, S, d]
        mix: Mixer,
        num_blocks: int,  # A
    ) -> Tensor:
        """For training; everything that holds parameters is called inside, as sharded layers need it."""
        return self.draft(x, rotary, self.self_attn.context(fused, *fused_rotary), mix, num_blocks)

    def draft(
        self,
        x: Tensor,  # [B, A*Q, D]
        rotary: tuple[Tensor, Tensor],  # each [B, A*Q, d]
        context: tuple[Tensor, Tensor],  # each [B, H_kv, S, d]
        mix: Mixer,
        num_blocks: int,  # A
    ) -> Tensor:
        return self.finish(x, self.attend(self.input_layernorm(x), rotary, context, mix, num_blocks))

    def attend(
        self,
        normed: Tensor,  # [B, A*Q, D]
        rotary: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mix: Mixer,
        num_blocks: int,
    ) -> Tensor:
        """Mixed heads [B, A*Q, H*d] of slots that see their context and their own block."""
        keys, values = self.self_attn.keys_values(normed, *rotary)
        queries = self.self_attn.queries(normed, *rotary)
        queries, keys, values = (part.unflatten(1, (num_blocks, -1)) for part in (queries, keys, values))
        return mix(queries, (keys, values), context).reshape(*normed.shape[:2], -1)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """residual [..., D], mixed heads [..., H*d] -> [..., D]."""
        x = residual + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class PairLayer(nn.Module):
    """Decoder layer over pairs of token and hidden state (EAGLE-3); the residual stream is the hidden half only."""

    def __init__(self, spec: TargetSpec, *, qk_norm: bool, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = DraftAttention(spec, input_size=2 * spec.hidden_size, qk_norm=qk_norm)
        self.mlp = GatedMLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def pair(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embedded and hidden [..., D] -> attention's input [..., 2D], embedding first, and the residual [..., D]."""
        normed = self.hidden_norm(hidden)
        pair = torch.cat((self.input_layernorm(embedded.to(hidden.dtype)), normed), dim=-1)
        return pair, normed if self.norm_before_residual else hidden

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """residual [..., D], mixed heads [..., H*d] -> [..., D]."""
        x = residual + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))
