"""Reading units: with seeds, retries, and the accounting of bytes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cachestream import tracing
from cachestream.errors import SampleError, SourceUnavailableError
from cachestream.permutation import keyed_generator, mix_key
from cachestream.sources.base import ColumnarSource, Rows, Source
from cachestream.sources.mix import MixSource
from cachestream.sources.token_windows import PackedSource
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.telemetry import MAIN, Slot
from cachestream.transport import metering
from cachestream.transport.driver import LateCallsError
from cachestream.transport.metering import Throttle
from cachestream.worker.order import END, PassPlan
from cachestream.worker.processes import end_if_forked
from cachestream.worker.sampling.encode import (
    Item,
    SampleChunk,
    approximate_bytes,
    group_into_chunks,
    in_columns,
    to_table,
)
from cachestream.worker.sampling.unit import Stall, Unit, UnitRead

_UNIT_KEY: Final = 3
_SAMPLE_KEY: Final = 5
_BEAT_S: Final = 0.001
_FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0  # what waits for the end of an outage notices it so soon
_REQUEST_S: Final = 0.05  # one request asks for so many seconds of the bandwidth
_LEAST_REQUEST_BYTES: Final = 256 << 10


class UnitReader:
    """Reads units of `source` in any thread, and shows life in the slot of `meter` meanwhile.

    `in_rows`: samples may come in columns, because no transform takes them one by one.
    """

    def __init__(
        self,
        source: Source,
        meter: FetchMeter,
        stop: threading.Event,
        *,
        hang_timeout_s: float,
        in_rows: bool = False,
    ) -> None:
        self.plan: PassPlan | None = None
        self.meter = meter
        self._pid, self._in_rows = os.getpid(), in_rows
        self._read: Callable[[int, np.random.Generator], Iterator[Rows | tuple[str, Any]]] = (
            source.read_rows if in_rows and isinstance(source, ColumnarSource) else source.read
        )
        # Of the remotes of a mix, one may be away while the others answer.
        self._remote_of: Callable[[int], Hashable] = (
            source.remote_of if isinstance(source, MixSource | PackedSource) else lambda _: None
        )
        self._known_good: dict[Hashable, int] = {}  # the first unit of each remote that came without an error
        self._hang_timeout_s = hang_timeout_s
        self._slot, self._stop = meter.slot, stop

    def read(self, unit_read: UnitRead, number: int) -> Iterator[SampleChunk | float]:
        """Yield the samples of the unit that are wanted, and before each further attempt a pause in seconds.

        A unit whose remote does not answer is tried again for ever; reading continues after the samples that
        were received, as a unit always gives the same samples. Raises SampleError in the end if the remote
        delivers other units.
        """
        unit, reads = unit_read.unit, self._slot["reads"]
        self.meter.begin(unit_read, number)
        reads[number] = unit.position + 1
        try:
            while True:
                began_s = since_s = time.monotonic()
                is_traced = tracing.is_on()
                try:
                    with closing(self._wanted(unit_read)) as items:
                        for chunk in group_into_chunks(items):
                            # Not tracing.each, whose generator takes 3 % of the time of a tiny unit.
                            if is_traced:
                                tracing.add("read", since_s, time.monotonic(), unit=unit.number)
                            unit_read.received(chunk)
                            yield in_columns(chunk) if self._in_rows else chunk
                            if is_traced:
                                since_s = time.monotonic()
                    self._known_good.setdefault(self._remote_of(unit.number), unit.number)
                    return
                except SourceUnavailableError as error:
                    if isinstance(error, LateCallsError):
                        self._stop.set()  # another process goes on
                    if self._stop.is_set():
                        raise
                    self._slot["retries"] += 1
                    pause_s = self._pause_s(unit_read, str(error), began_s)
                reads[number] = 0  # a death during the pause is not the fault of this unit
                yield pause_s
                self.meter.beat(number)
                reads[number] = unit.position + 1
        finally:
            end_if_forked(self._pid)
            self.meter.end()
            reads[number] = 0

    def _pause_s(self, unit_read: UnitRead, reason: str, began_s: float) -> float:
        """The pause after a failed attempt that began at `began_s`; notes the stall of the unit.

        Raises SampleError if the unit is to be left out. Full jitter, doubling (Marc Brooker, "Exponential
        Backoff And Jitter", AWS Architecture Blog, 2015).
        """
        before, remote = unit_read.stall, self._remote_of(unit_read.unit.number)
        unit_read.stall = stall = Stall(began_s if before is None else before.since_s, reason)
        if stall.is_too_long(time.monotonic(), self._hang_timeout_s) and self._answers(remote):
            raise SampleError(f"{reason}; left out after a while, as others do come from there")
        longest_s = min(LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(unit_read.retries, 10))
        unit_read.retries += 1
        return random.uniform(0.0, longest_s)

    def _answers(self, remote: Hashable) -> bool:
        """True if a unit of `remote` that came before can be fetched again, and not from a cache."""
        unit = self._known_good.get(remote)
        if unit is None or self.plan is None:
            return False
        self.meter.begin_attempt()
        try:
            next(iter(self._read(unit, unit_generator(self.plan, unit))), None)
        except SampleError:
            return True  # an answer, such as "not found"
        except Exception:  # noqa: BLE001  whatever a source raises: it did not answer
            return False
        return self.meter.has_fetched

    def _wanted(self, unit_read: UnitRead) -> Generator[Item | SampleChunk, None, None]:
        """Yield the samples that are wanted after those that earlier attempts have read."""
        assert self.plan is not None
        unit, first, meter = unit_read.unit, unit_read.next_offset, self.meter
        if (end := unit.end if unit.cached else END) <= first:
            return
        rng = unit_generator(self.plan, unit.number)
        meter.begin_attempt()
        offset = 0
        for item in self._read(unit.number, rng):
            end_if_forked(self._pid)
            meter.beat_now_and_then()
            if isinstance(item, Rows):
                if (chunk := self._wanted_rows(item, offset, first, unit)) is not None:
                    yield chunk
                offset += len(item.keys)
            else:
                key, sample = item
                nbytes = approximate_bytes(sample)
                meter.count(nbytes)
                if offset >= first and unit.is_wanted(offset):
                    yield offset, key, sample, nbytes
                offset += 1
            if offset >= end:  # the cache holds the rest
                return

    def _wanted_rows(self, rows: Rows, offset: int, first: int, unit: Unit) -> SampleChunk | None:
        """The wanted samples of `rows`, the first of which is at `offset` in its unit; None without any."""
        table = to_table(rows)
        self.meter.count(table.nbytes)
        offsets: Sequence[int] = range(offset, offset + len(table))
        if max(first, unit.first) > offset or unit.cached:
            is_wanted = np.arange(offset, offset + len(table)) >= max(first, unit.first)
            for start, stop in unit.cached:
                is_wanted[max(0, start - offset) : max(0, stop - offset)] = False
            wanted = np.flatnonzero(is_wanted)
            if len(wanted) < len(table):
                table, offsets = table.take(wanted.tolist()), (wanted + offset).tolist()
        return SampleChunk(offsets, (), table, table.nbytes) if offsets else None


@dataclass(slots=True)
class _Account:
    """The bytes fetched in the current attempt to read a unit, and those paid for ahead."""

    unit_read: UnitRead
    number: int
    fetched_bytes: int = 0
    paid_bytes: int = 0
    beat_s: float = 0.0


# Of the unit that is read. A context variable, as a library may fetch in an event loop or a thread pool of
# its own.
_current: Final[ContextVar[_Account | None]] = ContextVar("account", default=None)


def _account() -> _Account:
    account = _current.get()
    assert account is not None
    return account


class FetchMeter:
    """The accounting of the reading threads: bytes and signs of life in `slot`, and the bandwidth limit.

    All processes with the file `budget`, which a limit needs, share the limit. Bytes that are fetched for no
    unit, such as those of a transform, do not count.
    """

    def __init__(self, slot: Slot, bandwidth_bytes_per_s: float | None = None, budget: str = "") -> None:
        self.slot = slot
        self._counting = threading.Lock()
        self._is_reported = False  # the source reports the bytes that it fetches
        self._is_throttled = False
        limit = bandwidth_bytes_per_s
        slot["bandwidth_bytes_per_s"] = limit or 0.0
        with translated_disk_errors(budget):
            self._throttle = None if limit is None else Throttle(budget, limit)
        # A server sends all that one request asks for, whether it is read or not: sockets have buffers.
        most = (
            metering.NO_LIMIT_BYTES if limit is None else max(_LEAST_REQUEST_BYTES, int(limit * _REQUEST_S))
        )
        metering.install(self._on_reported, self._on_request, self._on_slow_down, most)

    def begin(self, unit_read: UnitRead, number: int) -> None:
        """Account for `unit_read` in this thread, which has a `number` on the board."""
        _current.set(_Account(unit_read, number))
        self.beat(number)  # before the position is shown: the last beat of an idle thread may be old

    def begin_attempt(self) -> None:
        """Count the bytes of another attempt, and refund what was paid for bytes that never came."""
        account = _account()
        account.fetched_bytes = 0
        if self._throttle is not None and account.paid_bytes:
            self._throttle.reserve(-account.paid_bytes)
        account.paid_bytes = 0

    def end(self) -> None:
        self.begin_attempt()
        _account().unit_read.requested_s = 0.0
        _current.set(None)

    def beat(self, number: int) -> None:
        """Show that thread `number` is alive."""
        self.slot["read_beats_s"][number] = now_s = time.monotonic()
        if number == MAIN:
            self.slot["beat_s"] = now_s

    def beat_now_and_then(self) -> None:
        """Show that this thread is alive, every millisecond at most."""
        account = _account()
        if (now_s := time.monotonic()) - account.beat_s >= _BEAT_S:
            account.beat_s = now_s
            self.beat(account.number)

    @property
    def has_fetched(self) -> bool:
        """True if the current attempt has fetched bytes, or may have done so: the source reports none."""
        return bool(_account().fetched_bytes) or not self._is_reported

    def count(self, nbytes: int) -> None:
        """Count `nbytes` of a sample as fetched, unless the source reports its bytes itself."""
        if not _account().fetched_bytes:
            self._on_fetched(nbytes)
            _account().fetched_bytes = 0

    def _on_reported(self, nbytes: int) -> None:
        self._is_reported |= nbytes > 0
        self._on_fetched(nbytes)

    def _on_fetched(self, nbytes: int) -> None:
        account = _current.get()
        if account is None:
            return
        self.beat(account.number)
        if not nbytes:
            return
        account.unit_read.requested_s = 0.0
        with self._counting:
            self.slot["fetched_bytes"] += nbytes
            account.fetched_bytes += nbytes
            account.unit_read.fetched_bytes += nbytes
            owed_bytes = nbytes - account.paid_bytes
            account.paid_bytes = max(0, -owed_bytes)
        if self._throttle is not None:
            self._throttle.spend(owed_bytes)

    def _on_request(self, nbytes: int) -> None:
        """Pay for the bytes of a request before it is sent.

        Otherwise the bytes that many readers have in flight would exceed the limit.
        """
        account = _current.get()
        if account is None:
            return
        if self._throttle is not None:
            with self._counting:
                account.paid_bytes += nbytes
            self._throttle.spend(nbytes)
        if nbytes:
            account.unit_read.requested_s = account.unit_read.requested_s or time.monotonic()

    def _on_slow_down(self) -> None:
        self._is_throttled = True

    def take_throttled(self) -> bool:
        """True if a remote asked to slow down since the last call."""
        throttled, self._is_throttled = self._is_throttled, False
        return throttled


def unit_generator(plan: PassPlan, unit: int) -> np.random.Generator:
    """The generator with which `unit` is read in a pass: the same on every attempt, for the same samples."""
    return keyed_generator(mix_key(_UNIT_KEY, plan.seed, plan.ordinal, unit))


def sample_generator(plan: PassPlan, unit: int, offset: int) -> np.random.Generator:
    """The generator for the transform of the sample at `offset` of `unit`: the same on every attempt."""
    return keyed_generator(mix_key(_SAMPLE_KEY, plan.seed, plan.ordinal, unit, offset))
