"""Shards that are not in the page cache: `python -m benchmarks.disk [rounds]`.

8192 samples of 128 KiB float32, shuffled, batches of 64. The shards are opened (and so verified) in a first epoch. Then in
each round they are dropped from the page cache, and an epoch is read from the disk; beside `fio` (random reads of 128 KiB,
16 at once, past the page cache) before and after, in the same run. The rate counts from the first batch on. Every batch
is checked. It needs `fio`, and room for 2 GB.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

import cachestream as cs
from benchmarks.measure import emit, scratch
from benchmarks.pagecache import cached_share, evict, fio_gb_per_s
from benchmarks.warm import BATCH, BATCH_BYTES, FLOATS, fill

DEPTH = 16


def cold_epoch(loader: cs.EpochLoader, folder: Path) -> tuple[float, float]:
    """GB/s of an epoch whose shards are not in memory, and the seconds to its 48th batch."""
    loader.set_epoch(loader.epoch + 1)  # what was gathered ahead is dropped
    evict(folder)
    assert cached_share(folder) < 0.05
    begun_s, came_s = time.perf_counter(), []
    for batch in loader:
        assert torch.equal(batch["x"][:, 0].long(), batch["i"])
        came_s.append(time.perf_counter())
    return (len(came_s) - 1) * BATCH_BYTES / (came_s[-1] - came_s[0]) / 1e9, came_s[47] - begun_s


def main(rounds: int = 1) -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = fill(folder / "cache")
        fio, rates, ahead_s = [], [], []
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            for _ in loader:
                pass
            for _ in range(rounds):
                fio.append(fio_gb_per_s(folder, 4 * FLOATS, DEPTH, seconds=1))
                rate, took_s = cold_epoch(loader, folder)
                rates.append(rate)
                ahead_s.append(took_s)
                fio.append(fio_gb_per_s(folder, 4 * FLOATS, DEPTH, seconds=1))
        rate, limit = statistics.median(rates), statistics.median(fio)
        emit(
            fio_gb_per_s=limit,
            loader_gb_per_s=rate,
            loader_to_fio=rate / limit,
            first_48_batches_s=statistics.median(ahead_s),
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
