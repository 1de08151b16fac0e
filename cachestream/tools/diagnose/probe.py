"""Reading a source for a short time, with one thread or many, to measure the stages of a sample.

Sources report when they ask for bytes and when bytes arrive (`transport.metering`). Time up to an arrival is
reading, time from there to the sample is decoding. A source that reports no bytes (a Dataset, a function)
decodes while it uses the processor, and reads while it waits. All threads run in this process, under one
interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from cachestream.config import with_generator
from cachestream.errors import CacheStreamError, SourceUnavailableError
from cachestream.sources.base import Rows, RowsSource, Source
from cachestream.tools.diagnose.stages import Run
from cachestream.transport import metering
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.encode import to_record, to_table
from cachestream.worker.packer import Packer

SHARD_BYTES: Final = 64_000_000  # a full shard of a worker
PATIENCE_S: Final = 30.0  # for the first sample
LEAVE_S: Final = 5.0  # for threads to finish their sample
AGAIN_S: Final = 0.5
_FINISHING: Final = 4.0  # times as long as a run, for what is under way at its end
_FAILURES: Final = 20  # samples or units that fail before any can be used: then the run ends

Transform = Callable[..., Any]


class Probe:
    """One run over the units of a queue: a single thread reads, transforms and packs, or several threads only
    read.

    `packer` holds the last samples, up to a full shard. `skipped` samples or units failed, the first because
    of `failure`.
    """

    def __init__(
        self, source: Source, units: deque[int], transform: Transform | None, *, reads: int = 1
    ) -> None:
        self._units, self._reads = units, reads
        # As a sampling process does: in columns where no transform looks at single samples.
        in_columns = transform is None and isinstance(source, RowsSource)
        self._read: Callable[..., Any] = source.read_rows if in_columns else source.read  # type: ignore[attr-defined]
        self._transform = None if transform is None else with_generator(transform)
        self.packer = Packer()
        self.skipped, self.failure = 0, ""
        self._num_samples = self._fetched_bytes = 0
        self._wall_s = dict.fromkeys(("read", "decode", "transform", "pack"), 0.0)
        self._cpu_s = dict(self._wall_s)
        self._lock = threading.Lock()
        self._mine = threading.local()  # the stage of each thread, and the time when it began
        self._at_work = reads
        self._finishing = False  # threads end after their sample
        self._stop, self._ended = threading.Event(), threading.Event()

    def run(self, seconds: float) -> Run:
        """Read for `seconds`, or until the queue is empty.

        A single read may finish its sample. So may several that brought hardly any: objects that share a slow
        network arrive together, and late. Where no sample came at all, the first is waited for, up to 30 s.
        """
        threads = [
            threading.Thread(target=self._work, name=f"probe-{number}", daemon=True)
            for number in range(self._reads)
        ]
        metering.install(self._on_fetched, self._on_asking)
        begun_s, busy_s = _now()
        self._finishing = not seconds  # before the threads begin, which may else read several samples
        try:
            for thread in threads:
                thread.start()
            self._ended.wait(seconds)
            if self._reads == 1 or self._num_samples < 2 * self._reads:
                self._finishing = True
                self._ended.wait(_FINISHING * seconds if self._num_samples else PATIENCE_S)
            with self._lock:
                came = self._reads, self._num_samples, self._fetched_bytes
                now_s, now_busy_s = _now()
                busy_cores = (now_busy_s - busy_s) / (now_s - begun_s)
                return Run(*came, now_s - begun_s, busy_cores, dict(self._wall_s), dict(self._cpu_s))
        finally:
            self._stop.set()
            until_s = time.monotonic() + LEAVE_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, until_s - time.monotonic()))
            metering.install(None)

    def _work(self) -> None:
        while not self._is_done():
            try:
                unit = self._units.popleft()
            except IndexError:
                break
            self._mine.stage, self._mine.since = "read", _now()
            try:
                self._read_unit(unit)
            except SourceUnavailableError as error:
                self.failure = self.failure or str(error)
                self._stop.wait(AGAIN_S)
            except (Exception, SystemExit) as error:  # noqa: BLE001  sources of users may raise anything
                self._skip(error)
        with self._lock:
            self._at_work -= 1
            if not self._at_work:
                self._ended.set()

    def _is_done(self) -> bool:
        return self._stop.is_set() or (self._finishing and self._num_samples > 0)

    def _read_unit(self, unit: int) -> None:
        for item in self._read(unit, np.random.default_rng(unit)):
            self._lap("decode")
            try:
                if self._reads == 1:
                    self._pack(item)
            except (Exception, SystemExit) as error:  # noqa: BLE001  transforms may raise anything
                self._skip(error)
            else:
                with self._lock:
                    self._num_samples += len(item.keys) if isinstance(item, Rows) else 1
            if self._is_done():
                return

    def _pack(self, item: Rows | tuple[str, Any]) -> None:
        """Transform and pack as a sampling process does."""
        if self.packer.size_bytes >= SHARD_BYTES:
            self.packer.clear()
        if isinstance(item, Rows):
            self.packer.add_table(to_table(item), None)
        else:
            key, sample = item
            if self._transform is not None:
                sample = self._transform(sample, np.random.default_rng)
                self._lap("transform")
            if sample is None:
                return
            self.packer.add(key, to_record(sample), None)
        self._lap("pack")

    def _skip(self, error: BaseException) -> None:
        known = isinstance(error, CacheStreamError)
        reason = str(error) if known else redact_text(f"{type(error).__name__}: {error}")[:500]
        self.failure = self.failure or reason
        self.skipped += 1
        if self.skipped >= _FAILURES and not self._num_samples:
            self._stop.set()

    def _on_asking(self, _nbytes: int) -> None:
        if hasattr(self._mine, "stage"):  # it is a thread of this probe
            self._lap(self._mine.stage)
            self._mine.stage = "read"

    def _on_fetched(self, nbytes: int) -> None:
        if nbytes and hasattr(self._mine, "stage"):
            self._lap("read")
            self._mine.stage = "decode"
            with self._lock:
                self._fetched_bytes += nbytes

    def _lap(self, stage: str) -> None:
        """Count the time since this thread's last lap for `stage`, and the processor time of the whole
        process.

        A driver has threads of its own, which work for the one that waits for them.
        """
        before, self._mine.since = self._mine.since, _now()
        with self._lock:
            self._wall_s[stage] += self._mine.since[0] - before[0]
            self._cpu_s[stage] += self._mine.since[1] - before[1]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
