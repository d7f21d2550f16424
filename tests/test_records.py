"""Sources of records: random access that agrees with a plain reading, names of records, fingerprints, clear errors."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.records import Records, open_records
from data.run import read_lines

ROWS = [{"prompt": "a"}, {"prompt": "é😀\u2028b", "id": 7}, {"prompt": "c", "tools": [{"name": "add"}]}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as the file that the suffix asks for."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        table_of(rows).to_parquet(path)
    return path


def table_of(rows: list[dict[str, Any]]) -> datasets.Dataset:
    columns = sorted({key for row in rows for key in row})
    return datasets.Dataset.from_dict({column: [row.get(column) for row in rows] for column in columns})


def names(records: Records) -> list[str]:
    return [records.where(index).removeprefix(records.source) for index in range(len(records))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_records_are_read_by_index_in_any_order(tmp_path: Path, suffix: str) -> None:
    records = open_records(str(write(tmp_path / f"x{suffix}", ROWS)))
    assert records.source == str(tmp_path / f"x{suffix}")
    assert len(records) == 3
    assert [records[index] for index in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert (records[-1], records[1:], list(records)) == (ROWS[2], ROWS[1:], ROWS)
    with pytest.raises(IndexError):
        records[3]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_pickled_records_read_the_same(tmp_path: Path, suffix: str) -> None:
    records = open_records(str(write(tmp_path / f"x{suffix}", ROWS)))
    copy = pickle.loads(pickle.dumps(records))
    assert list(copy) == ROWS
    assert (names(copy), copy.fingerprint()) == (names(records), records.fingerprint())


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_fingerprint_follows_the_content_alone(tmp_path: Path, suffix: str) -> None:
    def fingerprint(folder: str, rows: list[dict[str, Any]]) -> str:
        (tmp_path / folder).mkdir()
        return open_records(str(write(tmp_path / folder / f"x{suffix}", rows))).fingerprint()

    prints = {
        fingerprint("a", ROWS),
        fingerprint("b", [*ROWS, ROWS[0]]),
        fingerprint("c", ROWS[::-1]),
        fingerprint("d", [{"prompt": "A"}, *ROWS[1:]]),
    }
    assert len(prints) == 4 and all(len(value) == 64 for value in prints)
    assert fingerprint("again", ROWS) in prints


def test_null_columns_are_dropped(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    for suffix in (".jsonl", ".json", ".parquet"):
        assert list(open_records(str(write(tmp_path / f"x{suffix}", rows)))) == [{"a": 1}, {"b": "x"}]


def test_records_are_named_by_line_or_index(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n \r\n\r\n{}\n')
    assert names(open_records(str(path))) == [":2", ":5"]
    for suffix in (".json", ".parquet"):
        assert names(open_records(str(write(tmp_path / f"y{suffix}", ROWS)))) == ["[0]", "[1]", "[2]"]


def test_windows_line_ends_blank_lines_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(row).encode() for row in ROWS]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n  \r\n".join(lines))
    assert list(open_records(str(path))) == ROWS
    path.write_bytes(b"\xef\xbb\xbf\r\n" + lines[0])
    assert list(open_records(str(path))) == ROWS[:1]
    path = path.with_suffix(".json")
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS).encode())
    assert list(open_records(str(path))) == ROWS


JSON_LINES = st.dictionaries(st.sampled_from("ab"), st.text('x\né\u2028\r"\\', max_size=4) | st.integers(), max_size=2)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(JSON_LINES, min_size=1, max_size=6),
    gaps=st.lists(st.sampled_from(["\n", "\n\n", " \n", "\r\n"]), min_size=6, max_size=6),
    last=st.booleans(),
)
def test_access_by_index_equals_a_reading_from_the_start(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], gaps: list[str], last: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + gap for row, gap in zip(rows, gaps, strict=False))
    path.write_bytes((text if last else text.rstrip()).encode())
    records = open_records(str(path))
    assert [records[index] for index in range(len(records))] == read_lines(path, repair=False) == rows


def test_torn_last_line_is_passed_over_as_other_readers_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "x.jsonl", ROWS)
    whole = path.read_bytes()
    starts_last = whole.rindex(b"\n", 0, -1) + 1
    for stop in range(starts_last, len(whole) + 1):
        path.write_bytes(whole[:stop])
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            records = list(open_records(str(path)))
        assert records == read_lines(path, repair=False)
        assert [record.getMessage().split(" is torn")[0] for record in caplog.records] == (
            [f"{path}:3"] if starts_last < stop < len(whole) - 1 else []
        )


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "is empty: expected one JSON object a line"),
        (b"\n \r\n", "is empty: expected one JSON object a line"),
        (b'{"a": 1}\n\n{"a": \n{"a": 1}\n', ":3: broken JSON .*: correct or remove it"),
        (b'{"a": "\xff"}\n', ":1: broken JSON"),
        (b'{"a": 1}\n[1]\n', r":2: expected a JSON object, got \[1\]"),
        (b'{"a": 1}\n"torn"', ":2: expected a JSON object, got 'torn'"),
        (b'{"a": 1}{"a": 2}\n', ":1: broken JSON"),
        (b"[" * 100_000 + b"\n", ":1: broken JSON"),
        (b'{"a": 1', "is empty"),
    ],
)
def test_broken_lines_are_named_when_the_file_is_opened(tmp_path: Path, content: bytes, error: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=error) as caught:
        open_records(str(path))
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("x.json", b"[]", "x.json is empty: expected a list of objects"),
        ("x.json", b'{"a": 1}', "x.json must hold a list of objects, got dict"),
        ("x.json", b'[{"a": 1}, 3]', r"x.json\[1\]: expected a JSON object, got 3"),
        ("x.json", b'[{"a": 1}', "x.json: broken JSON"),
        ("x.json", b'[{"a": "\xff"}]', "x.json: broken JSON"),
        ("x.parquet", b"PAR", "x.parquet cannot be read as Parquet"),
        ("x.csv", b"a,b", "x.csv is not a source: give a .jsonl, .json or .parquet file or a hub data set"),
    ],
)
def test_unreadable_files_are_one_error(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=error):
        open_records(str(tmp_path / name))


def test_tables_without_rows_are_an_error(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"a": []}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x.parquet is empty: expected a row a record"):
        open_records(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_missing_files_are_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"no such file: .*{name}"):
        open_records(str(tmp_path / name))


def test_line_that_changed_since_the_file_was_opened_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS)
    records = open_records(str(path))
    path.write_text("x" * 200)
    with pytest.raises(ValueError, match=r"x.jsonl:2: broken JSON"):
        records[1]


def test_hub_names_are_loaded_with_their_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, *, split: str, data_files: str | None) -> datasets.Dataset:
        assert name is None and data_files is None
        asked.append((path, split))
        return table_of(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    records = open_records("owner/name:train_sft")
    assert list(records) == ROWS
    assert records.where(1) == "owner/name:train_sft[1]"
    open_records("name")
    assert asked == [("owner/name", "train_sft"), ("name", "train")]


def test_hub_name_that_cannot_be_loaded_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot load the hub data set 'owner/missing', split 'test' .*give a .jsonl"):
        open_records("owner/missing:test")
