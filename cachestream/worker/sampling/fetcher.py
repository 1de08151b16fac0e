"""Several units in flight, so that latency does not limit the speed.

Each thread reads one unit at a time (fetching and decoding release the GIL); the main thread takes the
samples.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cachestream.storage.telemetry import MAIN, READS_AT_ONCE, Slot
from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.unit import Stall, UnitRead

PATIENCE_S: Final = 1.0
FIRST_READS: Final = 4  # reached without trials, by doubling for each unit that came
TURN_S: Final = 0.3
GAIN: Final = 1.3
STARVED: Final = 0.5  # of a turn: so much waiting for samples lets more reads be tried
REST_TURNS: Final = 30
RECOVERY_TURNS: Final = 3  # about a second between two increases after a slow-down
KEEP: Final = 0.95  # of the rate: half as many reads are kept if they bring so much
_TICK_S: Final = 0.5
_CHUNKS_HERE: Final = 2  # a unit of one chunk comes with its end
BUSY: Final = 0.7  # of one processor: the reads may be waiting for the interpreter


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The number of units that a process reads at once, found by trial: doubled while that pays.

    If latency limits the speed, twice the reads bring nearly twice the samples; if the processor, the disk or
    the bandwidth does, further threads only compete for the interpreter. A process that keeps a processor
    busy therefore tries half as many, too, and keeps to that if the rate is as high. The rate counts bytes
    that are fetched, not samples that are packed: large units that share a slow network come late, all at
    once. `settled` reads brought `rate`; `active` reads are being tried; the next trial is `rest` turns away.
    The first number is 1: with n large units on a slow network the first sample would take n times as long.

    A remote that asks to slow down (503, 429) gets half as many reads at once, and then one more a second up
    to `goal`, the number before. Such additive increase and multiplicative decrease leads all who share the
    remote to equal shares (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion
    Avoidance in Computer Networks", 1989; TCP's, RFC 5681).
    """

    active: int
    settled: int
    rate: float = 0.0
    rest: int = 0
    goal: int = 0

    def next(
        self, rate: float, waiting: float, most: int, *, busy: float = 0.0, throttled: bool = False
    ) -> Concurrency:
        """The numbers for the next turn, after one that brought `rate` bytes a second.

        `waiting`: the share of the turn in which the packing waited for samples. `busy`: the processors that
        the process kept busy. `throttled`: the remote asked to slow down.
        """
        # Requests that were under way when the number was halved may still be refused in the next turn.
        if throttled and not (self.goal and self.rest == RECOVERY_TURNS):
            fewer = max(1, self.active // 2)
            return Concurrency(fewer, fewer, rate, RECOVERY_TURNS, max(self.goal, self.active))
        if self.goal:
            return self._recover(rate, waiting)
        if not self.rate:  # the first turn that brings bytes began without any
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
        """The numbers after a unit came: twice the reads, up to FIRST_READS, before the first trial."""
        if self.active >= min(FIRST_READS, most) or self.active != self.settled or self.rest or self.goal:
            return self
        more = min(2 * self.active, FIRST_READS, most)
        return Concurrency(more, more)

    @staticmethod
    def _fewer(settled: int, rate: float, busy: float) -> Concurrency:
        """Try half of `settled` reads, which brought `rate`, if the process is busy; else rest."""
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


@dataclass(frozen=True, slots=True)
class Delivery:
    """Samples of a unit; `finished` if they are its last ones."""

    unit_read: UnitRead
    chunks: list[SampleChunk]
    finished: bool


# The second argument is the thread's number, MAIN for the caller's. Yields samples, and pauses in seconds: see `UnitReader.read`.
ReadUnit = Callable[[UnitRead, int], Iterator[SampleChunk | float]]


class Fetcher:
    """Daemon threads that read the submitted units, `threads` at once besides those of silent units.

    Samples are delivered in the order in which the units were submitted, except that a unit that has brought
    nothing for `patience_s` lets the others go first, and another thread takes its place. The bytes that wait
    are bounded; the unit that is next has a bound of its own: if it could not continue, no unit could.

    Where it `may_read_here`, the caller's thread reads while one unit at a time is read: two threads that share one
    interpreter hand it to each other at every unit, and take longer than one. It blocks meanwhile, so this is for
    local disks alone.

    Used from one thread. Each reason to wait has a condition of its own, so that an event wakes one thread
    and not all of them.
    """

    def __init__(
        self,
        read: ReadUnit,
        threads: int,
        max_bytes: int,
        on_wait: Callable[[int], None],
        patience_s: float = PATIENCE_S,
        *,
        may_read_here: bool = False,
    ) -> None:
        self._read, self._max_bytes, self._on_wait = read, max_bytes, on_wait
        self._patience_s = patience_s
        self._may_read_here = may_read_here
        # The unit that the caller reads, in a context of its own, as a thread has one.
        self._here: tuple[UnitRead, Iterator[SampleChunk | float], Context] | None = None
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # samples or the end of a unit that may be delivered
        self._units = threading.Condition(self._lock)  # units to be read
        self._room = threading.Condition(self._lock)  # room for samples
        self._turn = threading.Condition(self._lock)  # more threads may read than before
        self._order: deque[UnitRead] = deque()
        self._todo: deque[UnitRead] = deque()
        self._bytes = 0
        self._woken = False
        self._stop = threading.Event()
        self._threads = self._busy = 0  # threads, and those that read a unit
        self._silent = 0  # units that let others go first
        self.active = threads

    @property
    def _most_threads(self) -> int:
        """The threads that may read now: those of silent units are needed besides."""
        reading = 0 if self._may_read_here and self.active == 1 else self.active
        return min(READS_AT_ONCE, reading + self._silent)

    def _start_threads(self) -> None:
        """Start the threads that are missing."""
        while self._threads < self._most_threads:
            name = f"fetch-{self._threads}"
            threading.Thread(target=self._work, args=(self._threads,), name=name, daemon=True).start()
            self._threads += 1

    def __len__(self) -> int:
        """Units submitted and not yet delivered to their end."""
        return len(self._order)

    @property
    def reading(self) -> int:
        """The units that are read now, besides silent ones."""
        return self._busy - self._silent

    @property
    def awaited(self) -> UnitRead | None:
        """The first unit in order, if there is nothing of it to deliver yet."""
        with self._lock:
            unit_read = self._order[0] if self._order else None
            return unit_read if unit_read is not None and unit_read.is_awaited else None

    def stalls(self) -> tuple[list[Stall], bool]:
        """The stalls of units, the first unit first; and True if nothing can be delivered because of
        these.
        """
        with self._lock:
            stalls = [one.stall for one in self._order if one.stall is not None and one.is_awaited]
            waits = all(
                one.is_awaited and (one.stall is not None or one.heard_s is None) for one in self._order
            )
            return stalls, bool(stalls) and waits

    def submit(self, unit_reads: list[UnitRead]) -> None:
        """Read `unit_reads` after those submitted before."""
        with self._lock:
            self._order.extend(unit_reads)
            self._todo.extend(unit_reads)
            self._start_threads()
            self._units.notify(len(unit_reads))

    def use(self, threads: int) -> None:
        """Let at most `threads` threads begin to read further units."""
        if threads != self.active:
            with self._lock:
                self.active = threads
                self._start_threads()
                self._turn.notify_all()
                self._units.notify_all()

    def wake(self) -> None:
        """Have `next` return now; from any thread."""
        with self._lock:
            self._woken = True
            self._arrived.notify()

    def next(self, timeout_s: float) -> Delivery | None:
        """Samples or the end of the next unit, as soon as they arrive; None at the deadline, or after
        `wake`.
        """
        if self._here is not None or self._takes_here():
            return self._read_here()
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while True:
                if self._order and not self._order[0].is_awaited:
                    return self._deliver(self._order[0])
                now_s = time.monotonic()
                found, until_s = self._look(now_s)
                if found is not None:
                    return self._deliver(found)
                if now_s >= deadline_s or self._woken:
                    self._woken = False
                    return None
                self._arrived.wait(min(deadline_s, until_s) - now_s)

    def _takes_here(self) -> bool:
        """Take the next unit to read it in the caller's thread, if that is to read and nothing comes before it."""
        with self._lock:
            if self._most_threads or not self._todo or self._todo[0] is not self._order[0]:
                return False
            unit_read = self._todo.popleft()
            unit_read.heard_s = time.monotonic()
            self._here = unit_read, self._read(unit_read, MAIN), copy_context()
            return True

    def _read_here(self) -> Delivery | None:
        """Read on in the caller's thread: up to a few samples, or the end of the unit; None for a pause."""
        assert self._here is not None
        unit_read, items, context = self._here
        chunks: list[SampleChunk] = []
        try:
            while (item := context.run(next, items, None)) is not None:
                if isinstance(item, float):
                    self._stop.wait(item)
                    return Delivery(unit_read, chunks, finished=False) if chunks else None
                chunks.append(item)
                if len(chunks) == _CHUNKS_HERE:
                    return Delivery(unit_read, chunks, finished=False)
        except BaseException as error:  # noqa: BLE001  delivered with the unit
            unit_read.error = error
        with self._lock:
            self._here, unit_read.finished = None, True
            self._order.remove(unit_read)
        return Delivery(unit_read, chunks, finished=True)

    def _look(self, now_s: float) -> tuple[UnitRead | None, float]:
        """The unit to deliver, if any, and the time at which the next one may be silent."""
        found, until_s, is_blocked, silent = None, math.inf, False, 0
        for unit_read in self._order:
            if unit_read.is_silent(now_s, self._patience_s):
                silent += 1
            elif unit_read.is_awaited:
                is_blocked = True  # nothing behind it may be delivered
                if unit_read.heard_s is not None:
                    until_s = min(until_s, unit_read.heard_s + self._patience_s + 0.001)
            elif not is_blocked and found is None:
                found = unit_read
        if silent != self._silent:
            self._let_others_read(silent)
        return found, until_s

    def _let_others_read(self, silent: int) -> None:
        self._silent = min(silent, READS_AT_ONCE - 1)
        self._start_threads()
        self._room.notify_all()
        self._turn.notify_all()
        self._units.notify_all()

    def _deliver(self, unit_read: UnitRead) -> Delivery:
        chunks = list(unit_read.chunks)
        unit_read.chunks.clear()
        self._bytes -= unit_read.waiting_bytes
        unit_read.waiting_bytes = 0
        if unit_read.finished:
            self._order.remove(unit_read)
        # There is room now, and another unit may be next: either lets waiting threads continue.
        self._room.notify_all()
        return Delivery(unit_read, chunks, unit_read.finished)

    def stop(self) -> None:
        """Let the threads end; samples that are not delivered are dropped."""
        with self._lock:
            self._stop.set()
            self._todo.clear()
            for condition in (self._arrived, self._units, self._room, self._turn):
                condition.notify_all()

    def _work(self, number: int) -> None:
        while (unit_read := self._take(number)) is not None:
            error: BaseException | None = None
            try:
                for item in self._read(unit_read, number):
                    goes_on = (
                        not self._stop.wait(item)
                        if isinstance(item, float)
                        else self._put(unit_read, item, number)
                    )
                    if not goes_on:
                        return
            except BaseException as caught:  # noqa: BLE001  delivered with the unit
                error = caught
            with self._lock:
                self._busy -= 1
                unit_read.error, unit_read.finished = error, True
                self._note_arrival(unit_read)

    def _take(self, number: int) -> UnitRead | None:
        with self._lock:
            while not self._stop.is_set():
                if number >= self._most_threads:
                    self._turn.wait()
                elif self._todo:
                    self._busy += 1
                    unit_read = self._todo.popleft()
                    unit_read.heard_s = time.monotonic()
                    self._arrived.notify()  # from now on its silence counts
                    return unit_read
                else:
                    self._units.wait()
            return None

    def _note_arrival(self, unit_read: UnitRead) -> None:
        """Wake the main thread if samples or the end of `unit_read` can be delivered now."""
        unit_read.heard_s = now_s = time.monotonic()
        for one in self._order:
            if one is unit_read:
                self._arrived.notify()
                return
            if not one.is_silent(now_s, self._patience_s):
                return

    def _has_room(self, unit_read: UnitRead) -> bool:
        """True if samples of `unit_read` may be kept."""
        now_s = time.monotonic()
        first = next((one for one in self._order if not one.is_silent(now_s, self._patience_s)), unit_read)
        if first is unit_read:
            return unit_read.waiting_bytes < self._max_bytes
        return self._bytes < self._max_bytes

    def _put(self, unit_read: UnitRead, chunk: SampleChunk, number: int) -> bool:
        with self._lock:
            while not self._stop.is_set() and not self._has_room(unit_read):
                self._on_wait(number)
                self._room.wait(_TICK_S)
            if self._stop.is_set():
                return False
            unit_read.chunks.append(chunk)
            unit_read.waiting_bytes += chunk.nbytes
            self._bytes += chunk.nbytes
            self._note_arrival(unit_read)
            return True


class Tunable(Protocol):
    """The part of a Fetcher that a ReadTuner needs."""

    @property
    def reading(self) -> int: ...
    def use(self, threads: int) -> None: ...


class ReadTuner:
    """Sets the number of units that `fetcher` reads at once, turn by turn, by what the last turn brought.

    `only_trials`: the first units do not let more be read, because a disk has no latency to hide, or because
    a limit of the bandwidth holds.
    """

    def __init__(self, fetcher: Tunable, slot: Slot, most: int, *, only_trials: bool) -> None:
        self._fetcher, self._slot = fetcher, slot
        self._most, self._only_trials = most, only_trials
        self._concurrency = Concurrency(1, 1)
        fetcher.use(1)
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._bytes, self._since_s = int(self._slot["fetched_bytes"]), time.monotonic()
        self._waited_s, self._worked_s = float(self._slot["fetch_wait_s"]), time.process_time()

    def tick(self, take_throttled: Callable[[], bool]) -> None:
        """Begin the next turn if this one is over.

        `take_throttled()`: a remote asked to slow down since the last call.
        """
        if self._concurrency.active < min(self._concurrency.settled, self._fetcher.reading):
            self._begin_turn()  # the rate of fewer reads can be measured once the others have ended
            return
        elapsed_s = time.monotonic() - self._since_s
        if elapsed_s < TURN_S:
            return
        self._use(
            self._concurrency.next(
                (int(self._slot["fetched_bytes"]) - self._bytes) / elapsed_s,
                (float(self._slot["fetch_wait_s"]) - self._waited_s) / elapsed_s,
                self._most,
                busy=(time.process_time() - self._worked_s) / elapsed_s,
                throttled=take_throttled(),
            )
        )

    def unit_came(self) -> None:
        """Note that a unit came."""
        concurrency = self._concurrency if self._only_trials else self._concurrency.came(self._most)
        if concurrency is not self._concurrency:
            self._use(concurrency)

    def _use(self, concurrency: Concurrency) -> None:
        self._concurrency = concurrency
        self._fetcher.use(concurrency.active)
        self._begin_turn()
