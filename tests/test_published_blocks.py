"""Tests of models/published.py: z-lab's and DeepSpec's files written here draft as what they hold, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.base import Drafter, Engine, SlotLayout
from models.checkpoint import load_drafter
from models.dflash import DFlash
from models.dspark import DSpark, MarkovHeadType
from models.eagle3 import Eagle3
from models.export import export_drafter
from models.losses import published_decay
from tests.conftest import dflash_config, dspark_config, eagle3_config
from tests.published_files import EMBEDDING, HEAD, SIZES, build, check_same_drafts, write

QWEN3 = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2}
ZLAB = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 5, 8]},
}
DEEPSPEC = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": 4,
    "target_layer_ids": [1, 5, 8],
    "num_anchors": 512,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DEEPSPEC_EAGLE3 = {
    **QWEN3,
    "architectures": ["Qwen3Eagle3Model"],
    "num_hidden_layers": 1,
    "draft_num_hidden_layers": 1,
    "target_layer_ids": [1, 5, 8],
    "ttt_length": 4,
    "step_loss_decay": 0.8,
}


def with_copies(drafter: Drafter) -> dict[str, Tensor]:
    """DeepSpec keeps the target's embedding and head in the file."""
    return {**drafter.state_dict(), "embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}


# ---- z-lab's DFlash


ZLAB_OPTIONS: dict[str, Any] = {"num_layers": 2, "slot_layout": SlotLayout.in_place, "num_draft_tokens": 4}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 6}, None),
        ({"sample_from_anchor": False}, None),
        ({"dflash_config": None, "mask_token_id": 4, "target_layer_ids": [1, 5, 8]}, None),
        ({"block_size": 16, "dflash_config": {**ZLAB["dflash_config"], "block_size": 5}}, None),
        ({**SLIDING, "is_causal": False}, 6),
        ({**SLIDING, "dflash_config": {**ZLAB["dflash_config"], "causal": False}}, 6),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
    ],
)
def test_zlab_dflash_drafts_as_written(tmp_path: Path, fields: dict[str, Any], window: int | None) -> None:
    """A block of five tokens holds the known one and four drafts, in place."""
    drafter = build(dflash_config(**ZLAB_OPTIONS, sliding_window=window))
    loaded = load_drafter(write(tmp_path, {**ZLAB, **fields}, drafter.state_dict()))
    assert (loaded.format, loaded.bound) == ("DFlashDraftModel", False)
    assert isinstance(loaded.drafter, DFlash) and loaded.drafter.config.sliding_window == window
    assert loaded.drafter.decay == published_decay(4)
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize(("num_layers", "layer_ids"), [(1, (6,)), (2, (1, 9)), (3, (1, 5, 9)), (5, (1, 3, 5, 7, 9))])
def test_layers_that_a_zlab_file_does_not_name_follow_its_rule(
    tmp_path: Path, num_layers: int, layer_ids: tuple[int, ...]
) -> None:
    drafter = build(dflash_config(**{**ZLAB_OPTIONS, "num_layers": num_layers}), layer_ids=layer_ids)
    config = {**ZLAB, "num_hidden_layers": num_layers, "dflash_config": {"mask_token_id": 4}}
    check_same_drafts(load_drafter(write(tmp_path, config, drafter.state_dict())).drafter, drafter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (SLIDING, "sliding_attention layers without is_causal=false are causal inside a block"),
        ({**SLIDING, "is_causal": True}, "sliding_attention layers without is_causal=false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types mixes \['full_attention', 'sliding_"),
        ({"sample_from_anchor": True}, "DFlashDraftModel is in_place, but sample_from_anchor=true says anchor_first"),
        ({"dflash_config": {"sample_from_anchor": True, "mask_token_id": 4}}, "but sample_from_anchor=true"),
        ({"dflash_config": {"target_layer_ids": [1, 5, 8]}}, r"config\.json: missing 'mask_token_id'"),
        ({"dflash_config": {"mask_token_id": 60}}, r"mask_token_id must be in 0\.\.59"),
        ({"block_size": 1}, r"num_draft_tokens must be at least 1, got 0"),
        ({**SLIDING, "is_causal": False, "sliding_window": None}, "sliding_window or use_sliding_window denies it"),
        (
            {**SLIDING, "is_causal": False, "use_sliding_window": False},
            "sliding_window or use_sliding_window denies it",
        ),
        ({**SLIDING, "is_causal": False, "sliding_window": 4}, "sliding_window must be null or more than the 5 slots"),
    ],
)
def test_a_zlab_file_that_this_project_cannot_run_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_drafter(write(tmp_path, {**ZLAB, **fields}, build(dflash_config(**ZLAB_OPTIONS)).state_dict()))


def test_zlab_tensors_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    tensors = build(dflash_config(**ZLAB_OPTIONS)).state_dict()
    del tensors["hidden_norm.weight"]
    tensors |= {"embed_tokens.weight": EMBEDDING, "fc.weight": torch.ones(32, 64)}
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit its config") as error:
        load_drafter(write(tmp_path, ZLAB, tensors))
    for problem in ("missing hidden_norm.weight [32]", "unexpected embed_tokens.weight [60, 32]", "[32, 64], expected"):
        assert problem in str(error.value)


# ---- DeepSpec


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla": ({}, {}),
    "gated": ({"markov_head": MarkovHeadType.gated}, {"markov_head_type": "gated"}),
    "rnn": ({"markov_head": MarkovHeadType.rnn}, {"markov_head_type": "rnn"}),
    "confidence without markov": ({"confidence_with_markov": False}, {"confidence_head_with_markov": False}),
    "no confidence": ({"confidence": False}, {"enable_confidence_head": False}),
    "no markov": ({"markov_rank": 0, "confidence_with_markov": False}, {"markov_rank": 0}),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("options", "fields"), HEADS.values(), ids=HEADS)
def test_deepspec_dspark_drafts_as_written(
    tmp_path: Path, options: dict[str, Any], fields: dict[str, Any], in_place: bool
) -> None:
    """sample_from_anchor=false means in_place; block_size counts proposals in either layout, as engines read it."""
    layout = {"slot_layout": SlotLayout.in_place} if in_place else {}
    drafter = build(dspark_config(num_layers=2, **layout, **options))
    fields = fields | ({"sample_from_anchor": False} if in_place else {})
    loaded = load_drafter(write(tmp_path, {**DEEPSPEC, **fields}, with_copies(drafter)))
    assert (loaded.format, loaded.bound) == ("Qwen3DSparkModel", True)
    assert isinstance(loaded.drafter, DSpark)
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (SlotLayout.anchor_first, {}),
        (SlotLayout.anchor_first, {"sample_from_anchor": True}),
        (SlotLayout.in_place, {"sample_from_anchor": False}),
    ],
)
def test_deepspec_without_heads_is_dflash(tmp_path: Path, layout: SlotLayout, fields: dict[str, Any]) -> None:
    drafter = build(dflash_config(num_layers=2, slot_layout=layout))
    config = {**DEEPSPEC, "markov_rank": 0, "enable_confidence_head": False, **fields}
    del config["markov_head_type"], config["confidence_head_with_markov"]  # as published
    loaded = load_drafter(write(tmp_path, config, with_copies(drafter)))
    assert (loaded.format, loaded.bound) == ("Qwen3DSparkModel", True)
    assert isinstance(loaded.drafter, DFlash) and loaded.drafter.decay == published_decay(4)
    check_same_drafts(loaded.drafter, drafter)


def test_an_unknown_markov_head_is_named(tmp_path: Path) -> None:
    drafter = build(dspark_config(num_layers=2))
    with pytest.raises(ValueError, match=r"config\.json: markov_head_type='lstm' must be vanilla, gated or rnn"):
        load_drafter(write(tmp_path, {**DEEPSPEC, "markov_head_type": "lstm"}, with_copies(drafter)))


@pytest.mark.parametrize(
    ("options", "fields", "problem"),
    [
        ({}, {"markov_head_type": "gated"}, "missing markov_head.gate_proj.weight [8, 40]"),
        ({"confidence": False}, {}, "missing confidence_head.proj.weight [1, 40]"),
        ({}, {"enable_confidence_head": False}, "unexpected confidence_head.proj.bias [1]"),
        ({}, {"confidence_head_with_markov": False}, "proj.weight has shape [1, 40], expected [1, 32]"),
        ({}, {"markov_rank": 4}, "markov_head.markov_w2.weight has shape [60, 8], expected [60, 4]"),
    ],
)
def test_heads_that_config_and_tensors_tell_differently_are_refused(
    tmp_path: Path, options: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    drafter = build(dspark_config(num_layers=2, **options))
    with pytest.raises(ValueError, match=r"does not fit its config") as error:
        load_drafter(write(tmp_path, {**DEEPSPEC, **fields}, with_copies(drafter)))
    assert problem in str(error.value)


def test_deepspec_eagle3_drafts_as_written(tmp_path: Path) -> None:
    drafter = build(eagle3_config(qk_norm=True))
    loaded = load_drafter(write(tmp_path, DEEPSPEC_EAGLE3, with_copies(drafter)))
    assert (loaded.format, loaded.bound) == ("Qwen3Eagle3Model", True)
    assert isinstance(loaded.drafter, Eagle3) and loaded.drafter.config == drafter.config
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize("name", ["ttt_length", "step_loss_decay", "target_layer_ids"])
def test_a_missing_field_of_deepspec_eagle3_is_named(tmp_path: Path, name: str) -> None:
    config = {key: value for key, value in DEEPSPEC_EAGLE3.items() if key != name}
    with pytest.raises(ValueError, match=rf"config\.json: missing '{name}'"):
        load_drafter(write(tmp_path, config, with_copies(build(eagle3_config(qk_norm=True)))))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_deepspec_eagle3_needs_both_copies(tmp_path: Path, name: str) -> None:
    tensors = with_copies(build(eagle3_config(qk_norm=True)))
    del tensors[name]
    with pytest.raises(ValueError, match=r"of embed_tokens\.weight and lm_head\.weight one is missing"):
        load_drafter(write(tmp_path, DEEPSPEC_EAGLE3, tensors))


def test_deepspec_eagle3_of_several_layers_is_refused(tmp_path: Path) -> None:
    tensors = with_copies(build(eagle3_config(qk_norm=True)))
    with pytest.raises(ValueError, match="EAGLE-3 drafter of 2 layers is not supported"):
        load_drafter(write(tmp_path, {**DEEPSPEC_EAGLE3, "draft_num_hidden_layers": 2}, tensors))


# ---- written by our own export


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_what_is_exported_for_deepspec_drafts_as_the_original(tmp_path: Path, kind: str) -> None:
    if kind == "eagle3":
        drafter = build(eagle3_config(qk_norm=True), layer_ids=(1, 3, 5, 7, 9))  # the reference fuses five layers
    else:
        drafter = build(dflash_config(num_layers=2))
    export_drafter(drafter, tmp_path, engine=Engine.deepspec, dtype=torch.float32, card="")
    check_same_drafts(load_drafter(tmp_path).drafter, drafter)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": False},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"own_head": True},
        {"draft_vocab_size": 20},
    ],
)
def test_eagle3_of_another_shape_than_the_references_is_not_exported(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = build(eagle3_config(**{"qk_norm": True, **changes}), layer_ids=(1, 3, 5, 7, 9))
    with pytest.raises(ValueError, match="the deepspec format takes only the reference's EAGLE-3"):
        export_drafter(drafter, tmp_path / "out", engine=Engine.deepspec, dtype=torch.float32, card="")
    assert not (tmp_path / "out").exists()


def test_exports_that_no_engine_can_read_are_refused(tmp_path: Path) -> None:
    refused = [
        (build(eagle3_config(qk_norm=True)), Engine.deepspec, "five fused layers"),
        (build(dflash_config(sliding_window=6)), Engine.gguf, r"model\.sliding_window=6"),
        (build(dflash_config(slot_layout=SlotLayout.in_place)), Engine.deepspec, "no slot_layout=in_place"),
        (build(dflash_config(sliding_window=6)), Engine.deepspec, r"no sliding window \(got 6\)"),
    ]
    for drafter, engine, message in refused:
        with pytest.raises(ValueError, match=message):
            export_drafter(drafter, tmp_path / "out", engine=engine, dtype=torch.float32, card="")
