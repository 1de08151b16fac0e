"""cachestream: the EpochLoader, and the ordinary DataLoader over an EpochDataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

import cachestream as cs
from benchmarks.peers.workload import Epochs, Workload

_UNIT = 64  # samples a unit


@dataclass(frozen=True, slots=True)
class _Numbered:
    work: Workload

    @property
    def fingerprint(self) -> str:
        return f"numbered-{self.work.name}"

    @property
    def num_units(self) -> int:
        return -(-self.work.samples // _UNIT)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, object]]:
        for number in range(unit * _UNIT, min((unit + 1) * _UNIT, self.work.samples)):
            yield str(number), self.work.sample(number)


def prepare(folder: Path, work: Workload) -> None:
    cache = cs.Cache(folder, size_limit="16GB")
    worker = cs.start_worker(cache, _Numbered(work), num_workers=2)
    worker.wait(timeout_s=300)
    worker.stop()


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    cache = cs.Cache(folder)
    if option == "EpochLoader":
        with cs.EpochLoader(cache, batch_size=work.batch, drop_last=False) as loader:
            yield loader
        return
    with cache.snapshot() as dataset:
        yield DataLoader(
            dataset,
            batch_size=work.batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=cs.collate,
        )
