"""A loader's way through its epochs, and the iteration of one, on the trainer's thread."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cachestream import tracing
from cachestream.errors import EpochError, warn_caller
from cachestream.training.position import Position
from cachestream.training.ranks import find_job, is_initialized
from cachestream.training.threads import check_process
from cachestream.training.window import LateError

if TYPE_CHECKING:
    from cachestream.storage.telemetry import LoaderStats
    from cachestream.training.background import Background
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.manifests import Recorder
    from cachestream.training.position import Segment
    from cachestream.training.rendezvous import ProcessGroup
    from cachestream.training.tasks import Task


_DONE: Final = "its last batch was taken"
_LEFT: Final = "the loader has begun another one, or was moved by set_epoch or load_state_dict"
_CLOSED: Final = "the loader was closed; to go on there, give its state_dict() to a new one"


class Iteration:
    """An iteration that began at `position`, after `batches` of its epoch.

    `segment`: that of the last batch, None before the first. `task`: the batches in hand. `iterator`: the
    trainer's. `end_step`: the number of batches up to the end of the epoch. `ended`: the reason why there are
    no more batches, "" while there are. One that `failed` before its first batch is begun again by the next
    iteration, with the same epoch; one that failed later keeps its place, for `state_dict`, until the next.
    """

    def __init__(self, position: Position) -> None:
        self.position = position
        self.epoch = position.epoch
        self.batches = position.done
        self.end_step = position.first_step + position.done
        self.ended, self.failed = "", False
        self.segment: Segment | None = None
        self.task: Task | None = None
        self.iterator: weakref.ref[Any] | None = None

    @property
    def is_running(self) -> bool:
        """True until the iteration has ended, or failed before its first batch."""
        return not self.ended or (self.failed and self.segment is not None)

    @property
    def is_untouched(self) -> bool:
        """True if it gave no batch, and has not ended."""
        return not self.ended and self.segment is None

    @property
    def failed_early(self) -> bool:
        """True if it failed before its first batch."""
        return self.failed and self.segment is None

    @property
    def is_abandoned(self) -> bool:
        """True if the trainer dropped its iterator in mid-epoch (by a `break`)."""
        return self.segment is not None and self.iterator is not None and self.iterator() is None

    def rest(self) -> Position:
        """The position after the delivered batches."""
        return self.position if self.segment is None else self.segment.position_after(self.batches)

    def end_error(self) -> Exception:
        """The exception that says why there are no more batches."""
        if self.ended == _DONE:
            return StopIteration()
        return EpochError(
            f"this iteration of epoch {self.epoch} has ended after {self.batches} batches: {self.ended}"
        )


class Batches(Iterator[Any]):
    """The batches of one iteration of a loader. Used by one thread at a time.

    `loader` is only referred to: the threads end with the loader.
    """

    def __init__(self, loader: Any, epochs: Epochs, iteration: Iteration) -> None:
        self._loader = loader
        self._epochs = epochs
        self._iteration = iteration
        self._window, self._meter = epochs.window, epochs.meter
        self._timeout_s = epochs.timeout_s
        # Reentrant: an interrupt between `acquire` and `try` leaves the lock with the thread that goes on.
        self._lock = threading.RLock()
        iteration.iterator = weakref.ref(self)

    def __next__(self) -> Any:
        """Take the next batch.

        Raises StopIteration after the last batch; EpochError if another epoch has begun, the loader was
        closed, or another thread is in this method; and the error of a background thread.
        """
        iteration, wait_s = self._iteration, 0.0
        if not self._lock.acquire(blocking=False):
            raise EpochError(
                f"two threads take batches from one iteration of epoch {iteration.epoch} at a time; take "
                "them in one thread, which hands them on to the others, over a queue.Queue for one"
            )
        try:
            try:
                while (task := iteration.task) is None or not task.batches:
                    if iteration.ended:
                        raise iteration.end_error()
                    began_s = self._meter.clock()
                    self._epochs.find_ranks(iteration)
                    iteration.task = task = self._window.take(iteration.epoch, self._timeout_s)
                    wait_s += self._meter.clock() - began_s
                    if task is None:
                        self._epochs.finish(iteration, wait_s)
                        raise StopIteration
                    if task.batches:  # none where all samples are damaged, or the first batch fails
                        self._epochs.enter(iteration, task, wait_s)
                batch = task.batches.popleft()
                value, counts = batch.value, self._meter.counts
                if batch.ready is not None:
                    value = self._epochs.transfer.receive(value, batch.ready)
                counts.samples += batch.size
                counts.skipped += batch.skipped
                counts.batches += 1
                counts.wait_s += wait_s
                self._meter.last_s = self._meter.clock()
                if self._meter.last_s >= self._meter.report_at_s:
                    self._meter.report()
            finally:
                self._lock.release()
        except BaseException as error:
            if iteration.is_running:
                self._epochs.fail(iteration, error)
            raise
        # The last step: an interrupt before it leaves the batch uncounted and undelivered.
        iteration.batches = batch.number
        return value


class Epochs:
    """The trainer's way through the epochs. Used by the training thread alone.

    Invariants: at most one iteration is running, the last one from `begin`; `_planned` is the position after
    it, as the window knows it; an epoch given to `set_epoch` becomes the planned one when the next epoch is
    begun or asked about.
    """

    def __init__(self, background: Background, recorder: Recorder | None, options: LoaderOptions) -> None:
        self.window, self.meter, self.transfer = background.window, background.meter, background.transfer
        self.timeout_s = options.timeout_s
        self._pid = os.getpid()
        self._background = background
        self._recorder = recorder
        self._has_mixture = options.mixture is not None
        self._has_fixed_length = options.epoch_size is not None
        self._iteration: Iteration | None = None
        self._planned = Position(0)
        self._wanted_epoch: int | None = None
        self._closed_at: Position | None = None  # the rest of the epoch in which the loader was closed
        if options.replay is not None:
            self.jump(Position(options.replay.epochs[0]))

    # --- an iteration

    def begin(self) -> Iteration:
        """Begin the next epoch, or again the running one, if it gave no batch and no other was set."""
        began_s = self.meter.clock()
        self.join_job()
        self._background.start()
        again, last = self._running, self._iteration
        if again is not None and again.is_untouched and self._wanted_epoch in {None, again.epoch}:
            position = again.position
            self._wanted_epoch = None
        else:
            if again is not None:
                self._end(again, _LEFT)
            self.join_job()  # not before: an epoch in progress is finished first
            self._apply_wanted_epoch()
            again, position = None, self._next_position
            if self.window.needs_jump:
                self.window.jump(position)
            self.window.begin(position.epoch)
            if last is not None and last.failed_early:
                self.window.rewind(position.epoch)
        self.meter.begin_epoch(position.epoch)
        iteration = Iteration(position)
        self._planned, self._iteration = Position(position.epoch + 1), iteration
        if again is not None:
            again.ended = _LEFT
        self.meter.add_gap(self.meter.clock() - began_s)
        return iteration

    def enter(self, iteration: Iteration, task: Task, wait_s: float) -> None:
        """Note that the first batch of `task`, for which the trainer waited, is to be taken."""
        segment = task.reader.segment
        if self._background.gathering.is_traced:
            end_s = self.meter.clock()
            tracing.add("wait", end_s - wait_s, end_s, epoch=iteration.epoch)
        if segment is not iteration.segment:
            self._enter_segment(iteration, segment, wait_s)

    def _enter_segment(self, iteration: Iteration, segment: Segment, wait_s: float) -> None:
        """Move into `segment`, whose first batch has come."""
        self._count_reuse(iteration)
        self.meter.enter_segment(segment)
        if iteration.segment is None:
            self.meter.end_gap(wait_s)
        self.window.enter(segment)
        iteration.segment, iteration.end_step = segment, segment.end_step
        if self._recorder is not None and (ranks := self._background.preparer.ranks).leads:
            self._recorder.enter(segment, ranks.rank, ranks.size)
        if segment.missing:
            warn_caller(
                f"{segment.missing} samples of epoch {iteration.epoch} are not cached any more since its "
                f"state was saved, and are skipped{'; others come instead' * self._has_fixed_length}"
            )

    def finish(self, iteration: Iteration, wait_s: float) -> None:
        """End `iteration` after its last batch."""
        self._end(iteration, _DONE)
        self.meter.add_gap(wait_s)

    def fail(self, iteration: Iteration, error: BaseException) -> None:
        """Fail on KeyboardInterrupt, or before the first batch unless that is only late."""
        if isinstance(error, LateError) or (isinstance(error, Exception) and iteration.segment is not None):
            return
        iteration.failed = True
        iteration.ended = f"an error ({type(error).__name__}: {error}); iterate the loader to go on"

    def _end(self, iteration: Iteration, why: str) -> None:
        """End `iteration`. A call that is interrupted is completed by the next one."""
        self._count_reuse(iteration)
        if iteration.segment is not None:
            self.window.end(iteration.segment)
        iteration.ended, iteration.failed = why, False
        iteration.task = iteration.segment = None  # frees its maps

    def _count_reuse(self, iteration: Iteration) -> None:
        if (segment := iteration.segment) is not None:
            drawn = segment.share_drawn(iteration.batches - segment.position.done)
            self.meter.reuse.add(segment.snapshot, drawn)

    def find_ranks(self, iteration: Iteration) -> None:
        """Join a new job before the first batch of an epoch. Raises EpochError if a single process began the
        epoch and is one of several ranks by now.
        """
        if self._pid != os.getpid():
            check_process(self._pid)
        if (segment := iteration.segment) is None:
            self.join_job()
        elif is_initialized() and self.window.wanted.job is None and iteration.batches < segment.total:
            job = find_job()
            if job is not None and job.size > 1:
                raise EpochError(
                    f"epoch {iteration.epoch} was begun before torch.distributed.init_process_group(), by "
                    f"one process alone, and all {job.size} ranks would go on with the same samples; iterate "
                    "the loader again, to share them"
                )

    # --- between iterations

    def close(self) -> None:
        """End the running epoch and the threads; the state stays as it is now."""
        if (running := self._running) is not None:
            self._closed_at = self._rest()
        # First: a thread that waits for a batch learns of the end, not of a timeout.
        self._background.stop(join=False)
        if running is not None and self._closed_at is not None:
            self._end(running, _CLOSED if self._closed_at.epoch == running.epoch else _DONE)

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` gave; otherwise the running one, or else the next."""
        if self._wanted_epoch is not None:
            return self._wanted_epoch
        return self._next_position.epoch if self._running is None else self._running.epoch

    @property
    def batches_done(self) -> int | None:
        """Batches of the running epoch that were delivered; None between epochs."""
        return None if self._running is None else self._running.batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self._wanted_epoch = epoch

    def jump(self, position: Position, job: ProcessGroup | None = None) -> None:
        """Make `position` the next one, and have it prepared, with the ranks of a new `job` if any."""
        if self._iteration is not None and self._iteration.failed_early:
            self._iteration = None
        self._planned = position
        self.window.jump(position, job)

    def peek(self) -> Any:
        """A copy of the next iteration's first batch. Raises EpochError during one, or without a batch."""
        epoch = self._prepared_epoch()
        if self._running is not None and self._running.segment is not None and epoch == self._running.epoch:
            raise EpochError(
                f"epoch {epoch} is being iterated; peek() shows the batch that the next iteration begins "
                "with, and is for before it"
            )
        batch = self.window.peek(epoch, self.timeout_s)
        if batch is None:
            raise EpochError(f"epoch {epoch} has no batch; iterate the loader to go on to the next one")
        value = batch.value if batch.ready is None else self.transfer.receive(batch.value, batch.ready)
        return copy.deepcopy(value)  # the trainer may change the batch itself in place

    def segment(self) -> Segment:
        """The segment of the running epoch, otherwise of the next one. Raises EpochError at its end."""
        return self.window.segment(self._prepared_epoch(), self.timeout_s)

    @property
    def _running(self) -> Iteration | None:
        """The iteration that has not ended."""
        iteration = self._iteration
        return iteration if iteration is not None and iteration.is_running else None

    @property
    def _next_position(self) -> Position:
        """The planned position; that of the last iteration if it failed before its first batch."""
        last = self._iteration
        if last is None:
            return self._planned
        return last.position if last.failed_early else replace(self._planned, first_step=last.end_step)

    def _prepared_epoch(self) -> int:
        """The running epoch; otherwise the next one, and have that prepared, after a failure once more."""
        self.join_job()
        if self._running is not None and not self._running.is_abandoned:
            return self._running.epoch
        self._background.start()
        wanted = self._wanted_epoch
        self._apply_wanted_epoch()
        position = self._next_position
        if self.window.needs_jump:
            self.jump(position)
        elif self._running is not None:
            self.window.begin(position.epoch)
        elif self._iteration is not None and self._iteration.failed_early:
            self.window.rewind(position.epoch)
        if self._running is not None:
            self._wanted_epoch = wanted  # until the next iteration, the state is that of the abandoned one
        return position.epoch

    def _apply_wanted_epoch(self) -> None:
        """Jump to the epoch given to `set_epoch`, unless it is the planned one."""
        wanted = self._wanted_epoch
        if wanted is not None and wanted != self._next_position.epoch:
            self.jump(Position(wanted, first_step=self._next_position.first_step))
        self._wanted_epoch = None

    def join_job(self) -> None:
        """Join the job of this process if it is a new one, and have the planned epoch prepared again. An
        epoch in progress is finished first.
        """
        running = self._running
        if running is not None and running.segment is not None:
            return
        if (job := self._background.find_new_job()) is None:
            return
        if running is None:
            self.jump(self._next_position, job)
        else:
            self.window.jump(running.position, job)
            self.window.begin(running.epoch)

    def to_state(self, leaves: bool = False) -> dict[str, Any]:
        """The state after the delivered batches; if the trainer `leaves` the epoch there, of the next one."""
        position = self._closed_at or self._rest(leaves)
        return position.to_state() | ({"first_step": position.first_step} if self._has_mixture else {})

    def _rest(self, leaves: bool = False) -> Position:
        """The position of what follows the delivered batches, or if the trainer `leaves` it, the epoch."""
        running = self._running
        in_progress = running is not None and running.segment is not None
        if leaves and in_progress:
            running, in_progress = None, False
        position = self._next_position if running is None else running.rest()
        if in_progress or self._wanted_epoch in {None, position.epoch}:
            return position
        return Position(self.epoch, first_step=self._next_position.first_step)

    def resume_from(self, position: Position) -> None:
        """Go on from `position`, that of a state."""
        if self._running is not None:
            self._end(self._running, _LEFT)
        self._iteration, self._wanted_epoch = None, None
        self.join_job()
        self.jump(position)

    def stats(self) -> LoaderStats:
        """Statistics of deliveries and waits so far."""
        epoch = self.epoch if self._iteration is None else self._iteration.epoch
        return self.meter.stats(epoch)
