"""GGUF files as a reader of their own sees them: keys, types, tensors, refusals, and no half-written file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from models.base import Engine, SlotLayout
from models.dspark import DSpark, MarkovHeadType
from models.export import export_drafter
from models.gguf import ARCHITECTURE, distinct_tokens, rotary_factors, write_gguf, write_gguf_drafter
from models.target import Target, TargetConfig
from tests.conftest import build_dspark, files_of

HEADLESS = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False}
FLOATS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every key's value and every tensor record."""
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("dtype", FLOATS)
def test_keys_and_tensors_come_back_as_they_were_given(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)
    metadata = {
        ARCHITECTURE: "dflash",
        "a.bool": False,
        "a.int": 2**32 - 1,
        "a.float": 1e-6,
        "a.string": "naïve",
        "a.ints": [3, -1, 2],
        "a.strings": ["x", "", "é"],
    }
    write_gguf(tmp_path / "file.gguf", metadata, {"matrix": matrix.T, "vector": vector}, dtype=dtype)
    fields, tensors = read(tmp_path / "file.gguf")
    assert fields == {**metadata, "a.float": float(np.float32(1e-6))}
    types = {key: [t.name for t in GGUFReader(tmp_path / "file.gguf").fields[key].types] for key in metadata}
    assert types == {
        ARCHITECTURE: ["STRING"],
        "a.bool": ["BOOL"],
        "a.int": ["UINT32"],
        "a.float": ["FLOAT32"],
        "a.string": ["STRING"],
        "a.ints": ["ARRAY", "INT32"],
        "a.strings": ["ARRAY", "STRING"],
    }
    assert {name: tensor.tensor_type for name, tensor in tensors.items()} == {
        "matrix": FLOATS[dtype],
        "vector": FLOATS[torch.float32],
    }
    stored = torch.from_numpy(dequantize(tensors["matrix"].data, FLOATS[dtype]).astype(np.float32))
    assert torch.equal(stored, matrix.T.to(dtype).float())
    assert torch.equal(torch.from_numpy(tensors["vector"].data.copy()), vector)


def test_a_drafter_file_holds_every_weight_and_what_llama_cpp_asks_for(tmp_path: Path, tiny_dspark: DSpark) -> None:
    tokens = ["a", "b", "a", None]
    vocabulary = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": distinct_tokens(tokens, 55)}
    write_gguf_drafter(tiny_dspark, tmp_path / "dspark.gguf", dtype=torch.float32, vocabulary=vocabulary)
    fields, tensors = read(tmp_path / "dspark.gguf")
    strings = fields.pop("tokenizer.ggml.tokens")
    assert strings[:4] == ["a", "b", "[UNUSED2]", "[UNUSED3]"] and len(set(strings)) == len(strings) == 55
    assert fields == {
        "general.architecture": "dflash",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.mask_token_id": 4,
        "dflash.context_length": 512,
        "dflash.embedding_length": 64,
        "dflash.block_count": 1,
        "dflash.feed_forward_length": 128,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 32,
        "dflash.attention.value_length": 32,
        "dflash.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "dflash.attention.causal": False,
        "dflash.rope.freq_base": 10000.0,
        "dflash.rope.dimension_count": 32,
        "dflash.block_size": 4,
        "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": True,
        "dflash.target_layers": [1, 2, 3],
    }
    layer = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"]
    layer += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    heads = ["markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"]
    names = ["fc.weight", "enc.output_norm.weight", "output_norm.weight", *(f"blk.0.{name}.weight" for name in layer)]
    assert set(tensors) == {*names, *heads}
    attention = tiny_dspark.block_layers()[0].self_attn
    assert np.array_equal(tensors["blk.0.attn_k.weight"].data, attention.k_proj.weight.detach().numpy())


def test_an_anchor_first_drafter_without_a_markov_head_gets_a_zero_one(
    tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = build_dspark(tiny_target, tiny_target_config, **HEADLESS)
    write_gguf_drafter(drafter, tmp_path / "file.gguf", dtype=torch.float32)
    fields, tensors = read(tmp_path / "file.gguf")
    assert fields["dflash.has_confidence_head"] is False and fields["dflash.sample_from_anchor"] is True
    for name in ("markov_w1.weight", "markov_w2.weight"):
        assert tensors[name].data.shape == (55, 1) and not tensors[name].data.any()


def test_an_in_place_drafter_counts_its_known_slot_and_has_no_markov_head(
    tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = build_dspark(tiny_target, tiny_target_config, slot_layout=SlotLayout.in_place, **HEADLESS)
    write_gguf_drafter(drafter, tmp_path / "file.gguf", dtype=torch.float32)
    fields, tensors = read(tmp_path / "file.gguf")
    assert fields["dflash.block_size"] == 5 and fields["dflash.sample_from_anchor"] is False
    assert "markov_w1.weight" not in tensors


OPTION_REFUSALS = [
    ({"markov_head": MarkovHeadType.gated}, r"model\.markov_head=gated .* train with model\.markov_head=vanilla"),
    ({"markov_head": MarkovHeadType.rnn}, r"model\.markov_head=rnn .* train with model\.markov_head=vanilla"),
    ({"confidence_with_markov": False}, r"model\.confidence_with_markov=false .* or model\.confidence=false"),
    ({"slot_layout": SlotLayout.in_place}, r"model\.slot_layout=in_place .* model\.markov_rank=8; train with"),
]


@pytest.mark.parametrize(("changes", "message"), OPTION_REFUSALS)
def test_heads_and_layouts_that_llama_cpp_cannot_serve_are_refused(
    tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any], message: str
) -> None:
    drafter = build_dspark(tiny_target, tiny_target_config, **changes)
    with pytest.raises(ValueError, match=message):
        export_drafter(drafter, tmp_path / "out", engine=Engine.gguf, dtype=torch.float32, card="")
    assert not (tmp_path / "out").exists()


SPEC_REFUSALS = [
    ({"num_layers": 3}, r"target_layer_ids=\[0, 1, 2\]: it needs layers below 2"),
    ({"model_type": "gemma3_text"}, "target model_type=gemma3_text: it needs one of llama, "),
    ({"hidden_act": "gelu_pytorch_tanh"}, "target hidden_act=gelu_pytorch_tanh: it needs silu"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "target rope_type=yarn: it needs one of default, "),
    ({"embedding_scale": 8.0}, r"target embedding_scale=8\.0"),
    ({"logit_softcap": 30.0}, r"target logit_softcap=30\.0"),
]


@pytest.mark.parametrize(("changes", "message"), SPEC_REFUSALS)
def test_targets_that_llama_cpp_cannot_serve_are_refused_with_a_way_out(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any], message: str
) -> None:
    drafter = build_dspark(tiny_target, tiny_target_config)
    drafter.spec = replace(drafter.spec, **changes)
    with pytest.raises(ValueError, match=message + ".*choose another engine"):
        drafter.serving(Engine.gguf)


def test_a_type_that_is_no_weight_type_is_refused(tmp_path: Path, tiny_dspark: DSpark) -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.float64 cannot be written to GGUF; choose"):
        write_gguf_drafter(tiny_dspark, tmp_path / "file.gguf", dtype=torch.float64)


def test_two_engines_do_not_share_a_folder(tmp_path: Path, tiny_dspark: DSpark) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "card": "# A drafter\n"}
    folder, file = Engine.vllm, Engine.gguf
    for first, second, holds in ((folder, file, "config.json"), (file, folder, "dspark.gguf")):
        export_drafter(tiny_dspark, tmp_path / first, engine=first, **options)
        before = files_of(tmp_path / first)
        with pytest.raises(ValueError, match=f"out=.* holds {holds}, made for another engine"):
            export_drafter(tiny_dspark, tmp_path / first, engine=second, **options)
        assert files_of(tmp_path / first) == before
        export_drafter(tiny_dspark, tmp_path / first, engine=first, **options)
        assert files_of(tmp_path / first) == before  # equal work, equal bytes


@pytest.mark.parametrize("damage", ["tensor", "tensor left out", "value", "type"])
def test_a_file_that_reads_back_differently_never_takes_its_name(
    tmp_path: Path, tiny_dspark: DSpark, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dspark.gguf"
    write_gguf_drafter(tiny_dspark, path, dtype=torch.float32)
    before = path.read_bytes()
    add_tensor, add_key_value = GGUFWriter.add_tensor, GGUFWriter.add_key_value

    def damaged_tensor(self: GGUFWriter, name: str, tensor: np.ndarray, **options: Any) -> None:
        if name == "output_norm.weight" and damage == "tensor left out":
            return
        add_tensor(self, name, tensor + (name == "output_norm.weight" and damage == "tensor"), **options)

    def damaged_key(self: GGUFWriter, key: str, value: Any, value_type: GGUFValueType, *item_type: Any) -> None:
        if key == "dflash.block_size":
            value = 5 if damage == "value" else value
            value_type = GGUFValueType.INT32 if damage == "type" else value_type
        add_key_value(self, key, value, value_type, *item_type)

    monkeypatch.setattr(GGUFWriter, "add_tensor", damaged_tensor)
    monkeypatch.setattr(GGUFWriter, "add_key_value", damaged_key)
    for target in (path, tmp_path / "new.gguf"):
        with pytest.raises(AssertionError, match=r"output_norm\.weight|dflash\.block_size"):
            write_gguf_drafter(tiny_dspark, target, dtype=torch.float32)
    assert path.read_bytes() == before and not (tmp_path / "new.gguf").exists()


@given(st.lists(st.none() | st.sampled_from(["", "a", "b", "[UNUSED1]", "[UNUSED3]", "[UNUSED3]_"]), max_size=6))
def test_token_strings_are_distinct_and_first_uses_stay(tokens: list[str | None]) -> None:
    strings = distinct_tokens(tokens, 6)
    assert len(strings) == len(set(strings)) == 6 and "" not in strings
    for index, token in enumerate(tokens):
        if token and token not in tokens[:index]:
            assert strings[index] == token


def test_more_token_strings_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="3 token strings for a vocabulary of 2"):
        distinct_tokens(["a", "b", "c"], 2)


def test_scaled_rotary_positions_are_written_as_divisors(
    tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig, tiny_dspark: DSpark
) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    drafter = build_dspark(tiny_target, tiny_target_config)
    drafter.spec = replace(drafter.spec, rope_parameters=rope)
    write_gguf_drafter(drafter, tmp_path / "scaled.gguf", dtype=torch.bfloat16)
    stored = read(tmp_path / "scaled.gguf")[1]["rope_freqs.weight"].data
    torch.testing.assert_close(torch.from_numpy(stored.copy()), torch.full((16,), 4.0))
    assert torch.equal(rotary_factors(tiny_dspark.spec), torch.ones(16))
