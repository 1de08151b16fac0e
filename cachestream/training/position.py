"""The trainer's position: the current epoch, the batches delivered, the next epoch, and the checkpoint of
these.

A state holds the running segment as JSON text: torch.distributed.checkpoint flattens nested values and then
expects the same keys in a new loader's state, which has no segment yet.
"""

from __future__ import annotations

import copy
import json
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Final

from cachestream.errors import ConfigError, EpochError
from cachestream.training.batches.batch_queue import BatchGroup
from cachestream.training.checkpoint import SegmentRecord
from cachestream.training.epoch_record import Recorder
from cachestream.training.loader_options import EpochSettings
from cachestream.training.pipeline import Pipeline, close_all
from cachestream.training.ranks import find_job
from cachestream.training.rendezvous import ProcessGroup
from cachestream.training.segment import Request, Segment
from cachestream.training.stats import LoaderStats, Meter


@dataclass(slots=True, eq=False)
class Cursor:
    """A place in an epoch: after `batches` delivered batches of `epoch`, the last of them from `segment`.

    `loaded_state`: the state that the epoch was resumed from, None for one from its beginning. `group`: the
    batches taken from the queue. `failure`: the error that ended the iteration. `iteration`: the trainer's
    iterator.
    """

    epoch: int
    batches: int
    loaded_state: dict[str, Any] | None = None
    segment: Segment | None = None
    finished: bool = False
    group: BatchGroup | None = None
    failure: str = ""
    iteration: weakref.ref[Any] | None = None

    @property
    def is_abandoned(self) -> bool:
        """True if the trainer dropped its iterator in mid-epoch (by a `break`)."""
        return self.segment is not None and self.iteration is not None and self.iteration() is None


_VERSION: Final = 3


def to_state(epoch: int, batches: int, segment: Segment | None) -> dict[str, Any]:
    """The state after `batches` delivered batches of `epoch`, the last of them from `segment`."""
    state: dict[str, Any] = {"version": _VERSION, "epoch": epoch, "batch": batches, "segment": None}
    if segment is None:
        return state
    within = batches - segment.request.done
    records = segment.records_after(within)
    values = {
        "index": segment.request.index,
        "drawn_by_all": segment.drawn_after(within),
        "caches": {cache_id: record.to_state() for cache_id, record in records.items()},
    }
    state["segment"] = json.dumps(values, separators=(",", ":"))
    return state


def from_state(state: dict[str, Any]) -> Request:
    """The request that resumes from `state`; raises ConfigError for a value that `to_state` did
    not return.
    """
    try:
        if state["version"] != _VERSION:
            raise ConfigError(
                f"this state has version {state['version']}, and this cachestream reads {_VERSION}"
            )
        epoch, batches, segment = int(state["epoch"]), int(state["batch"]), state["segment"]
        if epoch < 0 or batches < 0:
            raise ValueError(f"epoch {epoch}, batch {batches}")
        if segment is None:
            if batches:
                raise ConfigError(
                    f"this state is of batch {batches} of epoch {epoch}, and what the epoch was drawn from is missing; "
                    "pass all that state_dict() gave"
                )
            return Request(0, epoch)
        segment = json.loads(segment)
        records = {
            str(cache_id): SegmentRecord.from_state(record) for cache_id, record in segment["caches"].items()
        }
        return Request(0, epoch, int(segment["index"]), batches, int(segment["drawn_by_all"]), None, records)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is no state of an EpochLoader ({error!r}); pass what state_dict() gave"
        ) from error


def _request_again(cursor: Cursor) -> Request:
    """The request that the epoch of `cursor` began with."""
    return Request(0, cursor.epoch) if cursor.loaded_state is None else from_state(cursor.loaded_state)


_REPORT_S: Final = 0.005


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
        self._job: ProcessGroup | None = None
        # Reentrant: an interrupt between `acquire` and `try` leaves the lock with the thread that goes on.
        self._lock = threading.RLock()
        self._cursor: Cursor | None = None
        self._planned = Request(0, 0)
        self._wanted_epoch: int | None = None
        self._loaded_state: dict[str, Any] = {}
        # The state when the loader was closed in mid-epoch.
        self._closing_state: dict[str, Any] | None = None
        self._unreported = 0  # batches taken since the last report to the schedule
        self._reported_s = 0.0
        if settings.replay is not None:
            self.jump(Request(0, settings.replay.epochs[0]))

    # --- from batch to batch

    def begin(self) -> Cursor:
        """Begin the next epoch, or the running one again if none of its batches was taken."""
        began_s = self._meter.clock()
        self._join_job()
        self._pipeline.start()
        self._cursor = cursor = self._begin_again() or self._begin_next()
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
        if cursor.failure:
            raise EpochError(
                f"this iteration of epoch {cursor.epoch} has ended with an error ({cursor.failure}); iterate the loader "
                "to go on"
            )
        if cursor is not self._cursor:
            raise EpochError(
                f"this iteration of epoch {cursor.epoch} has ended: the loader has begun another one, or was moved by "
                "set_epoch or load_state_dict"
            )
        if cursor.finished:
            if self._closing_state is not None:
                raise EpochError(
                    f"the EpochLoader was closed after {cursor.batches} batches of epoch {cursor.epoch}; to go on there, give "
                    "its state_dict() to a new one"
                )
            raise StopIteration
        wait_s, group = 0.0, cursor.group
        if not group:
            wait_s, group = self._fetch(cursor)
        if group.is_end:
            self.end_epoch()
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
        """End the iteration of `cursor` on KeyboardInterrupt, or if its epoch could not be prepared.

        The next iteration begins the epoch again if the first batches had not come yet.
        """
        if isinstance(error, Exception) and not (self._schedule.needs_request and cursor.segment is None):
            return
        cursor.failure = f"{type(error).__name__}: {error}"
        if cursor.segment is None:
            self._planned, self._cursor = _request_again(cursor), None
            self._schedule.prepare_again()
            if cursor.group is not None:  # interrupted before its segment was entered
                cursor.group.discard()

    def end_epoch(self) -> None:
        """End the running epoch, at its last batch or before."""
        cursor = self._cursor
        if cursor is None or cursor.finished:
            return
        self._count_reuse(cursor)
        cursor.finished = True
        if cursor.segment is not None:
            close_all(self._schedule.end_segment(cursor.segment))
            cursor.segment = None  # frees its maps
        if cursor.group is not None:
            cursor.group.discard()
            cursor.group = None

    def close(self) -> None:
        """End the running epoch and the pipeline; the state stays as it is now."""
        cursor = self._running
        state = self.to_state()
        if cursor is not None and state["epoch"] == cursor.epoch:
            self._closing_state = state
        # Before the queue is emptied: a thread that waits for a batch then learns of the end, not of a
        # timeout.
        self._pipeline.stop(join=False)
        self.end_epoch()

    def _report_progress(self, cursor: Cursor, group: BatchGroup, batches: int) -> None:
        """Report progress to the schedule, at most every 5 ms unless the flow runs low."""
        self._unreported += 1
        now_s = self._meter.last_s
        if now_s - self._reported_s >= _REPORT_S or group.turns_low:
            self._schedule.advance(self._unreported)
            self._check_alone(cursor, batches)
            self._unreported, self._reported_s = 0, now_s

    def _begin_next(self) -> Cursor:
        self.end_epoch()
        self._join_job()
        self._apply_wanted_epoch()
        request = self._planned
        close_all(self._schedule.begin(request if self._schedule.needs_request else None, request.epoch))
        cursor = Cursor(request.epoch, request.done, self._loaded_state if request.records else None)
        self._planned, self._cursor = Request(0, request.epoch + 1), cursor
        return cursor

    def _begin_again(self) -> Cursor | None:
        """A new cursor at the running one's place, if no batch was taken and no other epoch was set;
        otherwise None.
        """
        cursor = self._running
        if cursor is None or cursor.segment is not None or self._wanted_epoch not in {None, cursor.epoch}:
            return None
        self._wanted_epoch = None
        return Cursor(cursor.epoch, cursor.batches, cursor.loaded_state)

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
        close_all(self._schedule.enter_segment(segment))
        cursor.segment = segment
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
        close_all(self._schedule.jump(request))

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
        return self._cursor if self._cursor is not None and not self._cursor.finished else None

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
            close_all(self._schedule.begin(None, self._planned.epoch))
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
        """Join the `torch.distributed` job of this process if it is a new one, and request the planned epoch
        again.

        An epoch in progress is finished first. A job that has ended is kept: its ranks must not go on as
        single ones.
        """
        job, cursor = find_job(), self._running
        if job is None or job == self._job or (cursor is not None and cursor.segment is not None):
            return
        self._pipeline.join(job)
        self._job = job
        if cursor is None:
            self.jump(self._planned)
        else:
            close_all(self._schedule.begin(_request_again(cursor), cursor.epoch))

    def _check_alone(self, cursor: Cursor, batches: int) -> None:
        """Raise EpochError for an epoch that a single process began if the process is one of several ranks by
        now.
        """
        segment = cursor.segment
        if self._job is not None or segment is None or batches >= segment.total:
            return
        job = find_job()
        if job is not None and job.size > 1:
            raise EpochError(
                f"epoch {cursor.epoch} was begun before torch.distributed.init_process_group(), by one process alone, and "
                f"all {job.size} ranks would go on with the same samples; iterate the loader again, to share them"
            )

    # --- state

    def to_state(self) -> dict[str, Any]:
        """The state after the delivered batches; the loaded state if none was delivered since."""
        if self._closing_state is not None:
            return self._closing_state
        cursor = self._running
        if cursor is not None and cursor.segment is not None:
            if cursor.batches >= cursor.segment.total:
                return to_state(cursor.epoch + 1, 0, None)
            return to_state(cursor.epoch, cursor.batches, cursor.segment)
        begun_from = self._loaded_state if self._planned.records else None
        loaded_state = begun_from if cursor is None else cursor.loaded_state
        if loaded_state is not None and loaded_state["epoch"] == self.epoch:
            return loaded_state
        return to_state(self.epoch, 0, None)

    def resume_from(self, state: dict[str, Any], request: Request) -> None:
        """Go on from `state`, whose request is `request`."""
        self.end_epoch()
        self._cursor = None
        self._wanted_epoch = None
        self._join_job()
        self._loaded_state = state
        self.jump(request)

    def stats(self) -> LoaderStats:
        """Statistics of deliveries and waits so far."""
        epoch = self.epoch if self._cursor is None else self._cursor.epoch
        return self._meter.stats(epoch, self._pipeline.preparer.last_s)
