"""One iteration of an epoch: from batch to batch, on the trainer's thread."""

from __future__ import annotations

import threading
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from cachestream import tracing
from cachestream.errors import EpochError
from cachestream.training.ranks import find_job

if TYPE_CHECKING:
    import weakref

    from cachestream.training.batches.prefetcher import BatchGroup
    from cachestream.training.manifests import Recorder
    from cachestream.training.pipeline import Pipeline
    from cachestream.training.segment import Request, Segment
    from cachestream.training.stats import Meter

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


class EpochIteration:
    """An iteration that began with `request`, after `batches` delivered batches of its epoch. Used by one
    thread at a time.

    `segment`: that of the last batch, None before the first. `group`: the batches taken from the queue.
    `iterator`: the trainer's iterator.
    """

    def __init__(
        self, request: Request, pipeline: Pipeline, meter: Meter, recorder: Recorder | None, timeout_s: float
    ) -> None:
        self.request = request
        self.epoch = request.epoch
        self.batches = request.done
        self.stage = Stage.BEGUN
        self.segment: Segment | None = None
        self.group: BatchGroup | None = None
        self.iterator: weakref.ref[Any] | None = None
        self._failure = ""
        self._pipeline = pipeline
        self._schedule = pipeline.schedule
        self._transfer = pipeline.transfer
        self._meter = meter
        self._recorder = recorder
        self._timeout_s = timeout_s
        # Reentrant: an interrupt between `acquire` and `try` leaves the lock with the thread that goes on.
        self._lock = threading.RLock()
        self._unreported = 0  # batches taken since the last report to the schedule
        self._reported_s = meter.last_s

    @property
    def is_running(self) -> bool:
        """True until the iteration has ended, or failed before its first batch."""
        return self.stage not in _ENDED and not self.failed_early

    @property
    def failed_early(self) -> bool:
        """True if it failed before its first batch."""
        return self.stage is Stage.FAILED and self.segment is None

    @property
    def is_abandoned(self) -> bool:
        """True if the trainer dropped its iterator in mid-epoch (by a `break`)."""
        return self.segment is not None and self.iterator is not None and self.iterator() is None

    def next(self) -> Any:
        """Take the next batch.

        Raises StopIteration after the last batch; EpochError if another epoch has begun, the loader was
        closed, or another thread is in this method; and the error of a background thread.
        """
        if not self._lock.acquire(blocking=False):
            raise EpochError(
                f"two threads take batches from one iteration of epoch {self.epoch} at a time; take them in one thread, "
                "which hands them on to the others, over a queue.Queue for one"
            )
        try:
            try:
                batch, number = self._next()
            finally:
                self._lock.release()
        except BaseException as error:
            if self.is_running:
                self._fail(error)
            raise
        # The last step, with no call after it: an interrupt before it leaves the batch uncounted and
        # undelivered.
        self.batches = number
        return batch

    def _next(self) -> tuple[Any, int]:
        """The next batch and its number in the epoch, from 1."""
        if self.stage is not Stage.RUNNING and self.stage is not Stage.BEGUN:
            raise self._end_error()
        wait_s, group = 0.0, self.group
        if not group:
            wait_s, group = self._fetch()
        if group.is_end:
            self.end(Stage.FINISHED)
            self._meter.add_gap(wait_s)
            raise StopIteration
        queued = group.take(self._timeout_s)
        if queued is None:
            raise self._schedule.late_error(self.epoch, self._timeout_s)
        self._meter.add_batch(queued.size, queued.skipped, wait_s + group.waited_s)
        if group.is_prefetched:
            self._report_progress(group, queued.number)
        return self._transfer.receive(queued.staged), queued.number

    def end(self, stage: Stage) -> None:
        """End in `stage`. A call that is interrupted is completed by the next one."""
        if self.group is not None:
            self.group.discard()
        if self.segment is not None:
            self._schedule.end_segment(self.segment)
        self._count_reuse()
        self.stage, self.group, self.segment = stage, None, None  # frees its maps

    def join_job(self) -> None:
        """Before the first batch, join the job of this process if it is a new one, and have the epoch
        prepared again. An epoch in progress is finished first.
        """
        if self.segment is None and self._pipeline.join_job():
            self._schedule.begin(self.epoch, self.request)

    def rest(self) -> Request:
        """The request for the rest of the epoch after the delivered batches."""
        return self.request if self.segment is None else self.segment.rest_after(self.batches)

    def _end_error(self) -> Exception:
        """The exception that says why there are no more batches."""
        if self.stage is Stage.FAILED:
            return EpochError(
                f"this iteration of epoch {self.epoch} has ended with an error ({self._failure}); iterate the loader "
                "to go on"
            )
        if self.stage is Stage.LEFT:
            return EpochError(
                f"this iteration of epoch {self.epoch} has ended: the loader has begun another one, or was moved by "
                "set_epoch or load_state_dict"
            )
        if self.stage is Stage.CLOSED:
            return EpochError(
                f"the EpochLoader was closed after {self.batches} batches of epoch {self.epoch}; to go on there, give "
                "its state_dict() to a new one"
            )
        return StopIteration()

    def _fail(self, error: BaseException) -> None:
        """Fail on KeyboardInterrupt, or if the epoch could not be prepared."""
        if isinstance(error, Exception) and not (self._schedule.needs_request and self.segment is None):
            return
        self.stage, self._failure = Stage.FAILED, f"{type(error).__name__}: {error}"
        if self.segment is None:
            self._schedule.needs_request = True
            if self.group is not None:  # interrupted before its segment was entered
                self.group.discard()

    def _fetch(self) -> tuple[float, BatchGroup]:
        """Wait for the next batches; return the seconds waited, and the batches."""
        began_s = self._meter.clock()
        self.join_job()
        self._check_alone(self.batches)
        group = self._schedule.take(self.epoch, self._timeout_s)
        self.group = group  # before `_enter`, whose warning may be raised as an error
        if group.segment is not self.segment:
            self._enter(group.segment)
        ended_s = self._meter.clock()
        tracing.add("wait", began_s, ended_s, epoch=self.epoch)
        return ended_s - began_s, group

    def _enter(self, segment: Segment) -> None:
        """Move into `segment`, whose first batch has come."""
        self._count_reuse()
        self._schedule.enter_segment(segment)
        self.stage, self.segment = Stage.RUNNING, segment
        self._meter.enter_snapshot(segment.snapshot)
        if self._recorder is not None and (ranks := self._pipeline.preparer.ranks).leads:
            self._recorder.enter(segment, ranks.rank, ranks.size)
        if segment.missing:
            warnings.warn(
                f"{segment.missing} samples of epoch {self.epoch} are not cached any more since its state was "
                "saved, and are skipped",
                stacklevel=4,
            )

    def _count_reuse(self) -> None:
        segment = self.segment
        if segment is not None:
            self._meter.reuse.add(segment.snapshot, segment.share_drawn(self.batches - segment.request.done))

    def _report_progress(self, group: BatchGroup, batches: int) -> None:
        """Report progress to the schedule, at most every 5 ms unless `group` turns low."""
        self._unreported += 1
        now_s = self._meter.last_s
        if now_s - self._reported_s >= _REPORT_S or group.turns_low:
            self._schedule.advance(self._unreported)
            self._check_alone(batches)
            self._unreported, self._reported_s = 0, now_s

    def _check_alone(self, batches: int) -> None:
        """Raise EpochError if a single process began the epoch and is one of several ranks by now."""
        segment = self.segment
        if self._pipeline.job is not None or segment is None or batches >= segment.total:
            return
        job = find_job()
        if job is not None and job.size > 1:
            raise EpochError(
                f"epoch {self.epoch} was begun before torch.distributed.init_process_group(), by one process alone, and "
                f"all {job.size} ranks would go on with the same samples; iterate the loader again, to share them"
            )
