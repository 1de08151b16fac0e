"""Filling from raw arrays at the speed of memory and of the disk: `python -m benchmarks.raw`.

Windows of 256 KiB of four float32 arrays of 1 GiB in all, 3 GiB of windows at random: `.npy` files and HDF5 on this machine,
and objects of one window on an S3 server (rclone). One process fills a cache, from the first sixteenth to the last; beside it, in
turns, a plain loop in one process does the least that can be done: it reads the same windows to their places in a column
of 64 MB, and writes that, again and again. "Memory": arrays and cache lie in /dev/shm. "Disk": the cache lies on a disk,
and bare writers write as much from warm memory. Nobody syncs. Then a trainer with steps of 10 ms reads the cache while it
is filled from memory.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np

import cachestream as cs
from benchmarks.measure import emit, scratch
from tests.support.s3 import run_s3_server

SIDE: Final = 256
WINDOW_BYTES: Final = SIDE * SIDE * 4
FILES, ROWS = 4, 1024
WINDOWS: Final = FILES * ROWS  # different ones, and objects
SAMPLES: Final = 3 * WINDOWS
COLUMN: Final = 256  # windows: 64 MB
TURNS: Final = 3
STEP_S: Final = 0.01
BATCH: Final = 16


def write_arrays(folder: Path) -> None:
    """Four arrays float32 `[1024, 256, 256]`, as `.npy` files and as HDF5 datasets with a window a chunk."""
    for number in range(FILES):
        array = np.random.default_rng(number).random((ROWS, SIDE, SIDE), dtype=np.float32)
        np.save(folder / f"{number}.npy", array)
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=array, chunks=(1, SIDE, SIDE))


def write_objects(folder: Path) -> None:
    """`.npy` files of one window each."""
    array = np.random.default_rng(0).random((SIDE, SIDE), dtype=np.float32)
    for number in range(WINDOWS):
        array[0, 0] = number
        np.save(folder / f"{number:04d}.npy", array)


def places() -> list[tuple[int, int]]:
    """The file and the row of each window, at random."""
    return [divmod(int(one), ROWS) for one in np.random.default_rng(0).integers(0, WINDOWS, SAMPLES)]


def npy_reader(folder: Path) -> Callable[[int, int, memoryview], object]:
    """A function that reads a window, by file and row, to a place in memory."""
    files = [os.open(folder / f"{number}.npy", os.O_RDONLY) for number in range(FILES)]
    offset = os.path.getsize(folder / "0.npy") - ROWS * WINDOW_BYTES
    return lambda file, row, place: os.preadv(files[file], [place], offset + row * WINDOW_BYTES)


def hdf5_reader(folder: Path) -> Callable[[int, int, memoryview], object]:
    datasets = [h5py.File(folder / f"{number}.h5", "r", locking=False)["data"] for number in range(FILES)]

    def read(file: int, row: int, place: memoryview) -> None:
        target = np.frombuffer(place, np.float32).reshape(1, SIDE, SIDE)
        datasets[file].read_direct(target, np.s_[row : row + 1])

    return read


class Ballast:
    """Memory that this machine has in use, given back when a measurement begins: a file beside what is written.

    A virtual machine gives memory that is free for some seconds back to its host, and gets it again page by page, at a fifth
    of the speed.
    """

    def __init__(self, target: Path) -> None:
        self._path = target / f"ballast{os.getpid()}"
        piece = np.ones(64 << 20, np.uint8)
        with self._path.open("wb", buffering=0) as file:
            for _ in range(SAMPLES * WINDOW_BYTES // len(piece) + 2):
                file.write(piece.data)

    def release(self) -> None:
        self._path.unlink()


def plain_loop(read: Callable[[int, int, memoryview], object] | None, target: Path) -> float:
    """MB/s of a loop that reads all windows (None: none), and writes them by 64 MB."""
    ballast = Ballast(target)
    memory = np.ones(COLUMN * WINDOW_BYTES, np.uint8).data
    order = places()
    ballast.release()
    begun_s = time.perf_counter()
    for start in range(0, SAMPLES, COLUMN):
        for at, (file, row) in enumerate(order[start : start + COLUMN] if read is not None else ()):
            read(file, row, memory[at * WINDOW_BYTES : (at + 1) * WINDOW_BYTES])  # type: ignore[misc]
        fd = os.open(target / f"loop{os.getpid()}-{start}", os.O_WRONLY | os.O_CREAT)
        try:
            left = memory
            while left:
                left = left[os.write(fd, left) :]
        finally:
            os.close(fd)
    took_s = time.perf_counter() - begun_s
    for path in target.glob(f"loop{os.getpid()}-*"):
        path.unlink()
    return SAMPLES * WINDOW_BYTES / took_s / 1e6


def bare_writers(target: Path, processes: int) -> float:
    """MB/s of `processes` that write as much each from warm memory, together."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return sum(pool.starmap(plain_loop, [(None, target)] * processes))


def windows_of(arrays: Path, kind: str) -> Any:
    """A source of windows of the arrays of this kind, "npy" or "h5"."""
    urls = [str(arrays / f"{number}.{kind}") for number in range(FILES)]
    return cs.ArraySource(
        urls, window=(1, None, None), num_units=SAMPLES, dataset="data" if kind == "h5" else None
    )


def fill(source: Any, target: Path, processes: int, samples: int = SAMPLES, *, train: bool = False) -> float:
    """MB/s of a cache that `processes` fill with `samples`, while a trainer reads it if `train`."""
    folder, ballast = target / "cache", Ballast(target)
    with (
        cs.Cache(folder, size_limit="5GB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=processes),
    ):
        first = cache.wait(samples // 16, timeout_s=120)
        ballast.release()
        begun_s = time.perf_counter()
        if train:
            with cs.EpochLoader(cache, batch_size=BATCH) as loader:
                while cache.num_samples < samples * 15 // 16:
                    for _ in loader:
                        time.sleep(STEP_S)
                        if cache.num_samples >= samples * 15 // 16:
                            break
        last = cache.wait(samples * 15 // 16, timeout_s=300)
        took_s = time.perf_counter() - begun_s
    shutil.rmtree(folder)
    return (last - first) * WINDOW_BYTES / took_s / 1e6


def main() -> None:
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        found.setdefault(name, []).append(value)
        return value

    def note_pair(name: str, ours: float, other: float) -> None:
        note(f"{name}_mb_per_s", ours)
        note(f"{name}_to_loop", ours / other)

    with (
        tempfile.TemporaryDirectory(prefix="cachestream-bench-", dir="/dev/shm") as shared,
        scratch() as disk,
    ):
        memory = Path(shared)
        arrays, objects = memory / "arrays", memory / "objects"
        arrays.mkdir()
        objects.mkdir()
        write_arrays(arrays)
        write_objects(objects)
        npy, hdf5 = (windows_of(arrays, kind) for kind in ("npy", "h5"))
        for _ in range(TURNS):
            loop = note("loop_mb_per_s", plain_loop(npy_reader(arrays), memory))
            one = fill(npy, memory, 1)
            note_pair("npy", one, loop)
            note("npy_two_mb_per_s", two := fill(npy, memory, 2))
            note("npy_two_to_one", two / one)
            note("npy_training_to_alone", fill(npy, memory, 1, train=True) / one)
            loop = note("hdf5_loop_mb_per_s", plain_loop(hdf5_reader(arrays), memory))
            note_pair("hdf5", fill(hdf5, memory, 1), loop)
            writers = note("disk_writer_mb_per_s", bare_writers(disk, 1))
            loop = note("disk_loop_mb_per_s", plain_loop(npy_reader(arrays), disk))
            note_pair("disk", ours := fill(npy, disk, 1), loop)
            note("disk_to_writer", ours / writers)
            writers = note("disk_two_writers_mb_per_s", bare_writers(disk, 2))
            note("disk_two_mb_per_s", ours := fill(npy, disk, 2))
            note("disk_two_to_writers", ours / writers)
        with run_s3_server(memory, fresh=False) as server:  # the folder of objects is a bucket
            bucket = cs.open_source("s3://objects/*.npy", storage_options=server.storage_options)
            note("s3_mb_per_s", fill(bucket, memory, 1, WINDOWS))
            note("s3_two_mb_per_s", fill(bucket, memory, 2, WINDOWS))
    emit(**{name: statistics.median(values) for name, values in found.items()})


if __name__ == "__main__":
    main()
