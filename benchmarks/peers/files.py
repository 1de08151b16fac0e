"""The plain DataLoader over a file a sample, read whole into an array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.workload import Epochs, Workload


class _Files(Dataset[Any]):
    def __init__(self, folder: Path, work: Workload) -> None:
        self.folder = str(folder)
        self.work = work

    def __len__(self) -> int:
        return self.work.samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.work.unpack(np.fromfile(f"{self.folder}/{index:06d}", np.uint8).data)


def prepare(folder: Path, work: Workload) -> None:
    for number in range(work.samples):
        (folder / f"{number:06d}").write_bytes(work.record(number))


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    yield DataLoader(
        _Files(folder, work),
        batch_size=work.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=work.stack,
    )
