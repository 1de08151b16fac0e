"""The samples of units, transformed and encoded into the open shard; it is published when full or old."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from cachestream.errors import SampleError, SchemaMismatchError, WorkerError
from cachestream.schema import HELD_OUT, Schema
from cachestream.storage.progress import PassRow
from cachestream.storage.telemetry import Slot
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan, gaps, is_covered
from cachestream.worker.sampling.encode import SampleChunk, Table, decode_key, encode_key
from cachestream.worker.sampling.messages import FillStatus, News
from cachestream.worker.sampling.packer import FirstSamples, Packer
from cachestream.worker.sampling.publisher import BackgroundPublisher, Holdout, OpenShard, check_size
from cachestream.worker.sampling.transformer import Transformer, to_records
from cachestream.worker.sampling.unit import Unit, UnitRead

FIRST_BYTES: Final = 256 * 1024
FIRST_AGE_S: Final = 0.05
USUAL_AGE_S: Final = 2.0
LONGEST_AGE_S: Final = 60.0
_AGE_GROWTH: Final = 0.02  # of the time since the start: in a large cache fresh samples matter less
_RAMP_S: Final = 10.0
_FATAL_FAILURES: Final = 1000
HELD_BACK_S: Final = 0.05  # between two looks at samples that are held back
_RAMP_SHARDS: Final = 40  # after so many shards their size does not grow any more
MOST_HELD_OUT: Final = 0.5  # of the limit


def target_bytes(published: int, shard_bytes: int, share_bytes: int) -> int:
    """The size at which a process publishes its shard, after `published` shards before it.

    The size doubles from 256 KiB up to `shard_bytes`. It is at most an eighth of the process's share of the
    limit: shards that are being written cannot be read, and eviction needs several shards to choose from.
    """
    ramp = FIRST_BYTES << min(published, _RAMP_SHARDS)
    return max(1, min(ramp, shard_bytes, share_bytes // 8))


def max_age_s(elapsed_s: float) -> float:
    """The longest time that a sample waits in an open shard, `elapsed_s` after the start of the process."""
    young = FIRST_AGE_S + (USUAL_AGE_S - FIRST_AGE_S) * min(1.0, elapsed_s / _RAMP_S)
    return min(LONGEST_AGE_S, max(young, _AGE_GROWTH * elapsed_s))


class ShardWriter:
    """Packs samples into the `open` shard, and sends it for publication when it is full or old.

    `row` and `plan` are those of the current pass. The first samples of an empty cache are held back until
    the supervisor has decided on its fields, by the first samples of all processes.
    """

    def __init__(self, job: Job, link: SupervisorLink, slot: Slot, news: News, stop: threading.Event) -> None:
        self.row: PassRow | None = None
        self.plan: PassPlan | None = None
        self._job, self._link, self._slot, self._news, self._stop = job, link, slot, news, stop
        self._publisher = BackgroundPublisher(job, link, slot, news, stop)
        self.open = OpenShard(Packer(), Packer())
        self._first = FirstSamples() if news.schema is None else None
        self._started_s = time.monotonic()

    @property
    def status(self) -> FillStatus:
        """The last news of the cache."""
        return self._news.status

    @property
    def _schema(self) -> Schema | None:
        """The schema that samples have to fit: of the cache, or else of the open shard."""
        return self._news.schema or self.open.schema

    def take(self, tables: list[Table]) -> None:
        """Pack `tables` into one shard, or hold them back while the schema of the cache is undecided."""
        nbytes = tables[0].nbytes if len(tables) == 1 else sum(table.nbytes for table in tables)
        if self.is_large(nbytes):
            try:
                check_size(nbytes, self.status.limit_bytes)
            except SampleError as error:
                self.skip("sample", error, decode_key(tables[0].keys[0]))
                return
            self.flush()
            self.begin_shard()
        for table in tables:
            self.open.taken += len(table)
            if self._first is None:
                self._pack(table)
            else:
                self._first.add(table, time.monotonic())

    def is_large(self, nbytes: int) -> bool:
        """True if a sample needs a shard of its own: an open shard holds up to an eighth of the limit."""
        return nbytes > self.status.limit_bytes // 4

    def _pack(self, table: Table) -> None:
        """Add `table` to the open shard; count samples that do not fit as skipped."""
        try:
            self.open.pack(table, self._schema)
            self._slot["samples"] += len(table)
        except (SchemaMismatchError, MemoryError) as error:
            kind = "schema" if isinstance(error, SchemaMismatchError) else "transform"
            for key in table.keys:
                self.skip(kind, error, decode_key(key))

    def skip(self, kind: str, error: BaseException, example: str) -> None:
        """Count a sample or unit as skipped; raises WorkerError if none of the first can be used."""
        lost = error.lost if isinstance(error, SampleError) else 1
        self.open.progress.count_skipped(kind, error, example, lost)
        self._slot["failures"] += lost if kind != "quarantined" else 0
        has_failed = (
            self._slot["failures"] >= _FATAL_FAILURES and not self._slot["samples"] + self._slot["dropped"]
        )
        if has_failed and not self.status.has_samples:
            raise WorkerError(
                f"none of the first {_FATAL_FAILURES} samples can be used, the last one: {error}"
            )

    def _decide(self, *, is_last: bool = False) -> bool:
        """Pack the samples that were held back, once the cache has a schema; False if they wait for that.

        `is_last`: no further samples come to this process.
        """
        first = self._first
        if first is None:
            return True
        if self._news.schema is not None:
            self._first = None
            for table in first.tables:
                self._pack(table)
            return True
        if first.is_due(time.monotonic(), self._target_bytes(_RAMP_SHARDS)) or (is_last and first.tables):
            first.told = first.votes
            self._link.tell("votes", first.votes)
        return not first.tables

    def _wait_for_schema(self) -> None:
        """Wait until the schema of the cache is decided, if as many samples as fill a shard wait for that."""
        # They lie in one shard, and the process holds no more than that in memory.
        full_bytes = self._target_bytes(_RAMP_SHARDS)
        while not self._decide() and self._first is not None and self._first.nbytes >= full_bytes:
            self._slot["beat_s"] = time.monotonic()
            if self._stop.wait(HELD_BACK_S):
                return

    def make_room(self) -> int:
        """Begin a new shard if the open one is full.

        Returns the number of further bytes that it takes, above 0.
        """
        # Called before a sample and not after it: the end of a unit lies in the shard of its last sample.
        self._wait_for_schema()
        target_bytes = self._target_bytes()
        if self.open.size_bytes >= target_bytes:
            self.flush()
            target_bytes = self._target_bytes()
        self.begin_shard()
        return target_bytes - self.open.size_bytes

    def _target_bytes(self, published: int | None = None) -> int:
        share_bytes = self.status.limit_bytes // self._job.num_workers
        published = self._publisher.published if published is None else published
        return target_bytes(published, self._job.shard_bytes, share_bytes)

    def begin_shard(self) -> None:
        """Note the time, the pass and the holdout of the open shard, unless it has begun already."""
        if self.open.since_s is None:
            assert self.row is not None
            self.open.since_s, self.open.row = time.monotonic(), self.row
            self.open.holdout = self._holdout()

    def _holdout(self) -> Holdout:
        share = self.status.holdout
        comes_once = self.plan is not None and self.plan.is_permutation and self.plan.length is not None
        # Held-out samples that are drawn again and again would fill any space.
        most = MOST_HELD_OUT if comes_once else min(share or 0.0, MOST_HELD_OUT)
        return Holdout(share, comes_once, self.status.held_out_bytes > most * self.status.limit_bytes)

    def due_in_s(self) -> float:
        """The time for which the open shard may still wait for more samples; 0 if it is due."""
        if self.open.since_s is None or self.open.is_empty:
            return math.inf
        if self._first is not None and self._first.tables:
            return HELD_BACK_S  # then the supervisor has to hear of them
        now_s = time.monotonic()
        return max(0.0, self.open.since_s + max_age_s(now_s - self._started_s) - now_s)

    def flush_if_due(self) -> None:
        """Send the open shard for publication if it is old or large enough."""
        if self.open.since_s is None or not self._decide():
            return
        if self.open.size_bytes >= self._target_bytes() or not self.due_in_s():
            self.flush()

    def flush(self) -> None:
        """Send the open shard, or only its progress, for publication; samples held back wait on."""
        if self._decide() and not self.open.is_empty:
            self.open = self._publisher.send(self.open)

    def publish_all(self) -> None:
        """Publish all samples and progress, and wait until that is done."""
        while not self._decide(is_last=True) and not self._stop.wait(HELD_BACK_S):
            self._slot["beat_s"] = time.monotonic()
        self.flush()
        self._publisher.wait()


class QuarantinedError(SampleError):
    """A unit that has killed the process too often."""


class SampleEncoder:
    """Encodes the samples of units into the open shard of `writer`, in the order in which they come.

    A sample is transformed first. One that cannot be used is skipped and counted.
    """

    def __init__(
        self, writer: ShardWriter, transform: Callable[..., Any] | None, slot: Slot, stop: threading.Event
    ) -> None:
        self._writer, self._slot, self._stop = writer, slot, stop
        self._transformer = Transformer(transform, slot)

    @property
    def transform_s(self) -> float:
        """The time that transforms have taken in this process."""
        return self._transformer.transform_s

    def add(self, unit_read: UnitRead, chunk: SampleChunk) -> bool:
        """Add the samples of `chunk`; False if the process is to stop before the last of them."""
        if isinstance(chunk.samples, Table):
            return self._add_table(unit_read, chunk, chunk.samples)
        writer, room_bytes = self._writer, 0
        for offset, key, sample in zip(chunk.offsets, chunk.keys, chunk.samples, strict=True):
            if self._stop.is_set():
                return False
            if room_bytes <= 0:
                room_bytes = writer.make_room()
            before_bytes = writer.open.size_bytes
            self._add(unit_read, offset, key, sample)
            room_bytes -= writer.open.size_bytes - before_bytes
            self._add_progress(unit_read, offset, offset + 1)
        return True

    def _add(self, unit_read: UnitRead, offset: int, key: object, sample: Any) -> None:
        writer = self._writer
        if not isinstance(key, str):  # sources are user code
            error = SampleError(f"its key is of type {type(key).__name__}: keys are str")
            writer.skip("sample", error, f"unit {unit_read.unit.number}: {key!r}")
            return
        if writer.open.holdout.share is not None and not self._is_wanted(
            unit_read.unit, offset, encode_key(key)
        ):
            return
        assert writer.plan is not None
        try:
            made = self._transformer.apply(writer.plan, unit_read.unit, offset, sample)
            records = to_records(made, key)
        except SampleError as error:
            writer.skip("sample", error, key)
        except BaseException as error:  # noqa: BLE001  transforms raise anything; signals raise nothing here
            writer.skip("transform", error, key)
        else:
            if len(records) != 1:
                self._check_several(records)
            if records:
                writer.take(records)
            self._slot["pack_s"] += time.monotonic() - self._transformer.encoding_since_s

    def _check_several(self, records: list[Table]) -> None:
        """Count a sample that was dropped; raises WorkerError for several where samples are held out."""
        self._slot["dropped"] += not records
        if records and self._writer.open.holdout.share is not None:
            raise WorkerError(
                "the transform returns several samples, and holdout= holds out single ones, so that parts of "
                "one sample would be on both sides: hold out files instead, with two caches"
            )

    def _is_wanted(self, unit: Unit, offset: int, key: bytes) -> bool:
        """True if a sample is to be cached: no shard of its split holds it, and there is room for it."""
        writer, holdout = self._writer, self._writer.open.holdout
        split = holdout.split_of(key)
        if unit.parts and is_covered(unit.parts[split - 1], offset):
            writer.open.left_out.add(split)
            return False
        if split != HELD_OUT or not holdout.is_full:
            return True
        if holdout.comes_once:
            reason = (
                f"held-out samples take {MOST_HELD_OUT:.0%} of size_limit, and no more are kept: raise it"
            )
            writer.skip("held-out", SampleError(f"{reason}, or hold out less"), decode_key(key))
        else:
            self._slot["dropped"] += 1
        return False

    def _wanted_rows(self, unit: Unit, offsets: Sequence[int], table: Table) -> Table:
        """The rows of `table` that are to be cached."""
        if self._writer.open.holdout.share is None:
            return table
        samples = enumerate(zip(offsets, table.keys, strict=True))
        rows = [row for row, (offset, key) in samples if self._is_wanted(unit, offset, key)]
        return table if len(rows) == len(table) else table.take(rows)

    def _add_table(self, unit_read: UnitRead, chunk: SampleChunk, table: Table) -> bool:
        """Add samples that came in columns, as many at a time as the open shard takes."""
        writer, each_bytes = self._writer, max(1, chunk.nbytes // len(table))
        start = 0
        while start < len(table):
            if self._stop.is_set():
                return False
            stop = min(len(table), start - (-writer.make_room() // each_bytes))
            begun_s = time.monotonic()
            part = table.cut(start, stop)
            if writer.is_large(part.nbytes):
                stop, part = start + 1, table.cut(start, start + 1)  # rows may be of very different sizes
            wanted = self._wanted_rows(unit_read.unit, chunk.offsets[start:stop], part)
            if len(wanted):
                writer.take([wanted])
            self._slot["pack_s"] += time.monotonic() - begun_s
            first, last = chunk.offsets[start], chunk.offsets[stop - 1]
            if last - first == stop - start - 1:
                self._add_progress(unit_read, first, last + 1)
            else:  # some rows between them are cached already
                offsets = np.array(chunk.offsets[start:stop])
                for run in np.split(offsets, np.flatnonzero(np.diff(offsets) > 1) + 1):
                    self._add_progress(unit_read, int(run[0]), int(run[-1]) + 1)
            start = stop
        return True

    def _add_progress(self, unit_read: UnitRead, start: int, stop: int) -> None:
        unit_read.done = stop
        shard, position = self._writer.open, unit_read.unit.position
        shard.progress.add_samples(position, start, stop)
        shard.progress.ends[position] = shard.taken

    def finish(self, unit_read: UnitRead) -> None:
        """Count the unit as done, with its error if it has one."""
        writer, unit, error = self._writer, unit_read.unit, unit_read.error
        writer.begin_shard()
        progress = writer.open.progress
        if error is not None:
            kind = "sample" if isinstance(error, SampleError) else "source"
            kind = "quarantined" if isinstance(error, QuarantinedError) else kind
            writer.skip(kind, error, f"unit {unit.number}")
            progress.done += kind != "quarantined"
        # No shard holds a unit that failed: the next pass tries it again.
        progress.finish_unit(unit.position, [] if error is not None else gaps(unit.cached, unit_read.done))
        self._slot["unit_bytes"] += unit_read.fetched_bytes
        self._slot["units"] += 1
