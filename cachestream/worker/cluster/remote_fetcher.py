"""Units that are read elsewhere, in any order, and delivered as they come."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque

from cachestream.worker.sampling.encode import SampleChunk, Table
from cachestream.worker.sampling.fetcher import Delivery
from cachestream.worker.units import Stall, UnitRead


class RemoteFetcher:
    """Units between two threads: the main thread submits them and takes deliveries, another has them read.

    The bytes that wait are bounded by `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # samples or the end of a unit
        self._work = threading.Condition(self._lock)  # units to be read
        self._left: dict[UnitRead, None] = {}  # not delivered to their end, in the order of submission
        self._ready: dict[UnitRead, list[SampleChunk]] = {}  # what can be delivered
        self._todo: deque[UnitRead] = deque()
        self._paused: list[tuple[float, UnitRead]] = []
        self._bytes = 0
        self._woken = self.stopped = False
        self._error: BaseException | None = None
        self.absence: Stall | None = None  # while no actor is ready

    # --- the main thread's side

    def __len__(self) -> int:
        """Units submitted and not yet delivered to their end."""
        return len(self._left)

    @property
    def awaited(self) -> UnitRead | None:
        """The first unit, if no unit has anything to deliver."""
        with self._lock:
            return None if self._ready else next(iter(self._left), None)

    def stalls(self) -> tuple[list[Stall], bool]:
        """The stalls of units; and True if nothing can be delivered because of these."""
        with self._lock:
            if self.absence is not None and not self._ready:
                return [self.absence], True
            stalls = [one.stall for one in self._left if one.stall is not None and one not in self._ready]
            return stalls, len(stalls) == len(self._left) > 0

    def submit(self, unit_reads: list[UnitRead]) -> None:
        """Have `unit_reads` read after those submitted before."""
        with self._lock:
            self._left |= dict.fromkeys(unit_reads)
            self._todo.extend(unit_reads)
            self._work.notify()

    def wake(self) -> None:
        """Have `next` return now; from any thread."""
        with self._lock:
            self._woken = True
            self._arrived.notify()

    def next(self, timeout_s: float) -> Delivery | None:
        """Samples or the end of a unit; None at the deadline, or after `wake`.

        Raises the error with which the reading has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._error is None:
                if self._ready:
                    return self._deliver()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._woken:
                    self._woken = False
                    return None
                self._arrived.wait(left_s)
            raise self._error

    def _deliver(self) -> Delivery:
        unit_read = next(iter(self._ready))
        chunks = self._ready.pop(unit_read)
        self._bytes -= sum(chunk.nbytes for chunk in chunks)
        if unit_read.finished:
            del self._left[unit_read]
        return Delivery(unit_read, chunks, unit_read.finished)

    def stop(self) -> None:
        """Have no more units read; samples that are not delivered are dropped."""
        with self._lock:
            self.stopped = True
            self._work.notify()

    # --- the side of the thread that has units read

    def fail(self, error: BaseException) -> None:
        """End the reading with an error."""
        with self._lock:
            self._error = error
            self._arrived.notify()

    def wait_for_work(self, timeout_s: float) -> None:
        """Wait until units are submitted, or for `timeout_s`."""
        with self._lock:
            if not self._todo and not self.stopped:
                self._work.wait(timeout_s)

    @property
    def queued(self) -> int:
        """The number of units that wait to be read."""
        return len(self._todo)

    def take(self, most: int) -> list[UnitRead]:
        """Up to `most` units to be read; one that was paused comes alone."""
        now_s = time.monotonic()
        with self._lock:
            due = [unit_read for until_s, unit_read in self._paused if now_s >= until_s]
            if due:
                self._paused = [one for one in self._paused if one[1] not in due]
                self._todo.extendleft(due[1:])
                return due[:1]
            return [self._todo.popleft() for _ in range(min(most, len(self._todo)))]

    def give_back(self, unit_reads: list[UnitRead]) -> None:
        """Have units read before all others: the attempt to read them has failed."""
        with self._lock:
            self._todo.extendleft(reversed(unit_reads))

    def pause(self, unit_read: UnitRead, pause_s: float) -> None:
        """Have a unit whose remote does not answer tried again after `pause_s`."""
        with self._lock:
            self._paused.append((time.monotonic() + pause_s, unit_read))

    @property
    def has_room(self) -> bool:
        """True if further samples may be kept."""
        return self._bytes < self._max_bytes

    def put(self, unit_read: UnitRead, chunk: SampleChunk) -> None:
        """Add samples of a unit; those that came before, from another attempt, are dropped."""
        new = _from(chunk, unit_read.next_offset)
        if new is None or unit_read.finished:
            return
        with self._lock:
            unit_read.received(new)
            self._ready.setdefault(unit_read, []).append(new)
            self._bytes += new.nbytes
            self._arrived.notify()

    def end(self, unit_read: UnitRead, error: BaseException | None) -> None:
        """Note that a unit is read as far as it is wanted, or has failed."""
        with self._lock:
            unit_read.error, unit_read.finished = error, True
            self._ready.setdefault(unit_read, [])
            self._arrived.notify()


def _from(chunk: SampleChunk, offset: int) -> SampleChunk | None:
    """The samples of `chunk` at `offset` and after it; None without any."""
    start = bisect_left(chunk.offsets, offset)
    if not start:
        return chunk
    if start == len(chunk.offsets):
        return None
    samples = chunk.samples
    rest = samples.cut(start, len(samples)) if isinstance(samples, Table) else samples[start:]
    nbytes = chunk.nbytes * (len(chunk.offsets) - start) // len(chunk.offsets)
    return SampleChunk(chunk.offsets[start:], chunk.keys[start:], rest, nbytes)
