"""Records of a JSONL, JSON or Parquet file or of a hub data set, by index, without holding them all in memory."""

import hashlib
import json
import logging
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from models.files import sha256_file

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Records(Sequence[dict[str, Any]]):
    """Objects of one source in its order, at least one; a null column is dropped from each. May be pickled."""

    source: str

    @abstractmethod
    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # Tables have every column in every row.
        return {key: value for key, value in self._read(range(len(self))[index]).items() if value is not None}

    @abstractmethod
    def _read(self, index: int) -> dict[str, Any]:
        """The record as it is stored; `index` is from 0 to below the length."""

    def where(self, index: int) -> str:
        """How to name a record in an error: `<source>:<line>` (from 1) in a JSONL, else `<source>[<index>]`."""
        return f"{self.source}[{index}]"

    def id_of(self, index: int, record: dict[str, Any]) -> str:
        """The own `id` of the record at `index`, a text or a number, else `<stem>-<line or index>`.

        Raises ValueError for an id of another kind.
        """
        own = record.get("id", "")
        if not isinstance(own, str | int):
            raise ValueError(f"{self.where(index)}: id must be a text or a number, got {own!r}")
        return str(own) or f"{source_stem(self.source)}-{self.where(index).removeprefix(self.source).strip(':[]')}"

    @abstractmethod
    def fingerprint(self) -> str:
        """A sha256 that changes whenever the content does."""


def source_stem(source: str) -> str:
    """Names a source in ids and domains: a file without folder and suffix, a hub data set without owner."""
    path = Path(source)
    return path.stem if path.is_file() else path.name.replace(":", "-")


def open_records(source: str) -> Records:
    """The records of a .jsonl, .json or .parquet path, or of a hub data set `name[:split]` (split train if not given).

    Raises one ValueError for a source that is missing, empty or cannot be read. A JSONL is read through once, so that
    its broken lines are named now and not hours later.
    """
    suffix = Path(source).suffix
    if suffix not in _READERS:
        if Path(source).exists():
            raise ValueError(f"{source} is not a source: give a .jsonl, .json or .parquet file or a hub data set")
        path, _, split = source.partition(":")
        return open_hub(path, split or "train", source=source)
    if not Path(source).is_file():
        raise ValueError(f"no such file: {source}")
    return _READERS[suffix](source)


class _Lines(Records):
    """A JSONL, of which only the place of each record is held. Blank lines hold none."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._starts, self._numbers = array("Q"), array("Q")
        digest = hashlib.sha256()
        with Path(source).open("rb") as file:
            start = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
            file.seek(start)
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if self._holds_record(line, f"{source}:{number}"):
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)
        self._fingerprint = digest.hexdigest()
        _check_filled(source, len(self._starts), "one JSON object a line")

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self.source}:{self._numbers[index]}"

    def fingerprint(self) -> str:
        return self._fingerprint

    def _read(self, index: int) -> dict[str, Any]:
        with Path(self.source).open("rb") as file:
            file.seek(self._starts[index])
            return _object(_parsed(file.readline(), self.where(index)), self.where(index))

    def _holds_record(self, line: bytes, where: str) -> bool:
        if not line.strip():
            return False
        try:
            value = _parsed(line, where)
        except ValueError:
            if line.endswith(b"\n"):
                raise
            log.warning("%s is torn, as a crash leaves a file that is being written: passed over", where)
            return False
        _object(value, where)
        return True


class _List(Records):
    """A JSON file that holds a list, held in memory as JSON has no index."""

    def __init__(self, source: str) -> None:
        self.source = source
        values = _parsed(Path(source).read_bytes().removeprefix(BYTE_ORDER_MARK), source)
        if not isinstance(values, list):
            raise ValueError(f"{source} must hold a list of objects, got {type(values).__name__}")
        self._records = [_object(value, f"{source}[{index}]") for index, value in enumerate(values)]
        _check_filled(source, len(values), "a list of objects")

    def __len__(self) -> int:
        return len(self._records)

    def fingerprint(self) -> str:
        return sha256_file(Path(self.source))

    def _read(self, index: int) -> dict[str, Any]:
        return self._records[index]


class _Table(Records):
    """Rows that `datasets` maps from its cache on the disk."""

    def __init__(self, source: str, rows: "Dataset") -> None:
        self.source, self._rows = source, rows
        _check_filled(source, len(rows), "a row a record")

    def __len__(self) -> int:
        return len(self._rows)

    def fingerprint(self) -> str:
        table = self._rows.data.table
        digest = hashlib.sha256(table.schema.serialize())
        for batch in table.to_batches():
            digest.update(batch.serialize())
        return digest.hexdigest()

    def _read(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def _load_parquet(source: str) -> Records:
    from datasets import Dataset  # takes a second to import, which few sources need
    from datasets.exceptions import DatasetGenerationError
    from pyarrow.parquet import read_metadata

    try:
        num_rows = read_metadata(source).num_rows
        rows = Dataset.from_parquet(source) if num_rows else None
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read as Parquet ({_reason(error)})") from error
    _check_filled(source, num_rows, "a row a record")
    assert isinstance(rows, Dataset)
    return _Table(source, rows)


def open_hub(
    path: str, split: str, *, name: str | None = None, data_files: str | None = None, source: str | None = None
) -> Records:
    """A split of a hub data set, of the configuration `name` or of some of its files; `source` names it in ids."""
    from datasets import Dataset, load_dataset

    try:
        rows = load_dataset(path, name, split=split, data_files=data_files)
    except Exception as error:  # no access, no such set or split, a damaged file: some twenty kinds
        raise ValueError(
            f"cannot load the hub data set {path!r}, split {split!r} ({_reason(error)});"
            " name one as owner/name:split, or give a .jsonl, .json or .parquet file"
        ) from error
    assert isinstance(rows, Dataset)
    return _Table(source or f"{path}:{split}", rows)


_READERS: dict[str, Callable[[str], Records]] = {".jsonl": _Lines, ".json": _List, ".parquet": _load_parquet}


def _parsed(content: bytes, where: str) -> object:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: broken JSON ({error}): correct or remove it") from error


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {value!r}")
    return value


def _check_filled(source: str, num_records: int, expected: str) -> None:
    if num_records == 0:
        raise ValueError(f"{source} is empty: expected {expected}")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
