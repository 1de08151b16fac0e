"""Reading one unit: seeded, counted, watched, held to the bandwidth, and tried again while the remote is away."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import numpy as np

from cachestream.errors import SourceUnavailableError
from cachestream.permutation import mix_key
from cachestream.remote import pulse
from cachestream.remote.retry import backoff_delays
from cachestream.remote.source import Source
from cachestream.remote.throttle import Throttle
from cachestream.sampling.fetch import Flight
from cachestream.sampling.job import Job
from cachestream.sampling.order import PassPlan
from cachestream.storage.board import NO_REMOTE, Slot
from cachestream.storage.directory import Directory

__all__ = ["UnitReader", "approximate_bytes", "unit_generator"]

_UNIT_KEY = 3
REQUEST_S: Final = 0.05  # of the bandwidth, in one request
LEAST_REQUEST_BYTES: Final = 256 << 10


class UnitReader:
    """Reads units in any thread; keeps the process's slot on the board alive while it does."""

    def __init__(
        self, job: Job, source: Source, directory: Directory, slot: Slot, stop: threading.Event
    ) -> None:
        self.plan: PassPlan | None = None
        self._source = source
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

    def read(self, flight: Flight, number: int) -> Iterator[tuple[int, str, Any, int]]:
        """Yield (offset, key, sample, nbytes) of the unit's samples that are wanted.

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
                    with closing(self._samples(flight, number)) as samples:
                        for item in samples:
                            if item[0] >= came:
                                came = item[0] + 1
                                delays = None
                                yield item
                    return
                except SourceUnavailableError:
                    if self._stop.is_set():
                        raise
                    slot["retries"] += 1
                    slot["state"] = NO_REMOTE
                    delays = backoff_delays(random.Random()) if delays is None else delays
                    self._pause(next(delays))
        finally:
            self._refund()
            slot["flights"][number] = 0

    def _samples(self, flight: Flight, number: int) -> Generator[tuple[int, str, Any, int], None, None]:
        assert self.plan is not None
        rng = unit_generator(self.plan, flight.unit)
        self._local.fetched = 0
        self._refund()
        for offset, (name, sample) in enumerate(self._source.read(flight.unit, rng)):
            self.beat(number)
            nbytes = approximate_bytes(sample)
            if not self._local.fetched:
                # The source reports no bytes itself: what it gives is what it fetched.
                self._on_fetched(nbytes)
                self._local.fetched = 0
            if not flight.skip(offset):
                yield offset, name, sample, nbytes

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


def approximate_bytes(value: Any) -> int:
    """About how much memory a sample takes."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, Mapping):
        return sum(map(approximate_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(approximate_bytes, value))
    return len(value) if isinstance(value, bytes | str) else sys.getsizeof(value)
