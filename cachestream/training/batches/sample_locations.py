"""The shard and the row of each sample of a rank's batches, worked out ahead.

An executor works them out in blocks. A block takes dozens of numpy calls, each of which releases the GIL. In
the gathering thread the blocks would delay every 64th batch of 256 samples by the time of a
third of those batches, and by more beside a trainer that computes in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.training.batches.mapped_shards import EpochMaps
    from cachestream.training.plan import Plan, SampleOrder

_BLOCK: Final = 65_536  # samples located at once, to share the cost of numpy calls


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
        bounds = self.bounds[start : stop + 1] - low
        return SampleLocations(self.first + start, self.shards[low:high], self.rows[low:high], bounds)


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
    """The locations of all batches of a rank, in blocks; `executor` computes the next one while one is used.

    The threads of the executor run already. Raises Cancelled when it is shut down.
    """

    def __init__(
        self, order: SampleOrder, plan: Plan, rank: int, maps: EpochMaps, executor: Executor
    ) -> None:
        self._find = functools.partial(find_locations, order, plan, rank, maps)
        step = max(1, _BLOCK // plan.batch_size)
        self._blocks = pairwise([*range(0, plan.num_batches, step), plan.num_batches])
        self._executor = executor
        self._next = self._start_next()

    def _start_next(self) -> Future[SampleLocations] | None:
        block = next(self._blocks, None)
        try:
            return None if block is None else self._executor.submit(self._find, *block)
        except RuntimeError as error:  # shut down, and the loader with it
            raise Cancelled from error

    def __iter__(self) -> Iterator[SampleLocations]:
        """Yield the blocks in order. Without a deadline: only computation is waited for, and a process that
        was stopped for minutes must go on. The trainer's wait for a batch has a deadline.
        """
        while self._next is not None:
            try:
                locations = self._next.result()
            except CancelledError as error:
                raise Cancelled from error
            self._next = self._start_next()
            yield locations
