"""Reading a source one unit after another, and many at once, to see where the time goes.

It is told apart by what the source reports (`transport/metering.py`): up to the arrival of bytes it is reading, from there to
the sample decoding. Waiting is reading wherever it happens; what the thread waited for a core, because others had
them all, is left out where the kernel tells (schedstat). Other threads' processor time, such as that of the one that
speaks to the network, counts where it was waited for.

What it cannot tell: a source that reports no bytes (a Dataset, a function) decodes with all of its processor time, and
reads while it waits; a network filesystem waits like a disk.

All of them are read in this process, by as many threads as a worker has in all of its processes: what one
interpreter's lock holds up is seen in `ParallelRun.busy_cores`, and is not the remote's. (A real worker would have taken some seconds to
start, and to find out how many reads at once bring more.)
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cachestream.config import with_generator
from cachestream.errors import CacheStreamError, SourceError, SourceUnavailableError
from cachestream.permutation import Permutation, mix_key
from cachestream.sources.base import Rows, RowsSource, Source, as_growing
from cachestream.tools.diagnose.stages import Crowd
from cachestream.transport import metering
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.encode import to_record, to_table
from cachestream.worker.packer import Packer

SHARD_BYTES: Final = 64_000_000  # as a worker's
KEPT_SHARDS: Final = 2
PATIENCE_S: Final = 30.0  # for the first sample
LEAVE_S: Final = 5.0  # for threads to come to the end of a sample
AGAIN_S: Final = 0.5
_USELESS: Final = 20  # samples or units, from the first on
_BLOCK: Final = 1024
_QUEUE_S: Final = 0.001
_KEY: Final = mix_key(11, 0)
_END: Final = object()

Transform = Callable[..., Any]
_Items = Callable[[int, np.random.Generator], Iterator[Any]]


class Units:
    """The units of a source in a random order, each with its generator; `count` is None where they never end.

    Of a listing that goes on (`is_listing`), the first ones.
    """

    def __init__(self, source: Source) -> None:
        growing = as_growing(source)
        self.is_listing = growing is not None
        self.count = source.num_units if growing is None else len(growing.first_names)
        self._order = None if self.count is None else Permutation(self.count, _KEY)

    def after(self, first: int) -> Iterator[tuple[int, np.random.Generator]]:
        """Those at the places `first` and after it."""
        for start in itertools.count(first, _BLOCK):
            stop = start + _BLOCK if self.count is None else min(start + _BLOCK, self.count)
            if start >= stop:
                return
            places = np.arange(start, stop, dtype=np.int64)
            for unit in (places if self._order is None else self._order.at(places)).tolist():
                yield unit, np.random.Generator(np.random.Philox(key=mix_key(_KEY, unit)))


def items_of(source: Source, transform: Transform | None) -> _Items:
    """What a sampling process reads `source` by: in columns where nobody looks at each sample."""
    return source.read_rows if transform is None and isinstance(source, RowsSource) else source.read


@contextmanager
def reading(items: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """`items`, closed at the end if they can be: what a unit has open is let go at once."""
    try:
        yield items
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


@dataclass(slots=True)
class Account:
    """Seconds and amounts, as `Stages` names them."""

    num_samples: int = 0
    fetched_bytes: int = 0
    read_s: float = 0.0
    read_cpu_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    transform_cpu_s: float = 0.0
    pack_s: float = 0.0

    def add(self, other: Account) -> None:
        self.num_samples += other.num_samples
        self.fetched_bytes += other.fetched_bytes
        self.read_s += other.read_s
        self.read_cpu_s += other.read_cpu_s
        self.decode_s += other.decode_s
        self.transform_s += other.transform_s
        self.transform_cpu_s += other.transform_cpu_s
        self.pack_s += other.pack_s


class _Clock:
    """What the thread that made it did since it last looked."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._queued_s = self._queue_s()
        self._seen = self._look()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def lap(self) -> tuple[float, float]:
        """Seconds since the last call: the processor's, in all threads, and those that passed waiting."""
        before, self._seen = self._seen, self._look()
        wall_s, own_s, all_s = (now - then for now, then in zip(self._seen, before, strict=True))
        waited_s = wall_s - own_s
        if waited_s > _QUEUE_S:
            queued_s = self._queue_s()
            waited_s -= min(waited_s, queued_s - self._queued_s)
            self._queued_s = queued_s
        busy_s = max(own_s, all_s)
        return busy_s, max(0.0, waited_s - (busy_s - own_s))

    @staticmethod
    def _look() -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), time.process_time()

    def _queue_s(self) -> float:
        """How long this thread has waited for a core so far."""
        return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9 if self._fd >= 0 else 0.0


class SequentialRun:
    """Reads, transforms and packs; `account` and `packers` (two shards at most) are what came of it, `one` is the
    first sample alone.

    `units_read` were begun; `skipped` samples or units could not be used, the first of them for the reason `failure`.
    """

    def __init__(self, name: str, source: Source, units: Units, transform: Transform | None) -> None:
        self._name = name
        self.units_read = self.skipped = 0
        self.failure = ""
        self._units = units
        self._items = items_of(source, transform)
        self._transform = None if transform is None else with_generator(transform)
        self._first: Account | None = None
        self._account, self._open = Account(), Account()  # of all samples so far, and of the one that is read
        self._packers, self.one = [Packer()], Packer()
        self._clock: _Clock
        self._ident: int | None = None
        self._has_bytes = False  # of the unit that is read
        self._error: BaseException | None = None
        self._stop, self._came, self._ended = threading.Event(), threading.Event(), threading.Event()

    @property
    def account(self) -> Account:
        """Without the first sample, which paid for what is done once, if there are others."""
        first, rest = self._first, self._account
        if first is not None and (not rest.num_samples or (first.fetched_bytes and not rest.fetched_bytes)):
            both = Account()
            both.add(first)
            both.read_cpu_s = 0.0  # the driver was loaded in it, and the connection made
            both.add(rest)
            return both
        return rest

    @property
    def packers(self) -> list[Packer]:
        """What was packed, a shard each."""
        return [packer for packer in self._packers[:KEPT_SHARDS] if packer.num_samples]

    def run(self, seconds: float) -> None:
        """Read for `seconds`, or until each unit was read once; longer only while nothing has come.

        Raises SourceError if nothing could be read or used, and SourceUnavailableError if nothing came.
        """
        thread = threading.Thread(target=self._work, name="probe", daemon=True)
        metering.install(self._on_fetched, self._on_asking)
        thread.start()
        try:
            self._ended.wait(seconds)
            self._came.wait(PATIENCE_S)
        finally:
            self._stop.set()
            thread.join(LEAVE_S)
            metering.install(None)
        if self._error is not None:
            raise self._error
        if self._first is None:
            last = f" (the last error: {self.failure})" if self.failure else ""
            raise SourceUnavailableError(
                f"{self._name}: no sample came within {seconds + PATIENCE_S:.0f} s{last}; check that the remote "
                "answers, and that the transform comes to an end"
            )

    # --- in the thread

    def _work(self) -> None:
        self._clock = _Clock()
        self._ident = threading.get_ident()
        try:
            self._read_all()
        except BaseException as error:  # noqa: BLE001  the main thread raises it, whatever it is
            self._error = error
        finally:
            self._clock.close()
            self._ended.set()
            self._came.set()

    def _read_all(self) -> None:
        for unit, rng in self._units.after(0):
            self.units_read += 1
            self._has_bytes = False
            try:
                with reading(self._items(unit, rng)) as items:
                    self._read(items)
            except SourceUnavailableError as error:
                self._open = Account()
                self.failure = self.failure or str(error)
                self._stop.wait(AGAIN_S)
            except (Exception, SystemExit) as error:  # noqa: BLE001  a source of the user's own may raise anything
                self._skip(error)
            if self._stop.is_set():
                return
        if self._first is None:
            why = (
                f"the first: {self.failure}"
                if self.failure
                else "they are empty; check the path, and --format"
            )
            raise SourceError(
                f"{self._name}: none of {self.units_read} units gave a sample that can be used; {why}"
            )

    def _read(self, items: Iterator[Any]) -> None:
        while True:
            self._clock.lap()
            item = next(items, _END)
            self._decoded()
            if item is _END or self._stop.is_set():
                return
            try:
                count = self._use(item)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the user's transform may raise anything
                self._skip(error)
            else:
                self._count(count)

    def _use(self, item: Any) -> int:
        """Transform and pack as a sampling process does; returns how many samples that were."""
        if isinstance(item, Rows):
            table = to_table(item)
            self._packer().add_table(table, None)
            if not self.one.num_samples:
                self.one.add_table(table.cut(0, 1), None)
            self._open.pack_s += self._clock.lap()[0]
            return len(item.keys)
        key, sample = item
        if self._transform is not None:
            sample = self._transform(sample, lambda: np.random.Generator(np.random.Philox(key=_KEY)))
            busy_s, waited_s = self._clock.lap()
            self._open.transform_cpu_s += busy_s
            self._open.transform_s += busy_s + waited_s
        if sample is not None and not self._stop.is_set():
            record = to_record(sample)
            self._packer().add(key, record, None)
            if not self.one.num_samples:
                self.one.add(key, record, None)
            self._open.pack_s += self._clock.lap()[0]
        return 1

    def _count(self, num_samples: int) -> None:
        done, self._open = self._open, Account()
        done.num_samples = num_samples
        if self._first is None:
            self._first = done
            self._came.set()
        else:
            self._account.add(done)

    def _skip(self, error: BaseException) -> None:
        self.skipped += 1
        self._open = Account()  # what it took is no sample's
        known = isinstance(error, CacheStreamError)
        reason = str(error) if known else redact_text(f"{type(error).__name__}: {error}")[:500]
        self.failure = self.failure or reason
        if self._first is None and self.skipped >= _USELESS:
            raise SourceError(
                f"{self._name}: none of the first {_USELESS} samples can be used; the first: {self.failure}"
            )

    def _packer(self) -> Packer:
        """The open shard; those after the ones that are kept are packed, and dropped."""
        packer = self._packers[-1]
        if packer.size_bytes >= SHARD_BYTES:
            if len(self._packers) > KEPT_SHARDS:
                packer.clear()
            else:
                packer = Packer()
                self._packers.append(packer)
        return packer

    # --- where the time of a read goes

    def _decoded(self) -> None:
        busy_s, waited_s = self._clock.lap()
        self._open.decode_s += busy_s
        self._open.read_s += waited_s

    def _on_asking(self, _nbytes: int) -> None:
        if threading.get_ident() == self._ident:
            if self._has_bytes:
                self._decoded()
            else:
                self._fetched(0)

    def _on_fetched(self, nbytes: int) -> None:
        if nbytes and threading.get_ident() == self._ident:
            self._has_bytes = True
            self._fetched(nbytes)

    def _fetched(self, nbytes: int) -> None:
        busy_s, waited_s = self._clock.lap()
        self._open.fetched_bytes += nbytes
        self._open.read_cpu_s += busy_s
        self._open.read_s += busy_s + waited_s


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
        metering.install(self._on_fetched, self._on_asking, self._on_slow_down)
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
            metering.install(None)

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
