"""Tests of data/store.py."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.codecs import CODECS, round_trip
from data.shards import ShardInfo, encode_record, finished_shards, publish, reopen, write_shard
from data.store import FeatureStore, StoreHeader, StoreRecord, supervised_rows
from models.files import sha256_file
from models.target import TargetIdentity
from tests import conftest

HIDDEN_SIZE = 16
HEADER = StoreHeader(
    target=TargetIdentity(name="toy", config_sha256="c" * 64, weights_sha256="w" * 64),
    layer_ids=(1, 3, 7),
    hidden_size=HIDDEN_SIZE,
    feature_dtype="bf16",
    last_hidden_dtype="bf16",
    chat_template_sha256="t" * 64,
    chats={"supervise": "all", "thinking": None, "max_length": 99, "min_supervised_tokens": 1},
    records_per_shard=3,
)


def make_record(index: int, header: StoreHeader = HEADER) -> StoreRecord:
    """Record `index` has index+2 tokens; every third one has no supervised token at all."""
    generator = torch.Generator().manual_seed(index)
    length = index + 2
    loss_mask = torch.rand(length, generator=generator) < (0.0 if index % 3 == 2 else 0.7)
    loss_mask[0] = False
    dtype = torch.bfloat16 if header.feature_dtype == "bf16" else torch.float32
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
    conftest.make_store(folder, header, records, shard_size=shard_size)
    return records


def write(folder: Path, index: int, records: list[StoreRecord], inputs: str = "i" * 64) -> ShardInfo:
    encoded = [encode_record(record, HEADER) for record in records]
    return write_shard(folder, HEADER, index=index, records=encoded, inputs_sha256=inputs)


def rounded(record: StoreRecord, header: StoreHeader) -> StoreRecord:
    """What reading gives back."""
    return replace(
        record,
        features=round_trip(record.features, CODECS[header.feature_dtype], HIDDEN_SIZE),
        last_hidden=round_trip(record.last_hidden, CODECS[header.last_hidden_dtype], HIDDEN_SIZE),
    )


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


@pytest.mark.parametrize(
    ("feature_dtype", "last_hidden_dtype"), [("bf16", "bf16"), ("float32", "float32"), ("fp8", "bf16"), ("nf4", "fp8")]
)
def test_records_come_back_as_the_codec_rounds_them(tmp_path: Path, feature_dtype: str, last_hidden_dtype: str) -> None:
    header = replace(HEADER, feature_dtype=feature_dtype, last_hidden_dtype=last_hidden_dtype)
    records = make_store(tmp_path, header)
    store = FeatureStore(tmp_path)
    store.verify()
    assert len(store) == len(records)
    assert store.manifest.header == header
    for index, record in enumerate(records):
        assert_equal(store[index], rounded(record, header))
    assert store.lengths.tolist() == [len(record.input_ids) for record in records]
    assert store.num_supervised.tolist() == [len(record.last_hidden) for record in records]
    with pytest.raises(IndexError):
        store[len(records)]


def test_manifest_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    records = make_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert set(manifest) == {
        *("format", "version", "target", "layer_ids", "hidden_size", "feature_dtype", "scale_dtype", "chats"),
        *("last_hidden_rows", "last_hidden_dtype", "chat_template_sha256", "responses_sha256", "records_per_shard"),
        *("num_records", "num_tokens", "num_supervised_tokens", "shards"),
    }
    assert set(manifest["shards"][0]) == {"file", "bytes", "sha256", "num_records", "inputs_sha256"}
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
    write(broken, 0, records[:3])
    # A crash after the shard and before its sidecar: the shard does not count as finished.
    write(broken, 1, records[3:6])
    (broken / "shard-00001.json").unlink()
    with pytest.raises(ValueError, match=r"extraction was not finished; run extract\.py again"):
        FeatureStore(broken)
    finished = finished_shards(broken, HEADER)
    assert list(finished) == [0] and finished[0].num_records == 3 and finished[0].inputs_sha256 == "i" * 64
    for shard in (1, 2):
        finished[shard] = write(broken, shard, records[shard * 3 : shard * 3 + 3])
    publish(broken, HEADER, [finished[shard] for shard in range(3)], "r" * 64)
    assert conftest.files_of(whole) == conftest.files_of(broken)
    with pytest.raises(ValueError, match="is finished"):
        write(broken, 3, records[:1])


def test_a_shard_without_records_is_finished_and_has_no_file(tmp_path: Path) -> None:
    infos = [write(tmp_path, index, [make_record(index)] if index != 1 else []) for index in range(3)]
    assert list(finished_shards(tmp_path, HEADER)) == [0, 1, 2]
    assert not (tmp_path / "shard-00001.safetensors").exists()
    publish(tmp_path, HEADER, infos, "r" * 64)
    store = FeatureStore(tmp_path)
    assert [store[0].id, store[1].id] == [make_record(0).id, make_record(2).id] and len(store) == 2


def test_failed_rewrite_does_not_leave_an_old_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, [make_record(0)], "old")

    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data.shards.write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 0, [make_record(0)], "new")
    assert finished_shards(tmp_path, HEADER) == {}


def test_sidecar_without_its_whole_shard_does_not_count(tmp_path: Path) -> None:
    for shard in range(3):
        write(tmp_path, shard, [make_record(shard)])
    (tmp_path / "shard-00000.safetensors").unlink()
    os.truncate(tmp_path / "shard-00001.safetensors", 50)
    assert list(finished_shards(tmp_path, HEADER)) == [2]


@pytest.mark.parametrize("changes", [{"chat_template_sha256": "other"}, {"feature_dtype": "fp8"}, {"chats": {}}])
def test_resuming_with_another_header_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, 0, [make_record(0)])
    with pytest.raises(ValueError, match="belongs to another extraction"):
        finished_shards(tmp_path, replace(HEADER, **changes))


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


@pytest.mark.parametrize("changes", [{"version": 1}, {"version": 3}, {"format": "other"}])
def test_other_format_or_version_says_how_to_rebuild(tmp_path: Path, changes: dict[str, object]) -> None:
    make_store(tmp_path)
    edit_manifest(tmp_path, **changes)
    (key, value), *_ = changes.items()
    with pytest.raises(ValueError, match=rf"manifest\.json has .*{key} {value}.* rebuild it with extract\.py"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"surprise": 1}, {"target": {"name": "toy"}}, {"last_hidden_rows": "all"}, {"scale_dtype": "float32"}]
)
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
    store.check_target(HEADER.target, [7, 1])
    for changes in ({"config_sha256": "x" * 64}, {"weights_sha256": "x" * 64}):
        with pytest.raises(ValueError, match="was made by target toy"):
            store.check_target(replace(HEADER.target, **changes), [1])
    with pytest.raises(ValueError, match=r"needs target layers \[1, 2\].*has \[1, 3, 7\].*missing \[2\]"):
        store.check_target(HEADER.target, [1, 2])


def test_select_layers_takes_the_columns_of_those_layers_in_the_order_asked(tmp_path: Path) -> None:
    by_layer = torch.tensor(HEADER.layer_ids).repeat_interleave(HIDDEN_SIZE).expand(5, -1)
    mask = torch.tensor([False, False, True, True, True])
    record = StoreRecord("a", torch.arange(5), mask, by_layer.float(), torch.zeros(3, HIDDEN_SIZE))
    publish(tmp_path, HEADER, [write(tmp_path, 0, [record])], "r" * 64)
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
    for infos in ([], [write(tmp_path / "a", 0, [])]):
        with pytest.raises(ValueError, match="would hold no records"):
            publish(tmp_path / "a", HEADER, infos, "r" * 64)
    (tmp_path / "a" / "shard-00000.json").unlink()
    with pytest.raises(ValueError, match="is not a feature store"):
        FeatureStore(tmp_path / "a")
    make_store(tmp_path / "b")
    edit_manifest(tmp_path / "b", num_records=0, shards=[])
    with pytest.raises(ValueError, match="holds no records"):
        FeatureStore(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.zeros(4, 47)}, r"features is \[4, 47\], needed \[4, 48\]"),
        ({"last_hidden": torch.zeros(4, HIDDEN_SIZE)}, r"last_hidden is \[4, 16\], needed \[2, 16\]"),
        ({"loss_mask": torch.tensor([False, True, True])}, "loss_mask is"),
        ({"loss_mask": torch.tensor([True, False, False, True])}, r"loss_mask\[0\]"),
        ({"features": torch.full((4, 48), torch.nan)}, "features has NaN"),
    ],
)
def test_records_that_do_not_fit_are_refused(changes: dict[str, Tensor], message: str) -> None:
    mask = torch.tensor([False, False, True, True])
    fits = StoreRecord("a", torch.arange(4), mask, torch.zeros(4, 48), torch.zeros(2, HIDDEN_SIZE))
    encode_record(fits, HEADER)
    with pytest.raises(ValueError, match=message):
        encode_record(replace(fits, **changes), HEADER)


def test_repeated_ids_and_unlisted_shards_are_not_published(tmp_path: Path) -> None:
    infos = [write(tmp_path, shard, [make_record(0)]) for shard in range(2)]
    with pytest.raises(ValueError, match="chat-0é"):
        publish(tmp_path, HEADER, infos, "r" * 64)
    with pytest.raises(ValueError, match=r"00001\.safetensors.\] too many"):
        publish(tmp_path, HEADER, infos[:1], "r" * 64)


@pytest.mark.parametrize(
    "changes", [{"feature_dtype": "int3"}, {"last_hidden_dtype": "int3"}, {"layer_ids": (3, 1)}, {"hidden_size": 24}]
)
def test_headers_that_this_version_cannot_write_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes)).replace("hidden_size", "hidden size")):
        replace(HEADER, **{"feature_dtype": "nf4", **changes})


def test_reopening_keeps_the_whole_shards_and_names_the_damaged_ones(tmp_path: Path) -> None:
    make_store(tmp_path)
    before = conftest.files_of(tmp_path)
    flip_byte(tmp_path / "shard-00000.safetensors", -1)
    (tmp_path / "shard-00002.safetensors").unlink()
    found = reopen(tmp_path)
    assert len(found) == 2 and "00000.safetensors is damaged" in found[0] and "00002.safetensors is missing" in found[1]
    finished = finished_shards(tmp_path, HEADER)
    assert list(finished) == [1]
    for index in (0, 2):
        finished[index] = write(tmp_path, index, [make_record(3 * index + place) for place in range(3)])
    publish(tmp_path, HEADER, [finished[index] for index in range(3)], "r" * 64)
    assert conftest.files_of(tmp_path) == before


def test_supervised_tokens_are_counted_without_features(tmp_path: Path) -> None:
    records = make_store(tmp_path)
    counts = FeatureStore(tmp_path).count_supervised_tokens(50_000)
    wanted = torch.cat([record.input_ids[record.loss_mask] for record in records]).long()
    assert torch.equal(counts, torch.bincount(wanted, minlength=50_000))


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


def test_a_hundred_thousand_shards_are_no_limit(tmp_path: Path) -> None:
    infos = [write(tmp_path, index, [make_record(index)]) for index in (99_998, 99_999, 100_000)]
    publish(tmp_path, HEADER, infos, "r" * 64)
    assert FeatureStore(tmp_path).ids == [f"chat-{index}é" for index in (99_998, 99_999, 100_000)]


def test_only_so_many_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.store.MAX_OPEN_SHARDS", 2)
    records = make_store(tmp_path, num_shards=4)
    store = FeatureStore(tmp_path)
    for index in (0, 4, 8, 11, 1, 5):
        assert_equal(store[index], records[index])
        assert len(store._opened) <= 2
