"""The two background threads of a loader: one prepares segments, one gathers and transforms batches.

The gathering thread goes on into the next prepared segment, up to `prefetch` batches ahead of the trainer, so
that an epoch's first batch is ready before the last batch of the previous epoch is consumed.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream import tracing
from cachestream.config import NO_THREADS
from cachestream.errors import EpochError
from cachestream.training.batch_producer import BatchProducer, use_one_torch_thread
from cachestream.training.batches.mapped_shards import locate_batches
from cachestream.training.batches.prefetcher import check_process
from cachestream.training.batches.transfer import make_transfer
from cachestream.training.prepare import Preparer
from cachestream.training.ranks import Deadlines, find_job, find_ranks, warn_if_early
from cachestream.training.rendezvous import Cancelled
from cachestream.training.schedule import CLOSED, Schedule

if TYPE_CHECKING:
    import torch

    from cachestream.storage.cache import Cache
    from cachestream.training.batches.transfer import BatchTransform
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.rendezvous import ProcessGroup
    from cachestream.training.segment import Request

_CHECK_FILLING_S: Final = 2.0  # between two checks of the workers that fill the cache
_RANKS_POLL_S: Final = 0.25  # between two checks for a request of another rank
_JOIN_S: Final = 5.0
_EXIT_JOIN_S: Final = 30.0  # longer than an unanswered call to the ranks' store takes
_URGENT_OPEN_S: Final = 0.1  # opening shards ahead while the trainer waits
_AHEAD_OPEN_S: Final = 15.0  # well below the deadline at which other ranks give this one up
_OPEN_AT_ONCE: Final = 16

# At most half of the trainer's timeout, so that the error that names the late rank comes first: also after a
# wait for a lock that this rank holds, if LOCK_TIMEOUT_S of the catalogue is below the other half.
_RANKS_DEADLINE_S: Final = 60.0

_EARLY: Final = "an EpochLoader was asked for its batches, length or dataset"

_instances = itertools.count()
_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class Pipeline:
    """Owner of the two threads, which end with `stop`, with the loader, and with the interpreter."""

    def __init__(
        self,
        cache: Cache,
        options: LoaderOptions,
        prefetch: int,
        device: torch.device | str | int | None,
        transform: BatchTransform | None,
    ) -> None:
        self._closed = closed = threading.Event()
        self.transfer = make_transfer(device, prefetch + 2)
        deadlines = Deadlines(0.9 * options.timeout_s, min(_RANKS_DEADLINE_S, 0.5 * options.timeout_s))
        common = options.to_compare()
        find = functools.partial(find_ranks, next(_instances), common, cache.cache_id, deadlines, closed)
        self.schedule = Schedule(prefetch)
        self.preparer = Preparer(cache, options, find, closed, self.schedule.in_trainer)
        self._producer = BatchProducer(
            self.schedule, self.transfer, options, prefetch, transform, cache.quarantine
        )
        self.job: ProcessGroup | None = None  # of this process, since `join_job` found it
        self._warned_early = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=target, name=f"cachestream-{name}", daemon=True)
            for name, target in (("prepare", self._prepare_loop), ("gather", self._gather_loop))
        ]

    def start(self) -> None:
        """Start the threads, once. Raises EpochError in a forked child."""
        check_process(self._pid)
        if self._closed.is_set():
            raise EpochError(CLOSED)
        new = [thread for thread in self._threads if thread.ident is None]
        if not new:
            return
        self._warned_early = warn_if_early(
            _EARLY, "it answers for one process alone, until a later call finds the others"
        )
        _stop_all_at_exit()
        _pipelines.add(self)
        try:
            for thread in new:
                thread.start()
        except RuntimeError as error:
            self.stop()
            raise EpochError(f"{error}: {NO_THREADS}") from error

    def join_job(self) -> bool:
        """Join the `torch.distributed` job of this process if it is a new one; return whether it is.

        Epochs are prepared with its ranks after the next jump. A job that has ended is kept: its ranks must
        not go on as single ones. Raises EpochError in a forked child.
        """
        job = find_job()
        if job is None or job == self.job:
            return False
        check_process(self._pid)
        if self.preparer.num_ranks == 1 and job.size > 1 and not self._warned_early:
            warnings.warn(
                f"{_EARLY} before torch.distributed.init_process_group(), and answered for one process alone: it is rank "
                f"{job.rank} of {job.size} from now on, and its epochs are shorter. Call init_process_group() first",
                stacklevel=5,
            )
        self.preparer.join(job, self.schedule.generation + 1)
        self.job = job
        return True

    def stop(self, join: bool = True, join_s: float = _JOIN_S) -> None:
        """Stop the threads and release the leases.

        Waits up to `join_s` for each thread. Without `join` (in garbage collection) the gathering thread
        waits for its batches in flight.
        """
        if self._pid != os.getpid():
            return
        self._closed.set()
        self.schedule.stop()
        self._threads = [thread for thread in self._threads if thread.is_alive()]  # frees those never started
        if not join:
            return
        if self._producer.prefetcher is not None:
            self._producer.prefetcher.close(join_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(join_s)
        # Threads that still run are joined again at exit.
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    # --- preparing

    def _prepare_loop(self) -> None:
        schedule, preparer, checked_s, opening = self.schedule, self.preparer, 0.0, False
        while True:
            schedule.activity["prepare"] = "waiting for its time"
            if time.monotonic() - checked_s >= _CHECK_FILLING_S:
                preparer.check_filling()
                checked_s = time.monotonic()
            pause_s = _CHECK_FILLING_S if preparer.num_ranks <= 1 else _RANKS_POLL_S
            asked = schedule.wait_request(2 * preparer.last_s, 0.0 if opening else pause_s)
            if asked is None:
                preparer.finish()
                preparer.forget()
                return
            request, due = asked
            try:
                if not due and not (schedule.may_prepare_early(request) and preparer.requested(request)):
                    opening = self._open_some()
                    continue
                schedule.activity["prepare"] = f"preparing epoch {request.epoch}"
                self._prepare(request)
                opening = True
            except Cancelled:
                preparer.finish()
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                # The frames would keep the lease and maps of the failed segment as long as the error lives.
                traceback.clear_frames(error.__traceback__)
                schedule.fail(request, error)
                # Afterwards: a rank that was stopped may have locked the catalogue, and the error names it.
                preparer.finish()

    def _prepare(self, request: Request) -> None:
        schedule = self.schedule
        with tracing.span("prepare", epoch=request.epoch):
            segment = self.preparer.prepare(
                request,
                lambda: schedule.superseded(request),
                lambda: _URGENT_OPEN_S if schedule.urgent() else _AHEAD_OPEN_S,
            )
        wanted = False
        try:
            segment.locations = locate_batches(segment.order, segment.plan, segment.rank, segment.maps)
            wanted = self.schedule.add(segment)
        finally:
            if not wanted:
                segment.close()

    def _open_some(self) -> bool:
        """Open a few more shards of the running segment before its batches need them; True if more are left."""
        segment = self.schedule.gathering
        if segment is None or segment.maps.all_mapped:
            return False
        maps = segment.maps
        self.schedule.activity["prepare"] = "opening shards"
        room = max(0, min(_OPEN_AT_ONCE, maps.max_open - maps.num_mapped))
        missing = np.flatnonzero(~maps.mapped)[:room]
        # The gathering thread handles damaged shards when it reaches them.
        return bool(len(missing)) and not maps.open(missing, ahead=True)

    # --- gathering

    def _gather_loop(self) -> None:
        use_one_torch_thread()
        schedule, prefetcher = self.schedule, self._producer.prefetcher
        while True:
            schedule.activity["gather"] = "waiting for a prepared epoch"
            segment = schedule.next_segment()
            if segment is None:
                if prefetcher is not None:
                    prefetcher.close(_JOIN_S)
                return
            schedule.activity["gather"] = f"gathering epoch {segment.request.epoch}"
            try:
                self._producer.run(segment)
            except Cancelled:
                continue
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                schedule.fail(segment.request, error)


def _stop_all_at_exit() -> None:
    """Have `_stop_all` run first at exit: a daemon thread that is then in torch crashes the process."""
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def _stop_all() -> None:
    for pipeline in list(_pipelines):
        pipeline.stop(join_s=_EXIT_JOIN_S)
