"""Tests of models/published.py: classic EAGLE-3 files written here draft as what they hold, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint import load_drafter
from models.eagle3 import Eagle3
from tests.conftest import eagle3_config
from tests.draft_batches import greedy_sampler
from tests.published_files import EMBEDDING, HEAD, LAYER_IDS, SIZES, SPEC, build, check_same_drafts, write

QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}  # vLLM's class with such norms
CLASSIC = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}


def classic_tensors(drafter: Eagle3) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.state_dict().items()}


CLASSIC_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reduced": ({"draft_vocab_size": 20, "own_head": True}, {"draft_vocab_size": 20}),
    "permuted": ({"draft_vocab_size": 60, "own_head": True}, {"draft_vocab_size": 60}),
    "full": ({"own_head": True}, {"draft_vocab_size": None}),
    "the target's head": ({}, {}),
    "the target's rows": ({"draft_vocab_size": 20}, {"draft_vocab_size": 20}),
    "q and k norms": ({"own_head": True, "qk_norm": True}, QWEN3),
    "normed residual": ({"own_head": True, "norm_before_residual": True}, {"norm_before_residual": True}),
    "fc norms": ({"own_head": True, "fc_norm": True}, {"fc_norm": True}),
    "fc norms, SGLang's name": ({"own_head": True, "fc_norm": True}, {"use_aux_norm": True}),
    "input norm": ({"own_head": True, "norm_before_fc": True}, {"norm_before_fc": True}),
    "input norm, nested": ({"own_head": True, "norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}),
    "normed feedback": ({"own_head": True, "norm_output": True}, {"norm_output": True}),
    "everything": (
        {"draft_vocab_size": 20, "own_head": True, "qk_norm": True, "fc_norm": True, "norm_output": True},
        {**QWEN3, "draft_vocab_size": 20, "fc_norm": True, "norm_output": True},
    ),
}


@pytest.mark.parametrize(("options", "fields"), CLASSIC_CASES.values(), ids=CLASSIC_CASES)
@pytest.mark.parametrize("with_embedding", [True, False])
def test_classic_eagle3_drafts_as_written(
    tmp_path: Path, options: dict[str, Any], fields: dict[str, Any], with_embedding: bool
) -> None:
    drafter = build(eagle3_config(num_draft_tokens=7, **options))
    extra = {"embed_tokens.weight": EMBEDDING} if with_embedding else {}
    config = {**CLASSIC, **fields}
    loaded = load_drafter(write(tmp_path, config, {**classic_tensors(drafter), **extra}))
    assert ([loaded.format], loaded.bound) == (config["architectures"], False)
    assert isinstance(loaded.drafter, Eagle3) and loaded.drafter.config == drafter.config
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize("size", [20, 60])
def test_members_that_a_classic_file_lacks_follow_from_the_offsets(tmp_path: Path, size: int) -> None:
    drafter = build(eagle3_config(num_draft_tokens=7, draft_vocab_size=size, own_head=True))
    tensors = classic_tensors(drafter)
    del tensors["t2d"]
    loaded = load_drafter(write(tmp_path, {**CLASSIC, "draft_vocab_size": size}, tensors)).drafter
    assert isinstance(loaded, Eagle3) and torch.equal(loaded.t2d, drafter.t2d)
    check_same_drafts(loaded, drafter)


def test_plain_layer_names_and_members_of_a_whole_vocabulary_are_read_too(tmp_path: Path) -> None:
    drafter = build(eagle3_config(num_draft_tokens=7, own_head=True))
    tensors = {**drafter.state_dict(), "t2d": torch.ones(60, dtype=torch.bool)}
    check_same_drafts(load_drafter(write(tmp_path, CLASSIC, tensors)).drafter, drafter)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("d2t"), r"draft_vocab_size=20 of 60 tokens, but no tensor d2t says which"),
        (lambda tensors: tensors.update(d2t=torch.arange(20)), r"t2d and d2t name different draft tokens"),
        (lambda tensors: tensors.update(d2t=0 * torch.arange(20)), r"t2d and d2t name different draft tokens"),
        (lambda tensors: (tensors.pop("t2d"), tensors["d2t"].zero_()), r"d2t is all zero"),
        (lambda tensors: (tensors.pop("t2d"), tensors["d2t"].fill_(50)), r"d2t maps draft tokens to 50\.\.69"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"][:19].clone()), r"d2t has shape \[19\], expected \[20\]"),
        (lambda tensors: tensors.pop("fc.weight"), r"missing fc\.weight \[32, 96\]"),
        (lambda tensors: tensors.update({"fc.bias": torch.ones(32)}), r"unexpected fc\.bias \[32\]"),
        (
            lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(59, 32)}),
            r"embed_tokens\.weight has shape \[59, 32\], expected \[60, 32\]",
        ),
    ],
    ids=["no d2t", "arange", "zeros", "zeros alone", "outside", "short", "missing", "extra", "embedding"],
)
def test_classic_tensors_that_do_not_fit_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    tensors = classic_tensors(build(eagle3_config(draft_vocab_size=20, own_head=True)))
    edit(tensors)
    with pytest.raises(ValueError, match=message):
        load_drafter(write(tmp_path, {**CLASSIC, "draft_vocab_size": 20}, tensors))


def test_all_tensors_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    tensors = classic_tensors(build(eagle3_config(own_head=True)))
    tensors["norm.weight"] = torch.ones(31)
    tensors["midlayer.extra.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit its config") as error:
        load_drafter(write(tmp_path, CLASSIC, tensors))
    for problem in (
        "missing layers.0.hidden_norm.weight [32]",
        "unexpected layers.0.extra.weight [32]",
        "norm.weight has shape [31], expected [32]",
    ):
        assert problem in str(error.value)


def test_an_embedding_of_another_target_is_noticed_when_the_target_is_known(tmp_path: Path) -> None:
    tensors = {**classic_tensors(build(eagle3_config(own_head=True))), "embed_tokens.weight": EMBEDDING.flip(0)}
    loaded = load_drafter(write(tmp_path, CLASSIC, tensors)).drafter
    with pytest.raises(ValueError, match="the drafter came with another embedding than this target's"):
        loaded.bind(EMBEDDING, HEAD)


KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("fields", "layer_ids"),
    [
        ({}, LAYER_IDS),
        ({KEY: []}, LAYER_IDS),
        ({KEY: [3, 5, 8]}, (2, 4, 7)),
        ({KEY: [3, 8]}, (2, 7)),
        ({"target_layer_ids": [2, 4, 7]}, (2, 4, 7)),
        ({"target_layer_ids": [2, 4, 7], "eagle_config": {KEY: [2, 4, 7]}}, (2, 4, 7)),
        ({"eagle_config": None}, LAYER_IDS),
        ({"eagle_config": {"use_aux_hidden_state": True}}, LAYER_IDS),
        ({"eagle_config": {KEY: [1, 5, 8]}}, LAYER_IDS),
        ({"eagle_config": {KEY: [2, 6, 9]}}, LAYER_IDS),
    ],
)
def test_fused_layers_are_read_in_each_convention(
    tmp_path: Path, fields: dict[str, Any], layer_ids: tuple[int, ...]
) -> None:
    drafter = build(eagle3_config(num_draft_tokens=7, own_head=True), layer_ids=layer_ids)
    loaded = load_drafter(write(tmp_path, {**CLASSIC, **fields}, classic_tensors(drafter))).drafter
    assert loaded.target_layer_ids == layer_ids
    check_same_drafts(loaded, drafter)


def test_layers_that_two_engines_read_differently_are_refused_with_the_way_out(tmp_path: Path) -> None:
    tensors = classic_tensors(build(eagle3_config(own_head=True)))
    config = {**CLASSIC, "eagle_config": {KEY: [2, 5, 8]}}
    with pytest.raises(ValueError, match=rf"config\.json: eagle_config\.{KEY}=\[2, 5, 8\] .* add target_layer_ids"):
        load_drafter(write(tmp_path, config, tensors))


def test_the_targets_depth_comes_from_the_target_where_the_file_is_silent(tmp_path: Path) -> None:
    drafter = build(eagle3_config(num_draft_tokens=7, own_head=True))
    config = {name: value for name, value in CLASSIC.items() if name != "num_target_layers"}
    folder = write(tmp_path, config, classic_tensors(drafter))
    with pytest.raises(ValueError, match=r"config\.json: missing num_target_layers"):
        load_drafter(folder)
    loaded = load_drafter(folder, target=SPEC).drafter
    assert loaded.spec.num_layers == 12
    check_same_drafts(loaded, drafter)


def test_no_token_is_taken_for_a_stop_that_the_file_does_not_name(tmp_path: Path) -> None:
    """Transformers' own default is Llama's 2, behind which nothing would be drafted."""
    config = {name: value for name, value in CLASSIC.items() if name != "eos_token_id"}
    tensors = classic_tensors(build(eagle3_config(own_head=True)))
    loaded = load_drafter(write(tmp_path, config, tensors)).drafter.bind(EMBEDDING, HEAD)
    assert loaded.spec.eos_token_ids == ()
    state = loaded.start(torch.ones(1, 2).long(), torch.ones(1, 2, 96), torch.tensor([2]), 16)
    assert loaded.propose(state, torch.tensor([5]), greedy_sampler(1), 7).lengths.tolist() == [7]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CLASSIC, "num_hidden_layers": 2}, "EAGLE-3 drafter of 2 layers is not supported"),
        ({**CLASSIC, "target_hidden_size": 64}, "target_hidden_size=64, the drafter's hidden_size=32"),
        ({**CLASSIC, "norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({**CLASSIC, KEY: [0, 5, 8]}, r"target_layer_ids must be ascending, unique and in 0\.\.11"),
        ({**CLASSIC, "num_target_layers": 4}, r"target_layer_ids must be ascending, unique and in 0\.\.3"),
        ({**CLASSIC, "vocab_size": 61}, r"lm_head\.weight has shape \[60, 32\], expected \[61, 32\]"),
    ],
)
def test_what_this_project_cannot_run_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_drafter(write(tmp_path, config, classic_tensors(build(eagle3_config(own_head=True)))))
