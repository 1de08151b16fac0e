"""LitData: chunks of 64 MB made by `optimize`, in a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import litdata
import torch

from benchmarks.peers.workload import Epochs, Workload


def _sample(number: int, work: Workload) -> tuple[Any, ...]:
    values, *label = work.sample(number)
    return (torch.from_numpy(values), *label)


def prepare(folder: Path, work: Workload) -> None:
    litdata.optimize(
        partial(_sample, work=work), list(range(work.samples)), str(folder), chunk_bytes="64MB", num_workers=2
    )


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    dataset = litdata.StreamingDataset(
        str(folder), shuffle=True, drop_last=False, batch_decode=option or "auto"
    )
    yield litdata.StreamingDataLoader(
        dataset,
        batch_size=work.batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=work.stack,
    )
