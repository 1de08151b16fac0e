"""Two threads that work ahead: one prepares segments, one gathers and transforms batches, from epoch to epoch.

The gathering thread goes on into the next prepared segment, up to `prefetch` batches ahead of the trainer, so an
epoch's first batch is there before the last one of the epoch before is consumed.
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
from cachestream.training.prepare import LOOK_S, Preparer
from cachestream.training.ranks import warn_if_early
from cachestream.training.rendezvous import Cancelled, ProcessGroup
from cachestream.training.schedule import Schedule
from cachestream.training.segment import Request, Segment
from cachestream.training.threads import OrderedThreads, use_threads

_MOST_THREADS: Final = 2  # two copy as fast as the memory goes here


class _Work(NamedTuple):
    """Batches to be completed, of `segment`: it keeps their maps."""

    segment: Segment
    gathered: Gathered | Flow


class Gathering:
    """The work of the gathering thread; where batches are transformed, a second one shares it."""

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
        """Put all batches of `segment` into the queue, as they are gathered: a few small ones or a large one at a time."""
        threads = self._threads(segment)
        use_threads(1)  # torch's own
        hands = 1 if self._transform is None else threads
        crew = OrderedThreads(hands, self._finish, self._deliver)
        assert segment.places is not None
        batches = read_batches(
            segment,
            segment.places,
            self._transfer.pool,
            lambda *damage: self._on_damage(segment, *damage),
            crew.settle,
            self.feed if can_flow(segment) else None,
        )
        # By `map`, which does not keep what it gave: each batch kept is one more buffer, and a slower cache.
        if crew.run(map(functools.partial(_Work, segment), batches)) and segment.last:
            self._schedule.put(BatchGroup(segment, is_end=True))

    def _finish(self, work: _Work) -> tuple[BatchGroup, BaseException | None]:
        """Complete batches, up to the first that fails, and send them where they are trained on."""
        segment, gathered = work
        if isinstance(gathered, Flow):
            return gathered, None
        parcel = BatchGroup(segment)
        try:
            gathered.copy.run()
            self._send(parcel, gathered)
        except BaseException as error:  # noqa: BLE001 - raised by `_deliver`, after what came before it
            return parcel, error
        return parcel, None

    def _send(self, parcel: BatchGroup, gathered: Gathered) -> None:
        segment, send = parcel.segment, self._transfer.send
        schema, done = segment.snapshot.schema, segment.request.done + gathered.first
        for columns, size, skipped in zip(gathered.batches, gathered.sizes, gathered.skipped, strict=True):
            done += 1
            if size:
                staged = send(packed(columns, schema), self._transform_of(segment, done))
                parcel.batches.append(QueuedBatch(staged, done, size, skipped))
            elif not self._preparer.alone:
                raise CorruptShardError(
                    f"all samples of a batch of epoch {segment.request.epoch} lie in damaged shards, and the "
                    "ranks must make the same steps; run 'cachestream verify CACHE --repair' and start again"
                )

    def _transform_of(self, segment: Segment, number: int) -> Callable[[Any], Any] | None:
        """The transform for batch `number` of an epoch on this rank: it draws the same in any thread, and after a resume."""
        if self._transform is None:
            return None
        transform, device = self._transform, self._transfer.device
        seed = mix_key(segment.transform_key, number) & (2**63 - 1)
        return lambda batch: transform(batch, lambda: torch.Generator(device).manual_seed(seed))

    def _deliver(self, finished: tuple[BatchGroup, BaseException | None]) -> bool:
        parcel, error = finished
        if isinstance(parcel, Flow):
            return self._follow(parcel)
        wanted = not len(parcel) or self._schedule.put(parcel)
        if error is None:
            return wanted
        try:
            raise error
        finally:
            del error, finished  # its traceback has this frame

    def _follow(self, flow: Flow) -> bool:
        """Have `flow` gathered, until the trainer has had most of it; False when nobody wants it any more."""
        flow.begin(self._threads(flow.segment))
        if self._schedule.put(flow):
            while self._schedule.follow(flow):
                flow.ask_ahead()
        wanted = self._schedule.wanted(flow)
        if not wanted:
            flow.discard()
        return wanted

    @staticmethod
    def _threads(segment: Segment) -> int:
        return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // segment.plan.ranks))

    def _on_damage(self, segment: Segment, shard_id: int, error: CorruptShardError) -> None:
        if self._schedule.stale(segment.request):
            raise Cancelled  # its lease has ended: the shard may be gone by right
        self._quarantine(shard_id, str(error))


_LISTEN_S: Final = 0.25  # how often a rank looks whether another one asks for the next segment
_JOIN_S: Final = 5.0
_EXIT_JOIN_S: Final = 30.0  # longer than a call to the store of the ranks takes that is not answered
_URGENT_OPEN_S: Final = 0.5  # how long a waiting trainer waits for shards that are opened ahead
_AHEAD_OPEN_S: Final = 15.0  # well below the deadline at which other ranks would take this one for dead
_OPEN_AT_ONCE: Final = 16

_EARLY: Final = "an EpochLoader was asked for its batches, length or dataset"

_engines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class Pipeline:
    """Owns the two threads; they end with `stop`, with their loader, and with the interpreter."""

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
        self._told_early = False
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._executor = ThreadPoolExecutor(1, "cachestream-places")
        self._gathering = gathering

    def start(self) -> None:
        """Start the threads, once. Raises EpochError in a forked child, which has none of them."""
        check_process(self._pid)
        if self._closed.is_set():
            raise EpochError("this EpochLoader is closed; make a new one")
        if self._threads:
            return
        self._told_early = warn_if_early(
            _EARLY, "it answers for one process alone, until a later call finds the others"
        )
        _stop_all_at_exit()
        _engines.add(self)
        for name, target in (("prepare", self._prepare_loop), ("gather", self._gather_loop)):
            thread = threading.Thread(target=target, name=f"cachestream-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.stop()
                raise EpochError(f"{error}: {NO_THREADS}") from error
            self._threads.append(thread)

    def join(self, job: ProcessGroup) -> None:
        """Prepare for the ranks of `job` after the next jump, in place of those before. Raises EpochError in a forked child."""
        check_process(self._pid)
        if self.preparer.was_alone and job.size > 1 and not self._told_early:
            warnings.warn(
                f"{_EARLY} before torch.distributed.init_process_group(), and answered for one process alone: it is rank "
                f"{job.rank} of {job.size} from now on, and its epochs are shorter. Call init_process_group() first",
                stacklevel=5,
            )
        self.preparer.join(job, self.schedule.generation + 1)

    def stop(self, join: bool = True, join_s: float = _JOIN_S) -> None:
        """End the threads and the leases; waits for them, up to `join_s`, unless without `join` (garbage collection): what
        is being gathered is waited for by the thread that sees to it then.
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
        # Those that are still there are waited for again at the exit.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self.preparer.forget()

    # --- preparing

    def _prepare_loop(self) -> None:
        schedule, preparer = self.schedule, self.preparer
        while True:
            schedule.doing["prepare"] = "waiting for its time"
            preparer.look_after_filling()
            asks = schedule.wait_request(2 * preparer.last_s, self._patience_s())
            if asks is None:
                preparer.finish()
                preparer.forget()
                return
            request, due = asks
            try:
                if not due and not self._asked_by_another(request):
                    self._open_some()
                    continue
                schedule.doing["prepare"] = f"preparing epoch {request.epoch}"
                self._prepare(request)
            except Cancelled:
                continue
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                # The frames would hold the maps of what was not prepared for as long as the error is looked at.
                traceback.clear_frames(error.__traceback__)
                schedule.fail(request, error)

    def _patience_s(self) -> float:
        """How long to wait for the next request without looking at anything else."""
        if self.schedule.to_open() is not None:
            return 0.0
        return LOOK_S if self.preparer.alone else _LISTEN_S

    def _asked_by_another(self, request: Request) -> bool:
        return self.schedule.may_follow(request) and self.preparer.requested(request)

    def _prepare(self, request: Request) -> None:
        budget_s = _URGENT_OPEN_S if self.schedule.urgent() else _AHEAD_OPEN_S
        segment = self.preparer.prepare(request, lambda: self.schedule.superseded(request), budget_s)
        wanted = False
        try:
            segment.places = LocationsAhead(
                segment.order, segment.plan, segment.place, segment.maps, self._executor
            )
            wanted = self.schedule.add(segment)
        finally:
            if not wanted:
                segment.close()

    def _open_some(self) -> None:
        """Open a few more shards of the running segment, before its batches ask for them."""
        segment = self.schedule.to_open()
        if segment is None:
            return
        maps = segment.maps
        self.schedule.doing["prepare"] = "opening shards"
        room = max(0, min(_OPEN_AT_ONCE, maps.max_open - maps.num_mapped))
        missing = np.flatnonzero(~maps.mapped)[:room]
        # Damage is dealt with by the thread that gathers, when it comes to those shards.
        if not len(missing) or maps.open(missing, ahead=True):
            segment.opened_ahead = True

    # --- gathering

    def _gather_loop(self) -> None:
        schedule, feed = self.schedule, self._gathering.feed
        while True:
            schedule.doing["gather"] = "waiting for a prepared epoch"
            segment = schedule.next_segment()
            if segment is None:
                if feed is not None:
                    feed.close(_JOIN_S)
                return
            schedule.doing["gather"] = f"gathering epoch {segment.request.epoch}"
            try:
                self._gathering.run(segment)
            except Cancelled:
                continue
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                schedule.fail(segment.request, error)


def close_all(segments: Iterable[Segment]) -> None:
    """Give the shards of `segments` free."""
    for segment in segments:
        segment.close()


def _stop_all_at_exit() -> None:
    """Before the interpreter goes: a daemon thread that comes back from torch after that crashes the process."""
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def _stop_all() -> None:
    for engine in list(_engines):
        engine.stop(join_s=_EXIT_JOIN_S)
