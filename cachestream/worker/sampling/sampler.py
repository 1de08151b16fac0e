"""A sampling process: it claims units, fetches, transforms, packs and publishes until the pass is over.

The process may be killed at any point: what it has not committed to the catalogue, another one does again.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from cachestream import tracing
from cachestream.errors import CacheFullError, SampleError, SourceError, SourceUnavailableError, WorkerError
from cachestream.linux import name_process
from cachestream.sources.base import as_incremental, stored_names
from cachestream.storage.cache import Cache
from cachestream.storage.filling import Assignment
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import CatalogueDamagedError, DiskFailedError
from cachestream.storage.progress import Suspect
from cachestream.storage.publish import CatalogueReplacedError
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import (
    ENDED,
    FETCHING,
    NO_REMOTE,
    NOTHING_FREE,
    STARTING,
    Board,
    Slot,
    board_text,
)
from cachestream.worker.job import Job, Payload, load_shared, unpack
from cachestream.worker.listings import Listings, keep_names
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import NothingFreeError, next_claim
from cachestream.worker.processes import exit_code, exit_now, tie_to_supervisor
from cachestream.worker.sampling.cached_units import KnownOrders
from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.engine import Engine, LocalEngine
from cachestream.worker.sampling.fetcher import Delivery
from cachestream.worker.sampling.publisher import BEAT_S, StartAgainError
from cachestream.worker.sampling.shard_writer import QuarantinedError, SampleEncoder, ShardWriter
from cachestream.worker.sampling.unit_reader import Unit, UnitRead

QUARANTINE_AT: Final = 12  # a sum of weights of deaths, see health.suspects_of
_FATAL_REFUSALS: Final = 20
_QUIET_S: Final = 5.0  # without a byte: then the board says so


class Sampler:
    """Fills the cache from one process: `slot` of the board, `owner` in the catalogue.

    A unit goes from `_todo` to the fetcher (see UnitState), and is finished in its turn. A suspect, a unit
    that may have killed a process, is read alone, so that the next death has one cause. Units that the remote
    refused are held back until others come: if the remote refuses many in a row, none of them is done.
    """

    def __init__(
        self,
        job: Job,
        payload: Payload,
        cache: Cache,
        slot: Slot,
        engine: Engine,
        *,
        owner: str,
        stop: threading.Event,
    ) -> None:
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self._is_shared = job.cluster is not None and bool(job.cluster.group)
        self._orders = KnownOrders(payload, cache, is_shared=self._is_shared)
        self._owner = Owner(cache.directory, owner)
        self._writer = ShardWriter(job, cache, slot, owner=owner, stop=stop)
        self._encoder = SampleEncoder(self._writer, engine.transform, slot, stop)
        self._engine, self._fetcher = engine, engine.fetcher
        self._assignment: Assignment | None = None
        self._todo: deque[UnitRead] = deque()
        self._listing = stored_names(payload.source)
        self._found_nothing = False  # by the last claim
        self._claim_at_s = 0.0  # the time of the next claim; infinite once nothing is left to claim
        self._read_alone: UnitRead | None = None  # the suspect that is being read
        self._suspects: dict[int, Suspect] = {}
        self._refused: list[UnitRead] = []
        self._arrived_s, self._arrived_bytes = time.monotonic(), 0

    def run(self) -> None:
        """Work until all units are claimed and done, or until told to stop.

        After an error a shard may still be in publication: its reservation is kept until the process ends.
        """
        try:
            while not self._stop.is_set():
                self._beat(self._fetch_state())
                self._refill()
                if not len(self._fetcher) and not self._todo and self._claim_at_s == math.inf:
                    self._skip_last_refused()
                    break
                self._step()
            self._writer.publish_all()
        finally:
            self._engine.stop()
        self._owner.release()

    def _step(self) -> None:
        begun_s = time.monotonic()
        delivery = self._fetcher.next(min(BEAT_S, self._writer.due_in_s()))
        ended_s = time.monotonic()
        self._slot["fetch_wait_s"] += ended_s - begun_s
        tracing.add("wait", begun_s, ended_s)
        if delivery is not None:
            self._deliver(delivery)
            self._arrived_s = time.monotonic()
        self._engine.tick()
        self._put_aside_stalled()
        self._writer.flush_if_due()

    def _fetch_state(self) -> int:
        """The state of the process while it waits for the next unit; shows a stalled unit on the board."""
        stalls, all_wait = self._fetcher.stalls()
        quiet = "" if stalls else self._quiet_message()
        self._slot["silence"] = board_text(stalls[0].reason if stalls else quiet)
        if self._is_shared and self._found_nothing and not len(self._fetcher):
            return NOTHING_FREE
        return NO_REMOTE if all_wait or quiet else FETCHING

    def _quiet_message(self) -> str:
        """A message if the next unit has brought nothing for long and no attempt has failed; else ""."""
        now_s, fetched, unit_read = time.monotonic(), int(self._slot["fetched_bytes"]), self._fetcher.awaited
        if unit_read is None or fetched != self._arrived_bytes:
            self._arrived_s, self._arrived_bytes = now_s, fetched
        silent_s = now_s - self._arrived_s
        if unit_read is None or silent_s < _QUIET_S:
            return ""
        return f"nothing has come for {silent_s:.0f} s, next is unit {unit_read.unit.number}"

    def _put_aside_stalled(self) -> None:
        """Put the next unit aside if it has not answered for long.

        The unit gets a claim of its own before, so that progress behind it can be committed.
        """
        unit_read = self._fetcher.awaited
        if unit_read is None or not unit_read.is_stalled(time.monotonic(), self._job.hang_timeout_s):
            return
        if not unit_read.has_own_claim and not self._refused:
            self._writer.publish_all()
            if not self._stop.is_set():  # a stop may have given up a shard that comes before the unit
                unit_read.claim_id = self._writer.split_claim(unit_read)
        if unit_read.has_own_claim and self._fetcher.put_aside(unit_read):
            self._end_read_alone(unit_read)

    def _beat(self, state: int) -> None:
        self._slot["state"] = state
        self._slot["beat_s"] = time.monotonic()

    # --- intake

    def _refill(self) -> None:
        while self._read_alone is None and len(self._fetcher) < self._engine.window:
            if not self._todo and time.monotonic() >= self._claim_at_s:
                self._claim()
            if not self._todo or not self._submit():
                return

    def _claim(self) -> None:
        """Claim the next units, or note that there are none, for now or at all."""
        before = self._assignment
        try:
            assignment = next_claim(
                self._cache.filling,
                self._owner.name,
                self._job.num_workers,
                self._listing,
                self._engine.most_claimed,
            )
        except (NothingFreeError, CacheFullError, DiskFailedError):  # a full or failing disk may recover
            if self._is_shared and not len(self._fetcher):
                self._writer.flush()  # the group waits for these samples
            self._claim_at_s, self._found_nothing = time.monotonic() + BEAT_S, True
            return
        self._found_nothing = False
        # Another supervisor may have begun another pass, if this process has outlived its own supervisor.
        if assignment is None or (before is not None and assignment.row.id != before.row.id):
            self._claim_at_s = math.inf
            return
        if before is not None and assignment.row.plan != before.row.plan:
            self._writer.publish_all()  # the pass has grown: all positions of a shard are of one plan
        self._assignment = assignment
        self._writer.row = assignment.row
        self._suspects.update((suspect.position, suspect) for suspect in assignment.suspects)
        plan = PassPlan.from_json(assignment.row.plan)
        if self._listing is not None:
            self._load_names(plan)
        self._writer.plan = plan
        self._engine.use_plan(plan)
        self._slot["pass_id"] = assignment.row.id
        claim = assignment.claim
        positions = np.arange(claim.position, claim.stop, dtype=np.int64)
        units = self._orders.of(plan).units(positions)
        cached = self._orders.cached(assignment.row, plan, units)
        for position, unit, (ranges, *parts) in zip(positions.tolist(), units.tolist(), cached, strict=True):
            first = claim.offset if position == claim.position else 0
            self._todo.append(UnitRead(Unit(position, unit, claim.id, first, ranges, parts)))

    def _load_names(self, plan: PassPlan) -> None:
        """Load the names of all units of the pass."""
        assert self._listing is not None
        try:
            self._listing.reach(plan.num_units or 0)
        except SourceError as error:
            raise WorkerError(str(error)) from error

    def _submit(self) -> bool:
        """Submit the next units to the fetcher; False if no more can be submitted for now."""
        group: list[UnitRead] = []
        while self._todo and len(group) < self._job.concurrency and self._read_alone is None:
            unit_read = self._todo[0]
            suspect = self._suspects.get(unit_read.unit.position)
            if suspect is not None and suspect.deaths >= QUARANTINE_AT:
                unit_read.leave_out(QuarantinedError(f"reading it {suspect.reason}, again and again"))
            elif suspect is not None and not unit_read.finished:
                self._fetcher.hold(True)
                if group or not self._fetcher.is_idle:
                    break
                self._writer.publish_all()  # the progress of other units must not be lost with this one
                self._read_alone = unit_read
            group.append(self._todo.popleft())
        self._fetcher.submit(group)
        return bool(group) and self._read_alone is None

    # --- delivery

    def _deliver(self, delivery: Delivery) -> None:
        unit_read = delivery.unit_read
        for chunk in delivery.chunks:
            self._skip_refused()
            self._beat(FETCHING)
            if not self._encode(unit_read, chunk):
                return  # the process is to stop: another one will read the rest again
        if delivery.finished and not self._gave_up(unit_read):
            self._finish(unit_read)

    def _encode(self, unit_read: UnitRead, chunk: SampleChunk) -> bool:
        """Encode the samples of `chunk`; False if the process is to stop before the last of them.

        A trace shows them together: first the time of their transforms, then that of packing.
        """
        if not tracing.is_on():
            return self._encoder.add(unit_read, chunk)
        begun_s, before_s = time.monotonic(), self._encoder.transform_s
        goes_on = self._encoder.add(unit_read, chunk)
        transformed_s = begun_s + self._encoder.transform_s - before_s
        tracing.add("transform", begun_s, transformed_s, samples=len(chunk.offsets))
        tracing.add("pack", transformed_s, time.monotonic(), samples=len(chunk.offsets))
        return goes_on

    def _finish(self, unit_read: UnitRead) -> None:
        self._end_read_alone(unit_read)
        if _is_refusal(unit_read.error) or (unit_read.unit.is_cached and self._refused):
            self._hold_back(unit_read)
            return
        if not unit_read.unit.is_cached:
            self._engine.unit_came()
            self._skip_refused()
        self._finish_now(unit_read)

    def _finish_now(self, unit_read: UnitRead) -> None:
        self._encoder.finish(unit_read, was_suspect=unit_read.unit.position in self._suspects)

    def _end_read_alone(self, unit_read: UnitRead) -> None:
        """Submit further units again if `unit_read`, which is finished or put aside, was read alone."""
        if unit_read is self._read_alone:
            self._read_alone = None
            self._fetcher.hold(False)

    def _hold_back(self, unit_read: UnitRead) -> None:
        """Hold back a unit that the remote refused: if it refuses many in a row, none of them is done."""
        self._refused.append(unit_read)
        errors = [unit_read.error for unit_read in self._refused if unit_read.error is not None]
        if len(errors) >= _FATAL_REFUSALS:
            raise WorkerError(f"{len(errors)} units in a row cannot be read, the last one: {errors[-1]}")

    def _skip_refused(self) -> None:
        """Skip the refused units, each for its own reason, as the remote answers for others."""
        for unit_read in self._refused:
            self._finish_now(unit_read)
        self._refused.clear()

    def _skip_last_refused(self) -> None:
        if not self._refused:
            return
        self._writer.publish_all()
        if not self._cache.num_samples:
            error = self._refused[-1].error or self._refused[0].error
            raise WorkerError(
                f"nothing could be read, {len(self._refused)} units refused, the last one: {error}"
            )
        self._skip_refused()

    def _gave_up(self, unit_read: UnitRead) -> bool:
        """True if reading ended only because the process is to stop: the unit is not done."""
        return self._stop.is_set() and isinstance(unit_read.error, SourceUnavailableError)


def _is_refusal(error: BaseException | None) -> bool:
    """True if the error may hold for the whole source, such as bad credentials or a missing bucket."""
    return isinstance(error, SourceError) and not isinstance(error, SampleError)


# Makes the engine of a job, which counts in the slot and ends at the stop.
MakeEngine = Callable[[Job, Payload, Cache, Slot, threading.Event], Engine]


def main(make_engine: MakeEngine = LocalEngine, later: tuple[type[Exception], ...] = ()) -> None:
    """The main of the process: its job comes through stdin, whose end means stop.

    After an error of the classes `later` another process goes on in a moment.
    """
    stop = threading.Event()
    job_fd, index, owner = tie_to_supervisor(stop)
    name_process(f"cs-sampler-{index}")
    job = load_shared(job_fd)
    tracing.join(job.trace, f"sampler {index}")
    slot = Board(Directory(job.root).worker_file("board")).slot(index)
    slot["pid"], slot["state"], slot["beat_s"] = os.getpid(), STARTING, time.monotonic()

    def work() -> None:
        payload: Payload = unpack(job.payload)
        cache = Cache(job.root, eviction=payload.eviction)
        if (source := as_incremental(payload.source)) is not None:
            payload = replace(payload, source=source.over(Listings(cache.directory).load()))
        elif index == 0:
            keep_names(payload.source, cache)
        gc.collect()
        gc.freeze()  # objects loaded by now stay: the garbage collector need not scan them
        try:
            engine = make_engine(job, payload, cache, slot, stop)
            Sampler(job, payload, cache, slot, engine, owner=owner, stop=stop).run()
        except CatalogueDamagedError as error:
            cache.rebuild(error)
            raise

    code = exit_code(work, fatal=WorkerError, restart=(StartAgainError, CatalogueReplacedError), later=later)
    slot["state"] = ENDED  # tells an orderly end from one caused by a sample or a signal
    exit_now(code)
