"""Read-ahead of the coming batches from the disk, in their known order.

A page fault reads one row, or a part of it, and waits: 0.5 GB/s from disks that reach 4. Advising the kernel
takes time too, so it is done only while pages are missing: if some of the first batch are, or after a page
fault that read from the disk, until all pages advised are found in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from cachestream.linux import ask_for_all
from cachestream.schema import IntArray
from cachestream.training.batches.mapped_shards import fixed_row_bytes
from cachestream.training.batches.page_cache import Coldness, addresses_of
from cachestream.training.plan import LocalOrder, SampleOrder, TailOrder
from cachestream.training.segment import Segment

AHEAD_BYTES: Final = 64 << 20  # at the least two batches
_MOST_BATCHES: Final = 64
_STEP_BYTES: Final = 1 << 20  # small batches are looked at a few at a time
_SAMPLES: Final = 4  # pages looked at in each step
_FIRST_SAMPLES: Final = 16
_PENDING: Final = 2
_NOTHING: Final[IntArray] = np.empty(0, np.int64)


class ReadAhead:
    """Reads ahead for one rank's batches of `segment`, in a thread of its own. `reach` and `close` are called
    by one thread at a time.
    """

    def __init__(
        self,
        segment: Segment,
        coldness: Coldness | None = None,
        ask: Callable[[IntArray, IntArray], None] = ask_for_all,
    ) -> None:
        self._segment = segment
        self._ask = ask
        self._coldness = coldness or Coldness()
        self._row_bytes = {f.name: fixed_row_bytes(f) for f in segment.snapshot.schema.fields}
        batch_bytes = max(1, segment.batch_bytes)
        self._ahead = max(2, min(_MOST_BATCHES, AHEAD_BYTES // batch_bytes))
        self._every = max(1, min(_MOST_BATCHES // 4, _STEP_BYTES // batch_bytes))
        self._order, self._offset = _innermost(segment.order)
        self._asked_to = 0  # batches, or positions in the order of runs
        self._most_positions = max(1, AHEAD_BYTES * segment.plan.batch_size // batch_bytes)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def reach(self, batch: int) -> None:
        """Read ahead from batch `batch` on, which is gathered next."""
        if batch % self._every or not self._coldness.may_miss_pages():
            return
        self._pending = [future for future in self._pending if not future.done()]
        if len(self._pending) >= _PENDING:
            return
        if self._coldness.is_first:
            self._coldness.check(self._first_of(batch), _FIRST_SAMPLES)
            if not self._coldness.may_miss_pages():
                return
        starts, stops = self._coming(batch)
        if not len(starts):
            return
        self._coldness.check(starts, _SAMPLES)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "cachestream-ahead")
        self._pending.append(self._thread.submit(self._ask, starts, stops))

    def _first_of(self, batch: int) -> IntArray:
        """Return the addresses of the first samples of `batch`."""
        start, stop = self._segment.plan.span(self._segment.rank, batch)
        samples = self._segment.order.at(np.arange(start, min(stop, start + _FIRST_SAMPLES), dtype=np.int64))
        return self._addresses(samples, samples + 1)[0]

    def close(self) -> None:
        """End the thread, without waiting for it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)

    def _coming(self, batch: int) -> tuple[IntArray, IntArray]:
        """Return the address ranges to read now, in the order of need."""
        plan, rank = self._segment.plan, self._segment.rank
        if isinstance(self._order, LocalOrder):
            first = max(self._order.needs(self._offset + plan.position(batch))[0], self._asked_to)
            upcoming = min(batch + 1 + self._every, plan.num_batches)
            last = self._order.needs(self._offset + plan.position(upcoming))[1]
            self._asked_to = max(first, min(last, first + self._most_positions))
            return self._addresses(*self._order.stretches(first, self._asked_to))
        step = max(1, self._every // 2)
        ahead = (
            step if self._coldness.is_first else self._ahead
        )  # to work out all takes long, perhaps for nothing
        first, last = max(batch, self._asked_to), min(batch + 1 + ahead, plan.num_batches)
        self._asked_to = last
        found = []
        for begin in range(first, last, step):
            spans = [plan.span(rank, i) for i in range(begin, min(begin + step, last))]
            positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
            samples = self._segment.order.at(positions)
            found.append(self._addresses(samples, samples + 1))
        if not found:
            return _NOTHING, _NOTHING
        return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])

    def _addresses(self, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
        return addresses_of(self._segment.maps, self._row_bytes, starts, stops)


def _innermost(order: SampleOrder) -> tuple[SampleOrder, int]:
    """Return the order that `order` is a part of, and the position where that part begins."""
    offset = 0
    while isinstance(order, TailOrder):
        offset += order.start
        order = order.order
    return order, offset
