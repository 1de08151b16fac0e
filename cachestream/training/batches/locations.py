"""Locations of the samples of the coming batches, worked out ahead of their gathering.

A block takes dozens of numpy's calls, each of which gives the GIL away: in the thread that gathers they would hold up
every 64th batch of 256 samples for the time of a third of those batches, and longer beside a trainer that computes in
Python.
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

_BLOCK: Final = 65_536  # samples whose places are worked out at once: the cost of numpy's calls is shared
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class SampleLocations:
    """The samples of a rank's batches `first`, `first + 1`, ...: their shards' places in the snapshot and the rows
    there, int64 `[n]`, and where each batch begins and ends among them, int64 `[batches + 1]`.
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


def find_places(
    order: SampleOrder, plan: Plan, rank: int, maps: EpochMaps, first: int, stop: int
) -> SampleLocations:
    """The places of batches `first` to `stop` of rank number `rank`."""
    starts, stops = plan.spans(rank, first, stop)
    bounds = np.concatenate([[0], np.cumsum(stops - starts)])
    positions = np.repeat(starts - bounds[:-1], stops - starts) + np.arange(bounds[-1])
    shards, rows = maps.locate(order.at(positions))
    return SampleLocations(first, shards, rows, bounds)


class LocationsAhead:
    """The places of all batches of a rank, block by block: `executor` works on the next one from now on."""

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
        """Begin with the next block, if that has not been done; raises Cancelled when the executor is shut down.

        To be called when this thread is about to copy: numpy's short calls hardly let another thread have the GIL.
        """
        plan = self._plan
        if self._next is not None or self._first >= plan.num_batches:
            return
        stop = min(plan.num_batches, self._first + max(1, _BLOCK // plan.batch_size))
        try:
            self._next = self._executor.submit(
                find_places, self._order, plan, self._rank, self._maps, self._first, stop
            )
        except RuntimeError as error:  # shut down, and the loader with it
            raise Cancelled from error
        self._first = stop

    def __iter__(self) -> Iterator[SampleLocations]:
        """Raises Cancelled when the executor is shut down."""
        while self._next is not None:
            try:
                places = self._next.result(_TIMEOUT_S)
            except CancelledError as error:
                raise Cancelled from error
            self._next = None
            yield places
            self.work_ahead()
