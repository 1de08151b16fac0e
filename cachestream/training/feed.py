"""Batches gathered ahead by threads that have no part in the interpreter: the trainer's own thread asks for them.

A thread of ours that gathers needs the GIL for each batch, and a trainer that computes in Python gives it up for as long
as that takes. So where all is simple (fields of one shape, all shards mapped, no transform) the trainer's thread asks for
the coming batches itself, whenever it takes one, which is a matter of microseconds; the bytes are moved by threads of
`_gather`, which never wait for the GIL. It also starts the copies to a GPU, of all that has been gathered by then.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from cachestream.errors import EpochError
from cachestream.training.columns import new_queue
from cachestream.training.flow import Asked, Flow
from cachestream.training.transfer import Transfer

if TYPE_CHECKING:
    from cachestream.training._gather import Queue

__all__ = ["Feed", "check_process"]

_MOST_AHEAD: Final = 1024

# What the tasks of a closed queue still write to, where the disk has not answered, by the process and the queue.
_abandoned: Final[dict[tuple[int, Queue], Any]] = {}


def check_process(pid: int) -> None:
    """Raise EpochError in a child that was forked from process `pid`."""
    if pid != os.getpid():
        raise EpochError(
            f"this EpochLoader belongs to process {pid}: threads do not survive a fork; make one in each process"
        )


def _drop_abandoned() -> None:
    """Let go what nobody writes to any more; without a lock, since nobody knows what goes with it."""
    for pid, queue in list(_abandoned):
        if pid != os.getpid() or queue.close(0.0):
            _abandoned.pop((pid, queue), None)


class Feed:
    """Asks for the batches of flows, in their order, up to `prefetch` ahead. Thread-safe.

    Memory that a task uses is held from before it is submitted until it is done, whoever has forgotten its batch meanwhile:
    a signal may end any of this after any step, and `rewind` begins again then. Where batches move
    on to a device, `_unsent` are those that have not: they are sent in their order, as soon as somebody sees them whole.
    """

    def __init__(self, prefetch: int, transfer: Transfer) -> None:
        self.prefetch = min(prefetch, _MOST_AHEAD)
        self.transfer = transfer
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._queue: Queue | None = None
        self._flows: deque[Flow] = deque()
        self._held: deque[tuple[int, Any]] = deque()
        self._unsent: deque[tuple[Flow, Asked]] = deque()
        self._open: list[Flow] = []  # of which batches may be on their way
        self._is_helped = False
        self._closed = False

    def add(self, flow: Flow, threads: int) -> None:
        """Have the batches of `flow` gathered after those of the flows before it, by up to `threads` threads."""
        _drop_abandoned()
        with self._lock:
            if self._closed:
                return
            if self._queue is None:
                self._queue = new_queue(threads)
            self._open = [*(other for other in self._open if other.asked or other in self._flows), flow]
            self._flows.append(flow)
            self._top_up(self._queue)

    def take(self, flow: Flow, timeout_s: float) -> Asked | None:
        """The next batches of `flow`, waited for; None when that takes too long, or the feed is closed."""
        check_process(self._pid)
        with self._lock:
            queue = self._queue
            if queue is None:
                return None
            while not flow.asked and self._flows:
                self._ask(queue)
            if not flow.asked:
                return None
            asked = flow.asked[0]
        if queue.completed() < asked.number:
            began_s = time.perf_counter()
            done = queue.wait(asked.number, timeout_s)
            flow.waited_s = time.perf_counter() - began_s
            if not done:
                return None
        with self._lock:
            if not flow.asked:  # another thread has closed the loader
                return None
            self._send(queue)
            flow.asked.popleft()
            if not self._is_helped or 2 * self._num_asked() < flow.most_ahead:
                self._is_helped = False
                self._top_up(queue)
        return asked

    def ask_ahead(self) -> None:
        """As `take` does; from now on another thread sees to it in time, while the trainer computes."""
        with self._lock:
            self._is_helped = True
            if self._queue is not None:
                self._send(self._queue)
                self._top_up(self._queue)

    def forget(self, flow: Flow) -> None:
        """Nobody will take the rest of `flow`."""
        with self._lock:
            flow.asked.clear()
            self._unsent = deque(entry for entry in self._unsent if entry[0] is not flow)
            if flow in self._flows:
                self._flows.remove(flow)
            self._open = [other for other in self._open if other is not flow]

    def rewind(self, flow: Flow) -> None:
        """Have all batches of `flow` that were not taken gathered anew."""
        with self._lock:
            self.forget(flow)
            flow.rewind()
            if not self._closed and not flow.is_asked:
                self._open.append(flow)
                self._flows.appendleft(flow)

    def close(self, timeout_s: float) -> None:
        """Have nothing more gathered; waits for what is."""
        with self._lock:
            self._closed = True
            self._flows.clear()
            self._open.clear()
            queue, self._queue = self._queue, None
            held, self._held = self._held, deque()
            self._unsent.clear()
        if queue is not None and not queue.close(timeout_s):
            _abandoned[self._pid, queue] = held  # its threads write there, whenever the disk answers
        _drop_abandoned()

    def _top_up(self, queue: Queue) -> None:
        """With the lock: drop what is done, and ask for as much as may be ahead."""
        held, completed = self._held, queue.completed()
        while held and held[0][0] <= completed:
            held.popleft()
        while self._flows and self._num_asked() < self._flows[0].most_ahead:
            self._ask(queue)

    def _num_asked(self) -> int:
        return sum([flow.num_asked for flow in self._open])

    def _ask(self, queue: Queue) -> None:
        flow = self._flows[0]
        asked = flow.lend(queue.submitted() + 1)
        self._held.append((asked.number, (flow, asked)))
        flow.submit(queue, asked)
        if self.transfer.moves:
            self._unsent.append((flow, asked))
        else:
            flow.stage(asked)
        flow.note(asked)
        if flow.is_asked:
            self._flows.popleft()

    def _send(self, queue: Queue) -> None:
        """With the lock: send what has been gathered."""
        unsent, completed = self._unsent, queue.completed() if self._unsent else 0
        while unsent and unsent[0][1].number <= completed:
            flow, asked = unsent[0]
            flow.send(asked)
            unsent.popleft()
