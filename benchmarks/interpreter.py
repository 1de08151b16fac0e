"""Whether the trainer's own Python keeps its speed: `python -m benchmarks.interpreter`.

A loop in pure Python, alone and while the loader delivers 1 GB/s (batches of 8 MiB); the share of the speed that is
left, in alternation, median of the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import cachestream as cs
from benchmarks import warm
from benchmarks.measure import emit, scratch

PAIRS = 5
TURN_S = 1.0
BYTES_PER_S = 1e9


def spin(until_s: float) -> int:
    """Turns of a pure-Python loop until then."""
    turns = 0
    while time.perf_counter() < until_s:
        for _ in range(200):
            turns += 1
    return turns


def batches(loader: cs.EpochLoader) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = warm.fill(folder / "cache")
        with cs.EpochLoader(cache, batch_size=warm.BATCH) as loader:
            endless = batches(loader)
            for _ in range(warm.SAMPLES // warm.BATCH):
                next(endless)
            shares = []
            every_s = warm.BATCH_BYTES / BYTES_PER_S
            for _ in range(PAIRS):
                began_s = time.perf_counter()
                alone = spin(began_s + TURN_S) / (time.perf_counter() - began_s)
                began_s, turns, taken = time.perf_counter(), 0, 0
                while time.perf_counter() - began_s < TURN_S:
                    batch = next(endless)
                    taken += 1
                    turns += spin(began_s + taken * every_s)
                    del batch
                shares.append(turns / (time.perf_counter() - began_s) / alone)
    emit(share_of_python_speed=statistics.median(shares), lowest_share=min(shares))


if __name__ == "__main__":
    main()
