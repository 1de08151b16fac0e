"""Batches gathered ahead by threads that have no part in the interpreter: the trainer's own thread asks for them.

A thread of ours that gathers needs the GIL for each batch, and a trainer that computes in Python gives it up for as long
as that takes. So where all is simple (fields of one shape, all shards mapped, no transform, host memory) the trainer's
thread asks for the coming batches itself, whenever it takes one, which is a matter of microseconds; the bytes are moved
by threads of `_gather`, which never wait for the GIL.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cachestream.errors import EpochError
from cachestream.training.ahead import ReadAhead
from cachestream.training.batches import packed
from cachestream.training.buffers import BufferPool
from cachestream.training.columns import FixedColumns, are_fixed, new_queue
from cachestream.training.epoch import Segment
from cachestream.training.parcels import Delivery, Parcel
from cachestream.training.places import Places
from cachestream.training.transfer import Staged

if TYPE_CHECKING:
    from cachestream.training._gather import Queue

__all__ = ["Feed", "Flow", "can_flow", "check_process"]

_MOST_AHEAD: Final = 1024

_abandoned: Final[list[Any]] = []


def check_process(pid: int) -> None:
    """Raise EpochError in a child that was forked from process `pid`."""
    if pid != os.getpid():
        raise EpochError(
            f"this EpochLoader belongs to process {pid}: threads do not survive a fork; make one in each process"
        )


def can_flow(segment: Segment) -> bool:
    """Whether the batches of `segment` are of the simple kind."""
    simple = not segment.with_keys and isinstance(segment.ragged, str)
    return simple and are_fixed(segment.snapshot.schema)


class _Asked(NamedTuple):
    """A few batches that are gathered together, whole when the queue has done task `number`."""

    number: int
    batches: deque[Delivery]


class Flow(Parcel):
    """The batches of `places`, gathered as they are taken; all their shards are mapped, and stay so."""

    is_flow = True

    def __init__(self, feed: Feed, segment: Segment, places: Places, ahead: ReadAhead) -> None:
        super().__init__(segment)
        self.asked: deque[_Asked] = deque()
        # Small batches come a few at a time: what asking costs is shared. While some are taken, others are gathered.
        self._most_together = segment.batches_together
        self._together = self._most_together if places.first else 1  # the first is not to wait for others
        self.most_ahead = max(feed.prefetch, 2 * self._most_together if self._most_together > 1 else 1)
        self.low = max(self.most_ahead, len(places) // 4)
        self._feed = feed
        self._places = places
        self._ahead = ahead
        self._bounds = places.bounds.tolist()
        self._taken = 0
        self._next = 0
        self._in_hand: deque[Delivery] = deque()
        self._columns = FixedColumns(segment.maps)
        self._shards = places.shards.ctypes.data
        self._rows = places.rows.ctypes.data

    def __len__(self) -> int:
        return len(self._places) - self._taken

    @property
    def num_ungathered(self) -> int:
        return len(self._places) - self._next

    @property
    def is_low(self) -> bool:
        return len(self) <= self.low

    @property
    def turns_low(self) -> bool:
        return len(self) == self.low

    @property
    def is_asked(self) -> bool:
        """Whether all of its batches have been asked for."""
        return self._next == len(self._places)

    def begin(self, threads: int) -> None:
        """Have it gathered, by up to `threads` threads."""
        self._feed.add(self, threads)

    def ask_ahead(self) -> None:
        """Ask for what may be ahead now, in the trainer's place."""
        self._feed.ask_ahead()

    def ask(self, queue: Queue) -> _Asked:
        """Have the next few batches gathered."""
        first, last = self._next, min(self._next + self._together, len(self._places))
        for number in range(first, last):
            self._ahead.reach(self._places.first + number)
        start, stop = self._bounds[first], self._bounds[last]
        size = stop - start
        room = max(size, self._most_together * self.segment.plan.batch_size)  # of one size for all
        arrays, outs = self._columns.lend(self._feed.pool.lend, size, room)
        number = queue.submit(
            self._shards + 8 * start, self._rows + 8 * start, size, self._columns.sources, outs
        )
        # Their tensors are made now: whoever asks has the time.
        asked = _Asked(number, deque(self._delivery(arrays, i, start) for i in range(first, last)))
        self.asked.append(asked)
        self._next, self._together = last, min(self._most_together, 4 * self._together)
        return asked

    def _delivery(self, arrays: list[np.ndarray[Any, Any]], i: int, first_sample: int) -> Delivery:
        start, stop = self._bounds[i], self._bounds[i + 1]
        columns = self._columns.part(arrays, start - first_sample, stop - first_sample)
        segment = self.segment
        number = segment.request.done + self._places.first + i + 1
        return Delivery(Staged(packed(columns, segment.snapshot.schema)), number, stop - start, 0)

    def take(self, timeout_s: float) -> Delivery | None:
        self.waited_s = 0.0
        if not self._in_hand:
            asked = self._feed.take(self, timeout_s)
            if asked is None:
                return None
            self._in_hand = asked.batches
        self._taken += 1
        return self._in_hand.popleft()

    def discard(self) -> None:
        self._feed.forget(self)


class Feed:
    """Asks for the batches of flows, in their order, up to `prefetch` ahead. Thread-safe.

    Memory that a task uses is held until the task is done, whoever has forgotten its batch meanwhile.
    """

    def __init__(self, prefetch: int, pool: BufferPool) -> None:
        self.prefetch = min(prefetch, _MOST_AHEAD)
        self.pool = pool
        self._lock = threading.RLock()  # a forgotten loader may be closed in the midst of anything
        self._pid = os.getpid()
        self._queue: Queue | None = None
        self._flows: deque[Flow] = deque()
        self._held: deque[tuple[int, Any]] = deque()
        self._in_flight = 0
        self._is_helped = False
        self._closed = False

    def add(self, flow: Flow, threads: int) -> None:
        """Have the batches of `flow` gathered after those of the flows before it, by up to `threads` threads."""
        with self._lock:
            if self._closed:
                return
            if self._queue is None:
                self._queue = new_queue(threads)
            self._flows.append(flow)
            self._top_up(self._queue)

    def take(self, flow: Flow, timeout_s: float) -> _Asked | None:
        """The next batch of `flow`, waited for; None when that takes too long, or the feed is closed."""
        check_process(self._pid)
        with self._lock:
            queue = self._queue
            if queue is None:
                return None
            while not flow.asked and self._flows:
                self._ask(queue)
            if not flow.asked:
                return None
            asked = flow.asked[0]
        if queue.completed() < asked.number:
            began_s = time.perf_counter()
            done = queue.wait(asked.number, timeout_s)
            flow.waited_s = time.perf_counter() - began_s
            if not done:
                return None
        with self._lock:
            if not flow.asked:  # another thread has closed the loader
                return None
            flow.asked.popleft()
            self._in_flight -= len(asked.batches)
            if not self._is_helped or 2 * self._in_flight < flow.most_ahead:
                self._is_helped = False
                self._top_up(queue)
        return asked

    def ask_ahead(self) -> None:
        """As `take` does; from now on another thread sees to it in time, while the trainer computes."""
        with self._lock:
            self._is_helped = True
            if self._queue is not None:
                self._top_up(self._queue)

    def forget(self, flow: Flow) -> None:
        """Nobody will take the rest of `flow`."""
        with self._lock:
            self._in_flight -= sum(len(asked.batches) for asked in flow.asked)
            flow.asked.clear()
            if flow in self._flows:
                self._flows.remove(flow)

    def close(self, timeout_s: float) -> None:
        """Have nothing more gathered; waits for what is."""
        with self._lock:
            self._closed = True
            self._flows.clear()
            queue, self._queue = self._queue, None
            held, self._held = self._held, deque()
        if queue is not None and not queue.close(timeout_s):
            _abandoned.append((queue, held))  # its threads write there, whenever the disk answers

    def _top_up(self, queue: Queue) -> None:
        """With the lock: drop what is done, and ask for as much as may be ahead."""
        held, completed = self._held, queue.completed()
        while held and held[0][0] <= completed:
            held.popleft()
        while self._flows and self._in_flight < self._flows[0].most_ahead:
            self._ask(queue)

    def _ask(self, queue: Queue) -> None:
        flow = self._flows[0]
        asked = flow.ask(queue)
        self._in_flight += len(asked.batches)
        self._held.append((asked.number, (flow, asked)))
        if flow.is_asked:
            self._flows.popleft()
