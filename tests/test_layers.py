"""Tests of models/layers.py: block attention against a loop, the rest against transformers' own layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb as gemma4_rotation
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_rotation
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from models.attention import attend_blocks
from models.layers import DraftAttention, GatedMLP, RMSNorm, Rotary, rotate
from models.spec import TargetSpec, rope_parameters
from tests.tiny_families import SIZES, build

# Float32 sums over a few dozen keys in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
HEAD_SIZES = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
SCALED_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},  # scales from max_position_embeddings on
    LLAMA3,
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
]
POSITIONS = torch.tensor([[0, 1, 5, 100], [1023, 7, 4000, 64]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop_attention(
    queries: Tensor, block: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """One softmax per query over its visible context and its own block, head by head; mask [B, A, 1 or Q, S]."""
    output = torch.zeros_like(queries)
    batch, num_anchors, num_slots, num_heads, size = queries.shape
    group = num_heads // context[0].shape[1]
    for row in range(batch):
        for anchor in range(num_anchors):
            for head in range(num_heads):
                kv = head // group
                for slot in range(num_slots):
                    seen = mask[row, anchor, slot if mask.shape[2] > 1 else 0]
                    keys = torch.cat((context[0][row, kv, seen], block[0][row, anchor, :, kv]))
                    values = torch.cat((context[1][row, kv, seen], block[1][row, anchor, :, kv]))
                    scores = keys @ queries[row, anchor, slot, head] / size**0.5
                    output[row, anchor, slot, head] = scores.softmax(0) @ values
    return output


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("num_anchors", "num_slots", "num_keys"), [(1, 1, 1), (1, 4, 4), (3, 4, 4), (3, 1, 5)])
@pytest.mark.parametrize("per_slot", [False, True])
def test_block_attention_equals_a_softmax_per_query(
    num_kv_heads: int, num_anchors: int, num_slots: int, num_keys: int, per_slot: bool
) -> None:
    """A block's keys need not be its queries (a chain's last step looks back on all of them)."""
    queries = normal(2, num_anchors, num_slots, 4, 8)
    block = tuple(normal(2, 2, num_anchors, num_keys, num_kv_heads, 8, seed=1))
    context = tuple(normal(2, 2, num_kv_heads, 7, 8, seed=2))
    shape = (2, num_anchors, num_slots if per_slot else 1, 7)
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, 0] = False  # an anchor at the start of its document sees its own block only
    mask[1, 0] = True
    output = attend_blocks(queries, block, context, mask)
    torch.testing.assert_close(output, loop_attention(queries, block, context, mask), **CLOSE)


def test_block_attention_has_the_gradients_of_the_loop() -> None:
    mask = torch.tensor([[[True, True, False], [False, False, False]]])[:, :, None]
    grads = []
    for attend in (attend_blocks, loop_attention):
        queries, block, context = normal(1, 2, 3, 4, 8), normal(2, 1, 2, 3, 2, 8, seed=1), normal(2, 1, 2, 3, 8, seed=2)
        leaves = [x.requires_grad_() for x in (queries, block, context)]
        attend(queries, (block[0], block[1]), (context[0], context[1]), mask).pow(2).sum().backward()
        grads.append([x.grad for x in leaves])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_context_and_slots_share_their_projections() -> None:
    """Slots that copy the context's inputs and positions get the context's keys and values."""
    spec = build("qwen3").spec
    attention, rotary = DraftAttention(spec, input_size=spec.hidden_size, qk_norm=True), Rotary(spec)
    x, positions = normal(2, 5, spec.hidden_size), torch.arange(5).expand(2, 5)
    keys, values = attention.keys_values(x, *rotary(positions))
    assert keys.shape == values.shape == (2, 5, spec.num_kv_heads, spec.head_dim)
    expected = attention.k_norm(attention.k_proj(x).view(2, 5, spec.num_kv_heads, spec.head_dim))
    torch.testing.assert_close(keys, rotate(expected, *rotary(positions)), **CLOSE)
    assert torch.equal(values, attention.v_proj(x).view_as(values))


def rotary_of(config: PreTrainedConfig) -> Rotary:
    values = config.to_dict()
    sizes = {key: values[key] for key in ("hidden_size", "head_dim", "max_position_embeddings")}
    return Rotary(replace(build("llama").spec, **sizes, rope_parameters=rope_parameters(values)))


@pytest.mark.parametrize("parameters", SCALED_ROPES, ids=lambda p: p["rope_type"])
def test_rotary_equals_llamas(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(**HEAD_SIZES, rope_parameters=parameters)
    cos, sin = rotary_of(config)(POSITIONS)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    torch.testing.assert_close(cos, expected_cos, **CLOSE)
    torch.testing.assert_close(sin, expected_sin, **CLOSE)
    x = normal(2, 4, 3, 64)
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), expected_cos, expected_sin)
    torch.testing.assert_close(rotate(x, cos, sin), expected.transpose(1, 2), **CLOSE)


@pytest.mark.parametrize(("factor", "size"), [(0.75, 48), (0.25, 16)])
def test_partial_rotary_equals_phi3s(factor: float, size: int) -> None:
    """The entries behind the rotated ones are passed through, bit by bit."""
    config = Phi3Config(**HEAD_SIZES, partial_rotary_factor=factor, pad_token_id=0)
    cos, sin = rotary_of(config)(POSITIONS)
    expected_cos, expected_sin = Phi3RotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    assert cos.shape == (2, 4, size)
    torch.testing.assert_close(cos, expected_cos, **CLOSE)
    torch.testing.assert_close(sin, expected_sin, **CLOSE)
    x = normal(2, 4, 3, 64)
    expected, _ = phi3_rotation(x.transpose(1, 2), x.transpose(1, 2), expected_cos, expected_sin)
    torch.testing.assert_close(rotate(x, cos, sin), expected.transpose(1, 2), **CLOSE)
    assert torch.equal(rotate(x, cos, sin)[..., size:], x[..., size:])


def test_proportional_rotary_equals_that_of_gemma4s_full_attention_layers() -> None:
    """A quarter of the frequencies, spread over the whole head: not the first quarter of its entries."""
    config = Gemma4TextConfig(hidden_size=64, head_dim=32, global_head_dim=64)
    spec = TargetSpec.from_config(config)
    cos, sin = Rotary(replace(spec, head_dim=64))(POSITIONS)
    expected_cos, expected_sin = Gemma4TextRotaryEmbedding(config)(torch.zeros(1), POSITIONS, "full_attention")
    torch.testing.assert_close(cos, expected_cos, **CLOSE)
    torch.testing.assert_close(sin, expected_sin, **CLOSE)
    x = normal(2, 4, 3, 64)
    torch.testing.assert_close(rotate(x, cos, sin), gemma4_rotation(x, expected_cos, expected_sin, 2), **CLOSE)
    still = (rotate(x, cos, sin) == x).all(0).all(0).all(0).nonzero().flatten()
    assert still.tolist() == [*range(8, 32), *range(40, 64)]


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "parameters",
    [
        SCALED_ROPES[0],
        {**SCALED_ROPES[0], "partial_rotary_factor": 0.25},
        {**SCALED_ROPES[0], "rope_type": "proportional", "partial_rotary_factor": 0.25},
        LLAMA3,
    ],
    ids=["default", "partial", "proportional", "llama3"],
)
def test_rotation_keeps_the_norm_of_every_head(head_dim: int, parameters: dict[str, Any]) -> None:
    rotary = Rotary(replace(build("qwen3").spec, head_dim=head_dim, rope_parameters=parameters))
    x = normal(2, 4, 3, head_dim)
    rotated = rotate(x, *rotary(POSITIONS))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), **CLOSE)
    assert (rotated - x)[1].abs().amax(-1).min() > 0.1  # and every head of the second row did turn


def test_rotary_frequencies_stay_float32_in_narrow_drafters() -> None:
    """bfloat16 frequencies are off by 0.4 %, at position 1000 a radian."""
    spec = build("qwen3").spec
    rotary = Rotary(spec)
    cos, sin = rotary(torch.tensor([[100]]))
    assert cos.dtype == sin.dtype == rotary.inv_freq.dtype == torch.float32
    x = normal(1, 1, 2, spec.head_dim).bfloat16()
    torch.testing.assert_close(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16(), rtol=0, atol=0)


def test_norm_and_mlp_equal_those_of_qwen3() -> None:
    target = build("qwen3")
    x = normal(2, 3, SIZES["hidden_size"])
    norm, expected_norm = RMSNorm(SIZES["hidden_size"], 1e-6), Qwen3RMSNorm(SIZES["hidden_size"], 1e-6)
    mlp, expected_mlp = GatedMLP(target.spec), Qwen3MLP(target.model.config)
    for ours, expected in ((norm, expected_norm), (mlp, expected_mlp)):
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.copy_(normal(*parameter.shape, seed=4))
        ours.load_state_dict(expected.state_dict())  # the same names
        torch.testing.assert_close(ours(x), expected(x), rtol=1e-5, atol=1e-4)
    narrow = x.bfloat16()
    assert torch.equal(norm.bfloat16()(narrow), expected_norm.bfloat16()(narrow))
