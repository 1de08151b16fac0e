"""The two background threads of a loader: one prepares segments, one gathers and transforms batches.

The gathering thread goes on into the next prepared segment, up to `prefetch` batches ahead of the trainer, so
that an epoch's first batch is ready before the last batch of the previous epoch is consumed.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from cachestream.config import NO_THREADS, with_generator
from cachestream.errors import CorruptShardError, EpochError
from cachestream.permutation import mix_key
from cachestream.training.batches.batch_queue import BatchGroup, QueuedBatch
from cachestream.training.batches.collate import packed
from cachestream.training.batches.feed import Feed, Flow, can_flow, check_process
from cachestream.training.batches.locations import LocationsAhead
from cachestream.training.batches.segment_reader import Gathered, read_batches
from cachestream.training.batches.transfer import BatchTransform, Transfer
from cachestream.training.prepare import CHECK_FILLING_S, Preparer
from cachestream.training.ranks import warn_if_early
from cachestream.training.rendezvous import Cancelled, ProcessGroup
from cachestream.training.schedule import Schedule
from cachestream.training.segment import Request, Segment
from cachestream.training.threads import OrderedThreads, use_one_torch_thread

_MOST_THREADS: Final = 2  # two threads saturate the memory bandwidth


class _Work(NamedTuple):
    """Batches to be completed. `segment` keeps their maps alive."""

    segment: Segment
    gathered: Gathered | Flow


class Gathering:
    """The work of the gathering thread; a second thread shares it if batches are transformed."""

    def __init__(
        self,
        schedule: Schedule,
        preparer: Preparer,
        transfer: Transfer,
        transform: BatchTransform | None,
        quarantine: Callable[[int, str], None],
        feed: Feed | None,
    ) -> None:
        self._schedule = schedule
        self._preparer = preparer
        self._transfer = transfer
        self._transform = None if transform is None else with_generator(transform)
        self._quarantine = quarantine
        self.feed = feed

    def run(self, segment: Segment) -> None:
        """Queue all batches of `segment` as they are gathered: a few small ones or a large one at a time."""
        num_threads = 1 if self._transform is None else self._num_threads(segment)
        workers = OrderedThreads(num_threads, self._finish, self._deliver)
        assert segment.locations is not None
        batches = read_batches(
            segment,
            segment.locations,
            self._transfer.pool,
            lambda *damage: self._on_damage(segment, *damage),
            workers.settle,
            self.feed if can_flow(segment) else None,
        )
        # `map` keeps no reference to a batch; a generator would, and one more buffer in use makes the CPU
        # cache less effective.
        if workers.run(map(functools.partial(_Work, segment), batches)) and segment.last:
            self._schedule.put(BatchGroup(segment, is_end=True))

    def _finish(self, work: _Work) -> tuple[BatchGroup, BaseException | None]:
        """Complete batches, up to the first that fails, and send them to the trainer's device."""
        segment, gathered = work
        if isinstance(gathered, Flow):
            return gathered, None
        group = BatchGroup(segment)
        try:
            gathered.copy.run()
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
            elif not self._preparer.alone:
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
        wanted = self._schedule.wanted(flow)
        if not wanted:
            flow.discard()
        return wanted

    @staticmethod
    def _num_threads(segment: Segment) -> int:
        return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // segment.plan.ranks))

    def _on_damage(self, segment: Segment, shard_id: int, error: CorruptShardError) -> None:
        if self._schedule.stale(segment.request):
            raise Cancelled  # the lease has ended, so the shard may have been evicted
        self._quarantine(shard_id, str(error))


_RANKS_POLL_S: Final = 0.25  # between two checks for a request of another rank
_JOIN_S: Final = 5.0
_EXIT_JOIN_S: Final = 30.0  # longer than an unanswered call to the ranks' store takes
_URGENT_OPEN_S: Final = 0.5  # opening shards ahead while the trainer waits
_AHEAD_OPEN_S: Final = 15.0  # well below the deadline at which other ranks give this one up
_OPEN_AT_ONCE: Final = 16

_EARLY: Final = "an EpochLoader was asked for its batches, length or dataset"

_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class Pipeline:
    """Owner of the two threads, which end with `stop`, with the loader, and with the interpreter."""

    def __init__(
        self,
        schedule: Schedule,
        preparer: Preparer,
        transfer: Transfer,
        gathering: Gathering,
        closed: threading.Event,
    ) -> None:
        self.schedule = schedule
        self.preparer = preparer
        self.transfer = transfer
        self._closed = closed
        self._warned_early = False
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._executor = ThreadPoolExecutor(1, "cachestream-locate")
        self._gathering = gathering

    def start(self) -> None:
        """Start the threads, once. Raises EpochError in a forked child."""
        check_process(self._pid)
        if self._closed.is_set():
            raise EpochError("this EpochLoader is closed; make a new one")
        if self._threads:
            return
        self._warned_early = warn_if_early(
            _EARLY, "it answers for one process alone, until a later call finds the others"
        )
        _stop_all_at_exit()
        _pipelines.add(self)
        for name, target in (("prepare", self._prepare_loop), ("gather", self._gather_loop)):
            thread = threading.Thread(target=target, name=f"cachestream-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.stop()
                raise EpochError(f"{error}: {NO_THREADS}") from error
            self._threads.append(thread)

    def join(self, job: ProcessGroup) -> None:
        """Prepare epochs with the ranks of `job` after the next jump. Raises EpochError in a forked child."""
        check_process(self._pid)
        if self.preparer.was_alone and job.size > 1 and not self._warned_early:
            warnings.warn(
                f"{_EARLY} before torch.distributed.init_process_group(), and answered for one process alone: it is rank "
                f"{job.rank} of {job.size} from now on, and its epochs are shorter. Call init_process_group() first",
                stacklevel=5,
            )
        self.preparer.join(job, self.schedule.generation + 1)

    def stop(self, join: bool = True, join_s: float = _JOIN_S) -> None:
        """Stop the threads and release the leases.

        Waits up to `join_s` for each thread. Without `join` (in garbage collection) the gathering thread
        waits for its batches in flight.
        """
        if self._pid != os.getpid():
            return
        self._closed.set()
        close_all(self.schedule.stop())
        self._executor.shutdown(wait=False, cancel_futures=True)
        if not join:
            return
        if self._gathering.feed is not None:
            self._gathering.feed.close(join_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(join_s)
        # Threads that still run are joined again at exit.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self.preparer.forget()

    # --- preparing

    def _prepare_loop(self) -> None:
        schedule, preparer = self.schedule, self.preparer
        while True:
            schedule.activity["prepare"] = "waiting for its time"
            preparer.check_filling()
            asked = schedule.wait_request(2 * preparer.last_s, self._wait_s())
            if asked is None:
                preparer.finish()
                preparer.forget()
                return
            request, due = asked
            try:
                if not due and not self._requested_by_other(request):
                    self._open_some()
                    continue
                schedule.activity["prepare"] = f"preparing epoch {request.epoch}"
                self._prepare(request)
            except Cancelled:
                continue
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                # The frames would keep the maps of the failed segment for as long as the error is referenced.
                traceback.clear_frames(error.__traceback__)
                schedule.fail(request, error)

    def _wait_s(self) -> float:
        """The longest wait for the next request before other work is checked, in seconds."""
        if self.schedule.to_open() is not None:
            return 0.0
        return CHECK_FILLING_S if self.preparer.alone else _RANKS_POLL_S

    def _requested_by_other(self, request: Request) -> bool:
        return self.schedule.may_prepare_early(request) and self.preparer.requested(request)

    def _prepare(self, request: Request) -> None:
        budget_s = _URGENT_OPEN_S if self.schedule.urgent() else _AHEAD_OPEN_S
        segment = self.preparer.prepare(request, lambda: self.schedule.superseded(request), budget_s)
        wanted = False
        try:
            segment.locations = LocationsAhead(
                segment.order, segment.plan, segment.rank, segment.maps, self._executor
            )
            wanted = self.schedule.add(segment)
        finally:
            if not wanted:
                segment.close()

    def _open_some(self) -> None:
        """Open a few more shards of the running segment before its batches need them."""
        segment = self.schedule.to_open()
        if segment is None:
            return
        maps = segment.maps
        self.schedule.activity["prepare"] = "opening shards"
        room = max(0, min(_OPEN_AT_ONCE, maps.max_open - maps.num_mapped))
        missing = np.flatnonzero(~maps.mapped)[:room]
        # The gathering thread handles damaged shards when it reaches them.
        if not len(missing) or maps.open(missing, ahead=True):
            segment.opened_ahead = True

    # --- gathering

    def _gather_loop(self) -> None:
        use_one_torch_thread()
        schedule, feed = self.schedule, self._gathering.feed
        while True:
            schedule.activity["gather"] = "waiting for a prepared epoch"
            segment = schedule.next_segment()
            if segment is None:
                if feed is not None:
                    feed.close(_JOIN_S)
                return
            schedule.activity["gather"] = f"gathering epoch {segment.request.epoch}"
            try:
                self._gathering.run(segment)
            except Cancelled:
                continue
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                schedule.fail(segment.request, error)


def close_all(segments: Iterable[Segment]) -> None:
    """Release the leases of `segments`."""
    for segment in segments:
        segment.close()


def _stop_all_at_exit() -> None:
    """Have `_stop_all` run first at exit: a daemon thread that returns from torch during finalization crashes
    the process.
    """
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def _stop_all() -> None:
    for pipeline in list(_pipelines):
        pipeline.stop(join_s=_EXIT_JOIN_S)
