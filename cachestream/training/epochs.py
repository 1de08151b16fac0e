"""The sequence of a loader's epochs: the running one, and the one after it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from cachestream.errors import EpochError
from cachestream.training.iteration import EpochIteration, Stage
from cachestream.training.segment import Request, Segment
from cachestream.training.stats import LoaderStats, Meter

if TYPE_CHECKING:
    from cachestream.storage.layout import Directory
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.manifests import Recorder
    from cachestream.training.pipeline import Pipeline


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
        self._meter = Meter(directory, pipeline.preparer)
        self._iteration: EpochIteration | None = None
        self._planned = Request(0, 0)
        self._wanted_epoch: int | None = None
        self._closed_at: Request | None = None  # the rest of the epoch in which the loader was closed
        if options.replay is not None:
            self.jump(Request(0, options.replay.epochs[0]))

    def begin(self) -> EpochIteration:
        """Begin the next epoch, or the running one again if none of its batches was taken and no other epoch
        was set.
        """
        began_s = self._meter.clock()
        self._join_job()
        self._pipeline.start()
        again = self._running
        if again is not None and again.stage is Stage.BEGUN and self._wanted_epoch in {None, again.epoch}:
            request = again.request
            self._wanted_epoch = None
        else:
            self._end_epoch(Stage.LEFT)
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

    def _end_epoch(self, stage: Stage) -> None:
        """End the running epoch."""
        if self._running is not None:
            self._running.end(stage)

    def close(self) -> None:
        """End the running epoch and the pipeline; the state stays as it is now."""
        stage = Stage.CLOSED
        if (running := self._running) is not None:
            self._closed_at = self._rest()
            stage = Stage.CLOSED if self._closed_at.epoch == running.epoch else Stage.FINISHED
        # Before the queue is emptied: a thread that waits for a batch then learns of the end, not of a
        # timeout.
        self._pipeline.stop(join=False)
        self._end_epoch(stage)
        self._meter.close()

    @property
    def epoch(self) -> int:
        """The running epoch, otherwise the next one."""
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

    def length(self) -> int:
        """The number of batches in the running epoch, otherwise in the next one, which is then prepared."""
        return self.segment().total

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
        queued = group.peek(self._timeout_s)
        if queued is None:
            raise self._schedule.late_error(epoch, self._timeout_s)
        # A copy, because the trainer may change the batch itself in place.
        return copy.deepcopy(self._pipeline.transfer.receive(queued.staged))

    def segment(self) -> Segment:
        """The segment of the running epoch, otherwise of the next one. Raises EpochError when the epoch has
        ended.
        """
        return self._schedule.segment(self._prepared_epoch(), self._timeout_s)

    @property
    def _running(self) -> EpochIteration | None:
        """The iteration that has not ended."""
        iteration = self._iteration
        return iteration if iteration is not None and iteration.is_running else None

    @property
    def _next_request(self) -> Request:
        """The planned request; that of the last iteration if it failed before its first batch."""
        failed = self._iteration
        return failed.request if failed is not None and failed.failed_early else self._planned

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
            self.jump(Request(0, wanted))
        self._wanted_epoch = None

    def _join_job(self) -> None:
        """Join the job of this process if it is a new one, and request the planned epoch again."""
        if self._running is not None:
            self._running.join_job()
        elif self._pipeline.join_job():
            self.jump(self._next_request)

    def to_state(self) -> dict[str, Any]:
        """The state after the delivered batches."""
        return (self._closed_at or self._rest()).to_state()

    def _rest(self) -> Request:
        """The request for what follows the delivered batches."""
        running = self._running
        request = self._next_request if running is None else running.rest()
        in_progress = running is not None and running.segment is not None
        if in_progress or self._wanted_epoch in {None, request.epoch}:
            return request
        return Request(0, self.epoch)

    def resume_from(self, request: Request) -> None:
        """Go on with `request`, that of a state."""
        self._end_epoch(Stage.LEFT)
        self._iteration, self._wanted_epoch = None, None
        self._join_job()
        self.jump(request)

    def stats(self) -> LoaderStats:
        """Statistics of deliveries and waits so far."""
        epoch = self.epoch if self._iteration is None else self._iteration.epoch
        return self._meter.stats(epoch)
