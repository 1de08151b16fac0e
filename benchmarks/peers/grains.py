"""Grain: ArrayRecord files with a record in each group, uncompressed.

No thread reads ahead (`num_threads=0`), as its documentation advises for data that is in memory. The dataset is
batched before it becomes an iterator, so that a worker process makes whole batches, and repeated without an end, so
that worker processes live on from epoch to epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.peers.workload import Batch, Epochs, Workload

_AHEAD = 2  # batches of each worker process, as a DataLoader's


@dataclass(frozen=True, slots=True)
class _Epochs:
    """Epochs of `batches` out of an iterator that has no end."""

    endless: Any
    batches: int

    def __iter__(self) -> Iterator[Batch]:
        for batch in itertools.islice(self.endless, self.batches):
            yield tuple(torch.from_numpy(column) for column in batch)


def prepare(folder: Path, work: Workload) -> None:
    for number, samples in enumerate(work.shards()):
        writer = ArrayRecordWriter(str(folder / f"{number:05d}.array_record"), "group_size:1,uncompressed")
        for i in samples:
            writer.write(work.record(i))
        writer.close()


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    source = grain.sources.ArrayRecordDataSource([str(path) for path in sorted(folder.iterdir())])
    batches = grain.MapDataset.source(source).seed(0).shuffle().map(work.unpack).batch(work.batch)
    loader = batches.repeat().to_iter_dataset(grain.ReadOptions(num_threads=0))
    if workers:
        loader = loader.mp_prefetch(grain.MultiprocessingOptions(workers, per_worker_buffer_size=_AHEAD))
    with closing(iter(loader)) as endless:
        yield _Epochs(endless, len(batches))
