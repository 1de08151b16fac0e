"""The limit: the same shuffled batches gathered from one array in memory into one buffer that is reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.peers.workload import Batch, Epochs, Workload


class _Gather:
    def __init__(self, work: Workload) -> None:
        self.batch = work.batch
        values = torch.tensor([work.value(i) for i in range(work.samples)])
        dtype: torch.dtype = getattr(torch, work.dtype)
        self.columns = [values.to(dtype)[:, None].expand(-1, work.length).contiguous()]
        if work.labelled:
            self.columns.append(torch.arange(work.samples))
        self.buffers = [torch.empty_like(column[: work.batch]) for column in self.columns]

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.columns[0]))
        for index in torch.tensor_split(order, tuple(range(self.batch, len(order), self.batch))):
            outs = [buffer[: len(index)] for buffer in self.buffers]
            for column, out in zip(self.columns, outs, strict=True):
                torch.index_select(column, 0, index, out=out)
            yield tuple(outs)


def prepare(folder: Path, work: Workload) -> None:
    """Nothing: it lives in memory."""


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    if option == "one thread":
        torch.set_num_threads(1)
    yield _Gather(work)
