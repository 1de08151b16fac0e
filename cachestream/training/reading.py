"""A prepared segment, read in order: from the plan's positions to the batches of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from cachestream.errors import CorruptShardError
from cachestream.model import IntArray
from cachestream.training.ahead import ReadAhead
from cachestream.training.buffers import BufferPool
from cachestream.training.epoch import Segment
from cachestream.training.gather import Columns, Copy, Gatherer

__all__ = ["Gathered", "read_batches"]

_BLOCK: Final = 16_384  # samples whose places are worked out at once: the cost of numpy's calls is shared

OnDamage = Callable[[int, CorruptShardError], None]


class Gathered(NamedTuple):
    """One batch: its fields, how many samples it has, and how many it lacks because their shard is damaged.

    It is whole when all `copies` have run.
    """

    columns: Columns
    copies: list[Copy]
    size: int
    skipped: int

    @property
    def waiting_bytes(self) -> int:
        """How much is still to be copied."""
        return sum(copy.out.nbytes for copy in self.copies)


def read_batches(
    segment: Segment, pool: BufferPool, on_damage: OnDamage, settle: Callable[[], None]
) -> Iterator[Gathered]:
    """The batches of `segment` for this rank, in order.

    `on_damage(shard id, error)` is told of each damaged shard found on the way; its samples are left out.
    `settle()` returns when no copies of earlier batches run any more: it is called before maps are dropped.
    """
    ahead = ReadAhead(segment)
    try:
        yield from _read(segment, pool, on_damage, settle, ahead)
    finally:
        ahead.close()


def _read(
    segment: Segment, pool: BufferPool, on_damage: OnDamage, settle: Callable[[], None], ahead: ReadAhead
) -> Iterator[Gathered]:
    plan, maps = segment.plan, segment.maps
    gatherer = Gatherer(maps, pool, plan.batch_size, segment.with_keys, segment.ragged)
    damaged = np.zeros(segment.snapshot.num_shards, np.bool_)
    at_once = max(1, _BLOCK // plan.batch_size)
    first = 0
    while first < plan.num_batches:
        # Where shards are still to be opened, one batch at a time: the first must not wait for all.
        count = min(at_once if maps.all_mapped else 1, plan.num_batches - first)
        spans = [plan.span(segment.place, first + i) for i in range(count)]
        positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
        shards, rows = maps.locate(segment.order.at(positions))
        if not maps.all_mapped:
            for place, error in maps.open(shards[~damaged[shards]], settle):
                damaged[place] = True
                on_damage(int(segment.snapshot.shard_ids[place]), error)
        ends = np.cumsum([stop - start for start, stop in spans])
        sound = ~damaged[shards]
        skipped = np.zeros(count, np.int64)
        if not sound.all():
            shards, rows, ends, skipped = _without(shards, rows, ends, sound)
        block = gatherer.block(shards, rows)
        start = 0
        for number, (end, lacking) in enumerate(zip(ends.tolist(), skipped.tolist(), strict=True), first):
            ahead.reach(number)
            yield Gathered(*gatherer.begin(block, start, end), end - start, lacking)
            start = end
        first += count


def _without(
    shards: IntArray, rows: IntArray, ends: IntArray, sound: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """The samples that are sound, where their batches end now, and how many each batch has lost."""
    kept = np.concatenate([[0], np.cumsum(sound)])[ends]
    sizes_before, sizes = np.diff(ends, prepend=0), np.diff(kept, prepend=0)
    return shards[sound], rows[sound], kept, sizes_before - sizes
