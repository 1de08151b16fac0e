"""The work of a sampling process: from claimed positions to published shards."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final

import numpy as np

from cachestream.errors import (
    SampleError,
    SchemaMismatchError,
    SourceError,
    SourceUnavailableError,
    WorkerError,
)
from cachestream.remote.growing import stored_names
from cachestream.sampling.claims import Assignment, NotYetError, next_claim
from cachestream.sampling.coverage import gaps, is_whole
from cachestream.sampling.fetch import Delivery, Fetcher, Flight
from cachestream.sampling.job import Job, Payload
from cachestream.sampling.known import KnownOrders, skipper
from cachestream.sampling.order import PassPlan
from cachestream.sampling.outbox import OpenShard, Outbox
from cachestream.sampling.pace import FIRST_READS, TURN_S, Concurrency, is_due, target_bytes
from cachestream.sampling.reader import UnitReader
from cachestream.sampling.records import to_record
from cachestream.storage.admission import Owner
from cachestream.storage.board import FETCHING, Slot
from cachestream.storage.cache import Cache
from cachestream.storage.tables import Suspect

__all__ = ["Filler", "QuarantinedError"]

BUFFER_BYTES: Final = 64 * 2**20
QUARANTINE_AT: Final = 12  # weights of deaths, see supervisor.suspicion
_WINDOW: Final = 4  # units submitted ahead, in multiples of the concurrency
_TICK_S: Final = 0.25
_FATAL_REFUSALS: Final = 20
_FATAL_FAILURES: Final = 1000


class QuarantinedError(SampleError):
    """A unit whose reading killed the process too often."""


class Filler:
    """Fills the cache from one process. `slot` is its place on the board, `owner` its name in the catalogue."""

    def __init__(
        self, job: Job, payload: Payload, cache: Cache, slot: Slot, *, owner: str, stop: threading.Event
    ) -> None:
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self._transform = payload.transform
        self._orders = KnownOrders(payload, cache)
        self._owner = Owner(cache.directory, owner)
        self._outbox = Outbox(job, cache, slot, owner=owner, stop=stop)
        self._reader = UnitReader(job, payload.source, cache.directory, slot, stop)
        self._fetcher = Fetcher(self._reader.read, job.concurrency, BUFFER_BYTES, self._reader.beat)
        # Under a limit one read tells first how much the others will bring.
        first_reads = min(FIRST_READS if job.bandwidth_bytes_per_s is None else 1, job.concurrency)
        self._concurrency = Concurrency(first_reads, first_reads)
        self._fetcher.use(first_reads)
        self._turn_items, self._turn_since_s = 0, time.monotonic()
        self._turn_waited_s = float(slot["fetch_wait_s"])
        self._open = OpenShard()
        self._assignment: Assignment | None = None
        self._todo: deque[Flight] = deque()
        self._exhausted = False
        self._listing = stored_names(payload.source)
        self._claim_at_s = 0.0
        self._alone: Flight | None = None
        self._suspects: dict[int, Suspect] = {}
        self._limit_bytes = cache.size_limit
        self._limit_until_s = 0.0
        self._started_s = time.monotonic()
        self._refused: list[Flight] = []

    def run(self) -> None:
        """Work until everything is claimed and done, or until told to stop."""
        try:
            while not self._stop.is_set():
                self._beat(FETCHING)
                self._refill()
                if not len(self._fetcher) and not self._todo and self._exhausted:
                    self._settle_last_refused()
                    break
                self._step()
            self._flush()
            self._outbox.settle()
        finally:
            self._fetcher.stop()
            self._owner.release()

    def _step(self) -> None:
        begun_s = time.monotonic()
        delivery = self._fetcher.next(_TICK_S)
        self._slot["fetch_wait_s"] += time.monotonic() - begun_s
        if delivery is not None:
            self._deliver(delivery)
        self._adapt(delivery)
        since_s = self._open.since_s
        if since_s is not None and self._is_due(time.monotonic() - since_s):
            self._flush()

    def _adapt(self, delivery: Delivery | None) -> None:
        """Count what came, and decide every turn how many units to read at once."""
        if delivery is not None:
            self._turn_items += len(delivery.items) + delivery.finished
        elapsed_s = time.monotonic() - self._turn_since_s
        if elapsed_s >= TURN_S:
            waited_s = float(self._slot["fetch_wait_s"])
            rate, waiting = self._turn_items / elapsed_s, (waited_s - self._turn_waited_s) / elapsed_s
            throttled, self._reader.throttled = self._reader.throttled, False
            self._concurrency = self._concurrency.next(
                rate, waiting, self._job.concurrency, throttled=throttled
            )
            self._fetcher.use(self._concurrency.active)
            self._turn_items, self._turn_since_s, self._turn_waited_s = 0, time.monotonic(), waited_s

    def _is_due(self, age_s: float) -> bool:
        return is_due(
            self._open.packer.size_bytes, age_s, self._target_bytes(), time.monotonic() - self._started_s
        )

    def _target_bytes(self) -> int:
        now = time.monotonic()
        if now > self._limit_until_s:  # the limit may be changed while we run
            self._limit_until_s = now + 1.0
            self._limit_bytes = self._cache.size_limit
        share_bytes = self._limit_bytes // self._job.num_workers
        return target_bytes(self._outbox.published, self._job.shard_bytes, share_bytes)

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
        now_s = time.monotonic()
        if now_s < self._claim_at_s:
            return False
        try:
            assignment = next_claim(
                self._cache.catalogue,
                self._cache.directory,
                self._owner.name,
                self._job.num_workers,
                self._listing,
            )
        except NotYetError:
            self._claim_at_s = now_s + _TICK_S
            return False
        other_pass = (
            self._assignment is not None
            and assignment is not None
            and (assignment.row.id != self._assignment.row.id)
        )
        # Another supervisor has begun another pass while we outlived ours: what we hold is of the old one.
        if assignment is None or other_pass:
            self._exhausted = True
            return False
        if self._assignment is not None and assignment.row.plan != self._assignment.row.plan:
            # The pass has grown: a shard tells the order that all of its positions have.
            self._flush()
            self._outbox.settle()
        self._assignment = assignment
        self._suspects.update((suspect.position, suspect) for suspect in assignment.suspects)
        plan = PassPlan.from_json(assignment.row.plan)
        if self._listing is not None:
            self._reach(plan)
        self._reader.plan = plan
        self._slot["pass_id"] = assignment.row.id
        claim = assignment.claim
        positions = np.arange(claim.position, claim.stop, dtype=np.int64)
        units = self._orders.of(plan).units(positions)
        cached = self._orders.cached(assignment.row, plan, units)
        for position, unit, ranges in zip(positions.tolist(), units.tolist(), cached, strict=True):
            first = claim.offset if position == claim.position else 0
            flight = Flight(position, unit, claim.id, skipper(first, ranges), ranges, first)
            flight.finished = flight.covered = is_whole(ranges)
            self._todo.append(flight)
        return True

    def _reach(self, plan: PassPlan) -> None:
        """Have the names of all units of the pass."""
        assert self._listing is not None
        try:
            self._listing.reach(plan.num_units or 0)
        except SourceError as error:
            raise WorkerError(str(error)) from error

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
                self._flush()  # what is known of others must not be lost with this one
                self._outbox.settle()
                self._alone = flight  # a suspect flies alone, so that the next death tells who it was
            group.append(self._todo.popleft())
            if self._alone is not None:
                break
        self._fetcher.submit(group)
        return bool(group) and self._alone is None

    # --- samples to shards

    def _deliver(self, delivery: Delivery) -> None:
        flight = delivery.flight
        for offset, key, sample, _ in delivery.items:
            if self._stop.is_set():
                return  # the rest is read again by whoever goes on
            self._settle_refused()
            # Before a sample and not after: so the end of a unit lies in the shard of its last sample.
            if self._open.packer.size_bytes >= self._target_bytes():
                self._flush()
            self._open_up()
            self._add(flight, key, sample)
            flight.done = offset + 1
            self._open.tally.passed(flight.claim_id, flight.position, offset)
        if delivery.finished and not self._gave_up(flight):
            self._finish(flight)

    def _finish(self, flight: Flight) -> None:
        if flight is self._alone:
            self._alone = None
        if _is_refusal(flight.error) or (flight.covered and self._refused):
            self._refuse(flight)
            return
        if not flight.covered:
            self._settle_refused()
        self._record(flight)

    def _record(self, flight: Flight) -> None:
        """Count the unit as done, with its error if it has one."""
        self._open_up()
        if flight.position in self._suspects:
            self._open.tally.settled.append(flight.position)
        if flight.error is not None:
            kind = "source" if not isinstance(flight.error, SampleError) else "sample"
            kind = "quarantined" if isinstance(flight.error, QuarantinedError) else kind
            self._skip(kind, flight.error, f"unit {flight.unit}")
        rest = [] if flight.covered else gaps(flight.cached, flight.done)
        self._open.tally.finished(flight.claim_id, flight.position, rest)
        self._slot["units"] += not flight.covered

    def _refuse(self, flight: Flight) -> None:
        """Put a unit aside that the remote refused: if it refuses the next ones too, none of them is done."""
        self._refused.append(flight)
        errors = [flight.error for flight in self._refused if flight.error is not None]
        if len(errors) >= _FATAL_REFUSALS:
            raise WorkerError(f"{len(errors)} units in a row cannot be read, the last one: {errors[-1]}")

    def _settle_refused(self) -> None:
        """The remote does answer: the units it refused are skipped, each for its own reason."""
        for flight in self._refused:
            self._record(flight)
        self._refused.clear()

    def _settle_last_refused(self) -> None:
        if not self._refused:
            return
        self._flush()
        self._outbox.settle()
        if not self._cache.num_samples:
            error = self._refused[-1].error or self._refused[0].error
            raise WorkerError(
                f"nothing could be read, {len(self._refused)} units refused, the last one: {error}"
            )
        self._settle_refused()

    def _gave_up(self, flight: Flight) -> bool:
        """Whether the unit was only given up because we stop: it is not done, others will read it."""
        return self._stop.is_set() and isinstance(flight.error, SourceUnavailableError)

    def _open_up(self) -> None:
        if self._open.since_s is None:
            assert self._assignment is not None
            self._open.since_s, self._open.row = time.monotonic(), self._assignment.row

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
            self._open.packer.add(key, record, self._outbox.schema)
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
        self._open.tally.skipped(kind, error, example)
        self._slot["failures"] += kind != "quarantined"
        useless = (
            self._slot["failures"] >= _FATAL_FAILURES and not self._slot["samples"] + self._slot["dropped"]
        )
        if useless and not self._cache.num_samples:
            raise WorkerError(
                f"none of the first {_FATAL_FAILURES} samples can be used, the last one: {error}"
            )

    def _flush(self) -> None:
        """Hand over the open shard, or just the progress, to be published."""
        if self._open.has_news:
            self._open = self._outbox.send(self._open)


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the error may hold for the whole source: bad credentials, no such bucket."""
    return isinstance(error, SourceError) and not isinstance(error, SampleError)
