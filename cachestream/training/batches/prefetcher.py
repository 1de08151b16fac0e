"""Groups of batches on their way to the trainer, and those that threads in C gather while it takes them.

A Python thread that gathers needs the GIL for each batch, and a trainer that computes in Python may keep it
for 5 ms. So where all fields have one shape, all shards are mapped, there is no transform and keys are not
asked for, the trainer's own thread submits the coming batches whenever it takes one, which costs
microseconds. Threads of `_gather` copy the bytes, and never wait for the GIL. With a GPU, the trainer's
thread also starts the copies of what has been gathered by then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cachestream import tracing
from cachestream.errors import EpochError
from cachestream.training.batches import memory
from cachestream.training.batches.collate import to_container
from cachestream.training.batches.gather import Columns, FixedColumns
from cachestream.training.batches.memory import outside_inference
from cachestream.training.batches.transfer import Staged, Transfer

if TYPE_CHECKING:
    from cachestream.training.batches._gather import Queue
    from cachestream.training.batches.mapped_shards import SampleLocations
    from cachestream.training.batches.readahead import ReadAhead
    from cachestream.training.segment import Segment


class QueuedBatch(NamedTuple):
    """Batch `number` of an epoch, from 1, with `size` samples; `skipped` more are damaged and left out."""

    staged: Staged
    number: int
    size: int
    skipped: int


@dataclass(eq=False)
class BatchGroup:
    """A few batches that go to the trainer together, oldest first. A group without batches, with `is_end`
    set, marks the end of an epoch.

    `waited_s` is the time that the last `take` waited for its batch. `num_ungathered` batches are not
    gathered yet. The next group should be gathered when only `low` batches are left.
    """

    segment: Segment
    batches: deque[QueuedBatch] = field(default_factory=deque)
    waited_s: float = 0.0
    is_end: bool = False

    is_prefetched = False  # True where the batches are gathered while they are taken
    num_ungathered = 0
    low = sys.maxsize

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_low(self) -> bool:
        return len(self) <= self.low

    @property
    def turns_low(self) -> bool:
        """True if the last `take` made `is_low` true."""
        return len(self) == self.low

    def take(self, timeout_s: float) -> QueuedBatch | None:
        """Take out the next batch; None after `timeout_s`, or if another thread closes the loader."""
        try:
            return self.batches.popleft()
        except IndexError:
            return None

    def peek(self, timeout_s: float) -> QueuedBatch | None:
        """Return what `take` would return, and leave it in the group; None also if there is no batch."""
        return self.batches[0] if self.batches else None

    def discard(self) -> None:
        """Drop the remaining batches."""
        self.batches.clear()


@dataclass(slots=True, eq=False)
class GatherTask:
    """Batches `first` to `last` of `group`, gathered together by task `number` of the queue in C.

    They go into `arrays`, one for each field, whose addresses are `outs`. `batches` are for the trainer;
    there are none until they are staged or sent.
    """

    group: PrefetchGroup
    number: int
    first: int
    last: int
    arrays: list[np.ndarray[Any, Any]]
    outs: tuple[int, ...]
    batches: deque[QueuedBatch] = field(default_factory=deque)


class PrefetchGroup(BatchGroup):
    """The batches at `locations`, gathered as they are taken; their shards must be mapped, and stay so.

    The first `handed` batches have left the prefetcher; `batches` are those of them that the trainer has not
    taken yet.
    """

    is_prefetched = True

    def __init__(
        self, prefetcher: Prefetcher, segment: Segment, locations: SampleLocations, ahead: ReadAhead
    ) -> None:
        super().__init__(segment)
        self.handed = 0
        self.total = self.num_ungathered = len(locations)
        # Several small batches are one task, which shares the cost; some are taken while others are gathered.
        self._together = segment.batches_together
        self.most_ahead = max(prefetcher.prefetch, 2 * self._together if self._together > 1 else 1)
        self.low = max(self.most_ahead, self.total // 4)
        # Non-temporal stores where the batches ahead and those of the trainer do not fit into the caches.
        in_use = self.most_ahead + 2 * self._together
        self._non_temporal = in_use * segment.batch_bytes >= _NON_TEMPORAL_BYTES
        self._prefetcher = prefetcher
        self._locations = locations  # the addresses are of its arrays
        self._ahead = ahead
        self._bounds = locations.bounds.tolist()
        self._columns = FixedColumns(segment.maps)
        self._schema = segment.snapshot.schema
        self._shards = locations.shards.ctypes.data
        self._rows = locations.rows.ctypes.data

    def __len__(self) -> int:
        return self.total - self.handed + len(self.batches)

    # --- for the trainer

    def take(self, timeout_s: float) -> QueuedBatch | None:
        self.waited_s = 0.0
        return self.batches.popleft() if self.batches or self._prefetcher.hand(self, timeout_s) else None

    def peek(self, timeout_s: float) -> QueuedBatch | None:
        return self.batches[0] if self.batches or self._prefetcher.hand(self, timeout_s) else None

    def discard(self) -> None:
        self._prefetcher.forget(self)

    # --- for the prefetcher

    def new_task(self, number: int, first: int) -> GatherTask:
        """Return task `number`, for a few batches from `first` on, with memory for them."""
        last = min(first + self._together, self.total)
        for batch in range(first, last):
            self._ahead.reach(self._locations.first + batch)
        size = self._bounds[last] - self._bounds[first]
        # Room of one size for all tasks, so that buffers are reused.
        room = max(size, self._together * self.segment.plan.batch_size)
        arrays, outs = self._columns.allocate(self._prefetcher.transfer.pool.lend, size, room)
        return GatherTask(self, number, first, last, arrays, outs)

    def submit(self, queue: Queue, task: GatherTask) -> None:
        start, stop = self._bounds[task.first], self._bounds[task.last]
        shards, rows = self._shards + 8 * start, self._rows + 8 * start
        queue.submit(shards, rows, stop - start, self._columns.sources, task.outs, self._non_temporal)

    def batches_of(self, task: GatherTask, transfer: Transfer) -> deque[QueuedBatch]:
        """Return the batches of `task`: in host memory, where they may still be gathered, or sent to the
        device, small ones in one piece.
        """
        start, *ends = self._bounds[task.first : task.last + 1]
        spans = list(pairwise([0, *(end - start for end in ends)]))
        ready = None
        with outside_inference():
            if not transfer.moves:
                columns = [self._columns.part(task.arrays, *span) for span in spans]
            else:
                whole, ready = transfer.send(self._columns.part(task.arrays, 0, spans[-1][1]), None)
                columns = [whole] if len(spans) == 1 else [_rows_of(whole, *span) for span in spans]
            number = self.segment.request.done + self._locations.first + task.first + 1
            return deque(
                QueuedBatch(Staged(to_container(part, self._schema), ready), number + i, stop - start, 0)
                for i, (part, (start, stop)) in enumerate(zip(columns, spans, strict=True))
            )


def _rows_of(columns: Columns, start: int, stop: int) -> Columns:
    """Samples `start` to `stop`, as `data`: autograd must not take a change of one batch for one of all."""
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


class Prefetcher:
    """Submits the batches of groups to the threads in C, in order, up to `prefetch` ahead. Thread-safe.

    `_groups` have batches to submit; `_tasks` are submitted and not handed to their group. `_held` keeps the
    memory of a task from before it is submitted until it is done, even if its batches were dropped meanwhile.

    A signal may end any method after any step. A task counts as submitted once it is in `_tasks`, and as
    handed once its group counts it: what was interrupted before is done again.
    """

    def __init__(self, prefetch: int, transfer: Transfer) -> None:
        self.prefetch = min(prefetch, _MOST_AHEAD)
        self.transfer = transfer
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._queue: Queue | None = None
        self._groups: deque[PrefetchGroup] = deque()
        self._tasks: deque[GatherTask] = deque()
        self._held: deque[tuple[int, Any]] = deque()

    def add(self, group: PrefetchGroup, threads: int) -> None:
        """Gather the batches of `group` after those of the groups before it, with up to `threads` threads."""
        _drop_abandoned()
        with self._lock:
            if self._closed:
                return
            if self._queue is None:
                assert memory.in_c is not None  # see `BatchProducer`
                self._queue = memory.in_c.Queue(threads)
            self._groups.append(group)
            self._top_up(self._queue)

    def hand(self, group: PrefetchGroup, timeout_s: float) -> bool:
        """Wait for `group`'s next task, hand it over, submit more; False after `timeout_s` or `close`."""
        check_process(self._pid)
        with self._lock:
            queue = self._queue
            task = None if queue is None else self._next_of(group, queue)
        if queue is None or task is None:
            return False
        if queue.completed() < task.number:
            began_s = time.perf_counter()
            done = queue.wait(task.number, timeout_s)
            group.waited_s = time.perf_counter() - began_s
            tracing.add("wait", began_s, began_s + group.waited_s)
            if not done:
                return False
        if tracing.is_on() and (span := queue.span(task.number)) is not None:
            batches = {"batches": task.last - task.first}
            tracing.add_of_thread("gather", *span, "gathering in C", batches)
        with self._lock:
            if not self._tasks or self._tasks[0] is not task:  # another thread has closed the loader
                return False
            if self.transfer.moves:
                self._send(queue.completed())
            group.batches, group.handed = task.batches, task.last
            self._tasks.popleft()
            self._top_up(queue)
        return True

    def forget(self, group: PrefetchGroup) -> None:
        """Drop the rest of `group`."""
        with self._lock:
            self._tasks = deque(task for task in self._tasks if task.group is not group)
            self._groups = deque(other for other in self._groups if other is not group)

    def close(self, timeout_s: float) -> None:
        """Submit nothing more; wait up to `timeout_s` for the tasks that run."""
        with self._lock:
            self._closed = True
            self._groups.clear()
            self._tasks.clear()
            queue, self._queue = self._queue, None
            held, self._held = self._held, deque()
        if queue is not None and not queue.close(timeout_s):
            _abandoned[self._pid, queue] = held  # its threads write there, whenever the disk answers
        _drop_abandoned()

    # --- with the lock

    def _next_of(self, group: PrefetchGroup, queue: Queue) -> GatherTask | None:
        """Return the next task of `group`; the trainer has left the groups before it."""
        while self._tasks or self._groups:
            if not self._tasks:
                self._submit_next(queue)
            elif self._tasks[0].group is group and self._tasks[0].last > group.handed:
                return self._tasks[0]
            else:
                self._tasks.popleft()
        return None

    def _top_up(self, queue: Queue) -> None:
        """Release the memory of done tasks, and submit as much as may be ahead."""
        held, completed = self._held, queue.completed()
        while held and held[0][0] <= completed:
            held.popleft()
        while self._groups and sum([t.last - t.first for t in self._tasks]) < self._groups[0].most_ahead:
            self._submit_next(queue)

    def _submit_next(self, queue: Queue) -> None:
        """Submit the next batches of the first group, or drop it if it has none left."""
        group, last = self._groups[0], self._tasks[-1] if self._tasks else None
        first = group.handed if last is None or last.group is not group else last.last
        if first == group.total:
            self._groups.popleft()
            return
        task = group.new_task(queue.submitted() + 1, first)
        self._held.append((task.number, task))
        group.submit(queue, task)
        if not self.transfer.moves:
            task.batches = group.batches_of(task, self.transfer)
        self._tasks.append(task)
        group.num_ungathered = group.total - task.last

    def _send(self, completed: int) -> None:
        """Send the tasks up to number `completed`, which have been gathered, to the device."""
        for task in self._tasks:
            if task.number > completed:
                break
            if not task.batches:
                task.batches = task.group.batches_of(task, self.transfer)
