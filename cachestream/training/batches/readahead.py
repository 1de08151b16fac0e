"""Read-ahead of samples from the disk, while their pages are not in memory.

A page fault reads one row, or a part of it, and waits: 0.5 GB/s from disks that reach 4. Advising the kernel
takes time too, so it is done only while pages are missing: if some of the first ones are, or after a page
fault that read from the disk, until all pages advised are found in memory.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.linux import ask_for_all, count_cached
from cachestream.training.batches.mapped_shards import ChangedShardError, find_locations
from cachestream.training.plan import LocalOrder, TailOrder

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.training.batches.mapped_shards import EpochMaps
    from cachestream.training.plan import SampleOrder
    from cachestream.training.position import Segment

# --- pages that are missing

_ENOUGH: Final = 256  # consecutive pages found in memory after which all are taken to be there
_FIRST_PAGES: Final = 16  # that are looked at in the first step
_PAGES: Final = 4  # that are looked at in each later step


def count_faults() -> int:
    """Return the number of page faults of this process that read from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class MissingPages:
    """Estimates whether pages are missing: at first, and from a page fault that read from the disk until
    `_ENOUGH` consecutive pages were found in memory. `is_first` until the first pages were noted.
    """

    def __init__(self, faults: Callable[[], int] = count_faults) -> None:
        self._faults = faults
        self._last_faults = -1
        self.is_first = True
        self._pages_left = 1

    def may_miss_pages(self) -> bool:
        """Return whether pages may be missing now."""
        before, self._last_faults = self._last_faults, self._faults()
        if 0 <= before < self._last_faults:
            self._pages_left = _ENOUGH
        return self._pages_left > 0

    def note(self, pages: int, cached: int) -> None:
        """Note that `cached` of `pages` that will be needed are in memory."""
        self.is_first = False
        self._pages_left = _ENOUGH if cached < pages else max(0, self._pages_left - pages)

    def check(self, addresses: IntArray, most: int) -> bool:
        """Note which of up to `most` of `addresses`, int64 `[n]`, are in memory; return `may_miss_pages`."""
        some = addresses[:: -(-len(addresses) // most) or 1]
        self.note(len(some), count_cached(some))
        return self.may_miss_pages()


# --- addresses of samples

_NOTHING: Final = np.empty(0, np.int64)


def addresses_of(
    maps: EpochMaps, shards: IntArray, rows: IntArray, counts: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """Return the address ranges of all fields of rows `rows` of `shards`, or of `counts` rows each, as first
    bytes and ends, as far as the shards are mapped; ranges that touch are merged.
    """
    mapped = maps.mapped[shards]
    shards, rows, counts = shards[mapped], rows[mapped], None if counts is None else counts[mapped]
    spans = [maps.fields[name].spans(shards, rows, counts) for name in maps.snapshot.schema.names]
    begins = np.concatenate([_NOTHING, *(span.addresses for span in spans)])
    return merged(begins, begins + np.concatenate([_NOTHING, *(span.lengths for span in spans)]))


def runs_of(maps: EpochMaps, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Divide ranges of samples into runs within one shard: shard, first row and number of rows."""
    parts: list[tuple[IntArray, IntArray, IntArray]] = []
    while len(starts) or not parts:
        shards, rows = maps.locate(starts)
        ends = np.minimum(stops, maps.starts[shards + 1])
        last = maps.locate(ends - 1)[1]  # rows of another split may lie in between
        parts.append((shards, rows, last + 1 - rows))
        more = ends < stops
        starts, stops = ends[more], stops[more]
    shards, rows, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    return shards, rows, counts


def merged(begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return the ranges from `begins` up to `ends`, sorted, merged where they touch, without empty ones."""
    some = begins < ends
    order = np.argsort(begins[some], kind="stable")
    begins, ends = begins[some][order], np.maximum.accumulate(ends[some][order]) if some.any() else ends[some]
    fresh = np.append(True, begins[1:] > ends[:-1])[: len(begins)]
    last = np.append(fresh[1:], True)[: len(begins)]
    return begins[fresh], ends[last]


# --- reading ahead


class ReadTogether:
    """Reads a batch's samples together, where it is not known in advance. Used by one thread at a time."""

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps
        self._missing = MissingPages()

    def reach(self, shards: IntArray, rows: IntArray) -> None:
        """Read ahead samples `rows` of `shards`, both int64 `[n]`, which are mapped and gathered next."""
        if not len(rows) or not self._missing.may_miss_pages():
            return
        starts, stops = addresses_of(self._maps, shards, rows)
        if self._missing.check(starts, _FIRST_PAGES):
            ask_for_all(starts, stops)


AHEAD_BYTES: Final = 64 << 20  # at the least two batches
_MOST_BATCHES: Final = 64
_STEP_BYTES: Final = 1 << 20  # small batches are looked at a few at a time
_PENDING: Final = 2


class ReadAhead:
    """Reads ahead for one rank's batches of `segment`, in a thread that ends when this object is freed.

    `reach` is for each batch whose number is a multiple of `every`. Thread-safe.
    """

    def __init__(
        self,
        segment: Segment,
        missing: MissingPages | None = None,
        ask: Callable[[IntArray, IntArray], None] = ask_for_all,
    ) -> None:
        self._segment = segment
        self._ask = ask
        self._missing = missing or MissingPages()
        batch_bytes = max(1, segment.batch_bytes)
        self._ahead = max(2, min(_MOST_BATCHES, AHEAD_BYTES // batch_bytes))
        self.every = max(1, min(_MOST_BATCHES // 4, _STEP_BYTES // batch_bytes))
        self._order, self._offset = _innermost(segment.order)
        self._asked_to = 0  # batches, or positions in the order of runs
        self._most_positions = max(1, AHEAD_BYTES * segment.plan.batch_size // batch_bytes)
        self._thread = ThreadPoolExecutor(1, "cachestream-ahead")
        self._pending: list[Future[None]] = []
        self._reaching = threading.Lock()

    def reach(self, batch: int) -> None:
        """Read ahead from batch `batch` on, which is gathered next."""
        if not self._reaching.acquire(blocking=False):
            return  # the thread that is in here looks as far ahead
        try:
            if self._missing.may_miss_pages():
                with suppress(ChangedShardError):  # whoever gathers its samples raises it
                    self._reach(batch)
        finally:
            self._reaching.release()

    def _reach(self, batch: int) -> None:
        self._pending = [future for future in self._pending if not future.done()]
        if len(self._pending) >= _PENDING:
            return
        # At first the pages of a few batches are looked at: to work out more takes long, perhaps for nothing.
        for most in (_FIRST_PAGES, _PAGES) if self._missing.is_first else (_PAGES,):
            starts, stops = self._coming(batch)
            if not len(starts) or not self._missing.check(starts, most):
                return
            self._pending.append(self._thread.submit(self._ask, starts, stops))

    def _coming(self, batch: int) -> tuple[IntArray, IntArray]:
        """Return the address ranges to read now, in the order of need."""
        segment, plan = self._segment, self._segment.plan
        if isinstance(self._order, LocalOrder):
            first = max(self._order.needs(self._offset + plan.position(batch))[0], self._asked_to)
            upcoming = min(batch + 1 + self.every, plan.num_batches)
            last = self._order.needs(self._offset + plan.position(upcoming))[1]
            self._asked_to = max(first, min(last, first + self._most_positions))
            runs = runs_of(segment.maps, *self._order.stretches(first, self._asked_to))
            return addresses_of(segment.maps, *runs)
        step = max(1, self.every // 2)
        ahead = step if self._missing.is_first else self._ahead
        first, self._asked_to = max(batch, self._asked_to), min(batch + 1 + ahead, plan.num_batches)
        ranges = [(_NOTHING, _NOTHING)]
        for begin in range(first, self._asked_to, step):
            stop = min(begin + step, self._asked_to)
            found = find_locations(segment.order, plan, segment.rank, segment.maps, begin, stop)
            ranges.append(addresses_of(segment.maps, found.shards, found.rows))
        starts, stops = (np.concatenate(sides) for sides in zip(*ranges, strict=True))
        return starts, stops


def _innermost(order: SampleOrder) -> tuple[SampleOrder, int]:
    """Return the order that `order` is a part of, and the position where that part begins."""
    offset = 0
    while isinstance(order, TailOrder):
        offset += order.start
        order = order.order
    return order, offset
