"""Warm batches on an accelerator: `python -m benchmarks accelerator`, on a machine that has one.

The samples of `benchmarks.warm`, in one process and in turns: one batch that lies in pinned memory, copied to the device
again and again (the limit of the bus); epochs of the EpochLoader with `device=`; and epochs of a DataLoader over the same
cache, with pinned memory and as many workers as the machine has processors, eight at most. Then a training step of products
of matrices, for as long as eight copies take: over one batch that stays on the device, which is a loop without a loader, and
over the batches of the loader. The rest is the time for which the device has nothing to do. Every batch of one epoch is
checked on the device against the samples' numbers.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

import cachestream as cs
from benchmarks import warm
from benchmarks.measure import emit, median_ratio, scratch
from cachestream.training.batches.transfer import accelerator

TURNS = 5
COPIES = warm.SAMPLES // warm.BATCH
SIDE = 1024  # of the matrices


def elapsed_s(work: Callable[[], object]) -> float:
    """The time until the device has done all of `work`."""
    torch.accelerator.synchronize()
    begun_s = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - begun_s


class Step:
    """A training step on the device: so many products of matrices, and the batch's sum."""

    def __init__(self, device: str, seconds: float) -> None:
        self._left = torch.randn(SIDE, SIDE, device=device)
        self._products = 1
        self._total = torch.zeros((), device=device)
        self._multiply(100)
        each_s = elapsed_s(lambda: self._multiply(100)) / 100
        self._products = max(1, round(seconds / each_s))

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._left, self._left)

    def __call__(self, batch: dict[str, Any]) -> None:
        self._total += batch["x"].sum()
        self._multiply(self._products)


def gb_per_s(seconds: float) -> float:
    return COPIES * warm.BATCH_BYTES / seconds / 1e9


def consume(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def main() -> None:
    device = accelerator()
    assert device is not None, "this machine has no accelerator"
    workers = min(8, len(os.sched_getaffinity(0)))
    with scratch() as folder:
        cache = warm.fill(folder / "cache")
        pinned = torch.rand(warm.BATCH, warm.FLOATS).pin_memory()
        held = pinned.to(device)

        def copy() -> None:
            for _ in range(COPIES):
                held.copy_(pinned, non_blocking=True)

        with (
            cache.snapshot() as dataset,
            cs.EpochLoader(cache, batch_size=warm.BATCH, device=device) as loader,
        ):
            theirs = DataLoader(
                dataset,
                batch_size=warm.BATCH,
                shuffle=True,
                num_workers=workers,
                pin_memory=True,
                persistent_workers=True,
            )

            def consume_theirs() -> None:
                for batch in theirs:
                    batch["x"].to(device, non_blocking=True)

            def train(batches: Iterable[dict[str, Any]]) -> None:
                for batch in batches:
                    step(batch)

            warm.check(loader)
            consume_theirs()
            step = Step(device, 8 * elapsed_s(copy) / COPIES)
            copies, loads, others, alone, trained = [], [], [], [], []
            for _ in range(TURNS):
                copies.append(gb_per_s(elapsed_s(copy)))
                consume(loader)  # some of the next epoch was gathered during the pause
                loads.append(gb_per_s(elapsed_s(lambda: consume(loader))))
                others.append(gb_per_s(elapsed_s(consume_theirs)))
                alone.append(elapsed_s(lambda: train(itertools.repeat({"x": held}, COPIES))))
                consume(loader)
                trained.append(elapsed_s(lambda: train(loader)))
    emit(
        copy_gb_per_s=statistics.median(copies),
        loader_gb_per_s=statistics.median(loads),
        dataloader_gb_per_s=statistics.median(others),
        loader_to_copy=median_ratio(loads, copies),
        loader_to_dataloader=median_ratio(loads, others),
        step_ms=statistics.median(alone) / COPIES * 1e3,
        share_of_training_speed=median_ratio(alone, trained),
    )


if __name__ == "__main__":
    main()
