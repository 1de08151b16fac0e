"""The work of a sampling process: from claimed positions to published shards."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from cachestream.config import format_size
from cachestream.errors import (
    CacheFullError,
    SampleError,
    SchemaMismatchError,
    SourceError,
    WorkerError,
)
from cachestream.model import IntArray, Schema
from cachestream.sampling.claims import Assignment, next_claim
from cachestream.sampling.coverage import Coverage, Offsets, is_covered, is_whole
from cachestream.sampling.fetch import Delivery, Fetcher, Flight
from cachestream.sampling.job import Job, Payload
from cachestream.sampling.order import Order, PassPlan
from cachestream.sampling.pace import is_due, target_bytes
from cachestream.sampling.packer import Packer
from cachestream.sampling.reader import UnitReader
from cachestream.sampling.records import to_record
from cachestream.sampling.tally import Tally
from cachestream.storage.admission import Owner, disk_footprint
from cachestream.storage.board import FETCHING, NO_SPACE, WRITING, Slot
from cachestream.storage.cache import Cache
from cachestream.storage.opening import MIN_LIMIT_BYTES
from cachestream.storage.publish import Publisher
from cachestream.storage.shard import ShardContent
from cachestream.storage.tables import PassRow, Suspect

__all__ = ["Filler", "LimitTooSmallError", "QuarantinedError"]

BUFFER_BYTES: Final = 64 * 2**20
QUARANTINE_AT: Final = 12  # weights of deaths, see supervisor.suspicion
_WINDOW: Final = 4  # units submitted ahead, in multiples of the concurrency
_TICK_S: Final = 0.25
_SPACE_WAITS_S: Final = (0.02, 0.5)
_COVERAGE_AGE_S: Final = 10.0
_FATAL_SOURCE_ERRORS: Final = 20


class LimitTooSmallError(Exception):
    """The limit was lowered below the shard in memory: start again with smaller ones."""


class QuarantinedError(SampleError):
    """A unit whose reading killed the process too often."""


class Filler:
    """Fills the cache from one process. `slot` is its place on the board, `owner` its name in the catalogue."""

    def __init__(
        self, job: Job, payload: Payload, cache: Cache, slot: Slot, *, owner: str, stop: threading.Event
    ) -> None:
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self._transform = payload.transform
        self._orders = _Orders(payload, cache)
        self._owner = Owner(cache.directory, owner)
        self._publisher = Publisher(cache.directory, cache.catalogue, cache.admission, owner)
        self._reader = UnitReader(job, payload.source, cache.directory, slot, stop)
        self._fetcher = Fetcher(self._reader.read, job.concurrency, BUFFER_BYTES, self._reader.beat)
        self._packer = Packer()
        self._tally = Tally()
        self._assignment: Assignment | None = None
        self._todo: deque[Flight] = deque()
        self._exhausted = False
        self._published = 0
        self._open_since_s: float | None = None
        self._alone: Flight | None = None
        self._suspects: dict[int, Suspect] = {}
        self._limit_bytes = cache.size_limit
        self._limit_until_s = 0.0
        self._started_s = time.monotonic()
        self._source_errors = 0
        self._known: Schema | None = cache.schema

    def run(self) -> None:
        """Work until everything is claimed and done, or until told to stop."""
        try:
            while not self._stop.is_set():
                self._beat(FETCHING)
                self._refill()
                if not len(self._fetcher) and not self._todo and self._exhausted:
                    break
                self._step()
            self._flush()
        finally:
            self._fetcher.stop()
            self._owner.release()

    def _step(self) -> None:
        begun_s = time.monotonic()
        delivery = self._fetcher.next(_TICK_S)
        self._slot["fetch_wait_s"] += time.monotonic() - begun_s
        if delivery is not None:
            self._deliver(delivery)
        if self._open_since_s is not None and self._is_due(time.monotonic() - self._open_since_s):
            self._flush()

    def _is_due(self, age_s: float) -> bool:
        return is_due(
            self._packer.size_bytes, age_s, self._target_bytes(), time.monotonic() - self._started_s
        )

    def _target_bytes(self) -> int:
        now = time.monotonic()
        if now > self._limit_until_s:  # the limit may be changed while we run
            self._limit_until_s = now + 1.0
            self._limit_bytes = self._cache.size_limit
        return target_bytes(self._published, self._job.shard_bytes, self._limit_bytes)

    def _beat(self, state: int) -> None:
        self._slot["state"] = state
        self._slot["beat_s"] = time.monotonic()

    # --- claims to flights

    def _refill(self) -> None:
        while self._alone is None and len(self._fetcher) < _WINDOW * self._job.concurrency:
            if not self._todo and (self._exhausted or not self._claim()):
                return
            if not self._submit():
                return

    def _claim(self) -> bool:
        assignment = next_claim(
            self._cache.catalogue, self._cache.directory, self._owner.name, self._job.num_workers
        )
        if assignment is None:
            self._exhausted = True
            return False
        self._assignment = assignment
        self._suspects = {suspect.position: suspect for suspect in assignment.suspects}
        plan = PassPlan.from_json(assignment.row.plan)
        self._reader.plan = plan
        self._slot["pass_id"] = assignment.row.id
        claim = assignment.claim
        positions = np.arange(claim.position, claim.stop, dtype=np.int64)
        units = self._orders.of(plan).units(positions)
        cached = self._orders.cached(assignment.row, plan, units)
        for position, unit, ranges in zip(positions.tolist(), units.tolist(), cached, strict=True):
            first = claim.offset if position == claim.position else 0
            flight = Flight(position, unit, claim.id, _skipper(first, ranges))
            flight.finished = flight.covered = is_whole(ranges)
            self._todo.append(flight)
        return True

    def _submit(self) -> bool:
        """Hand the next flights to the threads; False when they have to wait for those in flight."""
        group: list[Flight] = []
        while self._todo and len(group) < self._job.concurrency:
            flight = self._todo[0]
            suspect = self._suspects.get(flight.position)
            if suspect is not None and suspect.deaths >= QUARANTINE_AT:
                flight.error = QuarantinedError(f"reading it {suspect.reason}, again and again")
                flight.finished = True
            elif suspect is not None and not flight.finished:
                if group or len(self._fetcher):
                    break
                self._alone = flight  # a suspect flies alone, so that the next death tells who it was
            group.append(self._todo.popleft())
            if self._alone is not None:
                break
        self._fetcher.submit(group)
        return bool(group) and self._alone is None

    # --- samples to shards

    def _deliver(self, delivery: Delivery) -> None:
        flight = delivery.flight
        if self._open_since_s is None:
            self._open_since_s = time.monotonic()
        for offset, key, sample, _ in delivery.items:
            self._add(flight, key, sample)
            self._tally.passed(flight.claim_id, flight.position, offset)
            if self._packer.size_bytes >= self._target_bytes():
                self._flush()
                self._open_since_s = time.monotonic()
        if not delivery.finished:
            return
        if flight is self._alone:
            self._alone = None
        if flight.position in self._suspects:
            self._tally.settled.append(flight.position)
        if flight.error is not None:
            self._failed(flight, flight.error)
        elif not flight.covered:
            self._source_errors = 0
        self._tally.finished(flight.claim_id, flight.position, covered=flight.covered)
        self._slot["units"] += not flight.covered

    def _add(self, flight: Flight, key: str, sample: Any) -> None:
        slot, begun_s = self._slot, time.monotonic()
        slot["alone"], slot["beat_s"] = flight.position + 1, begun_s
        try:
            if self._transform is not None:
                sample = self._transform(sample)
            if sample is None:
                slot["dropped"] += 1
                return
            record = to_record(sample)
            packing_s = time.monotonic()
            slot["transform_s"] += packing_s - begun_s
            self._packer.add(key, record, self._known)
            slot["pack_s"] += time.monotonic() - packing_s
            slot["samples"] += 1
        except SchemaMismatchError as error:
            self._skip("schema", error, key)
        except SampleError as error:
            self._skip("sample", error, key)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's transform may raise anything
            self._skip("transform", error, key)
        finally:
            slot["alone"] = 0

    def _skip(self, kind: str, error: BaseException, example: str) -> None:
        self._tally.skipped(kind, error, example)
        self._slot["failures"] += 1

    def _failed(self, flight: Flight, error: BaseException) -> None:
        what = f"unit {flight.unit}"
        if isinstance(error, QuarantinedError):
            self._skip("quarantined", error, what)
        elif isinstance(error, SampleError):
            self._skip("sample", error, what)
        elif isinstance(error, SourceError):
            self._source_errors += 1
            if self._source_errors >= _FATAL_SOURCE_ERRORS:
                raise WorkerError(
                    f"{self._source_errors} units in a row cannot be read, the last one: {error}"
                )
            self._skip("source", error, what)
        else:
            self._skip("source", error, what)

    def _flush(self) -> None:
        """Publish the open shard, or just the progress; waits for space."""
        if self._assignment is not None and self._packer.num_samples:
            begun_s = time.monotonic()
            self._beat(WRITING)
            content = self._packer.content(self._fill(self._assignment.row))
            try:
                if not self._publish(content):
                    return  # told to stop before there was space: others will do it again
                self._published += 1
                self._slot["written_bytes"] += content.data_bytes
            except SchemaMismatchError as error:
                # Another process published samples of another kind first: ours do not fit.
                self._tally.skipped("schema", error, "a whole shard", self._packer.num_samples)
                self._publisher.commit(self._tally.progress(self._assignment.row.id))
            self._slot["publish_s"] += time.monotonic() - begun_s
            self._known = self._cache.schema
        elif self._assignment is not None and self._tally.has_news:
            self._publisher.commit(self._tally.progress(self._assignment.row.id))
        self._packer.clear()
        self._tally.clear()
        self._open_since_s = None

    def _fill(self, row: PassRow) -> dict[str, Any]:
        spans = [[*span.start, *span.stop] for span in self._tally.spans]
        return {"source": self._job.fingerprint, "plan": row.plan, "length": row.length, "spans": spans}

    def _publish(self, content: ShardContent) -> bool:
        """Write the shard as soon as there is space; False when told to stop before that."""
        assert self._assignment is not None
        may_evict = self._job.when_full == "evict"
        progress = self._tally.progress(self._assignment.row.id)
        wait_s, longest_s = _SPACE_WAITS_S
        while True:
            try:
                if (
                    self._publisher.publish(content, self._tally.spans, progress, may_evict=may_evict)
                    is not None
                ):
                    return True
            except CacheFullError:
                pass  # the disk itself is full: as good as no space
            self._check_fits(content)
            begun_s = time.monotonic()
            self._beat(NO_SPACE)
            if self._stop.wait(wait_s):
                return False
            self._slot["space_wait_s"] += time.monotonic() - begun_s
            wait_s = min(longest_s, 2 * wait_s)

    def _check_fits(self, content: ShardContent) -> None:
        """Raise unless a shard of this size can ever be had space for."""
        limit_bytes = self._cache.size_limit
        if disk_footprint(content.data_bytes) <= limit_bytes // 2:
            return
        if content.num_samples > 1:
            raise LimitTooSmallError
        if disk_footprint(content.data_bytes) > limit_bytes - MIN_LIMIT_BYTES // 2:
            raise SchemaMismatchError(
                f"one sample of {format_size(content.data_bytes)} is larger than the limit of "
                f"{format_size(limit_bytes)} allows; raise the limit or crop it in the transform"
            )


class _Orders:
    """The orders of this pass and of those whose shards are still cached."""

    def __init__(self, payload: Payload, cache: Cache) -> None:
        self._payload = payload
        self._cache = cache
        self._orders: dict[PassPlan, Order] = {}
        self._coverage: Coverage | None = None
        self._load_at_s = 0.0

    def of(self, plan: PassPlan) -> Order:
        order = self._orders.get(plan)
        if order is None:
            drawn = None
            if plan.kind == "sampler":
                drawn = np.load(self._cache.directory.worker_file(f"order-{plan.ordinal}.npy"), mmap_mode="r")
            weights = self._payload.weights if plan.kind == "weighted" else None
            order = self._orders[plan] = Order(plan, weights, drawn)
        return order

    def cached(self, row: PassRow, plan: PassPlan, units: IntArray) -> Sequence[Offsets]:
        """For each of `units` what is cached of it, from earlier passes or before the catalogue was lost."""
        now = time.monotonic()
        if plan.is_permutation and now >= self._load_at_s:
            self._coverage = self._load(row, plan)
            self._load_at_s = now + _COVERAGE_AGE_S if self._coverage is not None else math.inf
        return [()] * len(units) if self._coverage is None else self._coverage.of(units)

    def _load(self, current_row: PassRow, current: PassPlan) -> Coverage | None:
        with self._cache.catalogue.reading() as tables:
            plans = {row.id: PassPlan.from_json(row.plan) for row in tables.passes()}
            spans = tables.spans()
        if current_row.evicted_before >= 0 and set(spans) <= {current_row.id}:
            return None  # the first pass: nothing of it is cached but what its own progress says
        same = (current.listing, current.num_units)
        usable = {
            pass_id: plan
            for pass_id, plan in plans.items()
            if plan.is_permutation and (plan.listing, plan.num_units) == same
        }
        return Coverage({self.of(plan): spans.get(pass_id, []) for pass_id, plan in usable.items()})


def _skipper(first: int, ranges: Offsets) -> Callable[[int], bool]:
    if not ranges:
        return lambda offset: offset < first
    return lambda offset: offset < first or is_covered(ranges, offset)
