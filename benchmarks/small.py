"""Many small samples: `python -m benchmarks.small`.

60,000 samples of 784 bytes with a label, shuffled, batches of 256, warm; beside the same gather into one reused
buffer, in one process and in turns: the first epoch of each turn is not counted, some of which was gathered during the
pause. Every sample of an epoch is checked.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import torch

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch

SAMPLES = 60_000
ROW = 784
BATCH = 256
TURNS = 15
EPOCHS = 5  # a turn


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


class Gather:
    """The same batches from one array in memory into reused buffers."""

    def __init__(self) -> None:
        # Written to: pages that never were are all the one page of zeros, which stays in the nearest cache.
        self._rows = torch.randint(0, 251, (SAMPLES, ROW), dtype=torch.uint8)
        self._labels = torch.arange(SAMPLES)
        self._rows_out = torch.empty(BATCH, ROW, dtype=torch.uint8)
        self._labels_out = torch.empty(BATCH, dtype=torch.int64)
        self._order = torch.randperm(SAMPLES)[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)

    def samples_per_s(self) -> float:
        begun_s = time.perf_counter()
        for index in self._order:
            torch.index_select(self._rows, 0, index, out=self._rows_out)
            torch.index_select(self._labels, 0, index, out=self._labels_out)
        return self._order.numel() / (time.perf_counter() - begun_s)


def epoch(loader: cs.EpochLoader) -> float:
    """Samples a second."""
    begun_s = time.perf_counter()
    batches = sum(1 for _ in loader)
    return batches * BATCH / (time.perf_counter() - begun_s)


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache, gather = fill(folder / "cache"), Gather()
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            check(loader)
            limits, rates = [], []
            for _ in range(TURNS):
                limits.append(statistics.median(gather.samples_per_s() for _ in range(EPOCHS)))
                rates.append(statistics.median([epoch(loader) for _ in range(EPOCHS)][1:]))
    emit(
        gather_samples_per_s=statistics.median(limits),
        loader_samples_per_s=statistics.median(rates),
        loader_to_gather=median_ratio(rates, limits),
    )


if __name__ == "__main__":
    main()
