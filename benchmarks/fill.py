"""Filling a cache from local files, and from a function: `python -m benchmarks.fill`.

Raw float32 arrays of 128 KiB, 1 GiB in all, two processes; from the first 64 samples to the last. "disk" is one plain
write with fsync just before, the second time: a virtual machine gets memory that it has not used for a while from its host
page by page, and the first write to such pages runs at a fifth of the speed (measured), whoever writes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import cachestream as cs
from benchmarks.measure import emit, scratch

SAMPLES = 8192
FLOATS = 32 * 1024
PROCESSES = 2


def write_arrays(folder: Path, samples: int = SAMPLES) -> None:
    """`samples` .npy files of 128 KiB, all different."""
    folder.mkdir()
    data = np.random.default_rng(0).random((64, FLOATS), dtype=np.float32)
    for i in range(samples):
        data[i % 64, 0] = i
        np.save(folder / f"{i:06d}.npy", data[i % 64])


def plain_write_mb_per_s(folder: Path) -> float:
    """Speed of one process that writes fresh files of 64 MB, fsync included, from warm memory."""
    data, files = bytes(64 << 20), 2 * SAMPLES * FLOATS * 4 // (64 << 20)
    took_s = 0.0
    for _ in range(2):
        begun_s = time.perf_counter()
        for i in range(files):
            with open(folder / f"plain{i}", "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
        took_s = time.perf_counter() - begun_s
        for path in folder.glob("plain*"):
            path.unlink()
    return files * len(data) / took_s / 1e6


def windows() -> object:
    """A function that cuts random windows of 128 KiB out of an array in memory."""
    signal = np.random.default_rng(0).random(1 << 22, dtype=np.float32)

    def window(rng: np.random.Generator) -> npt.NDArray[np.float32]:
        start = int(rng.integers(0, len(signal) - FLOATS))
        return signal[start : start + FLOATS]

    return window


def fill(folder: Path, what: object) -> tuple[float, float]:
    """Seconds to the first samples, and MB/s from there on."""
    source = cs.open_source(what)
    begun_s = time.perf_counter()
    with (
        cs.Cache(folder, size_limit="4GB") as cache,
        cs.start_worker(cache, source, num_workers=PROCESSES),
    ):
        first = cache.wait(64, timeout_s=60)
        first_s = time.perf_counter()
        last = cache.wait(SAMPLES * 95 // 100, timeout_s=120)
        took_s = time.perf_counter() - first_s
    return first_s - begun_s, (last - first) * FLOATS * 4 / 1e6 / took_s


def main() -> None:
    with scratch() as folder:
        write_arrays(folder / "remote")
        disk = plain_write_mb_per_s(folder)
        first_s, files = fill(folder / "files", str(folder / "remote"))
        _, function = fill(folder / "function", windows())
    emit(disk_mb_per_s=disk, first_samples_s=first_s, files_mb_per_s=files, function_mb_per_s=function)


if __name__ == "__main__":
    main()
