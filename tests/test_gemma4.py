"""Tests of models/gemma4.py: layers against transformers' own, and DeepSpec's Gemma 4 files in and out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from models.attention import cache_mixer
from models.base import Engine
from models.checkpoint import load_drafter
from models.export import export_drafter, serve_command
from models.files import read_json
from models.gemma4 import Gemma4BlockLayer, Gemma4PairLayer
from models.layer_styles import LayerStyle
from models.layers import Rotary
from models.masks import cache_mask
from models.spec import TargetSpec
from tests.conftest import dflash_config, dspark_config, eagle3_config
from tests.draft_batches import enliven
from tests.published_files import check_same_drafts, write
from tests.test_published_blocks import with_copies

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
STYLE = {"layer_style": LayerStyle.gemma4}
LAYER_IDS = (1, 3, 5, 7, 9)


def target_spec(*, keys_are_values: bool = True) -> TargetSpec:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    config = Gemma4TextConfig(
        **SIZES, num_hidden_layers=12, layer_types=kinds, attention_k_eq_v=keys_are_values, rms_norm_eps=1e-5
    )
    return TargetSpec.from_config(config)


def layers_config(num_layers: int, *, keys_are_values: bool = True) -> Gemma4TextConfig:
    """Of a drafter: global attention in every layer."""
    return Gemma4TextConfig(
        **SIZES,
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        attention_k_eq_v=keys_are_values,
        rms_norm_eps=1e-5,
    )


def test_a_target_says_what_its_global_layers_are_like() -> None:
    spec = target_spec()
    assert (spec.head_dim, spec.num_kv_heads) == (8, 2)
    assert (spec.global_head_dim, spec.num_global_kv_heads, spec.keys_are_values) == (16, 1, True)
    of_layers = LayerStyle.gemma4.spec_of_layers(spec)
    assert (of_layers.head_dim, of_layers.num_kv_heads) == (16, 1)
    assert LayerStyle.gemma4.spec_of_layers(of_layers) == of_layers and LayerStyle.qwen3.spec_of_layers(spec) == spec


@pytest.mark.parametrize("keys_are_values", [True, False])
@pytest.mark.parametrize("num_context", [0, 7])
@torch.no_grad()
def test_a_block_layer_equals_transformers_layer_over_context_and_block(
    num_context: int, keys_are_values: bool
) -> None:
    """Without a context it is transformers' forward; the context has keys and values and nothing else."""
    generator = torch.Generator().manual_seed(0)
    config = layers_config(1, keys_are_values=keys_are_values)
    reference = Gemma4TextDecoderLayer(config, 0).eval()
    ours = Gemma4BlockLayer(LayerStyle.gemma4.spec_of_layers(target_spec(keys_are_values=keys_are_values)))
    for tensor in reference.state_dict().values():
        tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    ours.load_state_dict(reference.state_dict())
    x, fused = (torch.randn(1, n, 32, generator=generator) for n in (5, num_context))
    positions = torch.arange(num_context + 5)[None]
    cos, sin = Gemma4TextRotaryEmbedding(config)(x, positions, "full_attention")
    if num_context == 0:
        config._attn_implementation = "eager"
        mask = torch.zeros(1, 1, 5, 5)
        expected = reference(x, position_embeddings=(cos, sin), attention_mask=mask, shared_kv_states={})
    else:
        expected = slow(reference, x, fused, cos, sin)
    rotary = Rotary(LayerStyle.gemma4.spec_of_layers(target_spec()))
    context = ours.self_attn.context(fused, *rotary(positions[:, :num_context]))
    mix = cache_mixer(cache_mask(torch.tensor([num_context]), num_context, num_slots=5))
    got = ours.draft(x, rotary(positions[:, num_context:]), context, mix, num_blocks=1)
    torch.testing.assert_close(got, expected, **CLOSE)


def slow(layer: Gemma4TextDecoderLayer, x: Tensor, fused: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    states, first = torch.cat((fused, normed), dim=1), fused.shape[1]
    queries = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, 16)))
    raw = attention.k_proj(states).unflatten(-1, (-1, 16))
    values = raw if attention.v_proj is None else attention.v_proj(states).unflatten(-1, (-1, 16))
    keys = apply_rotary_pos_emb(attention.k_norm(raw), cos, sin, 2)
    queries = apply_rotary_pos_emb(queries, cos[:, first:], sin[:, first:], 2)
    values = attention.v_norm(values)
    heads = []
    for head in range(4):
        kv = head * keys.shape[2] // 4
        scores = queries[0, :, head] @ keys[0, :, kv].T * attention.scaling
        heads.append(scores.softmax(-1) @ values[0, :, kv])
    x = x + layer.post_attention_layernorm(attention.o_proj(torch.cat(heads, dim=-1)[None]))
    x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    return x * layer.layer_scalar


@torch.no_grad()
def test_a_pair_layer_has_the_same_attention_and_norms_over_twice_the_input() -> None:
    spec = LayerStyle.gemma4.spec_of_layers(target_spec())
    pair, block = Gemma4PairLayer(spec, qk_norm=True, norm_before_residual=False), Gemma4BlockLayer(spec)
    own = {name: tuple(tensor.shape) for name, tensor in pair.state_dict().items()}
    other = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
    differing = {name for name in own if own[name] != other.get(name)}
    assert differing == {"hidden_norm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight"}
    for name, tensor in block.state_dict().items():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
        if name not in differing:
            pair.state_dict()[name].copy_(tensor)
    residual, mixed = torch.randn(2, 3, 32), torch.randn(2, 3, 64)
    torch.testing.assert_close(pair.finish(residual, mixed), block.finish(residual, mixed))
    assert pair.pair(residual, residual)[0].shape == (2, 3, 64)


# ---- files


def build(config: Any) -> Any:
    torch.manual_seed(0)
    spec = target_spec()
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(60, 32, generator=generator) for _ in range(2))
    drafter = enliven(config.build(spec, target_layer_ids=LAYER_IDS, mask_token_id=4)).bind(embedding, head)
    for name, buffer in drafter.named_buffers():  # as if it had been trained elsewhere
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    return drafter


KINDS: dict[str, Any] = {
    "dspark": dspark_config(num_layers=2, **STYLE),
    "dflash": dflash_config(num_layers=2, **STYLE),
    "eagle3": eagle3_config(qk_norm=True, **STYLE),
}


def as_published(kind: str, *, nested_sizes: bool) -> dict[str, Any]:
    """config.json as DeepSpec's classes save it, by transformers before or since it keeps sizes layer by layer."""
    num_layers = 1 if kind == "eagle3" else 2
    saved = layers_config(num_layers).to_dict()
    if not nested_sizes:
        del saved["per_layer_config"]
        saved |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    saved |= {"model_type": "gemma4_text", "num_target_layers": 12, "target_layer_ids": list(LAYER_IDS)}
    if kind == "eagle3":
        own = {"ttt_length": 4, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
        return saved | own | {"architectures": ["Gemma4Eagle3Model"]}
    own = {"block_size": 4, "mask_token_id": 4, "num_anchors": 512, "markov_rank": 0, "enable_confidence_head": False}
    if kind == "dspark":
        own |= {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
        own["confidence_head_with_markov"] = True
    return saved | own | {"architectures": ["Gemma4DSparkModel"]}


@pytest.mark.parametrize("nested_sizes", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_deepspecs_gemma_4_drafters_draft_as_written(tmp_path: Path, kind: str, nested_sizes: bool) -> None:
    drafter = build(KINDS[kind])
    tensors = {**drafter.state_dict(), "embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    loaded = load_drafter(write(tmp_path, as_published(kind, nested_sizes=nested_sizes), tensors))
    assert loaded.bound and type(loaded.drafter) is type(drafter)
    assert loaded.drafter.spec == replace(drafter.spec, eos_token_ids=(3,))
    check_drafts(loaded.drafter, drafter)


def check_drafts(loaded: Any, drafter: Any) -> None:
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    check_same_drafts(loaded, drafter, bound=(drafter.embedding, drafter.head))


@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("kind", KINDS)
def test_what_knows_such_layers_gets_them_and_the_rest_is_refused(tmp_path: Path, engine: Engine, kind: str) -> None:
    drafter = build(KINDS[kind])
    served = {Engine.deepspec} if kind == "eagle3" else {Engine.deepspec, Engine.vllm}
    if engine not in served:
        with pytest.raises(ValueError, match=f"engine={engine} cannot write a drafter with .*(gemma4|5 fused)"):
            export_drafter(drafter, tmp_path / "out", engine=engine, dtype=torch.float32, card="")
        assert not (tmp_path / "out").exists()
        return
    export_drafter(drafter, tmp_path, engine=engine, dtype=torch.float32, card="")
    config = read_json(tmp_path / "config.json")
    layers = Gemma4TextConfig(**{key: value for key, value in config.items() if key != "model_type"})
    for layer in layers.per_layer_config:
        assert (layer.head_dim, layer.num_key_value_heads) == (16, 1)
    assert layers.layer_types == ["full_attention"] * len(drafter.layers) and layers.attention_k_eq_v
    assert layers.rope_parameters["full_attention"] == drafter.spec.rope_parameters
    assert (layers.final_logit_softcapping, layers.hidden_activation) == (5.0, "gelu_pytorch_tanh")
    check_drafts(load_drafter(tmp_path, target=drafter.spec).drafter, drafter)
    card = serve_command(drafter, engine, "org/target")
    assert ('"method": "dspark"' in card) == (engine is Engine.vllm or kind == "dspark")


def test_a_target_with_values_of_its_own_is_refused_where_the_loader_would_fail(tmp_path: Path) -> None:
    drafter = build(KINDS["dspark"])
    drafter.spec = replace(drafter.spec, keys_are_values=False)
    with pytest.raises(ValueError, match=r"engine=vllm cannot write .*attention_k_eq_v=false"):
        export_drafter(drafter, tmp_path / "out", engine=Engine.vllm, dtype=torch.float32, card="")


def test_a_gemma_4_file_without_what_makes_its_layers_is_refused_by_name(tmp_path: Path) -> None:
    drafter = build(KINDS["dspark"])
    whole = as_published("dspark", nested_sizes=True)
    for field in ("attention_k_eq_v", "hidden_activation", "layer_types", "rope_parameters", "num_key_value_heads"):
        config = {key: value for key, value in whole.items() if key != field}
        with pytest.raises(ValueError, match=f"missing {field}"):
            load_drafter(write(tmp_path, config, with_copies(drafter)))


def test_pairs_in_this_style_need_their_norms() -> None:
    with pytest.raises(ValueError, match=r"model\.layer_style=gemma4 .*model\.qk_norm=true"):
        eagle3_config(**STYLE).build(target_spec(), target_layer_ids=LAYER_IDS, mask_token_id=None)
