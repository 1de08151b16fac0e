"""A sampling process: it claims, fetches, transforms, packs and publishes until the pass is over.

All that a sampling process has done is in the catalogue, or did not happen: the process may be killed at any
point.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import replace
from enum import Enum
from typing import Final

import numpy as np

from cachestream.errors import (
    CacheFullError,
    CacheLockedError,
    SampleError,
    SourceError,
    SourceUnavailableError,
    WorkerError,
)
from cachestream.sources.base import as_growing, stored_names
from cachestream.storage.cache import Cache
from cachestream.storage.filling import Assignment
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.publish import CatalogueReplacedError
from cachestream.storage.reservations import Owner
from cachestream.storage.tables import Suspect
from cachestream.storage.telemetry import ENDED, FETCHING, NO_REMOTE, STARTING, Board, Slot, board_text
from cachestream.worker.cached_units import KnownOrders, is_whole, skipper
from cachestream.worker.child import EXIT_FATAL, EXIT_LATER, EXIT_RESTART, end_now, live_with_parent
from cachestream.worker.fetcher import Delivery, Fetcher, ReadTuner
from cachestream.worker.job import Job, Payload, load_shared, unpack
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import NotYetError, next_claim
from cachestream.worker.processes import name_process
from cachestream.worker.publisher import BEAT_S, StartAgainError
from cachestream.worker.shard_writer import QuarantinedError, ShardWriter
from cachestream.worker.stored_listings import Listings, keep_names
from cachestream.worker.unit_reader import UnitRead, UnitReader, UnitState

BUFFER_BYTES: Final = 64 * 2**20
QUARANTINE_AT: Final = 12  # a sum of weights of deaths, see health.suspicions
_WINDOW: Final = 4  # units submitted ahead, in multiples of the concurrency
_FATAL_REFUSALS: Final = 20
_QUIET_S: Final = 5.0  # without a byte: then the board says so


class Intake(Enum):
    """The way in which a sampler takes in further units; a state changes by `after` alone.

    WAITING ◀──NOT_YET── OPEN ──NONE_LEFT──▶ EXHAUSTED
       └─────DUE────────▶ │ ▲
                   SUSPECT│ │END_ALONE
                          ▼ │
                         ALONE
    """

    OPEN = "claims units, and submits them to the fetcher"
    WAITING = "has nothing to claim for a moment"
    ALONE = "submits nothing while a suspect is read with no other unit beside it"
    EXHAUSTED = "has nothing to claim any more"

    def after(self, event: IntakeEvent) -> Intake:
        """The next state; raises ValueError for an event that cannot happen in this state."""
        try:
            return _INTAKES[self, event]
        except KeyError:
            raise ValueError(f"{event.name} cannot happen while the intake is {self.name}") from None


class IntakeEvent(Enum):
    """Events that change the intake of a sampler."""

    NOT_YET = "all listed units are claimed and the listing continues, or the disk refuses"
    DUE = "it is time to try again"
    NONE_LEFT = "the pass has no units left to claim, or another pass has begun"
    SUSPECT = "the next unit may have killed a process"
    END_ALONE = "the suspect is finished, or put aside"


_INTAKES: Final = {
    (Intake.OPEN, IntakeEvent.NOT_YET): Intake.WAITING,
    (Intake.OPEN, IntakeEvent.NONE_LEFT): Intake.EXHAUSTED,
    (Intake.OPEN, IntakeEvent.SUSPECT): Intake.ALONE,
    (Intake.WAITING, IntakeEvent.DUE): Intake.OPEN,
    (Intake.ALONE, IntakeEvent.END_ALONE): Intake.OPEN,
}


class Sampler:
    """Fills the cache from one process: `slot` of the board, `owner` in the catalogue."""

    def __init__(
        self, job: Job, payload: Payload, cache: Cache, slot: Slot, *, owner: str, stop: threading.Event
    ) -> None:
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self._orders = KnownOrders(payload, cache)
        self._owner = Owner(cache.directory, owner)
        self._writer = ShardWriter(job, cache, slot, payload.transform, owner=owner, stop=stop)
        self._reader = UnitReader(
            job, payload.source, cache.directory, slot, stop, in_rows=payload.transform is None
        )
        self._fetcher = Fetcher(self._reader.read, job.concurrency, BUFFER_BYTES, self._reader.beat)
        self._tuner = ReadTuner(self._fetcher, slot, job)
        self._assignment: Assignment | None = None
        self._todo: deque[UnitRead] = deque()
        self._intake = Intake.OPEN
        self._listing = stored_names(payload.source)
        self._claim_at_s = 0.0  # the end of WAITING
        self._alone: UnitRead | None = None  # the suspect that is read, while ALONE
        self._suspects: dict[int, Suspect] = {}
        self._refused: list[UnitRead] = []
        self._heard_s, self._heard_bytes = time.monotonic(), 0

    def run(self) -> None:
        """Work until all units are claimed and done, or until told to stop.

        After an error a shard may still be in publication: its reservation is kept until the process ends.
        """
        try:
            while not self._stop.is_set():
                self._beat(self._fetching())
                self._refill()
                if not len(self._fetcher) and not self._todo and self._intake is Intake.EXHAUSTED:
                    self._settle_last_refused()
                    break
                self._step()
            self._writer.settle()
        finally:
            self._fetcher.stop()
        self._owner.release()

    def _step(self) -> None:
        begun_s = time.monotonic()
        delivery = self._fetcher.next(min(BEAT_S, self._writer.due_in_s()))
        self._slot["fetch_wait_s"] += time.monotonic() - begun_s
        if delivery is not None:
            self._deliver(delivery)
            self._heard_s = time.monotonic()
        self._tuner.tick(self._reader.take_throttled)
        self._put_aside_stalled()
        self._writer.flush_if_due()

    def _fetching(self) -> int:
        """The state of the process while it waits for the next unit.

        Shows on the board which unit does not answer.
        """
        stalls, all_wait = self._fetcher.stalls()
        quiet = "" if stalls else self._quiet_message()
        self._slot["silence"] = board_text(stalls[0].reason if stalls else quiet)
        return NO_REMOTE if all_wait or quiet else FETCHING

    def _quiet_message(self) -> str:
        """A message if the next unit has brought nothing for long and no attempt has failed; else ""."""
        now_s, fetched, unit_read = time.monotonic(), int(self._slot["fetched_bytes"]), self._fetcher.awaited
        if unit_read is None or fetched != self._heard_bytes:
            self._heard_s, self._heard_bytes = now_s, fetched
        silent_s = now_s - self._heard_s
        if unit_read is None or silent_s < _QUIET_S:
            return ""
        return f"nothing has come for {silent_s:.0f} s, next is unit {unit_read.unit}"

    def _put_aside_stalled(self) -> None:
        """Put the next unit aside if it has not answered for long, and wake units put aside that are due.

        Only a few units are put aside: if more do not answer, the remote as a whole is away.
        """
        now_s, unit_read = time.monotonic(), self._fetcher.awaited
        if self._intake is not Intake.ALONE and not (self._todo and self._is_suspect(self._todo[0])):
            self._fetcher.wake(lambda unit_read: self._reader.may_try_again(unit_read, now_s))
        if unit_read is None or not unit_read.is_stalled(now_s, self._job.hang_timeout_s):
            return
        if len(self._fetcher.aside) < self._job.concurrency and self._give_own_claim(unit_read):
            self._fetcher.put_aside(unit_read)
            if unit_read.aside:
                self._end_alone(unit_read)

    def _give_own_claim(self, unit_read: UnitRead) -> bool:
        """Give the next unit a claim of its own, so that progress behind it can be committed.

        False if that has to wait.
        """
        if not unit_read.has_own_claim and not self._refused:
            self._writer.settle()
            if not self._stop.is_set():  # a stop may have given up a shard that comes before the unit
                unit_read.claim_id = self._writer.split_claim(unit_read)
                unit_read.has_own_claim = True
        return unit_read.has_own_claim

    def _beat(self, state: int) -> None:
        self._slot["state"] = state
        self._slot["beat_s"] = time.monotonic()

    # --- intake

    def _refill(self) -> None:
        if self._intake is Intake.WAITING and time.monotonic() >= self._claim_at_s:
            self._intake = self._intake.after(IntakeEvent.DUE)
        while self._intake is not Intake.ALONE and len(self._fetcher) < _WINDOW * self._job.concurrency:
            if not self._todo and self._intake is Intake.OPEN:
                self._claim()
            if not self._todo or not self._submit():
                return

    def _claim(self) -> None:
        """Claim the next units, or note that there are none, for now or at all."""
        try:
            assignment = next_claim(
                self._cache.filling, self._owner.name, self._job.num_workers, self._listing
            )
        except (NotYetError, CacheFullError, DiskFailedError):  # a full or failing disk may recover
            self._claim_at_s = time.monotonic() + BEAT_S
            self._intake = self._intake.after(IntakeEvent.NOT_YET)
            return
        other_pass = (
            self._assignment is not None
            and assignment is not None
            and (assignment.row.id != self._assignment.row.id)
        )
        # Another supervisor may have begun another pass, if this process has outlived its own supervisor.
        if assignment is None or other_pass:
            self._intake = self._intake.after(IntakeEvent.NONE_LEFT)
            return
        if self._assignment is not None and assignment.row.plan != self._assignment.row.plan:
            self._writer.settle()  # the pass has grown: all positions of a shard are of one plan
        self._assignment = assignment
        self._writer.row = assignment.row
        self._suspects.update((suspect.position, suspect) for suspect in assignment.suspects)
        plan = PassPlan.from_json(assignment.row.plan)
        if self._listing is not None:
            self._load_names(plan)
        self._reader.plan = self._writer.plan = plan
        self._slot["pass_id"] = assignment.row.id
        claim = assignment.claim
        positions = np.arange(claim.position, claim.stop, dtype=np.int64)
        units = self._orders.of(plan).units(positions)
        cached = self._orders.cached(assignment.row, plan, units)
        for position, unit, (ranges, *parts) in zip(positions.tolist(), units.tolist(), cached, strict=True):
            first = claim.offset if position == claim.position else 0
            unit_read = UnitRead(position, unit, claim.id, skipper(first, ranges), ranges, parts, first)
            if is_whole(ranges):
                unit_read.covered, unit_read.state = True, UnitState.FINISHED
            self._todo.append(unit_read)

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
        while self._todo and len(group) < self._job.concurrency:
            unit_read = self._todo[0]
            suspect = self._suspects.get(unit_read.position)
            if suspect is not None and suspect.deaths >= QUARANTINE_AT:
                unit_read.error = QuarantinedError(f"reading it {suspect.reason}, again and again")
                unit_read.state = UnitState.FINISHED
            elif self._is_suspect(unit_read):
                if group or not self._fetcher.is_idle:
                    break
                self._writer.settle()  # the progress of other units must not be lost with this one
                # A suspect is read alone: the next death tells which unit has caused it.
                self._alone, self._intake = unit_read, self._intake.after(IntakeEvent.SUSPECT)
            group.append(self._todo.popleft())
            if self._intake is Intake.ALONE:
                break
        self._fetcher.submit(group)
        return bool(group) and self._intake is not Intake.ALONE

    def _is_suspect(self, unit_read: UnitRead) -> bool:
        return unit_read.position in self._suspects and not unit_read.finished

    # --- delivery

    def _deliver(self, delivery: Delivery) -> None:
        unit_read = delivery.unit_read
        for chunk in delivery.chunks:
            self._settle_refused()
            self._beat(FETCHING)
            if not self._writer.add(unit_read, chunk):
                return  # told to stop: another process will read the rest again
        if delivery.finished and not self._gave_up(unit_read):
            self._finish(unit_read)

    def _finish(self, unit_read: UnitRead) -> None:
        self._end_alone(unit_read)
        if _is_refusal(unit_read.error) or (unit_read.covered and self._refused):
            self._hold_back(unit_read)
            return
        if not unit_read.covered:
            self._tuner.unit_came()
            self._settle_refused()
        self._writer.finish(unit_read, was_suspect=unit_read.position in self._suspects)

    def _end_alone(self, unit_read: UnitRead) -> None:
        """Submit further units again if `unit_read`, which is finished or put aside, was read alone."""
        if unit_read is self._alone:
            self._alone, self._intake = None, self._intake.after(IntakeEvent.END_ALONE)

    def _hold_back(self, unit_read: UnitRead) -> None:
        """Hold back a unit that the remote refused: if it refuses many in a row, none of them is done."""
        self._refused.append(unit_read)
        errors = [unit_read.error for unit_read in self._refused if unit_read.error is not None]
        if len(errors) >= _FATAL_REFUSALS:
            raise WorkerError(f"{len(errors)} units in a row cannot be read, the last one: {errors[-1]}")

    def _settle_refused(self) -> None:
        """Skip the refused units, each for its own reason, as the remote does answer."""
        for unit_read in self._refused:
            self._writer.finish(unit_read, was_suspect=unit_read.position in self._suspects)
        self._refused.clear()

    def _settle_last_refused(self) -> None:
        if not self._refused:
            return
        self._writer.settle()
        if not self._cache.num_samples:
            error = self._refused[-1].error or self._refused[0].error
            raise WorkerError(
                f"nothing could be read, {len(self._refused)} units refused, the last one: {error}"
            )
        self._settle_refused()

    def _gave_up(self, unit_read: UnitRead) -> bool:
        """True if reading was only given up because of the stop: the unit is not done."""
        return self._stop.is_set() and isinstance(unit_read.error, SourceUnavailableError)


def _is_refusal(error: BaseException | None) -> bool:
    """True if the error may hold for the whole source, such as bad credentials or a missing bucket."""
    return isinstance(error, SourceError) and not isinstance(error, SampleError)


def main() -> None:
    """The main of the process: its job comes through stdin, whose end means stop."""
    stop = threading.Event()
    job_fd, index, owner = live_with_parent(stop)
    name_process(f"cs-sampler-{index}")
    end_now(_run(load_shared(job_fd), index, owner, stop))


def _run(job: Job, index: int, owner: str, stop: threading.Event) -> int:
    board = Board(Directory(job.root).worker_file("board"))
    slot = board.slot(index)
    slot["pid"], slot["state"], slot["beat_s"] = os.getpid(), STARTING, time.monotonic()
    code = 0
    try:
        payload = unpack(job.payload)
        cache = Cache(job.root, eviction=payload.eviction)
        if (source := as_growing(payload.source)) is not None:
            payload = replace(payload, source=source.over(Listings(cache.directory).load()))
        elif index == 0:
            keep_names(payload.source, cache)
        gc.collect()
        gc.freeze()  # objects loaded by now stay: the garbage collector need not scan them
        Sampler(job, payload, cache, slot, owner=owner, stop=stop).run()
    except (StartAgainError, CatalogueReplacedError):
        code = EXIT_RESTART
    except (CacheFullError, CacheLockedError, DiskFailedError) as error:  # may be over soon
        sys.stderr.write(f"{error}\n")
        code = EXIT_LATER
    except WorkerError:
        traceback.print_exc()
        code = EXIT_FATAL
    except BaseException:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        code = 1
    slot["state"] = ENDED  # tells an orderly end from one caused by a sample or a signal
    return code
