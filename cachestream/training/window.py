"""The window: the batches that are gathered ahead of the trainer, as futures that it waits for one by one.

The trainer takes the window's first task, waits for it, and tops the window up: nothing pushes batches to it.
The window runs on into the next segment once that is prepared, so that an epoch's first batch is ready before
the last batch of the previous epoch is consumed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from cachestream import tracing
from cachestream.errors import EpochError
from cachestream.training.position import Position
from cachestream.training.rendezvous import Cancelled
from cachestream.training.tasks import Batch, Gathering, SegmentReader, Task
from cachestream.training.threads import WATCH_S, Flag, watched

if TYPE_CHECKING:
    from cachestream.training.position import Segment
    from cachestream.training.rendezvous import ProcessGroup

Result = TypeVar("Result")
CLOSED: Final = "this EpochLoader is closed; make a new one"
# The share of the batches submitted at which the next segment is prepared at the latest.
_PREPARE_AT: Final = 0.75
_LEAST_AHEAD_S: Final = 1.0
_MOST_AHEAD: Final = 8  # segments prepared because other ranks ask, before this rank's trainer gets there


class LateError(EpochError):
    """A batch did not come within `timeout_s`: it can be asked for again."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The position that a segment is to be prepared from, with the ranks of `job`, until `cancelled` is set.

    `generation`: the number of jumps (set_epoch, load_state_dict) since this rank joined the job. It is the
    same on all ranks, and renames the rounds in which they agree, so that a failed one can be repeated.
    """

    position: Position
    job: ProcessGroup | None = None
    generation: int = 0
    cancelled: Flag = field(default_factory=Flag)

    @property
    def round(self) -> str:
        """The name of the round in which ranks agree on the segment."""
        return f"{self.generation}.{self.position.epoch}.{self.position.index}"

    def then(self, position: Position) -> Wanted:
        """The request that follows it, at `position`, without a jump."""
        return Wanted(position, self.job, self.generation)


class Window:
    """The segments that are prepared, and the tasks of their batches. Thread-safe.

    The trainer's thread takes batches and moves to other epochs; one thread prepares segments and adds them.
    Invariants: `_tasks` are submitted and not taken, in the trainer's order, and follow `_hand`, the task
    taken last; so the last of them tells which batch is submitted next, and an interrupt between two steps
    submits it once more, or not at all. `_readers` hold a lease on their shards, `_retired` are to be closed.
    `wanted` is what follows all prepared segments. Every transition happens under one lock and does no I/O.

    `needs_jump`: a preparation failed; ranks that try again do so under a new generation.
    """

    def __init__(self, gathering: Gathering) -> None:
        self.wanted = Wanted(Position(0))
        self.needs_jump = False
        self.is_closed = False
        self._gathering = gathering
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # for the trainer
        self._work = threading.Condition(self._lock)  # for the preparing thread
        self._epoch = -1  # the trainer's
        self._readers: list[SegmentReader] = []
        self._tasks: deque[Task] = deque()
        self._hand: Task | None = None
        self._retired: deque[Segment] = deque()
        self._failure: tuple[Position, BaseException] | None = None
        self._errand: tuple[Callable[[], Any], Future[Any]] | None = None

    # --- the trainer

    def take(self, epoch: int, timeout_s: float) -> Task | None:
        """Take the next task of `epoch`, when it is gathered; None at the end of the epoch.

        Raises the errors of the batches, those of the preparation, and EpochError with a diagnosis.
        """
        with self._lock:
            hand = self._hand
            if hand is not None and hand.error is not None:
                _raise(hand.error)
            if hand is not None and hand.stop == hand.reader.total and hand.reader.ends_epoch:
                return None
            if self._errand is not None or not self._tasks or self._tasks[0].reader.epoch != epoch:
                self._wait(
                    lambda: bool(self._tasks) and self._tasks[0].reader.epoch == epoch, epoch, timeout_s
                )
            task = self._tasks[0]
        if not self._gathering.wait(task, timeout_s):
            raise self._late_error(task, epoch, timeout_s)
        with self._lock:
            if not self._tasks or self._tasks[0] is not task:
                raise self._late_error(task, epoch, timeout_s)
            self._hand = task
            self._tasks.popleft()
            if self._gathering.transfer.moves:
                if task.arrays is not None:
                    self._gathering.send(deque((task,)))
                self._gathering.send(self._tasks)
            self._top_up()
            # Not at the first batch of an epoch: the preparing thread would take the GIL in the gap.
            if (task.first or task.stop == task.reader.total) and self._is_due():
                self._work.notify()
        return task

    def peek(self, epoch: int, timeout_s: float) -> Batch | None:
        """The next batch of `epoch`, which stays in the window; None if there is none. Raises as `take`."""
        for place in range(2**31):
            with self._lock:
                self._wait(
                    lambda: len(self._tasks) > place or self.wanted.position.epoch > epoch,  # noqa: B023
                    epoch,
                    timeout_s,
                )
                if len(self._tasks) <= place or self._tasks[place].reader.epoch != epoch:
                    return None
                task = self._tasks[place]
            if not self._gathering.wait(task, timeout_s):
                raise self._late_error(task, epoch, timeout_s)
            with self._lock:
                if task.arrays is not None:
                    self._gathering.send(deque((task,)))
                if task.batches:
                    return task.batches[0]
                if task.error is not None:
                    self.rewind(epoch)  # the next call tries again
                    _raise(task.error)
        return None

    def segment(self, epoch: int, timeout_s: float) -> Segment:
        """The oldest open segment of `epoch`; waits until it is prepared. Raises as `take` does, and
        EpochError for an epoch that was left.
        """
        with self._lock:
            self._wait(
                lambda: self._first(epoch) is not None or self.wanted.position.epoch > epoch, epoch, timeout_s
            )
            if (reader := self._first(epoch)) is None:
                raise EpochError(f"epoch {epoch} has been left; iterate the loader to begin the next one")
            return reader.segment

    def begin(self, epoch: int) -> None:
        """Move on to `epoch`: drop what is of earlier ones."""
        with self._lock:
            self._epoch = epoch
            self._drop(lambda reader: reader.epoch < epoch)
            if self._failure is not None and self._failure[0].epoch < epoch:
                self._failure = None
            if self.wanted.position.epoch < epoch:
                position = self.wanted.position
                end_step = position.first_step + (position.total or 0)
                self._want(self.wanted.then(Position(epoch, first_step=end_step)))
            self._top_up()
            self._changed.notify_all()
            if not self._readers:
                self._work.notify()  # otherwise not before the first batch: it would take the GIL
        self._close_retired()

    def jump(self, position: Position, job: ProcessGroup | None = None) -> None:
        """Drop everything, and have `position` prepared, with the ranks of a new `job` if there is one: a new
        generation begins with it.
        """
        with self._lock:
            self._epoch = position.epoch - 1
            self._drop(lambda _: True)
            self._failure, self.needs_jump = None, False
            before = self.wanted
            generation = 0 if job is not None else before.generation + 1
            self._want(Wanted(position, job or before.job, generation))
            self._changed.notify_all()
            self._work.notify()
        self._close_retired()

    def rewind(self, epoch: int) -> None:
        """Submit the batches of `epoch` again from its first on: of none of them the trainer knows."""
        with self._lock:
            self._drop_tasks(lambda task: task.reader.epoch >= epoch)
            self._top_up()

    def enter(self, segment: Segment) -> None:
        """Move the trainer into `segment`; those before it are closed, also one that had no batch."""
        with self._lock:
            places = [place for place, reader in enumerate(self._readers) if reader.segment is segment]
            before = self._readers[: places[0]] if places else []
            self._drop(lambda reader: reader in before)
        self._close_retired()

    def end(self, segment: Segment) -> None:
        """Close `segment`, whose batches the trainer has taken or left."""
        with self._lock:
            self._drop(lambda reader: reader.segment is segment)
        self._close_retired()

    def stop(self) -> None:
        """Close all segments; whoever waits here raises an error, and whoever asks for work gets none."""
        with self._lock:
            self.is_closed = True
            self._failure = None  # the frames of its traceback refer to the window
            self.wanted.cancelled.set()
            self._drop(lambda _: True)
            self._gathering.stop()
            self._changed.notify_all()
            self._work.notify()
        self._close_retired()

    def run_errand(self) -> None:
        """Do what the preparing thread asks the trainer's for. After an interrupt the next call does it."""
        errand = self._errand
        if errand is None or errand[1].done():
            return
        work, done = errand
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by `in_trainer`
            done.set_exception(error)
        finally:
            del work, done, errand  # which the error's traceback would keep, and with them the segment
        with self._lock:
            self._work.notify()

    # --- the thread that prepares

    def wait_due(self, ahead_s: float, step_s: float | None, timeout_s: float) -> tuple[Wanted, bool] | None:
        """Return the segment that is wanted, and True if it is due; None once closed. Waits up to `timeout_s`
        for that.

        A segment is due when most batches before it are submitted, or last no longer than `ahead_s` at
        `step_s` each (None: not known). A later preparation has a fresher snapshot.
        """
        with self._lock:
            if not self.is_closed and not self._is_due(ahead_s, step_s):
                self._work.wait(timeout_s)
            self._gathering.is_traced = tracing.is_on()
            return None if self.is_closed else (self.wanted, self._is_due(ahead_s, step_s))

    def may_prepare_early(self) -> bool:
        """Return whether a segment may be prepared before it is due, because another rank asks for it."""
        with self._lock:
            last = self._tasks[-1] if self._tasks else self._hand
            place = (
                0 if last is None or last.reader not in self._readers else self._readers.index(last.reader)
            )
            return self._failure is None and len(self._readers) - place <= _MOST_AHEAD

    def is_urgent(self) -> bool:
        """Return whether the trainer has nothing to take."""
        return not self._readers

    def unopened(self) -> SegmentReader | None:
        """The segment that is gathered, if some of its shards are not mapped yet."""
        with self._lock:
            return next((reader for reader in self._readers if not reader.segment.maps.all_mapped), None)

    def in_trainer(self, wanted: Wanted, work: Callable[[], Result]) -> Result:
        """Have the trainer's thread do `work`, at its next call. Raises what `work` raises, and Cancelled
        once `wanted` is.
        """
        done: Future[Result] = Future()
        with self._lock:
            self._errand = work, done
            self._changed.notify_all()
            while not done.done() and not wanted.cancelled.is_set:
                self._work.wait(WATCH_S)
            self._errand = None
        if not done.done():
            raise Cancelled
        return done.result()

    def add(self, wanted: Wanted, segment: Segment) -> bool:
        """Add the prepared `segment`, and run on into it; return False if it is not `wanted` any more."""
        reader = SegmentReader(segment, self._gathering)
        with self._lock:
            if wanted.cancelled.is_set:
                return False
            self._readers.append(reader)
            self.wanted = wanted.then(segment.next_position())
            self._top_up()
            self._changed.notify_all()
            return True

    def fail(self, wanted: Wanted, error: BaseException) -> None:
        """Record that a preparation failed: `take` raises `error` when the trainer reaches it."""
        with self._lock:
            if not wanted.cancelled.is_set and self._failure is None:
                self._failure = wanted.position, error
                self._changed.notify_all()

    # --- under the lock

    def _top_up(self) -> None:
        """Submit the batches that follow, as many as may be ahead."""
        tasks = self._tasks
        self._gathering.release()
        while not self.is_closed:
            last = tasks[-1] if tasks else self._hand
            if last is not None and last.stop < last.reader.total:
                reader, first = last.reader, last.stop
            else:
                place = 0 if last is None else self._readers.index(last.reader) + 1
                if place == len(self._readers):
                    return
                reader, first = self._readers[place], 0
            # Each segment leases shards: short ones do not pile up for batches that are gathered together.
            most = reader.most_ahead if reader in self._readers[:2] else self._gathering.prefetch
            if sum([task.stop - task.first for task in tasks]) >= most:
                return
            # The trainer that waits for a batch does not wait for those that are gathered together with it.
            tasks.append(reader.submit(first, reader.together if last is not None else 1))

    def _drop(self, unwanted: Callable[[SegmentReader], bool]) -> None:
        """Drop the segments of `unwanted` readers, and their tasks."""
        dropped = [reader for reader in self._readers if unwanted(reader)]
        self._drop_tasks(lambda task: unwanted(task.reader))
        for reader in dropped:
            reader.is_open = False
            self._retired.append(reader.segment)
        self._readers = [reader for reader in self._readers if reader not in dropped]

    def _drop_tasks(self, unwanted: Callable[[Task], bool]) -> None:
        for task in self._tasks:
            if unwanted(task):
                task.is_wanted = False
        self._tasks = deque(task for task in self._tasks if task.is_wanted)
        if self._hand is not None and unwanted(self._hand):
            self._hand = None

    def _want(self, wanted: Wanted) -> None:
        self.wanted.cancelled.set()
        self.wanted = wanted

    def _first(self, epoch: int) -> SegmentReader | None:
        return next((reader for reader in self._readers if reader.epoch == epoch), None)

    def _is_due(self, ahead_s: float = 0.0, step_s: float | None = None) -> bool:
        if self._failure is not None or self.wanted.position.epoch > self._epoch + 1:
            return False
        if not self._readers:
            return True
        last = self._tasks[-1] if self._tasks else self._hand
        newest = self._readers[-1]
        if last is None or last.reader is not newest:
            return False
        if last.stop >= _PREPARE_AT * newest.total:
            return True
        left = (
            newest.total
            - last.stop
            + sum(len(task.batches) or task.stop - task.first for task in self._tasks)
        )
        return step_s is not None and left * step_s <= max(_LEAST_AHEAD_S, ahead_s)

    def _wait(self, ready: Callable[[], bool], epoch: int, timeout_s: float) -> None:
        """Wait until `ready`, in `epoch`; raise if a preparation failed, the trainer moved, or time is up."""
        left_s, asked = timeout_s, self.wanted
        while True:
            if self._errand is not None and not self._errand[1].done():
                self._lock.release()
                try:
                    self.run_errand()
                finally:
                    self._lock.acquire()
            if ready():
                return
            if self._failure is not None and self._failure[0].epoch <= epoch:
                self.needs_jump = True
                _raise(self._failure[1])
            jumped = (asked.job, asked.generation) != (self.wanted.job, self.wanted.generation)
            if jumped or epoch < self._epoch:
                raise EpochError(f"epoch {epoch} was left: another thread iterates or moves the loader")
            if self.is_closed or left_s <= 0:
                raise self._late_error(None, epoch, timeout_s)
            left_s -= watched(self._changed.wait, left_s)

    def _late_error(self, task: Task | None, epoch: int, timeout_s: float) -> EpochError:
        """The error for a trainer that did not get `task`, or for None a segment, of `epoch`."""
        if self.is_closed:
            return EpochError(CLOSED)
        if task is not None and not task.is_wanted:
            return EpochError(f"epoch {epoch} was left: another thread iterates or moves the loader")
        what = "the next epoch is not prepared"
        if task is not None:
            what = f"gathering epoch {epoch}, batch {task.first + 1}"
        waiting = sum(len(task.batches) for task in self._tasks if task.done is not None and task.done.is_set)
        return LateError(
            f"no batch of epoch {epoch} within {timeout_s:g} s (timeout_s): {what}; {waiting} batches after "
            "it are. Is the disk hanging, or the batch_transform?"
        )

    def _close_retired(self) -> None:
        """Release the leases of the retired segments. The next call completes one that was interrupted."""
        for segment in tuple(self._retired):
            segment.close()
            with suppress(ValueError):  # another thread has closed it, too
                self._retired.remove(segment)


def _raise(error: BaseException) -> NoReturn:
    """Raise `error`, of the user's code or of ours."""
    try:
        if isinstance(error, StopIteration):  # as it is, it would end the epoch normally
            raise EpochError(
                "the batch_transform or the sampler raised StopIteration; see its traceback"
            ) from error
        raise error
    finally:
        del error  # the traceback would keep it, and with it itself
