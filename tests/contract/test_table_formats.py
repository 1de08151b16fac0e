"""Tables that a log describes: Delta Lake, Iceberg and Hudi are named and refused, however they are reached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, urlsplit

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cachestream as cs
from tests.support.s3 import S3Server

LOGS: Final = {
    "Delta Lake": "_delta_log/00000000000000000000.json",
    "Apache Iceberg": "metadata/00000-5a1e4f0c-9d1b-4c5e-8a7f-0123456789ab.metadata.json",
    "Apache Hudi": ".hoodie/hoodie.properties",
}
# Below the root of a table, where each format puts the rows of a partition.
PARTITIONS: Final = {"Delta Lake": "day=1", "Apache Iceberg": "data/day=1", "Apache Hudi": "2026/11/28"}
formats = pytest.mark.parametrize("name", list(LOGS))


def make_table(root: Path, name: str) -> Path:
    """Make a table of a format at `root`: its log, and a partition; return the partition's folder."""
    log, partition = root / LOGS[name], root / PARTITIONS[name]
    log.parent.mkdir(parents=True)
    partition.mkdir(parents=True)
    log.write_text("{}")
    pq.write_table(pa.table({"x": [1, 2]}), partition / "part-0.parquet")
    return partition


def refusal(open_it: Callable[[], Any]) -> str:
    with pytest.raises(cs.ConfigError) as caught:
        open_it()
    return str(caught.value)


def ways(root: str, partition: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return what leads to the files of a table, with the options."""
    return [
        (root, {}),
        (f"{root}/", {"format": "parquet"}),
        (f"{root}/**", {}),
        (f"{root}/**/*.parquet", {}),
        (partition, {}),
        (f"{partition}/*.parquet", {"format": "parquet"}),
        (f"{partition}/part-0.parquet", {}),
        ([f"{partition}/part-0.parquet"], {}),
    ]


@formats
def test_a_table_on_disk_is_refused_by_its_name_however_its_files_are_reached(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "t"
    partition = make_table(root, name)
    for what, options in ways(str(root), str(partition)):
        said = refusal(partial(cs.open_source, what, **options))
        assert said.startswith(f"{root}/: is a table of {name}"), what
        assert "another folder" in said
        assert "format=" not in said, "no advice that brings deleted rows back"


@pytest.mark.e2e
@formats
def test_a_table_on_s3_is_refused_by_its_name_from_its_root_and_from_a_pattern_below(
    s3_server: S3Server, name: str
) -> None:
    bucket = f"table-{name.rsplit(maxsplit=1)[-1].lower()}"
    partition = make_table(s3_server.bucket(bucket) / "lake" / "t", name)
    root = f"s3://{bucket}/lake/t"
    below = partition.relative_to(s3_server.bucket(bucket))
    for what, options in ((root, {"format": "parquet"}), (f"s3://{bucket}/{below}/*.parquet", {})):
        said = refusal(partial(cs.open_source, what, storage_options=s3_server.storage_options, **options))
        assert said.startswith(f"{root}/: is a table of {name}"), what


@formats
def test_a_manifest_a_link_and_a_mixture_that_lead_into_a_table_are_refused(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "t"
    partition = make_table(root, name)
    (tmp_path / "list.txt").write_text(f"{partition}/part-0.parquet\n")
    (tmp_path / "link").symlink_to(partition)
    (tmp_path / "plain").mkdir()
    pq.write_table(pa.table({"x": [3]}), tmp_path / "plain" / "a.parquet")
    for open_it in (
        lambda: cs.open_source(tmp_path / "list.txt", manifest=True),
        lambda: cs.open_source(tmp_path / "link"),
        lambda: cs.open_source(tmp_path, format="parquet"),
        lambda: cs.mix({str(tmp_path / "plain"): 1.0, str(root): 1.0}),
        lambda: cs.ParquetSource(str(partition)),
    ):
        assert f"{root}/: is a table of {name}" in refusal(open_it)


@pytest.mark.e2e
def test_the_search_on_s3_lists_nothing_that_lies_beside_an_absent_folder() -> None:
    asked = list[str]()
    entry = '<Contents><Key>{}</Key><Size>1</Size><ETag>"1"</ETag></Contents>'

    class Bucket(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(parse_qs(urlsplit(self.path).query).get("prefix", [""])[0])
            keys = [
                key
                for key in ("small/a.parquet", "small/metadata/v1.metadata.json")
                if key.startswith(asked[-1])
            ]
            entries = "".join(map(entry.format, keys[:1]))
            body = f"<ListBucketResult>{entries}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.server_address[1]}"}
        said = refusal(lambda: cs.open_source("s3://bucket/small/*.parquet", storage_options=options))
        server.shutdown()
    assert said.startswith("s3://bucket/small/: is a table of Apache Iceberg")
    logs = ("_delta_log/", ".hoodie/", "metadata/", "metadata/v")
    assert {one for one in asked if not one.endswith(logs)} == {"small/"}


def test_other_drivers_find_a_table_above_the_files_too() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/lake/t/.hoodie/hoodie.properties", b"x")
    with memory.open("/lake/t/2026/a.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [1]}), file)
    try:
        said = refusal(lambda: cs.open_source("memory://lake/t/2026/*.parquet"))
    finally:
        memory.rm("/lake", recursive=True)
    assert "/lake/t/: is a table of Apache Hudi" in said


class Counted(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A driver without asynchronous calls, as those of FTP and SFTP: each of them holds a connection."""

    protocol = "counted"
    cachable = False
    root: ClassVar[Path]
    opened: ClassVar[int] = 0

    def __init__(self, **_: Any) -> None:
        super().__init__()
        Counted.opened += 1

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return [self.info(f"{path}/{one.name}") for one in (self.root / path).iterdir()]

    def info(self, path: str, **_: Any) -> Any:
        there = self.root / path
        size = there.stat().st_size
        return {"name": path, "size": size, "type": "directory" if there.is_dir() else "file"}

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        return (self.root / path).open("rb")


def test_the_search_opens_few_connections_to_a_server_that_takes_one_call_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("counted", Counted, clobber=True)
    monkeypatch.setattr(Counted, "root", tmp_path, raising=False)
    folder = tmp_path / "a/b/c/d/e/f/g/h"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), folder / "a.parquet")
    assert cs.open_source("counted://a/b/c/d/e/f/g/h/").num_units == 1
    assert Counted.opened <= 3


def test_parquet_beside_folders_of_like_names_is_read_as_before(tmp_path: Path) -> None:
    for folder in ("t/metadata", "t/day=1", "other/_delta_log"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("readme.json", "train.metadata.json", "0001.metadata.json"):
        (tmp_path / "t/metadata" / name).write_text("{}")
    (tmp_path / "other/_delta_log/0.json").write_text("{}")
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "t/day=1/a.parquet")
    source = cs.open_source(tmp_path / "t", format="parquet")
    assert [sample["x"] for _, sample in source.read(0, np.random.default_rng(0))] == [1, 2]
