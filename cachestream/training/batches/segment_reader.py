"""The batches of a prepared segment for this rank, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cachestream.errors import CorruptShardError
from cachestream.schema import IntArray
from cachestream.training.batches.buffers import BufferPool
from cachestream.training.batches.columns import Columns
from cachestream.training.batches.feed import Feed, Flow
from cachestream.training.batches.gather import Copy, Gatherer
from cachestream.training.batches.locations import LocationsAhead, SampleLocations
from cachestream.training.batches.readahead import ReadAhead
from cachestream.training.segment import Segment

OnDamage = Callable[[int, CorruptShardError], None]


class Gathered(NamedTuple):
    """A few batches of this rank from number `first` on: for each its fields, its number of samples, and the
    number of samples that were left out because their shard is damaged.

    `copy` must run before the fields are used.
    """

    first: int
    batches: list[Columns]
    copy: Copy
    sizes: list[int]
    skipped: list[int]


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
    try:
        for block in locations:
            for part in reader.mapped(block):
                if feed is not None and segment.maps.all_mapped:
                    flow = Flow(feed, segment, part, ahead)
                    locations.work_ahead()
                    yield flow
                    continue
                for gathered in reader.gather(part, ahead):
                    locations.work_ahead()
                    yield gathered
    finally:
        ahead.close()


class _SegmentReader:
    """Gathers one segment, without the samples of damaged shards."""

    def __init__(
        self, segment: Segment, pool: BufferPool, on_damage: OnDamage, settle: Callable[[], None]
    ) -> None:
        snapshot, batch_size = segment.snapshot, segment.plan.batch_size
        self._most = segment.batches_together
        self._together = 1  # the first batch must not wait for others
        self._maps = segment.maps
        self._gatherer = Gatherer(
            segment.maps, pool, self._most * batch_size, segment.with_keys, segment.ragged
        )
        self._shard_ids = snapshot.shard_ids
        self._damaged = np.zeros(snapshot.num_shards, np.bool_)
        self._on_damage = on_damage
        self._settle = settle

    def mapped(self, block: SampleLocations) -> Iterator[SampleLocations]:
        """Yield `block` in parts whose shards are mapped or damaged. While shards are not mapped, a part is
        one batch, since the first batch must not wait for all shards.
        """
        start = 0
        while start < len(block):
            stop = len(block) if self._maps.all_mapped else start + 1
            part = block.part(start, stop)
            if not self._maps.all_mapped:
                self._open(part.shards)
            yield part
            start = stop

    def _open(self, shards: IntArray) -> None:
        for position, error in self._maps.open(shards[~self._damaged[shards]], self._settle):
            self._damaged[position] = True
            self._on_damage(int(self._shard_ids[position]), error)

    def gather(self, part: SampleLocations, ahead: ReadAhead) -> Iterator[Gathered]:
        """Yield the batches of `part`, a few small ones at a time."""
        shards, rows, bounds = part.shards, part.rows, part.bounds
        skipped = [0] * len(part)
        sound = ~self._damaged[shards]
        if not sound.all():
            shards, rows, bounds, skipped = _without(shards, rows, bounds, sound)
        start, ends = 0, bounds.tolist()
        while start < len(part):
            stop = min(start + self._together, len(part))
            for number in range(part.first + start, part.first + stop):
                ahead.reach(number)
            here = ends[start : stop + 1]
            yield Gathered(
                part.first + start,
                *self._gatherer.begin(shards, rows, here),
                [last - first for first, last in pairwise(here)],
                skipped[start:stop],
            )
            start, self._together = stop, min(self._most, 4 * self._together)


def _without(
    shards: IntArray, rows: IntArray, bounds: IntArray, sound: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[IntArray, IntArray, IntArray, list[int]]:
    """Return the samples that are `sound`, the bounds of the batches among them, and the number that each
    batch lost.
    """
    kept = np.concatenate([[0], np.cumsum(sound)])[bounds]
    return shards[sound], rows[sound], kept, (np.diff(bounds) - np.diff(kept)).tolist()
