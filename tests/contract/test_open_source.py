"""`open_source`: what it chooses for what it is given, and what it refuses, with the remedy."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest

import cachestream as cs
from tests.contract.conftest import shown
from tests.contract.formats import read
from tests.contract.small_files import hdf5, png, records, saved_zarr, stream_of, tar_of, write
from tests.sources.peers.samples import FOLDER as PEERS

ROW: Final = {"a": 1, "b": "x"}
WHOLE: Final = pa.table({"i": [1, 2, 3]})


# --- what is chosen ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "what", "kind"),
    [
        ({"a.tar": tar_of({"1.txt": b"1"})}, "a.tar", cs.TarSource),
        ({"a.tar.gz": gzip.compress(tar_of({"1.txt": b"1"}))}, "*.tar.gz", cs.TarSource),
        ({"A.TGZ": gzip.compress(tar_of({"1.txt": b"1"}))}, "A.TGZ", cs.TarSource),
        ({"0.tar": tar_of({"1.txt": b"1"}), "1.tar": tar_of({"1.txt": b"1"})}, "{0..1}.tar", cs.TarSource),
        ({"x/0.tar": tar_of({"1.txt": b"1"})}, "", cs.TarSource),
        ({"a.parquet": WHOLE}, "a.parquet", cs.ParquetSource),
        ({"part-0.snappy.parquet": WHOLE, "_SUCCESS": b""}, "", cs.ParquetSource),
        ({"a.arrow": stream_of}, "a.arrow", cs.ArrowSource),
        ({"state.json": "{}", "data-00000-of-00001.arrow": stream_of}, "", cs.ArrowSource),
        ({"a.jsonl": '{"a": 1}\n'}, "a.jsonl", cs.LinesSource),
        ({"a.ndjson.gz": gzip.compress(b'{"a": 1}\n')}, "", cs.LinesSource),
        ({"a.csv": "a,b\n1,2\n"}, "*", cs.LinesSource),
        ({"a.tsv": "a\tb\n1\t2\n"}, "a.tsv", cs.LinesSource),
        ({"a.tfrecord": records({"n": (1, "int")})}, "a.tfrecord", cs.TFRecordSource),
        ({"m.tfrecord-00000-of-00001": records({"n": (1, "int")})}, "m.tfrecord-*", cs.TFRecordSource),
        ({"m-train-00000-of-00001": records({"n": (1, "int")})}, "", cs.TFRecordSource),
        ({"m-train-00000-of-00001": WHOLE}, "", cs.ParquetSource),
        ({"m-train-00000-of-00001": stream_of}, "", cs.ArrowSource),
        ({"m-train-00000-of-00001": tar_of({"1.txt": b"1"})}, "", cs.TarSource),
        ({"m-train-00000-of-00001": "none of these"}, "", cs.FileSource),
        ({"a.npy": np.arange(9)}, "a.npy", cs.FileSource),
        ({"a.jpg": png(), "b.tar.jpg": png()}, "", cs.FileSource),
        ({"a.unknown": b"1"}, "a.unknown", cs.FileSource),
        ({"cache.json": "{}", "shards/000001.safetensors": b""}, "", cs.CacheSource),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_the_ending_or_else_the_listing_or_the_first_bytes_decide(
    files: Mapping[str, Any], what: str, kind: type, tmp_path: Path
) -> None:
    url = str(write(tmp_path, files) / what)
    assert type(cs.open_source(url)) is kind
    assert type(cs.open_source(Path(url))) is kind
    assert type(cs.open_source(url, format="files")) is cs.FileSource


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of each format; of the module, as writing one starts a thread of zarr that stays."""
    folder = tmp_path_factory.mktemp("arrays")
    return write(folder, {"a.npy": np.arange(20), "a.h5": hdf5, "a.zarr": saved_zarr})


@pytest.mark.parametrize("name", ["a.npy", "a.h5::/x", "a.zarr/x"])
def test_a_window_makes_an_array_of_what_it_is_given_with(name: str, arrays: Path) -> None:
    for what in (f"{arrays}/{name}", [f"{arrays}/{name}"], {"one": f"{arrays}/{name}"}):
        assert type(cs.open_source(what, window=4)) is cs.ArraySource
    if not name.endswith(".npy"):
        with pytest.raises(cs.ConfigError, match="ArraySource needs window="):
            cs.open_source(f"{arrays}/{name}")


class Iterable:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Table:
    """As pandas: [x] is a column."""

    iloc = None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> list[int]:
        return [1]


def draw(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(3)}


def test_objects_are_told_apart() -> None:
    assert type(cs.open_source([{"x": 1}])) is cs.DatasetSource
    assert type(cs.open_source(np.zeros((3, 2)))) is cs.DatasetSource
    assert type(cs.open_source(Iterable())) is cs.IterableSource
    assert type(cs.open_source(draw)) is cs.CallableSource
    assert type(cs.open_source(functools.partial(draw))) is cs.CallableSource


def test_a_name_of_a_format_wins_over_the_ending(tmp_path: Path) -> None:
    write(tmp_path, {"a.bin": tar_of({"1.txt": b"one"}), "rows.txt": '{"a": 1}\n'})
    assert read(cs.open_source(tmp_path / "a.bin", format="tar")) == [("a.bin#1", {"txt": "one"})]
    assert read(cs.open_source(tmp_path / "rows.txt", format="lines")) == [("rows.txt#0", {"a": 1})]
    assert read(cs.open_source(tmp_path / "rows.txt")) == [("rows.txt", {"text": '{"a": 1}\n'})]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ((number for number in range(3)), "an iterator .generator., which can be gone through only once"),
        ([], "an empty list; give at least one path"),
        ({"a": 1}, "a dict; give a list"),
        ({1, 2}, "a set; give a list"),
        (Table(), "a table .Table.; wrap it"),
        (7, "int; give a path"),
        (None, "NoneType; give a path"),
        (b"bytes", "bytes; give a path or URL as str"),
        (Iterable, "type; give"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_is_refused_with_a_way_out(what: Any, words: str) -> None:
    with pytest.raises(cs.ConfigError, match=rf"open_source\(\) cannot read {words}"):
        cs.open_source(what)


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("a.txt", {"lable": None}, r"'lable'; do you mean 'label'\?"),
        ("a.tar", {"sample_per_visit": 1}, r"'sample_per_visit'; do you mean 'samples_per_visit'\?"),
        ("a.txt", {"storage_option": {}}, r"'storage_option'.*'storage_options'"),
        ("a.tar", {"columns": ["x"]}, "'columns'; it takes crop, decoders"),
        ("a.txt", {"features": {}}, "'features'; it takes crop, decoders, encoding, extensions"),
        ("a.parquet", {"encoding": "utf-8"}, "'encoding'; it takes columns"),
        ("a.jsonl", {"resize": 3}, "'resize'; it takes columns, delimiter, encoding"),
        ("a.csv", {"nulls": {}}, "'nulls'; it takes"),
        ("a.tfrecord", {"window_size": 3}, "'window_size'; it takes check_crc"),
        ("a.npy", {"window": 3, "label": None}, "'label'; it takes dataset"),
        (draw, {"label": None}, "'label'; it takes num_units, thread_safe"),
        ([ROW], {"shards": 2}, "'shards'; it takes"),
        (Iterable(), {"num_units": 2}, "'num_units'; it takes"),
        (draw, {"format": "tar"}, "format='tar' is for paths and URLs"),
        ([ROW], {"manifest": True}, "manifest= is a bool beside a list"),
        ("a.txt", {"format": "tars"}, "format='tars': give one of 'array', 'arrow', 'cache', 'files'"),
        ("a.txt", {"storage_options": "anon"}, r"storage_options= is a str: give a dict"),
        ("a.tar", {"samples_per_visit": "10"}, r"samples_per_visit='10': give a whole number"),
        ("a.tfrecord", {"features": ["a"]}, r"features= is a list: give a dict"),
        ("a.parquet", {"nulls": ["n"]}, r"nulls= is a list: give a dict, such as \{'age': -1\}"),
        ("a.parquet", {"decode_images": "p"}, r"decode_images='p': give a list of columns"),
        ("a.parquet", {"columns": ["j"]}, "'j'"),
        ("a.txt", {"resize": 0}, "resize"),
        ("a.txt", {"label": 3}, "label"),
        ("a.npy", {"window": 30}, r"smaller than the window"),
        ("a.npy", {"window": 3, "windows": "all"}, "windows"),
        ("a.txt", {"max_object_size": "many"}, "max_object_size"),
        ("a.jsonl", {"encoding": "utf-16"}, "utf-16"),
        (draw, {"num_units": 0}, "num_units"),
        (lambda: 1, {}, r"fn\(rng\)"),
        ("pipe:curl -H secret https://host/a.tar", {}, "'pipe:' URLs name a command, and none is run"),
    ],
    ids=shown,
)
def test_options_that_do_not_belong_or_cannot_work_are_refused_with_the_remedy(
    what: Any, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    files = {
        "a.txt": "a",
        "a.tar": tar_of({"1.txt": b"1"}),
        "a.parquet": WHOLE,
        "a.jsonl": '{"a": 1}\n',
        "a.csv": "a,b\n1,2\n",
        "a.tfrecord": records({"n": (1, "int")}),
        "a.npy": np.arange(20),
    }
    write(tmp_path, files)
    given = f"{tmp_path}/{what}" if isinstance(what, str) and ":" not in what else what
    with pytest.raises(cs.ConfigError, match=words) as caught:
        cs.open_source(given, **options)
    assert "secret" not in str(caught.value)


def test_a_folder_of_several_kinds_is_refused_if_one_of_them_holds_many_samples(tmp_path: Path) -> None:
    write(tmp_path, {"README.md": "read", "a.tar": tar_of({"1.txt": b"1"}), "b.tar": tar_of({"1.txt": b"1"})})
    with pytest.raises(
        cs.ConfigError, match=r"holds tar files beside others \(README.md, b.tar\): give format"
    ):
        cs.open_source(tmp_path)
    assert cs.open_source(tmp_path, format="tar").num_units == 2
    assert type(cs.open_source(tmp_path, extensions=".tar")) is cs.FileSource


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_a_set_of_another_library_is_named_and_read_only_by_its_name(name: str) -> None:
    with pytest.raises(cs.ConfigError, match=rf"holds shards of {name}: give format='{name}'"):
        cs.open_source(PEERS / name)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gone/", "gone"),
        ("gone.tar", "gone.tar"),
        ("*.gone", "gone"),
        ("empty/", "empty"),
        ("gone.npy", "gone.npy"),
        ("gone.csv", "gone.csv"),
    ],
)
def test_what_is_not_there_is_a_source_error_that_names_it(url: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(cs.SourceError, match=words):
        cs.open_source(f"{tmp_path}/{url}", **({"window": 3} if url.endswith("npy") else {}))
