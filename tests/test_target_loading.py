"""Tests of loading in models/target.py and of models/spec.py: what is read, chosen and refused."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from models.spec import TargetSpec, rope_parameters
from models.target import (
    Target,
    TargetConfig,
    choose_mask_token,
    dtype_of,
    feature_layer_ids,
    load_spec,
    load_target,
    target_identity,
)
from models.target_files import load_frozen
from tests.conftest import tiny_tokenizer
from tests.tiny_families import FAMILIES, SIZES, build, check_close, random_ids


def config_of(path: str, **changes: Any) -> TargetConfig:
    return replace(TargetConfig("test", path, None, None, "float32", None, None, None, 1, None), **changes)


@pytest.mark.parametrize(
    ("num_layers", "layer_ids"),
    [
        (2, (1,)),
        (4, (2,)),
        (5, (2,)),
        (6, (1, 3)),
        (30, (1, 8, 14, 20, 27)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
    ],
)
def test_feature_layers_follow_the_published_rule(num_layers: int, layer_ids: tuple[int, ...]) -> None:
    spec = replace(build("qwen3").spec, num_layers=num_layers)
    assert feature_layer_ids(config_of("x"), spec) == layer_ids
    assert feature_layer_ids(config_of("x", layer_ids=(0, 1)), spec) == (0, 1)


def test_the_mask_token_is_the_first_unused_row_or_the_configured_one() -> None:
    tokenizer, spec = tiny_tokenizer(), replace(build("qwen3").spec, vocab_size=64)
    assert choose_mask_token(config_of("x"), spec, tokenizer) == len(tokenizer)
    assert choose_mask_token(config_of("x", mask_token_id=3), spec, tokenizer) == 3
    assert choose_mask_token(config_of("x"), replace(spec, vocab_size=len(tokenizer)), tokenizer) is None


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.path=.*nowhere.*config\.json"):
        load_target(config_of(str(tmp_path / "nowhere")), torch.device("cpu"))


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    config = config_of(str(tmp_path))
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        load_frozen(config, load_spec(config))


def test_recurrent_layers_are_refused() -> None:
    recurrent = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    kinds = ["linear_attention", "full_attention"] * 2
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **recurrent, layer_types=kinds))
    with pytest.raises(ValueError, match=r"\['linear_attention'\] layers, whose state cannot be rolled back"):
        Target(model, TargetSpec.from_config(model.config), (0,))


@pytest.mark.parametrize("layer_ids", [(4,), (-1, 2)])
def test_layers_that_do_not_exist_are_refused(layer_ids: tuple[int, ...]) -> None:
    target = build("qwen3")
    with pytest.raises(ValueError, match=r"target\.layer_ids must be in 0\.\.3, got \["):
        Target(target.model, target.spec, layer_ids)


def test_an_unknown_dtype_is_named() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got int8"):
        dtype_of("int8")


def save(family: str, folder: Path) -> TargetConfig:
    build(family).model.save_pretrained(folder)
    return config_of(str(folder))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma3_multimodal", "gemma4_multimodal", "gemma4_unified"])
def test_embedding_and_head_are_read_without_the_model(family: str, tmp_path: Path) -> None:
    """qwen3 has its own head here, the others share the embedding."""
    config, target = save(family, tmp_path), build(family)
    embedding, head = load_frozen(config, load_spec(config))
    assert torch.equal(embedding, target.embedding)
    assert torch.equal(head, target.head)


def test_a_multimodal_model_with_its_own_head_is_read_with_it(tmp_path: Path) -> None:
    """Its text part still says that the head is the embedding, as by default."""
    config = deepcopy(build("gemma3_multimodal").model.config)
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = False, True
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    target = load_target(config_of(str(tmp_path)), torch.device("cpu"))
    _, head = load_frozen(config_of(str(tmp_path)), target.spec)
    assert torch.equal(head, target.head) and not torch.equal(head, target.embedding)


def write_tensors(folder: Path, *names: str) -> TargetConfig:
    """Tensor i is filled with i."""
    Qwen3Config(**SIZES, tie_word_embeddings=False).save_pretrained(folder)
    save_file({name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}, folder / "model.safetensors")
    return config_of(str(folder))


def test_copies_of_the_embedding_in_prediction_layers_are_passed_over(tmp_path: Path) -> None:
    config = write_tensors(
        tmp_path, "lm_head.weight", "model.embed_tokens.weight", "model.layers.4.embed_tokens.weight"
    )
    embedding, head = load_frozen(config, load_spec(config))
    assert embedding.unique().tolist() == [1] and head.unique().tolist() == [0]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            ("thinker.embed_tokens.weight", "talker.embed_tokens.weight"),
            r"\*embed_tokens.* found \['talker.*', 'thinker",
        ),
        (("model.embed_tokens_per_layer.weight",), r"\*embed_tokens\.weight in its files, found \[\]"),
        (("model.embed_tokens.weight",), r"\*lm_head\.weight in its files, found \[\]"),
    ],
)
def test_missing_and_ambiguous_tensors_are_refused(tmp_path: Path, names: tuple[str, ...], found: str) -> None:
    config = write_tensors(tmp_path, *names)
    with pytest.raises(ValueError, match=found):
        load_frozen(config, load_spec(config))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_multimodal", "gemma4_multimodal", "gemma4_unified"])
def test_loading_gives_the_saved_target_with_its_stop_ids(family: str, tmp_path: Path) -> None:
    config = save(family, tmp_path)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)  # as chat models do; config.json has none
    loaded = load_target(config, torch.device("cpu"), layer_ids=(0, 2))
    assert loaded.spec.eos_token_ids == (7, 9)
    assert loaded.spec == load_spec(config) == replace(build(family).spec, eos_token_ids=(7, 9))
    ours, expected = (target.forward_whole(random_ids(2, 9)) for target in (loaded, build(family)))
    check_close(ours.hidden, expected.hidden)
    check_close(ours.features, expected.features)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_check_of_its_conventions(family: str, dtype: str, tmp_path: Path) -> None:
    config = replace(save(family, tmp_path), dtype=dtype)
    assert load_target(config, torch.device("cpu")).head.dtype is dtype_of(dtype)


def phi_with_a_head_bias() -> PhiForCausalLM:
    model = PhiForCausalLM(PhiConfig(**SIZES))
    model.lm_head.bias.data.normal_()
    return model


LOGITS, INPUT = "head and soft-cap do not give its logits", "is not the first layer's input"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=1.25)), rf"\(granite\): {LOGITS}"),
        (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, embedding_multiplier=12.0)), rf"embedding \* 1 {INPUT}"),
        (lambda: CohereForCausalLM(CohereConfig(**SIZES)), rf"\(cohere\): {LOGITS}"),
        (phi_with_a_head_bias, rf"\(phi\): {LOGITS}"),
        (lambda: Gemma3ForConditionalGeneration(capped_multimodal()), rf"\(gemma3_text\): {LOGITS}"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)), "capped attention scores"),
    ],
    ids=["granite-logits", "granite-embedding", "cohere", "phi", "gemma3-multimodal", "gemma2"],
)
def test_unknown_conventions_are_refused(
    make: Callable[[], PreTrainedModel], complaint: str, dtype: str, tmp_path: Path
) -> None:
    """Wrong by a quarter and more: what would train a drafter on other logits than the target's."""
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        load_target(config_of(str(tmp_path), dtype=dtype), torch.device("cpu"))


def capped_multimodal() -> Gemma3Config:
    config = deepcopy(build("gemma3_multimodal").model.config)
    config.text_config.final_logit_softcapping = 1.0
    return config


def test_identity_follows_weights_and_config(tmp_path: Path) -> None:
    config = save("qwen3", tmp_path / "a")
    again = replace(save("qwen3", tmp_path / "b"), name="other")
    first, second = target_identity(config), target_identity(again)
    assert (first.config_sha256, first.weights_sha256) == (second.config_sha256, second.weights_sha256)
    other = target_identity(save("gemma3", tmp_path / "c"))
    assert first.config_sha256 != other.config_sha256 and first.weights_sha256 != other.weights_sha256


def test_a_spec_survives_its_dictionary_and_names_what_is_missing() -> None:
    spec = build("gemma3").spec
    assert TargetSpec.from_dict(spec.to_dict()) == spec
    values = spec.to_dict()
    del values["head_dim"]
    with pytest.raises(ValueError, match=r"missing \['head_dim'\], unknown \['head_size'\]"):
        TargetSpec.from_dict(values | {"head_size": 8})


def test_a_spec_takes_the_rotary_parameters_of_full_attention_layers() -> None:
    assert build("qwen3").spec.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert build("gemma3").spec.rope_parameters["rope_theta"] == 1_000_000.0
    assert build("gemma4").spec.rope_parameters == {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    }
    old = LlamaConfig(**SIZES, rope_theta=5e5)  # as transformers 4 wrote it
    assert TargetSpec.from_config(old).rope_parameters["rope_theta"] == 5e5
    assert TargetSpec.from_config(PhiConfig(**SIZES)).rope_parameters["partial_rotary_factor"] == 0.5


def test_rotary_parameters_of_old_files_are_gathered() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    old = {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_scaling": scaling, "rope_parameters": None}
    expected = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    assert rope_parameters(old) == expected
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10_000.0}
    assert rope_parameters({**old, "rope_parameters": {"rope_theta": 2.0, "partial_rotary_factor": 0.5}}) == {
        "rope_type": "default",
        "rope_theta": 2.0,
        "partial_rotary_factor": 0.5,
    }


def test_full_attention_layers_without_positions_are_refused() -> None:
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}
    with pytest.raises(ValueError, match="has no set for full_attention layers"):
        rope_parameters({"rope_parameters": kinds})


def test_a_config_without_a_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="has no vocab_size, hidden_size, num_hidden_layers: not a decoder LM"):
        TargetSpec.from_config(PreTrainedConfig())
