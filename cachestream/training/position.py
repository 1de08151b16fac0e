"""The trainer's position: the current epoch, the batches delivered, and the next epoch."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from cachestream.errors import EpochError
from cachestream.training.ranks import find_job
from cachestream.training.segment import Request, Segment
from cachestream.training.stats import LoaderStats, Meter

if TYPE_CHECKING:
    import weakref

    from cachestream.training.batches.batch_queue import BatchGroup
    from cachestream.training.epoch_settings import EpochSettings
    from cachestream.training.manifests import Recorder
    from cachestream.training.pipeline import Pipeline

_REPORT_S: Final = 0.005


class Stage(Enum):
    """The stage of an iteration.

        BEGUN ───first batch───▶ RUNNING ───last batch───▶ FINISHED
          ├───────interrupt────────┼──▶ FAILED
          ├───another iteration────┼──▶ LEFT
          └─────────close──────────┴──▶ CLOSED

    An iteration also fails when its epoch cannot be prepared. One that fails before its first batch is begun
    again by the next iteration, with the same epoch. One that fails later keeps its place, for `state_dict`,
    until the next iteration, which makes it LEFT.
    """

    BEGUN = "begun"
    RUNNING = "running"
    FAILED = "failed"
    FINISHED = "finished"
    LEFT = "left"
    CLOSED = "closed"


_ENDED: Final = frozenset({Stage.FINISHED, Stage.LEFT, Stage.CLOSED})


@dataclass(slots=True, eq=False)
class Cursor:
    """The place of an iteration, which began with `request`: after `batches` delivered batches of its epoch.

    `segment`: that of the last batch, None before the first. `group`: the batches taken from the queue.
    `failure`: the error that ended the iteration. `iteration`: the trainer's iterator.
    """

    request: Request
    batches: int
    stage: Stage = Stage.BEGUN
    segment: Segment | None = None
    group: BatchGroup | None = None
    failure: str = ""
    iteration: weakref.ref[Any] | None = None

    @property
    def epoch(self) -> int:
        return self.request.epoch

    @property
    def is_abandoned(self) -> bool:
        """True if the trainer dropped its iterator in mid-epoch (by a `break`)."""
        return self.segment is not None and self.iteration is not None and self.iteration() is None


def _end_of(cursor: Cursor) -> Exception:
    """The exception that says why `cursor` gives no more batches."""
    if cursor.stage is Stage.FAILED:
        return EpochError(
            f"this iteration of epoch {cursor.epoch} has ended with an error ({cursor.failure}); iterate the loader "
            "to go on"
        )
    if cursor.stage is Stage.LEFT:
        return EpochError(
            f"this iteration of epoch {cursor.epoch} has ended: the loader has begun another one, or was moved by "
            "set_epoch or load_state_dict"
        )
    if cursor.stage is Stage.CLOSED:
        return EpochError(
            f"the EpochLoader was closed after {cursor.batches} batches of epoch {cursor.epoch}; to go on there, give "
            "its state_dict() to a new one"
        )
    return StopIteration()


class TrainerPosition:
    """The progress of the training thread through batches and epochs. Used by that thread alone.

    Invariants: at most one cursor is running, the last one from `begin`; `_planned` is the request after it,
    as the schedule knows it; an epoch given to `set_epoch` becomes the planned one when the next epoch is
    begun or asked about.
    """

    def __init__(self, pipeline: Pipeline, recorder: Recorder | None, settings: EpochSettings) -> None:
        self._pipeline = pipeline
        self._schedule = pipeline.schedule
        self._transfer = pipeline.transfer
        self._recorder = recorder
        self._timeout_s = settings.timeout_s
        self._meter = Meter()
        # Reentrant: an interrupt between `acquire` and `try` leaves the lock with the thread that goes on.
        self._lock = threading.RLock()
        self._cursor: Cursor | None = None
        self._planned = Request(0, 0)
        self._wanted_epoch: int | None = None
        self._closed_at: Request | None = None  # the rest of the epoch in which the loader was closed
        self._unreported = 0  # batches taken since the last report to the schedule
        self._reported_s = 0.0
        if settings.replay is not None:
            self.jump(Request(0, settings.replay.epochs[0]))

    # --- from batch to batch

    def begin(self) -> Cursor:
        """Begin the next epoch, or the running one again if none of its batches was taken and no other epoch
        was set.
        """
        began_s = self._meter.clock()
        self._join_job()
        self._pipeline.start()
        again = self._running
        if again is not None and again.stage is Stage.BEGUN and self._wanted_epoch in {None, again.epoch}:
            request, planned = again.request, self._planned
            self._wanted_epoch = None
        else:
            self._end_epoch(Stage.LEFT)
            self._join_job()  # not before: an epoch in progress is finished first
            self._apply_wanted_epoch()
            again, request = None, self._planned
            self._schedule.begin(request.epoch, request if self._schedule.needs_request else None)
            planned = Request(0, request.epoch + 1)
        cursor = Cursor(request, request.done)
        self._planned, self._cursor = planned, cursor
        if again is not None:
            again.stage = Stage.LEFT
        self._meter.begin_epoch()
        self._meter.add_gap(self._meter.clock() - began_s)
        return cursor

    def next(self, cursor: Cursor) -> Any:
        """Take the next batch after `cursor`.

        Raises StopIteration after the last batch; EpochError if another epoch has begun, the loader was
        closed, or another thread is in this method; and the error of a background thread.
        """
        if not self._lock.acquire(blocking=False):
            raise EpochError(
                f"two threads take batches from one iteration of epoch {cursor.epoch} at a time; take them in one thread, "
                "which hands them on to the others, over a queue.Queue for one"
            )
        try:
            try:
                batch, number = self._next(cursor)
            finally:
                self._lock.release()
        except BaseException as error:
            if cursor is self._running:
                self._fail(cursor, error)
            raise
        # The last step, with no call after it: an interrupt before it leaves the batch uncounted and
        # undelivered.
        cursor.batches = number
        return batch

    def _next(self, cursor: Cursor) -> tuple[Any, int]:
        """The next batch and its number in the epoch, from 1."""
        if cursor.stage is not Stage.RUNNING and cursor.stage is not Stage.BEGUN:
            raise _end_of(cursor)
        wait_s, group = 0.0, cursor.group
        if not group:
            wait_s, group = self._fetch(cursor)
        if group.is_end:
            self._end_epoch(Stage.FINISHED)
            self._meter.add_gap(wait_s)
            raise StopIteration
        delivery = group.take(self._timeout_s)
        if delivery is None:
            raise self._schedule.late_error(cursor.epoch, self._timeout_s)
        self._meter.add_batch(delivery.size, delivery.skipped, wait_s + group.waited_s)
        if group.is_flow:
            self._report_progress(cursor, group, delivery.number)
        return self._transfer.receive(delivery.staged), delivery.number

    def _fail(self, cursor: Cursor, error: BaseException) -> None:
        """Fail the iteration of `cursor` on KeyboardInterrupt, or if its epoch could not be prepared."""
        if isinstance(error, Exception) and not (self._schedule.needs_request and cursor.segment is None):
            return
        cursor.stage, cursor.failure = Stage.FAILED, f"{type(error).__name__}: {error}"
        if cursor.segment is None:
            self._planned, self._cursor = cursor.request, None
            self._schedule.prepare_again()
            if cursor.group is not None:  # interrupted before its segment was entered
                cursor.group.discard()

    def _end_epoch(self, stage: Stage) -> None:
        """End the running epoch. A call that is interrupted is completed by the next one."""
        cursor = self._running
        if cursor is None:
            return
        if cursor.group is not None:
            cursor.group.discard()
        if cursor.segment is not None:
            self._schedule.end_segment(cursor.segment)
        self._count_reuse(cursor)
        cursor.stage, cursor.group, cursor.segment = stage, None, None  # frees its maps

    def close(self) -> None:
        """End the running epoch and the pipeline; the state stays as it is now."""
        stage = Stage.CLOSED
        if (cursor := self._running) is not None:
            self._closed_at = self._rest()
            stage = Stage.CLOSED if self._closed_at.epoch == cursor.epoch else Stage.FINISHED
        # Before the queue is emptied: a thread that waits for a batch then learns of the end, not of a
        # timeout.
        self._pipeline.stop(join=False)
        self._end_epoch(stage)

    def _report_progress(self, cursor: Cursor, group: BatchGroup, batches: int) -> None:
        """Report progress to the schedule, at most every 5 ms unless the flow runs low."""
        self._unreported += 1
        now_s = self._meter.last_s
        if now_s - self._reported_s >= _REPORT_S or group.turns_low:
            self._schedule.advance(self._unreported)
            self._check_alone(cursor, batches)
            self._unreported, self._reported_s = 0, now_s

    def _fetch(self, cursor: Cursor) -> tuple[float, BatchGroup]:
        """Wait for the next batches; return the seconds waited, and the batches."""
        began_s = self._meter.clock()
        self._join_job()
        self._check_alone(cursor, cursor.batches)
        group = self._schedule.take(cursor.epoch, self._timeout_s)
        cursor.group = group  # before `_enter`, whose warning may be raised as an error
        if group.segment is not cursor.segment:
            self._enter(cursor, group.segment)
        return self._meter.clock() - began_s, group

    def _enter(self, cursor: Cursor, segment: Segment) -> None:
        """Move `cursor` into `segment`, whose first batch has come."""
        self._count_reuse(cursor)
        self._schedule.enter_segment(segment)
        cursor.stage, cursor.segment = Stage.RUNNING, segment
        self._meter.enter_snapshot(segment.snapshot)
        if self._recorder is not None and (ranks := self._pipeline.preparer.ranks).leads:
            self._recorder.enter(segment, ranks.rank, ranks.size)
        if segment.missing:
            warnings.warn(
                f"{segment.missing} samples of epoch {cursor.epoch} are not cached any more since its state was "
                "saved, and are skipped",
                stacklevel=4,
            )

    def _count_reuse(self, cursor: Cursor) -> None:
        segment = cursor.segment
        if segment is not None:
            self._meter.add_drawn(
                segment.snapshot, segment.share_drawn(cursor.batches - segment.request.done)
            )

    # --- from epoch to epoch

    @property
    def epoch(self) -> int:
        """The running epoch, otherwise the next one."""
        if self._wanted_epoch is not None:
            return self._wanted_epoch
        return self._planned.epoch if self._running is None else self._running.epoch

    @property
    def batches_done(self) -> int | None:
        """Batches of the running epoch that were delivered; None between epochs."""
        return None if self._running is None else self._running.batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self._wanted_epoch = epoch

    def jump(self, request: Request) -> None:
        """Make `request` the next one, and have it prepared."""
        self._planned = request
        self._schedule.begin(request.epoch - 1, request)

    def length(self) -> int:
        """The number of batches in the running epoch, otherwise in the next one, which is then prepared."""
        return self._schedule.length(self._prepared_epoch(), self._timeout_s)

    def peek(self) -> Any:
        """A copy of the first batch of the next iteration. Raises EpochError during an iteration, or if there
        is no batch.
        """
        epoch = self._prepared_epoch()
        if self._running is not None and self._running.segment is not None and epoch == self._running.epoch:
            raise EpochError(
                f"epoch {epoch} is being iterated; peek() shows the batch that the next iteration begins with, and is for "
                "before it"
            )
        group = self._schedule.peek(epoch, self._timeout_s)
        if group.is_end:
            raise EpochError(f"epoch {epoch} has no batch; iterate the loader to go on to the next one")
        delivery = group.peek(self._timeout_s)
        if delivery is None:
            raise self._schedule.late_error(epoch, self._timeout_s)
        # A copy, because the trainer may change the batch itself in place.
        return copy.deepcopy(self._transfer.receive(delivery.staged))

    def segment(self) -> Segment:
        """The segment of the running epoch, otherwise of the next one. Raises EpochError when the epoch has
        ended.
        """
        epoch = self._prepared_epoch()
        self._schedule.length(epoch, self._timeout_s)
        segment = self._schedule.current(epoch)
        if segment is None:
            raise EpochError(f"epoch {epoch} has been left; iterate the loader to begin the next one")
        return segment

    @property
    def _running(self) -> Cursor | None:
        """The cursor of the iteration that was not ended."""
        cursor = self._cursor
        return None if cursor is None or cursor.stage in _ENDED else cursor

    def _prepared_epoch(self) -> int:
        """The running epoch, otherwise the next one, whose preparation is started, or repeated after a
        failure.
        """
        self._join_job()
        if self._running is not None and not self._running.is_abandoned:
            return self._running.epoch
        self._pipeline.start()
        wanted = self._wanted_epoch
        self._apply_wanted_epoch()
        if self._schedule.needs_request:
            self.jump(self._planned)
        elif self._running is not None:
            self._schedule.begin(self._planned.epoch)
        if self._running is not None:
            self._wanted_epoch = wanted  # until the next iteration, the state is that of the abandoned one
        return self._planned.epoch

    def _apply_wanted_epoch(self) -> None:
        """Jump to the epoch given to `set_epoch`, unless it is the planned one."""
        wanted = self._wanted_epoch
        if wanted is not None and wanted != self._planned.epoch:
            self.jump(Request(0, wanted))
        self._wanted_epoch = None

    def _join_job(self) -> None:
        """Join the job of this process if it is a new one, and request the planned epoch again. An epoch in
        progress is finished first.
        """
        cursor = self._running
        if (cursor is not None and cursor.segment is not None) or not self._pipeline.join_job():
            return
        if cursor is None:
            self.jump(self._planned)
        else:
            self._schedule.begin(cursor.epoch, cursor.request)

    def _check_alone(self, cursor: Cursor, batches: int) -> None:
        """Raise EpochError for an epoch that a single process began if the process is one of several ranks by
        now.
        """
        segment = cursor.segment
        if self._pipeline.job is not None or segment is None or batches >= segment.total:
            return
        job = find_job()
        if job is not None and job.size > 1:
            raise EpochError(
                f"epoch {cursor.epoch} was begun before torch.distributed.init_process_group(), by one process alone, and "
                f"all {job.size} ranks would go on with the same samples; iterate the loader again, to share them"
            )

    # --- state

    def to_state(self) -> dict[str, Any]:
        """The state after the delivered batches."""
        return (self._closed_at or self._rest()).to_state()

    def _rest(self) -> Request:
        cursor = self._running
        if cursor is not None and cursor.segment is not None:
            return cursor.segment.rest_after(cursor.batches)
        request = self._planned if cursor is None else cursor.request
        return request if self._wanted_epoch in {None, request.epoch} else Request(0, self.epoch)

    def resume_from(self, request: Request) -> None:
        """Go on with `request`, that of a state."""
        self._end_epoch(Stage.LEFT)
        self._cursor, self._wanted_epoch = None, None
        self._join_job()
        self.jump(request)

    def stats(self) -> LoaderStats:
        """Statistics of deliveries and waits so far."""
        epoch = self.epoch if self._cursor is None else self._cursor.epoch
        return self._meter.stats(epoch, self._pipeline.preparer.last_s)
