"""Samples into the open shard, shards into the cache, and with each of them the progress of the pass."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from cachestream.config import format_size, with_generator
from cachestream.errors import CacheFullError, SampleError, SchemaMismatchError, WorkerError
from cachestream.schema import HELD_OUT, TRAIN, WHOLE, Schema, Span, is_held_out
from cachestream.storage.cache import Cache
from cachestream.storage.opening import MIN_LIMIT_BYTES
from cachestream.storage.os_errors import DiskFailedError, translated_disk_errors
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import disk_footprint
from cachestream.storage.shard import ShardContent
from cachestream.storage.tables import FailureRow, PassRow
from cachestream.storage.telemetry import NO_SPACE, WRITING, Slot, board_text
from cachestream.transport import bounds
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.cached_units import END, gaps, is_covered
from cachestream.worker.encode import Table, to_record
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.packer import FirstSamples, Packer, Part, keys_of, majority
from cachestream.worker.processes import end_if_forked
from cachestream.worker.unit_reader import SampleChunk, UnitRead, runs, sample_generator

FIRST_BYTES: Final = 256 * 1024
FIRST_AGE_S: Final = 0.1
USUAL_AGE_S: Final = 2.0
LONGEST_AGE_S: Final = 60.0
_AGE_GROWTH: Final = 0.02  # of the time since the start: later the cache is large, and freshness relative
_RAMP_S: Final = 10.0


def target_bytes(published: int, shard_bytes: int, share_bytes: int) -> int:
    """The size at which a process publishes its shard, after `published` ones before it.

    Doubles from 256 KiB up to `shard_bytes`, and takes no more than an eighth of the process's share of the
    limit: shards being written are no good to anybody, and eviction needs something to choose from.
    """
    ramp = FIRST_BYTES << min(published, 40)
    return max(1, min(ramp, shard_bytes, share_bytes // 8))


def max_age_s(elapsed_s: float) -> float:
    """How long a sample waits in an open shard, `elapsed_s` after the worker started."""
    young = FIRST_AGE_S + (USUAL_AGE_S - FIRST_AGE_S) * min(1.0, elapsed_s / _RAMP_S)
    return min(LONGEST_AGE_S, max(young, _AGE_GROWTH * elapsed_s))


def is_due(size_bytes: int, age_s: float, target: int, elapsed_s: float) -> bool:
    """Whether an open shard of `size_bytes`, whose first sample came `age_s` ago, is to be published."""
    return size_bytes >= target or age_s >= max_age_s(elapsed_s)


_REASON_CHARS = 300


class Tally:
    """Grows sample by sample, becomes a Progress, and is cleared once that is committed."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[int, int]] = {}
        self._failures: dict[tuple[str, str], tuple[int, str]] = {}
        self.settled: list[int] = []
        self.done = (
            0  # samples that were dealt with, and units that failed, but for those that ended the process
        )
        self._spans: list[list[tuple[int, int]]] = []  # start and stop of each

    @property
    def has_news(self) -> bool:
        return bool(self._claims or self._failures)

    @property
    def spans(self) -> list[Span]:
        """What the open shard holds, or would if it had not been dropped or skipped."""
        return [Span(start, stop) for start, stop in self._spans]

    def passed(self, claim_id: int, position: int, start: int, stop: int) -> None:
        """The samples at the offsets `start` to `stop` of a unit are packed, dropped or skipped."""
        self._claims[claim_id] = (position, stop)
        self.done += stop - start
        self._extend((position, start), (position, stop))

    def finished(self, claim_id: int, position: int, rest: Sequence[tuple[int, int]]) -> None:
        """The unit at `position` is done; `rest`: ranges of offsets in which it turned out to have no more.

        Only these count as held by the open shard, besides what `passed`: a span over samples that lie in
        another shard would hide it when that one is evicted.
        """
        self._claims[claim_id] = (position + 1, 0)
        for start, stop in rest:
            self._extend((position, start), (position + 1, 0) if stop == END else (position, stop))

    def _extend(self, start: tuple[int, int], stop: tuple[int, int]) -> None:
        if self._spans and self._spans[-1][1] == start:
            self._spans[-1][1] = stop
        else:
            self._spans.append([start, stop])

    def skipped(self, kind: str, error: BaseException, example: str, count: int = 1) -> None:
        """Count samples that were skipped because of `error`.

        Messages begin with the place as a rule ("s3://bucket/a.jpg: truncated"): the place becomes the example, so
        that those of one reason are counted together.
        """
        text, example = redact_text(str(error).strip()) or "no message", redact_text(example)
        place, colon, rest = text.partition(": ")
        if colon and rest and kind == "sample" and ("/" in place or place == example):
            text, example = rest, place
        name = "" if kind in ("sample", "schema", "quarantined") else f"{type(error).__name__}: "
        reason = f"{name}{text}"[:_REASON_CHARS]
        before, first = self._failures.get((kind, reason), (0, example))
        self._failures[kind, reason] = (before + count, first)

    def progress(self, pass_id: int) -> UnitProgress:
        failures = tuple(
            FailureRow(kind, reason, count, example)
            for (kind, reason), (count, example) in self._failures.items()
        )
        claims = tuple((claim_id, *done) for claim_id, done in self._claims.items())
        return UnitProgress(pass_id, claims, tuple(self.settled), failures)

    def clear(self) -> None:
        self._claims.clear()
        self._failures.clear()
        self.done = 0
        self.settled.clear()
        self._spans.clear()


_TICK_S: Final = 0.25
_SPACE_WAITS_S: Final = (0.02, 1.0)
_LOOK_S: Final = 0.05


class StartAgainError(Exception):
    """The shard in memory fits the cache no more, its samples may: read them again in a new process."""


class OpenShard:
    """Samples that are not published yet, and what is to be committed with them."""

    def __init__(self) -> None:
        self.packer = Packer()
        self.holdout: float | None = None  # where samples are held out: these lie in a shard of their own
        self.held_out = Packer()
        # The splits of which samples were left out, because other shards hold them.
        self.elsewhere: set[int] = set()
        self.tally = Tally()
        self.row: PassRow | None = None
        self.since_s: float | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.num_samples) or self.tally.has_news

    @property
    def num_samples(self) -> int:
        return self.packer.num_samples + self.held_out.num_samples

    @property
    def size_bytes(self) -> int:
        return self.packer.size_bytes + self.held_out.size_bytes

    @property
    def schema(self) -> Schema | None:
        """Of samples that are there: the others are to fit them."""
        packer = self.packer if self.packer.num_samples else self.held_out
        return packer.schema if packer.num_samples else None

    def contents(self, fill: dict[str, Any]) -> list[ShardContent]:
        """The shards to be published together: one, or one for each split."""
        if self.holdout is None:
            return [self.packer.content(fill)]
        parts = {HELD_OUT: self.held_out, TRAIN: self.packer}
        parts = {part: packer for part, packer in parts.items() if packer.num_samples}
        found = []
        for part, packer in parts.items():
            is_whole = len(parts) == 1 and not self.elsewhere - {part}
            split = {
                "holdout": self.holdout,
                "held_out": packer.num_samples if part == HELD_OUT else 0,
                "part": WHOLE if is_whole else part,
            }
            found.append(packer.content(split | fill))  # manifests tell spans last
        return found

    def clear(self) -> None:
        self.packer.clear()
        self.held_out.clear()
        self.elsewhere.clear()
        self.holdout = None
        self.tally.clear()
        self.row = None
        self.since_s = None


class Outbox:
    """Publishes one shard at a time, in the order they are sent, so that progress only moves forward."""

    def __init__(self, job: Job, cache: Cache, slot: Slot, *, owner: str, stop: threading.Event) -> None:
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self.publisher = Publisher(cache.directory, cache.catalogue, cache.admission, owner)
        self._thread = ThreadPoolExecutor(1, "publish")
        self._sent: Future[None] | None = None
        self._spare = OpenShard()
        self._gave_up = False
        self.published = 0
        self.schema: Schema | None = cache.schema

    def send(self, shard: OpenShard) -> OpenShard:
        """Publish `shard`; returns an empty one to go on with. Waits until the one before is done.

        Raises what that one failed with: CacheError (CatalogueReplacedError), StartAgainError.
        """
        self.settle()
        spare, self._spare = self._spare, shard
        self._sent = self._thread.submit(self._publish_or_commit, shard)
        return spare

    def settle(self) -> None:
        """Wait until nothing is being published; raises what it failed with."""
        while self._sent is not None:
            self._slot["beat_s"] = time.monotonic()
            try:
                self._sent.result(timeout=_TICK_S)
                self._sent = None
            except FutureTimeoutError:
                continue

    def close(self) -> None:
        """Let the thread end, once what it publishes is done or given up."""
        self._thread.shutdown()

    def _publish_or_commit(self, shard: OpenShard) -> None:
        begun_s = time.monotonic()
        assert shard.row is not None
        if self._gave_up:
            return  # progress of what came later would pass over the shard that was given up
        try:
            if shard.num_samples:
                self._publish(shard, shard.row)
            else:
                self._commit(shard, shard.row)
        except SchemaMismatchError as error:
            # Another process published samples of another kind first: what ours began with is the odd one,
            # and what was skipped because of that may fit.
            raise StartAgainError from error
        except SampleError as error:
            shard.tally.skipped("sample", error, "the only sample of a shard", shard.num_samples)
            self._commit(shard, shard.row)
        self.schema = self._cache.schema
        if not self._gave_up:
            self._slot["committed"] += shard.tally.done
        shard.clear()
        self._slot["publish_s"] += time.monotonic() - begun_s

    def _publish(self, shard: OpenShard, row: PassRow) -> None:
        """Write the shard as soon as there is space, or not at all when told to stop before that."""
        contents = shard.contents(self._fill(shard.tally, row))
        progress = shard.tally.progress(row.id)
        may_evict = self._job.when_full == "evict"

        def publish() -> bool:
            spans = shard.tally.spans
            return self.publisher.publish_together(contents, spans, progress, may_evict=may_evict) is not None

        def check() -> None:
            for content in contents:
                self._check_fits(content)

        if self._insist(publish, check):
            self.published += 1
            self._slot["written_bytes"] += sum(content.data_bytes for content in contents)

    def _commit(self, shard: OpenShard, row: PassRow) -> None:
        progress = shard.tally.progress(row.id)

        def commit() -> bool:
            self.publisher.commit(progress)
            return True

        self._insist(commit, lambda: None)

    def _insist(self, attempt: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Try until there is space; False when told to stop before that. `check` raises where there never will be."""
        wait_s, longest_s = _SPACE_WAITS_S
        while True:
            self._slot["state"] = WRITING
            refusal = ""
            try:
                if attempt():
                    return True
            except (CacheFullError, DiskFailedError) as error:  # as good as no space, until that is over
                refusal = str(error)
            finally:
                self._tell(refusal)
            check()
            self._slot["state"] = NO_SPACE
            begun_s = time.monotonic()
            if self._wait_for_space(begun_s + wait_s):
                self._gave_up = True
                return False
            self._slot["space_wait_s"] += time.monotonic() - begun_s
            wait_s = min(longest_s, 2 * wait_s)

    def _wait_for_space(self, until_s: float) -> bool:
        """Wait until then, or until an epoch begins or ends, which makes room; whether to stop."""
        leases = self._cache.directory.leases
        with translated_disk_errors(leases):
            seen_ns = os.stat(leases).st_mtime_ns
            while (left_s := until_s - time.monotonic()) > 0 and os.stat(leases).st_mtime_ns == seen_ns:
                if self._stop.wait(min(left_s, _LOOK_S)):
                    return True
        return self._stop.is_set()

    def _tell(self, refusal: str) -> None:
        """Let all know what the disk says: on the board, which takes it also where there is no space, and once in the log."""
        if refusal and not self._slot["refusal"]:
            sys.stderr.write(f"{refusal}; it is tried again until then\n")
        self._slot["refusal"] = board_text(refusal)

    def _fill(self, tally: Tally, row: PassRow) -> dict[str, Any]:
        spans = [[*span.start, *span.stop] for span in tally.spans]
        return {"source": self._job.fingerprint, "plan": row.plan, "length": row.length, "spans": spans}

    def _check_fits(self, content: ShardContent) -> None:
        """Raise unless space for a shard of this size can ever be had."""
        limit_bytes = self._cache.size_limit
        if disk_footprint(content.data_bytes) <= limit_bytes // 2:
            return
        if content.num_samples > 1:
            raise StartAgainError
        check_size(content.data_bytes, limit_bytes)


def check_size(nbytes: int, limit_bytes: int) -> None:
    """Raise SampleError for one sample of `nbytes` that a cache of `limit_bytes` has no room for, however empty it is."""
    if disk_footprint(nbytes) > limit_bytes - MIN_LIMIT_BYTES // 2:
        raise SampleError(
            f"one sample of {format_size(nbytes)} is larger than the limit of "
            f"{format_size(limit_bytes)} allows; raise the limit or crop it in the transform"
        )


_FATAL_FAILURES: Final = 1000
_USUAL: Final = 40  # shards published: then they are of the usual size
_MOST_HELD_OUT: Final = 0.5  # of the limit


class QuarantinedError(SampleError):
    """A unit whose reading killed the process too often."""


class Packing:
    """Packs the samples of one process, in the order they are given. `row` is the pass that they belong to, `plan` its plan."""

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
        self._comes_once = True  # each sample, in a pass
        self._keeps_enough = False  # of held-out samples
        self._started_s = time.monotonic()

    # --- samples

    def add(self, flight: UnitRead, lot: SampleChunk) -> bool:
        """Add samples of `flight`; False when told to stop before the last of them."""
        if isinstance(lot.samples, Table):
            return self._add_table(flight, lot, lot.samples)
        room_bytes = 0
        for offset, key, sample in zip(lot.offsets, lot.keys, lot.samples, strict=True):
            if self._stop.is_set():
                return False
            if room_bytes <= 0:
                room_bytes = self._make_room()
            before_bytes = self._open.size_bytes
            self._add(flight, offset, key, sample)
            room_bytes -= self._open.size_bytes - before_bytes
            self._passed(flight, offset, offset + 1)
        return True

    def _add(self, flight: UnitRead, offset: int, key: object, sample: Any) -> None:
        if not isinstance(key, str):  # a source may be anybody's
            error = SampleError(f"its key is of type {type(key).__name__}: keys are str")
            self._skip("sample", error, f"unit {flight.unit}: {key!r}")
            return
        part = WHOLE if self._open.holdout is None else self._part_of(key.encode("utf-8", "surrogatepass"))
        if part != WHOLE and not self._is_wanted(flight, part, offset, key):
            return
        try:
            if self._transform is not None:
                sample = self._transformed(flight, offset, sample)
            if sample is None:
                self._slot["dropped"] += 1
                return
            begun_s = time.monotonic()
            record = to_record(sample)
        except SampleError as error:
            self._skip("sample", error, key)
        except BaseException as error:  # noqa: BLE001  the user's transform may raise anything; signals raise nothing here
            self._skip("transform", error, key)
        else:
            self._take((key, record), record.nbytes)
            self._slot["pack_s"] += time.monotonic() - begun_s

    def _transformed(self, flight: UnitRead, offset: int, sample: Any) -> Any:
        transform, plan = self._transform, self.plan
        assert transform is not None
        assert plan is not None
        slot, begun_s = self._slot, time.monotonic()
        slot["alone"], slot["beat_s"] = flight.position + 1, begun_s
        try:
            return transform(sample, lambda: sample_generator(plan, flight.unit, offset))
        finally:
            end_if_forked(self._pid)
            slot["alone"] = 0
            slot["transform_s"] += time.monotonic() - begun_s

    # --- splits

    def _look_at_held_out(self) -> None:
        with self._cache.catalogue.reading() as tables:
            self._holdout, held_out_bytes = tables.holdout, tables.held_out()[1]
        plan = None if self.row is None else PassPlan.from_json(self.row.plan)
        self._comes_once = plan is not None and plan.is_permutation and plan.length is not None
        # What is drawn anew for ever would fill any room.
        share = _MOST_HELD_OUT if self._comes_once else self._holdout or 0.0
        self._keeps_enough = held_out_bytes > min(share, _MOST_HELD_OUT) * self._limit_bytes

    def _part_of(self, key: bytes) -> int:
        """The split of a sample; WHOLE where the open shard takes all."""
        holdout = self._open.holdout
        if holdout is None:
            return WHOLE
        return HELD_OUT if is_held_out(key, holdout) else TRAIN

    def _is_wanted(self, flight: UnitRead, part: int, offset: int, key: str) -> bool:
        """Whether a sample of a split is to be cached: not what another shard holds, nor more than can be kept."""
        if flight.parts and is_covered(flight.parts[part - 1], offset):
            self._open.elsewhere.add(part)
            return False
        if part != HELD_OUT or not self._keeps_enough:
            return True
        if self._comes_once:
            told = f"held-out samples take {_MOST_HELD_OUT:.0%} of size_limit, and no more are kept: raise it"
            self._skip("held-out", SampleError(f"{told}, or hold out less"), key)
        else:
            self._slot["dropped"] += 1
        return False

    def _wanted_rows(self, flight: UnitRead, offsets: Sequence[int], table: Table) -> Table:
        """The rows of `table` that are to be cached."""
        if self._open.holdout is None:
            return table
        rows = [
            row
            for row, (offset, key) in enumerate(zip(offsets, table.keys, strict=True))
            if self._is_wanted(flight, self._part_of(key), offset, key.decode("utf-8", "surrogatepass"))
        ]
        return table if len(rows) == len(table) else table.take(rows)

    @property
    def _schema(self) -> Schema | None:
        """The schema that samples have to fit: that of the cache, or of the other split's samples that wait with them."""
        return self._outbox.schema or self._open.schema

    def _by_split(self, part: Part) -> Iterator[tuple[Packer, Part]]:
        """What goes into the shard of each split."""
        shards = self._open
        if shards.holdout is None:
            yield shards.packer, part
        elif isinstance(part, Table):
            splits = [self._part_of(key) for key in part.keys]
            for split, packer in ((TRAIN, shards.packer), (HELD_OUT, shards.held_out)):
                if rows := [row for row, one in enumerate(splits) if one == split]:
                    yield packer, part.take(rows)
        else:
            is_out = self._part_of(part[0].encode("utf-8", "surrogatepass")) == HELD_OUT
            yield shards.held_out if is_out else shards.packer, part

    def _add_table(self, flight: UnitRead, lot: SampleChunk, table: Table) -> bool:
        """Samples that came in columns, as many at a time as the open shard takes."""
        each_bytes = max(1, lot.nbytes // len(table))
        start = 0
        while start < len(table):
            if self._stop.is_set():
                return False
            stop = min(len(table), start - (-self._make_room() // each_bytes))
            begun_s = time.monotonic()
            part = table.cut(start, stop)
            if self._is_large(part.nbytes):
                stop, part = start + 1, table.cut(start, start + 1)  # rows may be of very different sizes
            wanted = self._wanted_rows(flight, lot.offsets[start:stop], part)
            if len(wanted):
                self._take(wanted, wanted.nbytes)
            self._slot["pack_s"] += time.monotonic() - begun_s
            for first, last in runs(lot.offsets[start:stop]):
                self._passed(flight, first, last)
            start = stop
        return True

    def _take(self, part: Part, nbytes: int) -> None:
        """Pack `part`, or hold it back while the fields of the cache's samples are undecided."""
        if self._is_large(nbytes):
            try:
                check_size(nbytes, self._limit_bytes)
            except SampleError as error:
                self._skip("sample", error, keys_of(part)[0])
                return
            self.flush()
            self._open_up()
            self._open.holdout = self._holdout
        if self._first is None:
            self._pack(part)
        else:
            self._first.add(part, time.monotonic())

    def _is_large(self, nbytes: int) -> bool:
        """Whether so much needs a shard of its own: an open one holds up to an eighth of the limit."""
        return nbytes > self._limit_bytes // 4

    def _pack(self, part: Part) -> None:
        """Add `part` to the open shard; count what does not fit in."""
        try:
            for packer, of_split in self._by_split(part):
                packer.take(of_split, self._schema)
            self._slot["samples"] += len(part) if isinstance(part, Table) else 1
        except (SchemaMismatchError, MemoryError) as error:
            kind = "schema" if isinstance(error, SchemaMismatchError) else "transform"
            for key in keys_of(part):
                self._skip(kind, error, key)

    def _undecided_s(self) -> float:
        """For how long samples may still be held back until the next step; 0 where that is due, or none are held."""
        first = self._first
        return 0.0 if first is None else first.due_in_s(time.monotonic(), self._target_bytes(_USUAL))

    def _decide_if_due(self) -> bool:
        """Go on to the next step if it is due; whether no samples are held back any more."""
        if self._first is not None and not self._undecided_s():
            if self._first.parts and self._first.others is None:
                self._vote(self._first)
            if not self._undecided_s():
                self._decide()
        return self._first is None or not self._first.parts

    def _decide(self) -> None:
        """Pack what was held back, as it fits to what is cached by now, or to the majority."""
        if self._first is not None and self._first.parts:
            first = self._first
            self._vote(first)
            self._outbox.schema, self._first = self._outbox.schema or majority(first.all_votes), None
            for part in first.parts:
                self._pack(part)

    def _vote(self, first: FirstSamples) -> None:
        """Tell the votes to the other processes, and ask for theirs, and for the cache's schema if there is one by now."""
        with self._cache.catalogue.transaction() as tables:
            first.others = tables.vote(self._owner, first.votes)
        self._outbox.schema = self._cache.schema

    def _passed(self, flight: UnitRead, start: int, stop: int) -> None:
        flight.done = stop
        self._open.tally.passed(flight.claim_id, flight.position, start, stop)

    def _make_room(self) -> int:
        """Begin a shard if the open one is full; returns how many more bytes it takes, above 0."""
        # Before a sample and not after: so the end of a unit lies in the shard of its last sample.
        target_bytes = self._target_bytes()
        self._decide_if_due()
        if self._open.size_bytes >= target_bytes:
            self.flush()
            target_bytes = self._target_bytes()
        self._open_up()
        if not self._open.num_samples:
            self._look_at_held_out()  # for each shard: shards may come faster than the limit is looked at
            self._open.holdout = self._holdout
        return target_bytes - self._open.size_bytes

    def _target_bytes(self, published: int | None = None) -> int:
        now = time.monotonic()
        if now > self._limit_until_s:  # the limit may be changed while we run
            self._limit_until_s = now + 1.0
            self._limit_bytes = self._cache.size_limit
            bounds.limit_to(self._limit_bytes)
        share_bytes = self._limit_bytes // self._job.num_workers
        published = self._outbox.published if published is None else published
        return target_bytes(published, self._job.shard_bytes, share_bytes)

    # --- units

    def finish(self, flight: UnitRead, *, was_suspect: bool) -> None:
        """Count the unit as done, with its error if it has one."""
        self._open_up()
        if was_suspect:
            self._open.tally.settled.append(flight.position)
        if flight.error is not None:
            kind = "source" if not isinstance(flight.error, SampleError) else "sample"
            kind = "quarantined" if isinstance(flight.error, QuarantinedError) else kind
            self._skip(kind, flight.error, f"unit {flight.unit}")
            self._open.tally.done += kind != "quarantined"
        # What failed is not held by any shard: the next pass tries it again.
        rest = [] if flight.covered or flight.error is not None else gaps(flight.cached, flight.done)
        self._open.tally.finished(flight.claim_id, flight.position, rest)
        self._slot["units"] += not flight.covered

    def _skip(self, kind: str, error: BaseException, example: str) -> None:
        lost = error.lost if isinstance(error, SampleError) else 1
        self._open.tally.skipped(kind, error, example, lost)
        self._slot["failures"] += lost if kind != "quarantined" else 0
        useless = (
            self._slot["failures"] >= _FATAL_FAILURES and not self._slot["samples"] + self._slot["dropped"]
        )
        if useless and not self._cache.num_samples:
            raise WorkerError(
                f"none of the first {_FATAL_FAILURES} samples can be used, the last one: {error}"
            )

    # --- shards

    def _open_up(self) -> None:
        if self._open.since_s is None:
            assert self.row is not None
            self._open.since_s, self._open.row = time.monotonic(), self.row

    def due_in_s(self) -> float:
        """How long the open shard may still wait for more samples, as it is."""
        if self._open.since_s is None or not self._open.has_news:
            return math.inf
        now_s = time.monotonic()
        due_in_s = self._open.since_s + max_age_s(now_s - self._started_s) - now_s
        return max(0.0, due_in_s, self._undecided_s())

    def flush_if_due(self) -> None:
        """Hand the open shard over if it has waited, or grown, for long enough."""
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
        """Hand over the open shard, or just the progress, to be published."""
        self._decide()
        if self._open.has_news:
            self._open = self._outbox.send(self._open)

    def split_claim(self, flight: UnitRead) -> int:
        """Give the unit that is next a claim of its own; its id."""
        return self._outbox.publisher.split_claim(flight.claim_id, flight.position, flight.done)

    def settle(self) -> None:
        """Publish all there is, and wait until that is done."""
        first = self._first
        if first is not None and first.parts and first.others is None:
            self._vote(first)
        while not self._decide_if_due() and not self._stop.wait(min(_TICK_S, self._undecided_s())):
            self._slot["beat_s"] = time.monotonic()
        self.flush()
        self._outbox.settle()
