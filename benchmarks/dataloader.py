"""A snapshot under torch's DataLoader, in turns with the fastest of the peers: `python -m benchmarks.dataloader [WORKERS…]`.

Which is a memory-mapped array that is batched by hand (see benchmarks.peers.memmap), under the same DataLoader. Both are
warm and open at the same time; each delivery of a first epoch is verified. The medians of epochs that take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from typing import Final

from benchmarks.measure import emit, median_ratio, scratch
from benchmarks.peers import memmap, ours
from benchmarks.peers.workload import WORKLOADS, Epochs, Workload

TURNS: Final = 9


def rate(epochs: Epochs, work: Workload) -> float:
    """Samples a second of one epoch."""
    begun_s = time.perf_counter()
    delivered = sum(len(batch[0]) for batch in epochs)
    assert delivered == work.samples
    return delivered / (time.perf_counter() - begun_s)


def check(epochs: Epochs, work: Workload) -> None:
    batches = list(epochs)
    for batch in batches:
        work.check(batch)
    work.check_epoch([work.ids(batch) for batch in batches])


def main(workers: list[int]) -> None:
    warnings.simplefilter("ignore")  # torch's, about arrays that are read-only
    figures: dict[str, float] = {}
    for name, work in WORKLOADS.items():
        with scratch() as folder:
            for peer, place in ((ours, "ours"), (memmap, "memmap")):
                (folder / place).mkdir()
                peer.prepare(folder / place, work)
            for count in workers:
                with (
                    ours.deliver(folder / "ours", work, count, "DataLoader") as mine,
                    memmap.deliver(folder / "memmap", work, count, "batched") as theirs,
                ):
                    check(mine, work)
                    check(theirs, work)
                    rates = [(rate(mine, work), rate(theirs, work)) for _ in range(TURNS)]
                ours_per_s, theirs_per_s = zip(*rates, strict=True)
                figures[f"{name}_{count}_workers_samples_per_s"] = statistics.median(ours_per_s)
                figures[f"{name}_{count}_workers_memmap_samples_per_s"] = statistics.median(theirs_per_s)
                figures[f"{name}_{count}_workers_to_memmap"] = median_ratio(
                    list(ours_per_s), list(theirs_per_s)
                )
    emit(**figures)


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]] or [0, 1, 2])
