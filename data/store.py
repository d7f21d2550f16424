"""The feature store: what a target computed once over each chat, as sharded safetensors that training reads by slices.

Format "draftsmith-features", version 1

    store/manifest.json            written last; a folder without it is not a store
    store/shard-00000.safetensors  whole chats, concatenated
    store/shard-00000.json         only while extraction runs: says that the shard is finished, and from which inputs

A shard of n records with T tokens and R supervised tokens holds

    offsets      int64 [n+1]        record i owns tokens offsets[i] to offsets[i+1]
    row_offsets  int64 [n+1]        record i owns supervised rows row_offsets[i] to row_offsets[i+1]
    input_ids    int32 [T]
    loss_mask    bool [T]           True = this token is supervised: a loss is taken on predicting it
    features     [T, L*D]           outputs of the L layers `layer_ids` side by side, in `feature_dtype`
    last_hidden  [R, D]             the target's last hidden state after the final norm, in `feature_dtype`

Supervised rows: the target's distribution for the token at position t is head(last hidden at t-1), so for every t with
loss_mask[t] the row t-1 is stored, in ascending order, and no other. Position 0 has no predecessor and cannot be
supervised. The record ids are a JSON list under the one metadata key `ids`: safetensors writes several keys in random
order, and equal work must give equal bytes. For the same reason nothing here holds a time or a path.
"""

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.files import read_json, sha256_file, sha256_text, write_atomic, write_json
from models.target import TargetIdentity

FORMAT = "draftsmith-features"
VERSION = 1
FEATURE_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StoreHeader:
    """What every shard of a store has in common; `layer_ids` are 0-based layers whose output was taken, ascending."""

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    hidden_size: int
    feature_dtype: str
    chat_template_sha256: str
    scale_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.feature_dtype not in FEATURE_DTYPES or self.scale_dtype is not None:
            found = f"feature_dtype={self.feature_dtype} with scale_dtype={self.scale_dtype}"
            raise ValueError(f"{found} is unknown; choose one of {sorted(FEATURE_DTYPES)}, which take no scales")
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids={list(self.layer_ids)} must be ascending, without repeats, and not empty")


@dataclass(frozen=True)
class ShardEntry:
    file: str
    bytes: int
    sha256: str
    num_records: int


@dataclass(frozen=True)
class ShardInfo(ShardEntry):
    """One finished shard; `inputs_sha256` names what its records were made from, for a resumed run to compare."""

    num_tokens: int
    num_supervised_tokens: int
    inputs_sha256: str


@dataclass(frozen=True)
class Manifest:
    header: StoreHeader
    num_records: int
    num_tokens: int
    num_supervised_tokens: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class StoreRecord:
    """One chat."""

    id: str
    input_ids: Tensor  # [S] int32
    loss_mask: Tensor  # [S] bool, True = supervised
    features: Tensor  # [S, L*D]
    last_hidden: Tensor  # [R, D], row r belongs to position supervised_rows(loss_mask)[r]


def supervised_rows(loss_mask: Tensor) -> Tensor:
    """Positions [R] whose last hidden state predicts a supervised token of `loss_mask` [S]; token 0 may not be one."""
    if bool(loss_mask[:1].any()):
        raise ValueError("loss_mask[0] is set, but the first token has no predecessor to predict it: clear it")
    return loss_mask.nonzero().squeeze(-1) - 1


def encode(name: str, values: Tensor, feature_dtype: str) -> dict[str, Tensor]:
    """Tensors that a shard keeps for `values` [N, C]; a scaled dtype would add its scales under a second name."""
    return {name: values.to("cpu", FEATURE_DTYPES[feature_dtype]).contiguous()}


def decode(name: str, read: Callable[[str], Tensor], feature_dtype: str) -> Tensor:
    """Inverse of `encode`, up to rounding; `read` gives one record's rows of a stored tensor."""
    values = read(name)
    assert values.dtype == FEATURE_DTYPES[feature_dtype], (name, values.dtype, feature_dtype)
    return values


def shard_file(shard_index: int) -> str:
    return f"shard-{shard_index:05d}.safetensors"


def write_shard(
    folder: Path, header: StoreHeader, *, shard_index: int, records: Iterable[StoreRecord], inputs_sha256: str
) -> ShardInfo:
    """Write one shard whole, then the sidecar that says so; an unfinished one leaves no trace that counts.

    Raises ValueError on an empty shard, a record whose shapes do not fit `header`, or a store that is published.
    """
    if (folder / MANIFEST).is_file():
        raise ValueError(f"store {folder} is finished: choose another name or remove it to extract again")
    records = list(records)
    if not records:
        raise ValueError(f"shard {shard_index} of {folder} would hold no records: drop empty shards before writing")
    for record in records:
        _check_record(record, header)
    tensors = _concatenate(records, header.feature_dtype)
    metadata = {"ids": json.dumps([record.id for record in records])}
    path = folder / shard_file(shard_index)
    # A crash between the two writes must not leave the new shard beside an older sidecar.
    path.with_suffix(".json").unlink(missing_ok=True)
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
    # safetensors writes for the owner only; a store is shared between users of one machine.
    path.chmod(0o644)
    info = ShardInfo(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=sha256_file(path),
        num_records=len(records),
        num_tokens=tensors["input_ids"].shape[0],
        num_supervised_tokens=int(tensors["row_offsets"][-1]),
        inputs_sha256=inputs_sha256,
    )
    write_json(path.with_suffix(".json"), {"header_sha256": _header_sha256(header), "shard": asdict(info)})
    return info


def finished_shards(folder: Path, header: StoreHeader) -> dict[int, ShardInfo]:
    """Shards of an interrupted extraction that need not be made again, by index.

    The caller compares `inputs_sha256`. Raises ValueError when the folder holds shards of another header.
    """
    finished = {}
    for sidecar in sorted(folder.glob("shard-*.json")):
        content = read_json(sidecar)
        if content["header_sha256"] != _header_sha256(header):
            reason = "belongs to another extraction (other target, layers, dtype or chat template)"
            raise ValueError(f"{sidecar} {reason}: remove {folder} or choose another name")
        info = ShardInfo(**content["shard"])
        if (folder / info.file).is_file() and (folder / info.file).stat().st_size == info.bytes:
            finished[int(sidecar.stem.removeprefix("shard-"))] = info
    return finished


def publish(folder: Path, header: StoreHeader, shard_infos: Sequence[ShardInfo]) -> None:
    """Turn finished shards, in order, into a store: write the manifest, then remove the sidecars.

    Raises ValueError when there are no records, an id repeats, or the folder's shards are not the listed ones.
    """
    listed = [info.file for info in shard_infos]
    present = sorted(path.name for path in folder.glob("shard-*.safetensors"))
    if listed != [shard_file(index) for index in range(len(listed))] or present != listed:
        raise ValueError(f"store {folder} has shards {present}, to be published are {listed}: remove it and start anew")
    if not shard_infos:
        raise ValueError(f"store {folder} would hold no records: give extract.py responses with at least one chat")
    _check_unique([id for info in shard_infos for id in _read_index(folder / info.file).ids], folder)
    write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "version": VERSION,
            **asdict(header),
            "last_hidden_rows": "supervised",
            "num_records": sum(info.num_records for info in shard_infos),
            "num_tokens": sum(info.num_tokens for info in shard_infos),
            "num_supervised_tokens": sum(info.num_supervised_tokens for info in shard_infos),
            "shards": [asdict(ShardEntry(i.file, i.bytes, i.sha256, i.num_records)) for i in shard_infos],
        },
    )
    remove_sidecars(folder)


def remove_sidecars(folder: Path) -> None:
    """A published store has no use for them."""
    for sidecar in folder.glob("shard-*.json"):
        sidecar.unlink()


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError when the folder is no store, or one of another format or version."""
    if not (folder / MANIFEST).is_file():
        reason = "extraction was not finished" if any(folder.glob("shard-*")) else "this is not a feature store"
        raise ValueError(f"store={folder} has no {MANIFEST}: {reason}; run extract.py again")
    values = read_json(folder / MANIFEST)
    found = (values.pop("format", None), values.pop("version", None))
    if found != (FORMAT, VERSION):
        held = f"format {found[0]} version {found[1]}"
        raise ValueError(f"store={folder} has {held}, not {FORMAT} version {VERSION}: rebuild it with extract.py")
    try:
        return _parse_manifest(values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error}): rebuild it with extract.py") from error


class FeatureStore:
    """A finished store as a map-style dataset of StoreRecord; a record is read from disk when it is asked for.

    Opening reads the manifest and each shard's index, not the features. Can be pickled; every process opens its own
    files. Raises ValueError when the folder is not a whole store of this version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        if self.manifest.num_records == 0:
            raise ValueError(f"store={folder} holds no records: run extract.py with at least one response")
        self._check_shards(checksums=False)
        indexes = [_read_index(folder / shard.file) for shard in self.manifest.shards]
        self.ids = [id for index in indexes for id in index.ids]
        self.lengths = torch.cat([index.offsets.diff() for index in indexes])  # [N] tokens of each record
        self.num_supervised = torch.cat([index.row_offsets.diff() for index in indexes])  # [N] supervised tokens
        self._check_counts(indexes)
        self._offsets = [index.offsets.tolist() for index in indexes]
        self._row_offsets = [index.row_offsets.tolist() for index in indexes]
        self._first_records = [0, *accumulate(shard.num_records for shard in self.manifest.shards)]
        self._opened: dict[tuple[int, int], Any] = {}

    def __len__(self) -> int:
        return self.manifest.num_records

    def __getitem__(self, index: int) -> StoreRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of a store with {len(self)}")
        shard = bisect_right(self._first_records, index) - 1
        place = index - self._first_records[shard]
        handle = self._open(shard)
        start, stop = self._offsets[shard][place : place + 2]
        first_row, end_row = self._row_offsets[shard][place : place + 2]
        dtype = self.manifest.header.feature_dtype

        # Cloned, because a slice is a view of the mapping: a change to it would show in every later read.
        def read(name: str, first: int = start, end: int = stop) -> Tensor:
            return handle.get_slice(name)[first:end].clone()

        return StoreRecord(
            id=self.ids[index],
            input_ids=read("input_ids"),
            loss_mask=read("loss_mask"),
            features=decode("features", read, dtype),
            last_hidden=decode("last_hidden", lambda name: read(name, first_row, end_row), dtype),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def verify(self) -> None:
        """Read every byte again; raises ValueError that names each shard that is missing, truncated or damaged."""
        self._check_shards(checksums=True)

    def check_target(self, *, config_sha256: str, weights_sha256: str, layer_ids: Sequence[int]) -> None:
        """Raises ValueError unless that target made this store and the store has all of `layer_ids`."""
        target = self.manifest.header.target
        if (target.config_sha256, target.weights_sha256) != (config_sha256, weights_sha256):
            made_by = f"{target.name} (config {target.config_sha256[:12]}, weights {target.weights_sha256[:12]})"
            given = f"config {config_sha256[:12]}, weights {weights_sha256[:12]}"
            raise ValueError(
                f"store={self.folder} was made by target {made_by}, not by the target given ({given}): "
                "use that target or run extract.py with this one"
            )
        self._layer_places(layer_ids)

    def select_layers(self, features: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Columns of `layer_ids`, in the order asked for: [..., L*D] -> [..., len(layer_ids)*D]."""
        header = self.manifest.header
        by_layer = features.unflatten(-1, (len(header.layer_ids), header.hidden_size))  # [..., L, D]
        return by_layer[..., self._layer_places(layer_ids), :].flatten(-2)

    def _check_counts(self, indexes: list["_ShardIndex"]) -> None:
        manifest = self.manifest
        found = [len(index.ids) for index in indexes], int(self.lengths.sum()), int(self.num_supervised.sum())
        listed = [shard.num_records for shard in manifest.shards], manifest.num_tokens, manifest.num_supervised_tokens
        if found != listed or sum(listed[0]) != manifest.num_records:
            self.verify()  # names the shard if one of them is the cause
            raise ValueError(f"store={self.folder}: shards and {MANIFEST} disagree on counts; run extract.py again")

    def _layer_places(self, layer_ids: Sequence[int]) -> list[int]:
        stored = self.manifest.header.layer_ids
        if missing := [layer for layer in layer_ids if layer not in stored]:
            raise ValueError(
                f"the drafter needs target layers {list(layer_ids)}, store={self.folder} has {list(stored)} "
                f"(missing {missing}): change target_layer_ids or run extract.py with these layers"
            )
        return [stored.index(layer) for layer in layer_ids]

    def _open(self, shard: int) -> Any:
        # Keyed by process too: a forked DataLoader worker must not share its parent's file handles.
        key = (os.getpid(), shard)
        if key not in self._opened:
            self._opened[key] = safe_open(self.folder / self.manifest.shards[shard].file, framework="pt")
        return self._opened[key]

    def _check_shards(self, *, checksums: bool) -> None:
        damages = []
        for shard in self.manifest.shards:
            path = self.folder / shard.file
            size = path.stat().st_size if path.is_file() else 0
            if not path.is_file():
                damages.append(f"{shard.file} is missing")
            elif size != shard.bytes:
                damages.append(f"{shard.file} is truncated or overwritten ({size} bytes, should be {shard.bytes})")
            elif checksums and sha256_file(path) != shard.sha256:
                damages.append(f"{shard.file} is damaged (its sha256 differs from the manifest's)")
        if damages:
            raise ValueError(f"store={self.folder}: {'; '.join(damages)}. Copy it again or run extract.py again")


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


def _concatenate(records: list[StoreRecord], feature_dtype: str) -> dict[str, Tensor]:
    lengths = [record.input_ids.shape[0] for record in records]
    rows = [record.last_hidden.shape[0] for record in records]
    return {
        "offsets": torch.tensor([0, *accumulate(lengths)], dtype=torch.int64),
        "row_offsets": torch.tensor([0, *accumulate(rows)], dtype=torch.int64),
        "input_ids": torch.cat([record.input_ids for record in records]).to("cpu", torch.int32),
        "loss_mask": torch.cat([record.loss_mask for record in records]).to("cpu", torch.bool),
        **encode("features", torch.cat([record.features for record in records]), feature_dtype),
        **encode("last_hidden", torch.cat([record.last_hidden for record in records]), feature_dtype),
    }


def _header_sha256(header: StoreHeader) -> str:
    return sha256_text(json.dumps({"version": VERSION, **asdict(header)}, sort_keys=True))


class _ShardIndex(NamedTuple):
    ids: list[str]
    offsets: Tensor  # [n+1]
    row_offsets: Tensor  # [n+1]


def _read_index(path: Path) -> _ShardIndex:
    try:
        with safe_open(path, framework="pt") as handle:
            ids = json.loads(handle.metadata()["ids"])
            return _ShardIndex(ids, handle.get_tensor("offsets").clone(), handle.get_tensor("row_offsets").clone())
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged (its index cannot be read: {error}); run extract.py again") from error


def _check_unique(ids: list[str], folder: Path) -> None:
    """Anchors are drawn from the record id, so two records of one id would also share their draws."""
    if repeated := sorted(id for id, count in Counter(ids).items() if count > 1)[:3]:
        raise ValueError(f"store={folder} has records with equal ids {repeated}: give each response its own id")


def _parse_manifest(values: dict[str, Any]) -> Manifest:
    if values.pop("last_hidden_rows") != "supervised":
        raise TypeError("last_hidden_rows must be supervised")
    shards = tuple(ShardEntry(**entry) for entry in values.pop("shards"))
    counts = {name: values.pop(name) for name in ("num_records", "num_tokens", "num_supervised_tokens")}
    values |= {"target": TargetIdentity(**values["target"]), "layer_ids": tuple(values["layer_ids"])}
    return Manifest(header=StoreHeader(**values), shards=shards, **counts)
