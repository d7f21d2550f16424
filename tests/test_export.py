"""Tests of models/export.py: every drafter in every engine's layout comes back as it was, or is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from models.base import Drafter, Engine, SlotLayout
from models.checkpoint import load_drafter
from models.drafter_files import CONFIG, WEIGHTS
from models.dspark import MarkovHeadType
from models.export import export_drafter, serve_command
from models.files import read_json
from models.target import TargetConfig, TargetIdentity
from tests.conftest import dflash2_config, dflash_config, dspark_config, eagle3_config, files_of
from tests.published_files import EMBEDDING, HEAD, LAYER_IDS, SPEC, build, check_same_drafts
from tests.test_layers import LLAMA3

IN_PLACE: dict[str, Any] = {"slot_layout": SlotLayout.in_place}
BARE: dict[str, Any] = {"markov_rank": 0, "confidence_with_markov": False}
RNN: dict[str, Any] = {"markov_head": MarkovHeadType.rnn, "confidence_with_markov": False}
BLOCKS: dict[str, Any] = {
    "dspark": dspark_config(num_layers=2),
    "dspark in place": dspark_config(**IN_PLACE),
    "dspark without markov": dspark_config(**BARE),
    "dspark without markov, in place": dspark_config(**BARE, **IN_PLACE),
    "dspark without confidence": dspark_config(confidence=False, confidence_with_markov=False),
    "dspark, window": dspark_config(sliding_window=9),
    "dflash": dflash_config(num_layers=2),
    "dflash in place": dflash_config(num_layers=2, **IN_PLACE),
    "dflash in place, window": dflash_config(sliding_window=9, **IN_PLACE),
}
DRAFTERS: dict[str, Any] = {
    **BLOCKS,
    "dflash2": dflash2_config(num_layers=2),
    "dflash2, window": dflash2_config(sliding_window=9),
    "dspark gated": dspark_config(markov_head=MarkovHeadType.gated),
    "dspark rnn": dspark_config(**RNN),
    "eagle3": eagle3_config(),
    "eagle3, reduced vocabulary": eagle3_config(draft_vocab_size=20),
    "eagle3, reduced vocabulary, own head": eagle3_config(draft_vocab_size=20, own_head=True),
    "eagle3, permuted vocabulary": eagle3_config(draft_vocab_size=60, own_head=True),
    "eagle3, own head": eagle3_config(own_head=True),
    "eagle3, qk norm": eagle3_config(qk_norm=True),
    "eagle3, normed residual": eagle3_config(norm_before_residual=True),
    "eagle3, fc norm and normed output": eagle3_config(fc_norm=True, norm_output=True, own_head=True),
    "eagle3, input norm": eagle3_config(norm_before_fc=True),
}
# What an engine cannot serve, and a part of the reason.
REFUSED = {
    (Engine.vllm, "dspark gated"): "vLLM has only vanilla ones; train with",
    (Engine.vllm, "dspark rnn"): "vLLM has only vanilla ones; train with",
    (Engine.sglang, "eagle3, qk norm"): "SGLang would leave them out",
    (Engine.sglang, "eagle3, normed residual"): "SGLang would leave them out",
}
FOLDERS = (Engine.vllm, Engine.speculators, Engine.sglang)


def export(drafter: Drafter, folder: Path, engine: Engine, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    export_drafter(drafter, folder, engine=engine, dtype=dtype, card="")
    return read_json(folder / CONFIG)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("engine", FOLDERS)
def test_what_is_exported_comes_back_bit_by_bit(tmp_path: Path, engine: Engine, name: str) -> None:
    drafter = build(DRAFTERS[name])
    reason = REFUSED.get((engine, name))
    if reason is not None:
        with pytest.raises(ValueError, match=f"engine={engine} cannot write .* {reason}"):
            export(drafter, tmp_path / "out", engine)
        assert not (tmp_path / "out").exists()
        return
    export(drafter, tmp_path, engine)
    loaded = load_drafter(tmp_path, target=SPEC).drafter
    assert type(loaded) is type(drafter)
    own, found = drafter.state_dict(), loaded.state_dict()
    for tensor_name in (own.keys() & found.keys()) - {"lm_head.weight"}:
        assert torch.equal(own[tensor_name], found[tensor_name]), tensor_name
    assert own.keys() - found.keys() <= {"d2t", "t2d"} and found.keys() - own.keys() <= {"lm_head.weight"}
    if "permuted" not in name:  # engines take such a head in the target's order, and so do candidates then
        check_same_drafts(loaded.bind(EMBEDDING, HEAD), drafter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [*FOLDERS, Engine.deepspec])
def test_weights_are_rounded_once_and_token_ids_never(tmp_path: Path, engine: Engine, dtype: torch.dtype) -> None:
    drafters = [build(DRAFTERS["dspark"]), build(DRAFTERS["eagle3, reduced vocabulary"])]
    for drafter in drafters[: 1 if engine is Engine.deepspec else 2]:
        folder = tmp_path / type(drafter).__name__
        assert export(drafter, folder, engine, dtype)["dtype"] == str(dtype).removeprefix("torch.")
        for name, tensor in load_file(folder / WEIGHTS).items():
            assert tensor.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, dtype), name
            ours = drafter.state_dict().get(name.replace("midlayer.", "layers.0."))
            assert ours is None or torch.equal(tensor, ours.to(tensor.dtype)), name


def test_an_export_is_readable_by_whom_the_users_files_are(tmp_path: Path) -> None:
    export(build(DRAFTERS["dspark"]), tmp_path, Engine.vllm)
    (tmp_path / "usual").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "usual").stat().st_mode}


@pytest.mark.parametrize("engine", list(Engine))
def test_equal_work_gives_equal_bytes(tmp_path: Path, engine: Engine) -> None:
    for name in ("a", "b"):
        export_drafter(build(DRAFTERS["dspark"]), tmp_path / name, engine=engine, dtype=torch.float32, card="card")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


# ---- fields, as each engine reads them


def test_layers_are_counted_as_each_engine_counts(tmp_path: Path) -> None:
    outputs, passed = list(LAYER_IDS), [index + 1 for index in LAYER_IDS]
    vllm, speculators, sglang = (export(build(DRAFTERS["eagle3"]), tmp_path / engine, engine) for engine in FOLDERS)
    key = "eagle_aux_hidden_state_layer_ids"
    assert vllm[key] == vllm["eagle_config"][key] == passed and speculators[key] == passed
    assert sglang["eagle_config"][key] == outputs and key not in sglang
    for config in (vllm, sglang, speculators["transformer_layer_config"]):
        assert config["num_aux_hidden_states"] == 3
    assert vllm["target_layer_ids"] == sglang["target_layer_ids"] == outputs
    for name in ("dspark", "dflash", "dflash in place"):
        folder = tmp_path / name
        vllm, speculators, sglang = (export(build(DRAFTERS[name]), folder / engine, engine) for engine in FOLDERS)
        assert vllm["target_layer_ids"] == sglang["target_layer_ids"] == outputs
        assert sglang["dflash_config"]["target_layer_ids"] == outputs
        assert vllm["dflash_config"].get("target_layer_ids", outputs) == outputs
        assert speculators["aux_hidden_state_layer_ids"] == passed


@pytest.mark.parametrize("name", BLOCKS)
def test_layout_and_causality_are_written_wherever_an_engine_looks(tmp_path: Path, name: str) -> None:
    drafter = build(BLOCKS[name])
    in_place = drafter.slot_layout is SlotLayout.in_place
    vllm, speculators, sglang = (export(drafter, tmp_path / engine, engine) for engine in FOLDERS)
    layers = speculators["transformer_layer_config"]
    for config in (vllm, sglang, speculators):
        assert config["sample_from_anchor"] is not in_place
    for config in (vllm, sglang, layers):
        assert config["is_causal"] is False
        assert config["layer_types"] == ["sliding_attention" if "window" in name else "full_attention"] * len(
            drafter.layers
        )
        assert config["use_sliding_window"] is ("window" in name)
    assert vllm["dflash_config"]["causal"] is False and speculators["sliding_window_non_causal"] is True
    drafts = speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert drafts == drafter.num_draft_tokens == speculators["block_size"] - in_place
    is_dflash = vllm["architectures"] == ["DFlashDraftModel"]
    assert is_dflash == (in_place and "dflash" in name) == (speculators["speculators_model_type"] == "dflash")
    # Engines take block_size for the number of proposals of a DSpark; of a DFlash the anchor counts.
    assert vllm["block_size"] == sglang["block_size"] == drafter.num_draft_tokens + is_dflash
    assert is_dflash or vllm["dspark_bonus_anchor"] is in_place


@pytest.mark.parametrize("engine", FOLDERS)
@pytest.mark.parametrize("name", ["dflash", "dspark without markov", "dspark without markov, in place"])
def test_engines_get_a_zero_markov_head_that_import_drops(tmp_path: Path, engine: Engine, name: str) -> None:
    drafter = build(DRAFTERS[name])
    config = export(drafter, tmp_path, engine)
    assert config["markov_rank"] == 1 and config["markov_head_type"] == "vanilla"
    assert config["confidence_head_with_markov"] is False
    weights = load_file(tmp_path / WEIGHTS)
    for side in ("markov_w1", "markov_w2"):
        matrix = weights[f"markov_head.{side}.weight"]
        assert matrix.shape == (SPEC.vocab_size, 1) and not matrix.any()
    assert load_drafter(tmp_path, target=SPEC).drafter.state_dict().keys() == drafter.state_dict().keys()


@pytest.mark.parametrize("engine", [*FOLDERS, Engine.deepspec])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 5e5}, LLAMA3], ids=["plain", "llama3"])
def test_rotary_parameters_are_the_same_in_both_spellings(tmp_path: Path, engine: Engine, rope: dict[str, Any]) -> None:
    """transformers 5 reads rope_parameters; version 4 and engines of its time rope_theta and rope_scaling."""
    drafter = build(DRAFTERS["dspark"])
    drafter.spec = replace(SPEC, rope_parameters=rope)
    config = export(drafter, tmp_path, engine)
    layers = config.get("transformer_layer_config", config)
    model_type = layers["model_type"]
    old = {key: value for key, value in layers.items() if key not in ("rope_parameters", "model_type", "layer_types")}
    new = {key: value for key, value in layers.items() if key not in ("rope_theta", "rope_scaling", "model_type")}
    for values in (old, new, {**old, **new}):
        assert AutoConfig.for_model(model_type, **values).rope_parameters == rope
    assert load_drafter(tmp_path, target=SPEC).drafter.spec.rope_parameters == rope


@pytest.mark.parametrize("engine", FOLDERS)
def test_the_draft_vocabulary_is_offsets_and_only_where_it_is_smaller(tmp_path: Path, engine: Engine) -> None:
    config = export(build(DRAFTERS["eagle3, reduced vocabulary"]), tmp_path / "reduced", engine)
    weights = load_file(tmp_path / "reduced" / WEIGHTS)
    ids = weights["d2t"] + torch.arange(20)
    assert config["draft_vocab_size"] == 20 and torch.equal(weights["t2d"].nonzero().squeeze(1), ids.sort().values)
    assert torch.equal(weights["lm_head.weight"], HEAD[ids])
    drafter = build(DRAFTERS["eagle3, permuted vocabulary"])
    export(drafter, tmp_path / "permuted", engine)
    weights = load_file(tmp_path / "permuted" / WEIGHTS)
    assert "d2t" not in weights and torch.equal(weights["lm_head.weight"][drafter.draft_ids], drafter.lm_head.weight)
    whole = export(build(DRAFTERS["eagle3"]), tmp_path / "whole", engine)["draft_vocab_size"]
    assert whole == (None if engine is Engine.sglang else 60)  # SGLang: null = the target's head


# ---- what is written beside, and refusals


def test_an_export_names_its_target(
    tmp_path: Path, tiny_target_config: TargetConfig, tiny_identity: TargetIdentity
) -> None:
    about: dict[str, Any] = {"target": tiny_target_config, "identity": tiny_identity}
    for engine in FOLDERS:
        drafter = build(DRAFTERS["dspark"])
        export_drafter(drafter, tmp_path / engine, engine=engine, dtype=torch.float32, card="", **about)
        assert read_json(tmp_path / engine / CONFIG)["target"] == vars(tiny_identity)
    verifier = read_json(tmp_path / Engine.speculators / CONFIG)["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": tiny_target_config.path, "architectures": ["Qwen3ForCausalLM"]}


SPEC_REFUSALS = [
    ({"model_type": "gemma3_text"}, "model_type=gemma3_text"),
    ({"embedding_scale": 8.0}, "embedding_scale=8"),
    ({"logit_softcap": 30.0}, r"logit_softcap=30\.0"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act=gelu_pytorch_tanh"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
]


@pytest.mark.parametrize(("changes", "message"), SPEC_REFUSALS)
@pytest.mark.parametrize("engine", FOLDERS)
@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_targets_that_an_engine_cannot_draft_for_are_refused(
    tmp_path: Path, engine: Engine, name: str, changes: dict[str, Any], message: str
) -> None:
    drafter = build(DRAFTERS[name])
    drafter.spec = replace(SPEC, **changes)
    with pytest.raises(ValueError, match=f"engine={engine} cannot write a drafter with target {message}"):
        export(drafter, tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", list(Engine))
def test_a_card_says_how_the_engine_serves_it(engine: Engine) -> None:
    commands = {
        Engine.vllm: "vllm serve org/target --speculative-config",
        Engine.speculators: "vllm serve org/target --speculative-config",
        Engine.sglang: "python -m sglang.launch_server --model-path org/target",
        Engine.gguf: "llama-server --model TARGET.gguf --spec-draft-model",
        Engine.deepspec: "DeepSpec's evaluator",
    }
    kinds = {
        "dspark": ("dspark", "DSPARK", "draft-dspark"),
        "dflash": ("dspark", "DSPARK", "draft-dspark"),
        "dflash in place": ("dflash", "DFLASH", "draft-dflash"),
        "eagle3": ("eagle3", "EAGLE3", "draft-eagle3"),
    }
    for name, (method, algorithm, kind) in kinds.items():
        if engine is Engine.deepspec and name != "dspark":
            continue
        text = serve_command(build(DRAFTERS[name]), engine, "org/target")
        assert commands[engine] in text
        said = {Engine.sglang: f"--speculative-algorithm {algorithm}", Engine.gguf: f"--spec-type {kind}"}
        assert said.get(engine, f'"method": "{method}"') in text
        served_by_vllm = engine in (Engine.vllm, Engine.speculators)
        assert ("VLLM_USE_V2_MODEL_RUNNER=1" in text) == (served_by_vllm and method == "dspark"), name
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in serve_command(build(DRAFTERS["dflash2"]), Engine.vllm, "org/target")
