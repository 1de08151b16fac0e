"""Each source beside the library that reads its format directly: `python -m benchmarks.readers [case …]`.

One process, one thread, a local file in the page cache; samples as numpy arrays, bytes or numbers.
The two take turns; the median of five rounds counts. Half a minute in all, most of it to write the files.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import tfrecord
import zarr

import cachestream as cs
from benchmarks.measure import scratch, seconds

ROUNDS: Final = 5
WINDOW: Final = (256, 256)
WINDOWS: Final = 100
SIDE: Final = 4096  # of a picture: more than HDF5 caches
CHUNK: Final = (128, 128)


@dataclass(frozen=True, slots=True)
class Case:
    """Something to read: through our source, and directly. Each reads `samples` samples anew when called."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    samples: int
    nbytes: int


def drain(samples: Iterable[Any]) -> int:
    """Take all samples; how many there were."""
    return sum(1 for _ in samples)


def take(source: cs.Source, units: int) -> Callable[[], object]:
    """Reads the first `units` units of `source`."""
    rng = np.random.default_rng(0)
    return lambda: drain(itertools.chain.from_iterable(source.read(unit, rng) for unit in range(units)))


def places(shape: tuple[int, ...], window: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Random windows, as a user would draw them."""
    rng = np.random.default_rng(0)
    for _ in range(WINDOWS):
        starts = [int(rng.integers(0, length - size + 1)) for length, size in zip(shape, window, strict=True)]
        yield tuple(slice(start, start + size) for start, size in zip(starts, window, strict=True))


def windows(url: str, direct: Any, window: tuple[int, ...] = WINDOW) -> Case:
    """Random windows of one array; `direct` is what its own library opens it as."""
    nbytes = WINDOWS * int(np.prod(window)) * np.dtype(direct.dtype).itemsize
    return Case(
        take(cs.ArraySource(url, window=window), WINDOWS),
        lambda: drain(np.array(direct[place]) for place in places(direct.shape, window)),
        WINDOWS,
        nbytes,
    )


def picture() -> np.ndarray[Any, Any]:
    """float32 [4096, 4096] that packs to about a half, as measured data do."""
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.linspace(0, 9, SIDE), np.linspace(0, 5, SIDE))
    measured: npt.NDArray[Any] = np.sin(smooth) * 1000 + rng.normal(size=(SIDE, SIDE))
    return measured.round().astype(np.float32)


def npy_line(folder: Path) -> Case:
    np.save(folder / "line.npy", np.random.default_rng(0).random(1 << 25, dtype=np.float32))
    direct = np.load(folder / "line.npy", mmap_mode="r")
    return windows(str(folder / "line.npy"), direct, (1 << 16,))


def npy_picture(folder: Path) -> Case:
    np.save(folder / "picture.npy", picture())
    return windows(str(folder / "picture.npy"), np.load(folder / "picture.npy", mmap_mode="r"))


def zarr_case(name: str, **options: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        path = str(folder / f"{name}.zarr")
        array = zarr.create_array(path, shape=(SIDE, SIDE), chunks=CHUNK, dtype="f4", **options)
        array[...] = picture()
        return windows(path, zarr.open_array(path, mode="r"))

    return make


def hdf5_case(name: str, **options: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        path = folder / f"{name}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("picture", data=picture(), **options)
        return windows(f"{path}::/picture", h5py.File(path, "r")["picture"])

    return make


def parquet_case(columns: Mapping[str, Any], group: int) -> Callable[[Path], Case]:
    """Rows of a table, beside what pyarrow makes of the same batches."""

    def make(folder: Path) -> Case:
        import pyarrow as pa

        path = folder / "table.parquet"
        pq.write_table(pa.table(dict(columns)), path, row_group_size=group, compression="none")
        rows = len(next(iter(columns.values())))

        def direct() -> object:
            return drain(
                row
                for batch in pq.ParquetFile(path).iter_batches(use_threads=False)
                for row in batch.to_pylist()
            )

        source = cs.ParquetSource(path, decode_images=False)
        return Case(take(source, source.num_units), direct, rows, path.stat().st_size)

    return make


def tfrecord_case(count: int, make_example: Callable[[int], dict[str, Any]]) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        path = folder / "a.tfrecord"
        writer = tfrecord.TFRecordWriter(str(path))
        for number in range(count):
            writer.write(make_example(number))
        writer.close()
        source = cs.TFRecordSource(path, decode_images=False)
        return Case(
            take(source, 1),
            lambda: drain(tfrecord.tfrecord_loader(str(path), None)),
            count,
            path.stat().st_size,
        )

    return make


def blobs(count: int, nbytes: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [rng.bytes(nbytes) for _ in range(count)]


RNG: Final = np.random.default_rng(0)
CASES: Final[dict[str, Callable[[Path], Case]]] = {
    "npy, 256 KiB in a row": npy_line,
    "npy, 256 x 256 of 4096 x 4096": npy_picture,
    "zarr 3, zstd": zarr_case("zstd"),
    "zarr 3, sharded": zarr_case("sharded", shards=(512, 512)),
    "zarr 3, raw": zarr_case("raw", compressors=None),
    "zarr 2": zarr_case("v2", zarr_format=2),
    "hdf5, contiguous": hdf5_case("plain"),
    "hdf5, chunks": hdf5_case("chunks", chunks=CHUNK),
    "hdf5, gzip and shuffle": hdf5_case("gzip", chunks=CHUNK, compression="gzip", shuffle=True),
    "hdf5, lzf": hdf5_case("lzf", chunks=CHUNK, compression="lzf"),
    "parquet, 50 kB of bytes": parquet_case(
        {"image": [{"bytes": one, "path": None} for one in blobs(1000, 50_000)], "label": range(1000)}, 100
    ),
    "parquet, 8 numbers": parquet_case({f"x{i}": RNG.normal(size=50_000) for i in range(8)}, 10_000),
    "parquet, lists of 512": parquet_case({"tokens": list(RNG.integers(0, 50_000, (4000, 512)))}, 1000),
    "tfrecord, 50 kB of bytes": tfrecord_case(
        1000, lambda i: {"image": (RNG.bytes(50_000), "byte"), "label": (i, "int")}
    ),
    "tfrecord, 4096 floats": tfrecord_case(1000, lambda _: {"x": (RNG.normal(size=4096), "float")}),
    "tfrecord, 512 ints": tfrecord_case(2000, lambda _: {"x": (RNG.integers(0, 50_000, 512), "int")}),
}


def measure(case: Case) -> tuple[float, float]:
    """The median seconds of both, ours first."""
    rounds = [(seconds(case.ours), seconds(case.theirs)) for _ in range(ROUNDS + 1)][1:]
    return statistics.median(ours for ours, _ in rounds), statistics.median(theirs for _, theirs in rounds)


def main(names: list[str]) -> None:
    print("| case | MB/s | samples/s | directly, MB/s | samples/s | ratio |\n|-|-|-|-|-|-|")
    for name, make in CASES.items():
        if names and not any(part in name for part in names):
            continue
        with scratch() as folder:
            case = make(folder)
            ours_s, theirs_s = measure(case)
        mb = case.nbytes / 1e6
        print(
            f"| {name} | {mb / ours_s:,.0f} | {case.samples / ours_s:,.0f} | {mb / theirs_s:,.0f} "
            f"| {case.samples / theirs_s:,.0f} | {theirs_s / ours_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
