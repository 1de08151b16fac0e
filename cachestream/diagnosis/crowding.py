"""Reading many units of a source at once, as the sampling processes of a worker do, to see how much comes.

All of them are read in this process, by as many threads as a worker has in all of its processes: what one
interpreter's lock holds up is seen in `Crowd.busy_cores`, and is not the remote's. (A real worker would have taken some seconds to
start, and to find out how many reads at once bring more.)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from cachestream.diagnosis.probing import AGAIN_S, LEAVE_S, Transform, Units, items_of, reading
from cachestream.diagnosis.stages import Crowd
from cachestream.errors import SourceUnavailableError
from cachestream.remote import pulse
from cachestream.remote.source import Rows, Source

__all__ = ["machine_s", "read_together"]

_LONGER: Final = 4.0  # times as long, for what is on its way at the end


def read_together(
    source: Source, units: Units, transform: Transform | None, first: int, reads: int, seconds: float
) -> Crowd:
    """Read `reads` units at once, from the place `first` on, for `seconds` or until each was read once.

    Where hardly any has come by then, what is on its way is waited for, and no more is begun: objects that share a
    slow network come all at once, and late. The samples are counted and dropped; units that fail are passed over.
    """
    return _Together(source, units, transform, first).run(reads, seconds)


class _Together:
    def __init__(self, source: Source, units: Units, transform: Transform | None, first: int) -> None:
        self._items = items_of(source, transform)
        self._units = units.after(first)
        self._lock = threading.Lock()
        self._stop, self._last = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._local = threading.local()  # of each thread: see `_turn`
        self._sums_s: list[list[float]] = []
        self._samples = self._bytes = self._slowed_down = self._at_work = 0

    def run(self, reads: int, seconds: float) -> Crowd:
        self._at_work = reads
        threads = [
            threading.Thread(target=self._work, name=f"probe-{number}", daemon=True)
            for number in range(reads)
        ]
        pulse.install(self._on_fetched, self._on_asking, self._on_slow_down)
        begun_s, busy_s, queued_s = time.perf_counter(), time.process_time(), _queues_s()
        before_s = machine_s()
        try:
            for thread in threads:
                thread.start()
            if not self._ended.wait(seconds) and self._samples < 2 * reads:
                self._last.set()
                self._ended.wait(_LONGER * seconds)
            spent_s = time.perf_counter() - begun_s
            waiting_s = sum(now_s - queued_s.get(name, 0.0) for name, now_s in _queues_s().items())
            busy_s = time.process_time() - busy_s
            after_s = machine_s()
            with self._lock:
                return Crowd(
                    reads=reads,
                    num_samples=self._samples,
                    fetched_bytes=self._bytes,
                    seconds=spent_s,
                    busy_cores=busy_s / spent_s,
                    wanted_cores=(busy_s + waiting_s) / spent_s,
                    decoding=self._share_of_decoding(),
                    slowed_down=self._slowed_down,
                    machine_cores=None
                    if after_s is None or before_s is None
                    else (after_s - before_s) / spent_s,
                )
        finally:
            self._stop.set()
            until_s = time.monotonic() + LEAVE_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, until_s - time.monotonic()))
            pulse.install(None)

    def _work(self) -> None:
        self._local.sums_s = sums_s = [0.0, 0.0]
        with self._lock:
            self._sums_s.append(sums_s)
        while not self._stop.is_set() and (unit := self._next()) is not None:
            self._local.is_reading, self._local.since_s = True, time.perf_counter()
            try:
                with reading(self._items(*unit)) as items:
                    self._drain(items)
            except SourceUnavailableError:
                self._stop.wait(AGAIN_S)
            except Exception:  # noqa: BLE001, S110  reading one after another has told why
                pass
        with self._lock:
            self._at_work -= 1
            if not self._at_work:
                self._ended.set()

    def _next(self) -> tuple[int, np.random.Generator] | None:
        with self._lock:
            return None if self._last.is_set() else next(self._units, None)

    def _drain(self, items: Iterator[Any]) -> None:
        for item in items:
            self._turn(is_reading=False)
            with self._lock:
                self._samples += len(item.keys) if isinstance(item, Rows) else 1
            if self._stop.is_set() or self._last.is_set():
                return

    def _turn(self, *, is_reading: bool) -> None:
        """The thread has read or decoded until now, and reads or decodes from here."""
        local = self._local
        before_s, local.since_s = local.since_s, time.perf_counter()
        local.sums_s[local.is_reading] += local.since_s - before_s
        local.is_reading = is_reading

    def _on_asking(self, _nbytes: int) -> None:
        if hasattr(self._local, "since_s"):
            self._turn(is_reading=True)

    def _on_fetched(self, nbytes: int) -> None:
        if nbytes and hasattr(self._local, "since_s"):
            self._turn(is_reading=False)
            with self._lock:
                self._bytes += nbytes

    def _on_slow_down(self) -> None:
        with self._lock:
            self._slowed_down += 1

    def _share_of_decoding(self) -> float | None:
        if not self._bytes:
            return None
        decoding_s, reading_s = map(sum, zip(*self._sums_s, strict=True))
        return decoding_s / max(decoding_s + reading_s, 1e-9)


def machine_s() -> float | None:
    """How long the cores that we may use were busy so far, all together; None where the kernel does not tell."""
    ours, ticks = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *spent = line.split()
            if name in ours:
                user, nice, system, _idle, _waiting_for_disks, *interrupts_and_stolen = map(int, spent[:8])
                ticks += user + nice + system + sum(interrupts_and_stolen)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def _queues_s() -> dict[str, float]:
    """How long each thread of this process has waited for a core so far; empty where the kernel does not tell."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        with suppress(OSError, IndexError):  # it has ended, or nothing is told
            found[name] = int(Path(f"/proc/self/task/{name}/schedstat").read_bytes().split()[1]) / 1e9
    return found
