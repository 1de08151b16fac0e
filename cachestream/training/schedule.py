"""The state shared by the training, preparing and gathering threads: prepared segments, queued batches, the
next request.

The trainer begins epochs and takes batches, one thread prepares segments, one gathers them. Every transition
happens under one lock and does no I/O: segments that it retires are closed after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachestream.errors import EpochError
from cachestream.training.batches.batch_queue import BatchGroup, BatchQueue
from cachestream.training.segment import SegmentChain

if TYPE_CHECKING:
    from cachestream.training.segment import Request, Segment

_PREPARE_AT: Final = 0.75  # share of the batches gathered at which the next segment is prepared at the latest
_LEAST_AHEAD_S: Final = 1.0
_SMOOTHING: Final = 0.2
# The median of so many steps: a single long step is a validation or a checkpoint.
_RECENT: Final = 3
# More than twice the GIL's switch interval, so that a gathering thread that is woken late is still in time.
_SLOW_S: Final = 0.012


class Pace:
    """The smoothed time that the trainer takes for a batch, in seconds; `expected_s` until it has taken
    `least` batches.
    """

    def __init__(self, least: int, clock: Callable[[], float], expected_s: float | None = None) -> None:
        self._least = least
        self._clock = clock
        self._expected_s = expected_s
        self._batch_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._batches_seen = 0
        self._last_s = 0.0
        self._last_batches = 0

    def for_next_epoch(self) -> Pace:
        """A pace for the next epoch, which begins with the estimate of this one."""
        return Pace(self._least, self._clock, self._estimate_s)

    @property
    def _estimate_s(self) -> float | None:
        return self._batch_s if self._batches_seen >= self._least else self._expected_s

    def record(self, batches: int) -> None:
        """Record that the trainer takes `batches` batches now, and has worked on the previous
        ones until now.
        """
        now = self._clock()
        if self._batches_seen:
            took_s = (now - self._last_s) / max(1, self._last_batches)
            self._recent_s.append(took_s)
            typical_s = sorted(self._recent_s)[len(self._recent_s) // 2]
            before_s = typical_s if self._batch_s is None else self._batch_s
            self._batch_s = before_s + _SMOOTHING * (typical_s - before_s)
        self._last_s, self._last_batches = now, batches
        self._batches_seen += batches

    def advance(self, batches: int) -> None:
        """Record that the trainer has taken `batches` batches, one at a time, since the last record."""
        self._last_batches = batches
        self.record(batches)

    @property
    def is_slow(self) -> bool:
        """True if the trainer works on a batch for so long that the gathering thread can wake up
        by itself.
        """
        return self._batch_s is not None and self._batches_seen >= self._least and self._batch_s >= _SLOW_S

    def time_until_taken(self, batches: int) -> float:
        """Seconds until the trainer has taken `batches` more batches and is half through the work on the last
        of them.
        """
        assert self._batch_s is not None
        left_s = self._last_s + (batches + 0.5) * self._batch_s - self._clock()
        return max(self._batch_s, left_s)

    def should_prepare(self, batches: int, gathered: int, waiting: int, ahead_s: float) -> bool:
        """Return whether to prepare the segment after one of `batches` batches, `gathered` so far, `waiting`
        of them queued.

        True when most are gathered, or the batches left to the trainer last no longer than `ahead_s`.
        """
        if gathered >= _PREPARE_AT * batches:
            return True
        if self._estimate_s is None:
            return False
        return (batches - gathered + waiting) * self._estimate_s <= max(_LEAST_AHEAD_S, ahead_s)


_CLOSED: Final = "this EpochLoader is closed; make a new one"
_POLL_BATCHES: Final = 2  # batches that a slow trainer takes between two requests for more
_WATCH_S: Final = 0.5
_MOST_AHEAD: Final = 8  # segments prepared because other ranks ask, before this rank's trainer gets there


class Schedule:
    """The progress of a loader's threads. Thread-safe.

    Invariants: no stale batch is delivered; no batch is added while `prefetch` or more wait (a flow limits
    its own).

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
        self._stopped = False
        self._chain = SegmentChain()
        self._gathering: Segment | None = None
        self._gathered = 0
        self._queue = BatchQueue(prefetch)
        self._polls_slow_trainer = False
        self._last_remaining = 0
        self._ahead_s = 0.0
        self._pace = Pace(prefetch, clock)
        self.activity = {"prepare": "not started", "gather": "not started"}

    # --- the trainer

    def begin(self, epoch: int, request: Request | None = None) -> None:
        """Move the trainer on to `epoch`; with `request`, everything is prepared anew, beginning with it."""
        with self._lock:
            self._chain.begin(epoch, request)
            self._queue.clear_in_hand()
            self._queue.drop(self._chain.is_stale)
            self._pace = self._pace.for_next_epoch()
            self._wake_all()
        self._chain.close_retired()

    def take(self, epoch: int, timeout_s: float) -> BatchGroup:
        """Take the next batches of `epoch`. Raises the error of a background thread, or EpochError with a
        diagnosis.
        """
        with self._lock:
            if not self._queue.holds(epoch):
                self._wait(lambda: self._queue.holds(epoch), epoch, timeout_s)
            group = self._queue.take()
            self._pace.record(1 if group.is_flow else len(group))
            # A gathering thread that is woken here takes the GIL when the trainer frees its last batch (torch
            # releases the GIL there). Beside a slow trainer the thread wakes up by itself, while the trainer
            # computes.
            if self._queue.has_room_again and (self._queue.is_low or not self._pace.is_slow):
                self._room.notify()
            self._wake_if_due()
            return group

    def peek(self, epoch: int, timeout_s: float) -> BatchGroup:
        """The next batches of `epoch`, which stay in the queue; raises as `take` does."""
        with self._lock:
            self._wait(lambda: self._queue.holds(epoch), epoch, timeout_s)
            return self._queue.first

    def advance(self, batches: int) -> None:
        """Record that the trainer has taken `batches` batches of the current flow since the last call."""
        with self._lock:
            self._pace.advance(batches)
            flow = self._queue.in_hand
            if flow is not None and (flow.turns_low or (self._pace.is_slow and not self._polls_slow_trainer)):
                self._room.notify()
            self._wake_if_due()

    def late_error(self, epoch: int, timeout_s: float) -> EpochError:
        """The error for a trainer that got no batch of `epoch` within `timeout_s`."""
        with self._lock:
            return EpochError(_CLOSED if self._stopped else self._diagnosis(epoch, timeout_s))

    def length(self, epoch: int, timeout_s: float) -> int:
        """The number of batches in `epoch`; waits until it is prepared, and raises as `take` does."""
        with self._lock:
            self._wait(lambda: epoch in self._chain.totals, epoch, timeout_s)
            return self._chain.totals[epoch]

    @property
    def generation(self) -> int:
        """The number of jumps so far."""
        return self._chain.generation

    @property
    def needs_request(self) -> bool:
        """True if the next epoch must be requested again: its preparation failed or was interrupted."""
        return self._chain.needs_request

    def prepare_again(self) -> None:
        """Have the next epoch requested again: an interrupt may have lost its first batches."""
        self._chain.needs_request = True

    def enter_segment(self, segment: Segment) -> None:
        """Move the trainer into `segment`; those before it are closed."""
        with self._lock:
            opened = self._chain.open
            before = opened[: opened.index(segment)] if segment in opened else []
            self._chain.retire(lambda other: other in before)
        self._chain.close_retired()

    def end_segment(self, segment: Segment) -> None:
        """Close `segment`, whose batches the trainer has taken or left."""
        with self._lock:
            self._queue.clear_in_hand()
            self._chain.retire(lambda other: other is segment)
        self._chain.close_retired()

    def current(self, epoch: int) -> Segment | None:
        """The oldest segment of `epoch` that is still open."""
        with self._lock:
            return next((s for s in self._chain.open if s.request.epoch == epoch), None)

    def stop(self) -> None:
        """Stop all threads, and close all segments."""
        with self._lock:
            self._stopped = True
            self._chain.failure = None  # the frames of its traceback refer to the pipeline
            self._chain.prepared.clear()
            self._chain.retire(lambda _: True)
            self._queue.clear_in_hand()
            self._queue.drop(lambda _: True)
            self._wake_all()
        self._chain.close_retired()

    # --- the thread that prepares

    def wait_request(self, ahead_s: float, timeout_s: float | None) -> tuple[Request, bool] | None:
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
        return self._gathering is None and self._queue.is_empty

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

    def to_open(self) -> Segment | None:
        """The segment being gathered, if some of its shards are still to be opened; otherwise None."""
        segment = self._gathering
        return None if segment is None or segment.opened_ahead or segment.maps.all_mapped else segment

    # --- the thread that gathers

    def next_segment(self) -> Segment | None:
        """Wait for the next prepared segment; None once stopped."""
        with self._lock:
            self._gathering, self._gathered = None, 0
            self._wake_if_due()
            while not self._chain.prepared:
                if self._stopped:
                    return None
                self._room.wait()
            self._gathering = self._chain.prepared.popleft()
            self._work.notify()
            return self._gathering

    def put(self, group: BatchGroup) -> bool:
        """Queue `group` when there is room; False if it is stale."""
        request = group.segment.request
        with self._lock:
            if len(group) and self._queue.is_full:
                while not (self._queue.has_room_again or not self.wanted(request)):
                    pace, until = self._pace, self._queue.until_room
                    self._room.wait(pace.time_until_taken(until) if pace.is_slow else None)
            if not self.wanted(request):
                return False
            self._queue.put(group)
            self._gathered += len(group)
            self._batches.notify()
            self._wake_if_due()
            return True

    def follow(self, flow: BatchGroup) -> bool:
        """Wait for the trainer to take batches of `flow`.

        Return False once most are taken or `flow` is stale, True when a slow trainer has taken some of the
        gathered batches.
        """
        request = flow.segment.request
        with self._lock:
            while self.wanted(request) and not flow.is_low:
                # A trainer that pauses is not polled: `advance` notifies when it goes on.
                pace, goes_on = self._pace, len(flow) != self._last_remaining
                self._polls_slow_trainer, self._last_remaining = pace.is_slow and goes_on, len(flow)
                self._room.wait(pace.time_until_taken(_POLL_BATCHES) if self._polls_slow_trainer else None)
                if pace.is_slow and self.wanted(request):
                    return True
            return False

    def wanted(self, request: Request) -> bool:
        """Return whether the trainer is not past `request`, and the loader not closed."""
        with self._lock:
            return not (self._stopped or self._chain.is_stale(request))

    # --- under the lock

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
        if self._gathering is None:
            return True
        waiting, ungathered = self._queue.waiting(self._gathering)
        batches, gathered = self._gathering.plan.num_batches, self._gathered - ungathered
        return self._pace.should_prepare(batches, gathered, waiting - ungathered, self._ahead_s)

    def _wait(self, ready: Callable[[], bool], epoch: int, timeout_s: float) -> None:
        """Wait until `ready`, for a trainer in `epoch`; raise if a thread failed, the trainer moved, or time
        is up.
        """
        chain, left_s, generation = self._chain, timeout_s, self._chain.generation
        while not ready():
            if chain.failure is not None and chain.failure[0].epoch <= epoch:
                chain.needs_request = True
                if isinstance(chain.failure[1], StopIteration):  # as it is, it would end the epoch normally
                    raise EpochError(
                        "the batch_transform or the sampler raised StopIteration; see its traceback"
                    ) from chain.failure[1]
                raise chain.failure[1]
            if self._stopped:
                raise EpochError(_CLOSED)
            if generation != chain.generation or epoch < chain.trained_epoch:
                raise EpochError(f"epoch {epoch} was left: another thread iterates or moves the loader")
            if left_s <= 0:
                raise EpochError(self._diagnosis(epoch, timeout_s))
            begun_s = self._clock()
            self._batches.wait(min(left_s, _WATCH_S))
            # Time in which the whole process was stopped (SIGSTOP) does not count.
            left_s -= min(self._clock() - begun_s, _WATCH_S)

    def _diagnosis(self, epoch: int, timeout_s: float) -> str:
        return (
            f"no batch of epoch {epoch} within {timeout_s:g} s (timeout_s): preparation: {self.activity['prepare']}; "
            f"gathering: {self.activity['gather']}; {self._queue.batches} batches are waiting. Is the disk hanging, or the "
            "batch_transform?"
        )
