"""Tests of models/gguf_target.py: a target and its tokenizer as llama.cpp reads them."""

import copy
import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from models.base import Engine
from models.export import export_drafter
from models.gguf import TOKENIZER, TOKENS
from models.gguf_target import drafter_vocabulary, split_name, tokenizer_keys, write_gguf_target
from models.spec import TargetSpec
from models.target import Target, TargetConfig
from tests import tiny_families
from tests.conftest import dspark_config
from tests.draft_batches import enliven
from tests.gguf_target import write_target
from tests.llama_cpp import need_llama_cpp, running, serve
from tests.test_engines import NUM_TOKENS, as_llama_cpp_counts, runtime

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
TEXTS = [
    "It's 12345 o'clock, isn't it?\n\n  def f(x):\n\treturn x ** 2  # né, 東京\r\n",
    "<|im_start|>user\nHow many 2024s are 7 x 31?<|im_end|>\n<|im_start|>assistant\n",
    "   leading, trailing   ",
]


def tokenizer_of(split: Any) -> PreTrainedTokenizerFast:
    """A small byte-level BPE, trained on the texts so that merges of many kinds occur."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator([*TEXTS, *(str(n) for n in range(100))] * 2, trainer)
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", **special)


@pytest.mark.parametrize("name", SPLITS)
def test_a_byte_level_tokenizer_is_copied_with_the_name_of_its_split(name: str) -> None:
    tokenizer = tokenizer_of(SPLITS[name])
    size = len(tokenizer) + 3  # rows of the embedding without a token
    keys = tokenizer_keys(tokenizer, size)
    assert keys is not None and (keys[TOKENIZER], keys["tokenizer.ggml.pre"]) == ("gpt2", name)
    assert keys[TOKENS][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = keys["tokenizer.ggml.token_type"]
    assert len(kinds) == len(keys[TOKENS]) == size and kinds[-3:] == [5, 5, 5]  # unused
    assert kinds[tokenizer.convert_tokens_to_ids("<|im_end|>")] == 3  # control
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert all(" " in merge for merge in keys["tokenizer.ggml.merges"])


def test_a_tokenizer_of_another_kind_leaves_a_drafter_its_token_strings() -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer_keys(tokenizer, 3) is None
    assert drafter_vocabulary(tokenizer, 3) == {TOKENIZER: "llama", TOKENS: ["a", "b", "[UNUSED2]"]}
    assert split_name({"type": "Whitespace"}) is None


def test_targets_that_cannot_be_written_are_refused_with_the_way_out(
    tiny_target_config: TargetConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"target=tiny: its tokenizer .* convert_hf_to_gguf\.py"):
        write_gguf_target(tiny_target_config, tmp_path / "tiny.gguf", dtype=torch.float32)
    assert not (tmp_path / "tiny.gguf").exists()
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    tiny_qwen3(**window).model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"with_target=true cannot write .* sliding_window=8"):
        write_gguf_target(replace(tiny_target_config, path=str(tmp_path)), tmp_path / "x.gguf", dtype=torch.float32)


def tiny_qwen3(**changes: Any) -> Target:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**tiny_families.SIZES, **changes}))
    return Target(model, TargetSpec.from_config(model.config), ())


@pytest.mark.engine
@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_tokenizes_as_the_target_does(name: str, tiny_target: Target, tmp_path: Path) -> None:
    need_llama_cpp()
    tokenizer = tokenizer_of(SPLITS[name])
    keys = tokenizer_keys(tokenizer, len(tokenizer))
    assert keys is not None
    target = tiny_qwen3(vocab_size=len(tokenizer))
    write_target(target, tmp_path / "target.gguf", end_token_id=0, vocabulary=keys)
    with running(tmp_path / "target.gguf", None) as url:
        for text in TEXTS:
            body = json.dumps({"content": text, "parse_special": True}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/tokenize", body)) as reply:
                assert json.load(reply)["tokens"] == tokenizer.encode(text, add_special_tokens=False), text


@pytest.mark.engine
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_llama_cpp_drafts_for_every_family_that_is_written(name: str, tmp_path: Path) -> None:
    """The target's own text, and as many drafts accepted; Llama's positions rotate neighbours there, Qwen3's halves."""
    need_llama_cpp()
    target = copy.copy(tiny_families.build(name))
    target.spec = replace(target.spec, eos_token_ids=(49,))
    drafter = enliven(dspark_config(num_draft_tokens=4).build(target.spec, target_layer_ids=(0, 2), mask_token_id=4))
    drafter.bind(target.embedding, target.head)
    prompts = [[5, 9, 3], [7, 2, 2, 8, 1], [11, 30]]
    expected = [as_llama_cpp_counts(g) for g in runtime(target, drafter, prompts, 0.0)]
    write_target(target, tmp_path / "target.gguf", end_token_id=target.spec.eos_token_ids[0])
    export_drafter(drafter, tmp_path, engine=Engine.gguf, dtype=torch.float32, card="")
    options: dict[str, Any] = {"num_draft_tokens": 4, "num_tokens": NUM_TOKENS, "threshold": 0.0}
    assert serve(tmp_path / "target.gguf", tmp_path / "dspark.gguf", prompts, **options) == expected
