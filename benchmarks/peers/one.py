"""One peer in a process of its own: `python -m benchmarks.peers.one prepare|measure MODULE WORKLOAD SCALE FOLDER …`.

`measure` goes on with the number of worker processes and the peer's option; it verifies every value of a first
epoch and the numbers of the samples of every later one, and emits samples a second, the median of its epochs.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Final, cast

import torch

from benchmarks.measure import emit, memcpy_gb_per_s
from benchmarks.peers.workload import Epochs, Peer, Workload, scaled

__all__ = ["epoch_rates"]

LEAST_EPOCHS: Final = 2
MOST_EPOCHS: Final = 9
ENOUGH_S: Final = 1.5


def _check_epoch(epochs: Epochs, work: Workload) -> None:
    """Every value of an epoch; keeps no batch, since some loaders wait for the memory of what they delivered."""
    ids: list[torch.Tensor] = []
    for batch in epochs:
        work.check(batch)
        ids.append(work.ids(batch))
    work.check_epoch(ids)


def epoch_rates(epochs: Epochs, work: Workload, enough_s: float = ENOUGH_S) -> list[float]:
    """Samples a second of each epoch after the first, from asking for it to its last batch; all verified."""
    _check_epoch(epochs, work)
    rates: list[float] = []
    started_s = time.perf_counter()
    while len(rates) < LEAST_EPOCHS or (
        len(rates) < MOST_EPOCHS and time.perf_counter() - started_s < enough_s
    ):
        begun_s = time.perf_counter()
        ids = [work.ids(batch) for batch in epochs]
        rates.append(work.samples / (time.perf_counter() - begun_s))
        work.check_epoch(ids)
    return rates


def main() -> None:
    warnings.simplefilter("ignore")  # the peers' own, and torch's about arrays that are read-only
    logging.disable(logging.WARNING)
    task, module, name, scale, folder, *rest = sys.argv[1:]
    work, place = scaled(name, float(scale)), Path(folder)
    if module == "memcpy":
        emit(samples_per_s=memcpy_gb_per_s() * 1e9 / work.sample_bytes)
        return
    peer = cast("Peer", import_module(f"benchmarks.peers.{module}"))
    if task == "prepare":
        place.mkdir(parents=True)
        peer.prepare(place, work)
        emit()
        return
    workers, option = rest
    with peer.deliver(place, work, int(workers), option) as epochs:
        emit(samples_per_s=statistics.median(epoch_rates(epochs, work)))


if __name__ == "__main__":
    main()
