"""FileSource over a local folder: fields, labels, keys, errors, processes and threads."""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from cachestream.errors import SampleError
from cachestream.formats.files import FileSource
from cachestream.sources.base import units_of

RNG = np.random.default_rng(0)


def read_all(source: FileSource) -> dict[str, dict[str, Any]]:
    return dict(pair for unit in range(units_of(source) or 0) for pair in source.read(unit, RNG))


def put_image(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(path)


def test_the_same_class_in_several_splits_has_one_label(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/1.png", "val/cat/2.png"):
        put_image(tmp_path / name, 0)
    samples = read_all(FileSource(tmp_path))
    assert [sample["label"] for sample in samples.values()] == [0, 1, 0]


@pytest.mark.parametrize("beside", ["LICENSE", "README.md", "annotations/1.json", "zoo/deep/noisy.csv"])
def test_only_folders_with_images_count_for_labels(tmp_path: Path, beside: str) -> None:
    for name in ("ant/1.png", "bee/1.png"):
        put_image(tmp_path / name, 0)
    (tmp_path / beside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / beside).write_text("{}")
    assert FileSource(tmp_path).label_names == ("ant", "bee")
    source = FileSource(tmp_path, extensions="*")
    assert source.label_names == ("ant", "bee")
    samples = read_all(source)
    assert [samples[key]["label"] for key in ("ant/1.png", "bee/1.png")] == [0, 1]
    assert "label" not in samples[beside]


def test_images_without_folders_have_no_label_nor_do_other_files_in_folders(tmp_path: Path) -> None:
    put_image(tmp_path / "flat" / "1.png", 0)
    source = FileSource(tmp_path / "flat")
    assert source.label_names == ()
    assert list(read_all(source)["1.png"]) == ["image"]
    (tmp_path / "texts" / "a").mkdir(parents=True)
    (tmp_path / "texts" / "a" / "1.txt").write_text("hello")
    assert read_all(FileSource(tmp_path / "texts")) == {"a/1.txt": {"text": "hello"}}


def test_a_label_function_that_raises_fails_the_sample_and_names_the_path(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "1.png", 0)
    with pytest.raises(SampleError, match=r"label\('cat/1.png'\) raised KeyError"):
        read_all(FileSource(tmp_path, label=dict[str, int]().__getitem__))


def test_a_file_that_vanished_or_was_cut_fails_as_one_sample(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000.0))
    np.save(tmp_path / "b.npy", np.arange(1000.0))
    source = FileSource(tmp_path)
    os.truncate(tmp_path / "a.npy", 500)
    os.unlink(tmp_path / "b.npy")
    with pytest.raises(SampleError, match=r"a\.npy.*truncated: 372 of 8000 bytes"):
        list(source.read(0, RNG))
    with pytest.raises(SampleError, match=r"b\.npy: not found"):
        list(source.read(1, RNG))


def test_a_named_pipe_does_not_block_the_reader(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    source = FileSource(tmp_path / "a.bin")
    os.unlink(tmp_path / "a.bin")
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(SampleError, match="not a regular file"):
        list(source.read(0, RNG))


def test_all_bytes_are_reported_in_pieces_as_they_arrive(tmp_path: Path, fetched: list[int]) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(20 << 20))
    source = FileSource(tmp_path)
    list(source.read(0, RNG))
    assert sum(fetched) == 20 << 20
    assert max(fetched) <= 8 << 20


@pytest.mark.e2e
def test_sixteen_threads_read_what_one_reads(tmp_path: Path) -> None:
    for number in range(64):
        np.save(tmp_path / f"{number:02d}.npy", np.full(5000, number))
    source = FileSource(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda unit: next(source.read(unit % 64, RNG)), range(640)))
    assert all(key == f"{unit % 64:02d}.npy" and (sample["array"] == unit % 64).all()
               for unit, (key, sample) in enumerate(found))  # fmt: skip


def test_a_source_survives_pickling_with_its_labels(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "1.png", 1)
    source = FileSource(tmp_path)
    again = pickle.loads(pickle.dumps(source))
    assert again.label_names == ("cat",)
    assert (again.fingerprint, again.listing_digest) == (source.fingerprint, source.listing_digest)
    assert read_all(again)["cat/1.png"]["label"] == 0


@pytest.mark.e2e
def test_a_synchronous_filesystem_is_read_from_many_threads() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/data/{number}.txt": str(number).encode() for number in range(10)})
    try:
        source = FileSource("memory://data/*.txt")
        with ThreadPoolExecutor(8) as pool:
            found = dict(pool.map(lambda unit: next(source.read(unit, RNG)), range(10)))
    finally:
        memory.rm("/data", recursive=True)
    assert found == {f"{number}.txt": {"text": str(number)} for number in range(10)}


def test_files_in_a_zip_archive_are_read_by_a_chained_url(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.zip.npz", x=np.arange(3))
    source = FileSource(f"zip://*.npy::file://{tmp_path}/a.zip.npz")
    assert read_all(source)["x.npy"]["array"].tolist() == [0, 1, 2]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The URL of a web server over `tmp_path`."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(tmp_path))
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.mark.e2e
def test_the_page_of_a_web_folder_is_no_sample_and_its_address_with_a_slash_is_told(
    tmp_path: Path, web: str
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "1").write_bytes(b"<title>Index</title>")
    with pytest.raises(SampleError, match="/d: is the server's page about a folder: end its URL with '/'"):
        read_all(FileSource(f"{web}/d"))
    assert read_all(FileSource(f"{web}/d/1")) == {"1": {"data": b"<title>Index</title>"}}


@pytest.mark.e2e
def test_web_files_are_read_by_url_list_and_index_page(tmp_path: Path, web: str) -> None:
    (tmp_path / "d").mkdir()
    for number in range(3):
        np.save(tmp_path / "d" / f"{number}.npy", np.full(3, number))
    signed = [f"{web}/d/{number}.npy?X-Signature=CANARY{number}" for number in (2, 0)]
    source = FileSource(signed)
    assert {key: sample["array"][0] for key, sample in read_all(source).items()} == {"0.npy": 0, "2.npy": 2}
    assert "CANARY" not in source.fingerprint + repr(source) + source.key(0)
    assert len(read_all(FileSource(f"{web}/d/"))) == 3
    with pytest.raises(SampleError, match=r"/d/missing\.npy: not found") as caught:
        read_all(FileSource(f"{web}/d/missing.npy?X-Signature=CANARY"))
    assert "CANARY" not in str(caught.value)


@pytest.mark.e2e
def test_links_with_queries_are_told_from_those_of_other_kinds_of_files(tmp_path: Path, web: str) -> None:
    (tmp_path / "d").mkdir()
    for number in range(1, 3):
        np.save(tmp_path / "d" / f"{number}.npy", np.full(3, number))
    links = "".join(f'<a href="{name}?v=1">x</a>' for name in ("0.txt", "1.npy", "2.npy"))
    (tmp_path / "d" / "index.html").write_text(f"<html>{links}</html>")
    found = read_all(FileSource(f"{web}/d/"))
    assert {key: sample["array"][0] for key, sample in found.items()} == {"1.npy": 1, "2.npy": 2}


def test_of_a_folder_with_images_these_are_read_and_the_others_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        put_image(tmp_path / f"{number}/photo.png", 0)
        for name in ("metadata.json", "a.json", "notes.txt"):
            (tmp_path / f"{number}/{name}").write_text("{}")
    source = FileSource(tmp_path)
    assert list(read_all(source)) == [f"{number}/photo.png" for number in range(4)]
    assert repr(source).endswith("4 files, 12 of other kinds left out>")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "images are read, and 12 of 16 files, of other kinds (such as 0/a.json), left out" in said
    assert "extensions=" in said
    assert FileSource(tmp_path, extensions="*").num_units == 16
    assert FileSource([tmp_path / "0/photo.png", tmp_path / "0/a.json"]).num_units == 2, "taken at its word"
    assert FileSource(tmp_path / "*" / "*.json").num_units == 8


def test_of_a_folder_without_images_most_files_decide_and_a_few_images_do_not_count(tmp_path: Path) -> None:
    for number in range(30):
        np.save(tmp_path / f"{number}.npy", np.zeros(3))
    (tmp_path / "README.md").write_text("about it")
    put_image(tmp_path / "preview.png", 0)
    source = FileSource(tmp_path)
    assert source.num_units == 30
    assert all(list(sample) == ["array"] for sample in read_all(source).values())


def test_a_listing_that_goes_on_keeps_the_kind_that_was_chosen(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        put_image(tmp_path / folder / "1.png", 0)
        (tmp_path / folder / "2.json").write_text("{}")
    source = FileSource(tmp_path, first_names=2)
    assert source.is_listing
    assert repr(source).endswith("1 files and more, 1 of other kinds left out>")
    assert [name for page in source.more_names("a/1.png") for name in page.names] == ["b/1.png", "c/1.png"]
    assert list(read_all(source)) == ["a/1.png", "b/1.png", "c/1.png"]
