"""An actor that reads units: it fetches, transforms and encodes their samples, and sends them in columns.

It is an ordinary class; `remote_sampling` makes a Ray actor of it. A call of `read` takes a group of units,
and yields what comes of them, in their order, as `ReadResult`s. Several calls may run at once: the reading
of one group overlaps with the transforms of another.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError, SourceError, SourceUnavailableError, WorkerError
from cachestream.schema import Schema
from cachestream.sources.registry import expect_decoders
from cachestream.storage.telemetry import READS_AT_ONCE, private_slot
from cachestream.transport import object_limit
from cachestream.worker.job import Job, Payload, unpack
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling.encode import Column, SampleChunk, Table, approximate_bytes, to_record
from cachestream.worker.sampling.engine import BUFFER_BYTES
from cachestream.worker.sampling.fetcher import Delivery, Fetcher, ReadTuner
from cachestream.worker.sampling.transformer import Several, Transformer
from cachestream.worker.sampling.unit_reader import FetchMeter, UnitReader
from cachestream.worker.units import Stall, Unit, UnitRead

CALLS: Final = 3  # at once in one actor: two that alternate, and one for a backup
RESULT_BYTES: Final = 8 << 20  # each object costs about a millisecond, here, there and in the raylet
RESULT_S: Final = 0.2
_FIRST_RESULT_S: Final = 0.02
_BEAT_S: Final = 1.0
_NICE: Final = 5  # a trainer on the same node comes first
_SMALL_BYTES: Final = 64  # about, of what carries no values
_LARGE_BYTES: Final = 16 << 10  # values of this size travel as they are; joining them would cost a copy
COUNTERS: Final = ("fetched_bytes", "retries", "transform_s", "pack_s")


@dataclass(frozen=True)  # as of Unit, no slots: those are pickled several times slower
class UnitTask:
    """A unit to be read, from `unit.first` on. `stall_age_s`, `reason`, `retries`: see UnitRead and Stall."""

    unit: Unit
    stall_age_s: float | None = None
    reason: str = ""
    retries: int = 0

    @classmethod
    def of(cls, unit_read: UnitRead, now_s: float) -> UnitTask:
        """The rest of the unit: what follows the samples that have come."""
        unit = unit_read.unit
        if unit_read.next_offset > unit.first:
            unit = replace(unit, first=unit_read.next_offset)
        task = cls(unit, retries=unit_read.retries)
        stall = unit_read.stall
        return (
            task if stall is None else replace(task, stall_age_s=now_s - stall.since_s, reason=stall.reason)
        )

    def unit_read(self, now_s: float) -> UnitRead:
        """The reading of the unit in this process, whose clock is another."""
        unit_read = UnitRead(self.unit, retries=self.retries)
        if self.stall_age_s is not None:
            unit_read.stall = Stall(now_s - self.stall_age_s, self.reason)
        return unit_read


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it travels: its class may be unknown to the receiver, or not pickle."""

    name: str
    message: str
    base: type[Exception]
    lost: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        bases = (SampleError, SourceUnavailableError, SourceError, WorkerError)
        base = next((base for base in bases if isinstance(error, base)), Exception)
        return cls(type(error).__name__, str(error), base, getattr(error, "lost", 1))

    def error(self) -> Exception:
        """An error of the same name and message, which counts as the original does."""
        kind: type[Exception] = (
            self.base if self.base.__name__ == self.name else type(self.name, (self.base,), {})
        )
        error = kind(self.message)
        if isinstance(error, SampleError):
            error.lost = self.lost
        return error


@dataclass(frozen=True, slots=True)
class UnitEnd:
    """The end of a unit: read as far as it is wanted, failed, or to be tried again after `pause_s`."""

    failure: Failure | None = None
    pause_s: float | None = None
    stall_age_s: float = 0.0
    retries: int = 0


_READ: Final = UnitEnd()  # pickled once a result


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Samples of units, each with the index of its unit in the group, and then the ends of units.

    A chunk with a Table may hold samples of several units. `work_s`: the time that they took. `counters`: the
    differences of COUNTERS.
    """

    chunks: list[tuple[Sequence[int], SampleChunk]]
    ends: list[tuple[int, UnitEnd]]
    work_s: float
    counters: tuple[float, ...]


def outcome(sample: Failure | Several | None) -> Several | None:
    """The transform of the receiver for what did not come in columns: several samples, none, or an error."""
    if isinstance(sample, Failure):
        raise sample.error()
    return sample


# --- tables as they travel: large arrays, which the object store hands over without a copy


@dataclass(frozen=True, slots=True)
class _RaggedColumn:
    """The values of a field one after the other, and the length of each."""

    data: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[Any]) -> _RaggedColumn:
        data = values[0] if len(values) == 1 else b"".join(values)
        data = np.frombuffer(data if len(data) else bytearray(), np.uint8)
        return cls(data, np.fromiter(map(len, values), np.int64, len(values)))

    def column(self) -> Column:
        stops = np.cumsum(self.lengths).tolist()
        return [self.data[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def merged(tables: list[Table], *, is_joined: bool = True) -> Table:
    """Merge tables of one sample each and of one schema, in the form in which they travel.

    Unless `is_joined`, the samples will be taken apart again, and large values are left apart.
    """
    schema, columns = tables[0].schema, list[Any]()
    for index, field_ in enumerate(schema.fields):
        column = [table.columns[index][0] for table in tables]
        if not is_joined and min(map(len, column)) >= _LARGE_BYTES:
            columns.append([np.frombuffer(value, np.uint8) for value in column])
            continue
        values = _RaggedColumn.of(column)
        columns.append(values if field_.shape is None else values.data.reshape(len(tables), -1))
    return Table(schema, [table.keys[0] for table in tables], tuple(columns))


def for_travel(table: Table) -> Table:
    """The form in which `table` travels."""
    columns = [one if isinstance(one, np.ndarray) else _RaggedColumn.of(one) for one in table.columns]
    return Table(table.schema, list(table.keys), tuple(columns))  # type: ignore[arg-type]


def arrived(table: Table, schema: Schema) -> Table:
    """The table that has travelled; `schema` is equal to its own."""
    columns = [one.column() if isinstance(one, _RaggedColumn) else one for one in table.columns]
    return Table(schema, table.keys, tuple(columns))


def chunks_of_units(indices: Sequence[int], chunk: SampleChunk) -> Iterator[tuple[int, SampleChunk]]:
    """The samples of each unit, with its index; sample i of `chunk` is of the unit `indices[i]`."""
    if indices[0] == indices[-1]:
        yield indices[0], chunk
        return
    assert isinstance(chunk.samples, Table)
    start = 0
    for index, group in itertools.groupby(indices):
        stop = start + sum(1 for _ in group)
        table = chunk.samples.cut(start, stop)
        yield index, SampleChunk(chunk.offsets[start:stop], (), table, table.nbytes)
        start = stop


class Outgoing:
    """Samples and ends that wait to be sent; samples that follow one another in one schema are merged."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._chunks: list[tuple[Sequence[int], SampleChunk]] = []
        self._ends: list[tuple[int, UnitEnd]] = []
        self._records: list[tuple[int, int, Table]] = []  # an index, an offset, and a sample

    def add_record(self, index: int, offset: int, record: Table) -> None:
        if self._records and record.schema is not self._records[0][2].schema:
            self._close()
        self._records.append((index, offset, record))
        self.nbytes += record.nbytes

    def add(self, index: int, chunk: SampleChunk) -> None:
        self._close()
        self._chunks.append(([index] * len(chunk.offsets), chunk))
        self.nbytes += chunk.nbytes

    def add_end(self, index: int, end: UnitEnd) -> None:
        self._ends.append((index, end))
        self.nbytes += _SMALL_BYTES

    def _close(self) -> None:
        if self._records:
            indices, offsets, tables = zip(*self._records, strict=True)
            nbytes = sum(table.nbytes for table in tables)
            table = merged(list(tables), is_joined=len(set(indices)) < len(indices))
            self._chunks.append((indices, SampleChunk(offsets, (), table, nbytes)))
            self._records = []

    def take(self, work_s: float, counters: tuple[float, ...]) -> ReadResult:
        self._close()
        result = ReadResult(self._chunks, self._ends, work_s, counters)
        self._chunks, self._ends, self.nbytes = [], [], 0
        return result


class _PauseError(Exception):
    """The remote does not answer: the unit is to be tried again after `pause_s`."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(pause_s)
        self.pause_s = pause_s


class _Fetchers:
    """The fetchers of the running calls, tuned by one ReadTuner; the lock of their UnitsReader is held."""

    def __init__(self) -> None:
        self.running: list[Fetcher] = []
        self.threads = 1

    @property
    def reading(self) -> int:
        return sum(fetcher.reading for fetcher in self.running)

    def use(self, threads: int) -> None:
        """Let each call read `threads` units at once: the calls alternate, so each may use all of them."""
        self.threads = threads
        for fetcher in self.running:
            fetcher.use(threads)


class UnitsReader:
    """The source, the transform and the counters that all calls of an actor share."""

    def __init__(self, job: Job, actors: int) -> None:
        limit = job.bandwidth_bytes_per_s
        self._job = job = replace(job, bandwidth_bytes_per_s=None if limit is None else limit / actors)
        payload: Payload = unpack(job.payload)
        self.slot = private_slot()
        with tempfile.TemporaryDirectory(prefix="cachestream-") as folder:  # an open file outlives its name
            meter = FetchMeter(self.slot, job.bandwidth_bytes_per_s, os.path.join(folder, "budget"))
        self._reader = UnitReader(
            payload.source,
            meter,
            threading.Event(),
            hang_timeout_s=job.hang_timeout_s,
            in_rows=payload.transform is None,
        )
        self._transformer = Transformer(payload.transform, self.slot)
        self._transforming = threading.Lock()  # users expect one call at a time
        self._lock = threading.Lock()
        self._threads = min(job.concurrency, READS_AT_ONCE // CALLS)
        # Each with the first number of its threads in the slot.
        self._idle = [
            (first, self._make_fetcher(first)) for first in range(0, CALLS * self._threads, self._threads)
        ]
        self._result_s = _FIRST_RESULT_S
        self._sent = (0.0,) * len(COUNTERS)
        self._fetchers = _Fetchers()
        self._tuner = ReadTuner(self._fetchers, self.slot, job)

    def read(self, plan: PassPlan, tasks: Sequence[UnitTask]) -> Iterator[ReadResult]:
        """Read the units of `tasks`; yields now and then while the reads show life."""
        self._reader.plan = plan
        unit_reads = [task.unit_read(time.monotonic()) for task in tasks]
        indices = {unit_read.unit.position: index for index, unit_read in enumerate(unit_reads)}
        out, begun_s = Outgoing(), time.monotonic()
        due_s, beat_s = begun_s + self._result_s, min(_BEAT_S, self._job.hang_timeout_s / 8)
        with self._fetcher() as (fetcher, numbers):
            fetcher.submit(unit_reads)
            while len(fetcher):
                delivery = self._next(fetcher, max(0.0, due_s - time.monotonic()) if out.nbytes else beat_s)
                steps: Iterator[None] = iter((None,))
                if delivery is not None:
                    index = indices[delivery.unit_read.unit.position]
                    steps = self._add(out, index, plan, delivery)
                for _ in steps:
                    now_s = time.monotonic()
                    is_due = out.nbytes >= RESULT_BYTES or (now_s >= due_s and out.nbytes)
                    if is_due or (delivery is None and self._is_alive(numbers, now_s)):
                        yield out.take(now_s - begun_s, self._differences())
                        begun_s = time.monotonic()
                        due_s, self._result_s = begun_s + RESULT_S, RESULT_S
        yield out.take(time.monotonic() - begun_s, self._differences())

    def _next(self, fetcher: Fetcher, timeout_s: float) -> Delivery | None:
        """The next delivery of `fetcher`; tunes the number of reads by how long that takes."""
        begun_s = time.monotonic()
        delivery = fetcher.next(timeout_s)
        with self._lock:
            if self._fetchers.running[0] is fetcher:  # what the others wait for is not needed yet
                self.slot["fetch_wait_s"] += time.monotonic() - begun_s
            if delivery is not None and delivery.finished:
                self._tuner.unit_came()
            self._tuner.tick(self._reader.meter.take_throttled)
        return delivery

    @contextmanager
    def _fetcher(self) -> Iterator[tuple[Fetcher, range]]:
        """A fetcher that no other call uses, and the numbers of its threads in the slot."""
        with self._lock:
            first, fetcher = self._idle.pop()
            self._fetchers.running.append(fetcher)
            fetcher.use(self._fetchers.threads)
        try:
            yield fetcher, range(first, first + self._threads)
        finally:
            with self._lock:
                self._fetchers.running.remove(fetcher)
                if len(fetcher):  # the call was ended
                    fetcher.stop()
                    fetcher = self._make_fetcher(first)
                self._idle.append((first, fetcher))

    def _make_fetcher(self, first: int) -> Fetcher:
        def read(unit_read: UnitRead, number: int) -> Iterator[SampleChunk | float]:
            for item in self._reader.read(unit_read, first + number):
                if isinstance(item, float):
                    raise _PauseError(item)
                yield item

        beat = self._reader.meter.beat
        # Without patience for silent units, no thread is started besides those that have a number here.
        return Fetcher(read, self._threads, BUFFER_BYTES, lambda number: beat(first + number), math.inf)

    def _add(self, out: Outgoing, index: int, plan: PassPlan, delivery: Delivery) -> Iterator[None]:
        """Add what was delivered to `out`, transformed and encoded; yields after each sample."""
        unit_read = delivery.unit_read
        for chunk in delivery.chunks:
            if isinstance(chunk.samples, Table):
                travelling = replace(chunk, samples=for_travel(chunk.samples))
                out.add(index, travelling)
                yield
                continue
            for offset, key, sample in zip(chunk.offsets, chunk.keys, chunk.samples, strict=True):
                self._add_sample(out, index, plan, unit_read.unit, (offset, key, sample))
                yield
        if delivery.finished:
            out.add_end(index, _end(unit_read, time.monotonic()))

    def _add_sample(
        self, out: Outgoing, index: int, plan: PassPlan, unit: Unit, item: tuple[int, str, Any]
    ) -> None:
        offset, key, sample = item
        outcome: Failure | Several | None = None
        nbytes = _SMALL_BYTES
        if isinstance(key, str):  # else the receiver refuses the key
            try:
                with self._transforming:
                    made = self._transformer.apply(plan, unit, offset, sample)
                    if made is not None and not isinstance(made, Several):
                        out.add_record(index, offset, to_record(made, key))
                        self.slot["pack_s"] += time.monotonic() - self._transformer.encoding_since_s
                        return
                outcome = made  # several samples of one are encoded together, by the receiver
                nbytes += approximate_bytes(made)
            except BaseException as error:  # noqa: BLE001  transforms raise anything
                outcome = Failure.of(error)
        out.add(index, SampleChunk((offset,), (key,), (outcome,), nbytes))

    def _is_alive(self, numbers: range, now_s: float) -> bool:
        """True if no reading thread of `numbers` has been without a sign of life for long."""
        beats = [float(self.slot["read_beats_s"][n]) for n in numbers if self.slot["reads"][n]]
        return now_s - min(beats, default=now_s) < self._job.hang_timeout_s / 2

    def _differences(self) -> tuple[float, ...]:
        """The growth of the counters since the last call."""
        with self._lock:
            before, self._sent = self._sent, tuple(float(self.slot[name]) for name in COUNTERS)
            return tuple(now - then for now, then in zip(self._sent, before, strict=True))


def _end(unit_read: UnitRead, now_s: float) -> UnitEnd:
    error = unit_read.error
    if isinstance(error, _PauseError):
        stall = unit_read.stall
        assert stall is not None
        reason = Failure("", stall.reason, SourceUnavailableError)
        return UnitEnd(reason, error.pause_s, now_s - stall.since_s, unit_read.retries)
    return _READ if error is None else UnitEnd(Failure.of(error))


def installed_version() -> str:
    """The version of cachestream here; "" if it runs without being installed."""
    try:
        return metadata.version("cachestream")
    except metadata.PackageNotFoundError:
        return ""


class NotSetUpError(Exception):
    """The actor was restarted, and `ready` has not been called since."""


class ReadActor:
    """The actor. A call sets it up, not its constructor: the errors of a call reach the caller as they
    are.
    """

    def __init__(self) -> None:
        self._reader: UnitsReader | None = None

    def ready(self, version: str, job: Job, actors: int) -> None:
        """Set up the actor, one of `actors`, for `job`; raises WorkerError if it cannot do the job."""
        if version != (here := installed_version()):
            raise WorkerError(
                f"cachestream {here or '(no version)'} is installed on the node {socket.gethostname()}, and "
                f"{version} where the worker runs: install one version on all nodes of the cluster"
            )
        if self._reader is None:
            sys.path.extend(path for path in job.sys_path if path not in sys.path)
            expect_decoders(job.cluster.decoders if job.cluster else ())
            with suppress(OSError):
                os.nice(_NICE)
            self._reader = UnitsReader(job, actors)

    def read(self, plan: str, tasks: bytes, limit_bytes: int) -> Iterator[ReadResult]:
        """Read units of the pass `plan`, pickled UnitTasks; no object may be larger than `limit_bytes`."""
        object_limit.set_cache_limit(limit_bytes)
        if self._reader is None:
            raise NotSetUpError
        yield from self._reader.read(_parsed(plan), pickle.loads(tasks))  # noqa: S301  of the dispatcher


_parsed = functools.lru_cache(maxsize=4)(PassPlan.from_json)
