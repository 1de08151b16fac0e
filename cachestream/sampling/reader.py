"""Reading one unit: seeded, counted, watched, held to the bandwidth, and tried again while the remote is away."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np

from cachestream.errors import SourceUnavailableError
from cachestream.permutation import mix_key
from cachestream.remote import pulse
from cachestream.remote.retry import backoff_delays
from cachestream.remote.source import Rows, RowsSource, Source
from cachestream.remote.throttle import Throttle
from cachestream.sampling.fetch import Flight
from cachestream.sampling.job import Job
from cachestream.sampling.kinship import end_if_forked
from cachestream.sampling.known import keep_all
from cachestream.sampling.lots import Item, Lot, approximate_bytes, gather
from cachestream.sampling.order import PassPlan
from cachestream.sampling.table import to_table
from cachestream.storage.board import Slot
from cachestream.storage.directory import Directory

__all__ = ["UnitReader", "unit_generator"]

_UNIT_KEY = 3
BEAT_S: Final = 0.001
REQUEST_S: Final = 0.05  # of the bandwidth, in one request
LEAST_REQUEST_BYTES: Final = 256 << 10


class UnitReader:
    """Reads units in any thread; keeps the process's slot on the board alive while it does.

    `in_rows`: samples may come in columns, because nobody looks at each of them.
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
        self._slot = slot
        self._stop = stop
        self._local = threading.local()
        self._counting = threading.Lock()
        limit = job.bandwidth_bytes_per_s
        self._throttle = None if limit is None else Throttle(directory.worker_file("budget"), limit)
        self.throttled = False  # since whoever asks has set it to False
        # What one request asks for is on its way at once, whether it is read or not: sockets have buffers.
        most = pulse.NO_LIMIT_BYTES if limit is None else max(LEAST_REQUEST_BYTES, int(limit * REQUEST_S))
        pulse.install(self._on_fetched, self._on_asking, self._on_slow_down, most)

    def read(self, flight: Flight, number: int) -> Iterator[Lot]:
        """Yield the unit's samples that are wanted.

        A remote that does not answer is tried again for ever, with full-jitter back-off, and goes on
        after the samples that came through: a unit gives the same samples again.
        """
        self._local.number = number
        slot = self._slot
        self.beat(number)  # before the flight is seen: the last beat of an idle thread may be old
        slot["flights"][number] = flight.position + 1
        delays: Iterator[float] | None = None  # made when needed: seeding costs more than many a read
        came = 0
        try:
            while True:
                self.beat(number)
                try:
                    with closing(self._wanted(flight, number, came)) as items:
                        for lot in gather(items):
                            came = lot.offsets[-1] + 1
                            delays, flight.silence = None, ""
                            yield lot
                    return
                except SourceUnavailableError as error:
                    if self._stop.is_set():
                        raise
                    slot["retries"] += 1
                    flight.silence = str(error)
                    delays = backoff_delays(random.Random()) if delays is None else delays
                    self._pause(next(delays))
        finally:
            end_if_forked(self._pid)
            self._refund()
            slot["flights"][number] = 0

    def _wanted(self, flight: Flight, number: int, first: int) -> Generator[Item | Lot, None, None]:
        """The samples that are wanted, from the offset `first` on."""
        assert self.plan is not None
        rng = unit_generator(self.plan, flight.unit)
        self._local.fetched = 0
        self._refund()
        offset, beat_s = 0, 0.0
        for item in self._read(flight.unit, rng):
            end_if_forked(self._pid)
            if (now_s := time.monotonic()) - beat_s >= BEAT_S:
                self.beat(number)
                beat_s = now_s
            if isinstance(item, Rows):
                if (lot := self._table(item, offset, first, flight)) is not None:
                    yield lot
                offset += len(item.keys)
                continue
            key, sample = item
            nbytes = approximate_bytes(sample)
            self._count(nbytes)
            if offset >= first and not flight.skip(offset):
                yield offset, key, sample, nbytes
            offset += 1

    def _table(self, rows: Rows, offset: int, first: int, flight: Flight) -> Lot | None:
        """The wanted ones of `rows`, the first of which is at `offset` in its unit."""
        table = to_table(rows)
        self._count(table.nbytes)
        offsets: Sequence[int] = range(offset, offset + len(table))
        if first > offset or flight.skip is not keep_all:
            wanted = [i for i, at in enumerate(offsets) if at >= first and not flight.skip(at)]
            if len(wanted) < len(table):
                table, offsets = table.take(wanted), [offset + i for i in wanted]
        return Lot(offsets, (), table, table.nbytes) if offsets else None

    def _count(self, nbytes: int) -> None:
        """A sample of `nbytes` came: what a source gives that reports no bytes itself is what it fetched."""
        if not self._local.fetched:
            self._on_fetched(nbytes)
            self._local.fetched = 0

    def beat(self, number: int) -> None:
        """Show that thread `number` is alive."""
        self._slot["flight_beats_s"][number] = time.monotonic()

    def _on_fetched(self, nbytes: int) -> None:
        number = getattr(self._local, "number", None)
        if number is None:
            return  # a thread of the user's own, or of the transform
        self.beat(number)
        if not nbytes:
            return
        self._local.fetched += nbytes
        with self._counting:
            self._slot["fetched_bytes"] += nbytes
        if self._throttle is not None:
            paid = getattr(self._local, "paid", 0)
            self._local.paid = max(0, paid - nbytes)
            self._throttle.spend(nbytes - paid, lambda: self.beat(number))

    def _on_asking(self, nbytes: int) -> None:
        """Pay before the bytes are on the wire: what many readers have in flight would else be over the limit."""
        number = getattr(self._local, "number", None)
        if self._throttle is not None and number is not None:
            self._local.paid = getattr(self._local, "paid", 0) + nbytes
            self._throttle.spend(nbytes, lambda: self.beat(number))

    def _refund(self) -> None:
        """Give back what was paid for bytes that never came."""
        paid = getattr(self._local, "paid", 0)
        if self._throttle is not None and paid:
            self._local.paid = 0
            self._throttle.reserve(-paid)

    def _on_slow_down(self) -> None:
        self.throttled = True

    def _pause(self, delay_s: float) -> None:
        deadline = time.monotonic() + delay_s
        while (left := deadline - time.monotonic()) > 0 and not self._stop.wait(min(left, pulse.TICK_S)):
            self.beat(self._local.number)


def unit_generator(plan: PassPlan, unit: int) -> np.random.Generator:
    """What `unit` is read with in a pass: always the same, so that it gives the same samples again."""
    key = mix_key(_UNIT_KEY, plan.seed, plan.ordinal, unit)
    return np.random.Generator(np.random.Philox(key=key))
