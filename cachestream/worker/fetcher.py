"""Several units in flight, delivered in order: latency does not set the speed, and progress stays a number.

Threads read whole units (fetch and decode release the GIL); the main thread takes the samples in the
order the units were submitted. Bytes waiting are bounded, those of the unit that is next by themselves:
it must always be able to go on, or nothing would. A unit that does not answer can be put aside: it is next as soon as
something of it comes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from cachestream.worker.encode import SampleChunk
from cachestream.worker.unit_reader import LaterError, Stall, UnitEvent, UnitRead, UnitState

FIRST_READS: Final = 4  # as many as soon as units come whole: then they are small
TURN_S: Final = 0.3
GAIN: Final = 1.3
STARVED: Final = 0.5
REST_TURNS: Final = 30
RECOVERY_TURNS: Final = 3  # about a second, from one read more to the next
KEEP: Final = 0.95  # of the speed, for half as many reads to be as good
BUSY: Final = 0.7  # of one processor: the interpreter may be what the reads wait for


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many units a process reads at once, found by trying: doubled for as long as that pays.

    Where latency sets the speed, twice the reads bring nearly twice the samples; where the processor,
    the disk or the bandwidth does, more threads only take the interpreter from each other. So a process that
    keeps a processor busy tries fewer, too, and stays there if they bring as much. Bytes count as they are fetched,
    not samples as they are packed: large units that share a slow network come all at once, and late.
    `settled` reads brought `rate`; `active` are being tried; `rest` turns until the next try. It begins with one:
    several large units that share a slow network would bring the first sample as many times later.

    A remote that asks to slow down (503, 429) gets half as many at once, and then one more a second, up to
    `goal`, as many as there were: additive increase, multiplicative decrease, by which all who share the
    remote come to equal shares (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
    Congestion Avoidance in Computer Networks", 1989; TCP's, RFC 5681).
    """

    active: int
    settled: int
    rate: float = 0.0
    rest: int = 0
    goal: int = 0

    def next(
        self, rate: float, waiting: float, most: int, *, busy: float = 0.0, throttled: bool = False
    ) -> Concurrency:
        """What to do after a turn that brought `rate` (bytes a second), of which the packing spent the
        share `waiting` on waiting for samples; `busy`: how many processors the process kept at work;
        `throttled`: the remote asked to slow down.
        """
        # What was under way when the number was halved may still be refused in the turn after.
        if throttled and not (self.goal and self.rest == RECOVERY_TURNS):
            fewer = max(1, self.active // 2)
            return Concurrency(fewer, fewer, rate, RECOVERY_TURNS, max(self.goal, self.active))
        if self.goal:
            return self._recover(rate, waiting)
        if not self.rate:  # the first turn in which anything comes is but a part of one
            return replace(self, rate=rate)
        if self.active > self.settled and rate < GAIN * self.rate:
            return self._fewer(self.settled, self.rate, busy)
        if self.active < self.settled:
            if rate < KEEP * self.rate:
                return Concurrency(self.settled, self.settled, self.rate, REST_TURNS)
            return self._fewer(self.active, rate, busy)
        if self.rest:
            return replace(self, rate=rate, rest=self.rest - 1)
        more = min(most, 2 * self.active) if waiting >= STARVED else self.active
        return Concurrency(more, self.active, rate)

    def came(self, most: int) -> Concurrency:
        """What to do when a unit came whole: twice the reads, up to `FIRST_READS`, before any more were tried."""
        if self.active >= min(FIRST_READS, most) or self.active != self.settled or self.rest or self.goal:
            return self
        more = min(2 * self.active, FIRST_READS, most)
        return Concurrency(more, more)

    @staticmethod
    def _fewer(settled: int, rate: float, busy: float) -> Concurrency:
        """Half of `settled` reads, which brought `rate`, if they may be too many."""
        if settled > 1 and busy >= BUSY:
            return Concurrency(settled // 2, settled, rate)
        return Concurrency(settled, settled, rate, REST_TURNS)

    def _recover(self, rate: float, waiting: float) -> Concurrency:
        if self.rest > 1:
            return replace(self, rate=rate, rest=self.rest - 1)
        if self.active >= self.goal:
            return Concurrency(self.active, self.active, rate, REST_TURNS)
        more = self.active + (waiting >= STARVED)
        return Concurrency(more, more, rate, RECOVERY_TURNS - 1, self.goal)


_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of the unit that is next, and whether that was all."""

    unit_read: UnitRead
    chunks: list[SampleChunk]
    finished: bool


# The second argument is the thread's number.
ReadUnit = Callable[[UnitRead, int], Iterator[SampleChunk]]


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
        self._order: deque[UnitRead] = deque()
        self._todo: deque[UnitRead] = deque()
        self._aside: list[UnitRead] = []
        self._bytes = 0
        self._stopped = False
        self.active = threads
        self.reading = 0  # threads that read a unit now
        for number in range(threads):
            threading.Thread(target=self._work, args=(number,), name=f"fetch-{number}", daemon=True).start()

    def __len__(self) -> int:
        """Units submitted and not yet delivered to their end."""
        return len(self._order) + len(self._aside)

    @property
    def awaited(self) -> UnitRead | None:
        """The unit that is next, if nothing of it has come."""
        with self._lock:
            unit_read = self._order[0] if self._order else None
            return unit_read if unit_read is not None and unit_read.is_awaited else None

    @property
    def aside(self) -> list[UnitRead]:
        """Those that were put aside, and of which nothing has come since."""
        with self._lock:
            return self._aside.copy()

    def silences(self) -> tuple[list[Stall], bool]:
        """Of the units that do not answer, the next one first, and whether all others have to wait for that."""
        with self._lock:
            waiting = [unit_read for unit_read in self._aside if unit_read.silence is not None]
            all_wait = not self._order and bool(waiting)
            if self._order and self._order[0].is_awaited and self._order[0].silence is not None:
                waiting.insert(0, self._order[0])
                all_wait = True
            return [unit_read.silence for unit_read in waiting if unit_read.silence is not None], all_wait

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read, or waits to be delivered."""
        with self._lock:
            return not self._order and not self._todo and not self.reading

    def submit(self, flights: list[UnitRead]) -> None:
        """Read `flights` after those submitted before."""
        with self._lock:
            self._order.extend(flights)
            unread = [unit_read for unit_read in flights if not unit_read.finished]
            self._todo.extend(unread)
            self._units.notify(len(unread))

    def put_aside(self, unit_read: UnitRead) -> None:
        """Let those behind `unit_read` be delivered before it, if it is next still and nothing of it has come by now."""
        with self._lock:
            # One that was put aside earlier may have come since, and be next.
            if unit_read.is_awaited and self._order[0] is unit_read:
                self._order.popleft()
                self._aside.append(unit_read)
                unit_read.state = unit_read.state.after(UnitEvent.PUT_ASIDE)
                self._room.notify_all()
                self._turn.notify_all()

    def wake(self, is_due: Callable[[UnitRead], bool]) -> None:
        """Have those that were put aside read again whose time has come."""
        with self._lock:
            asleep = [unit_read for unit_read in self._aside if unit_read.state is UnitState.ASLEEP]
            due = [unit_read for unit_read in asleep if is_due(unit_read)]
            for unit_read in due:
                unit_read.state = unit_read.state.after(UnitEvent.WAKE)
            self._todo.extendleft(due)
            self._units.notify(len(due))

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
                    unit_read = self._order[0]
                    if unit_read.chunks or unit_read.finished:
                        return self._deliver(unit_read)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._arrived.wait(left)

    def _deliver(self, unit_read: UnitRead) -> Delivery:
        chunks = list(unit_read.chunks)
        unit_read.chunks.clear()
        self._bytes -= unit_read.waiting_bytes
        unit_read.waiting_bytes = 0
        if unit_read.finished:
            self._order.popleft()
        # Room was made, and another unit may be next now: either lets waiting threads go on.
        self._room.notify_all()
        return Delivery(unit_read, chunks, unit_read.finished)

    def stop(self) -> None:
        """Let the threads end; samples not delivered are dropped."""
        with self._lock:
            self._stopped = True
            self._todo.clear()
            for condition in (self._arrived, self._units, self._room, self._turn):
                condition.notify_all()

    def _work(self, number: int) -> None:
        while (unit_read := self._take(number)) is not None:
            error: BaseException | None = None
            try:
                for chunk in self._read(unit_read, number):
                    if not self._put(unit_read, chunk, number):
                        return
            except LaterError:
                with self._lock:
                    self.reading -= 1
                    unit_read.state = unit_read.state.after(UnitEvent.PAUSE)
                continue
            except BaseException as caught:  # noqa: BLE001  whatever a source raises is told with its unit
                error = caught
            with self._lock:
                self.reading -= 1
                unit_read.error = error
                self._came(unit_read, UnitEvent.END)

    def _take(self, number: int) -> UnitRead | None:
        with self._lock:
            while not self._stopped:
                # Threads that wait for an answer to what was put aside leave the others no fewer.
                if number >= self.active + sum(unit_read.reading for unit_read in self._aside):
                    self._turn.wait()
                elif self._todo:
                    self.reading += 1
                    unit_read = self._todo.popleft()
                    unit_read.state = unit_read.state.after(UnitEvent.TAKE)
                    return unit_read
                else:
                    self._units.wait()
            return None

    def _came(self, unit_read: UnitRead, event: UnitEvent) -> None:
        """Something of `unit_read` came, or its end: wake the taker if that unit is next."""
        if unit_read.aside:
            self._aside.remove(unit_read)
            self._order.appendleft(unit_read)
        unit_read.state = unit_read.state.after(event)
        if self._order and self._order[0] is unit_read:
            self._arrived.notify()

    def _has_room(self, unit_read: UnitRead) -> bool:
        """The next unit has a bound of its own: it always goes on, but not into endless memory."""
        if not self._order or self._order[0] is unit_read:
            return unit_read.waiting_bytes < self._max_bytes
        return self._bytes < self._max_bytes

    def _put(self, unit_read: UnitRead, chunk: SampleChunk, number: int) -> bool:
        with self._lock:
            while not self._stopped and not self._has_room(unit_read):
                self._on_wait(number)
                self._room.wait(_TICK_S)
            if self._stopped:
                return False
            unit_read.chunks.append(chunk)
            unit_read.waiting_bytes += chunk.nbytes
            self._bytes += chunk.nbytes
            self._came(unit_read, UnitEvent.ARRIVE)
            return True
