"""The plain DataLoader over a memory-mapped array: item by item, or a batch at once by hand.

"batched, malloc kept": glibc keeps the memory of a batch instead of giving it back to the kernel each time, which
takes a page fault for every 4 KiB; what those who know set by `mallopt`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.peers.workload import Batch, Epochs, Workload

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class _Memmap(Dataset[Any]):
    def __init__(self, folder: Path, work: Workload) -> None:
        shape = (work.samples, work.length)
        values = np.memmap(folder / "values", work.dtype, "r+", shape=shape)
        self.columns = [torch.from_numpy(values)]
        if work.labelled:
            self.columns.append(torch.from_numpy(np.fromfile(folder / "labels", np.int64)))

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Batch:
        return tuple(column[index] for column in self.columns)


class Batched(_Memmap):
    def __getitem__(self, index: Any) -> Batch:
        where = torch.tensor(index)
        return tuple(column.index_select(0, where) for column in self.columns)


def prepare(folder: Path, work: Workload) -> None:
    with (folder / "values").open("wb") as file:
        for number in range(work.samples):
            file.write(work.sample(number)[0].tobytes())
    np.arange(work.samples).tofile(folder / "labels")


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    common = {"num_workers": workers, "persistent_workers": workers > 0}
    if option == "per item":
        yield DataLoader(_Memmap(folder, work), work.batch, shuffle=True, **common)  # type: ignore[arg-type]
        return
    if option == "batched, malloc kept":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    dataset = Batched(folder, work)
    sampler = BatchSampler(RandomSampler(dataset), work.batch, drop_last=False)
    yield DataLoader(dataset, batch_size=None, sampler=sampler, **common)  # type: ignore[arg-type]
