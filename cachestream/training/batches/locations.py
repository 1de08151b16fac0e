"""Locations of the samples of the coming batches, worked out ahead of their gathering.

A block takes dozens of numpy calls, each of which releases the GIL. In the gathering thread they would delay
every 64th batch of 256 samples by the time of a third of those batches, and by more beside a trainer that
computes in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestream.schema import IntArray
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.plan import Plan, SampleOrder
from cachestream.training.rendezvous import Cancelled

_BLOCK: Final = 65_536  # samples located at once, to share the cost of numpy calls
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class SampleLocations:
    """Locations of the samples of a rank's batches `first`, `first + 1`, ...

    `shards` are the shards' positions in the snapshot and `rows` the rows in them, both int64 `[n]`; batch
    `first + i` has samples `bounds[i]` to `bounds[i + 1]` of them, int64 `[batches + 1]`.
    """

    first: int
    shards: IntArray
    rows: IntArray
    bounds: IntArray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, start: int, stop: int) -> SampleLocations:
        """Batches `start` to `stop` of these."""
        low, high = self.bounds[start], self.bounds[stop]
        return SampleLocations(
            self.first + start,
            self.shards[low:high],
            self.rows[low:high],
            self.bounds[start : stop + 1] - low,
        )


def find_locations(
    order: SampleOrder, plan: Plan, rank: int, maps: EpochMaps, first: int, stop: int
) -> SampleLocations:
    """Return the locations of batches `first` to `stop` of rank number `rank`."""
    starts, stops = plan.spans(rank, first, stop)
    bounds = np.concatenate([[0], np.cumsum(stops - starts)])
    positions = np.repeat(starts - bounds[:-1], stops - starts) + np.arange(bounds[-1])
    shards, rows = maps.locate(order.at(positions))
    return SampleLocations(first, shards, rows, bounds)


class LocationsAhead:
    """The locations of all batches of a rank, in blocks; `executor` computes the next block ahead."""

    def __init__(
        self,
        order: SampleOrder,
        plan: Plan,
        rank: int,
        maps: EpochMaps,
        executor: Executor,
    ) -> None:
        self._order = order
        self._plan = plan
        self._rank = rank
        self._maps = maps
        self._executor = executor
        self._first = 0
        self._next: Future[SampleLocations] | None = None
        self.work_ahead()

    def work_ahead(self) -> None:
        """Start to compute the next block, unless that has begun; raises Cancelled when the executor is shut
        down.

        Call it when this thread is about to copy, and so releases the GIL for long.
        """
        plan = self._plan
        if self._next is not None or self._first >= plan.num_batches:
            return
        stop = min(plan.num_batches, self._first + max(1, _BLOCK // plan.batch_size))
        try:
            self._next = self._executor.submit(
                find_locations, self._order, plan, self._rank, self._maps, self._first, stop
            )
        except RuntimeError as error:  # shut down, and the loader with it
            raise Cancelled from error
        self._first = stop

    def __iter__(self) -> Iterator[SampleLocations]:
        """Yield the blocks in order; raises Cancelled when the executor is shut down."""
        while self._next is not None:
            try:
                locations = self._next.result(_TIMEOUT_S)
            except CancelledError as error:
                raise Cancelled from error
            self._next = None
            yield locations
            self.work_ahead()
