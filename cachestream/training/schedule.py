"""The state that a loader's threads share: prepared segments, queued batches, the next request.

The trainer begins epochs and takes batches, one thread prepares segments, one gathers them. Every transition
happens under one lock and does no I/O: segments that it retires are closed after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cachestream.errors import EpochError
from cachestream.training.rendezvous import Cancelled
from cachestream.training.segment import SegmentChain

if TYPE_CHECKING:
    from cachestream.training.batches.prefetcher import BatchGroup
    from cachestream.training.segment import Request, Segment

Result = TypeVar("Result")
_PREPARE_AT: Final = 0.75  # share of the batches gathered at which the next segment is prepared at the latest
_LEAST_AHEAD_S: Final = 1.0


class Pace:
    """The mean time that the trainer takes for a batch, in seconds, over at least the last half of the batches
    of an epoch; until it has taken `least` batches, that of the epoch before.

    So a pause, as of a first step that compiles, is forgotten before the epoch is over.
    """

    def __init__(self, least: int, clock: Callable[[], float], before_s: float | None = None) -> None:
        self._least = least
        self._clock = clock
        # The batches done, and the time, where the mean begins, and where the next one will begin.
        self._since = self._next = (0, 0.0)
        self._taken = 0
        self._estimate_s = before_s

    def for_next_epoch(self) -> Pace:
        """A pace for the next epoch, which begins with the estimate of this one."""
        return Pace(self._least, self._clock, self._estimate_s)

    @property
    def has_begun(self) -> bool:
        """True once the trainer has taken a batch of the epoch."""
        return self._taken > 0

    def record(self, batches: int, in_hand: int) -> None:
        """Record that the trainer took `batches` more, and begins to work on the last `in_hand`."""
        now_s = self._clock()
        if not self._taken:
            self._since = self._next = 0, now_s
        self._taken += batches
        done = self._taken - in_hand
        if done > 0 and self._taken >= self._least:
            began, began_s = self._since
            self._estimate_s = (now_s - began_s) / (done - began)
            if done >= max(self._least, 2 * self._next[0]):
                self._since, self._next = self._next, (done, now_s)

    def should_prepare(self, batches: int, gathered: int, waiting: int, ahead_s: float) -> bool:
        """Return whether to prepare the next segment: of `batches`, `gathered` are, `waiting` of them queued.

        True when most are gathered, or the batches left to the trainer last no longer than `ahead_s`.
        """
        if gathered >= _PREPARE_AT * batches:
            return True
        if self._estimate_s is None:
            return False
        return (batches - gathered + waiting) * self._estimate_s <= max(_LEAST_AHEAD_S, ahead_s)


CLOSED: Final = "this EpochLoader is closed; make a new one"
_WATCH_S: Final = 0.5
_MOST_AHEAD: Final = 8  # segments prepared because other ranks ask, before this rank's trainer gets there


class Schedule:
    """The progress of a loader's threads. Thread-safe.

    Invariants: no stale batch is delivered; no batch is added while `prefetch` or more wait (a prefetcher
    limits its own). `_groups` wait in the trainer's order; `_in_hand` is the group taken last, if its batches
    are still being gathered.

    `needs_request`: the next epoch must be requested again, because its preparation failed, or an interrupt
    may have lost its first batches. `gathering`: the segment that the gathering thread works on.

    Each thread has a condition of its own, so that a batch wakes up one thread: the trainer waits for
    `_batches` (a batch or a length), the gathering thread for `_room` (room or a segment), the preparing
    thread for `_work`.
    """

    def __init__(self, prefetch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._batches = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self.needs_request = False
        self._stopped = False
        self._chain = SegmentChain()
        self.gathering: Segment | None = None
        self._gathered = 0
        self._prefetch = prefetch
        self._groups: deque[BatchGroup] = deque()
        self._in_hand: BatchGroup | None = None
        self._errand: tuple[Callable[[], Any], Future[Any]] | None = None
        self._ahead_s = 0.0
        self._pace = Pace(prefetch, clock)
        self.activity = {"prepare": "not started", "gather": "not started"}

    # --- the trainer

    def begin(self, epoch: int, request: Request | None = None) -> None:
        """Move the trainer on to `epoch`; with `request`, everything is prepared anew, beginning with it."""
        with self._lock:
            self._chain.begin(epoch, request)
            self.needs_request = self.needs_request and request is None
            self._drop_groups(self._chain.is_stale)
            self._pace = self._pace.for_next_epoch()
            self._batches.notify_all()
            self._room.notify_all()
            if request is not None or self.gathering is None:
                self._work.notify_all()  # otherwise not before the first batch: it would take the GIL
        self._chain.close_retired()

    def take(self, epoch: int, timeout_s: float) -> BatchGroup:
        """Take the next batches of `epoch`. Raises the error of a thread, or EpochError with a diagnosis."""
        self._run_errand()
        with self._lock:
            self._wait(lambda: self._holds(epoch), epoch, timeout_s)
            group = self._groups.popleft()
            self._in_hand = group if group.is_prefetched else None
            taken = 0 if group.is_prefetched else len(group)  # prefetched ones are reported by `advance`
            is_first = not self._pace.has_begun
            self._pace.record(taken, taken)
            if self._has_room_again():
                self._room.notify()
            if not is_first or self.gathering is None:
                self._wake_if_due()
            return group

    def peek(self, epoch: int, timeout_s: float) -> BatchGroup:
        """The next batches of `epoch`, which stay in the queue; raises as `take` does."""
        with self._lock:
            self._wait(lambda: self._holds(epoch), epoch, timeout_s)
            return self._groups[0]

    def advance(self, batches: int) -> None:
        """Record that the trainer has taken `batches` batches of the group in hand since the last call."""
        self._run_errand()
        with self._lock:
            self._pace.record(batches, 1)
            if self._in_hand is not None and self._in_hand.turns_low:
                self._room.notify()
            self._wake_if_due()

    def late_error(self, epoch: int, timeout_s: float) -> EpochError:
        """The error for a trainer that got no batch of `epoch` within `timeout_s`."""
        with self._lock:
            return EpochError(
                CLOSED
                if self._stopped
                else f"no batch of epoch {epoch} within {timeout_s:g} s (timeout_s): preparation: "
                f"{self.activity['prepare']}; gathering: {self.activity['gather']}; {self._num_waiting()} batches are "
                "waiting. Is the disk hanging, or the batch_transform?"
            )

    def segment(self, epoch: int, timeout_s: float) -> Segment:
        """The oldest open segment of `epoch`; waits until it is prepared. Raises as `take` does, and
        EpochError for an epoch that was left.
        """
        with self._lock:
            chain = self._chain
            self._wait(lambda: bool(chain.current(epoch)) or chain.next.epoch > epoch, epoch, timeout_s)
            if (segment := chain.current(epoch)) is None:
                raise EpochError(f"epoch {epoch} has been left; iterate the loader to begin the next one")
            return segment

    @property
    def generation(self) -> int:
        """The number of jumps so far."""
        return self._chain.generation

    def enter_segment(self, segment: Segment) -> None:
        """Move the trainer into `segment`; those before it are closed."""
        with self._lock:
            self._chain.retire_before(segment)
        self._chain.close_retired()

    def end_segment(self, segment: Segment) -> None:
        """Close `segment`, whose batches the trainer has taken or left."""
        with self._lock:
            self._in_hand = None
            self._chain.retire(lambda other: other is segment)
        self._chain.close_retired()

    def stop(self) -> None:
        """Stop all threads, and close all segments."""
        with self._lock:
            self._stopped = True
            self._chain.failure = None  # the frames of its traceback refer to the pipeline
            self._chain.prepared.clear()
            self._chain.retire(lambda _: True)
            self._drop_groups(lambda _: True)
            self._wake_all()
        self._chain.close_retired()

    # --- the thread that prepares

    def wait_request(self, ahead_s: float, timeout_s: float) -> tuple[Request, bool] | None:
        """The next request, and whether it is due; None once stopped. Waits `timeout_s` for it to be due.

        A request is due when the gathering thread waits for it, or the rest of the running segment lasts no
        longer than `ahead_s`. A later preparation has a fresher snapshot.
        """
        with self._lock:
            self._ahead_s = ahead_s
            if not self._stopped and not self._is_due():
                self._work.wait(timeout_s)
            return None if self._stopped else (self._chain.next, self._is_due())

    def may_prepare_early(self, request: Request) -> bool:
        """Return whether `request` may be prepared early, because another rank asks for it."""
        with self._lock:
            chain = self._chain
            return chain.next is request and chain.failure is None and len(chain.prepared) < _MOST_AHEAD

    def superseded(self, request: Request) -> bool:
        """Return whether another request has replaced `request` as the next one."""
        return self._stopped or self._chain.next is not request

    def urgent(self) -> bool:
        """Return whether no batch is queued or being gathered."""
        return self.gathering is None and not self._groups and not self._in_hand

    def in_trainer(self, request: Request, work: Callable[[], Result]) -> Result:
        """Have the trainer's thread do `work`, at its next call. Raises what `work` raises, and Cancelled once
        `request` is superseded.
        """
        done: Future[Result] = Future()
        with self._lock:
            self._errand = work, done
            self._batches.notify_all()
            while not done.done() and not self.superseded(request):
                self._work.wait(_WATCH_S)
            self._errand = None
        if not done.done():
            raise Cancelled
        return done.result()

    def add(self, segment: Segment) -> bool:
        """Add the prepared `segment`; return False if its request was replaced."""
        with self._lock:
            if self.superseded(segment.request):
                return False
            self._chain.add(segment)
            self._wake_all()
            return True

    def fail(self, request: Request, error: BaseException) -> None:
        """Record that a thread failed on `request`: `take` raises `error` when the trainer reaches it."""
        with self._lock:
            if self.wanted(request) and self._chain.failure is None:
                self._chain.failure = request, error
                self._wake_all()

    # --- the thread that gathers

    def next_segment(self) -> Segment | None:
        """Wait for the next prepared segment; None once stopped."""
        with self._lock:
            self.gathering, self._gathered = None, 0
            self._wake_if_due()
            while not self._chain.prepared:
                if self._stopped:
                    return None
                self._room.wait()
            self.gathering = self._chain.prepared.popleft()
            self._work.notify()
            return self.gathering

    def put(self, group: BatchGroup) -> bool:
        """Queue `group` when there is room; False if it is stale."""
        request = group.segment.request
        with self._lock:
            if len(group) and self._num_waiting() >= self._prefetch:
                while self.wanted(request) and not self._has_room_again():
                    self._room.wait()
            if not self.wanted(request):
                return False
            self._groups.append(group)
            self._gathered += len(group)
            self._batches.notify()
            self._wake_if_due()
            return True

    def wait_low(self, group: BatchGroup) -> bool:
        """Wait until the trainer has taken most batches of `group`; False if it is stale."""
        request = group.segment.request
        with self._lock:
            while self.wanted(request) and not group.is_low:
                self._room.wait()
            return self.wanted(request)

    def wanted(self, request: Request) -> bool:
        """Return whether the trainer is not past `request`, and the loader not closed."""
        with self._lock:
            return not (self._stopped or self._chain.is_stale(request))

    def _run_errand(self) -> None:
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

    def _has_errand(self) -> bool:
        errand = self._errand
        return errand is not None and not errand[1].done()

    # --- under the lock

    def _num_waiting(self) -> int:
        """The number of batches that wait."""
        return sum(map(len, self._groups))

    def _has_room_again(self) -> bool:
        """Return whether a gathering thread that paused should go on.

        It does only when half of the queue is empty: each of its wake-ups takes the GIL from the trainer.
        """
        return self._num_waiting() < self._prefetch // 2 + 1

    def _holds(self, epoch: int) -> bool:
        """Return whether the next group is of `epoch`."""
        return bool(self._groups) and self._groups[0].segment.request.epoch == epoch

    def _drop_groups(self, unwanted: Callable[[Request], bool]) -> None:
        """Discard the groups of `unwanted` requests, and forget the group in hand."""
        self._in_hand = None
        groups, self._groups = self._groups, deque()
        for group in groups:
            if unwanted(group.segment.request):
                group.discard()
            else:
                self._groups.append(group)

    def _wake_if_due(self) -> None:
        if self._is_due():
            self._work.notify()

    def _wake_all(self) -> None:
        for condition in (self._batches, self._room, self._work):
            condition.notify_all()

    def _is_due(self) -> bool:
        chain = self._chain
        if chain.prepared or chain.failure is not None or chain.next.epoch > chain.trained_epoch + 1:
            return False
        if self.gathering is None:
            return True
        groups = [*self._groups] if self._in_hand is None else [self._in_hand, *self._groups]
        waiting = sum(map(len, groups))
        ungathered = sum(group.num_ungathered for group in groups if group.segment is self.gathering)
        batches, gathered = self.gathering.plan.num_batches, self._gathered - ungathered
        return self._pace.should_prepare(batches, gathered, waiting - ungathered, self._ahead_s)

    def _wait(self, ready: Callable[[], bool], epoch: int, timeout_s: float) -> None:
        """Wait until `ready`, in `epoch`; raise if a thread failed, the trainer moved, or time is up."""
        chain, left_s, generation = self._chain, timeout_s, self._chain.generation
        while not ready():
            if chain.failure is not None and chain.failure[0].epoch <= epoch:
                self.needs_request = True
                if isinstance(chain.failure[1], StopIteration):  # as it is, it would end the epoch normally
                    raise EpochError(
                        "the batch_transform or the sampler raised StopIteration; see its traceback"
                    ) from chain.failure[1]
                raise chain.failure[1]
            if generation != chain.generation or epoch < chain.trained_epoch:
                raise EpochError(f"epoch {epoch} was left: another thread iterates or moves the loader")
            if self._stopped or left_s <= 0:
                raise self.late_error(epoch, timeout_s)
            if self._has_errand():
                self._lock.release()
                try:
                    self._run_errand()
                finally:
                    self._lock.acquire()
                continue
            begun_s = self._clock()
            self._batches.wait(min(left_s, _WATCH_S))
            # Time in which the whole process was stopped (SIGSTOP) does not count.
            left_s -= min(self._clock() - begun_s, _WATCH_S)
