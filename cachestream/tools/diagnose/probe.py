"""Reading a source for a short time, with one thread or many, to measure the stages of a sample.

Sources report when they ask for bytes and when bytes arrive (`transport.metering`). Time up to an arrival is
reading, time from there to the sample is decoding. Of a source that reports no bytes (a Dataset, a function)
the processor's time counts as decoding, and waiting as reading. All threads run in this process, under one
interpreter's lock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cachestream.config import with_generator
from cachestream.errors import CacheStreamError
from cachestream.sources.base import ColumnarSource, Rows, Source
from cachestream.tools.diagnose.stages import Measurement
from cachestream.transport import metering
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.sampling.encode import to_table
from cachestream.worker.sampling.packer import Packer
from cachestream.worker.sampling.transformer import collected, to_records

SHARD_BYTES: Final = 64_000_000  # a full shard of a worker
PATIENCE_S: Final = 30.0  # for the first sample, and for what is under way at the end of a run
LEAVE_S: Final = 5.0  # for threads to finish their sample
_FAILURES: Final = 20  # further samples or units that fail before any can be used: then the run ends

Transform = Callable[..., Any]


@dataclass(slots=True)
class _Reading:
    """The reading of a thread in a run: its stage, and the time (and processor time) at which that began."""

    run: Measurement
    stage: str = "read"
    since: tuple[float, float] = (0.0, 0.0)


# A context variable, as a library may fetch in an event loop or a thread pool of its own.
_reading: Final[ContextVar[_Reading | None]] = ContextVar("reading", default=None)


class Probe:
    """Runs over the units in `order`, again and again: one thread reads, transforms and packs, or many read.

    `packer` holds the last samples, up to a full shard. `failed`: the samples that could not be used, by unit
    and index, -1 for a unit; the first because of `failure`.
    """

    def __init__(self, source: Source, order: Sequence[int], transform: Transform | None) -> None:
        self._units, self._num_units = itertools.cycle(order), len(order)
        # As a sampling process does: in columns where no transform looks at single samples.
        in_columns = transform is None and isinstance(source, ColumnarSource)
        self._read: Callable[..., Any] = source.read_rows if in_columns else source.read  # type: ignore[attr-defined]
        self._transform = None if transform is None else with_generator(transform)
        self.packer = Packer()
        self.failed: set[tuple[int, int]] = set()
        self.failure = ""
        self._lock = threading.Lock()

    def run(self, seconds: float, reads: int = 1) -> Measurement:
        """Read for `seconds`, `reads` units at once.

        A single read may finish its sample. So may several that brought hardly any: objects that share a slow
        network arrive together, and late. Where no sample came at all, the first is waited for, up to 30 s.
        """
        metering.install(self._on_fetched, self._on_asking)
        run, stop = Measurement(reads), threading.Event()
        begun_s, busy_s = _now()
        most_failed = len(self.failed) + _FAILURES

        def is_done() -> bool:
            if run.num_samples:
                return stop.is_set() or time.perf_counter() >= begun_s + seconds
            return stop.is_set() or len(self.failed) >= most_failed or run.units >= self._num_units

        def work() -> None:
            reading = _Reading(run)
            _reading.set(reading)
            for unit in self._units:
                if is_done():
                    return
                reading.stage, reading.since = "read", _now()
                try:
                    self._read_unit(reading, unit, is_done)
                except (Exception, SystemExit) as error:  # noqa: BLE001  sources of users may raise anything
                    self._skip(unit, -1, error)
                with self._lock:
                    run.units += 1

        threads = [threading.Thread(target=work, name=f"probe-{n}", daemon=True) for n in range(reads)]
        try:
            for thread in threads:
                thread.start()
            _join(threads, seconds)
            if reads == 1 or run.num_samples < 2 * reads:
                _join(threads, PATIENCE_S)
            with self._lock:
                now_s, now_busy_s = _now()
                run.seconds, run.busy_cores = now_s - begun_s, (now_busy_s - busy_s) / (now_s - begun_s)
                return replace(run, wall_s=dict(run.wall_s), cpu_s=dict(run.cpu_s))
        finally:
            stop.set()
            _join(threads, LEAVE_S)
            metering.install(None)

    def _read_unit(self, reading: _Reading, unit: int, is_done: Callable[[], bool]) -> None:
        for index, item in enumerate(self._read(unit, np.random.default_rng(unit))):
            self._lap(reading, "decode")
            try:
                if reading.run.reads == 1:
                    self._pack(reading, item)
            except (Exception, SystemExit) as error:  # noqa: BLE001  transforms may raise anything
                self._skip(unit, index, error)
            else:
                with self._lock:
                    reading.run.num_samples += len(item.keys) if isinstance(item, Rows) else 1
            if is_done():
                return

    def _pack(self, reading: _Reading, item: Rows | tuple[str, Any]) -> None:
        """Transform and pack as a sampling process does."""
        if self.packer.size_bytes >= SHARD_BYTES:
            self.packer.clear()
        if isinstance(item, Rows):
            self.packer.add(to_table(item), None)
        else:
            key, sample = item
            if self._transform is not None:
                sample = collected(self._transform(sample, np.random.default_rng))
                self._lap(reading, "transform")
            for record in to_records(sample, key):
                self.packer.add(record, None)
        self._lap(reading, "pack")

    def _skip(self, unit: int, index: int, error: BaseException) -> None:
        known = isinstance(error, CacheStreamError)
        reason = str(error) if known else redact_text(f"{type(error).__name__}: {error}")[:500]
        with self._lock:
            self.failure = self.failure or reason
            self.failed.add((unit, index))

    def _on_asking(self, _nbytes: int) -> None:
        if (reading := _reading.get()) is not None:
            self._lap(reading, reading.stage)
            reading.stage = "read"

    def _on_fetched(self, nbytes: int) -> None:
        if nbytes and (reading := _reading.get()) is not None:
            self._lap(reading, "read")
            reading.stage = "decode"
            with self._lock:
                reading.run.fetched_bytes += nbytes

    def _lap(self, reading: _Reading, stage: str) -> None:
        """Count the time and the processor time, a driver's threads included, since the last lap for
        `stage`.
        """
        before, reading.since = reading.since, _now()
        with self._lock:
            reading.run.wall_s[stage] += reading.since[0] - before[0]
            reading.run.cpu_s[stage] += reading.since[1] - before[1]


def _join(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait for the threads that were started, for `timeout_s` in all."""
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, until_s - time.monotonic()))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
