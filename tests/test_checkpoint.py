"""Tests of models/checkpoint.py: what is saved comes back bit by bit, and what does not fit is refused by name."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.base import Engine, SlotLayout
from models.checkpoint import check_target, load_drafter, load_weights, save_drafter
from models.drafter_files import read_weights, resolve_folder, step_folder
from models.dspark import DSpark, DSparkConfig, MarkovHeadType
from models.export import export_drafter
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_dspark
from tests.draft_batches import mixed_batch
from tests.training_logits import training_logits


@pytest.fixture
def native(tmp_path: Path, tiny_dspark: DSpark, tiny_identity: TargetIdentity) -> Path:
    folder = tmp_path / "native"
    save_drafter(tiny_dspark, folder, target=asdict(tiny_identity))
    return folder


@pytest.fixture
def deepspec(tmp_path: Path, tiny_dspark: DSpark) -> Path:
    folder = tmp_path / "deepspec"
    export_drafter(tiny_dspark, folder, engine=Engine.deepspec, dtype=torch.float32, card="# A drafter\n")
    return folder


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def check_same_weights(loaded: DSpark, expected: DSpark) -> None:
    state = expected.state_dict()
    assert list(loaded.state_dict()) == list(state)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name


def test_native_folders_come_back_bit_by_bit(native: Path, tiny_dspark: DSpark) -> None:
    loaded = load_drafter(native)
    assert (loaded.format, loaded.bound) == ("native", False)
    assert not loaded.drafter.training
    check_same_weights(loaded.drafter, tiny_dspark)
    for name in ("config", "spec", "target_layer_ids", "mask_token_id", "num_draft_tokens", "slot_layout", "decay"):
        assert getattr(loaded.drafter, name) == getattr(tiny_dspark, name), name
    assert set(load_file(native / "model.safetensors")) == set(tiny_dspark.state_dict())  # no embedding, no head


def test_equal_drafters_give_equal_bytes(native: Path, tmp_path: Path, tiny_identity: TargetIdentity) -> None:
    save_drafter(load_drafter(native).drafter, tmp_path / "again", target=asdict(tiny_identity))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (native / name).read_bytes()
    assert sorted(path.name for path in native.iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_can_be_loaded_in_another_dtype(native: Path, tiny_dspark: DSpark) -> None:
    loaded = load_drafter(native, dtype=torch.bfloat16).drafter
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, tiny_dspark.state_dict()[name].bfloat16()), name


def test_deepspec_folders_come_back_bit_by_bit_with_equal_logits(
    deepspec: Path, tiny_dspark: DSpark, tiny_target: Target
) -> None:
    loaded = load_drafter(deepspec)
    assert (loaded.format, loaded.bound) == ("Qwen3DSparkModel", True)
    check_same_weights(loaded.drafter, tiny_dspark)
    assert torch.equal(loaded.drafter.embedding, tiny_target.embedding)
    assert torch.equal(loaded.drafter.head, tiny_target.head)
    batch = mixed_batch(tiny_dspark)
    ours, expected = (training_logits(drafter, batch) for drafter in (loaded.drafter, tiny_dspark))
    assert torch.equal(ours.draft, expected.draft)
    assert torch.equal(ours.confidence, expected.confidence)
    assert (deepspec / "README.md").read_text() == "# A drafter\n"


@pytest.mark.parametrize("changes", [{"markov_rank": 0, "confidence_with_markov": False}, {"confidence": False}])
@pytest.mark.parametrize("markov_head", list(MarkovHeadType))
def test_every_head_survives_the_deepspec_format(
    tmp_path: Path,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    changes: dict[str, Any],
    markov_head: MarkovHeadType,
) -> None:
    options = {"num_layers": 2, "num_draft_tokens": 3, "markov_head": markov_head, **changes}
    drafter = build_dspark(tiny_target, tiny_target_config, **options)
    export_drafter(drafter, tmp_path, engine=Engine.deepspec, dtype=torch.float32, card="")
    loaded = load_drafter(tmp_path).drafter
    check_same_weights(loaded, drafter)
    unstored = ("loss", "confidence_weight")
    same_weights = {name: getattr(drafter.config, name) for name in unstored}
    assert replace(loaded.config, **same_weights) == drafter.config


def test_an_export_may_narrow_the_weights(tmp_path: Path, tiny_dspark: DSpark) -> None:
    export_drafter(tiny_dspark, tmp_path, engine=Engine.deepspec, dtype=torch.bfloat16, card="")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in load_drafter(tmp_path, dtype=torch.bfloat16).drafter.state_dict().items():
        assert torch.equal(tensor, tiny_dspark.state_dict()[name].bfloat16()), name


def test_exports_that_an_engine_cannot_serve_are_refused(
    tmp_path: Path, tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    in_place = build_dspark(tiny_target, tiny_target_config, slot_layout=SlotLayout.in_place)
    with pytest.raises(ValueError, match="deepspec format has no slot_layout=in_place"):
        export_drafter(in_place, tmp_path / "out", engine=Engine.deepspec, dtype=torch.float32, card="")
    assert not (tmp_path / "out").exists()


def rename_and_reshape(tensors: dict[str, Tensor]) -> None:
    tensors["fc.wrong"] = tensors.pop("fc.weight")
    tensors["norm.weight"] = torch.ones(3)


@pytest.mark.parametrize("folder_name", ["native", "deepspec"])
def test_all_tensors_that_do_not_fit_are_named_at_once(request: pytest.FixtureRequest, folder_name: str) -> None:
    folder = request.getfixturevalue(folder_name)
    edit_weights(folder, rename_and_reshape)
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit its config") as error:
        load_drafter(folder)
    for problem in ("missing fc.weight [64, 192]", "unexpected fc.wrong [64, 192]", "norm.weight has shape [3]"):
        assert problem in str(error.value)


def test_nothing_is_loaded_when_one_tensor_does_not_fit(native: Path, tiny_dspark: DSpark) -> None:
    drafter, tensors = load_drafter(native).drafter, {name: x + 1 for name, x in tiny_dspark.state_dict().items()}
    tensors["norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[3\], expected \[64\]"):
        load_weights(drafter, tensors, native)
    check_same_weights(drafter, tiny_dspark)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_deepspec_folder_without_a_frozen_matrix_is_refused(deepspec: Path, name: str) -> None:
    edit_weights(deepspec, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=r"of embed_tokens\.weight and lm_head\.weight one is missing"):
        load_drafter(deepspec)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_file_is_named(native: Path, keep: float) -> None:
    path = native / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_drafter(native)


def test_missing_files_are_named(native: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft=.*nowhere: no such folder"):
        resolve_folder(str(tmp_path / "nowhere"))
    (native / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no such file: .*model\.safetensors"):
        read_weights(native)
    (native / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no such file: .*config\.json"):
        load_drafter(native)


def test_a_config_that_is_not_json_is_named(native: Path) -> None:
    (native / "config.json").write_text('{"format_version": 1,')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_drafter(native)


def test_an_unknown_format_is_named(native: Path) -> None:
    (native / "config.json").write_text('{"architectures": ["MambaModel"]}')
    with pytest.raises(ValueError, match=r"neither format_version \(ours\) nor .* a known architecture.*MambaModel"):
        load_drafter(native)


@pytest.mark.parametrize("layout", [SlotLayout.in_place, None])
def test_a_config_that_names_another_slot_layout_than_the_weights_is_refused(
    native: Path, layout: SlotLayout | None
) -> None:
    """Shapes are the same in both layouts, and the wrong one would shift every draft by one token."""
    edit_config(native, lambda config: config.update(slot_layout=layout))
    with pytest.raises(ValueError, match=f"slot_layout.*{layout}"):
        load_drafter(native)


def test_another_format_version_is_refused(native: Path) -> None:
    edit_config(native, lambda config: config.update(format_version=1))
    with pytest.raises(ValueError, match="format_version 1, this version reads 3"):
        load_drafter(native)


NATIVE_FIELDS = ["drafter", "target", "target_layer_ids", "mask_token_id", *(f.name for f in fields(DSparkConfig))]


def test_the_list_of_native_fields_is_complete(native: Path) -> None:
    assert set(json.loads((native / "config.json").read_text())) == {"format_version", *NATIVE_FIELDS}


@pytest.mark.parametrize("field", NATIVE_FIELDS)
def test_a_missing_native_field_is_named(native: Path, field: str) -> None:
    edit_config(native, lambda config: config.pop(field))
    with pytest.raises(ValueError, match=rf"config\.json.*\b{field}\b"):
        load_drafter(native)


def test_a_missing_part_of_the_target_is_named(native: Path) -> None:
    edit_config(native, lambda config: config["target"]["spec"].pop("head_dim"))
    with pytest.raises(ValueError, match=r"missing \['head_dim'\]"):
        load_drafter(native)
    edit_config(native, lambda config: config["target"].pop("spec"))
    with pytest.raises(ValueError, match=r"config\.json: missing spec"):
        load_drafter(native)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("drafter", "models.nothing.Drafter", r"config\.json: this version has no drafter models\.nothing\.Drafter"),
        ("drafter", "models.dspark.Nothing", r"config\.json: this version has no drafter models\.dspark\.Nothing"),
        (
            "drafter",
            "models.dspark.DSparkConfig",
            r"config\.json: this version has no drafter models\.dspark\.DSparkConfig",
        ),
        ("slot_layout", "sideways", "sideways"),
        ("markov_head", "lstm", "lstm"),
        ("num_draft_tokens", 0, r"num_draft_tokens=0 must be a whole number above 0"),
        ("surprise", 1, "surprise"),
    ],
)
def test_a_native_value_that_makes_no_sense_is_named(native: Path, field: str, value: Any, message: str) -> None:
    edit_config(native, lambda config: config.update({field: value}))
    with pytest.raises(ValueError, match=message):
        load_drafter(native)


@pytest.mark.parametrize(
    "field",
    [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_target_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
        "enable_confidence_head",
    ],
)
def test_a_missing_deepspec_field_is_named(deepspec: Path, field: str) -> None:
    edit_config(deepspec, lambda config: config.pop(field))
    with pytest.raises(ValueError, match=rf"config\.json: missing .*\b{field}\b"):
        load_drafter(deepspec)


def test_the_rotary_base_is_read_from_either_place_and_never_guessed(deepspec: Path, tiny_dspark: DSpark) -> None:
    edit_config(deepspec, lambda config: config.update(rope_theta=5e5, rope_parameters=None))
    edit_config(deepspec, lambda config: config.pop("rope_parameters"))
    assert load_drafter(deepspec).drafter.spec.rope_parameters["rope_theta"] == 5e5
    edit_config(deepspec, lambda config: config.pop("rope_theta"))
    with pytest.raises(ValueError, match=r"config\.json: missing rope_parameters"):
        load_drafter(deepspec)


def test_a_drafter_of_another_target_is_refused(
    native: Path, tiny_dspark: DSpark, tiny_target_config: TargetConfig, tiny_identity: TargetIdentity
) -> None:
    check_target(native, tiny_dspark, tiny_target_config, tiny_identity)
    other = replace(tiny_identity, weights_sha256="0" * 64)
    with pytest.raises(ValueError, match="was trained for target tiny with weights_sha256"):
        check_target(native, tiny_dspark, tiny_target_config, other)
    tiny = load_drafter(native).drafter
    tiny.spec = replace(tiny.spec, num_layers=9)
    with pytest.raises(ValueError, match=r"\(vocabulary, hidden size, layers\) \(55, 64, 9\).*\(55, 64, 4\)"):
        check_target(native, tiny, tiny_target_config, tiny_identity)


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path)) == tmp_path
    for step in (5, 100, 20):
        step_folder(tmp_path, step).mkdir()
    assert resolve_folder(str(tmp_path)) == tmp_path / "step_00000100"
