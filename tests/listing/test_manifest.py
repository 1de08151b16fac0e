"""Manifests: texts and tables of URLs become sources, in their order, with their labels, in little memory."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.errors import ConfigError, SourceError
from cachestream.formats.files import FileSource
from cachestream.formats.tar import TarSource
from cachestream.listing.manifest import LabelsBuilder, Manifest
from cachestream.listing.names import Names
from cachestream.testing.checks import check_source
from tests.sources.tars import make, numbered
from tests.support.s3 import S3Server

FILES = ["b/2.npy", "a/1.npy", "b/0.npy"]
LABELS = ["dog", "cat", "dog"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, np.full(4, int(Path(name).stem)))
    return folder


def as_text(path: Path, rows: list[tuple[str, str]]) -> Path:
    path = path.with_suffix(".txt")
    path.write_text("# the data\n\n" + "".join(f"{name}\r\n" for name, _ in rows), encoding="utf-8")
    return path


def as_csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    path = path.with_suffix(".csv")
    lines = "".join(f'"{name}",1,{label}\n' for name, label in rows)
    path.write_text("﻿path,size,label\n" + lines, encoding="utf-8")
    return path


def as_tsv(path: Path, rows: list[tuple[str, str]]) -> Path:
    path = path.with_suffix(".tsv.gz")
    path.write_bytes(gzip.compress(("label\tURL\n" + "".join(f"{b}\t{a}\n" for a, b in rows)).encode()))
    return path


def as_parquet(path: Path, rows: list[tuple[str, str]]) -> Path:
    path = path.with_suffix(".parquet")
    names, labels = zip(*rows, strict=True)
    pq.write_table(
        pa.table({"label": labels, "file_name": names, "size": [1] * len(rows)}), path, row_group_size=2
    )
    return path


def samples_of(source: Any) -> list[tuple[str, dict[str, Any]]]:
    return [item for unit in range(source.num_units) for item in source.read(unit, np.random.default_rng(0))]


@pytest.mark.parametrize("row", ["{0}.npy, {0}\n", '"{0}.npy" , "{0}" \r\n', " {0}.npy ,{0}\t\n"])
def test_blanks_around_what_a_table_holds_are_no_part_of_it(tmp_path: Path, row: str) -> None:
    (tmp_path / "list.csv").write_text(
        "path, label\n" + "".join(map(row.format, range(12))), encoding="utf-8"
    )
    manifest = Manifest(tmp_path / "list.csv", label="label")
    assert list(manifest.rows()) == [(f"{tmp_path}/{number}.npy", str(number)) for number in range(12)]
    assert FileSource(manifest).label_names == ()


@pytest.mark.parametrize(
    ("labels", "values", "names"),
    [
        (["7", "-3", "7"], [7, -3, 7], ()),
        (["0.5", "2", "1e3"], [0.5, 2.0, 1000.0], ()),
        (["7", "x", "7"], [0, 1, 0], ("7", "x")),
        ([1.5, 2.5, 1.5], [1.5, 2.5, 1.5], ()),
        ([3, 1, 3], [3, 1, 3], ()),
        (["99999999999999999999", "1", "1"], [1e20, 1.0, 1.0], ()),
        (["-.5", "2.", "-1E-3"], [-0.5, 2.0, -0.001], ()),
        ([True, 0, 1], [1, 0, 1], ()),
        (["1_0", "10", "0_1"], [2, 1, 0], ("0_1", "10", "1_0")),
        (["007", "07", "7"], [0, 1, 2], ("007", "07", "7")),
        (["+1", " 1", "1"], [1, 0, 2], (" 1", "+1", "1")),
        (["nan", "inf", "1"], [2, 1, 0], ("1", "inf", "nan")),
        (["1e999", "-0.5", "01.5"], [2, 0, 1], ("-0.5", "01.5", "1e999")),
        (["\u0663", "3", "3"], [1, 0, 0], ("3", "\u0663")),
        ([Decimal("1.5"), Decimal(1), Decimal(2)], [1.5, 1.0, 2.0], ()),
    ],
)
def test_labels_are_numbers_where_all_are_written_as_such(
    labels: list[Any], values: list[Any], names: tuple[str, ...]
) -> None:
    builder = LabelsBuilder()
    for label in labels:
        builder.add(label)
    made = builder.labels()
    assert [made[i] for i in range(3)] == values
    assert all(type(made[i]) is type(value) for i, value in enumerate(values))
    assert made.names == names


def test_names_may_be_urls_absolute_or_relative_to_a_base(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "list.txt"
    other.parent.mkdir()
    other.write_text(f"{data}/a/1.npy\nfile://{data}/b/2.npy\n../data/b/0.npy\n", encoding="utf-8")
    assert [key for key, _ in samples_of(cs.open_source(other, manifest=True))] == [
        "a/1.npy",
        "b/2.npy",
        "b/0.npy",
    ]
    other.write_text("a/1.npy\n", encoding="utf-8")
    assert [key for key, _ in samples_of(FileSource(Manifest(other, base=data)))] == ["1.npy"]


def test_the_ending_of_the_first_says_which_source_it_is(data: Path, tmp_path: Path) -> None:
    make(tmp_path / "x.tar", numbered(3))
    listed = tmp_path / "tars.txt"
    listed.write_text("x.tar\n", encoding="utf-8")
    source: Any = cs.open_source(Manifest(listed), decoders={})
    assert type(source) is TarSource
    assert len(samples_of(source)) == 3
    table = as_csv(tmp_path / "tars", [("x.tar", "1")])
    with pytest.raises(ConfigError, match="TarSource has labels of its own"):
        cs.open_source(Manifest(table, label="label"))
    with pytest.raises(ConfigError, match="arrays are given as a list"):
        cs.open_source(Manifest(as_text(data / "arrays", [("a/1.npy", "")])), window=2)


def test_extensions_keep_only_files_that_end_so(data: Path) -> None:
    listed = as_csv(data / "list", [("a/1.npy", "1"), ("a/1.json", "2"), ("b/2.npy", "3")])
    source = FileSource(Manifest(listed, label="label"), extensions="npy")
    assert [sample["label"] for _, sample in samples_of(source)] == [1, 3]
    with pytest.raises(SourceError, match=r"no file of the manifest ends in \.jpg"):
        FileSource(Manifest(listed), extensions="jpg")


@pytest.mark.e2e
def test_a_manifest_keeps_the_protocol(data: Path) -> None:
    listed = as_csv(data / "list", list(zip(FILES, LABELS, strict=True)))
    check_source(lambda: cs.open_source(Manifest(listed, label="label")))


@pytest.mark.e2e
@pytest.mark.parametrize("write", [as_tsv, as_parquet])
def test_a_manifest_beside_its_data_on_s3(
    write: Callable[..., Path], s3_server: S3Server, s3_bucket: Path, tmp_path: Path
) -> None:
    np.save(s3_bucket / "1.npy", np.ones(3))
    near = write(s3_bucket / "list", [("1.npy", "x")])
    far = write(tmp_path / "list", [(f"s3://{s3_bucket.name}/1.npy", "x")])
    options = s3_server.storage_options
    for manifest in (Manifest(f"s3://{s3_bucket.name}/{near.name}"), Manifest(far)):
        source = cs.open_source(manifest, storage_options=options)
        ((key, sample),) = samples_of(source)
        assert (key, sample["array"].tolist()) == ("1.npy", [1, 1, 1])
        assert s3_server.secret not in repr(source) + repr(manifest) + source.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "options", "message", "kind"),
    [
        ("x.csv", "a,b\n1,2\n", {}, r"x\.csv: give column= one of its columns: a, b", ConfigError),
        ("x.csv", "a.bin\nb.bin\n", {}, "'a.bin' looks like a file: write 'url' above it", ConfigError),
        ("x.csv", "a,b\n1,2\n", {"column": "c"}, r"columns: a, b \(not 'c'\)", ConfigError),
        ("x.csv", "url,b\n1,2\n", {"label": "c"}, r"give label= .*\(not 'c'\)", ConfigError),
        ("x.csv", "url,path\n1,2\n", {}, "give column=", ConfigError),
        ("x.csv", "a,url\n1\n", {}, "a row of 1 columns", SourceError),
        ("x.csv", "url,b\n1,0\n\n2, \n", {"label": "b"}, r"x\.csv: row 4 has nothing .* 'b'", SourceError),
        ("x.csv", "b, url\n1,2\n1,\n", {}, r"x\.csv: row 3 has nothing in its column 'url'", SourceError),
        ("x.tsv", "url\n1\n \n", {}, r"x\.tsv: row 3 has nothing in its column 'url'", SourceError),
        ("x.csv", "", {}, "is empty", SourceError),
        # Longer than what a LinesSource in the same process allows, too.
        ("x.csv", 'url\n"' + ("x" * 9999 + "\n") * 1700, {}, "cannot be read: field larger", SourceError),
        ("x.csv.gz", "no gzip", {}, "gzip|Not a gzipped", SourceError),
        ("x.txt", "x" * 1_100_000 + "\n", {}, r"/x\.txt: .* a line has 1,048,576 characters", SourceError),
        ("x.parquet", "no parquet", {}, "cannot be read|Parquet", SourceError),
        ("x.txt", "# nothing\n", {}, "names no files", SourceError),
        ("x.txt", "a.bin\n", {"column": "url"}, "a text has no columns", ConfigError),
        ("x.txt", "/a.bin\ns3://b/c.bin\n", {}, "same scheme", ConfigError),
        ("x.jsonl", '{"file_name": "a.bin"}\n', {}, r"\.parquet table, and not JSON", ConfigError),
        ("x.JSON.gz", '["a.bin"]', {}, r"\.parquet table, and not JSON", ConfigError),
    ],
)
def test_what_is_no_manifest_is_refused(
    name: str, content: str, options: dict[str, Any], message: str, kind: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(kind, match=message) as caught:
        cs.open_source(Manifest(tmp_path / name, **options))
    assert len(str(caught.value)) < 700
    assert str(caught.value).count(f"{name}:") <= 1


@pytest.mark.parametrize(
    "row", [{"url": "", "label": 1}, {"url": None, "label": 1}, {"url": "a", "label": None}]
)
def test_a_row_of_parquet_without_a_url_or_a_label_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"url": "b", "label": 0}, row]), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=r"x\.parquet: .* must be there in every row"):
        FileSource(Manifest(tmp_path / "x.parquet", label="label"))


@pytest.mark.parametrize("bad", [1, "yes", ["label"]])
def test_a_wrong_manifest_option_is_refused(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give True, or a dict"):
        cs.open_source(tmp_path, manifest=bad)
    with pytest.raises(ConfigError, match="labl"):
        cs.open_source(tmp_path, manifest={"labl": "x"})


def test_another_content_is_another_listing_under_the_same_name(data: Path) -> None:
    def made(rows: list[tuple[str, str]]) -> Any:
        return FileSource(Manifest(as_csv(data / "list", rows), label="label"))

    one, labels, names = made([("a", "1")]), made([("a", "2")]), made([("b", "1")])
    assert one.fingerprint == labels.fingerprint == names.fingerprint
    assert len({one.listing_digest, labels.listing_digest, names.listing_digest}) == 3


@pytest.mark.e2e
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)))
def test_names_that_come_one_by_one_are_those_of_a_list(names: list[str]) -> None:
    with mock.patch("cachestream.listing.names._NAMES_PER_BATCH", 2):
        made = Names(iter(names))
        assert list(made) == names
    assert made.digest == Names(names).digest


@pytest.mark.e2e
def test_a_million_names_cost_their_bytes(tmp_path: Path) -> None:
    """Measured in a process of its own: the highest memory above what importing takes."""
    code = (
        "import resource, sys; import cachestream as cs; from cachestream.formats.files import FileSource\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak(); source = FileSource(cs.Manifest(sys.argv[1]), label=None)\n"
        "print(source.num_units, source._files.names.nbytes // 2**20, peak() - before)\n"
    )
    listed = tmp_path / "list.txt"
    with listed.open("w", encoding="utf-8") as file:
        file.writelines(
            f"train/class-{number % 1000:04d}/image-{number:09d}.jpeg\n" for number in range(300_000)
        )
    done = subprocess.run(
        [sys.executable, "-c", code, str(listed)], capture_output=True, text=True, check=True, timeout=180
    )
    count, names_mib, peak_mib = map(int, done.stdout.split())
    assert count == 300_000
    assert names_mib <= 14
    assert peak_mib < 5 * names_mib


@pytest.mark.parametrize("bad", ["", None, ["a.jpg", "b.jpg"]])
def test_what_is_no_path_of_a_manifest_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="path or URL of one file, which lists the others"):
        Manifest(bad)
