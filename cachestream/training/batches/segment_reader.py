"""The batches of a prepared segment for this rank, in order: where their samples lie, and their fields.

Locations are worked out ahead, in blocks, by an executor. A block takes dozens of numpy calls, each of which
releases the GIL. In the gathering thread they would delay every 64th batch of 256 samples by the time of a
third of those batches, and by more beside a trainer that computes in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from cachestream.training.batches.feed import Feed, Flow
from cachestream.training.batches.gather import Columns, Gatherer
from cachestream.training.batches.readahead import ReadAhead
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.errors import CorruptShardError
    from cachestream.schema import IntArray
    from cachestream.training.batches.mapped_shards import EpochMaps
    from cachestream.training.batches.memory import BufferPool
    from cachestream.training.plan import Plan, SampleOrder
    from cachestream.training.segment import Segment

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


class Gathered(NamedTuple):
    """A few batches of this rank from number `first` on: for each its fields, its number of samples, and the
    number of samples that were left out because their shard is damaged.

    `copy` must be called before the fields are used.
    """

    first: int
    batches: list[Columns]
    copy: Callable[[], None]
    sizes: list[int]
    skipped: list[int]


OnDamage = Callable[[int, "CorruptShardError"], None]


def read_batches(
    segment: Segment,
    locations: LocationsAhead,
    pool: BufferPool,
    on_damage: OnDamage,
    settle: Callable[[], None],
    feed: Feed | None = None,
) -> Iterator[Gathered | Flow]:
    """Yield the batches of `segment` for this rank, in order, whose samples lie at `locations`. With `feed`,
    they are flows as soon as all shards are mapped.

    `on_damage(shard id, error)` is called for each damaged shard, whose samples are left out. `settle()` must
    return when no copies of earlier batches run any more: it is called before maps are dropped.
    """
    ahead, reader = ReadAhead(segment), _SegmentReader(segment, pool, on_damage, settle)
    for block in locations:
        for part in reader.mapped(block):
            if feed is not None and segment.maps.all_mapped:
                yield Flow(feed, segment, part, ahead)
            else:
                yield from reader.gather(part, ahead)


class _SegmentReader:
    """Gathers one segment, without the samples of damaged shards."""

    def __init__(
        self, segment: Segment, pool: BufferPool, on_damage: OnDamage, settle: Callable[[], None]
    ) -> None:
        self._most = segment.batches_together
        self._together = 1  # the first batch must not wait for others
        self._maps = segment.maps
        room = self._most * segment.plan.batch_size
        self._gatherer = Gatherer(segment.maps, pool, room, segment.with_keys, segment.ragged)
        self._shard_ids = segment.snapshot.shard_ids
        self._damaged = np.zeros(segment.snapshot.num_shards, np.bool_)
        self._on_damage = on_damage
        self._settle = settle

    def mapped(self, block: SampleLocations) -> Iterator[SampleLocations]:
        """Yield `block` in parts whose shards are mapped or damaged: batch by batch until all of them are."""
        start = 0
        while start < len(block):
            is_ready = self._maps.all_mapped
            stop = len(block) if is_ready else start + 1
            part = block.part(start, stop)
            if not is_ready:
                self._open(part.shards)
            yield part
            start = stop

    def _open(self, shards: IntArray) -> None:
        for position, error in self._maps.open(shards[~self._damaged[shards]], self._settle):
            self._damaged[position] = True
            self._on_damage(int(self._shard_ids[position]), error)

    def gather(self, part: SampleLocations, ahead: ReadAhead) -> Iterator[Gathered]:
        """Yield the batches of `part`, a few small ones at a time."""
        shards, rows, bounds, skipped = part.shards, part.rows, part.bounds, [0] * len(part)
        sound = ~self._damaged[shards]
        if not sound.all():
            shards, rows = shards[sound], rows[sound]
            bounds = np.concatenate([[0], np.cumsum(sound)])[bounds]  # of the batches among the sound samples
            skipped = (np.diff(part.bounds) - np.diff(bounds)).tolist()
        start, ends = 0, bounds.tolist()
        while start < len(part):
            stop = min(start + self._together, len(part))
            for number in range(part.first + start, part.first + stop):
                ahead.reach(number)
            here = ends[start : stop + 1]
            sizes = [last - first for first, last in pairwise(here)]
            # No variable refers to the batches: one more buffer in use makes the CPU cache less effective.
            yield Gathered(
                part.first + start, *self._gatherer.begin(shards, rows, here), sizes, skipped[start:stop]
            )
            start, self._together = stop, min(self._most, 4 * self._together)
