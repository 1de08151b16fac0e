"""Samples into the open shard: transformed, split, packed, and handed over for publication."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from cachestream.config import with_generator
from cachestream.errors import SampleError, SchemaMismatchError, WorkerError
from cachestream.schema import HELD_OUT, WHOLE, Schema
from cachestream.storage.cache import Cache
from cachestream.storage.holdout import held_out_share
from cachestream.storage.tables import PassRow
from cachestream.storage.telemetry import Slot
from cachestream.transport import bounds
from cachestream.worker.cached_units import gaps, is_covered
from cachestream.worker.encode import SampleChunk, Table, runs, to_record
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.packer import FirstSamples, Part, keys_of, majority
from cachestream.worker.processes import end_if_forked
from cachestream.worker.publisher import BEAT_S, OpenShard, Outbox, check_size
from cachestream.worker.unit_reader import UnitRead, sample_generator

FIRST_BYTES: Final = 256 * 1024
FIRST_AGE_S: Final = 0.1
USUAL_AGE_S: Final = 2.0
LONGEST_AGE_S: Final = 60.0
_AGE_GROWTH: Final = 0.02  # of the time since the start: in a large cache fresh samples matter less
_RAMP_S: Final = 10.0
_FATAL_FAILURES: Final = 1000
_RAMP_SHARDS: Final = 40  # after so many shards their size does not grow any more
_MOST_HELD_OUT: Final = 0.5  # of the limit


def target_bytes(published: int, shard_bytes: int, share_bytes: int) -> int:
    """The size at which a process publishes its shard, after `published` shards before it.

    The size doubles from 256 KiB up to `shard_bytes`. It is at most an eighth of the process's share of the
    limit: shards that are being written cannot be read, and eviction needs several shards to choose from.
    """
    ramp = FIRST_BYTES << min(published, 40)
    return max(1, min(ramp, shard_bytes, share_bytes // 8))


def max_age_s(elapsed_s: float) -> float:
    """The longest time that a sample waits in an open shard, `elapsed_s` after the start of the process."""
    young = FIRST_AGE_S + (USUAL_AGE_S - FIRST_AGE_S) * min(1.0, elapsed_s / _RAMP_S)
    return min(LONGEST_AGE_S, max(young, _AGE_GROWTH * elapsed_s))


def is_due(size_bytes: int, age_s: float, target: int, elapsed_s: float) -> bool:
    """True if an open shard of `size_bytes`, whose first sample came `age_s` ago, is to be published."""
    return size_bytes >= target or age_s >= max_age_s(elapsed_s)


class QuarantinedError(SampleError):
    """A unit that has killed the process too often."""


class ShardWriter:
    """Packs the samples of one process in the order in which they come.

    `row` and `plan` are those of the current pass.
    """

    def __init__(
        self,
        job: Job,
        cache: Cache,
        slot: Slot,
        transform: Callable[..., Any] | None,
        *,
        owner: str,
        stop: threading.Event,
    ) -> None:
        self.row: PassRow | None = None
        self.plan: PassPlan | None = None
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self._transform = None if transform is None else with_generator(transform)
        self._pid, self._owner = os.getpid(), owner
        self._outbox = Outbox(job, cache, slot, owner=owner, stop=stop)
        self._open = OpenShard()
        self._first = FirstSamples() if self._outbox.schema is None else None
        self._limit_bytes = cache.size_limit
        bounds.limit_to(self._limit_bytes)
        self._limit_until_s = 0.0
        self._holdout: float | None = None
        self._comes_once = True  # each sample comes at most once in a pass
        self._keeps_enough = False  # held-out samples take all of their share of the limit
        self._started_s = time.monotonic()

    # --- samples

    def add(self, unit_read: UnitRead, chunk: SampleChunk) -> bool:
        """Add the samples of `chunk`; False if the process is to stop before the last of them."""
        if isinstance(chunk.samples, Table):
            return self._add_table(unit_read, chunk, chunk.samples)
        room_bytes = 0
        for offset, key, sample in zip(chunk.offsets, chunk.keys, chunk.samples, strict=True):
            if self._stop.is_set():
                return False
            if room_bytes <= 0:
                room_bytes = self._make_room()
            before_bytes = self._open.size_bytes
            self._add(unit_read, offset, key, sample)
            room_bytes -= self._open.size_bytes - before_bytes
            self._passed(unit_read, offset, offset + 1)
        return True

    def _add(self, unit_read: UnitRead, offset: int, key: object, sample: Any) -> None:
        if not isinstance(key, str):  # sources are user code
            error = SampleError(f"its key is of type {type(key).__name__}: keys are str")
            self._skip("sample", error, f"unit {unit_read.unit}: {key!r}")
            return
        split = (
            WHOLE if self._open.holdout is None else self._open.split_of(key.encode("utf-8", "surrogatepass"))
        )
        if split != WHOLE and not self._is_wanted(unit_read, split, offset, key):
            return
        try:
            if self._transform is not None:
                sample = self._transformed(unit_read, offset, sample)
            if sample is None:
                self._slot["dropped"] += 1
                return
            begun_s = time.monotonic()
            record = to_record(sample)
        except SampleError as error:
            self._skip("sample", error, key)
        except BaseException as error:  # noqa: BLE001  transforms raise anything; signals raise nothing here
            self._skip("transform", error, key)
        else:
            self._take((key, record), record.nbytes)
            self._slot["pack_s"] += time.monotonic() - begun_s

    def _transformed(self, unit_read: UnitRead, offset: int, sample: Any) -> Any:
        transform, plan = self._transform, self.plan
        assert transform is not None
        assert plan is not None
        slot, begun_s = self._slot, time.monotonic()
        slot["alone"], slot["beat_s"] = unit_read.position + 1, begun_s
        try:
            return transform(sample, lambda: sample_generator(plan, unit_read.unit, offset))
        finally:
            end_if_forked(self._pid)
            slot["alone"] = 0
            slot["transform_s"] += time.monotonic() - begun_s

    # --- splits

    def _refresh_holdout(self) -> None:
        self._holdout, held_out_bytes = held_out_share(self._cache)
        plan = None if self.row is None else PassPlan.from_json(self.row.plan)
        self._comes_once = plan is not None and plan.is_permutation and plan.length is not None
        # Held-out samples that are drawn again and again would fill any space.
        share = _MOST_HELD_OUT if self._comes_once else self._holdout or 0.0
        self._keeps_enough = held_out_bytes > min(share, _MOST_HELD_OUT) * self._limit_bytes

    def _is_wanted(self, unit_read: UnitRead, split: int, offset: int, key: str) -> bool:
        """True if a sample of a split is to be cached: no other shard holds it, and there is room for it."""
        if unit_read.parts and is_covered(unit_read.parts[split - 1], offset):
            self._open.elsewhere.add(split)
            return False
        if split != HELD_OUT or not self._keeps_enough:
            return True
        if self._comes_once:
            reason = (
                f"held-out samples take {_MOST_HELD_OUT:.0%} of size_limit, and no more are kept: raise it"
            )
            self._skip("held-out", SampleError(f"{reason}, or hold out less"), key)
        else:
            self._slot["dropped"] += 1
        return False

    def _wanted_rows(self, unit_read: UnitRead, offsets: Sequence[int], table: Table) -> Table:
        """The rows of `table` that are to be cached."""
        if self._open.holdout is None:
            return table
        rows = [
            row
            for row, (offset, key) in enumerate(zip(offsets, table.keys, strict=True))
            if self._is_wanted(
                unit_read, self._open.split_of(key), offset, key.decode("utf-8", "surrogatepass")
            )
        ]
        return table if len(rows) == len(table) else table.take(rows)

    @property
    def _schema(self) -> Schema | None:
        """The schema that samples have to fit: of the cache, or else of the open shard."""
        return self._outbox.schema or self._open.schema

    def _add_table(self, unit_read: UnitRead, chunk: SampleChunk, table: Table) -> bool:
        """Add samples that came in columns, as many at a time as the open shard takes."""
        each_bytes = max(1, chunk.nbytes // len(table))
        start = 0
        while start < len(table):
            if self._stop.is_set():
                return False
            stop = min(len(table), start - (-self._make_room() // each_bytes))
            begun_s = time.monotonic()
            part = table.cut(start, stop)
            if self._is_large(part.nbytes):
                stop, part = start + 1, table.cut(start, start + 1)  # rows may be of very different sizes
            wanted = self._wanted_rows(unit_read, chunk.offsets[start:stop], part)
            if len(wanted):
                self._take(wanted, wanted.nbytes)
            self._slot["pack_s"] += time.monotonic() - begun_s
            for first, last in runs(chunk.offsets[start:stop]):
                self._passed(unit_read, first, last)
            start = stop
        return True

    def _take(self, part: Part, nbytes: int) -> None:
        """Pack `part`, or hold it back while the schema of the cache is undecided."""
        if self._is_large(nbytes):
            try:
                check_size(nbytes, self._limit_bytes)
            except SampleError as error:
                self._skip("sample", error, keys_of(part)[0])
                return
            self.flush()
            self._begin_shard()
            self._open.holdout = self._holdout
        if self._first is None:
            self._pack(part)
        else:
            self._first.add(part, time.monotonic())

    def _is_large(self, nbytes: int) -> bool:
        """True if a sample needs a shard of its own: an open shard holds up to an eighth of the limit."""
        return nbytes > self._limit_bytes // 4

    def _pack(self, part: Part) -> None:
        """Add `part` to the open shard; count samples that do not fit as skipped."""
        try:
            self._open.pack(part, self._schema)
            self._slot["samples"] += len(part) if isinstance(part, Table) else 1
        except (SchemaMismatchError, MemoryError) as error:
            kind = "schema" if isinstance(error, SchemaMismatchError) else "transform"
            for key in keys_of(part):
                self._skip(kind, error, key)

    def _decision_due_in_s(self) -> float:
        """The time until the next step on the samples held back; 0 if it is due, or none are held."""
        first = self._first
        return 0.0 if first is None else first.due_in_s(time.monotonic(), self._target_bytes(_RAMP_SHARDS))

    def _decide_if_due(self) -> bool:
        """Take the next step on the samples held back if it is due.

        True if no samples are held back any more.
        """
        if self._first is not None and not self._decision_due_in_s():
            if self._first.parts and self._first.others is None:
                self._vote(self._first)
            if not self._decision_due_in_s():
                self._decide()
        return self._first is None or not self._first.parts

    def _decide(self) -> None:
        """Pack the samples held back, by the schema of the cache or else of the majority."""
        if self._first is not None and self._first.parts:
            first = self._first
            self._vote(first)
            self._outbox.schema, self._first = self._outbox.schema or majority(first.all_votes), None
            for part in first.parts:
                self._pack(part)

    def _vote(self, first: FirstSamples) -> None:
        """Record the votes of this process, and read those of the others and the schema of the cache."""
        first.others = self._cache.filling.vote(self._owner, first.votes)
        self._outbox.schema = self._cache.schema

    def _passed(self, unit_read: UnitRead, start: int, stop: int) -> None:
        unit_read.done = stop
        self._open.tally.passed(unit_read.claim_id, unit_read.position, start, stop)

    def _make_room(self) -> int:
        """Begin a new shard if the open one is full.

        Returns the number of further bytes that it takes, above 0.
        """
        # Called before a sample and not after it: the end of a unit lies in the shard of its last sample.
        target_bytes = self._target_bytes()
        self._decide_if_due()
        if self._open.size_bytes >= target_bytes:
            self.flush()
            target_bytes = self._target_bytes()
        self._begin_shard()
        if not self._open.num_samples:
            self._refresh_holdout()  # for each shard: shards may come faster than the limit is refreshed
            self._open.holdout = self._holdout
        return target_bytes - self._open.size_bytes

    def _target_bytes(self, published: int | None = None) -> int:
        now_s = time.monotonic()
        if now_s > self._limit_until_s:  # the limit may be changed while we run
            self._limit_until_s = now_s + 1.0
            self._limit_bytes = self._cache.size_limit
            bounds.limit_to(self._limit_bytes)
        share_bytes = self._limit_bytes // self._job.num_workers
        published = self._outbox.published if published is None else published
        return target_bytes(published, self._job.shard_bytes, share_bytes)

    # --- units

    def finish(self, unit_read: UnitRead, *, was_suspect: bool) -> None:
        """Count the unit as done, with its error if it has one."""
        self._begin_shard()
        if was_suspect:
            self._open.tally.settled.append(unit_read.position)
        if unit_read.error is not None:
            kind = "source" if not isinstance(unit_read.error, SampleError) else "sample"
            kind = "quarantined" if isinstance(unit_read.error, QuarantinedError) else kind
            self._skip(kind, unit_read.error, f"unit {unit_read.unit}")
            self._open.tally.done += kind != "quarantined"
        # No shard holds a unit that failed: the next pass tries it again.
        rest = (
            [] if unit_read.covered or unit_read.error is not None else gaps(unit_read.cached, unit_read.done)
        )
        self._open.tally.finished(unit_read.claim_id, unit_read.position, rest)
        self._slot["units"] += not unit_read.covered

    def _skip(self, kind: str, error: BaseException, example: str) -> None:
        lost = error.lost if isinstance(error, SampleError) else 1
        self._open.tally.skipped(kind, error, example, lost)
        self._slot["failures"] += lost if kind != "quarantined" else 0
        has_failed = (
            self._slot["failures"] >= _FATAL_FAILURES and not self._slot["samples"] + self._slot["dropped"]
        )
        if has_failed and not self._cache.num_samples:
            raise WorkerError(
                f"none of the first {_FATAL_FAILURES} samples can be used, the last one: {error}"
            )

    # --- shards

    def _begin_shard(self) -> None:
        """Note the time and the pass of the open shard, unless it has begun already."""
        if self._open.since_s is None:
            assert self.row is not None
            self._open.since_s, self._open.row = time.monotonic(), self.row

    def due_in_s(self) -> float:
        """The time for which the open shard may still wait for more samples."""
        if self._open.since_s is None or not self._open.has_news:
            return math.inf
        now_s = time.monotonic()
        due_in_s = self._open.since_s + max_age_s(now_s - self._started_s) - now_s
        return max(0.0, due_in_s, self._decision_due_in_s())

    def flush_if_due(self) -> None:
        """Hand over the open shard if it is old or large enough."""
        since_s = self._open.since_s
        if since_s is None:
            return
        now_s = time.monotonic()
        if not self._decide_if_due():
            return
        size_bytes = self._open.size_bytes
        if is_due(size_bytes, now_s - since_s, self._target_bytes(), now_s - self._started_s):
            self.flush()

    def flush(self) -> None:
        """Hand over the open shard, or only its progress, to be published."""
        self._decide()
        if self._open.has_news:
            self._open = self._outbox.send(self._open)

    def split_claim(self, unit_read: UnitRead) -> int:
        """Give the next unit a claim of its own; returns the id of the claim."""
        return self._outbox.publisher.split_claim(unit_read.claim_id, unit_read.position, unit_read.done)

    def settle(self) -> None:
        """Publish all samples and progress, and wait until that is done."""
        first = self._first
        if first is not None and first.parts and first.others is None:
            self._vote(first)
        while not self._decide_if_due() and not self._stop.wait(min(BEAT_S, self._decision_due_in_s())):
            self._slot["beat_s"] = time.monotonic()
        self.flush()
        self._outbox.settle()
