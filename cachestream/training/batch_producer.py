"""The work of the gathering thread on a segment: its batches are read, transformed, sent and queued in order.

With a `batch_transform`, up to two more threads copy and transform the batches. Each of these threads uses
one thread of torch: where other processes or the trainer's kernels use the cores, a copy that torch divides
would wait until its second thread is scheduled.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from cachestream import tracing
from cachestream.config import with_generator
from cachestream.errors import CacheError, CorruptShardError
from cachestream.permutation import mix_key
from cachestream.training.batches import memory
from cachestream.training.batches.collate import to_container
from cachestream.training.batches.gather import Columns, Gatherer
from cachestream.training.batches.prefetcher import (
    BatchGroup,
    Prefetcher,
    PrefetchGroup,
    QueuedBatch,
)
from cachestream.training.batches.readahead import ReadAhead
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.training.batches.mapped_shards import SampleLocations
    from cachestream.training.batches.transfer import BatchTransform, Transfer
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.schedule import Schedule
    from cachestream.training.segment import Segment

logger = logging.getLogger("cachestream")

Item = TypeVar("Item")
Result = TypeVar("Result")
_setting_threads = threading.Lock()
_MOST_THREADS: Final = 2  # two threads saturate the memory bandwidth


class BatchProducer:
    """The producer of batches, which the trainer consumes. Used by the gathering thread.

    `prefetcher` gathers the segments that it can; None where the threads in C cannot make the batches.
    """

    def __init__(
        self,
        schedule: Schedule,
        transfer: Transfer,
        options: LoaderOptions,
        prefetch: int,
        transform: BatchTransform | None,
        quarantine: Callable[[int, str], None],
    ) -> None:
        self._schedule = schedule
        self._with_keys, self._ragged = options.with_keys, options.ragged
        self._transfer = transfer
        self._transform = None if transform is None else with_generator(transform)
        self._quarantine = quarantine
        is_simple = transform is None and not options.with_keys and isinstance(options.ragged, str)
        can_prefetch = is_simple and memory.in_c is not None
        self.prefetcher = Prefetcher(prefetch, transfer) if can_prefetch else None
        # The error of the batch after a group. In the group it would be in a reference cycle with its thread.
        self._errors: dict[BatchGroup, BaseException] = {}

    def run(self, segment: Segment) -> None:
        """Queue all batches of `segment` as they are gathered: a few small ones or a large one at a time."""
        num_threads = 1 if self._transform is None else _num_threads(segment)
        varies = any(field.shape is None for field in segment.snapshot.schema.fields)
        room = segment.batches_together * segment.plan.batch_size
        gatherer = Gatherer(segment.maps, self._transfer.pool, room, self._with_keys, self._ragged)
        reader = _SegmentReader(
            segment,
            gatherer,
            None if varies else self.prefetcher,
            functools.partial(self._on_damage, segment),
        )
        finish = functools.partial(self._finish, segment)
        try:
            for group in in_order(num_threads, finish, reader.read()):
                wanted = self._prefetch(group) if isinstance(group, PrefetchGroup) else self._queue(group)
                if group in self._errors:
                    raise self._errors.pop(group)
                if not wanted:
                    return
            if segment.last:
                self._schedule.put(BatchGroup(segment, is_end=True))
        finally:
            self._errors.clear()

    def _finish(self, segment: Segment, read: _ReadBatches | PrefetchGroup) -> BatchGroup:
        """Complete batches, up to the first that fails, and send them to the trainer's device."""
        if isinstance(read, PrefetchGroup):
            return read
        group = BatchGroup(segment)
        try:
            with tracing.span("gather", batches=len(read.batches)):
                read.copy()
            self._send(group, read)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, after what came before it
            self._errors[group] = error
        return group

    def _send(self, group: BatchGroup, read: _ReadBatches) -> None:
        segment, send = group.segment, self._transfer.send
        schema, done = segment.snapshot.schema, segment.request.done + read.first
        for columns, size, skipped in zip(read.batches, read.sizes, read.skipped, strict=True):
            done += 1
            if size:
                staged = send(to_container(columns, schema), self._transform_of(segment, done))
                group.batches.append(QueuedBatch(staged, done, size, skipped))
            elif segment.num_ranks > 1:
                raise CorruptShardError(
                    f"all samples of a batch of epoch {segment.request.epoch} lie in damaged shards, and the "
                    "ranks must make the same steps; run 'cachestream verify CACHE --repair' and start again"
                )

    def _transform_of(self, segment: Segment, number: int) -> Callable[[Any], Any] | None:
        """The transform for batch `number` of the epoch, seeded by it: the same after a resume."""
        if self._transform is None:
            return None
        transform, device = self._transform, self._transfer.device
        seed = mix_key(segment.transform_key, number) & (2**63 - 1)

        def seeded(batch: Any) -> Any:
            with tracing.span("transform", batch=number):
                return transform(batch, lambda: torch.Generator(device).manual_seed(seed))

        return seeded

    def _queue(self, group: BatchGroup) -> bool:
        """Queue `group`, if it has a batch; False if it is stale."""
        return not len(group) or self._schedule.put(group)

    def _prefetch(self, group: PrefetchGroup) -> bool:
        """Have `group` gathered until the trainer has taken most of it; False if it is stale."""
        assert self.prefetcher is not None
        self.prefetcher.add(group, _num_threads(group.segment))
        wanted = self._schedule.put(group) and self._schedule.wait_low(group)
        if not wanted:
            group.discard()
        return wanted

    def _on_damage(self, segment: Segment, shard_id: int, error: CorruptShardError) -> None:
        if not self._schedule.wanted(segment.request):
            raise Cancelled  # the lease has ended, so the shard may have been evicted
        try:
            self._quarantine(shard_id, str(error))
        except CacheError as failure:  # a disk that fails does not read the catalogue either
            logger.warning("%s; its samples are skipped, and it stays in the cache (%s)", error, failure)


def _num_threads(segment: Segment) -> int:
    """The number of threads for this rank's share of the processors."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // segment.plan.ranks))


def use_one_torch_thread() -> None:
    """Let torch use one thread in this thread from now on, and leave all others as they are.

    `torch.set_num_threads` applies to the calling thread, but also sets the number for new threads: a
    short-lived thread restores that. Without the lock a second caller would take 1 for the number to restore.
    """
    if torch.get_num_threads() == 1:
        return
    with _setting_threads:
        default = _in_a_new_thread(torch.get_num_threads)
        torch.set_num_threads(1)
        _in_a_new_thread(lambda: torch.set_num_threads(default))


def _in_a_new_thread(function: Callable[[], Result]) -> Result:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join()
    return results[0]


def in_order(num_threads: int, work: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[Result]:
    """Yield the results of `work` on `items`, in order. `num_threads` threads do the work; for one, the
    caller's thread does.

    One item more than there are threads is in work, so that no thread waits for the caller. The threads are
    daemons: those of an executor, in a transform that hangs, would keep the process from its end.
    """
    # No variable refers to a future or an item: it would keep the memory of its batches.
    if num_threads == 1:
        yield from map(work, items)
        return
    tasks: SimpleQueue[tuple[Future[Result], Item] | None] = SimpleQueue()
    running: deque[Future[Result]] = deque()
    threads: list[threading.Thread] = []

    def submit(item: Item) -> None:
        running.append(Future())
        tasks.put((running[-1], item))

    try:
        for number in range(num_threads):
            name = f"cachestream-gather_{number}"
            thread = threading.Thread(target=_serve, args=(work, tasks), name=name, daemon=True)
            thread.start()
            threads.append(thread)
        for _ in map(submit, items):
            if len(running) > num_threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join()


def _serve(work: Callable[[Item], Result], tasks: SimpleQueue[tuple[Future[Result], Item] | None]) -> None:
    """Do the `tasks`, up to None."""
    while (task := tasks.get()) is not None:
        _do(work, *task)
        del task


def _do(work: Callable[[Item], Result], future: Future[Result], item: Item) -> None:
    try:
        use_one_torch_thread()
        future.set_result(work(item))
    except BaseException as error:  # noqa: BLE001 - raised by the future
        future.set_exception(error)
        del future, item  # which the error's traceback would keep, and with them itself


class _ReadBatches(NamedTuple):
    """A few batches of this rank from number `first` on: for each its fields, its number of samples, and the
    number of samples that were left out because their shard is damaged.

    `copy` must be called before the fields are used.
    """

    first: int
    batches: list[Columns]
    copy: Callable[[], None]
    sizes: list[int]
    skipped: list[int]


class _SegmentReader:
    """Reads the batches of `segment` for this rank, in order, without the samples of damaged shards.

    `gatherer` gathers the batches; once all shards are mapped, `prefetcher` does, if it is not None.
    `on_damage(shard id, error)` is called for each damaged shard.
    """

    def __init__(
        self,
        segment: Segment,
        gatherer: Gatherer,
        prefetcher: Prefetcher | None,
        on_damage: Callable[[int, CorruptShardError], None],
    ) -> None:
        self._segment = segment
        self._maps = segment.maps
        self._prefetcher = prefetcher
        self._together = 1  # the first batch must not wait for others
        self._gatherer = gatherer
        self._damaged = np.zeros(segment.snapshot.num_shards, np.bool_)
        self._on_damage = on_damage

    def read(self) -> Iterator[_ReadBatches | PrefetchGroup]:
        """Yield the batches in order: one at a time until all shards are mapped, then a few or a block."""
        segment, ahead = self._segment, ReadAhead(self._segment)
        for block in segment.locations:
            start = 0
            while start < len(block):
                is_ready = self._maps.all_mapped
                stop = len(block) if is_ready else start + 1
                part = block.part(start, stop)
                if not is_ready:
                    self._open(part.shards)
                if self._prefetcher is not None and self._maps.all_mapped:
                    yield PrefetchGroup(self._prefetcher, segment, part, ahead)
                else:
                    yield from self._gather(part, ahead)
                start = stop

    def _open(self, shards: IntArray) -> None:
        for position, error in self._maps.open(shards[~self._damaged[shards]]):
            self._damaged[position] = True
            self._on_damage(int(self._segment.snapshot.shard_ids[position]), error)

    def _gather(self, part: SampleLocations, ahead: ReadAhead) -> Iterator[_ReadBatches]:
        """Yield the batches of `part`, a few small ones at a time."""
        shards, rows, bounds, skipped = part.shards, part.rows, part.bounds, [0] * len(part)
        sound = ~self._damaged[shards]
        if not sound.all():
            shards, rows = shards[sound], rows[sound]
            bounds = np.concatenate([[0], np.cumsum(sound)])[bounds]  # of the batches among the sound samples
            skipped = (np.diff(part.bounds) - np.diff(bounds)).tolist()
        start, ends, most = 0, bounds.tolist(), self._segment.batches_together
        self._together = min(most, self._together)
        while start < len(part):
            stop = min(start + self._together, len(part))
            for number in range(part.first + start, part.first + stop):
                ahead.reach(number)
            here = ends[start : stop + 1]
            sizes = [last - first for first, last in pairwise(here)]
            # No variable refers to the batches: one more buffer in use makes the CPU cache less effective.
            yield _ReadBatches(
                part.first + start, *self._gatherer.begin(shards, rows, here), sizes, skipped[start:stop]
            )
            start, self._together = stop, min(most, 4 * self._together)
