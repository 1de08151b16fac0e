"""Tasks: runs of a few batches of a segment that are gathered together, each by one of two ways.

Threads in C copy fields of one shape out of mapped shards. A Python thread would need the GIL for each batch,
and a trainer that computes in Python may keep it for 5 ms; those in C never wait for it. All else (shards
that must be opened first, damage, fields whose shape varies, str and bytes, keys, transforms) is done by one
or two daemons in Python. Either way a task is submitted in microseconds, by whoever tops the window up.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from cachestream import tracing
from cachestream.config import with_generator
from cachestream.errors import CacheError, CorruptShardError, EpochError
from cachestream.permutation import mix_key
from cachestream.training.batches import memory
from cachestream.training.batches.gather import Columns, Gatherer, to_container
from cachestream.training.batches.mapped_shards import ChangedShardError, SampleLocations, find_locations
from cachestream.training.batches.memory import outside_inference
from cachestream.training.batches.readahead import ReadAhead
from cachestream.training.rendezvous import Cancelled
from cachestream.training.threads import Flag, Threads, watched

if TYPE_CHECKING:
    from cachestream.training.batches._gather import Queue
    from cachestream.training.batches.transfer import BatchTransform, Transfer
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.position import Segment

logger = logging.getLogger("cachestream")

_MOST_THREADS: Final = 2  # two threads saturate the memory bandwidth
_MOST_AHEAD: Final = 1024
_NON_TEMPORAL_BYTES: Final = 16 << 20  # about the share of the last-level cache that a process can keep
_BLOCK: Final = 16_384  # samples located at once: 1 ms

# Memory that tasks of closed queues still write to, where the disk has not answered, by process and queue.
_abandoned: Final[dict[tuple[int, Queue], Any]] = {}


class Batch(NamedTuple):
    """Batch `number` of an epoch, from 1, with `size` samples; `skipped` more are damaged and left out.

    `ready`: the event after the last work on it on another stream, None without one.
    """

    value: Any
    ready: torch.Event | None
    number: int
    size: int
    skipped: int


@dataclass(slots=True, eq=False)
class Task:
    """Batches `first` to `stop` of a segment: those that are not delivered yet, oldest first.

    `number`: that of the task in C; otherwise 0, and a thread sets `done` at the end (None: there is no
    batch). `error`: of the batch after the last of `batches`. `arrays`: the fields, until they are sent to
    the device, with the batches' `ends` in them.
    """

    reader: SegmentReader
    first: int
    stop: int
    number: int = 0
    batches: deque[Batch] = field(default_factory=deque)
    error: BaseException | None = None
    done: Flag | None = None
    arrays: list[np.ndarray[Any, Any]] | None = None
    ends: Sequence[int] = ()
    is_wanted: bool = True


class Gathering:
    """The gathering of a loader's batches: its threads, of both kinds, and the memory that they write to.

    Used under the lock of the window, but for `wait`, and the threads' own work.
    """

    def __init__(
        self,
        options: LoaderOptions,
        prefetch: int,
        transfer: Transfer,
        transform: BatchTransform | None,
        quarantine: Callable[[int, str], None],
    ) -> None:
        self.prefetch = min(prefetch, _MOST_AHEAD)
        self.transfer = transfer
        self.transform = None if transform is None else with_generator(transform)
        self.quarantine = quarantine
        self.with_keys, self.ragged, self.stacked = options.with_keys, options.ragged, options.group_by
        self.threads = Threads("gather")
        self._queue: Queue | None = None
        self._held: deque[tuple[int, Any]] = deque()  # what tasks in C use, from before they are submitted
        self._pid = os.getpid()
        self.is_traced = False

    def queue(self, num_threads: int) -> Queue:
        """The queue in C, made at the first call with up to `num_threads` threads."""
        if self._queue is None:
            assert memory.in_c is not None
            self._queue = memory.in_c.Queue(num_threads)
        return self._queue

    def release(self) -> None:
        """Give back what tasks in C used that are done; before memory for others is taken."""
        if held := self._held:
            completed = 0 if self._queue is None else self._queue.completed()
            while held and held[0][0] <= completed:
                held.popleft()

    def hold(self, queue: Queue, used: Any) -> None:
        """Keep what the next task of `queue` uses until it is done."""
        self._held.append((queue.submitted() + 1, used))

    def wait(self, task: Task, timeout_s: float) -> bool:
        """Wait until `task` is done; False after `timeout_s`, or once it is dropped."""
        if task.number:
            queue = self._queue
            if queue is None or not (queue.completed() >= task.number or queue.wait(task.number, timeout_s)):
                return False
            if self.is_traced and (span := queue.span(task.number)) is not None:
                tracing.add_of_thread("gather", *span, "gathering in C", {"batches": task.stop - task.first})
            return True
        done, left_s = task.done, timeout_s
        while done is not None and not done.is_set and task.is_wanted and left_s > 0:
            left_s -= watched(done.wait, left_s)
        return done is None or done.is_set

    def send(self, tasks: deque[Task]) -> None:
        """Send those of the first `tasks` that are gathered in C to the device."""
        for task in tasks:
            if task.number and not self._is_completed(task.number):
                return
            if task.arrays is not None:
                task.batches, task.arrays = task.reader.batches_of(task, task.arrays), None

    def _is_completed(self, number: int) -> bool:
        return self._queue is not None and self._queue.completed() >= number

    def stop(self) -> None:
        """Begin no more tasks."""
        self.threads.stop()

    def close(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the tasks that run; return whether all threads have ended."""
        queue, self._queue = self._queue, None
        held, self._held = self._held, deque()
        if queue is not None and not queue.close(timeout_s):
            _abandoned[self._pid, queue] = held  # its threads write there, whenever the disk answers
        _drop_abandoned()
        return self.threads.join(timeout_s)


def _drop_abandoned() -> None:
    """Release abandoned memory that no task writes to any more. No lock: releasing may run any code."""
    for pid, queue in list(_abandoned):
        if pid != os.getpid() or queue.close(0.0):
            _abandoned.pop((pid, queue), None)


class SegmentReader:
    """The batches of `segment` for this rank, of which there are `total`. `submit` is called under the
    window's lock, with any batch, since a task may be submitted again.

    `together`: the number of small batches that make a task. `most_ahead`: the batches of the window.
    """

    def __init__(self, segment: Segment, gathering: Gathering) -> None:
        self.segment = segment
        self.epoch, self.ends_epoch = segment.position.epoch, segment.last
        self.total = segment.plan.num_batches
        self.together = segment.batches_together
        self.most_ahead = max(gathering.prefetch, 2 * self.together if self.together > 1 else 1)
        self.is_open = True  # until the lease on its shards ends
        self._gathering = gathering
        self._maps = maps = segment.maps
        self._all_mapped = False
        self._num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // segment.plan.ranks))
        if gathering.transform is not None:
            gathering.threads.most = max(gathering.threads.most, self._num_threads)
        self._room = self.together * segment.plan.batch_size  # of all tasks, so that memory is used again
        pool = gathering.transfer.pool
        self._gatherer = Gatherer(
            maps, pool, self._room, gathering.with_keys, gathering.ragged, gathering.stacked
        )
        self._in_c = (
            memory.in_c is not None
            and gathering.transform is None
            and not gathering.with_keys
            and isinstance(gathering.ragged, str)
            and all(field.shape is not None for field in segment.snapshot.schema.fields)
        )
        # Non-temporal stores where the batches ahead and those of the trainer do not fit into the caches.
        in_use = self.most_ahead + 2 * self.together
        self._non_temporal = in_use * segment.batch_bytes >= _NON_TEMPORAL_BYTES
        self._ahead = ReadAhead(segment)
        self._damaged = np.zeros(segment.snapshot.num_shards, np.bool_)
        self._coming: SampleLocations | None = self._find(0)
        self._block, self._bounds = self._coming, [0]

    def _find(self, first: int) -> SampleLocations:
        """Find the samples of the block of batches that begins with `first`."""
        segment = self.segment
        stop = min(first + max(1, _BLOCK // segment.plan.batch_size), self.total)
        return find_locations(segment.order, segment.plan, segment.rank, self._maps, first, stop)

    def _enter_block(self, first: int) -> None:
        """Move to the block that begins with `first`, and have a thread find the next one. Where that is not
        found in time, whoever comes to it finds it.
        """
        block, self._coming = self._coming, None
        self._block = block if block is not None and block.first == first else self._find(first)
        self._bounds = self._block.bounds.tolist()
        if (following := first + len(self._block)) < self.total:
            with suppress(EpochError):  # no thread can be started
                self._gathering.threads.submit(functools.partial(self._find_ahead, following))

    def _find_ahead(self, first: int) -> None:
        if self.is_open:
            self._coming = self._find(first)

    def submit(self, first: int, most: int) -> Task:
        """Have batch `first`, and up to `most` with those after it, gathered as one task.

        A signal may interrupt this after any step: the batches are then submitted again.
        """
        start = first - self._block.first
        if not 0 <= start < len(self._bounds) - 1:
            self._enter_block(first)
            start = 0
        stop = min(start + most, len(self._bounds) - 1)
        task = Task(self, first, first + stop - start)
        if start == stop:
            return task
        self._all_mapped = self._all_mapped or self._maps.all_mapped
        if self._in_c and self._all_mapped:
            self._submit_in_c(task, start, stop)
        else:
            part, task.done = self._block.part(start, stop), Flag()
            self._gathering.threads.submit(functools.partial(_do, task, self._gather, part))
        return task

    def _submit_in_c(self, task: Task, start: int, stop: int) -> None:
        gathering, block, columns = self._gathering, self._block, self._gatherer.fixed
        for batch in range(task.first, task.stop):
            if batch % self._ahead.every == 0:
                self._ahead.reach(batch)
        begin, end = self._bounds[start], self._bounds[stop]
        task.ends = [bound - begin for bound in self._bounds[start : stop + 1]]
        room = max(end - begin, self._room)
        arrays, outs = columns.allocate(gathering.transfer.pool.lend, end - begin, room)
        queue = gathering.queue(self._num_threads)
        gathering.hold(queue, (self._maps, block, arrays))
        shards, rows = block.shards.ctypes.data + 8 * begin, block.rows.ctypes.data + 8 * begin
        number = queue.submit(shards, rows, end - begin, columns.sources, outs, self._non_temporal)
        if gathering.transfer.moves:
            task.arrays = arrays
        else:
            task.batches = self.batches_of(task, arrays)
        task.number = number

    def batches_of(self, task: Task, arrays: list[np.ndarray[Any, Any]]) -> deque[Batch]:
        """Return the batches of `task` in `arrays`, which may still be gathered, or sent to the device, small
        ones in one piece.
        """
        transfer, columns, ready = self._gathering.transfer, self._gatherer.fixed, None
        number, sizes = (
            self.segment.position.done + task.first,
            [end - start for start, end in pairwise(task.ends)],
        )
        with outside_inference():
            whole = columns.part(arrays, 0, task.ends[-1])
            if transfer.moves:
                whole, ready = transfer.send(whole, None)
            parts = [whole] if len(sizes) == 1 else _divided(whole, sizes)
            return deque(
                Batch(columns.container(part), ready, number + i, size, 0)
                for i, (part, size) in enumerate(zip(parts, sizes, strict=True), 1)
            )

    # --- in a thread

    def _gather(self, part: SampleLocations, batches: deque[Batch]) -> None:
        """Gather, send and transform the batches of `part`, without the samples of damaged shards, and append
        them to `batches`, up to the first that fails.
        """
        with tracing.span("gather", batches=len(part)):
            columns, sizes, skipped = self._read(part)
        segment, send = self.segment, self._gathering.transfer.send
        number = segment.position.done + part.first
        while columns:
            number += 1
            if size := sizes.pop(0):
                container = to_container(columns.pop(0), segment.snapshot.schema)
                staged = send(container, self._transform_of(number))
                del container  # its memory may be used again once it is sent
                batches.append(Batch(staged.batch, staged.ready, number, size, skipped.pop(0)))
                del staged
                continue
            if segment.has_others:
                raise CorruptShardError(
                    f"all samples of a batch of epoch {segment.position.epoch} lie in damaged shards, and "
                    "the ranks must make the same steps; run 'cachestream verify CACHE --repair' and start "
                    "again"
                )
            del columns[0], skipped[0]

    def _read(self, part: SampleLocations) -> tuple[list[Columns], list[int], list[int]]:
        """The fields of the batches of `part`, and for each its size, and the samples left out."""
        if not self._maps.all_mapped:
            for position, error in self._maps.open(part.shards[~self._damaged[part.shards]]):
                self._leave_out(position, error)
        for batch in range(part.first, part.first + len(part)):
            if batch % self._ahead.every == 0:
                self._ahead.reach(batch)
        while True:
            shards, rows, bounds, skipped = part.shards, part.rows, part.bounds, [0] * len(part)
            sound = ~self._damaged[shards]
            if not sound.all():
                shards, rows = shards[sound], rows[sound]
                bounds = np.concatenate([[0], np.cumsum(sound)])[bounds]  # among the sound samples
                skipped = (np.diff(part.bounds) - np.diff(bounds)).tolist()
            ends = bounds.tolist()
            try:
                columns, copy = self._gatherer.begin(shards, rows, ends)
            except ChangedShardError as error:
                self._leave_out(error.position, error)
                continue
            copy()
            return columns, [stop - start for start, stop in pairwise(ends)], skipped

    def _leave_out(self, position: int, error: CorruptShardError) -> None:
        """Leave the samples of a damaged shard out of all batches, and put it aside."""
        self._damaged[position] = True
        if not self.is_open:
            raise Cancelled  # the lease has ended, so the shard may have been evicted
        try:
            self._gathering.quarantine(int(self.segment.snapshot.shard_ids[position]), str(error))
        except CacheError as failure:  # a disk that fails does not read the catalogue either
            logger.warning("%s; its samples are skipped, and it stays in the cache (%s)", error, failure)

    def _transform_of(self, number: int) -> Callable[[Any], Any] | None:
        """The transform for batch `number` of the epoch, seeded by it: the same after a resume."""
        transform, device = self._gathering.transform, self._gathering.transfer.device
        if transform is None:
            return None
        seed = mix_key(self.segment.transform_key, number) & (2**63 - 1)

        def seeded(batch: Any) -> Any:
            with tracing.span("transform", batch=number):
                return transform(batch, lambda: torch.Generator(device).manual_seed(seed))

        return seeded


def _do(task: Task, gather: Callable[[SampleLocations, deque[Batch]], None], part: SampleLocations) -> None:
    """Do `task` in a thread, unless it was dropped."""
    try:
        if task.is_wanted:
            gather(part, task.batches)
    except BaseException as error:  # noqa: BLE001 - raised when the trainer comes to the batch
        task.error = error
    finally:
        assert task.done is not None
        task.done.set()
        del task  # which the error's traceback would keep, and with it itself


def _divided(columns: Columns, sizes: list[int]) -> Iterator[Columns]:
    """Divide the samples of `columns` into batches of `sizes`, a few calls of torch for all of them.

    They are `data`: autograd must not take a change of one batch for one of all.
    """
    parts = ([part.data for part in column.split(sizes)] for column in columns.values())
    return (dict(zip(columns, row, strict=True)) for row in zip(*parts, strict=True))
