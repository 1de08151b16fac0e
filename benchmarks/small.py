"""Many small samples: `python -m benchmarks.small`.

60,000 samples of 784 bytes with a label, shuffled, batches of 256, warm; beside the same gather into one reused
buffer, in one process. Every sample of an epoch is checked.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import torch

import cachestream as cs
from benchmarks.measure import emit, scratch

SAMPLES = 60_000
ROW = 784
BATCH = 256
EPOCHS = 15


class Digits:
    """Rows of bytes and a label that tells which one it is."""

    fingerprint = "digits"
    num_units = SAMPLES // 1000

    def read(self, unit: int, rng: np.random.Generator) -> object:
        for number in range(1000 * unit, 1000 * (unit + 1)):
            yield str(number), (np.full(ROW, number % 251, np.uint8), number)


def fill(folder: Path) -> cs.Cache:
    cache = cs.Cache(folder, size_limit="1GB")
    with cs.start_worker(cache, Digits(), num_workers=2) as worker:
        worker.wait(timeout_s=120)
    return cache


def check(loader: cs.EpochLoader) -> None:
    seen = []
    for rows, numbers in loader:
        assert torch.equal(rows[:, 0].long(), numbers % 251)
        assert torch.equal(rows[:, -1].long(), numbers % 251)
        seen.append(numbers)
    assert len(torch.unique(torch.cat(seen))) == SAMPLES // BATCH * BATCH


def gather_limit() -> float:
    """Samples a second of the same gather from one array in memory into reused buffers."""
    # Written to: pages that never were are all the one page of zeros, which stays in the nearest cache.
    rows = torch.randint(0, 251, (SAMPLES, ROW), dtype=torch.uint8)
    labels = torch.arange(SAMPLES)
    rows_out, labels_out = torch.empty(BATCH, ROW, dtype=torch.uint8), torch.empty(BATCH, dtype=torch.int64)
    order = torch.randperm(SAMPLES)[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)
    rates = []
    for _ in range(9):
        begun_s = time.perf_counter()
        for index in order:
            torch.index_select(rows, 0, index, out=rows_out)
            torch.index_select(labels, 0, index, out=labels_out)
        rates.append(order.numel() / (time.perf_counter() - begun_s))
    return statistics.median(rates)


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = fill(folder / "cache")
        limit = gather_limit()
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            check(loader)
            rates = []
            for _ in range(EPOCHS):
                begun_s = time.perf_counter()
                batches = sum(1 for _ in loader)
                rates.append(batches * BATCH / (time.perf_counter() - begun_s))
    rate = statistics.median(rates)
    emit(gather_samples_per_s=limit, loader_samples_per_s=rate, loader_to_gather=rate / limit)


if __name__ == "__main__":
    main()
