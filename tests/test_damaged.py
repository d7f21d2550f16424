"""Checkpoints of every format in which one tensor or field is damaged: refused by its name, never read otherwise."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.base import Drafter, Engine, SlotLayout
from models.checkpoint import LoadedDrafter, check_target, load_drafter, save_drafter
from models.export import export_drafter
from models.files import read_json
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_dspark, dflash2_config, dflash_config, dspark_config, eagle3_config
from tests.published_files import EMBEDDING, SPEC, build, write
from tests.test_published import CLASSIC, classic_tensors
from tests.test_published_blocks import DEEPSPEC, DEEPSPEC_EAGLE3, ZLAB, with_copies
from tests.test_speculators import DFLASH, DSPARK, EAGLE3, config_of

IN_PLACE: dict[str, Any] = {"num_layers": 2, "slot_layout": SlotLayout.in_place, "num_draft_tokens": 4}
IDENTITY = {"name": "t", "config_sha256": "", "weights_sha256": ""}
Files = tuple[dict[str, Any], dict[str, Tensor]]


def native(config: Any) -> Callable[[Path], Files]:
    def files(folder: Path) -> Files:
        drafter = build(config)
        save_drafter(drafter, folder, target=IDENTITY)
        return read_json(folder / "config.json"), drafter.state_dict()

    return files


def foreign(config: dict[str, Any], own: Any, tensors: Callable[[Any], dict[str, Tensor]]) -> Callable[[Path], Files]:
    return lambda folder: (config, tensors(build(own)))


def engines(engine: Engine, config: Any) -> Callable[[Path], Files]:
    def files(folder: Path) -> Files:
        serving = build(config).serving(engine)
        return serving.config, serving.tensors

    return files


def with_embedding(drafter: Drafter) -> dict[str, Tensor]:
    return {**drafter.state_dict(), "embed_tokens.weight": EMBEDDING}


CLASSIC_REDUCED = eagle3_config(num_draft_tokens=7, draft_vocab_size=20, own_head=True, fc_norm=True)
OWN_HEAD = eagle3_config(num_draft_tokens=4, own_head=True, norm_before_residual=True)
FORMATS: dict[str, Callable[[Path], Files]] = {
    "native dspark": native(dspark_config(num_layers=2)),
    "native eagle3": native(eagle3_config(draft_vocab_size=20, own_head=True)),
    "deepspec dspark": foreign(DEEPSPEC, dspark_config(num_layers=2), with_copies),
    "deepspec eagle3": foreign(DEEPSPEC_EAGLE3, eagle3_config(num_draft_tokens=4, qk_norm=True), with_copies),
    "zlab dflash": foreign(ZLAB, dflash_config(**IN_PLACE), lambda drafter: drafter.state_dict()),
    "classic eagle3": foreign(CLASSIC | {"draft_vocab_size": 20, "fc_norm": True}, CLASSIC_REDUCED, classic_tensors),
    "speculators dspark": foreign(
        config_of("dspark", num_layers=2, **DSPARK), dspark_config(num_layers=2), with_copies
    ),
    "speculators dflash": foreign(config_of("dflash", num_layers=2, **DFLASH), dflash_config(**IN_PLACE), with_copies),
    "speculators eagle3": foreign(
        config_of("eagle3", num_layers=1, model_type="llama", **EAGLE3), OWN_HEAD, with_embedding
    ),
}
FORMATS |= {
    "vllm dflash2": engines(Engine.vllm, dflash2_config(num_layers=2)),
    "sglang dspark": engines(Engine.sglang, dspark_config(num_layers=2)),
}
# What a file may lack: what it says follows from the rest, or comes from the target.
OPTIONAL = {
    "classic eagle3": {"t2d", "lm_head.weight"},
    "speculators eagle3": {"embed_tokens.weight", "lm_head.weight"},
}


def turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1) if tensor.ndim > 1 and tensor.shape[0] != tensor.shape[-1] else tensor[None]


def of_another_kind(tensor: Tensor) -> Tensor:
    return tensor.float() if not tensor.is_floating_point() else tensor.to(torch.int32)


DAMAGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "turned": turned,
    "of another kind": of_another_kind,
    "in 8 bits": lambda tensor: tensor.to(torch.float8_e4m3fn) if tensor.is_floating_point() else tensor[:-1],
}


def some_slow(names: Iterable[str], *, fast: Sequence[str]) -> list[Any]:
    """All kinds of damage, thousands of loads in all: in every run those of `fast`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("damage", some_slow(DAMAGES, fast=("missing", "turned")))
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_tensor_is_refused_by_name(tmp_path: Path, kind: str, damage: str) -> None:
    config, tensors = FORMATS[kind](tmp_path)
    load_drafter(write(tmp_path, config, tensors) if "native" not in kind else tmp_path, target=SPEC)
    for name, tensor in tensors.items():
        if damage == "missing" and name in OPTIONAL.get(kind, ()):
            continue
        changed = DAMAGES[damage](tensor)
        own = {other: value for other, value in tensors.items() if other != name}
        folder = write(tmp_path, config, own if changed is None else own | {name: changed})
        with pytest.raises(ValueError) as error:
            load_drafter(folder, target=SPEC)
        said = name.replace("midlayer.", "layers.0.")
        assert said in str(error.value) or name in str(error.value), (name, str(error.value))


@pytest.mark.parametrize("kind", FORMATS)
def test_an_extra_tensor_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    config, tensors = FORMATS[kind](tmp_path)
    folder = write(tmp_path, config, tensors | {"layers.7.mlp.up_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"unexpected layers\.7\.mlp\.up_proj\.weight \[2, 2\]"):
        load_drafter(folder, target=SPEC)


# ---- config.json


def fields_of(config: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all fields, those of objects inside as well."""
    found = []
    for name, value in config.items():
        found.append((*path, name))
        if isinstance(value, dict):
            found += fields_of(value, (*path, name))
    return found


def edited(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at `path`; ... = without the field."""
    name, *rest = path
    if rest:
        return config | {name: edited(config[name], tuple(rest), value)}
    return {key: old for key, old in config.items() if key != name} | ({} if value is ... else {name: value})


def meaning(loaded: LoadedDrafter) -> dict[str, Any]:
    """Everything of a drafter that its config says, but for what training alone or nobody reads."""
    drafter = loaded.drafter
    spec = {**drafter.spec.to_dict(), "initializer_range": 0, "bos_token_id": 0, "pad_token_id": 0}
    spec["model_type"] = ""  # of a target; engines are chosen by it, nothing is computed with it
    spec["rope_parameters"] = {"rope_type": "default", **spec["rope_parameters"]}
    own = {key: value for key, value in drafter.native_config().items() if key not in drafter.training_options}
    return {"class": type(drafter).__name__, "spec": spec, **own}


VALUES: dict[str, Any] = {"missing": ..., "null": None, "text": "wrong", "below zero": -3, "list": [[]], "object": {}}


# Absent in many published files, and then what the projects that wrote them take.
ABSENT = {("classic eagle3", "rope_theta")}


@pytest.mark.parametrize("damage", some_slow(VALUES, fast=("missing", "null")))
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_field_is_refused_by_name_or_changes_nothing(tmp_path: Path, kind: str, damage: str) -> None:
    """A field that is only described, like dtype, may hold anything."""
    config, tensors = FORMATS[kind](tmp_path)
    if "native" not in kind:
        write(tmp_path, config, tensors)
    whole = meaning(load_drafter(tmp_path, target=SPEC))
    refused = set()
    for path in fields_of(config):
        if damage in ("missing", "null") and (kind, path[0]) in ABSENT:
            continue
        (tmp_path / "config.json").write_text(json.dumps(edited(config, path, VALUES[damage])))
        try:
            found = meaning(load_drafter(tmp_path, target=SPEC))
        except ValueError as error:
            said = str(error)
            names = {name for other in fields_of(config) if other[: len(path)] == path for name in other}
            assert any(name in said for name in names) or "model.safetensors" in said, (path, said)
            refused.add(path)
            continue
        assert found == whole, path
    assert len(refused) >= 8, refused


# ---- what no shape tells


def exported(config: Any, folder: Path, engine: Engine) -> dict[str, Any]:
    export_drafter(build(config), folder, engine=engine, dtype=torch.float32, card="")
    return read_json(folder / "config.json")


FLIPS = {
    "vllm dspark": (Engine.vllm, dspark_config(), "sample_from_anchor", "dspark_bonus_anchor"),
    "vllm dspark, in place": (Engine.vllm, dspark_config(**IN_PLACE), "sample_from_anchor", "dspark_bonus_anchor"),
    "sglang dspark": (Engine.sglang, dspark_config(), "sample_from_anchor", "dspark_bonus_anchor"),
    "speculators dspark": (Engine.speculators, dspark_config(), "sample_from_anchor", "block_size"),
    "speculators dflash": (Engine.speculators, dflash_config(**IN_PLACE), "sample_from_anchor", "dflash"),
    "vllm dflash": (Engine.vllm, dflash_config(**IN_PLACE), "sample_from_anchor", "in_place"),
}


@pytest.mark.parametrize("case", FLIPS)
def test_a_flipped_layout_is_refused(tmp_path: Path, case: str) -> None:
    engine, own, flag, said = FLIPS[case]
    config = exported(own, tmp_path, engine)
    flipped = {flag: not config[flag]}
    if "dflash_config" in config and flag in config["dflash_config"]:
        flipped["dflash_config"] = config["dflash_config"] | flipped
    (tmp_path / "config.json").write_text(json.dumps(config | flipped))
    with pytest.raises(ValueError, match=rf"config\.json: .*{flag}.*{said}|{said}.*{flag}"):
        load_drafter(tmp_path, target=SPEC)


@pytest.mark.parametrize("engine", [Engine.vllm, Engine.sglang])
def test_layers_that_contradict_each_other_are_refused(tmp_path: Path, engine: Engine) -> None:
    """A file whose layers were moved by one in a single place of the several that engines read."""
    config = exported(eagle3_config(), tmp_path, engine)
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_layer_ids": [2, 6, 9]}))
    with pytest.raises(ValueError, match=r"target_layer_ids=.* contradict each other"):
        load_drafter(tmp_path, target=SPEC)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_aux_hidden_states": 5}))
    with pytest.raises(ValueError, match="num_aux_hidden_states=5, but 3 layers are fused"):
        load_drafter(tmp_path, target=SPEC)


@pytest.mark.parametrize("engine", [Engine.vllm, Engine.sglang, Engine.speculators])
def test_an_export_beside_another_target_is_refused(
    tmp_path: Path,
    engine: Engine,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
) -> None:
    drafter = build_dspark(tiny_target, tiny_target_config)
    about: dict[str, Any] = {"target": tiny_target_config, "identity": tiny_identity}
    export_drafter(drafter, tmp_path, engine=engine, dtype=torch.float32, card="", **about)
    check_target(tmp_path, drafter, tiny_target_config, tiny_identity)
    other = replace(tiny_identity, weights_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"was trained for target tiny with weights_sha256 .*, target=tiny has 000000"):
        check_target(tmp_path, drafter, tiny_target_config, other)


@pytest.mark.parametrize("fill", [0, None], ids=["zero", "absolute"])
def test_a_vocabulary_that_is_no_offsets_is_refused(tmp_path: Path, fill: int | None) -> None:
    drafter = build(eagle3_config(draft_vocab_size=20, own_head=True))
    for engine in (Engine.vllm, Engine.sglang, Engine.speculators):
        export_drafter(drafter, tmp_path / engine, engine=engine, dtype=torch.float32, card="")
        weights = load_file(tmp_path / engine / "model.safetensors")
        weights["d2t"] = torch.zeros(20, dtype=torch.int64) if fill == 0 else drafter.draft_ids
        save_file(weights, tmp_path / engine / "model.safetensors")
        with pytest.raises(ValueError, match="d2t"):
            load_drafter(tmp_path / engine, target=SPEC)
