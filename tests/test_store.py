"""Tests of data/store.py."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.store import (
    FeatureStore,
    StoreHeader,
    StoreRecord,
    finished_shards,
    publish,
    supervised_rows,
    write_shard,
)
from models.files import sha256_file
from models.target import TargetIdentity

HIDDEN_SIZE = 4
HEADER = StoreHeader(
    target=TargetIdentity(name="toy", config_sha256="c" * 64, weights_sha256="w" * 64),
    layer_ids=(1, 3, 7),
    hidden_size=HIDDEN_SIZE,
    feature_dtype="bf16",
    chat_template_sha256="t" * 64,
)


def make_record(index: int, header: StoreHeader = HEADER) -> StoreRecord:
    """Record `index` has index+2 tokens; every third one has no supervised token at all."""
    generator = torch.Generator().manual_seed(index)
    length = index + 2
    loss_mask = torch.rand(length, generator=generator) < (0.0 if index % 3 == 2 else 0.7)
    loss_mask[0] = False
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[header.feature_dtype]
    return StoreRecord(
        id=f"chat-{index}é",
        input_ids=torch.randint(50_000, (length,), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        features=torch.randn(length, len(header.layer_ids) * HIDDEN_SIZE, generator=generator).to(dtype),
        last_hidden=torch.randn(int(loss_mask.sum()), HIDDEN_SIZE, generator=generator).to(dtype),
    )


def make_store(
    folder: Path, header: StoreHeader = HEADER, num_shards: int = 3, shard_size: int = 3
) -> list[StoreRecord]:
    records = [make_record(index, header) for index in range(num_shards * shard_size)]
    infos = [
        write_shard(
            folder,
            header,
            shard_index=shard,
            records=records[shard * shard_size : (shard + 1) * shard_size],
            inputs_sha256="i" * 64,
        )
        for shard in range(num_shards)
    ]
    publish(folder, header, infos)
    return records


def assert_equal(found: StoreRecord, wanted: StoreRecord) -> None:
    assert found.id == wanted.id
    for name in ("input_ids", "loss_mask", "features", "last_hidden"):
        left: Tensor = getattr(found, name)
        right: Tensor = getattr(wanted, name)
        assert left.dtype == right.dtype and torch.equal(left, right), (wanted.id, name)


def flip_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("feature_dtype", ["bf16", "float32"])
def test_records_come_back_bitwise(tmp_path: Path, feature_dtype: str) -> None:
    records = make_store(tmp_path, replace(HEADER, feature_dtype=feature_dtype))
    store = FeatureStore(tmp_path)
    store.verify()
    assert len(store) == len(records)
    assert store.manifest.header == replace(HEADER, feature_dtype=feature_dtype)
    for index, record in enumerate(records):
        assert_equal(store[index], record)
    assert store.lengths.tolist() == [len(record.input_ids) for record in records]
    assert store.num_supervised.tolist() == [len(record.last_hidden) for record in records]
    with pytest.raises(IndexError):
        store[len(records)]


def test_manifest_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    records = make_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert set(manifest) == {
        *("format", "version", "target", "layer_ids", "hidden_size", "feature_dtype", "scale_dtype"),
        *("last_hidden_rows", "chat_template_sha256", "num_records", "num_tokens", "num_supervised_tokens", "shards"),
    }
    assert set(manifest["shards"][0]) == {"file", "bytes", "sha256", "num_records"}
    assert manifest["num_tokens"] == sum(len(record.input_ids) for record in records)
    assert manifest["num_supervised_tokens"] == sum(int(record.loss_mask.sum()) for record in records)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["manifest.json", *(f"shard-0000{shard}.safetensors" for shard in range(3))]


def test_equal_work_gives_equal_bytes(tmp_path: Path) -> None:
    make_store(tmp_path / "first")
    make_store(tmp_path / "second")
    first = {path.name: sha256_file(path) for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: sha256_file(path) for path in (tmp_path / "second").iterdir()}


def test_supervised_rows_are_the_predecessors_of_supervised_tokens() -> None:
    masks = torch.rand(50, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    masks[:, 0] = False
    for mask in masks:
        assert supervised_rows(mask).tolist() == [t - 1 for t in range(9) if mask[t]]
    with pytest.raises(ValueError, match=r"loss_mask\[0\]"):
        supervised_rows(torch.tensor([True, True]))


def test_interrupted_extraction_is_refused_then_resumed(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    records = make_store(whole)
    write_shard(broken, HEADER, shard_index=0, records=records[:3], inputs_sha256="i" * 64)
    # A crash after the shard and before its sidecar: the shard does not count as finished.
    write_shard(broken, HEADER, shard_index=1, records=records[3:6], inputs_sha256="i" * 64)
    (broken / "shard-00001.json").unlink()
    with pytest.raises(ValueError, match=r"extraction was not finished; run extract\.py again"):
        FeatureStore(broken)
    finished = finished_shards(broken, HEADER)
    assert list(finished) == [0] and finished[0].num_records == 3 and finished[0].inputs_sha256 == "i" * 64
    for shard in (1, 2):
        part = records[shard * 3 : shard * 3 + 3]
        finished[shard] = write_shard(broken, HEADER, shard_index=shard, records=part, inputs_sha256="i" * 64)
    publish(broken, HEADER, [finished[shard] for shard in range(3)])
    for path in whole.iterdir():
        assert sha256_file(path) == sha256_file(broken / path.name), path.name
    with pytest.raises(ValueError, match="is finished"):
        write_shard(broken, HEADER, shard_index=3, records=records[:1], inputs_sha256="i" * 64)


def test_failed_rewrite_does_not_leave_an_old_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path, HEADER, shard_index=0, records=[make_record(0)], inputs_sha256="old")

    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data.store.write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, HEADER, shard_index=0, records=[make_record(0)], inputs_sha256="new")
    assert finished_shards(tmp_path, HEADER) == {}


def test_sidecar_without_its_whole_shard_does_not_count(tmp_path: Path) -> None:
    for shard in range(3):
        write_shard(tmp_path, HEADER, shard_index=shard, records=[make_record(shard)], inputs_sha256="i")
    (tmp_path / "shard-00000.safetensors").unlink()
    os.truncate(tmp_path / "shard-00001.safetensors", 50)
    assert list(finished_shards(tmp_path, HEADER)) == [2]


def test_resuming_with_another_header_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, shard_index=0, records=[make_record(0)], inputs_sha256="i")
    with pytest.raises(ValueError, match="belongs to another extraction"):
        finished_shards(tmp_path, replace(HEADER, chat_template_sha256="other"))


@pytest.mark.parametrize("offset", [-1, 12, 400])
def test_flipped_byte_names_only_its_shard(tmp_path: Path, offset: int) -> None:
    """In the last tensor, in the safetensors header, and wherever byte 400 falls."""
    make_store(tmp_path)
    flip_byte(tmp_path / "shard-00001.safetensors", offset)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is damaged") as error:
        FeatureStore(tmp_path).verify()
    assert "shard-00000" not in str(error.value) and "shard-00002" not in str(error.value)


def test_damaged_index_names_its_shard_on_opening(tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    content = path.read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    last_offset = json.loads(content[8 : 8 + header_size])["offsets"]["data_offsets"][1] - 8
    flip_byte(path, 8 + header_size + last_offset)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is damaged"):
        FeatureStore(tmp_path)


def test_truncated_and_missing_shards_are_each_named_on_opening(tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / "shard-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"shard-00002\.safetensors is truncated") as error:
        FeatureStore(tmp_path)
    assert "shard-00000" not in str(error.value) and "shard-00001" not in str(error.value)
    (tmp_path / "shard-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors is missing; shard-00002\.safetensors is truncated"):
        FeatureStore(tmp_path)


def test_other_format_or_version_says_how_to_rebuild(tmp_path: Path) -> None:
    make_store(tmp_path)
    for changes in ({"version": 2}, {"format": "other"}):
        edit_manifest(tmp_path, **{"format": "draftsmith-features", "version": 1, **changes})
        with pytest.raises(ValueError, match=r"rebuild it with extract\.py"):
            FeatureStore(tmp_path)


@pytest.mark.parametrize("changes", [{"surprise": 1}, {"target": {"name": "toy"}}, {"last_hidden_rows": "all"}])
def test_unknown_manifest_content_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    make_store(tmp_path)
    edit_manifest(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        FeatureStore(tmp_path)


def test_manifest_counts_must_match_the_shards(tmp_path: Path) -> None:
    make_store(tmp_path)
    edit_manifest(tmp_path, num_tokens=1)
    with pytest.raises(ValueError, match="disagree on counts"):
        FeatureStore(tmp_path)


def test_store_of_another_target_or_without_the_layers_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    store = FeatureStore(tmp_path)
    store.check_target(config_sha256="c" * 64, weights_sha256="w" * 64, layer_ids=[7, 1])
    for config, weights in (("x", "w"), ("c", "x")):
        with pytest.raises(ValueError, match="was made by target toy"):
            store.check_target(config_sha256=config * 64, weights_sha256=weights * 64, layer_ids=[1])
    with pytest.raises(ValueError, match=r"needs target layers \[1, 2\].*has \[1, 3, 7\].*missing \[2\]"):
        store.check_target(config_sha256="c" * 64, weights_sha256="w" * 64, layer_ids=[1, 2])


def test_select_layers_takes_the_columns_of_those_layers_in_the_order_asked(tmp_path: Path) -> None:
    by_layer = torch.tensor(HEADER.layer_ids).repeat_interleave(HIDDEN_SIZE).expand(5, -1)
    mask = torch.tensor([False, False, True, True, True])
    record = StoreRecord("a", torch.arange(5), mask, by_layer.float(), torch.zeros(3, HIDDEN_SIZE))
    publish(tmp_path, HEADER, [write_shard(tmp_path, HEADER, shard_index=0, records=[record], inputs_sha256="i")])
    store = FeatureStore(tmp_path)
    features = store[0].features
    for wanted in ([1, 3, 7], [3], [7, 1]):
        selected = store.select_layers(features, wanted)
        assert selected.shape == (5, len(wanted) * HIDDEN_SIZE)
        assert selected[0].tolist() == [float(layer) for layer in wanted for _ in range(HIDDEN_SIZE)]
    batched = store.select_layers(features.expand(2, -1, -1), [7])
    assert batched.shape == (2, 5, HIDDEN_SIZE) and bool((batched == 7).all())
    with pytest.raises(ValueError, match=r"missing \[0\]"):
        store.select_layers(features, [0, 1])


def test_empty_data_is_an_error_at_every_door(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="would hold no records"):
        write_shard(tmp_path / "a", HEADER, shard_index=0, records=[], inputs_sha256="i")
    with pytest.raises(ValueError, match="would hold no records"):
        publish(tmp_path / "a", HEADER, [])
    with pytest.raises(ValueError, match="is not a feature store"):
        FeatureStore(tmp_path / "a")
    make_store(tmp_path / "b")
    edit_manifest(tmp_path / "b", num_records=0, shards=[])
    with pytest.raises(ValueError, match="holds no records"):
        FeatureStore(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.zeros(4, 11)}, r"features is \[4, 11\], needed \[4, 12\]"),
        ({"last_hidden": torch.zeros(4, HIDDEN_SIZE)}, r"last_hidden is \[4, 4\], needed \[2, 4\]"),
        ({"loss_mask": torch.tensor([False, True, True])}, "loss_mask is"),
        ({"loss_mask": torch.tensor([True, False, False, True])}, r"loss_mask\[0\]"),
        ({"features": torch.full((4, 12), torch.nan)}, "features has NaN"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Tensor], message: str) -> None:
    mask = torch.tensor([False, False, True, True])
    fits = StoreRecord("a", torch.arange(4), mask, torch.zeros(4, 12), torch.zeros(2, HIDDEN_SIZE))
    write_shard(tmp_path, HEADER, shard_index=0, records=[fits], inputs_sha256="i")
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path, HEADER, shard_index=1, records=[replace(fits, **changes)], inputs_sha256="i")


def test_repeated_ids_and_unlisted_shards_are_not_published(tmp_path: Path) -> None:
    infos = [
        write_shard(tmp_path, HEADER, shard_index=shard, records=[make_record(0)], inputs_sha256="i")
        for shard in range(2)
    ]
    with pytest.raises(ValueError, match="chat-0é"):
        publish(tmp_path, HEADER, infos)
    with pytest.raises(ValueError, match="to be published are"):
        publish(tmp_path, HEADER, infos[:1])


@pytest.mark.parametrize("changes", [{"feature_dtype": "fp8"}, {"scale_dtype": "float32"}, {"layer_ids": (3, 1)}])
def test_headers_that_this_version_cannot_write_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(HEADER, **changes)


def test_changing_a_record_does_not_change_the_store(tmp_path: Path) -> None:
    make_store(tmp_path)
    store = FeatureStore(tmp_path)
    store[0].features.fill_(5.0)
    assert_equal(store[0], make_record(0))
    store.verify()


def test_worker_processes_read_the_same_records(tmp_path: Path) -> None:
    records = make_store(tmp_path)
    store = FeatureStore(tmp_path)
    assert_equal(store[4], records[4])  # opens a file in the parent first
    # What a spawned worker receives; a forked one, below, inherits the parent's opened files.
    assert_equal(pickle.loads(pickle.dumps(store))[4], records[4])
    loader = DataLoader(store, batch_size=None, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    for found, wanted in zip(loader, records, strict=True):
        assert_equal(found, wanted)
