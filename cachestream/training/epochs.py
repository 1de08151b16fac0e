"""The sequence of a loader's epochs, and the iteration of one, on the trainer's thread."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from cachestream import tracing
from cachestream.errors import EpochError
from cachestream.training.ranks import find_job
from cachestream.training.segment import Request, Segment
from cachestream.training.stats import Meter

if TYPE_CHECKING:
    import weakref

    from cachestream.storage.layout import Directory
    from cachestream.storage.telemetry import LoaderStats
    from cachestream.training.batches.prefetcher import BatchGroup
    from cachestream.training.loader_options import LoaderOptions
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


class EpochIteration:
    """An iteration that began with `request`, after `batches` of its epoch. Used by one thread at a time.

    `segment`: that of the last batch, None before the first. `group`: the batches taken from the queue.
    `iterator`: the trainer's iterator. `end_step`: the number of batches up to the end of the epoch.
    """

    def __init__(
        self, request: Request, pipeline: Pipeline, meter: Meter, recorder: Recorder | None, timeout_s: float
    ) -> None:
        self.request = request
        self.epoch = request.epoch
        self.batches = request.done
        self.end_step = request.first_step + request.done
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
        # The last step: an interrupt before it leaves the batch uncounted and undelivered.
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
        self._count_reuse()
        if self.segment is not None:
            self._schedule.end_segment(self.segment)
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
        if self.stage is Stage.FINISHED:
            return StopIteration()
        if self.stage is Stage.CLOSED:
            return EpochError(
                f"the EpochLoader was closed after {self.batches} batches of epoch {self.epoch}; to go on there, give "
                "its state_dict() to a new one"
            )
        why = ": the loader has begun another one, or was moved by set_epoch or load_state_dict"
        if self.stage is Stage.FAILED:
            why = f" with an error ({self._failure}); iterate the loader to go on"
        return EpochError(f"this iteration of epoch {self.epoch} has ended{why}")

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
        self._meter.enter_segment(segment)
        self._schedule.enter_segment(segment)  # wakes the preparing thread, which then takes the GIL
        self.stage, self.segment, self.end_step = Stage.RUNNING, segment, segment.end_step
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


class EpochSequence:
    """The trainer's way through the epochs. Used by the training thread alone.

    Invariants: at most one iteration is running, the last one from `begin`; `_planned` is the request after
    it, as the schedule knows it; an epoch given to `set_epoch` becomes the planned one when the next epoch is
    begun or asked about.
    """

    def __init__(
        self, pipeline: Pipeline, recorder: Recorder | None, options: LoaderOptions, directory: Directory
    ) -> None:
        self._pipeline = pipeline
        self._schedule = pipeline.schedule
        self._recorder = recorder
        self._timeout_s = options.timeout_s
        self._has_mixture = options.mixture is not None
        self._meter = Meter(directory, pipeline.preparer)
        self._iteration: EpochIteration | None = None
        self._planned = Request(0, 0)
        self._wanted_epoch: int | None = None
        self._closed_at: Request | None = None  # the rest of the epoch in which the loader was closed
        if options.replay is not None:
            self.jump(Request(0, options.replay.epochs[0]))

    def begin(self) -> EpochIteration:
        """Begin the next epoch, or again the running one, if it gave no batch and no other was set."""
        began_s = self._meter.clock()
        self._join_job()
        self._pipeline.start()
        again = self._running
        if again is not None and again.stage is Stage.BEGUN and self._wanted_epoch in {None, again.epoch}:
            request = again.request
            self._wanted_epoch = None
        else:
            if again is not None:
                again.end(Stage.LEFT)
            self._join_job()  # not before: an epoch in progress is finished first
            self._apply_wanted_epoch()
            again, request = None, self._next_request
            self._schedule.begin(request.epoch, request if self._schedule.needs_request else None)
        self._meter.begin_epoch(request.epoch)
        iteration = EpochIteration(request, self._pipeline, self._meter, self._recorder, self._timeout_s)
        self._planned, self._iteration = Request(0, request.epoch + 1), iteration
        if again is not None:
            again.stage = Stage.LEFT
        self._meter.add_gap(self._meter.clock() - began_s)
        return iteration

    def close(self) -> None:
        """End the running epoch and the pipeline; the state stays as it is now."""
        stage = Stage.CLOSED
        if (running := self._running) is not None:
            self._closed_at = self._rest()
            stage = Stage.CLOSED if self._closed_at.epoch == running.epoch else Stage.FINISHED
        # Before the queue is emptied: a thread that waits for a batch learns of the end, not of a timeout.
        self._pipeline.stop(join=False)
        if running is not None:
            running.end(stage)
        self._meter.close()

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` gave; otherwise the running one, or else the next."""
        if self._wanted_epoch is not None:
            return self._wanted_epoch
        return self._next_request.epoch if self._running is None else self._running.epoch

    @property
    def batches_done(self) -> int | None:
        """Batches of the running epoch that were delivered; None between epochs."""
        return None if self._running is None else self._running.batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self._wanted_epoch = epoch

    def jump(self, request: Request) -> None:
        """Make `request` the next one, and have it prepared."""
        if self._iteration is not None and self._iteration.failed_early:
            self._iteration = None
        self._planned = request
        self._schedule.begin(request.epoch - 1, request)

    def peek(self) -> Any:
        """A copy of the next iteration's first batch. Raises EpochError during one, or without a batch."""
        epoch = self._prepared_epoch()
        if self._running is not None and self._running.segment is not None and epoch == self._running.epoch:
            raise EpochError(
                f"epoch {epoch} is being iterated; peek() shows the batch that the next iteration begins with, and is for "
                "before it"
            )
        group = self._schedule.peek(epoch, self._timeout_s)
        if group.is_end:
            raise EpochError(f"epoch {epoch} has no batch; iterate the loader to go on to the next one")
        queued = group.peek(self._timeout_s)
        if queued is None:
            raise self._schedule.late_error(epoch, self._timeout_s)
        # A copy, because the trainer may change the batch itself in place.
        return copy.deepcopy(self._pipeline.transfer.receive(queued.staged))

    def segment(self) -> Segment:
        """The segment of the running epoch, otherwise of the next one. Raises EpochError at its end."""
        return self._schedule.segment(self._prepared_epoch(), self._timeout_s)

    @property
    def _running(self) -> EpochIteration | None:
        """The iteration that has not ended."""
        iteration = self._iteration
        return iteration if iteration is not None and iteration.is_running else None

    @property
    def _next_request(self) -> Request:
        """The planned request; that of the last iteration if it failed before its first batch."""
        last = self._iteration
        if last is None:
            return self._planned
        return last.request if last.failed_early else replace(self._planned, first_step=last.end_step)

    def _prepared_epoch(self) -> int:
        """The running epoch; otherwise the next one, and have that prepared, after a failure once more."""
        self._join_job()
        if self._running is not None and not self._running.is_abandoned:
            return self._running.epoch
        self._pipeline.start()
        wanted = self._wanted_epoch
        self._apply_wanted_epoch()
        if self._schedule.needs_request:
            self.jump(self._next_request)
        elif self._running is not None:
            self._schedule.begin(self._planned.epoch)
        if self._running is not None:
            self._wanted_epoch = wanted  # until the next iteration, the state is that of the abandoned one
        return self._next_request.epoch

    def _apply_wanted_epoch(self) -> None:
        """Jump to the epoch given to `set_epoch`, unless it is the planned one."""
        wanted = self._wanted_epoch
        if wanted is not None and wanted != self._next_request.epoch:
            self.jump(Request(0, wanted, first_step=self._next_request.first_step))
        self._wanted_epoch = None

    def _join_job(self) -> None:
        """Join the job of this process if it is a new one, and request the planned epoch again."""
        if self._running is not None:
            self._running.join_job()
        elif self._pipeline.join_job():
            self.jump(self._next_request)

    def to_state(self, leaves: bool = False) -> dict[str, Any]:
        """The state after the delivered batches; if the trainer `leaves` the epoch there, of the next one."""
        request = self._closed_at or self._rest(leaves)
        return request.to_state() | ({"first_step": request.first_step} if self._has_mixture else {})

    def _rest(self, leaves: bool = False) -> Request:
        """The request for what follows the delivered batches, or if the trainer `leaves` it, the epoch."""
        running = self._running
        in_progress = running is not None and running.segment is not None
        if leaves and in_progress:
            running, in_progress = None, False
        request = self._next_request if running is None else running.rest()
        if in_progress or self._wanted_epoch in {None, request.epoch}:
            return request
        return Request(0, self.epoch, first_step=self._next_request.first_step)

    def resume_from(self, request: Request) -> None:
        """Go on with `request`, that of a state."""
        if self._running is not None:
            self._running.end(Stage.LEFT)
        self._iteration, self._wanted_epoch = None, None
        self._join_job()
        self.jump(request)

    def stats(self) -> LoaderStats:
        """Statistics of deliveries and waits so far."""
        epoch = self.epoch if self._iteration is None else self._iteration.epoch
        return self._meter.stats(epoch)
