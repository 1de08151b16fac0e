"""An actor that reads units: it fetches, transforms and encodes their samples, and sends them in columns.

It is an ordinary class; `remote_sampling` makes a Ray actor of it. It reads by the engine of a local sampling
process. A call of `read` takes further units, and returns what has come of all.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError, SourceError, SourceUnavailableError, WorkerError
from cachestream.sources.registry import expect_decoders
from cachestream.storage.layout import Directory
from cachestream.storage.telemetry import private_slot
from cachestream.transport import object_limit
from cachestream.worker.job import Job, Payload, unpack
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling.encode import Column, SampleChunk, Table, approximate_bytes, to_record
from cachestream.worker.sampling.engine import LocalEngine
from cachestream.worker.sampling.transformer import Several, Transformer
from cachestream.worker.sampling.unit import Unit, UnitRead

RESULT_BYTES: Final = 8 << 20  # each object costs about a millisecond, here, there and in the raylet
RESULT_S: Final = 0.2
_FIRST_RESULT_S: Final = 0.02
_BEAT_S: Final = 1.0
_NICE: Final = 5  # a trainer on the same node comes first
_SMALL_BYTES: Final = 64  # about, of what carries no values
COUNTERS: Final = ("fetched_bytes", "retries", "transform_s", "pack_s")


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
class ReadResult:
    """Samples of units, each with the position of its unit, and then the ends of units.

    A chunk with a Table may hold samples of several units. An end has the failure of its unit, if it failed.
    `work_s`: the time that all of this took. `counters`: the growth of COUNTERS. `stalls`: the age and the
    reason of each, as of units whose remote does not answer; `all_wait`: nothing can come because of these.
    """

    chunks: list[tuple[Sequence[int], SampleChunk]]
    ends: list[tuple[int, Failure | None]]
    work_s: float
    counters: tuple[float, ...]
    stalls: list[tuple[float, str]]
    all_wait: bool


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


def for_travel(tables: Sequence[Table]) -> Table:
    """`tables`, of one schema, in the form in which they travel as one."""
    columns = [
        parts[0]
        if len(parts) == 1 and isinstance(parts[0], np.ndarray)
        else _RaggedColumn.of(list(itertools.chain.from_iterable(parts)))
        for parts in zip(*(table.columns for table in tables), strict=True)
    ]
    keys = [key for table in tables for key in table.keys]
    return Table(tables[0].schema, keys, tuple(columns))  # type: ignore[arg-type]


def arrived(chunk: SampleChunk) -> SampleChunk:
    """The chunk that has travelled."""
    table = chunk.samples
    if not isinstance(table, Table):
        return chunk
    columns: list[Any] = []
    for field, one in zip(table.schema.fields, table.columns, strict=True):
        if isinstance(one, _RaggedColumn):
            columns.append(one.column() if field.shape is None else one.data.reshape(len(table), -1))
        else:
            columns.append(one)
    return replace(chunk, samples=Table(table.schema, table.keys, tuple(columns)))


def chunks_of_units(positions: Sequence[int], chunk: SampleChunk) -> Iterator[tuple[int, SampleChunk]]:
    """The samples of each unit, with its position; sample i of `chunk` is of the unit at `positions[i]`."""
    start = 0
    for position, group in itertools.groupby(positions):
        stop = start + sum(1 for _ in group)
        if stop - start == len(positions):
            yield position, chunk
            return
        assert isinstance(chunk.samples, Table)
        table = chunk.samples.cut(start, stop)
        yield position, SampleChunk(chunk.offsets[start:stop], (), table, table.nbytes)
        start = stop


class Outgoing:
    """Samples and ends that wait to be sent; samples that follow one another in one schema are merged."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._chunks: list[tuple[Sequence[int], SampleChunk]] = []
        self._ends: list[tuple[int, Failure | None]] = []
        self._records: list[tuple[int, int, Table]] = []  # a position, an offset, and a sample

    def add_record(self, position: int, offset: int, record: Table) -> None:
        if self._records and record.schema is not self._records[0][2].schema:
            self._close()
        self._records.append((position, offset, record))
        self.nbytes += record.nbytes

    def add(self, position: int, chunk: SampleChunk) -> None:
        self._close()
        self._chunks.append(([position] * len(chunk.offsets), chunk))
        self.nbytes += chunk.nbytes

    def add_end(self, position: int, failure: Failure | None = None) -> None:
        self._ends.append((position, failure))
        self.nbytes += _SMALL_BYTES

    def _close(self) -> None:
        if self._records:
            positions, offsets, tables = zip(*self._records, strict=True)
            nbytes = sum(table.nbytes for table in tables)
            self._chunks.append((positions, SampleChunk(offsets, (), for_travel(tables), nbytes)))
            self._records = []

    def take(
        self,
        work_s: float,
        counters: tuple[float, ...],
        stalls: Sequence[tuple[float, str]] = (),
        *,
        all_wait: bool = False,
    ) -> ReadResult:
        self._close()
        result = ReadResult(self._chunks, self._ends, work_s, counters, list(stalls), all_wait)
        self._chunks, self._ends, self.nbytes = [], [], 0
        return result


class UnitsReader:
    """Reads units of `job` as one of so many `actors`."""

    def __init__(self, job: Job, actors: int) -> None:
        self._hang_s, limit = job.hang_timeout_s, job.bandwidth_bytes_per_s
        payload: Payload = unpack(job.payload)
        self.slot = private_slot()
        with tempfile.TemporaryDirectory(prefix="cachestream-") as folder:  # an open file outlives its name
            os.makedirs(Directory(folder).worker)
            job = replace(job, root=folder, bandwidth_bytes_per_s=None if limit is None else limit / actors)
            self._engine = LocalEngine(job, payload, self.slot, threading.Event())
        self._transformer = Transformer(payload.transform, self.slot)
        self._plan: PassPlan | None = None
        self._out, self._steps = Outgoing(), self._work()
        self._result_s = _FIRST_RESULT_S
        self._due_s = self._beat_at_s = 0.0
        self._is_adding = False  # a delivery is not encoded to its end yet
        self._sent = (0.0,) * len(COUNTERS)

    def read(self, plan: PassPlan | None, units: Sequence[Unit]) -> ReadResult:
        """Read `units` of a pass too; returns what has come, or nothing now and then while the reads show
        life.
        """
        begun_s = time.monotonic()
        if plan is not None:
            self._plan = plan
            self._engine.use_plan(plan)
        self._engine.fetcher.submit([UnitRead(unit) for unit in units])
        self._due_s, self._beat_at_s = begun_s + self._result_s, begun_s + self._beat_s
        while (self._out.nbytes or self._has_more) and not self._is_due(time.monotonic()):
            next(self._steps)
        if self._out.nbytes:
            self._result_s = RESULT_S
        now_s = time.monotonic()
        stalls, all_wait = self._engine.fetcher.stalls()
        ages = [(now_s - stall.since_s, stall.reason) for stall in stalls]
        return self._out.take(now_s - begun_s, self._differences(), ages, all_wait=all_wait)

    @property
    def _has_more(self) -> bool:
        return self._is_adding or len(self._engine.fetcher) > 0

    def _is_due(self, now_s: float) -> bool:
        if self._out.nbytes:
            return self._out.nbytes >= RESULT_BYTES or now_s >= self._due_s or not self._has_more
        if now_s < self._beat_at_s:
            return False
        # Also without a sign of life, which is then looked for again after a pause.
        self._beat_at_s = now_s + self._beat_s
        return self._is_alive(now_s)

    @property
    def _beat_s(self) -> float:
        return min(_BEAT_S, self._hang_s / 8)

    def _is_alive(self, now_s: float) -> bool:
        """True if no reading thread has been without a sign of life for long."""
        beats = self.slot["read_beats_s"][self.slot["reads"] > 0]
        return now_s - float(beats.min(initial=now_s)) < self._hang_s / 2

    def _work(self) -> Iterator[None]:
        """Transform and encode what is read, for ever; yields after each sample."""
        fetcher = self._engine.fetcher
        while True:
            begun_s = time.monotonic()
            delivery = fetcher.next(
                max(0.0, (self._due_s if self._out.nbytes else self._beat_at_s) - begun_s)
            )
            self.slot["fetch_wait_s"] += time.monotonic() - begun_s
            self._engine.tick()
            if delivery is not None:
                unit_read, self._is_adding = delivery.unit_read, True
                for chunk in delivery.chunks:
                    yield from self._add(unit_read.unit, chunk)
                if delivery.finished:
                    error = unit_read.error
                    if error is None:
                        self._engine.unit_came()
                    self._out.add_end(unit_read.unit.position, None if error is None else Failure.of(error))
                self._is_adding = False
            yield

    def _add(self, unit: Unit, chunk: SampleChunk) -> Iterator[None]:
        if isinstance(chunk.samples, Table):
            self._out.add(unit.position, replace(chunk, samples=for_travel([chunk.samples])))
            return
        for offset, key, sample in zip(chunk.offsets, chunk.keys, chunk.samples, strict=True):
            self._add_sample(unit, offset, key, sample)
            yield

    def _add_sample(self, unit: Unit, offset: int, key: str, sample: Any) -> None:
        made: Failure | Several | None = None
        nbytes = _SMALL_BYTES
        if isinstance(key, str):  # else the receiver refuses the key
            try:
                assert self._plan is not None
                made = self._transformer.apply(self._plan, unit, offset, sample)
                if made is not None and not isinstance(made, Several):
                    self._out.add_record(unit.position, offset, to_record(made, key))
                    self.slot["pack_s"] += time.monotonic() - self._transformer.encoding_since_s
                    return
                nbytes += approximate_bytes(made)  # several samples of one are encoded by the receiver
            except BaseException as error:  # noqa: BLE001  transforms raise anything
                made = Failure.of(error)
        self._out.add(unit.position, SampleChunk((offset,), (key,), (made,), nbytes))

    def _differences(self) -> tuple[float, ...]:
        """The growth of the counters since the last call."""
        before, self._sent = self._sent, tuple(float(self.slot[name]) for name in COUNTERS)
        return tuple(now - then for now, then in zip(self._sent, before, strict=True))


def installed_version() -> str:
    """The version of cachestream here; "" if it runs without being installed."""
    try:
        return metadata.version("cachestream")
    except metadata.PackageNotFoundError:
        return ""


class ReadActor:
    """The actor, one of `actors` for `job`. What it cannot do is the error of its calls: those reach the
    caller as they are.
    """

    def __init__(self, version: str, job: Job, actors: int) -> None:
        self._error: BaseException | None = None
        try:
            if version != (here := installed_version()):
                raise WorkerError(
                    f"cachestream {here or '(no version)'} is installed on the node {socket.gethostname()}, "
                    f"and {version} where the worker runs: install one version on all nodes of the cluster"
                )
            sys.path.extend(path for path in job.sys_path if path not in sys.path)
            expect_decoders(job.cluster.decoders if job.cluster else ())
            with suppress(OSError):
                os.nice(_NICE)
            self._reader = UnitsReader(job, actors)
        except BaseException as error:  # noqa: BLE001  the user's modules raise anything
            self._error = error

    def read(self, plan: str, units: bytes, limit_bytes: int) -> ReadResult:
        """Read further units of the pass `plan` ("": none has begun), pickled; no object may be larger than
        `limit_bytes`.
        """
        if self._error is not None:
            raise self._error
        object_limit.set_cache_limit(limit_bytes)
        rest = pickle.loads(units)  # noqa: S301  of the dispatcher
        return self._reader.read(_parsed(plan) if plan else None, rest)


_parsed = functools.lru_cache(maxsize=4)(PassPlan.from_json)
