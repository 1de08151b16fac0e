"""Each option of a source makes a difference."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import pickle
import struct
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from tfrecord import TFRecordWriter

import cachestream as cs
from tests.contract.formats import plain, read
from tests.contract.small_files import TABLE, hdf5, png, records, saved_zarr, stream_of, tar_of, write
from tests.sources.peers.samples import FOLDER as PEERS

# --- each option makes a difference ----------------------------------------------------------------


def opposite(data: bytes) -> str:
    return data.decode()[::-1]


EXAMPLE: Final = {"n": ([1, 2], "int"), "w": (0.5, "float"), "t": (b"t", "byte"), "p": (png(), "byte")}
RED: Final = np.zeros((3, 6, 8), np.uint8)
RED[0] = 200
MASK: Final = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.uint8)


def mask() -> bytes:
    """A PNG with a palette, whose colours are other numbers than those of the palette."""
    image, sink = Image.fromarray(MASK), io.BytesIO()
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    image.save(sink, "PNG")
    return sink.getvalue()


def raw_records(path: Path) -> None:
    """Records that hold no Examples."""
    with path.open("wb") as file:
        for data in (b"any", b"bytes"):
            length = struct.pack("<Q", len(data))
            file.write(length + TFRecordWriter.masked_crc(length) + data + TFRecordWriter.masked_crc(data))


# files, what of them, options, and the samples that come with them
DIFFERENCES: Final[dict[str, tuple[Mapping[str, Any], str, dict[str, Any], list[tuple[str, Any]]]]] = {
    # files
    "label=function": ({"a/1.txt": "x"}, "", {"label": len}, [("a/1.txt", {"text": "x", "label": 7})]),
    "label=None": ({"a/1.png": png(), "b/2.png": png()}, "", {"label": None}, [("a/1.png", {"image": RED}), ("b/2.png", {"image": RED})]),
    "extensions": ({"a.txt": "x", "b.md": "y"}, "", {"extensions": "md"}, [("b.md", {"text": "y"})]),
    "extensions=*": ({"a.txt": "x", "b.bin": b"y"}, "", {"extensions": "*"}, [("a.txt", {"text": "x"}), ("b.bin", {"data": b"y"})]),
    "recursive": ({"a.txt": "x", "d/b.txt": "y"}, "", {"recursive": False}, [("a.txt", {"text": "x"})]),
    "encoding": ({"a.txt": b"\xe9"}, "a.txt", {"encoding": "latin-1"}, [("a.txt", {"text": "é"})]),
    "fields of files": ({"a.json": '{"a": 1}'}, "a.json", {"fields": {"b": "-"}}, [("a.json", {"a": 1, "b": "-"})]),
    "resize": ({"a.png": png()}, "a.png", {"resize": 3}, [("a.png", {"image": RED[:, :3, :4]})]),
    "decoders of files": ({"a.png": mask()}, "a.png", {"decoders": {"image": "index"}}, [("a.png", {"image": MASK})]),
    "index, resized and cropped": (
        {"a.png": mask()}, "a.png", {"decoders": {"image": "index"}, "resize": (4, 8), "crop": (2, 8)},
        [("a.png", {"image": MASK.repeat(2, 0).repeat(2, 1)[1:3]})],
    ),
    "raw files": ({"a.png": png()}, "a.png", {"decoders": {"image": "raw"}}, [("a.png", {"image": png()})]),
    "crop": ({"a.png": png()}, "a.png", {"crop": (2, 4)}, [("a.png", {"image": RED[:, :2, :4]})]),
    # tars
    "decoders": ({"a.tar": tar_of({"1.txt": b"ab", "1.pkl": b"cd"})}, "a.tar", {"decoders": {"txt": opposite, "pkl": len}}, [("a.tar#1", {"txt": "ba", "pkl": 2})]),
    "decoders of two endings": ({"a.tar": tar_of({"1.seg.png": png(), "1.png": png()})}, "a.tar", {"decoders": {"seg.png": len}}, [("a.tar#1", {"seg.png": len(png()), "png": RED})]),
    "named decoders of tars": (
        {"a.tar": tar_of({"1.mask.png": mask(), "1.png": png()})}, "a.tar", {"decoders": {"mask.png": "index", "png": "raw"}},
        [("a.tar#1", {"mask.png": MASK, "png": png()})],
    ),
    "fields of tars": ({"a.tar": tar_of({"1.cls": b"1"})}, "a.tar", {"fields": {"json": "{}"}}, [("a.tar#1", {"cls": 1, "json": "{}"})]),
    "resize in tars": ({"a.tar": tar_of({"1.png": png()})}, "a.tar", {"resize": (2, 3)}, [("a.tar#1", {"png": RED[:, :2, :3]})]),
    # tables
    "columns": ({"a.parquet": TABLE}, "a.parquet", {"columns": ["box.y"]}, [(f"a.parquet#{i}", {"box.y": 2.0}) for i in range(3)]),
    "nulls": ({"a.parquet": TABLE}, "a.parquet", {"columns": ["i"], "nulls": {"i": -1}}, [(f"a.parquet#{i}", {"i": np.int32(n)}) for i, n in enumerate((1, -1, 3))]),
    "fields of parquet": ({"a.parquet": TABLE}, "a.parquet", {"columns": ["s"], "fields": {"s": "-", "z": 7}}, [(f"a.parquet#{i}", {"s": s, "z": 7}) for i, s in enumerate("ab-")]),
    "decode_images": ({"a.parquet": TABLE}, "a.parquet", {"columns": ["p"], "decode_images": ["p"], "crop": 2}, [(f"a.parquet#{i}", {"p": RED[:, :2, :2]}) for i in range(3)]),
    "decoders of parquet": (
        {"a.parquet": pa.table({"m": [mask()], "p": [{"bytes": png(), "path": None}]})}, "a.parquet",
        {"decoders": {"m": "index", "p": "raw"}}, [("a.parquet#0", {"m": MASK, "p": png()})],
    ),
    "columns of arrow": ({"a.arrow": stream_of}, "a.arrow", {"columns": ["s"], "fields": {"s": "-"}}, [(f"a.arrow#{i}", {"s": s}) for i, s in enumerate("ab-")]),
    "decode_images of arrow": ({"a.arrow": stream_of}, "a.arrow", {"columns": ["p"], "decode_images": ["p"], "resize": 3}, [(f"a.arrow#{i}", {"p": RED[:, :3, :4]}) for i in range(3)]),
    # lines
    "columns of lines": ({"a.jsonl": '{"a": {"b": 1, "c": 2}}\n'}, "a.jsonl", {"columns": ["a.c"]}, [("a.jsonl#0", {"a.c": 2})]),
    "fields of lines": ({"a.jsonl": '{"a": null}\n'}, "a.jsonl", {"fields": {"a": 0.0}}, [("a.jsonl#0", {"a": 0.0})]),
    "fields of csv": ({"a.csv": "a,b\n1,\n"}, "a.csv", {"fields": {"b": 0.5}}, [("a.csv#0", {"a": 1, "b": 0.5})]),
    "encoding of lines": ({"a.csv": b"a,b\n\xe9,1\n"}, "a.csv", {"encoding": "latin-1"}, [("a.csv#0", {"a": "é", "b": 1})]),
    # TFRecords
    "features": (
        {"a.tfrecord": records(EXAMPLE)}, "a.tfrecord",
        {"features": {"n": (2, 1), "w": "array", "t": "texts", "p": "bytes"}},
        [("a.tfrecord#0", {"n": np.array([[1], [2]]), "w": np.array([0.5], np.float32), "t": '["t"]', "p": png()})],
    ),
    "fields of records": (
        {"a.tfrecord": records(EXAMPLE)}, "a.tfrecord", {"features": {"t": "str", "z": "scalar"}, "fields": {"z": 9}},
        [("a.tfrecord#0", {"t": "t", "z": 9})],
    ),
    "decode_images of records": (
        {"a.tfrecord": records({"p": (png(), "byte")})}, "a.tfrecord", {"decode_images": False},
        [("a.tfrecord#0", {"p": png()})],
    ),
    "resize of records": (
        {"a.tfrecord": records({"p": (png(), "byte")})}, "a.tfrecord", {"resize": 3},
        [("a.tfrecord#0", {"p": RED[:, :3, :4]})],
    ),
    "raw": (
        {"a.tfrecord": raw_records}, "a.tfrecord", {"raw": True},
        [("a.tfrecord#0", {"data": b"any"}), ("a.tfrecord#19", {"data": b"bytes"})],
    ),
    # manifests
    "manifest": ({"l.txt": "a.txt\n", "a.txt": "x"}, "l.txt", {"manifest": True}, [("a.txt", {"text": "x"})]),
    "manifest of columns": (
        {"l.csv": "x,y\na.txt,7\n", "in/a.txt": "x"}, "l.csv",
        {"manifest": {"column": "x", "label": "y", "base": "in"}},
        [("a.txt", {"text": "x", "label": 7})],
    ),
    # arrays
    "window": ({"a.npy": np.arange(6).reshape(2, 3)}, "a.npy", {"window": (1, 2), "windows": "grid"}, [
        (f"a.npy[{i}:{i + 1},{j}:{j + 2}]", {"array": np.arange(6).reshape(2, 3)[i : i + 1, j : j + 2], "start": np.array([i, j])})
        for i in (0, 1) for j in (0, 1)
    ]),
    "stride": ({"a.npy": np.arange(9)}, "a.npy", {"window": 4, "windows": "grid", "stride": 2}, [
        (f"a.npy[{i}:{i + 4}]", {"array": np.arange(i, i + 4), "start": np.array([i])}) for i in (0, 2, 4, 5)
    ]),
    "stride=chunks": ({"a.zarr": saved_zarr}, "a.zarr/x", {"window": 4, "windows": "grid", "stride": "chunks"}, [
        (f"a.zarr/x[{i}:{i + 4}]", {"array": np.arange(i, i + 4), "start": np.array([i])}) for i in (0, 8, 16)
    ]),
    "dataset": ({"a.h5": hdf5}, "a.h5", {"window": 20, "windows": "grid", "dataset": "y"}, [
        ("a.h5::/y[0:20]", {"array": np.arange(20) * 10, "start": np.array([0])})
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_option_changes_the_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarr_runs: None
) -> None:
    files, what, options, expected = DIFFERENCES[name]
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)  # relative paths in options
    found = read(cs.open_source(f"{tmp_path}/{what}", **options))
    assert [(key, plain(sample)) for key, sample in found] == [(key, plain(value)) for key, value in expected]


@pytest.fixture(scope="module")
def zarr_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The thread of zarr runs, which the first array starts and which stays."""
    saved_zarr(tmp_path_factory.mktemp("zarr") / "a.zarr")


# --- files and tars ------------------------------------------------------------------------------


def test_labels_are_the_ranks_of_the_folders_that_hold_images(tmp_path: Path) -> None:
    write(tmp_path, {"x/b/1.png": png(), "x/a/2.png": png(), "x/c/none.txt": "x", "x/d/3.png": png()})
    source: Any = cs.open_source(tmp_path / "x")
    assert source.label_names == ("a", "b", "d")
    assert [(key, sample["label"]) for key, sample in read(source)] == [
        ("a/2.png", 0),
        ("b/1.png", 1),
        ("d/3.png", 2),
    ]


def test_a_tree_is_listed_up_to_its_first_names_and_then_to_its_end(tmp_path: Path) -> None:
    write(tmp_path, {f"{folder}/{i}.txt": "x" for folder in range(5) for i in range(10)})
    source: Any = cs.open_source(tmp_path, first_names=20)
    assert (source.num_units, source.is_listing) == (None, True)
    source.complete()
    assert source.num_units == 50
    assert not source.is_listing
    assert cs.open_source(tmp_path, first_names=None).num_units == 50


def test_an_object_above_its_bound_is_skipped_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "x" * 2000, "b.txt": "x"})
    source = cs.open_source(tmp_path, max_object_size=1000)
    with pytest.raises(cs.SampleError, match=r"a\.txt.*max_object_size"):
        read(source, 0)
    assert read(source, 1) == [("b.txt", {"text": "x"})]
    assert len(read(cs.open_source(tmp_path))) == 2


def test_a_tar_is_read_in_visits_of_about_so_many_samples(tmp_path: Path) -> None:
    members = {f"{i:03d}.bin": bytes(1000) for i in range(100)}
    write(tmp_path, {"0.tar": tar_of(members), "1.tar": tar_of(members)})
    whole = cs.open_source(tmp_path, samples_per_visit=0)
    visits = cs.open_source(tmp_path, samples_per_visit=10)
    assert whole.num_units == 2
    assert visits.num_units is not None
    assert 15 <= visits.num_units <= 25
    sizes = [len(read(visits, unit)) for unit in range(visits.num_units)]
    assert max(sizes) <= 15
    assert sorted(key for key, _ in read(visits)) == sorted(key for key, _ in read(whole))
    write(tmp_path, {"z.tar.gz": gzip.compress(tar_of(members))})
    with pytest.raises(cs.ConfigError, match="samples_per_visit"):
        cs.open_source(tmp_path / "z.tar.gz", samples_per_visit=10)


def usable(source: cs.Source, unit: int) -> tuple[list[tuple[str, Any]], str]:
    """Return the samples of a unit that can be used, and the reason why others cannot."""
    found = []
    try:
        for item in source.read(unit, np.random.default_rng(0)):
            found.append(item)  # noqa: PERF402  those before the error count
    except cs.SampleError as error:
        return found, str(error)
    return found, ""


# --- tables and records --------------------------------------------------------------------------


def test_a_large_file_of_lines_is_several_units_that_give_each_line_once(tmp_path: Path) -> None:
    unit, keys = 16 << 20, list[str]()
    begins = [0, 5_000_000, unit, unit + 40, 2 * unit - 40, 2 * unit - 1, 2 * unit + 40, 3 * unit + 1]
    with (tmp_path / "a.jsonl").open("wb") as sink:
        for i, (begin, end) in enumerate(itertools.pairwise([*begins, 3 * unit + 40])):
            assert sink.tell() == begin
            keys.append(f"a.jsonl#{begin}")
            line = json.dumps({"i": i, "t": ""}).encode()
            sink.write(line[:-2] + b"x" * (end - begin - len(line) - 1) + line[-2:] + b"\n")
    source = cs.open_source(tmp_path / "a.jsonl", columns=["i"])
    assert source.num_units == 4
    assert read(source) == [(key, {"i": i}) for i, key in enumerate(keys)]


def test_images_of_hugging_face_stay_bytes_if_they_are_not_to_be_decoded(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.table({"image": [{"bytes": png(), "path": "a.png"}]})
    write(tmp_path, {"a.parquet": table})
    assert plain(read(cs.open_source(tmp_path / "a.parquet"))[0][1]) == plain({"image": RED})
    assert read(cs.open_source(tmp_path / "a.parquet", decode_images=False))[0][1] == {"image": png()}


def test_rows_with_a_null_are_left_out_and_counted_with_their_column(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": TABLE})
    source = cs.open_source(tmp_path / "a.parquet", columns=["i"])
    found, reason = usable(source, 0)
    assert found == [("a.parquet#0", {"i": 1})]
    assert "column 'i' is null" in reason
    assert source.num_units == 2  # row groups of two rows


def test_a_wrong_checksum_costs_a_record_unless_none_is_checked(tmp_path: Path) -> None:
    write(tmp_path, {"a.tfrecord": records({"n": (1, "int")}, {"n": (2, "int")})})
    data = bytearray((tmp_path / "a.tfrecord").read_bytes())
    data[12 + int.from_bytes(data[:8], "little")] ^= 1  # of the first record's checksum
    (tmp_path / "a.tfrecord").write_bytes(data)
    checked = usable(cs.open_source(tmp_path / "a.tfrecord"), 0)
    assert checked[0] == [("a.tfrecord#30", {"n": 2})]
    assert "checksum" in checked[1]
    assert [sample for _, sample in read(cs.open_source(tmp_path / "a.tfrecord", check_crc=False))] == [
        {"n": 1},
        {"n": 2},
    ]


@pytest.mark.parametrize(
    ("compression", "works"), [("auto", True), ("gzip", True), ("zlib", False), (None, False)]
)
def test_the_compression_of_records_is_found_or_as_it_is_said(
    compression: Any, works: bool, tmp_path: Path
) -> None:
    write(tmp_path, {"b.tfrecord": records({"n": (1, "int")})})
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress((tmp_path / "b.tfrecord").read_bytes()))
    source = cs.open_source(tmp_path / "a.tfrecord", compression=compression)
    if works:
        assert read(source) == [("a.tfrecord#0", {"n": 1})]
    else:
        with pytest.raises(cs.SampleError, match=r"a\.tfrecord"):
            read(source)


# --- arrays --------------------------------------------------------------------------------------


def starts(source: cs.Source, count: int = 200) -> list[tuple[int, int]]:
    """The index of the array and the start of each of `count` windows."""
    found = [read(source, unit)[0][1] for unit in range(count)]
    return [(int(one.get("index", 0)), int(one["start"][0])) for one in found]


def test_random_windows_are_drawn_by_places_alike_or_by_weights(tmp_path: Path) -> None:
    write(tmp_path, {"a.npy": np.arange(2000), "b.npy": np.arange(20)})

    def of_the_short_one(**options: Any) -> int:
        source = cs.open_source(f"{tmp_path}/*.npy", window=10, **options)
        return sum(index for index, _ in starts(source))

    assert of_the_short_one() <= 10
    assert 60 <= of_the_short_one(weights="equal") <= 140
    assert 120 <= of_the_short_one(weights=[1, 4]) <= 190


def test_windows_are_endless_counted_or_a_grid(tmp_path: Path) -> None:
    write(tmp_path, {"a.npy": np.arange(100)})
    what = f"{tmp_path}/a.npy"
    assert cs.open_source(what, window=10).num_units is None
    assert cs.open_source(what, window=10, num_units=7).num_units == 7
    assert cs.open_source(what, window=10, windows="grid").num_units == 10
    strided = {start for _, start in starts(cs.open_source(what, window=10, stride=30))}
    assert strided == {0, 30, 60, 90}
    assert {start for _, start in starts(cs.open_source(what, window=99))} == {0, 1}


def test_jitter_moves_windows_of_a_grid_by_no_more_than_it_says(tmp_path: Path) -> None:
    write(tmp_path, {"a.npy": np.arange(1000)})
    source = cs.open_source(tmp_path / "a.npy", window=10, windows="grid", stride=100, jitter=5)
    moved = [start - 100 * unit for unit, (_, start) in enumerate(starts(source, 10))]
    assert max(map(abs, moved)) <= 5
    assert len(set(moved)) > 2


# --- sets of other libraries ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_options_of_sets_choose_fields_decode_and_size(name: str) -> None:
    chosen = cs.open_source(PEERS / name, format=name, columns=["a_str", "a_number"])
    assert [sample["a_str"] for _, sample in read(chosen)] == [f"Grüße {i}" for i in range(7)]
    assert {tuple(sorted(sample)) for _, sample in read(chosen)} == {("a_number", "a_str")}
    decoded = cs.open_source(PEERS / name, format=name, columns=["a_str"], decoders={"a_str": len})
    assert read(decoded)[0][1]["a_str"] in (len("Grüße 0".encode()), len("Grüße 0".encode()) + 4)
    sized = cs.open_source(PEERS / name, format=name, columns=["a_pil"], resize=4, crop=3)
    assert {sample["a_pil"].shape for _, sample in read(sized)} == {(3, 3, 3)}
    visits = cs.open_source(PEERS / name, format=name, columns=["a_number"], samples_per_visit=1)
    assert visits.num_units == 7
    assert sorted(key for key, _ in read(visits)) == sorted(key for key, _ in read(chosen))
    with pytest.raises(cs.ConfigError, match="no_such"):
        cs.open_source(PEERS / name, format=name, columns=["no_such"])


@pytest.mark.parametrize("name", ["mds-pkl", "litdata-pickle"])
def test_what_was_pickled_is_refused_unless_a_function_unpickles_it(name: str) -> None:
    kind, field = name.partition("-")[0], {"mds-pkl": "a_pickle", "litdata-pickle": "b"}[name]
    with pytest.raises(cs.ConfigError, match=rf"{field}.*decoders"):
        cs.open_source(PEERS / name, format=kind)
    source = cs.open_source(PEERS / name, format=kind, decoders={field: lambda data: str(pickle.loads(data))})
    assert read(source)[0][1][field] == {"mds-pkl": "{'x': 2}", "litdata-pickle": "(1+2j)"}[name]


def test_a_shard_of_mds_is_held_against_its_hash_if_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, {path.name: path.read_bytes() for path in (PEERS / "mds").iterdir()})
    data = bytearray((tmp_path / "shard.00001.mds").read_bytes())
    data[-1] ^= 1
    (tmp_path / "shard.00001.mds").write_bytes(data)
    checked = cs.open_source(tmp_path, format="mds", columns=["a_number"], check_hashes=True)
    assert len(read(checked, 0)) == 6
    with pytest.raises(cs.SampleError, match=r"shard\.00001\.mds"):
        read(checked, 1)
    assert len(read(cs.open_source(tmp_path, format="mds", columns=["a_number"]))) == 7


# --- objects -------------------------------------------------------------------------------------


class Together:
    """A dataset, an iterable's maker and a function that know how many calls are in progress."""

    def __init__(self, wait_s: float) -> None:
        self.now = self.peak = 0
        self.barrier = threading.Barrier(3)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            self.barrier.wait(self.wait_s)
        except threading.BrokenBarrierError:
            pass
        self.now -= 1
        return index


@pytest.mark.parametrize(("thread_safe", "peak"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("kind", ["dataset", "function"])
def test_calls_overlap_only_if_they_may(kind: str, thread_safe: bool, peak: int) -> None:
    calls = Together(60.0 if thread_safe else 0.05)
    source: cs.Source = (
        cs.DatasetSource(calls, thread_safe=thread_safe)
        if kind == "dataset"
        else cs.CallableSource(lambda _: calls[0], thread_safe=thread_safe)
    )
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda unit: read(source, unit), range(3)))
    assert calls.peak == peak


def test_defaults_of_datasets_and_iterables_stand_for_what_is_missing() -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "tags": ["x"]}, {"a": 2}, {"a": None, "tags": []}]
    expected = [{"a": 1, "tags": '["x"]'}, {"a": 2, "tags": "[]"}, {"a": 0, "tags": "[]"}]
    fields = {"a": 0, "tags": "[]"}

    def make(shard: int, shards: int) -> Iterator[dict[str, Any]]:
        yield from (dict(row) for row in rows[shard::shards])

    assert [sample for _, sample in read(cs.open_source(rows, fields=fields))] == expected
    for shards in (None, 1, 2):
        source = cs.IterableSource(make, shards=shards, fields=fields)
        assert source.num_units == (shards or 1)
        found = sorted(read(source))
        assert [key for key, _ in found] == sorted(
            f"{shard}/{i}" for shard in range(shards or 1) for i in range(len(rows[shard :: shards or 1]))
        )
        assert sorted(json.dumps(sample) for _, sample in found) == sorted(map(json.dumps, expected))


# --- images and manifests --------------------------------------------------------------------------


def test_image_options_resize_as_pillow_does_and_crop_the_middle() -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 40, 60), dtype=np.uint8)
    small = cs.ImageOptions(resize=20, crop=(10, 16))
    found = small({"image": image, "label": 3, "other": image[0]})
    pillow = Image.fromarray(image.transpose(1, 2, 0)).resize((30, 20), Image.Resampling.BILINEAR)
    expected = np.asarray(pillow).transpose(2, 0, 1)[:, 5:15, 7:23].astype(int)
    assert np.abs(found["image"].astype(int) - expected).max() <= 2
    assert (found["label"], found["other"].shape) == (3, (40, 60))
    assert cs.ImageOptions(resize=(5, 7))({"x": image})["x"].shape == (3, 5, 7)
    padded = cs.ImageOptions(crop=44)({"x": image})["x"]
    assert padded.shape == (3, 44, 44)
    assert not padded[:, :2].any()
    assert not padded[:, 42:].any()
    for wrong in (0, -1, (3,), "big", 2.5):
        with pytest.raises(cs.ConfigError):
            cs.ImageOptions(resize=wrong)  # type: ignore[arg-type]


def test_a_manifest_keeps_its_order_and_comes_as_often_as_it_says(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "A", "b.txt": "B", "list.txt": "# texts\nb.txt\n\na.txt\nb.txt\ngone.txt\n"})
    manifest = cs.Manifest(tmp_path / "list.txt")
    assert [Path(url).name for url in manifest] == ["b.txt", "a.txt", "b.txt", "gone.txt"]
    source = cs.open_source(manifest)
    assert [read(source, unit)[0][1]["text"] for unit in range(3)] == ["B", "A", "B"]
    assert source.num_units == 4
    with pytest.raises(cs.SampleError, match=r"gone\.txt"):  # looked up when its turn comes
        read(source, 3)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("x,y\na.txt,1\n", {}, "x, y|'x', 'y'"),
        ("path,y\na.txt,1\n", {"label": "z"}, "'z'"),
        ("path,y\na.txt,1\n", {"column": "z"}, "'z'"),
        ("a.txt\nb.txt\n", {}, "a.txt"),
    ],
)
def test_a_manifest_that_does_not_say_which_column_is_refused(
    text: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, {"a.txt": "A", "list.csv": text})
    with pytest.raises(cs.ConfigError, match=words):
        cs.open_source(cs.Manifest(tmp_path / "list.csv", **options))
    with pytest.raises(cs.ConfigError, match="'lable'; do you mean 'label'"):
        cs.open_source(tmp_path / "list.csv", manifest={"lable": "y"})
