"""Several units in flight, delivered in order: latency does not set the speed, and progress stays a number.

Threads read whole units (fetch and decode release the GIL); the main thread takes the samples in the
order the units were submitted. Bytes waiting are bounded, those of the unit that is next by themselves:
it must always be able to go on, or nothing would.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachestream.sampling.lots import Lot

__all__ = ["Delivery", "Fetcher", "Flight", "ReadUnit"]

_TICK_S: Final = 0.5


@dataclass(slots=True, eq=False)
class Flight:
    """One unit to be read: `skip` says which of its samples are not wanted.

    One that is `finished` when it is submitted is only delivered in its turn: `covered` when the cache
    has all of it, or with the `error` for which it is not read. `cached` are the ranges of offsets that lie
    in other shards; all before the offset `done` has been dealt with. `silence` is why it is tried again.
    """

    position: int
    unit: int
    claim_id: int
    skip: Callable[[int], bool]
    cached: Sequence[tuple[int, int]] = ()
    done: int = 0
    covered: bool = False
    lots: deque[Lot] = field(default_factory=deque)
    waiting_bytes: int = 0
    finished: bool = False
    error: BaseException | None = None
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of the unit that is next, and whether that was all."""

    flight: Flight
    lots: list[Lot]
    finished: bool


# The second argument is the thread's number.
ReadUnit = Callable[[Flight, int], Iterator[Lot]]


class Fetcher:
    """`threads` daemon threads that read submitted flights; used from one thread.

    Who waits for what has a condition of its own: what comes wakes up one thread, not all of them.
    """

    def __init__(self, read: ReadUnit, threads: int, max_bytes: int, on_wait: Callable[[int], None]) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._on_wait = on_wait
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # something of the next unit
        self._units = threading.Condition(self._lock)  # units to be read
        self._room = threading.Condition(self._lock)  # room for samples
        self._turn = threading.Condition(self._lock)  # more threads are to read than before
        self._order: deque[Flight] = deque()
        self._todo: deque[Flight] = deque()
        self._bytes = 0
        self._stopped = False
        self.active = threads
        self.reading = 0  # threads that read a unit now
        for number in range(threads):
            threading.Thread(target=self._work, args=(number,), name=f"fetch-{number}", daemon=True).start()

    def __len__(self) -> int:
        """Units submitted and not yet delivered to their end."""
        return len(self._order)

    @property
    def awaited(self) -> Flight | None:
        """The unit that is next, if nothing of it has come."""
        with self._lock:
            flight = self._order[0] if self._order else None
            return None if flight is None or flight.lots or flight.finished else flight

    def submit(self, flights: list[Flight]) -> None:
        """Read `flights` after those submitted before."""
        with self._lock:
            self._order.extend(flights)
            unread = [flight for flight in flights if not flight.finished]
            self._todo.extend(unread)
            self._units.notify(len(unread))

    def use(self, threads: int) -> None:
        """Let at most `threads` threads begin further units."""
        if threads != self.active:
            with self._lock:
                self.active = threads
                self._turn.notify_all()
                self._units.notify_all()

    def next(self, timeout_s: float) -> Delivery | None:
        """What there is of the next unit, as soon as there is anything; None at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                if self._order:
                    flight = self._order[0]
                    if flight.lots or flight.finished:
                        return self._deliver(flight)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._arrived.wait(left)

    def _deliver(self, flight: Flight) -> Delivery:
        lots = list(flight.lots)
        flight.lots.clear()
        self._bytes -= flight.waiting_bytes
        flight.waiting_bytes = 0
        if flight.finished:
            self._order.popleft()
        # Room was made, and another unit may be next now: either lets waiting threads go on.
        self._room.notify_all()
        return Delivery(flight, lots, flight.finished)

    def stop(self) -> None:
        """Let the threads end; samples not delivered are dropped."""
        with self._lock:
            self._stopped = True
            self._todo.clear()
            for condition in (self._arrived, self._units, self._room, self._turn):
                condition.notify_all()

    def _work(self, number: int) -> None:
        while (flight := self._take(number)) is not None:
            error: BaseException | None = None
            try:
                for lot in self._read(flight, number):
                    if not self._put(flight, lot, number):
                        return
            except BaseException as caught:  # noqa: BLE001  whatever a source raises is told with its unit
                error = caught
            with self._lock:
                self.reading -= 1
                flight.error = error
                flight.finished = True
                self._tell(flight)

    def _take(self, number: int) -> Flight | None:
        with self._lock:
            while not self._stopped:
                if number >= self.active:
                    self._turn.wait()
                elif self._todo:
                    self.reading += 1
                    return self._todo.popleft()
                else:
                    self._units.wait()
            return None

    def _tell(self, flight: Flight) -> None:
        """Something of `flight` came: the taker waits for the next unit only."""
        if self._order and self._order[0] is flight:
            self._arrived.notify()

    def _has_room(self, flight: Flight) -> bool:
        """The next unit has a bound of its own: it always goes on, but not into endless memory."""
        if self._order[0] is flight:
            return flight.waiting_bytes < self._max_bytes
        return self._bytes < self._max_bytes

    def _put(self, flight: Flight, lot: Lot, number: int) -> bool:
        with self._lock:
            while not self._stopped and not self._has_room(flight):
                self._on_wait(number)
                self._room.wait(_TICK_S)
            if self._stopped:
                return False
            flight.lots.append(lot)
            flight.waiting_bytes += lot.nbytes
            self._bytes += lot.nbytes
            self._tell(flight)
            return True
