"""The gathering thread's work on a segment: its batches in order, gathered, transformed and sent.

Where batches are transformed, a second thread shares the work. A copy is not shared by torch's own threads:
where other processes or the trainer's kernels use the cores, each call waits until its second thread is
scheduled.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch

from cachestream.config import with_generator
from cachestream.errors import CorruptShardError
from cachestream.permutation import mix_key
from cachestream.training.batches.batch_queue import BatchGroup, QueuedBatch
from cachestream.training.batches.collate import packed
from cachestream.training.batches.feed import Feed, Flow, can_flow
from cachestream.training.batches.segment_reader import read_batches
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.training.batches.segment_reader import Gathered
    from cachestream.training.batches.transfer import BatchTransform, Transfer
    from cachestream.training.schedule import Schedule
    from cachestream.training.segment import Segment

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_THREADS: Final = 2  # two threads saturate the memory bandwidth


class Gathering:
    """The work of the gathering thread; a second thread shares it if batches are transformed."""

    def __init__(
        self,
        schedule: Schedule,
        transfer: Transfer,
        transform: BatchTransform | None,
        quarantine: Callable[[int, str], None],
        feed: Feed | None,
    ) -> None:
        self._schedule = schedule
        self._transfer = transfer
        self._transform = None if transform is None else with_generator(transform)
        self._quarantine = quarantine
        self.feed = feed

    def run(self, segment: Segment) -> None:
        """Queue all batches of `segment` as they are gathered: a few small ones or a large one at a time."""
        num_threads = 1 if self._transform is None else self._num_threads(segment)
        workers = OrderedThreads(num_threads, functools.partial(self._finish, segment), self._deliver)
        assert segment.locations is not None
        batches = read_batches(
            segment,
            segment.locations,
            self._transfer.pool,
            lambda *damage: self._on_damage(segment, *damage),
            workers.settle,
            self.feed if can_flow(segment) else None,
        )
        if workers.run(batches) and segment.last:
            self._schedule.put(BatchGroup(segment, is_end=True))

    def _finish(self, segment: Segment, gathered: Gathered | Flow) -> tuple[BatchGroup, BaseException | None]:
        """Complete batches, up to the first that fails, and send them to the trainer's device."""
        if isinstance(gathered, Flow):
            return gathered, None
        group = BatchGroup(segment)
        try:
            gathered.copy()
            self._send(group, gathered)
        except BaseException as error:  # noqa: BLE001 - raised by `_deliver`, after what came before it
            return group, error
        return group, None

    def _send(self, group: BatchGroup, gathered: Gathered) -> None:
        segment, send = group.segment, self._transfer.send
        schema, done = segment.snapshot.schema, segment.request.done + gathered.first
        for columns, size, skipped in zip(gathered.batches, gathered.sizes, gathered.skipped, strict=True):
            done += 1
            if size:
                staged = send(packed(columns, schema), self._transform_of(segment, done))
                group.batches.append(QueuedBatch(staged, done, size, skipped))
            elif segment.num_ranks > 1:
                raise CorruptShardError(
                    f"all samples of a batch of epoch {segment.request.epoch} lie in damaged shards, and the "
                    "ranks must make the same steps; run 'cachestream verify CACHE --repair' and start again"
                )

    def _transform_of(self, segment: Segment, number: int) -> Callable[[Any], Any] | None:
        """The transform for batch `number` of the epoch on this rank, seeded by that number: the same after a
        resume.
        """
        if self._transform is None:
            return None
        transform, device = self._transform, self._transfer.device
        seed = mix_key(segment.transform_key, number) & (2**63 - 1)
        return lambda batch: transform(batch, lambda: torch.Generator(device).manual_seed(seed))

    def _deliver(self, finished: tuple[BatchGroup, BaseException | None]) -> bool:
        group, error = finished
        if isinstance(group, Flow):
            return self._follow(group)
        wanted = not len(group) or self._schedule.put(group)
        if error is None:
            return wanted
        try:
            raise error
        finally:
            del error, finished  # breaks a reference cycle: the traceback holds this frame

    def _follow(self, flow: Flow) -> bool:
        """Have `flow` gathered until the trainer has taken most of it; False if it is stale."""
        assert self.feed is not None
        self.feed.add(flow, self._num_threads(flow.segment))
        if self._schedule.put(flow):
            while self._schedule.follow(flow):
                self.feed.submit_ahead()
        wanted = self._schedule.wanted(flow.segment.request)
        if not wanted:
            flow.discard()
        return wanted

    @staticmethod
    def _num_threads(segment: Segment) -> int:
        return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // segment.plan.ranks))

    def _on_damage(self, segment: Segment, shard_id: int, error: CorruptShardError) -> None:
        if not self._schedule.wanted(segment.request):
            raise Cancelled  # the lease has ended, so the shard may have been evicted
        self._quarantine(shard_id, str(error))


class OrderedThreads(Generic[Item, Result]):
    """A run of `num_threads` threads, of which the caller of `run` is one.

    One thread at a time takes the next item; all threads work at once; results are delivered in the order of
    the items: each waits until the one before it is `_done`.
    """

    def __init__(
        self, num_threads: int, work: Callable[[Item], Result], deliver: Callable[[Result], bool]
    ) -> None:
        self._num_threads = num_threads
        self._work = work
        self._deliver = deliver
        self._taking = threading.Lock()
        self._done = threading.Event()  # the last item that was taken is delivered
        self._done.set()
        self._over = False  # no more items are taken
        self._stopped = False  # no more results are delivered
        self._error: BaseException | None = None

    def run(self, items: Iterator[Item]) -> bool:
        """Work on all `items`; return False if `deliver` returned False.

        Raises the error of the iterator, of `work` or of `deliver`, once the results of all earlier items are
        delivered.
        """
        helpers = [
            threading.Thread(
                target=self._help, args=(items,), name=f"cachestream-gather-{i + 2}", daemon=True
            )
            for i in range(self._num_threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._work_on(items)
        for helper in helpers:
            helper.join()
        error, self._error = self._error, None
        if error is None:
            return not self._stopped
        try:
            raise error
        finally:  # breaks a reference cycle with this frame, which would keep items and their maps
            del error

    def settle(self) -> None:
        """Wait until all items are delivered; called by the iterator of the items."""
        self._done.wait()

    def _help(self, items: Iterator[Item]) -> None:
        use_one_torch_thread()
        self._work_on(items)

    def _work_on(self, items: Iterator[Item]) -> None:
        while True:
            item, result, failure = None, None, None
            with self._taking:
                if self._over:
                    return
                try:
                    item = next(items)
                except StopIteration:
                    self._over = True
                    return
                except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
                    self._over, failure = True, error
                before, self._done = self._done, threading.Event()
                done = self._done
            if item is not None:
                try:
                    result = self._work(item)
                except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
                    failure = error
            before.wait()
            # Only the thread whose turn it is gets here. It holds no lock, because delivering may wait.
            if not self._stopped and not self._deliver_or_fail(result, failure):
                self._over = self._stopped = True
            done.set()
            del item, result, failure  # frees the item's maps, and breaks a cycle as in `run`

    def _deliver_or_fail(self, result: Result | None, failure: BaseException | None) -> bool:
        try:
            if failure is not None:
                raise failure
            return self._deliver(result)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._error = error
            return False
        finally:
            del result, failure  # as in `run`


def use_one_torch_thread() -> None:
    """Let torch use one thread in this thread from now on, and leave all others as they are.

    `torch.set_num_threads` applies to the calling thread, but also sets the number for new threads: a
    short-lived thread restores that.
    """
    if torch.get_num_threads() == 1:
        return
    default = _in_a_new_thread(torch.get_num_threads)
    torch.set_num_threads(1)
    _in_a_new_thread(lambda: torch.set_num_threads(default))


def _in_a_new_thread(function: Callable[[], Result]) -> Result:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join()
    return results[0]
