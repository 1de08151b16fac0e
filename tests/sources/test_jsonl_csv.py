"""JSON Lines and CSV: every line once, whatever ranges it lies in, typed as documented."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import cachestream.formats.lines as module
from cachestream import ConfigError, FileSource, LinesSource, SampleError
from cachestream.sources.open import open_source
from tests.sources.reading import read_unit
from tests.support.s3 import S3Server

RNG = np.random.default_rng(0)


def all_of(source: Any) -> list[tuple[str, Any]]:
    return [item for unit in range(source.num_units) for item in source.read(unit, RNG)]


def samples_of(source: Any) -> list[Any]:
    return [sample for _, sample in all_of(source)]


def write_lines(path: Path, values: list[Any]) -> str:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), "utf-8")
    return str(path)


def test_an_object_in_a_line_is_a_sample_as_a_row_of_parquet_is(tmp_path: Path) -> None:
    value = {
        "i": 1,
        "f": 0.5,
        "s": "ü",
        "b": True,
        "l": [[1, 2], [3, 4]],
        "t": ["a"],
        "o": {"x": 1, "y": {"z": "q"}},
    }
    source = open_source(write_lines(tmp_path / "a.jsonl", [value, 7]))
    assert type(source) is LinesSource
    (key, sample), (other_key, other) = all_of(source)
    assert (key, other_key) == (
        "a.jsonl#0",
        f"a.jsonl#{len(json.dumps(value, ensure_ascii=False).encode()) + 1}",
    )
    assert sample.pop("l").tolist() == [[1, 2], [3, 4]]
    assert sample == {"i": 1, "f": 0.5, "s": "ü", "b": True, "t": '["a"]', "o.x": 1, "o.y.z": "q"}
    assert other == {"json": 7}


def test_an_object_is_chosen_with_all_its_members_as_a_struct_of_parquet_is(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"i": 1, "o": {"x": 1, "y": 2}, "other": 3, "p": {"z": 1, "q": 5}}]
    )
    assert samples_of(LinesSource(path, columns=["o", "p.q"])) == [{"o.x": 1, "o.y": 2, "p.q": 5}]


@pytest.mark.parametrize("range_bytes", [1, 7, 50, 1000])
@pytest.mark.parametrize("ending", ["\n", "", "\r\n"])
def test_lines_come_once_however_a_file_is_cut_into_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, range_bytes: int, ending: str
) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", range_bytes)
    lines = [json.dumps({"i": i, "pad": "x" * (i * 7 % 13)}) for i in range(20)]
    (tmp_path / "a.jsonl").write_bytes(
        ("\r\n" if "\r" in ending else "\n").join(lines).encode() + ending.encode()
    )
    source = open_source(str(tmp_path / "a.jsonl"))
    assert source.num_units == -(-(tmp_path / "a.jsonl").stat().st_size // range_bytes)
    assert [sample["i"] for sample in samples_of(source)] == list(range(20))


@pytest.mark.e2e
def test_ranges_of_a_file_on_s3_are_units(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", 1000)
    body = "".join(json.dumps({"i": i}) + "\n" for i in range(500)).encode()
    folder = s3_server.bucket("lines") / "a"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.jsonl").write_bytes(body)
    source = open_source("s3://lines/a/", storage_options=s3_server.storage_options)
    assert type(source) is LinesSource
    assert source.num_units == 2 * -(-len(body) // 1000)
    assert [sample["i"] for sample in samples_of(source)] == [*range(500), *range(500)]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("ending", "pack"),
    [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstandard.compress)],
)
def test_a_packed_table_that_is_truncated_gives_no_cut_row_and_says_so(
    tmp_path: Path, ending: str, pack: Any
) -> None:
    count = 15_000 if pack is bz2.compress else 5000  # more than a block of bz2
    texts = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(count)]
    rows = "".join(f"{i},{text}\n" for i, text in enumerate(texts))
    path = tmp_path / f"a.csv.{ending}"
    path.write_bytes(pack(f"i,j\n{rows}".encode()))
    source = LinesSource(path)
    for cut in (10, 41, 100_000):
        path.write_bytes(path.read_bytes()[:-cut])
        found, reason = read_unit(source)
        assert f"a.csv.{ending}: the compressed file is truncated: it ends after" in reason
        assert [sample for _, sample in found] == [{"i": i, "j": texts[i]} for i in range(len(found))]


def test_columns_of_csv_are_whole_numbers_numbers_or_texts_as_all_of_the_first_rows_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text('i,f,zip,text,none\n1,1,007,"a, ""b""\nc",\n-2,.5e1,123,,\n')
    source = open_source(str(tmp_path / "a.csv"))
    assert type(source) is LinesSource
    assert all_of(source) == [
        ("a.csv#0", {"i": 1, "f": 1.0, "zip": "007", "text": 'a, "b"\nc', "none": ""}),
        ("a.csv#1", {"i": -2, "f": 5.0, "zip": "123", "text": "", "none": ""}),
    ]
    kept = open_source(str(tmp_path / "a.csv"), columns=["i"], fields={"i": ""})
    assert samples_of(kept) == [{"i": "1"}, {"i": "-2"}]


def test_tables_without_rows_tell_no_types(tmp_path: Path) -> None:
    """Spark writes a file of names alone for an empty partition."""
    for number, text in enumerate(("i,f,t\n", "", "i,f,t\n1,0.5,x\n", "i,f,t\n2,1,y\n")):
        (tmp_path / f"part-{number}.csv").write_text(text)
    assert samples_of(LinesSource(tmp_path)) == [{"i": 1, "f": 0.5, "t": "x"}, {"i": 2, "f": 1.0, "t": "y"}]


def test_a_long_text_in_a_table_is_one_value(tmp_path: Path) -> None:
    text = "words, and more\n" * 20_000
    (tmp_path / "a.csv").write_text(f'text\nshort\n"{text}"\nlast\n')
    assert samples_of(LinesSource(tmp_path / "a.csv")) == [
        {"text": "short"},
        {"text": text},
        {"text": "last"},
    ]


def test_a_column_that_the_table_lacks_or_has_twice_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,x\n")
    with pytest.raises(ConfigError, match=r"a\.csv: no column 'txt'; there are id, text"):
        LinesSource(tmp_path / "a.csv", columns=["id", "txt"])
    (tmp_path / "b.csv").write_text("id,x,x\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"b\.csv: several columns are called 'x'"):
        LinesSource(tmp_path / "b.csv")
    assert samples_of(LinesSource(tmp_path / "b.csv", columns=["id"])) == [{"id": 1}]
    source = LinesSource(tmp_path / "a.csv", columns=["id", "age"], fields={"age": 0})
    assert samples_of(source) == [{"id": 1, "age": 0}]


def test_a_column_of_whole_numbers_may_hold_others_later_unless_a_default_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS_FOR_TYPES", 1)
    (tmp_path / "a.csv").write_text("n\n1\n2.5\n3\n")
    assert [repr(sample["n"]) for sample in samples_of(LinesSource(tmp_path / "a.csv"))] == ["1", "2.5", "3"]
    rows = LinesSource(tmp_path / "a.csv", fields={"n": 0}).read(0, RNG)
    assert [next(rows)[1], next(rows)[1]] == [{"n": 1}, {"n": 3}]
    with pytest.raises(SampleError, match=r"column 'n' holds '2\.5', and int before"):
        next(rows)


def test_what_cannot_be_used_costs_its_line_and_a_default_saves_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("i,f\n1,1.5\n2\n3,x\n,2.5\n4,4.5\n")
    source = LinesSource(tmp_path / "a.csv", fields={"i": -1, "f": 0.0})
    items = source.read(0, RNG)
    assert [next(items)[1] for _ in range(3)] == [{"i": 1, "f": 1.5}, {"i": -1, "f": 2.5}, {"i": 4, "f": 4.5}]
    with pytest.raises(SampleError, match=r"row 1: 1 values for 2 columns") as caught:
        next(items)
    assert caught.value.lost == 2
    path = tmp_path / "b.jsonl"
    path.write_text('{"a": null}\n{"a": 1,\n{}\n')
    lines = LinesSource(path, fields={"a": 0.0}).read(0, RNG)
    assert [next(lines)[1], next(lines)[1]] == [{"a": 0.0}, {"a": 0.0}]
    with pytest.raises(SampleError, match="line at byte 12: not a usable line of JSON"):
        next(lines)


def test_a_row_that_cannot_be_decoded_is_skipped_and_the_rows_after_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS_FOR_TYPES", 1)
    (tmp_path / "a.csv").write_bytes(b"t,n\na,1\n\xff,2\nc,3\n")
    rows = LinesSource(tmp_path / "a.csv").read(0, RNG)
    assert [next(rows), next(rows)] == [("a.csv#0", {"t": "a", "n": 1}), ("a.csv#2", {"t": "c", "n": 3})]
    with pytest.raises(SampleError, match="row 1: 'utf-8' codec"):
        next(rows)
    (tmp_path / "b.csv").write_bytes(b"\xff\n1\n")
    with pytest.raises(ConfigError, match=r"not a usable table: 'utf-8' codec.*; check encoding="):
        LinesSource(tmp_path / "b.csv")


def test_a_column_that_is_left_out_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_FOR_TYPES", 1)
    (tmp_path / "a.csv").write_text("\nid,score\n1,0.5\n2,N/A\n")
    assert samples_of(LinesSource(tmp_path / "a.csv", columns=["id"])) == [{"id": 1}, {"id": 2}]


def test_json_that_is_nested_too_deep_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 1_000_000 + '\n{"a": 1}\n')
    lines = LinesSource(tmp_path / "a.jsonl").read(0, RNG)
    assert next(lines)[1] == {"a": 1}
    with pytest.raises(SampleError, match="line at byte 0: not a usable line of JSON"):
        next(lines)


def test_encodings_and_what_has_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_bytes("t\nä\n".encode("latin-1"))
    assert samples_of(LinesSource(tmp_path / "a.csv", encoding="latin-1")) == [{"t": "ä"}]
    (tmp_path / "b.csv").write_bytes("\ufefft\nä\n".encode())
    assert samples_of(LinesSource(tmp_path / "b.csv")) == [{"t": "ä"}]
    for name in ("utf-16", "klingon", "hex"):
        with pytest.raises(ConfigError, match="encoding="):
            LinesSource(tmp_path / "b.csv", encoding=name)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    (tmp_path / "c.jsonl").write_bytes(b"x" * 1000)
    with pytest.raises(SampleError, match="a line of more than 100"):
        all_of(LinesSource(tmp_path / "c.jsonl"))


def test_a_folder_of_lines_is_read_by_line_but_not_one_of_images_with_a_table(tmp_path: Path) -> None:
    for i in range(3):
        write_lines(tmp_path / f"{i}.jsonl", [{"i": i}])
    assert type(open_source(tmp_path)) is LinesSource
    assert type(open_source(tmp_path, format="files")) is FileSource
    (tmp_path / "x.jpg").write_bytes(b"")
    assert type(open_source(tmp_path)) is FileSource
    assert open_source(tmp_path, format="lines").num_units == 3
