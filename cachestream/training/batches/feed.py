"""Batches that threads in C gather while the trainer takes them.

A Python thread that gathers needs the GIL for each batch, and a trainer that computes in Python may keep it
for 5 ms. So where all fields have one shape, all shards are mapped and there is no transform, the trainer's
own thread submits the coming batches whenever it takes one, which costs microseconds. Threads of `_gather`
copy the bytes, and never wait for the GIL. With a GPU, the trainer's thread also starts the copies of what
has been gathered by then.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from cachestream.errors import EpochError
from cachestream.training.batches.batch_queue import BatchGroup, QueuedBatch
from cachestream.training.batches.buffers import outside_inference
from cachestream.training.batches.collate import packed
from cachestream.training.batches.columns import Columns, FixedColumns, are_fixed, new_queue
from cachestream.training.batches.locations import SampleLocations
from cachestream.training.batches.readahead import ReadAhead
from cachestream.training.batches.transfer import Staged, Transfer
from cachestream.training.segment import Segment

if TYPE_CHECKING:
    from cachestream.training.batches._gather import Queue


def can_flow(segment: Segment) -> bool:
    """Return whether a `Flow` can gather the batches of `segment`, once all shards are mapped."""
    simple = not segment.with_keys and isinstance(segment.ragged, str)
    return simple and are_fixed(segment.snapshot.schema)


@dataclass(slots=True, eq=False)
class GatherTask:
    """Batches `first` to `last` of a flow, gathered together by task `number` of the queue.

    They go into `arrays`, one for each field, whose addresses are `outs`. `batches` are for the trainer, once
    they are staged or sent.
    """

    number: int
    first: int
    last: int
    arrays: list[np.ndarray[Any, Any]]
    outs: tuple[int, ...]
    batches: deque[QueuedBatch] = field(default_factory=deque)

    def __len__(self) -> int:
        return self.last - self.first


class Flow(BatchGroup):
    """The batches at `locations`, gathered as they are taken; their shards must be mapped, and stay so."""

    is_flow = True

    def __init__(self, feed: Feed, segment: Segment, locations: SampleLocations, ahead: ReadAhead) -> None:
        super().__init__(segment)
        self.tasks: deque[GatherTask] = deque()
        # Several small batches are one task, which shares the cost. While some are taken, others are
        # gathered.
        self._most_together = segment.batches_together
        # The first batch of a segment must not wait for others.
        self._together = self._most_together if locations.first else 1
        self.most_ahead = max(feed.prefetch, 2 * self._most_together if self._most_together > 1 else 1)
        self.low = max(self.most_ahead, len(locations) // 4)
        # Non-temporal stores where the batches ahead and those of the trainer do not fit into the caches.
        in_use = self.most_ahead + 2 * self._most_together
        self._non_temporal = in_use * segment.batch_bytes >= _NON_TEMPORAL_BYTES
        self._feed = feed
        self._locations = locations
        self._ahead = ahead
        self._bounds = locations.bounds.tolist()
        self._taken = 0
        self._next = 0
        self._in_hand: deque[QueuedBatch] = deque()
        self._columns = FixedColumns(segment.maps)
        self._schema = segment.snapshot.schema
        self._shards = locations.shards.ctypes.data
        self._rows = locations.rows.ctypes.data

    def __len__(self) -> int:
        return len(self._locations) - self._taken

    @property
    def num_submitted(self) -> int:
        """Number of its batches that are submitted and not taken."""
        return self.tasks[-1].last - self.tasks[0].first if self.tasks else 0

    @property
    def num_ungathered(self) -> int:
        return len(self._locations) - self._next

    @property
    def is_low(self) -> bool:
        return len(self) <= self.low

    @property
    def turns_low(self) -> bool:
        return len(self) == self.low

    @property
    def all_submitted(self) -> bool:
        return self._next == len(self._locations)

    # --- for the trainer

    def take(self, timeout_s: float) -> QueuedBatch | None:
        self.waited_s = 0.0
        batch = self.peek(timeout_s)
        if batch is not None:
            self._taken += 1
            self._in_hand.popleft()
        return batch

    def peek(self, timeout_s: float) -> QueuedBatch | None:
        try:
            if not self._in_hand:
                task = self._feed.take(self, timeout_s)
                if task is None:
                    return None
                self._in_hand = task.batches
            return self._in_hand[0]
        except EpochError:
            raise
        except BaseException:  # a signal's, such as KeyboardInterrupt: anything may be half done
            self._feed.rewind(self)
            raise

    def discard(self) -> None:
        self._feed.forget(self)

    # --- for the feed

    def next_task(self, number: int) -> GatherTask:
        """Return task `number`, for the next few batches, with memory for them."""
        first, last = self._next, min(self._next + self._together, len(self._locations))
        for batch in range(first, last):
            self._ahead.reach(self._locations.first + batch)
        size = self._bounds[last] - self._bounds[first]
        # Room of one size for all tasks, so that buffers are reused.
        room = max(size, self._most_together * self.segment.plan.batch_size)
        arrays, outs = self._columns.lend(self._feed.transfer.pool.lend, size, room)
        return GatherTask(number, first, last, arrays, outs)

    def submit(self, queue: Queue, task: GatherTask) -> None:
        start, stop = self._bounds[task.first], self._bounds[task.last]
        shards, rows = self._shards + 8 * start, self._rows + 8 * start
        queue.submit(shards, rows, stop - start, self._columns.sources, task.outs, self._non_temporal)

    def mark_submitted(self, task: GatherTask) -> None:
        self.tasks.append(task)
        self._next, self._together = task.last, min(self._most_together, 4 * self._together)

    def rewind(self) -> None:
        """Go back to the first batch that was not taken."""
        self._in_hand.clear()
        self._next, self._together = self._taken, 1

    def stage(self, task: GatherTask) -> None:
        """Make the tensors of `task`, which stay in host memory, while it is still being gathered."""
        part, arrays = self._columns.part, task.arrays
        with outside_inference():
            for number, start, stop in self._spans(task):
                task.batches.append(self._queued(number, stop - start, part(arrays, start, stop), None))

    def send(self, task: GatherTask) -> None:
        """Send the gathered `task` to the device: small batches in one piece."""
        size = self._bounds[task.last] - self._bounds[task.first]
        with outside_inference():
            whole, ready = self._feed.transfer.send(self._columns.part(task.arrays, 0, size), None)
            for number, start, stop in self._spans(task):
                columns = whole if len(task) == 1 else _rows_of(whole, start, stop)
                task.batches.append(self._queued(number, stop - start, columns, ready))

    def _spans(self, task: GatherTask) -> Iterator[tuple[int, int, int]]:
        """Yield for each batch of `task` its number in the epoch, and its start and stop in the arrays."""
        ends = self._bounds[task.first : task.last + 1]
        done, first = self.segment.request.done + self._locations.first + task.first, ends[0]
        for i, (start, stop) in enumerate(pairwise(ends), 1):
            yield done + i, start - first, stop - first

    def _queued(
        self, number: int, size: int, columns: Columns, ready: torch.cuda.Event | None
    ) -> QueuedBatch:
        return QueuedBatch(Staged(packed(columns, self._schema), ready), number, size, 0)


def _rows_of(columns: Columns, start: int, stop: int) -> Columns:
    """Samples `start` to `stop`. Without `data`, autograd would take an in-place change of one batch for a
    change of all.
    """
    return {name: column[start:stop].data for name, column in columns.items()}


_MOST_AHEAD: Final = 1024
_NON_TEMPORAL_BYTES: Final = 16 << 20  # about the share of the last-level cache that a process can keep

# Memory that tasks of closed queues still write to, where the disk has not answered, by process and queue.
_abandoned: Final[dict[tuple[int, Queue], Any]] = {}


def check_process(pid: int) -> None:
    """Raise EpochError in a child that was forked from process `pid`."""
    if pid != os.getpid():
        raise EpochError(
            f"this EpochLoader belongs to process {pid}: threads do not survive a fork; make one in each process"
        )


def _drop_abandoned() -> None:
    """Release abandoned memory that no task writes to any more. No lock: releasing may run any code."""
    for pid, queue in list(_abandoned):
        if pid != os.getpid() or queue.close(0.0):
            _abandoned.pop((pid, queue), None)


class Feed:
    """Submits the batches of flows to the threads in C, in order, up to `prefetch` ahead. Thread-safe.

    `_held` keeps the memory of a task from before it is submitted until it is done, whoever has dropped its
    batch meanwhile: a signal may end any method after any step, and `rewind` begins again then. `_unsent` are
    tasks whose batches are still to be sent to a device, in their order, as soon as a call finds them
    gathered.
    """

    def __init__(self, prefetch: int, transfer: Transfer) -> None:
        self.prefetch = min(prefetch, _MOST_AHEAD)
        self.transfer = transfer
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._queue: Queue | None = None
        self._flows: deque[Flow] = deque()
        self._held: deque[tuple[int, Any]] = deque()
        self._unsent: deque[tuple[Flow, GatherTask]] = deque()
        self._open: list[Flow] = []  # flows that may have submitted tasks
        self._is_helped = False
        self._closed = False

    def add(self, flow: Flow, threads: int) -> None:
        """Gather the batches of `flow` after those of the flows before it, with up to `threads` threads."""
        _drop_abandoned()
        with self._lock:
            if self._closed:
                return
            if self._queue is None:
                self._queue = new_queue(threads)
            self._open = [*(other for other in self._open if other.tasks or other in self._flows), flow]
            self._flows.append(flow)
            self._top_up(self._queue)

    def take(self, flow: Flow, timeout_s: float) -> GatherTask | None:
        """Wait for the next task of `flow`; None after `timeout_s`, or when the feed is closed."""
        check_process(self._pid)
        with self._lock:
            queue = self._queue
            if queue is None:
                return None
            while not flow.tasks and self._flows:
                self._submit_next(queue)
            if not flow.tasks:
                return None
            task = flow.tasks[0]
        if queue.completed() < task.number:
            began_s = time.perf_counter()
            done = queue.wait(task.number, timeout_s)
            flow.waited_s = time.perf_counter() - began_s
            if not done:
                return None
        with self._lock:
            if not flow.tasks:  # another thread has closed the loader
                return None
            self._send(queue)
            flow.tasks.popleft()
            if not self._is_helped or 2 * self._num_submitted() < flow.most_ahead:
                self._is_helped = False
                self._top_up(queue)
        return task

    def submit_ahead(self) -> None:
        """Submit as `take` does, in another thread while the trainer computes. From now on `take` leaves it
        to that thread.
        """
        with self._lock:
            self._is_helped = True
            if self._queue is not None:
                self._send(self._queue)
                self._top_up(self._queue)

    def forget(self, flow: Flow) -> None:
        """Drop the rest of `flow`."""
        with self._lock:
            flow.tasks.clear()
            self._unsent = deque(entry for entry in self._unsent if entry[0] is not flow)
            if flow in self._flows:
                self._flows.remove(flow)
            self._open = [other for other in self._open if other is not flow]

    def rewind(self, flow: Flow) -> None:
        """Gather all batches of `flow` that were not taken once more."""
        with self._lock:
            self.forget(flow)
            flow.rewind()
            if not self._closed and not flow.all_submitted:
                self._open.append(flow)
                self._flows.appendleft(flow)

    def close(self, timeout_s: float) -> None:
        """Submit nothing more; wait up to `timeout_s` for the tasks that run."""
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
        """With the lock: release the memory of done tasks, and submit as much as may be ahead."""
        held, completed = self._held, queue.completed()
        while held and held[0][0] <= completed:
            held.popleft()
        while self._flows and self._num_submitted() < self._flows[0].most_ahead:
            self._submit_next(queue)

    def _num_submitted(self) -> int:
        return sum([flow.num_submitted for flow in self._open])

    def _submit_next(self, queue: Queue) -> None:
        flow = self._flows[0]
        task = flow.next_task(queue.submitted() + 1)
        self._held.append((task.number, (flow, task)))
        flow.submit(queue, task)
        if self.transfer.moves:
            self._unsent.append((flow, task))
        else:
            flow.stage(task)
        flow.mark_submitted(task)
        if flow.all_submitted:
            self._flows.popleft()

    def _send(self, queue: Queue) -> None:
        """With the lock: send the tasks that have been gathered."""
        unsent, completed = self._unsent, queue.completed() if self._unsent else 0
        while unsent and unsent[0][1].number <= completed:
            flow, task = unsent[0]
            flow.send(task)
            unsent.popleft()
