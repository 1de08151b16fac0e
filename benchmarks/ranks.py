"""Two DDP ranks, real processes: `python -m benchmarks.ranks`.

8192 samples of 128 KiB float32, shuffled, batches of 64 for each rank, warm. Each rank takes its batches of the same
epochs, begun together; the aggregate counts from the first batch of either to the last of both. In the same run, with
the same start: two processes that copy 8 MiB at a time, always to the same place, which the caches hold, and to as many
places in turn as a loader's batches lie in. Every batch of one epoch is checked: equal numbers of batches, no sample twice.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

import cachestream as cs
from benchmarks.measure import MEMCPY_BYTES, emit, scratch
from benchmarks.warm import BATCH, BATCH_BYTES, SAMPLES, fill

RANKS = 2
EPOCHS = 15
COPIES = 128
PLACES = 6  # four batches gathered ahead, one in the trainer's hands, one that it lets go


def copy_some(source: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> int:
    """Copy pieces of `source` to `targets` `[places, bytes of a piece]` in turn; returns the bytes copied."""
    pieces = len(source) // MEMCPY_BYTES
    for i in range(COPIES):
        start = i % pieces * MEMCPY_BYTES
        np.copyto(targets[i % len(targets)], source[start : start + MEMCPY_BYTES])
    return COPIES * MEMCPY_BYTES


def timed(work: Any) -> tuple[float, float, int]:
    """Begin and end of `work`, and the bytes that it moved; all ranks begin together."""
    torch.distributed.barrier()
    begun_s = time.monotonic()
    moved = work()
    return begun_s, time.monotonic(), moved


def epoch(loader: cs.EpochLoader) -> int:
    return sum(BATCH_BYTES for _ in loader)


def work(rank: int, folder: Path, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    source, targets = np.ones(128 << 20, np.uint8), np.zeros((PLACES, MEMCPY_BYTES), np.uint8)
    copy_some(source, targets)
    with cs.Cache(folder) as cache, cs.EpochLoader(cache, BATCH) as loader:
        seen = []
        for batch in loader:
            assert torch.equal(batch["x"][:, 0].long(), batch["i"])
            seen.append(batch["i"])
        copies, in_turn, epochs = [], [], []
        for _ in range(EPOCHS):
            in_turn.append(timed(functools.partial(copy_some, source, targets)))
            copies.append(timed(functools.partial(copy_some, source, targets[:1])))
            epochs.append(timed(functools.partial(epoch, loader)))
        torch.distributed.barrier()
    results.put((rank, torch.cat(seen).tolist(), copies, in_turn, epochs))


def aggregate(of_ranks: list[tuple[float, float, int]]) -> float:
    """GB/s of all ranks together."""
    begun, ended, moved = zip(*of_ranks, strict=True)
    rate: float = sum(moved) / (max(ended) - min(begun)) / 1e9
    return rate


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with scratch() as folder:
        fill(folder / "cache").close()
        results = spawn.Queue()
        ranks = [
            spawn.Process(target=work, args=(rank, folder / "cache", str(folder / "store"), results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        told = sorted(results.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join(60)
    seen = [set(of_rank[1]) for of_rank in told]
    assert len({len(of_rank[1]) for of_rank in told}) == 1
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == SAMPLES
    copies, in_turn, loads = (
        [aggregate(list(pair)) for pair in zip(*(of_rank[kind] for of_rank in told), strict=True)]
        for kind in (2, 3, 4)
    )
    ratios = [load / copy for load, copy in zip(loads, copies, strict=True)]
    emit(
        two_processes_memcpy_gb_per_s=statistics.median(copies),
        two_processes_memcpy_in_turn_gb_per_s=statistics.median(in_turn),
        two_ranks_gb_per_s=statistics.median(loads),
        ranks_to_memcpy=statistics.median(ratios),
        least_ranks_to_memcpy=min(ratios),
        ranks_to_memcpy_in_turn=statistics.median(
            load / copy for load, copy in zip(loads, in_turn, strict=True)
        ),
    )


if __name__ == "__main__":
    main()
