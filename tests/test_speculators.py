"""Tests of models/speculators.py: files in that project's format draft as what they hold, or are refused."""

from pathlib import Path
from typing import Any

import pytest

from models.base import SlotLayout
from models.checkpoint import load_drafter
from models.dflash import DFlash
from models.dspark import DSpark, MarkovHeadType
from models.eagle3 import Eagle3
from tests.conftest import dflash_config, dspark_config, eagle3_config
from tests.published_files import EMBEDDING, SIZES, SPEC, build, check_same_drafts, write
from tests.test_published_blocks import with_copies

LAYERS = {name: value for name, value in SIZES.items() if name not in ("num_target_layers", "tie_word_embeddings")}
VERIFIER = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}


def config_of(kind: str, *, num_layers: int, model_type: str = "qwen3", **fields: Any) -> dict[str, Any]:
    """As that project saves it; the number of drafts is what its algorithm makes of its options."""
    drafts = fields.pop("speculative_tokens", 4)
    method = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    about = {"algorithm": kind, "proposal_methods": [method], "default_proposal_method": "greedy", "verifier": VERIFIER}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.4.0",
        "architectures": [{"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}.get(kind, kind) + "DraftModel"],
        "speculators_config": about,
        "transformer_layer_config": {**LAYERS, "model_type": model_type, "num_hidden_layers": num_layers},
        "draft_vocab_size": 60,
        "target_hidden_size": None,
        "dtype": "float32",
        "tie_word_embeddings": False,
        **fields,
    }


DSPARK = {
    "block_size": 4,
    "aux_hidden_state_layer_ids": [2, 6, 9],  # of the layers whose outputs are 1, 5 and 8
    "mask_token_id": 4,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH = {
    "block_size": 5,
    "aux_hidden_state_layer_ids": [2, 6, 9],
    "mask_token_id": 4,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
}
EAGLE3 = {
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "embed_requires_grad": False,
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("head", list(MarkovHeadType))
def test_dspark_drafts_as_written(tmp_path: Path, in_place: bool, head: MarkovHeadType) -> None:
    layout = {"slot_layout": SlotLayout.in_place} if in_place else {}
    drafter = build(dspark_config(num_layers=2, markov_head=head, **layout))
    fields = DSPARK | {"markov_head_type": str(head)}
    fields |= {"sample_from_anchor": False, "block_size": 5} if in_place else {}
    loaded = load_drafter(
        write(tmp_path, config_of("dspark", num_layers=2, **fields), with_copies(drafter)), target=SPEC
    )
    assert (loaded.format, loaded.bound) == ("speculators", True) and isinstance(loaded.drafter, DSpark)
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize("window", [None, 6])
def test_dflash_drafts_as_written(tmp_path: Path, window: int | None) -> None:
    drafter = build(
        dflash_config(num_layers=2, slot_layout=SlotLayout.in_place, num_draft_tokens=4, sliding_window=window)
    )
    config = config_of("dflash", num_layers=2, **DFLASH)
    if window is not None:
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    loaded = load_drafter(write(tmp_path, config, with_copies(drafter)), target=SPEC)
    assert isinstance(loaded.drafter, DFlash) and loaded.bound
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": 20},
        {"norm_before_residual": False},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_eagle3_drafts_as_written(tmp_path: Path, options: dict[str, Any]) -> None:
    shared = {"norm_before_residual": True, "own_head": True}
    drafter = build(eagle3_config(num_draft_tokens=5, **shared | options))
    fields = {name: value for name, value in options.items() if name != "qk_norm"}
    model_type = "qwen3" if "qk_norm" in options else "llama"
    config = config_of("eagle3", num_layers=1, model_type=model_type, speculative_tokens=5, **EAGLE3 | fields)
    tensors = {**drafter.state_dict(), "embed_tokens.weight": EMBEDDING}
    loaded = load_drafter(write(tmp_path, config, tensors), target=SPEC)
    assert isinstance(loaded.drafter, Eagle3) and loaded.drafter.config.norm_before_residual == (
        options.get("norm_before_residual", True)
    )
    check_same_drafts(loaded.drafter, drafter)


@pytest.mark.parametrize(
    ("kind", "fields", "dropped", "message"),
    [
        (
            "peagle",
            EAGLE3,
            None,
            "speculators_model_type=peagle is not supported, only eagle3, dflash, dflash2 and dspark",
        ),
        ("dflash", {**DFLASH, "sample_from_anchor": True}, None, "sample_from_anchor=true is served by no engine"),
        ("dspark", DSPARK, "sample_from_anchor", "missing 'sample_from_anchor'"),
        ("dspark", DSPARK, "aux_hidden_state_layer_ids", "missing 'aux_hidden_state_layer_ids'"),
        ("dspark", DSPARK, "mask_token_id", "missing 'mask_token_id'"),
        ("dspark", DSPARK, "transformer_layer_config", "missing 'transformer_layer_config'"),
        (
            "dspark",
            {**DSPARK, "transformer_layer_config": "qwen3"},
            None,
            "transformer_layer_config='qwen3' must be an object",
        ),
        ("dspark", {**DSPARK, "draft_vocab_size": 20}, None, "draft_vocab_size=20 of 60 tokens"),
        ("dspark", {**DSPARK, "aux_hidden_state_layer_ids": [0, 6, 9]}, None, "0 is the embedding"),
        ("dspark", {**DSPARK, "aux_hidden_state_layer_ids": [6, 2, 9]}, None, "must ascend from 1 "),
        ("eagle3", EAGLE3, "norm_before_residual", "missing 'norm_before_residual'"),
        ("eagle3", EAGLE3, "eagle_aux_hidden_state_layer_ids", "missing 'eagle_aux_hidden_state_layer_ids'"),
        ("eagle3", EAGLE3, "speculators_config", "missing speculators_config.proposal_methods"),
    ],
)
def test_what_cannot_be_read_for_sure_is_refused(
    tmp_path: Path, kind: str, fields: dict[str, Any], dropped: str | None, message: str
) -> None:
    drafter = build(eagle3_config(own_head=True) if "eagle" in kind else dspark_config(num_layers=2))
    config = config_of(kind, num_layers=1 if "eagle" in kind else 2)
    config |= fields
    config.pop(dropped, None)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as error:
        load_drafter(write(tmp_path, config, with_copies(drafter)), target=SPEC)
    assert "config.json" in str(error.value)


def test_layers_that_are_causal_inside_a_block_are_refused(tmp_path: Path) -> None:
    config = config_of("dflash", num_layers=2, **DFLASH | {"sliding_window_non_causal": False})
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
    drafter = build(dflash_config(num_layers=2, slot_layout=SlotLayout.in_place, num_draft_tokens=4))
    with pytest.raises(ValueError, match="causal inside a block"):
        load_drafter(write(tmp_path, config, with_copies(drafter)), target=SPEC)
