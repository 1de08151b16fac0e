"""Reading one unit from the remote: seeded, counted, throttled, retried, and given up if it stalls."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

from cachestream.errors import SampleError, SourceUnavailableError
from cachestream.permutation import mix_key
from cachestream.sources.base import Rows, RowsSource, Source
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.telemetry import Slot
from cachestream.transport import metering
from cachestream.transport.metering import Throttle
from cachestream.transport.remote_errors import backoff_delays
from cachestream.worker.cached_units import keep_all
from cachestream.worker.encode import Item, SampleChunk, approximate_bytes, gather, to_table
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import end_if_forked

_AWAY_S: Final = 5.0
_UNIT_KEY: Final = 3
_SAMPLE_KEY: Final = 5
BEAT_S: Final = 0.001
_PROBE_S: Final = 5.0  # one unit of a remote that is away is tried again within this time
REQUEST_S: Final = 0.05  # one request asks for so many seconds of the bandwidth
LEAST_REQUEST_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Stall:
    """A unit has brought nothing since `since_s`; `reason` is its last error."""

    since_s: float
    reason: str

    def is_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the units behind it are not to wait any longer, unless the whole remote is away."""
        return now_s - self.since_s >= hang_timeout_s / 3

    def is_too_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the unit is to be left out, provided that its remote answers."""
        return now_s - self.since_s >= 4 * hang_timeout_s


@dataclass(slots=True)
class Answers:
    """The times at which the remotes of a source last answered, and last answered again after an outage."""

    _last_s: dict[Hashable, float] = field(default_factory=dict)
    _back_s: dict[Hashable, float] = field(default_factory=dict)

    def heard(self, remote: Hashable, now_s: float) -> None:
        """Note that something came from `remote`."""
        if self.is_away(remote, now_s):
            self._back_s[remote] = now_s
        self._last_s[remote] = now_s

    def is_away(self, remote: Hashable, now_s: float) -> bool:
        """True if nothing has come from `remote` lately."""
        return now_s - self._last_s.get(remote, -math.inf) > _AWAY_S

    def is_back(self, remote: Hashable, since_s: float) -> bool:
        """True if an outage of `remote` has ended after `since_s`."""
        return self._back_s.get(remote, -math.inf) > since_s


class LaterError(Exception):
    """The unit was put aside, and its thread is free: the unit is to be read again later, by any thread."""


class UnitState(Enum):
    """The state of a unit between its submission to a fetcher and its delivery; changed by `after` alone.

        QUEUED ─────TAKE─────▶ READING ─────END─────▶ FINISHED
          │                    │     ▲                    ▲
       PUT_ASIDE          PUT_ASIDE  ARRIVE               │
          ▼                    ▼     │                    │
        ASIDE ─────TAKE─────▶ READING_ASIDE ────END───────┘
          ▲                    │
          └──WAKE── ASLEEP ◀─PAUSE

    The remote of a unit that is put aside does not answer: the units behind it are delivered first. A unit of
    which something arrives is the next to be delivered.
    """

    QUEUED = "waits for a thread"
    READING = "is read by a thread"
    ASIDE = "put aside, waits for a thread"
    READING_ASIDE = "put aside, is read by a thread"
    ASLEEP = "put aside, is to be read again later"
    FINISHED = "read to its end, or failed"

    def after(self, event: UnitEvent) -> UnitState:
        """The next state; raises ValueError for an event that cannot happen in this state."""
        try:
            return _TRANSITIONS[self, event]
        except KeyError:
            raise ValueError(f"{event.name} cannot happen to a unit that is {self.name}") from None


class UnitEvent(Enum):
    """Events that change the state of a unit in a fetcher."""

    TAKE = "a thread begins to read it"
    PUT_ASIDE = "it has not answered for long"
    ARRIVE = "samples came"
    PAUSE = "an attempt failed, and the thread goes on with another unit"
    WAKE = "the pause is over"
    END = "all has been read, or reading failed for good"


_TRANSITIONS: Final = {
    (UnitState.QUEUED, UnitEvent.TAKE): UnitState.READING,
    (UnitState.QUEUED, UnitEvent.PUT_ASIDE): UnitState.ASIDE,
    (UnitState.READING, UnitEvent.PUT_ASIDE): UnitState.READING_ASIDE,
    (UnitState.READING, UnitEvent.ARRIVE): UnitState.READING,
    (UnitState.READING, UnitEvent.END): UnitState.FINISHED,
    (UnitState.ASIDE, UnitEvent.TAKE): UnitState.READING_ASIDE,
    (UnitState.READING_ASIDE, UnitEvent.ARRIVE): UnitState.READING,
    (UnitState.READING_ASIDE, UnitEvent.PAUSE): UnitState.ASLEEP,
    (UnitState.READING_ASIDE, UnitEvent.END): UnitState.FINISHED,
    (UnitState.ASLEEP, UnitEvent.WAKE): UnitState.ASIDE,
}
_PUT_ASIDE: Final = frozenset({UnitState.ASIDE, UnitState.READING_ASIDE, UnitState.ASLEEP})


@dataclass(slots=True, eq=False)
class UnitRead:
    """One unit to be read: `skip` tells which offsets of its samples are not wanted.

    A unit that is FINISHED when it is submitted is only delivered in its turn: `covered` when the cache holds
    all of it, or with the `error` for which it is not read. `cached`: the ranges of offsets that lie in other
    shards; `parts`, where samples are held out: those ranges of the train split and of the held-out split.
    All samples before the offset `done` are packed, dropped or skipped.

    The samples before the offset `num_read` have been read. `asked_s`: the time of a request that the remote
    has not answered yet; 0 without one. A unit that does not answer has a `stall`, and is tried again after
    the `delays`, the next time at `again_at_s`; its last attempt failed at `paused_at_s`. Before a unit is
    put aside it gets a claim of its own.
    """

    position: int
    unit: int
    claim_id: int
    skip: Callable[[int], bool]
    cached: Sequence[tuple[int, int]] = ()
    parts: Sequence[Sequence[tuple[int, int]]] = ()
    done: int = 0
    covered: bool = False
    chunks: deque[SampleChunk] = field(default_factory=deque)
    waiting_bytes: int = 0
    state: UnitState = UnitState.QUEUED
    error: BaseException | None = None
    num_read: int = 0
    asked_s: float = 0.0
    stall: Stall | None = None
    delays: Iterator[float] | None = None
    has_own_claim: bool = False
    paused_at_s: float = 0.0
    again_at_s: float = 0.0

    @property
    def finished(self) -> bool:
        return self.state is UnitState.FINISHED

    @property
    def aside(self) -> bool:
        return self.state in _PUT_ASIDE

    @property
    def reading(self) -> bool:
        return self.state in (UnitState.READING, UnitState.READING_ASIDE)

    @property
    def is_awaited(self) -> bool:
        """True if there is nothing to deliver yet."""
        return not self.chunks and not self.finished

    def is_stalled(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the unit has not answered for long, in its attempts so far or in the current one."""
        if self.stall is None and self.asked_s:
            since = Stall(self.asked_s, f"unit {self.unit}: no answer yet")
            self.stall = since if since.is_long(now_s, hang_timeout_s) else None
        return self.stall is not None and self.stall.is_long(now_s, hang_timeout_s)

    def heard(self, chunk: SampleChunk) -> None:
        """Note that `chunk` came: the remote answers."""
        self.num_read = chunk.offsets[-1] + 1
        self.stall = self.delays = None


class UnitReader:
    """Reads units in any thread, and shows life in the process's slot on the board meanwhile.

    `in_rows`: samples may come in columns, because no transform takes them one by one.
    """

    def __init__(
        self,
        job: Job,
        source: Source,
        directory: Directory,
        slot: Slot,
        stop: threading.Event,
        *,
        in_rows: bool = False,
    ) -> None:
        self.plan: PassPlan | None = None
        self._pid = os.getpid()
        self._read: Callable[[int, np.random.Generator], Iterator[Rows | tuple[str, Any]]] = (
            source.read_rows if in_rows and isinstance(source, RowsSource) else source.read
        )
        # Of the remotes of a mix, one may be away while the others answer.
        self._remote_of: Callable[[int], Hashable] = getattr(source, "remote_of", lambda _: None)
        self._known_good: dict[Hashable, int] = {}  # the first unit of each remote that came whole
        self._answers = Answers()
        self._probe: UnitRead | None = None  # the unit that finds out whether a remote is back
        self._is_reported = False  # the source reports the bytes that it fetches
        self._hang_timeout_s = job.hang_timeout_s
        self._slot = slot
        self._stop = stop
        self._local = threading.local()
        self._counting = threading.Lock()
        limit = job.bandwidth_bytes_per_s
        budget = directory.worker_file("budget")
        with translated_disk_errors(budget):
            self._throttle = None if limit is None else Throttle(budget, limit)
        self._throttled = False
        # A server sends all that one request asks for, whether it is read or not: sockets have buffers.
        most = metering.NO_LIMIT_BYTES if limit is None else max(LEAST_REQUEST_BYTES, int(limit * REQUEST_S))
        metering.install(self._on_reported, self._on_request, self._on_slow_down, most)

    def read(self, unit_read: UnitRead, number: int) -> Iterator[SampleChunk]:
        """Yield the samples of the unit that are wanted.

        A remote that does not answer is tried again for ever, with full-jitter back-off; reading continues
        after the samples that came through, as a unit always gives the same samples. Raises LaterError while
        a unit that was put aside does not answer, and in the end SampleError if its remote delivers other
        units.
        """
        self._local.number, self._local.unit_read = number, unit_read
        slot = self._slot
        self.beat(number)  # before the position is shown: the last beat of an idle thread may be old
        slot["flights"][number] = unit_read.position + 1
        try:
            while True:
                self.beat(number)
                began_s = time.monotonic()
                try:
                    with closing(self._wanted(unit_read, number)) as items:
                        for chunk in gather(items):
                            unit_read.heard(chunk)
                            self._answers.heard(self._remote_of(unit_read.unit), time.monotonic())
                            yield chunk
                    self._known_good.setdefault(self._remote_of(unit_read.unit), unit_read.unit)
                    self._answers.heard(self._remote_of(unit_read.unit), time.monotonic())
                    return
                except SourceUnavailableError as error:
                    if self._stop.is_set():
                        raise
                    slot["retries"] += 1
                    self._pause(unit_read, self._retry_delay_s(unit_read, str(error), began_s))
        finally:
            end_if_forked(self._pid)
            self._refund()
            unit_read.asked_s = 0.0
            slot["flights"][number] = 0

    def _retry_delay_s(self, unit_read: UnitRead, reason: str, began_s: float) -> float:
        """The pause after a failed attempt that began at `began_s`; notes the stall of the unit.

        Raises SampleError if the unit is to be left out.
        """
        before, now_s = unit_read.stall, time.monotonic()
        unit_read.stall = stall = Stall(began_s if before is None else before.since_s, reason)
        if stall.is_too_long(now_s, self._hang_timeout_s) and self._remote_answers(
            self._remote_of(unit_read.unit)
        ):
            raise SampleError(f"{reason}; left out after a while, as others do come from there")
        was_back = self._answers.is_back(self._remote_of(unit_read.unit), unit_read.paused_at_s)
        if unit_read.delays is None or was_back:  # made when needed: seeding may cost more than a read
            unit_read.delays = backoff_delays(random.Random())
        return next(unit_read.delays)

    def _remote_answers(self, remote: Hashable) -> bool:
        """True if a unit that came from `remote` before comes again, and not from a cache in the source."""
        unit, self._local.fetched = self._known_good.get(remote), 0
        if unit is None or self.plan is None:
            return False
        try:
            next(iter(self._read(unit, unit_generator(self.plan, unit))), None)
        except SampleError:
            return True  # an answer, such as "not found"
        except Exception:  # noqa: BLE001  whatever a source raises: it did not answer
            return False
        return bool(self._local.fetched) or not self._is_reported

    def _wanted(self, unit_read: UnitRead, number: int) -> Generator[Item | SampleChunk, None, None]:
        """Yield the samples that are wanted after those that earlier attempts have read."""
        assert self.plan is not None
        first = unit_read.num_read
        rng = unit_generator(self.plan, unit_read.unit)
        self._local.fetched = 0
        self._refund()
        offset, beat_s = 0, 0.0
        for item in self._read(unit_read.unit, rng):
            end_if_forked(self._pid)
            if (now_s := time.monotonic()) - beat_s >= BEAT_S:
                self.beat(number)
                beat_s = now_s
            if isinstance(item, Rows):
                if (chunk := self._wanted_rows(item, offset, first, unit_read)) is not None:
                    yield chunk
                offset += len(item.keys)
                continue
            key, sample = item
            nbytes = approximate_bytes(sample)
            self._count(nbytes)
            if offset >= first and not unit_read.skip(offset):
                yield offset, key, sample, nbytes
            offset += 1

    def _wanted_rows(self, rows: Rows, offset: int, first: int, unit_read: UnitRead) -> SampleChunk | None:
        """The wanted samples of `rows`, the first of which is at `offset` in its unit.

        None if none are wanted.
        """
        table = to_table(rows)
        self._count(table.nbytes)
        offsets: Sequence[int] = range(offset, offset + len(table))
        if first > offset or unit_read.skip is not keep_all:
            wanted = [i for i, at in enumerate(offsets) if at >= first and not unit_read.skip(at)]
            if len(wanted) < len(table):
                table, offsets = table.take(wanted), [offset + i for i in wanted]
        return SampleChunk(offsets, (), table, table.nbytes) if offsets else None

    def _count(self, nbytes: int) -> None:
        """Count `nbytes` of a sample as fetched, unless the source reports its bytes itself."""
        if not self._local.fetched:
            self._on_fetched(nbytes)
            self._local.fetched = 0

    def beat(self, number: int) -> None:
        """Show that thread `number` is alive."""
        self._slot["flight_beats_s"][number] = time.monotonic()

    def _on_reported(self, nbytes: int) -> None:
        self._is_reported |= nbytes > 0
        self._on_fetched(nbytes)

    def _on_fetched(self, nbytes: int) -> None:
        number = getattr(self._local, "number", None)
        if number is None:
            return  # a thread of the user, or of the transform
        self.beat(number)
        if not nbytes:
            return
        self._local.unit_read.asked_s = 0.0
        self._local.fetched += nbytes
        with self._counting:
            self._slot["fetched_bytes"] += nbytes
        if self._throttle is not None:
            paid = getattr(self._local, "paid", 0)
            self._local.paid = max(0, paid - nbytes)
            self._throttle.spend(nbytes - paid, lambda: self.beat(number))

    def _on_request(self, nbytes: int) -> None:
        """Pay for bytes before they are on the wire.

        Otherwise the bytes that many readers have in flight would exceed the limit.
        """
        number = getattr(self._local, "number", None)
        if self._throttle is not None and number is not None:
            self._local.paid = getattr(self._local, "paid", 0) + nbytes
            self._throttle.spend(nbytes, lambda: self.beat(number))
        if number is not None and nbytes:
            self._local.unit_read.asked_s = self._local.unit_read.asked_s or time.monotonic()

    def _refund(self) -> None:
        """Refund what was paid for bytes that never came."""
        paid = getattr(self._local, "paid", 0)
        if self._throttle is not None and paid:
            self._local.paid = 0
            self._throttle.reserve(-paid)

    def _on_slow_down(self) -> None:
        self._throttled = True

    def take_throttled(self) -> bool:
        """True if a remote asked to slow down since the last call."""
        throttled, self._throttled = self._throttled, False
        return throttled

    def _pause(self, unit_read: UnitRead, delay_s: float) -> None:
        """Wait for the next attempt, or the end of an outage; raises LaterError if the unit is put aside."""
        unit_read.paused_at_s = time.monotonic()
        unit_read.again_at_s = unit_read.paused_at_s + delay_s
        while not self.may_try_again(unit_read, time.monotonic()):
            if unit_read.aside:
                raise LaterError
            if self._stop.wait(min(max(0.0, unit_read.again_at_s - time.monotonic()), metering.TICK_S)):
                return
            self.beat(self._local.number)

    def may_try_again(self, unit_read: UnitRead, now_s: float) -> bool:
        """True if the pause of a unit is over, or its remote is back.

        One probing unit of a remote that is away is tried sooner.
        """
        remote = self._remote_of(unit_read.unit)
        with self._counting:
            is_due = self._answers.is_back(remote, unit_read.paused_at_s)
            if not is_due and self._probe is None and self._answers.is_away(remote, now_s):
                self._probe = unit_read
                unit_read.again_at_s = min(unit_read.again_at_s, now_s + random.uniform(0.0, _PROBE_S))
            is_due |= now_s >= unit_read.again_at_s
            if is_due and self._probe is unit_read:
                self._probe = None
        return is_due


def unit_generator(plan: PassPlan, unit: int) -> np.random.Generator:
    """The generator with which `unit` is read in a pass: the same on every attempt, for the same samples."""
    key = mix_key(_UNIT_KEY, plan.seed, plan.ordinal, unit)
    return np.random.Generator(np.random.Philox(key=key))


def sample_generator(plan: PassPlan, unit: int, offset: int) -> np.random.Generator:
    """The generator for the transform of the sample at `offset` of `unit`: the same on every attempt."""
    key = mix_key(_SAMPLE_KEY, plan.seed, plan.ordinal, unit, offset)
    return np.random.Generator(np.random.Philox(key=key))
