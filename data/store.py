"""The feature store: what a target computed once over each chat, as sharded safetensors that training reads by slices.

Format "draftsmith-features", version 2

    store/manifest.json            written last; a folder without it is not a store
    store/shard-00000.safetensors  whole chats, concatenated
    store/shard-00000.json         only while extraction runs: says that the shard is finished, and from which inputs
    store/.claims                  only while extraction runs: processes lock shards by bytes of this file

A shard of n records with T tokens and R supervised tokens holds

    offsets      int64 [n+1]        record i owns tokens offsets[i] to offsets[i+1]
    row_offsets  int64 [n+1]        record i owns supervised rows row_offsets[i] to row_offsets[i+1]
    input_ids    int32 [T]
    loss_mask    bool [T]           True = this token is supervised: a loss is taken on predicting it
    features     [T, L*D]           outputs of the L layers `layer_ids` side by side, in `feature_dtype`
    last_hidden  [R, D]             the target's last hidden state after the final norm, in `last_hidden_dtype`

and beside `features` and `last_hidden` the scales of their codec (data/codecs.py), under the same name with a suffix.

    fp8   features e4m3 [T, L*D],       features.scale float32 [T, L]
    nf4   features uint8 [T, L*D/2],    features.scale e4m3 [T, L*D/16],   features.row_scale float32 [T, L]

Supervised rows: the target's distribution for the token at position t is head(last hidden at t-1), so for every t with
loss_mask[t] the row t-1 is stored, in ascending order, and no other. Position 0 has no predecessor and cannot be
supervised. The record ids are a JSON list under the one metadata key `ids`: safetensors writes several keys in random
order, and equal work must give equal bytes. For the same reason nothing here holds a time or a path.

Shard k is made of the k-th group of response records, so numbers may be missing: a group without a usable chat has no
shard. `inputs_sha256` of a shard names those records, `chats` how they were cut and supervised.
"""

import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.codecs import decode, find_codec
from models.files import read_json, sha256_file
from models.target import TargetIdentity

FORMAT = "draftsmith-features"
VERSION = 2
MANIFEST = "manifest.json"
MAX_OPEN_SHARDS = 256
"""Each is a mapping, of which a process may have some ten thousand."""


@dataclass(frozen=True)
class StoreHeader:
    """What every shard of a store has in common; `layer_ids` are 0-based layers whose output was taken, ascending."""

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    hidden_size: int
    feature_dtype: str
    last_hidden_dtype: str
    chat_template_sha256: str
    chats: dict[str, Any]
    records_per_shard: int

    def __post_init__(self) -> None:
        for option in ("feature_dtype", "last_hidden_dtype"):
            name = getattr(self, option)
            find_codec(name, option)
            if name == "nf4" and self.hidden_size % 16:
                raise ValueError(f"{option}=nf4 needs a hidden size that 16 divides, got {self.hidden_size}; use fp8")
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids={list(self.layer_ids)} must be ascending, without repeats, and not empty")

    @property
    def scale_dtype(self) -> str | None:
        return find_codec(self.feature_dtype, "feature_dtype").scale_dtype


@dataclass(frozen=True)
class ShardEntry:
    """One shard; `inputs_sha256` names what its records were made from, for a resumed run to compare."""

    file: str
    bytes: int
    sha256: str
    num_records: int
    inputs_sha256: str


@dataclass(frozen=True)
class Manifest:
    header: StoreHeader
    responses_sha256: str
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


def shard_file(shard_index: int) -> str:
    return f"shard-{shard_index:05d}.safetensors"


def shard_index(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))


def shard_paths(folder: Path, suffix: str) -> list[Path]:
    """By index; what only looks like a shard (`shard-00001 (copy)`) is none."""
    found = [path for path in folder.glob(f"shard-*{suffix}") if path.stem.removeprefix("shard-").isdecimal()]
    return sorted(found, key=shard_index)


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError when the folder is no store, or one of another format or version."""
    if not (folder / MANIFEST).is_file():
        reason = "extraction was not finished" if any(folder.glob("shard-*")) else "this is not a feature store"
        raise ValueError(f"store={folder} has no {MANIFEST}: {reason}; run extract.py again")
    values = read_json(folder / MANIFEST)
    if not isinstance(values, dict):
        raise ValueError(f"{folder / MANIFEST} is damaged (no JSON object): remove it and run extract.py again")
    found = (values.pop("format", None), values.pop("version", None))
    if found != (FORMAT, VERSION):
        held = f"format {found[0]} version {found[1]}"
        raise ValueError(
            f"store={folder}: {MANIFEST} has {held}, not {FORMAT} version {VERSION}: remove the folder and rebuild it "
            "with extract.py"
        )
    try:
        return _parse_manifest(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error}): remove it and run extract.py again") from error


class FeatureSource(ABC):
    """Chats with their features, as training reads them: a store, or a target that runs in the training process."""

    name: str
    header: StoreHeader
    ids: list[str]
    lengths: Tensor  # [N] tokens of each record
    num_supervised: Tensor  # [N] supervised tokens of each record

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read_many(self, indices: Sequence[int]) -> list[StoreRecord]: ...

    @abstractmethod
    def count_supervised_tokens(self, vocab_size: int) -> Tensor:
        """How often each token is supervised, [V] int64, without reading features."""

    def check_target(self, identity: TargetIdentity, layer_ids: Sequence[int]) -> None:
        """Raises ValueError unless that target made these features and all of `layer_ids` are among them."""
        target = self.header.target
        if (target.config_sha256, target.weights_sha256) != (identity.config_sha256, identity.weights_sha256):
            made_by = f"{target.name} (config {target.config_sha256[:12]}, weights {target.weights_sha256[:12]})"
            given = f"config {identity.config_sha256[:12]}, weights {identity.weights_sha256[:12]}"
            raise ValueError(
                f"store={self.name} was made by target {made_by}, not by the target given ({given}): "
                "use that target or run extract.py with this one"
            )
        self._layer_places(layer_ids)

    def select_layers(self, features: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Columns of `layer_ids`, in the order asked for: [..., L*D] -> [..., len(layer_ids)*D]."""
        by_layer = features.unflatten(-1, (len(self.header.layer_ids), self.header.hidden_size))  # [..., L, D]
        return by_layer[..., self._layer_places(layer_ids), :].flatten(-2)

    def _layer_places(self, layer_ids: Sequence[int]) -> list[int]:
        stored = self.header.layer_ids
        if missing := [layer for layer in layer_ids if layer not in stored]:
            raise ValueError(
                f"the drafter needs target layers {list(layer_ids)}, store={self.name} has {list(stored)} "
                f"(missing {missing}): change target_layer_ids or run extract.py with these layers"
            )
        return [stored.index(layer) for layer in layer_ids]


class FeatureStore(FeatureSource):
    """A finished store as a map-style dataset of StoreRecord; a record is read from disk when it is asked for.

    Opening reads the manifest and each shard's index, not the features. Can be pickled; every process opens its own
    files. Raises ValueError when the folder is not a whole store of this version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)
        self.manifest = read_manifest(folder)
        self.header = self.manifest.header
        if self.manifest.num_records == 0:
            raise ValueError(f"store={folder} holds no records: run extract.py with at least one response")
        refuse_damages(folder, damages(folder, self.manifest, checksums=False))
        indexes = [read_index(folder / shard.file) for shard in self.manifest.shards]
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
        header = self.header

        # Cloned, because a slice is a view of the mapping: a change to it would show in every later read.
        def read(name: str, first: int = start, end: int = stop) -> Tensor:
            return handle.get_slice(name)[first:end].clone()

        return StoreRecord(
            id=self.ids[index],
            input_ids=read("input_ids"),
            loss_mask=read("loss_mask"),
            features=decode("features", read, find_codec(header.feature_dtype, "feature_dtype"), len(header.layer_ids)),
            last_hidden=decode(
                "last_hidden",
                lambda name: read(name, first_row, end_row),
                find_codec(header.last_hidden_dtype, "last_hidden_dtype"),
                1,
            ),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def read_many(self, indices: Sequence[int]) -> list[StoreRecord]:
        return [self[index] for index in indices]

    def verify(self) -> None:
        """Read every byte again; raises ValueError that names each shard that is missing, truncated or damaged."""
        refuse_damages(self.folder, damages(self.folder, self.manifest, checksums=True))

    def count_supervised_tokens(self, vocab_size: int) -> Tensor:
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for shard in self.manifest.shards:
            with safe_open(self.folder / shard.file, framework="pt") as file:
                tokens = file.get_tensor("input_ids")[file.get_tensor("loss_mask")]
            counts += torch.bincount(tokens.long(), minlength=vocab_size)
        return counts

    def _check_counts(self, indexes: list["ShardIndex"]) -> None:
        manifest = self.manifest
        found = [len(index.ids) for index in indexes], int(self.lengths.sum()), int(self.num_supervised.sum())
        listed = [shard.num_records for shard in manifest.shards], manifest.num_tokens, manifest.num_supervised_tokens
        if found != listed or sum(listed[0]) != manifest.num_records:
            self.verify()  # names the shard if one of them is the cause
            raise ValueError(f"store={self.folder}: shards and {MANIFEST} disagree on counts; run extract.py again")

    def _open(self, shard: int) -> Any:
        # Keyed by process too: a forked DataLoader worker must not share its parent's file handles.
        key = (os.getpid(), shard)
        if key not in self._opened:
            if len(self._opened) >= MAX_OPEN_SHARDS:
                del self._opened[next(iter(self._opened))]
            self._opened[key] = safe_open(self.folder / self.manifest.shards[shard].file, framework="pt")
        return self._opened[key]


def damages(folder: Path, manifest: Manifest, *, checksums: bool) -> dict[str, str]:
    """Shard file -> what is wrong with it, for every shard that is not as the manifest says."""
    found = {}
    for shard in manifest.shards:
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else 0
        if not path.is_file():
            found[shard.file] = f"{shard.file} is missing"
        elif size != shard.bytes:
            found[shard.file] = f"{shard.file} is truncated or overwritten ({size} bytes, should be {shard.bytes})"
        elif checksums and sha256_file(path) != shard.sha256:
            found[shard.file] = f"{shard.file} is damaged (its sha256 differs from the manifest's)"
    return found


def refuse_damages(folder: Path, found: dict[str, str]) -> None:
    if found:
        raise ValueError(
            f"store={folder}: {'; '.join(found.values())}. Copy these files again, or let `extract.py repair=true` "
            "make only them again"
        )


class ShardIndex(NamedTuple):
    ids: list[str]
    offsets: Tensor  # [n+1]
    row_offsets: Tensor  # [n+1]


def read_index(path: Path) -> ShardIndex:
    """Raises ValueError that names the shard when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as handle:
            ids = json.loads(handle.metadata()["ids"])
            return ShardIndex(ids, handle.get_tensor("offsets").clone(), handle.get_tensor("row_offsets").clone())
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged (its index cannot be read: {error}); `extract.py repair=true` makes it again"
        ) from error


def manifest_values(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON; `_parse_manifest` reads it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest.header),
        "scale_dtype": manifest.header.scale_dtype,
        "last_hidden_rows": "supervised",
        **{key: value for key, value in asdict(manifest).items() if key != "header"},
    }


def _parse_manifest(values: dict[str, Any]) -> Manifest:
    if (rows := values.pop("last_hidden_rows")) != "supervised":
        raise TypeError(f"last_hidden_rows={rows}, must be supervised")
    shards = tuple(ShardEntry(**entry) for entry in values.pop("shards"))
    counts = {name: values.pop(name) for name in ("num_records", "num_tokens", "num_supervised_tokens")}
    responses, scale_dtype = values.pop("responses_sha256"), values.pop("scale_dtype")
    values |= {"target": TargetIdentity(**values["target"]), "layer_ids": tuple(values["layer_ids"])}
    header = StoreHeader(**values)
    if header.scale_dtype != scale_dtype:
        raise TypeError(f"scale_dtype={scale_dtype} does not belong to feature_dtype={header.feature_dtype}")
    return Manifest(header=header, responses_sha256=responses, shards=shards, **counts)
