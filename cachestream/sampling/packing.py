"""Samples into the open shard, shards into the outbox, and with each of them what is done of the pass."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from cachestream.errors import SampleError, SchemaMismatchError, WorkerError
from cachestream.model import Schema
from cachestream.sampling.coverage import gaps, is_covered
from cachestream.sampling.flight import Flight
from cachestream.sampling.job import Job
from cachestream.sampling.kinship import end_if_forked
from cachestream.sampling.lots import Lot, runs
from cachestream.sampling.order import PassPlan
from cachestream.sampling.outbox import OpenShard, Outbox
from cachestream.sampling.pace import is_due, max_age_s, target_bytes
from cachestream.sampling.packer import Packer
from cachestream.sampling.records import to_record
from cachestream.sampling.table import Table
from cachestream.split import HELD_OUT, TRAIN, WHOLE, is_held_out
from cachestream.storage.board import Slot
from cachestream.storage.cache import Cache
from cachestream.storage.tables import PassRow

__all__ = ["Packing", "QuarantinedError"]

_FATAL_FAILURES: Final = 1000
_MOST_HELD_OUT: Final = 0.5  # of the limit


class QuarantinedError(SampleError):
    """A unit whose reading killed the process too often."""


class Packing:
    """Packs the samples of one process, in the order they are given. `row` is the pass that they belong to."""

    def __init__(
        self,
        job: Job,
        cache: Cache,
        slot: Slot,
        transform: Callable[[Any], Any] | None,
        *,
        owner: str,
        stop: threading.Event,
    ) -> None:
        self.row: PassRow | None = None
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self._transform = transform
        self._pid = os.getpid()
        self._outbox = Outbox(job, cache, slot, owner=owner, stop=stop)
        self._open = OpenShard()
        self._limit_bytes = cache.size_limit
        self._limit_until_s = 0.0
        self._holdout: float | None = None
        self._comes_once = True  # each sample, in a pass
        self._keeps_enough = False  # of held-out samples
        self._started_s = time.monotonic()

    # --- samples

    def add(self, flight: Flight, lot: Lot) -> bool:
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

    def _add(self, flight: Flight, offset: int, key: object, sample: Any) -> None:
        if not isinstance(key, str):  # a source may be anybody's
            error = SampleError(f"its key is of type {type(key).__name__}: keys are str")
            self._skip("sample", error, f"unit {flight.unit}: {key!r}")
            return
        part = WHOLE if self._open.holdout is None else self._part_of(key.encode("utf-8", "surrogatepass"))
        if part != WHOLE and not self._is_wanted(flight, part, offset, key):
            return
        try:
            if self._transform is not None:
                sample = self._transformed(flight, sample)
            if sample is None:
                self._slot["dropped"] += 1
                return
            begun_s = time.monotonic()
            self._packer_of(part).add(key, to_record(sample), self._schema)
            self._slot["pack_s"] += time.monotonic() - begun_s
            self._slot["samples"] += 1
        except SchemaMismatchError as error:
            self._skip("schema", error, key)
        except SampleError as error:
            self._skip("sample", error, key)
        except BaseException as error:  # noqa: BLE001  the user's transform may raise anything; signals raise nothing here
            self._skip("transform", error, key)

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

    def _is_wanted(self, flight: Flight, part: int, offset: int, key: str) -> bool:
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

    def _packer_of(self, part: int) -> Packer:
        return self._open.held_out if part == HELD_OUT else self._open.packer

    @property
    def _schema(self) -> Schema | None:
        """What samples have to fit: those of the cache, or those of the other split that wait with them."""
        return self._outbox.schema or self._open.schema

    def _add_rows(self, flight: Flight, offsets: Sequence[int], table: Table) -> int:
        """Pack the wanted rows of `table`, each into the shard of its split; returns how many."""
        if self._open.holdout is None:
            self._open.packer.add_table(table, self._outbox.schema)
            return len(table)
        rows: dict[int, list[int]] = {TRAIN: [], HELD_OUT: []}
        for row, (offset, key) in enumerate(zip(offsets, table.keys, strict=True)):
            part = self._part_of(key)
            if self._is_wanted(flight, part, offset, key.decode("utf-8", "surrogatepass")):
                rows[part].append(row)
        for part, wanted in rows.items():
            if wanted:
                self._packer_of(part).add_table(table.take(wanted), self._schema)
        return sum(map(len, rows.values()))

    def _transformed(self, flight: Flight, sample: Any) -> Any:
        assert self._transform is not None
        slot, begun_s = self._slot, time.monotonic()
        slot["alone"], slot["beat_s"] = flight.position + 1, begun_s
        try:
            return self._transform(sample)
        finally:
            end_if_forked(self._pid)
            slot["alone"] = 0
            slot["transform_s"] += time.monotonic() - begun_s

    def _add_table(self, flight: Flight, lot: Lot, table: Table) -> bool:
        """Samples that came in columns, as many at a time as the open shard takes."""
        each_bytes = max(1, lot.nbytes // len(table))
        start = 0
        while start < len(table):
            if self._stop.is_set():
                return False
            stop = min(len(table), start - (-self._make_room() // each_bytes))
            begun_s = time.monotonic()
            try:
                self._slot["samples"] += self._add_rows(
                    flight, lot.offsets[start:stop], table.cut(start, stop)
                )
            except SchemaMismatchError as error:
                for key in table.keys[start:stop]:
                    self._skip("schema", error, key.decode("utf-8", "surrogatepass"))
            self._slot["pack_s"] += time.monotonic() - begun_s
            for first, last in runs(lot.offsets[start:stop]):
                self._passed(flight, first, last)
            start = stop
        return True

    def _passed(self, flight: Flight, start: int, stop: int) -> None:
        flight.done = stop
        self._open.tally.passed(flight.claim_id, flight.position, start, stop)

    def _make_room(self) -> int:
        """Begin a shard if the open one is full; returns how many more bytes it takes, above 0."""
        # Before a sample and not after: so the end of a unit lies in the shard of its last sample.
        target_bytes = self._target_bytes()
        if self._open.size_bytes >= target_bytes:
            self.flush()
            target_bytes = self._target_bytes()
        self._open_up()
        if not self._open.num_samples:
            self._open.holdout = self._holdout
        return target_bytes - self._open.size_bytes

    def _target_bytes(self) -> int:
        now = time.monotonic()
        if now > self._limit_until_s:  # the limit may be changed while we run
            self._limit_until_s = now + 1.0
            self._limit_bytes = self._cache.size_limit
            self._look_at_held_out()
        share_bytes = self._limit_bytes // self._job.num_workers
        return target_bytes(self._outbox.published, self._job.shard_bytes, share_bytes)

    # --- units

    def finish(self, flight: Flight, *, was_suspect: bool) -> None:
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
        return max(0.0, self._open.since_s + max_age_s(now_s - self._started_s) - now_s)

    def flush_if_due(self) -> None:
        """Hand the open shard over if it has waited, or grown, for long enough."""
        since_s = self._open.since_s
        if since_s is None:
            return
        now_s = time.monotonic()
        size_bytes = self._open.size_bytes
        if is_due(size_bytes, now_s - since_s, self._target_bytes(), now_s - self._started_s):
            self.flush()

    def flush(self) -> None:
        """Hand over the open shard, or just the progress, to be published."""
        if self._open.has_news:
            self._open = self._outbox.send(self._open)

    def split_claim(self, flight: Flight) -> int:
        """Give the unit that is next a claim of its own; its id."""
        return self._outbox.publisher.split_claim(flight.claim_id, flight.position, flight.done)

    def settle(self) -> None:
        """Publish all there is, and wait until that is done."""
        self.flush()
        self._outbox.settle()
