"""Tests of models/drafter_files.py: folders, names on the hub, shards, pickles; code in a checkpoint never runs."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.subject import load_subject
from models import drafter_files
from models.checkpoint import load_drafter, save_drafter
from models.drafter_files import INDEX, PICKLE, WEIGHTS, fingerprint, read_weights, resolve_folder
from models.dspark import DSpark
from models.target import TargetConfig, TargetIdentity
from tests.conftest import eagle3_config
from tests.published_files import SPEC, build, check_same_drafts, write
from tests.test_published import CLASSIC, classic_tensors

CPU = torch.device("cpu")


@pytest.fixture
def native(tmp_path: Path, tiny_dspark: DSpark, tiny_identity: TargetIdentity) -> Path:
    save_drafter(tiny_dspark, tmp_path / "native", target=vars(tiny_identity))
    return tmp_path / "native"


# ---- names on the hub


class Hub:
    """Stands for huggingface_hub.snapshot_download; remembers what it was asked for."""

    def __init__(self, **folders: Path) -> None:
        self.folders, self.asked = folders, list[tuple[str, list[str]]]()

    def __call__(self, name: str, *, allow_patterns: list[str]) -> str:
        self.asked.append((name, allow_patterns))
        return str(self.folders[name.removeprefix("org/")])


def test_a_name_on_the_hub_is_a_drafter_or_a_language_model_by_its_config(
    native: Path,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub(drafter=native)
    monkeypatch.setattr(drafter_files, "snapshot_download", hub)
    subject = load_subject("org/drafter", tiny_target_config, tiny_identity, CPU)
    assert (subject.name, subject.folder, subject.fingerprint) == ("dspark", native, fingerprint(native))
    assert [name for name, _ in hub.asked] == ["org/drafter"] * 2 and hub.asked[0][1] == ["config.json"]
    assert not any(".bin" in pattern or ".py" in pattern for _, patterns in hub.asked for pattern in patterns)


def test_a_name_that_cannot_be_had_is_named_with_the_option_and_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"init=org/no-such-drafter: no such folder, .*hf download org/no-such-drafter"
    ):
        resolve_folder("org/no-such-drafter", option="init")


def test_pickles_are_only_fetched_where_they_are_allowed(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (False, True):
        hub = Hub(drafter=native)
        monkeypatch.setattr(drafter_files, "snapshot_download", hub)
        assert resolve_folder("org/drafter", allow_pickle=allowed) == native
        assert (PICKLE in hub.asked[0][1]) is allowed


# ---- shards


def sharded(folder: Path, parts: list[dict[str, Tensor]]) -> None:
    (folder / WEIGHTS).unlink()
    names = [f"model-{index}.safetensors" for index in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_weights_in_shards_are_read_as_one(native: Path) -> None:
    whole = load_file(native / WEIGHTS)
    first = dict(list(whole.items())[:3])
    sharded(native, [first, {name: tensor for name, tensor in whole.items() if name not in first}])
    found = read_weights(native)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    before = fingerprint(native)
    save_file({name: tensor + 1 for name, tensor in first.items()}, native / "model-0.safetensors")
    assert fingerprint(native) != before
    (native / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names model-1\.safetensors, which is not there"):
        read_weights(native)


def test_a_tensor_in_two_shards_is_refused(native: Path) -> None:
    whole = load_file(native / WEIGHTS)
    sharded(native, [whole, dict(list(whole.items())[:1])])
    path = native / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["other"] = "model-0.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which another file holds, too"):
        read_weights(native)


# ---- pickles and code


def pickled(folder: Path, content: Any) -> Path:
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / PICKLE)
    return folder


def test_a_pickle_is_read_only_where_it_is_allowed(tmp_path: Path) -> None:
    drafter = build(eagle3_config(num_draft_tokens=7, draft_vocab_size=20, own_head=True))
    folder = write(tmp_path, {**CLASSIC, "draft_vocab_size": 20}, classic_tensors(drafter))
    pickled(folder, classic_tensors(drafter))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin only, a pickle file.*allow_pickle=true"):
        load_drafter(folder, target=SPEC)
    check_same_drafts(load_drafter(folder, target=SPEC, allow_pickle=True).drafter, drafter)


class Runs:
    """What a pickle can hold: reading it calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was_run",)


@pytest.mark.parametrize(
    "content", [{"fc.weight": Runs()}, [torch.ones(1)], {"fc.weight": 1}], ids=["code", "list", "int"]
)
def test_a_pickle_of_anything_but_tensors_is_refused_and_never_run(
    native: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(native)
    pickled(native, content)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is (damaged, or holds more than tensors|no mapping)"):
        load_drafter(native, allow_pickle=True)
    assert not (native / "was_run").exists()
    with pytest.raises(FileExistsError):  # it would have been
        (native / "was_run").mkdir()
        pickle.loads(pickle.dumps(Runs()))


def test_a_damaged_pickle_is_named(native: Path) -> None:
    pickled(native, {"fc.weight": torch.ones(2)})
    whole = (native / PICKLE).read_bytes()
    (native / PICKLE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged"):
        load_drafter(native, allow_pickle=True)


def test_code_beside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    drafter = build(eagle3_config(own_head=True))
    config = {**CLASSIC, "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "model_type": "llama"}
    folder = write(tmp_path, config, classic_tensors(drafter))
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'was_run')!r}).mkdir()\n")
    load_drafter(folder, target=SPEC)
    assert not (folder / "was_run").exists()
