"""Units that are read elsewhere, in any order, and delivered in the order of their claims.

The progress of a claim is one number, so the units of one claim are delivered in their order. Claims do not
wait for one another: an actor that works on a large unit holds back only the few units of its claim.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from typing import Final

from cachestream.storage.telemetry import READS_AT_ONCE
from cachestream.worker.sampling.encode import SampleChunk, Table
from cachestream.worker.sampling.fetcher import Delivery
from cachestream.worker.sampling.unit_reader import Stall, UnitRead, UnitState

_MOST_ASIDE: Final = READS_AT_ONCE - 1  # as of a Fetcher


class RemoteFetcher:
    """Units between two threads: the main thread submits them and takes deliveries, another has them read.

    The bytes that wait are bounded by `max_bytes`, and by twice as many for units that are next in their
    claims: these are delivered at once, so they make room, and can always continue.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # samples or the end of a unit that is next
        self._work = threading.Condition(self._lock)  # units to be read
        self._claims: dict[int, deque[UnitRead]] = {}  # a unit put aside has one of its own
        self._todo: deque[UnitRead] = deque()
        self._paused: list[tuple[float, UnitRead]] = []
        self._bytes = 0
        self._held = self.stopped = False
        self._error: BaseException | None = None
        self.absence: Stall | None = None  # while no actor is ready

    # --- the main thread's side

    def __len__(self) -> int:
        """Units submitted and not yet delivered to their end."""
        return sum(map(len, self._claims.values()))

    @property
    def awaited(self) -> UnitRead | None:
        """A unit that does not answer while others of its claim wait for it.

        Else the first unit, if no unit has anything to deliver.
        """
        with self._lock:
            heads = [units[0] for units in self._claims.values()]
            stalled = [u for u in heads if u.stall is not None and u.is_awaited and self._is_followed(u)]
            if stalled:
                return stalled[0]
            return heads[0] if heads and all(unit_read.is_awaited for unit_read in heads) else None

    def _is_followed(self, unit_read: UnitRead) -> bool:
        return len(self._claims[self._claim_of(unit_read)]) > 1

    def _claim_of(self, unit_read: UnitRead) -> int:
        """The claim under which the unit waits: its own one once it is put aside."""
        units = self._claims.get(unit_read.claim_id)
        return unit_read.claim_id if units and units[0] is unit_read else unit_read.unit.claim_id

    def stalls(self) -> tuple[list[Stall], bool]:
        """The stalls of units; and True if all other units wait for these."""
        with self._lock:
            if self.absence is not None and not self._has_delivery():
                return [self.absence], True
            heads = [units[0] for units in self._claims.values()]
            waiting = [u.stall for u in heads if u.stall is not None and u.is_awaited]
            return waiting, len(waiting) == len(heads) > 0

    def _has_delivery(self) -> bool:
        return any(not units[0].is_awaited for units in self._claims.values())

    def submit(self, unit_reads: list[UnitRead]) -> None:
        """Have `unit_reads` read after those submitted before."""
        with self._lock:
            for unit_read in unit_reads:
                self._claims.setdefault(unit_read.claim_id, deque()).append(unit_read)
            self._todo.extend(unit_read for unit_read in unit_reads if not unit_read.finished)
            self._work.notify()

    def put_aside(self, unit_read: UnitRead) -> bool:
        """Deliver the units behind `unit_read`, which has got a claim of its own, without waiting for it.

        False if something of it came, or if as many units are put aside as there may be.
        """
        with self._lock:
            units = self._claims.get(unit_read.unit.claim_id)
            aside = sum(units[0].has_own_claim for units in self._claims.values())
            if not units or units[0] is not unit_read or not unit_read.is_awaited or aside > _MOST_ASIDE:
                return False
            units.popleft()
            if not units:
                del self._claims[unit_read.unit.claim_id]
            self._claims[unit_read.claim_id] = deque([unit_read])
            return True

    def hold(self, held: bool) -> None:
        """Have units that are put aside pause, from the end of their current attempt on, or go on."""
        with self._lock:
            self._held = held
            self._work.notify()

    @property
    def is_idle(self) -> bool:
        """True if no unit is being read, or waits to be read or delivered; held units do not count."""
        with self._lock:
            units = [unit_read for units in self._claims.values() for unit_read in units]
            return self._held and all(u.has_own_claim and u.state is UnitState.PAUSED for u in units)

    def next(self, timeout_s: float) -> Delivery | None:
        """Samples or the end of a unit that is next in its claim; None at the deadline.

        Raises the error with which the reading has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._error is None:
                for claim_id, units in self._claims.items():
                    if not units[0].is_awaited:
                        return self._deliver(claim_id, units)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._arrived.wait(left_s)
            raise self._error

    def _deliver(self, claim_id: int, units: deque[UnitRead]) -> Delivery:
        unit_read = units[0]
        chunks = list(unit_read.chunks)
        unit_read.chunks.clear()
        self._bytes -= unit_read.waiting_bytes
        unit_read.waiting_bytes = 0
        if unit_read.finished:
            units.popleft()
            if not units:
                del self._claims[claim_id]
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
        """Up to `most` units to be read, all of one claim."""
        now_s, found = time.monotonic(), list[UnitRead]()
        with self._lock:
            due = [
                u for until_s, u in self._paused if now_s >= until_s and not (self._held and u.has_own_claim)
            ]
            if due:
                self._paused = [one for one in self._paused if one[1] not in due]
                found = due[:1]
                self._todo.extendleft(due[1:])
            while not due and self._todo and len(found) < most:
                if found and self._todo[0].claim_id != found[0].claim_id:
                    break
                found.append(self._todo.popleft())
            for unit_read in found:
                if unit_read.state is not UnitState.READING:
                    unit_read.enter(UnitState.READING)
        return found

    def give_back(self, unit_reads: list[UnitRead]) -> None:
        """Have units read before all others: the attempt to read them has failed."""
        with self._lock:
            self._todo.extendleft(reversed(unit_reads))

    def pause(self, unit_read: UnitRead, pause_s: float) -> None:
        """Have a unit whose remote does not answer tried again after `pause_s`."""
        with self._lock:
            unit_read.enter(UnitState.PAUSED)
            self._paused.append((time.monotonic() + pause_s, unit_read))

    def is_next(self, unit_read: UnitRead) -> bool:
        """True if the unit is next in its claim."""
        with self._lock:
            return self._is_head(unit_read)

    def _is_head(self, unit_read: UnitRead) -> bool:
        units = self._claims.get(self._claim_of(unit_read))
        return units is not None and units[0] is unit_read

    def has_room(self, unit_read: UnitRead) -> bool:
        """True if samples of `unit_read` may be kept."""
        with self._lock:
            return self._bytes < self._max_bytes * (2 if self._is_head(unit_read) else 1)

    def put(self, unit_read: UnitRead, chunk: SampleChunk) -> None:
        """Add samples of a unit; those that came before, from another attempt, are dropped."""
        new = _from(chunk, unit_read.next_offset)
        if new is None or unit_read.finished:
            return
        with self._lock:
            unit_read.received(new)
            unit_read.chunks.append(new)
            unit_read.waiting_bytes += new.nbytes
            self._bytes += new.nbytes
            self._arrived.notify()

    def end(self, unit_read: UnitRead, error: BaseException | None) -> None:
        """Note that a unit is read as far as it is wanted, or has failed."""
        with self._lock:
            unit_read.error = error
            unit_read.enter(UnitState.FINISHED)
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
