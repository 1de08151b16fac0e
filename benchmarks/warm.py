"""Warm batches against memcpy: `python -m benchmarks.warm`.

8192 samples of 128 KiB float32, shuffled, batches of 64 (8 MiB), everything in the page cache. In one
process: memcpy, the same shuffled gather into one reused buffer (the limit), and the EpochLoader. Every
batch of one epoch is checked against the sample's number.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import cachestream as cs
from benchmarks.measure import emit, memcpy_gb_per_s, scratch

SAMPLES = 8192
FLOATS = 32 * 1024
BATCH = 64
EPOCHS = 9
BATCH_BYTES = BATCH * FLOATS * 4


class Numbered:
    """Samples that hold their own number throughout."""

    fingerprint = "numbered"
    num_units = SAMPLES

    def read(self, unit: int, rng: np.random.Generator) -> object:
        yield str(unit), {"x": np.full(FLOATS, unit, np.float32), "i": unit}


def fill(folder: Path) -> cs.Cache:
    cache = cs.Cache(folder, size_limit="4GB")
    worker = cs.start_worker(cache, Numbered(), num_workers=2)
    worker.wait(timeout_s=120)
    worker.stop()
    return cache


def check(loader: cs.EpochLoader) -> None:
    """One epoch, verified: every sample at most once, all of it what it should be."""
    seen: list[torch.Tensor] = []
    for batch in loader:
        assert torch.equal(batch["x"][:, 0].long(), batch["i"])
        assert torch.equal(batch["x"][:, -1].long(), batch["i"])
        seen.append(batch["i"])
    assert len(torch.unique(torch.cat(seen))) == SAMPLES


def gather_limit() -> float:
    """GB/s of the same batches gathered from one array in memory into one reused buffer."""
    rows = torch.empty(SAMPLES, FLOATS)
    rows[:] = torch.arange(SAMPLES)[:, None]
    order = torch.randperm(SAMPLES).reshape(-1, BATCH)
    out = torch.empty(BATCH, FLOATS)
    rates = []
    for _ in range(5):
        begun_s = time.perf_counter()
        for index in order:
            torch.index_select(rows, 0, index, out=out)
        rates.append(len(order) * BATCH_BYTES / (time.perf_counter() - begun_s) / 1e9)
    return statistics.median(rates)


def epochs(loader: cs.EpochLoader) -> tuple[list[float], list[float]]:
    """GB/s and the gap before it, of each epoch."""
    rates, gaps, ended_s = [], [], None
    for _ in range(EPOCHS):
        begun_s = time.perf_counter()
        batches = 0
        for _ in loader:
            if not batches:
                gaps.append(time.perf_counter() - (begun_s if ended_s is None else ended_s))
            batches += 1
        ended_s = time.perf_counter()
        rates.append(batches * BATCH_BYTES / (ended_s - begun_s) / 1e9)
    return rates[1:], gaps[1:]


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = fill(folder / "cache")
        memcpy, limit = memcpy_gb_per_s(), gather_limit()
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            check(loader)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            rates, gaps = epochs(loader)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loader_rate = statistics.median(rates)
        emit(
            memcpy_gb_per_s=memcpy,
            gather_gb_per_s=limit,
            loader_gb_per_s=loader_rate,
            loader_to_memcpy=loader_rate / memcpy,
            loader_to_gather=loader_rate / limit,
            gap_ms=statistics.median(gaps) * 1e3,
            longest_gap_ms=max(gaps) * 1e3,
            peak_memory_growth_mb=(after - before) / 1024,
        )


if __name__ == "__main__":
    main()
