"""Writing a store: shards that any process may make, claimed one by one, and the manifest that makes them a store."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.claims import CLAIMS
from data.codecs import encode, find_codec
from data.store import (
    MANIFEST,
    VERSION,
    Manifest,
    ShardEntry,
    StoreHeader,
    StoreRecord,
    damages,
    manifest_values,
    read_index,
    read_manifest,
    shard_file,
    shard_index,
    shard_paths,
    supervised_rows,
)
from models.files import sha256_file, sha256_text, write_atomic, write_json


@dataclass(frozen=True)
class ShardInfo(ShardEntry):
    """A finished shard. One without records has no file."""

    num_tokens: int
    num_supervised_tokens: int


@dataclass(frozen=True)
class EncodedRecord:
    """A StoreRecord as a shard keeps it, on the CPU."""

    id: str
    num_tokens: int
    num_rows: int
    tensors: dict[str, Tensor]


def encode_record(record: StoreRecord, header: StoreHeader) -> EncodedRecord:
    """Round on the device that holds the values. Raises ValueError on shapes that do not fit `header` and on NaN."""
    _check_record(record, header)
    tensors = {
        "input_ids": record.input_ids.to("cpu", torch.int32),
        "loss_mask": record.loss_mask.to("cpu", torch.bool),
    }
    for name, dtype in (("features", header.feature_dtype), ("last_hidden", header.last_hidden_dtype)):
        tensors |= encode(name, getattr(record, name), find_codec(dtype, name), header.hidden_size)
    return EncodedRecord(record.id, len(record.input_ids), len(record.last_hidden), tensors)


def write_shard(
    folder: Path, header: StoreHeader, *, index: int, records: Sequence[EncodedRecord], inputs_sha256: str
) -> ShardInfo:
    """Write one shard whole, then the sidecar that says so; an unfinished one leaves no trace that counts.

    Raises ValueError when the store is published and when the disk is full.
    """
    if (folder / MANIFEST).is_file():
        raise ValueError(f"store {folder} is finished: choose another name or remove it to extract again")
    try:
        return _write_shard(folder, header, index, records, inputs_sha256)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"store={folder}: shard {index} cannot be written ({error}): make room; finished shards stay, and the same "
            "command goes on"
        ) from error


def _write_shard(
    folder: Path, header: StoreHeader, index: int, records: Sequence[EncodedRecord], inputs_sha256: str
) -> ShardInfo:
    path = folder / shard_file(index)
    # A crash between the two writes must not leave the new shard beside an older sidecar.
    path.with_suffix(".json").unlink(missing_ok=True)
    if records:
        tensors = _concatenate(records)
        metadata = {"ids": json.dumps([record.id for record in records])}
        write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
        # safetensors writes for the owner only; a store is shared between users of one machine.
        path.chmod(0o644)
    else:
        path.unlink(missing_ok=True)
    info = ShardInfo(
        file=path.name,
        bytes=path.stat().st_size if records else 0,
        sha256=sha256_file(path) if records else "",
        num_records=len(records),
        inputs_sha256=inputs_sha256,
        num_tokens=sum(record.num_tokens for record in records),
        num_supervised_tokens=sum(record.num_rows for record in records),
    )
    _write_sidecar(folder, header, info)
    return info


def finished_shards(folder: Path, header: StoreHeader) -> dict[int, ShardInfo]:
    """Shards of an interrupted extraction that need not be made again, by index.

    The caller compares `inputs_sha256`. Raises ValueError when the folder holds shards of another header.
    """
    indices = [shard_index(path) for path in shard_paths(folder, ".json")]
    found = {index: read_finished(folder, header, index) for index in indices}
    return {index: info for index, info in found.items() if info is not None}


def read_finished(folder: Path, header: StoreHeader, index: int) -> ShardInfo | None:
    """The shard where it is finished, else None. Raises ValueError when it belongs to another header."""
    path = folder / shard_file(index)
    sidecar = path.with_suffix(".json")
    try:
        content = json.loads(sidecar.read_text(encoding="utf-8"))
    except FileNotFoundError:  # also where another process has just published the store
        return None
    if content["header_sha256"] != header_sha256(header):
        reason = "belongs to another extraction (other target, layers, types, template, chats.* or records_per_shard)"
        raise ValueError(f"{sidecar} {reason}: give the options of that one, or choose another store=")
    info = ShardInfo(**content["shard"])
    if info.num_records == 0:
        return info
    return info if path.is_file() and path.stat().st_size == info.bytes else None


def publish(folder: Path, header: StoreHeader, infos: Iterable[ShardInfo], responses_sha256: str) -> None:
    """Turn finished shards, in order, into a store: write the manifest, then remove what extraction kept beside it.

    Raises ValueError when there are no records, an id repeats, or the folder's shards are not the listed ones.
    """
    shards = [info for info in infos if info.num_records]
    listed, present = {info.file for info in shards}, {path.name for path in shard_paths(folder, ".safetensors")}
    if not shards:
        raise ValueError(f"store {folder} would hold no records: give extract.py responses with at least one chat")
    if present != listed:
        unlike = f"{sorted(present - listed)[:3]} too many, {sorted(listed - present)[:3]} missing"
        raise ValueError(f"store={folder} has not the shards to be published ({unlike}): run extract.py again")
    check_unique([id for info in shards for id in read_index(folder / info.file).ids], f"store={folder}")
    manifest = Manifest(
        header=header,
        responses_sha256=responses_sha256,
        num_records=sum(info.num_records for info in shards),
        num_tokens=sum(info.num_tokens for info in shards),
        num_supervised_tokens=sum(info.num_supervised_tokens for info in shards),
        shards=tuple(ShardEntry(i.file, i.bytes, i.sha256, i.num_records, i.inputs_sha256) for i in shards),
    )
    write_json(folder / MANIFEST, manifest_values(manifest))
    remove_working_files(folder)


def reopen(folder: Path) -> list[str]:
    """Take a finished store back to an unfinished one that keeps its whole shards; returns what was wrong with others.

    Reads every checksum. A kill at any moment leaves either the store or a folder that extraction resumes.
    """
    manifest = read_manifest(folder)
    found = damages(folder, manifest, checksums=True)
    for shard in manifest.shards:
        if shard.file not in found:
            index = read_index(folder / shard.file)
            num_tokens, num_rows = int(index.offsets[-1]), int(index.row_offsets[-1])
            info = ShardInfo(**asdict(shard), num_tokens=num_tokens, num_supervised_tokens=num_rows)
            _write_sidecar(folder, manifest.header, info)
    (folder / MANIFEST).unlink()
    return list(found.values())


def forget_damaged(folder: Path, header: StoreHeader) -> list[str]:
    """Of an unfinished store: have shards made again whose checksum is wrong; returns which."""
    found = []
    for info in finished_shards(folder, header).values():
        if info.num_records and sha256_file(folder / info.file) != info.sha256:
            (folder / info.file).with_suffix(".json").unlink()
            found.append(f"{info.file} is damaged")
    return found


def remove_working_files(folder: Path) -> None:
    """A published store has no use for sidecars and claims."""
    for sidecar in shard_paths(folder, ".json"):
        sidecar.unlink(missing_ok=True)
    (folder / CLAIMS).unlink(missing_ok=True)


def remove_leftovers(folder: Path, num_shards: int) -> None:
    """Remove what interrupted runs left: unfinished files, and shards of responses that are no longer there."""
    for path in (*folder.glob(".*.tmp"), *folder.glob(".tmp*")):  # ours, and those of safetensors
        path.unlink()
    for path in (*shard_paths(folder, ".safetensors"), *shard_paths(folder, ".json")):
        if shard_index(path) >= num_shards:
            path.unlink()


def check_unique(ids: Sequence[str], where: str) -> None:
    """Anchors are drawn from the record id, so two records of one id would also share their draws."""
    if repeated := sorted(id for id, count in Counter(ids).items() if count > 1)[:3]:
        raise ValueError(f"{where} has records with equal ids {repeated}: give each response its own id")


def _write_sidecar(folder: Path, header: StoreHeader, info: ShardInfo) -> None:
    content = {"header_sha256": header_sha256(header), "shard": asdict(info)}
    write_json((folder / info.file).with_suffix(".json"), content)


def _check_record(record: StoreRecord, header: StoreHeader) -> None:
    length, rows = len(record.input_ids), len(supervised_rows(record.loss_mask))
    for name, values, shape in (
        ("input_ids", record.input_ids, (length,)),
        ("loss_mask", record.loss_mask, (length,)),
        ("features", record.features, (length, len(header.layer_ids) * header.hidden_size)),
        ("last_hidden", record.last_hidden, (rows, header.hidden_size)),
    ):
        if length == 0 or values.shape != shape:
            raise ValueError(f"record {record.id}: {name} is {list(values.shape)}, needed {list(shape)}, tokens >= 1")
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"record {record.id}: {name} has NaN or infinite values; try target dtype float32")


def _concatenate(records: Sequence[EncodedRecord]) -> dict[str, Tensor]:
    offsets = {
        "offsets": [record.num_tokens for record in records],
        "row_offsets": [record.num_rows for record in records],
    }
    return {
        **{name: torch.tensor([0, *accumulate(counts)], dtype=torch.int64) for name, counts in offsets.items()},
        **{name: torch.cat([record.tensors[name] for record in records]) for name in records[0].tensors},
    }


def header_sha256(header: StoreHeader) -> str:
    return sha256_text(json.dumps({"version": VERSION, **asdict(header)}, sort_keys=True))
