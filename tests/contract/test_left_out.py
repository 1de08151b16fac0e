"""Samples and fields that a source does not read: each is a sample, counted with its reason, or told."""

from __future__ import annotations

import io
import json
import logging
import re
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import feather

import cachestream as cs
from tests.support.s3 import S3Server


def samples(source: Any) -> list[dict[str, Any]]:
    return [
        sample
        for unit in range(source.num_units)
        for _, sample in source.read(unit, np.random.default_rng(0))
    ]


def lost(source: Any) -> tuple[list[dict[str, Any]], int, str]:
    """Read a source to its end: its samples, the number of lost ones, and the reasons."""
    found, count, reasons = list[dict[str, Any]](), 0, list[str]()
    for unit in range(source.num_units):
        try:
            found.extend(sample for _, sample in source.read(unit, np.random.default_rng(0)))
        except cs.SampleError as error:
            count, reasons = count + error.lost, [*reasons, str(error)]
    return found, count, " ".join(reasons)


def cached(tmp_path: Path, source: Any, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """Fill a cache from `source`; return its samples, and the status."""
    with cs.Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=1, **options) as worker:
            worker.wait(timeout_s=60)
        if not cache.num_samples:
            return [], cache.status()
        with cache.snapshot() as dataset:
            return [dataset[i] for i in range(len(dataset))], cache.status()


# --- columns that folders name


def make_hive(root: Path, extension: str = "parquet") -> Path:
    """Write x = 0 … 3 below folders label=cat|a%2Fdog and part=01|2."""
    for x, (label, part) in enumerate([("cat", "01"), ("cat", "2"), ("a%2Fdog", "01"), ("a%2Fdog", "2")]):
        folder = root / f"label={label}" / f"part={part}"
        folder.mkdir(parents=True)
        table = pa.table({"x": [x]})
        if extension == "parquet":
            pq.write_table(table, folder / "0.parquet")
        elif extension == "arrow":
            feather.write_feather(table, folder / "0.arrow", compression="uncompressed")
        else:
            (folder / f"0.{extension}").write_text(
                {"csv": f"x\n{x}\n", "jsonl": f'{{"x": {x}}}\n'}[extension]
            )
    return root


WITH_FOLDERS = [
    {"x": 2, "label": "a/dog", "part": 1},
    {"x": 3, "label": "a/dog", "part": 2},
    {"x": 0, "label": "cat", "part": 1},
    {"x": 1, "label": "cat", "part": 2},
]


@pytest.mark.parametrize("extension", ["parquet", "arrow", "csv", "jsonl"])
def test_folders_that_name_columns_give_fields_as_in_pyarrow(tmp_path: Path, extension: str) -> None:
    make_hive(tmp_path / "t", extension)
    assert samples(cs.open_source(tmp_path / "t")) == WITH_FOLDERS
    assert samples(cs.open_source(f"{tmp_path}/t/**/*.{extension}")) == WITH_FOLDERS
    only = cs.open_source(tmp_path / "t", columns=["label", "x"])
    assert samples(only)[0] == {"x": 2, "label": "a/dog"}
    if extension == "parquet":
        table = pq.read_table(tmp_path / "t").to_pydict()
        assert sorted(zip(table["x"], table["label"], table["part"], strict=True)) == sorted(
            tuple(sample.values()) for sample in WITH_FOLDERS
        )


def test_a_column_of_folders_alone_is_read_from_no_file(tmp_path: Path) -> None:
    make_hive(tmp_path / "t")
    assert samples(cs.open_source(tmp_path / "t", columns=["part"])) == [
        {"part": one} for one in (1, 2, 1, 2)
    ]
    with pytest.raises(cs.ConfigError, match="no column 'y'; there are x, label, part"):
        cs.open_source(tmp_path / "t", columns=["y"])


def test_a_list_of_files_names_all_of_its_columns_and_a_single_file_none(tmp_path: Path) -> None:
    make_hive(tmp_path / "t")
    files = sorted(map(str, (tmp_path / "t").rglob("*.parquet")))
    assert samples(cs.open_source(files[2:])) == WITH_FOLDERS[2:], "also where all have the same"
    assert samples(cs.open_source(files[0])) == [{"x": 2}]


def test_files_whose_folders_name_no_value_are_counted_unless_there_is_a_default(tmp_path: Path) -> None:
    make_hive(tmp_path / "t")
    for name in ("label=cat/part=__HIVE_DEFAULT_PARTITION__", "label=__HIVE_DEFAULT_PARTITION__/part=5"):
        (tmp_path / "t" / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [7, 8]}), tmp_path / "t" / name / "more.parquet")
    _, count, reasons = lost(cs.open_source(tmp_path / "t"))
    assert count == 4
    assert "column 'label' is null" in reasons
    assert "column 'part' is null" in reasons
    filled = samples(cs.open_source(tmp_path / "t", fields={"label": "", "part": 0}))
    assert len(filled) == 8
    assert {"x": 8, "label": "", "part": 5} in filled
    assert {"x": 7, "label": "cat", "part": 0} in filled


def test_a_column_of_the_files_keeps_its_values_where_folders_name_it_too(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"t/y={number}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": [1], "y": [9]}), folder / "0.parquet")
        feather.write_feather(pa.table({"x": [1], "y": [9]}), folder / "0.arrow", compression="uncompressed")
        (folder / "0.csv").write_text("x,y\n1,9\n")
    for ending in ("parquet", "arrow", "csv"):
        assert samples(cs.open_source(f"{tmp_path}/t/**/*.{ending}")) == [{"x": 1, "y": 9}] * 2
        assert samples(cs.open_source(f"{tmp_path}/t/y=0/0.{ending}")) == [{"x": 1, "y": 9}]
        only = cs.open_source(f"{tmp_path}/t/**/*.{ending}", columns=["y"])
        assert samples(only) == [{"y": 9}] * 2


def test_a_column_that_only_some_folders_name_is_left_out_and_told(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "t/lr=0.1").mkdir(parents=True)
    for number, name in enumerate(("b", "lr=0.1/a")):
        pq.write_table(pa.table({"x": [number]}), tmp_path / f"t/{name}.parquet")
    assert samples(cs.open_source(tmp_path / "t")) == [{"x": 0}, {"x": 1}]
    assert len(said) == 1
    assert "name a column 'lr'" in said[0]
    filled = samples(cs.open_source(tmp_path / "t", fields={"lr": ""}))
    assert filled == [{"x": 0, "lr": ""}, {"x": 1, "lr": "0.1"}], "the advice works"


def test_samples_cached_without_the_columns_of_folders_are_of_another_source(tmp_path: Path) -> None:
    make_hive(tmp_path / "t")
    (tmp_path / "plain").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "plain" / "0.parquet")
    assert "label" in cs.open_source(tmp_path / "t").fingerprint
    assert cs.open_source(tmp_path / "plain").fingerprint == f"parquet:{tmp_path / 'plain'}"


# --- members of tars


def make_tar(path: Path, members: list[tuple[str, bytes, str]]) -> Path:
    """Write members (name, kind, content or target of a link)."""
    with tarfile.open(path, "w") as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
            else:
                member.linkname = content
                archive.addfile(member)
    return path


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.LNKTYPE, "a hard link, .* --hard-dereference"),
        (tarfile.SYMTYPE, "a symbolic link: .* --dereference"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
    ],
)
@pytest.mark.parametrize("visits", [0, 1])
def test_a_member_of_a_tar_that_holds_no_data_costs_its_sample_and_is_counted(
    tmp_path: Path, kind: bytes, what: str, visits: int
) -> None:
    files = [("d/0.txt", tarfile.REGTYPE, "0"), ("d/0.cls", tarfile.REGTYPE, "0")]
    alone = [("d/1.txt", kind, "d/0.txt")]
    partly = [("d/2.txt", tarfile.REGTYPE, "2"), ("d/2.cls", kind, "d/0.cls")]
    folders = [("d/3.d", tarfile.DIRTYPE, ""), ("latest", tarfile.SYMTYPE, "d")]
    tar = make_tar(tmp_path / "a.tar", [*folders, *files, *alone, *partly])
    found, count, reasons = lost(cs.open_source(tar, samples_per_visit=visits))
    assert found == [{"txt": "0", "cls": 0}]
    assert count == 2
    assert re.search(rf"a\.tar#d/1: its \.txt is {what}", reasons)


def test_links_of_a_tar_are_counted_in_the_status_of_a_cache(tmp_path: Path) -> None:
    tar = make_tar(
        tmp_path / "a.tar",
        [
            ("0.txt", tarfile.REGTYPE, "0"),
            ("1.txt", tarfile.LNKTYPE, "0.txt"),
            ("2.txt", tarfile.LNKTYPE, "0.txt"),
        ],
    )
    found, status = cached(tmp_path, cs.open_source(tar))
    assert (len(found), status.skipped) == (1, 2)
    assert "is a hard link" in status.failures[0].reason


def test_a_tar_without_any_sample_says_so(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "a.tar", [("n01/1", tarfile.REGTYPE, "x"), ("n01/2", tarfile.REGTYPE, "y")])
    assert "none of its 2 files has a name with an extension" in lost(cs.open_source(tar))[2]
    assert lost(cs.open_source(make_tar(tmp_path / "b.tar", []))) == ([], 0, "")


# --- delimiters of CSV


@pytest.mark.parametrize("other", ["|", "\t", ";"])
def test_a_csv_of_another_delimiter_is_read_by_it_which_is_said_once(
    tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": 1, "text": "a, b"}, {"id": 2, "text": "c"}]
    for name in ("a.csv", "b.csv"):
        lines = [other.join(row) for row in (("id", "text"), ("1", "a, b"), ("2", "c"))]
        (tmp_path / name).write_text("\n".join(lines))
    with caplog.at_level(logging.WARNING, "cachestream"):
        assert samples(cs.open_source(str(tmp_path))) == 2 * rows
        assert samples(cs.open_source(tmp_path / "a.csv", columns=["id"])) == [{"id": 1}, {"id": 2}]
    first, second = [record.getMessage() for record in caplog.records]
    assert f"stand between {other!r} and not between ','" in first
    assert f"say delimiter={other!r}" in second
    with caplog.at_level(logging.WARNING, "cachestream"):
        assert samples(cs.open_source(tmp_path / "a.csv", delimiter=other)) == rows
    assert len(caplog.records) == 2, "nothing is said of what was chosen"


def test_a_delimiter_that_is_given_is_taken_at_its_word(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;text\n1;a\n")
    assert samples(cs.open_source(tmp_path / "a.csv", delimiter=",")) == [{"id;text": "1;a"}]
    (tmp_path / "b.csv").write_text("id^text\n1^a\n")
    assert samples(cs.open_source(tmp_path / "b.csv", delimiter="^")) == [{"id": 1, "text": "a"}]
    for wrong in (";;", "", "\n", '"', 5):
        with pytest.raises(cs.ConfigError, match=r"delimiter=.* give one character"):
            cs.open_source(tmp_path / "a.csv", delimiter=wrong)


def test_commas_in_a_tsv_make_a_table_and_signs_in_some_texts_of_one_column_make_none(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("id,text\n1,a\n")
    assert samples(cs.open_source(tmp_path / "a.tsv")) == [{"id": 1, "text": "a"}]
    (tmp_path / "b.csv").write_text("text;raw\na;b\nplain\n")
    assert len(samples(cs.open_source(tmp_path / "b.csv"))) == 2
    (tmp_path / "c.csv").write_text("id,text\n1,a;b\n")
    assert samples(cs.open_source(tmp_path / "c.csv")) == [{"id": 1, "text": "a;b"}]


# --- files of the same names


def make_images(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / name)


def test_classes_with_files_of_the_same_names_are_no_pairs(tmp_path: Path, said: list[str]) -> None:
    for folder in ("with_mask", "without_mask", "masks"):
        make_images(tmp_path / "faces" / folder, ["0.png", "1.png"])
    assert cs.open_source(tmp_path / "faces").label_names == ("masks", "with_mask", "without_mask")  # type: ignore[attr-defined]
    assert said == []


# --- hidden names


@pytest.mark.parametrize("pattern", ["", "*.npy", "*/*.npy", "**/*.npy", "*", "**", ".*/*.npy", "sub/.*"])
def test_a_wildcard_matches_the_same_names_on_a_disk_and_on_remotes(
    tmp_path: Path, s3_server: S3Server, pattern: str
) -> None:
    bucket, memory = s3_server.bucket("hidden"), fsspec.filesystem("memory")
    names = ["a.npy", ".b.npy", "sub/c.npy", "sub/.d.npy", ".hid/e.npy", "sub/.in/f.npy"]
    for root in (tmp_path, bucket):
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            np.save(root / name, np.arange(3))
    memory.put(str(tmp_path) + "/", "/hidden/", recursive=True)
    try:
        found = []
        for url, options in (
            (str(tmp_path), {}),
            ("memory://hidden", {}),
            ("s3://hidden", s3_server.storage_options),
        ):
            source = cs.FileSource(f"{url}/{pattern}", storage_options=options)
            source.complete()
            found.append({source.key(unit) for unit in range(source.num_units or 0)})
    finally:
        memory.rm("/hidden", recursive=True)
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[0]


def test_folders_whose_names_begin_with_two_dots_are_told(
    tmp_path: Path, s3_server: S3Server, said: list[str]
) -> None:
    bucket = s3_server.bucket("dots")
    for root in (tmp_path, bucket):
        for name in ("..dots", "a", ".one"):
            (root / name).mkdir()
            np.save(root / name / "x.npy", np.arange(3))
    for url, options in ((str(tmp_path), {}), ("s3://dots/", s3_server.storage_options)):
        said.clear()
        assert cs.FileSource(url, storage_options=options).num_units == 1
        assert len(said) == 1
        assert "1 here (such as ..dots" in said[0]
    assert len(samples(cs.FileSource(tmp_path / "..dots"))) == 1, "the advice works"


def test_an_mds_index_whose_names_lead_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    def data(name: str) -> dict[str, Any]:
        return {"basename": name, "bytes": 20, "hashes": {}}

    columns = {"column_names": ["x"], "column_encodings": ["int"], "column_sizes": [8]}
    shard = {
        "format": "mds",
        "version": 2,
        "samples": 1,
        "hashes": [],
        "size_limit": None,
        "compression": "gz",
    }
    for raw, packed in (("../../etc/x", "a.mds.gz"), ("a.mds", "../a.mds.gz")):
        found = {**shard, **columns, "raw_data": data(raw), "zip_data": data(packed)}
        (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [found]}))
        with pytest.raises(cs.ConfigError, match="leads out of the folder"):
            cs.MDSSource(tmp_path)
