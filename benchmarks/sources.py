"""Speed of filling from each source, beside its library that reads the same: `python -m benchmarks.sources [WORD …]`.

The words are of the rows to measure. Rows are formats, columns are places: a local disk, a real S3 server (rclone) on this
machine, and the same with 50 ms of latency. Filling is by one sampling process, from the first quarter of the samples to
90 %, decoded, packed, checksummed and on the disk. Beside it one process reads the samples with the format's own library,
through s3fs where they are remote, for at most three seconds: keeps nothing, or pickles them into files, synced.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import fsspec
import h5py
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import tfrecord
import webdataset.tariterators as wds
import zarr
from tfrecord import example_pb2
from tfrecord.reader import extract_feature_dict

import cachestream as cs
from benchmarks.measure import emit, scratch
from tests.support.proxy import run_proxy
from tests.support.s3 import S3Server, run_s3_server

DIRECT_S: Final = 3.0
FILL_TIMEOUT_S: Final = 60.0
FILE_BYTES: Final = 64 << 20
LATENCY_S: Final = 0.05
BLOB_BYTES: Final = 50_000
SIDE, WINDOW, CHUNK = 4096, 256, 128
RNG: Final = np.random.default_rng(0)
PLACES: Final = {"local": None, "S3": 0.0, "S3, 50 ms": LATENCY_S}


@dataclass(frozen=True, slots=True)
class Case:
    """`write` into a folder; `ours` and `direct` read from its URL, with fsspec's options; `samples` of `nbytes`."""

    write: Callable[[Path], object]
    ours: Callable[[str, dict[str, Any]], Any]
    direct: Callable[[Any, str], Iterator[Any]]
    samples: int
    nbytes: int


# --- what is read ------------------------------------------------------------------------------


def write_npy(folder: Path) -> None:
    data = RNG.random((64, 32 * 1024), dtype=np.float32)
    for number in range(8000):
        np.save(folder / f"{number:05d}.npy", data[number % 64])


def read_npy(files: Any, path: str) -> Iterator[Any]:
    for name in sorted(files.ls(path, detail=False)):
        with files.open(name) as file:
            yield np.load(io.BytesIO(file.read()))


def write_tars(folder: Path) -> None:
    for number in range(16):
        with tarfile.open(folder / f"{number:03d}.tar", "w") as archive:
            for sample in range(1000):
                for extension, data in (("bin", RNG.bytes(BLOB_BYTES)), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{sample:06d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def read_tars(files: Any, path: str) -> Iterator[Any]:
    for name in sorted(files.ls(path, detail=False)):
        with files.open(name) as file:
            yield from wds.group_by_keys(wds.tar_file_expander([{"url": name, "stream": file}]))


def write_parquet(folder: Path) -> None:
    for number in range(4):
        images = [{"bytes": RNG.bytes(BLOB_BYTES), "path": None} for _ in range(4000)]
        table = pa.table({"image": images, "label": range(4000)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100, compression="none")


def write_numbers(folder: Path) -> None:
    for number in range(4):
        table = pa.table({f"x{i}": RNG.normal(size=500_000) for i in range(8)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=5000, compression="none")


def write_tokens(folder: Path) -> None:
    for number in range(4):
        ends = np.cumsum(RNG.integers(200, 801, 50_000), dtype=np.int32)
        tokens = RNG.integers(0, 50_000, ends[-1], dtype=np.int32)
        table = pa.table(
            {"tokens": pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), pa.array(tokens))}
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=2000, compression="none")


def read_parquet(files: Any, path: str) -> Iterator[Any]:
    for name in sorted(files.ls(path, detail=False)):
        with files.open(name) as file:
            for batch in pq.ParquetFile(file).iter_batches(use_threads=False):
                yield from batch.to_pylist()


def write_tfrecords(folder: Path) -> None:
    for number in range(16):
        writer = tfrecord.TFRecordWriter(str(folder / f"{number:03d}.tfrecord"))
        for _ in range(1000):
            writer.write({"image": (RNG.bytes(BLOB_BYTES), "byte"), "label": (7, "int")})
        writer.close()


def write_ints(folder: Path) -> None:
    for number in range(16):
        writer = tfrecord.TFRecordWriter(str(folder / f"{number:03d}.tfrecord"))
        for _ in range(8000):
            writer.write({"x": (RNG.integers(0, 50_000, 512), "int")})
        writer.close()


def read_tfrecords(files: Any, path: str) -> Iterator[Any]:
    """As tfrecord's own loader does, which opens local files only."""
    kinds = {"byte": "bytes_list", "float": "float_list", "int": "int64_list"}
    for name in sorted(files.ls(path, detail=False)):
        with files.open(name) as file:
            while head := file.read(12):
                record = file.read(struct.unpack_from("<Q", head)[0])
                file.read(4)
                example = example_pb2.Example()
                example.ParseFromString(record)
                yield extract_feature_dict(example.features, None, kinds)


def picture() -> np.ndarray[Any, Any]:
    """float32 [4096, 4096] that packs to about a half, as measured data do."""
    smooth = np.add.outer(np.linspace(0, 9, SIDE), np.linspace(0, 5, SIDE))
    measured: npt.NDArray[Any] = np.sin(smooth) * 1000 + RNG.normal(size=(SIDE, SIDE))
    return measured.round().astype(np.float32)


def windows_of(array: Any) -> Iterator[Any]:
    while True:
        y, x = (int(at) for at in RNG.integers(0, SIDE - WINDOW, 2))
        yield np.array(array[y : y + WINDOW, x : x + WINDOW])


def write_zarr(folder: Path) -> None:
    array = zarr.create_array(str(folder / "a.zarr"), shape=(SIDE, SIDE), chunks=(CHUNK, CHUNK), dtype="f4")
    array[:] = picture()


def read_zarr(files: Any, path: str) -> Iterator[Any]:
    if isinstance(files, fsspec.get_filesystem_class("file")):
        yield from windows_of(zarr.open_array(f"{path}/a.zarr", mode="r"))
    else:
        options = {**files.storage_options, "asynchronous": True}
        yield from windows_of(zarr.open_array(f"s3://{path}/a.zarr", mode="r", storage_options=options))


def write_hdf5(folder: Path) -> None:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset(
            "picture", data=picture(), chunks=(CHUNK, CHUNK), compression="gzip", shuffle=True
        )


def read_hdf5(files: Any, path: str) -> Iterator[Any]:
    # s3fs would keep 50 MB in memory, which is all of this file; arrays worth caching are larger than that.
    options = {"block_size": 1 << 20, "cache_type": "blockcache", "cache_options": {"maxblocks": 8}}
    with files.open(f"{path}/a.h5", **options) as file, h5py.File(file, "r") as opened:
        yield from windows_of(opened["picture"])


def write_large_npy(folder: Path) -> None:
    np.save(folder / "a.npy", picture())


def read_large_npy(files: Any, path: str) -> Iterator[Any]:
    if isinstance(files, fsspec.get_filesystem_class("file")):
        yield from windows_of(np.load(f"{path}/a.npy", mmap_mode="r"))
    else:  # numpy has no way to read a part of a remote array; so its rows are read, as one would
        with files.open(f"{path}/a.npy", cache_type="none") as file:
            offset = file.size - SIDE * SIDE * 4
            while True:
                y, x = (int(at) for at in RNG.integers(0, SIDE - WINDOW, 2))
                file.seek(offset + y * SIDE * 4)
                rows = np.frombuffer(file.read(WINDOW * SIDE * 4), np.float32).reshape(WINDOW, SIDE)
                yield rows[:, x : x + WINDOW].copy()


def source_of(kind: Any, name: str = "", **options: Any) -> Callable[[str, dict[str, Any]], Any]:
    return lambda url, storage: kind(url + name, storage_options=storage, **options)


def array_case(
    write: Callable[[Path], object], name: str, direct: Callable[[Any, str], Iterator[Any]], samples: int
) -> Case:
    ours = source_of(cs.ArraySource, name, window=(WINDOW, WINDOW), num_units=samples)
    return Case(write, ours, direct, samples, WINDOW * WINDOW * 4)


BLOBS: Final = (16_000, BLOB_BYTES)
CASES: Final = {
    "npy files, 128 KiB": Case(write_npy, source_of(cs.FileSource), read_npy, 8000, 131_072),
    "npy, 256 × 256 windows": array_case(write_large_npy, "/a.npy", read_large_npy, 4000),
    "tar, 50 kB": Case(write_tars, source_of(cs.TarSource), read_tars, *BLOBS),
    "zarr, zstd, 256 × 256 windows": array_case(write_zarr, "/a.zarr", read_zarr, 1000),
    "hdf5, gzip, 256 × 256 windows": array_case(write_hdf5, "/a.h5::/picture", read_hdf5, 1000),
    "parquet, 50 kB": Case(
        write_parquet, source_of(cs.ParquetSource, decode_images=False), read_parquet, *BLOBS
    ),
    "parquet, 8 numbers": Case(write_numbers, source_of(cs.ParquetSource), read_parquet, 2_000_000, 64),
    "parquet, 500 tokens": Case(write_tokens, source_of(cs.ParquetSource), read_parquet, 200_000, 2000),
    "tfrecord, 50 kB": Case(
        write_tfrecords, source_of(cs.TFRecordSource, decode_images=False), read_tfrecords, *BLOBS
    ),
    "tfrecord, 512 ints": Case(write_ints, source_of(cs.TFRecordSource), read_tfrecords, 128_000, 4096),
}


# --- how it is measured ------------------------------------------------------------------------


class Places:
    """One folder of data, as a path and as a bucket; `scratch` is a folder for the rest."""

    def __init__(self, stack: ExitStack, scratch: Path, server: S3Server) -> None:
        self.scratch = scratch
        self.data = server.bucket("data")
        self._stack = stack
        self._server = server

    def at(self, latency_s: float | None) -> tuple[str, dict[str, Any]]:
        """The URL of the data and its storage options: the path (None), or the bucket, behind a latency if above 0."""
        if latency_s is None:
            return str(self.data), {}
        if not latency_s:
            return "s3://data", self._server.storage_options
        proxy = self._stack.enter_context(run_proxy(self._server.port, latency_s=latency_s))
        return "s3://data", self._server.options_through(proxy.port)


@contextmanager
def open_places() -> Iterator[Places]:
    """An empty folder that the server shows, until the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        server = stack.enter_context(run_s3_server(folder / "s3", fresh=False))
        yield Places(stack, folder, server)


def warm(folder: Path, nbytes: int) -> None:
    """Have the host give this machine its memory: the first write to pages not used for a while is slow."""
    data = bytes(64 << 20)
    for _ in range(2):
        for number in range(1 + nbytes // len(data)):
            (folder / f"warm{number}").write_bytes(data)
        for path in folder.glob("warm*"):
            path.unlink()


def fill_per_s(case: Case, source: Any, folder: Path) -> float:
    """Samples a second that one process caches."""
    warm(folder, case.samples * case.nbytes * 5 // 4)
    with cs.Cache(folder / "cache", size_limit="4GB") as cache:
        with cs.start_worker(cache, source, num_workers=1):
            first = cache.wait(case.samples // 4, timeout_s=FILL_TIMEOUT_S)
            first_s = time.perf_counter()
            last = cache.wait(case.samples * 9 // 10, timeout_s=FILL_TIMEOUT_S)
            last_s = time.perf_counter()
        cache.clear()
    return (last - first) / (last_s - first_s)


def direct_per_s(case: Case, files: Any, path: str, keep: Callable[[Any], None]) -> float:
    """Samples a second that one process reads directly, after the first one; `keep` gets each."""
    samples = case.direct(files, path)
    next(samples)
    begun_s = time.perf_counter()
    for count in itertools.count(1):
        if count >= case.samples or time.perf_counter() - begun_s > DIRECT_S:
            break
        if (sample := next(samples, None)) is None:
            break
        keep(sample)
    getattr(samples, "close", list)()
    return count / (time.perf_counter() - begun_s)


class Files:
    """Samples pickled into files of 64 MB, each synced when it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._file = self._open()

    def _open(self) -> BinaryIO:
        return (self._folder / f"kept{next(self._numbers)}").open("xb")

    def keep(self, sample: Any) -> None:
        pickle.dump(sample, self._file, protocol=5)
        if self._file.tell() >= FILE_BYTES:
            self.close()
            self._file = self._open()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def measure(case: Case, url: str, options: dict[str, Any], folder: Path) -> dict[str, float]:
    files = fsspec.filesystem("s3" if options else "file", **options)
    fill = fill_per_s(case, case.ours(url, options), folder)
    path = url.removeprefix("s3://")
    direct = direct_per_s(case, files, path, lambda _: None)
    warm(folder, case.samples * case.nbytes * 5 // 4)
    kept = Files(folder)
    keeping = direct_per_s(case, files, path, kept.keep)
    kept.close()
    for written in folder.glob("kept*"):
        written.unlink()
    return {"MB/s": fill * case.nbytes / 1e6, "to kept": fill / keeping, "to not kept": fill / direct}


def main(words: list[str]) -> None:
    found: dict[str, float] = {}
    for name, case in CASES.items():
        places_of = [place for place in PLACES if all(word in f"{name} {place}" for word in words)]
        if not places_of:
            continue
        with open_places() as places:
            case.write(places.data)
            for place in places_of:
                url, options = places.at(PLACES[place])
                for figure, value in measure(case, url, options, places.scratch).items():
                    found[f"{name} / {place}, {figure}"] = value
    emit(**found)


if __name__ == "__main__":
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    main(sys.argv[1:])
