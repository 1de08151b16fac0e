"""Warm batches against memcpy: `python -m benchmarks.warm`.

8192 samples of 128 KiB float32, shuffled, batches of 64 (8 MiB), everything in the page cache. In one
process and in turns, since a machine's speed changes: memcpy, the same shuffled gather into one reused buffer (the
limit), and epochs of the EpochLoader, the first of which in each turn is not counted: some of it was gathered during the
pause. Ratios are medians of those of the turns. Every batch of one epoch is checked against the sample's number.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import cachestream as cs
from benchmarks.measure import emit, median_ratio, memcpy_gb_per_s, scratch

SAMPLES = 8192
FLOATS = 32 * 1024
BATCH = 64
TURNS = 9
EPOCHS = 3  # a turn
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


class Gather:
    """The same batches from one array in memory into one reused buffer."""

    def __init__(self) -> None:
        self._rows = torch.empty(SAMPLES, FLOATS)
        self._rows[:] = torch.arange(SAMPLES)[:, None]
        self._order = torch.randperm(SAMPLES).reshape(-1, BATCH)
        self._out = torch.empty(BATCH, FLOATS)

    def gb_per_s(self) -> float:
        begun_s = time.perf_counter()
        for index in self._order:
            torch.index_select(self._rows, 0, index, out=self._out)
        return len(self._order) * BATCH_BYTES / (time.perf_counter() - begun_s) / 1e9


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
        cache, gather = fill(folder / "cache"), Gather()
        gather.gb_per_s()
        copies, limits, loads, gaps = [], [], [], []
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            check(loader)
            memcpy_gb_per_s()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(TURNS):
                copies.append(memcpy_gb_per_s())
                limits.append(gather.gb_per_s())
                rates, between = epochs(loader)
                loads.append(statistics.median(rates))
                gaps += between
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        emit(
            memcpy_gb_per_s=statistics.median(copies),
            gather_gb_per_s=statistics.median(limits),
            loader_gb_per_s=statistics.median(loads),
            loader_to_memcpy=median_ratio(loads, copies),
            loader_to_gather=median_ratio(loads, limits),
            gap_ms=statistics.median(gaps) * 1e3,
            longest_gap_ms=max(gaps) * 1e3,
            peak_memory_growth_mb=(after - before) / 1024,
        )


if __name__ == "__main__":
    main()
