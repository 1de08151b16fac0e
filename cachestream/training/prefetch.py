"""Two threads that work ahead: one prepares segments, one gathers batches or sees to it, and they flow from epoch to epoch.

The gathering thread goes on into the next prepared segment, up to `prefetch` batches ahead of the trainer, so an
epoch's first batch is there before the last one of the epoch before is consumed.
"""

from __future__ import annotations

import atexit
import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from cachestream.config import NO_THREADS
from cachestream.errors import EpochError
from cachestream.training.epoch import Request, Segment
from cachestream.training.feed import check_process
from cachestream.training.flow import can_flow
from cachestream.training.gathering import Gathering
from cachestream.training.places import PlacesAhead
from cachestream.training.prepare import LOOK_S, Preparer
from cachestream.training.ranks import Cancelled, Job, warn_if_early
from cachestream.training.schedule import Schedule
from cachestream.training.transfer import Transfer

__all__ = ["Engine"]

_LISTEN_S: Final = 0.25  # how often a rank looks whether another one asks for the next segment
_JOIN_S: Final = 5.0
_EXIT_JOIN_S: Final = 30.0  # longer than a call to the store of the ranks takes that is not answered
_URGENT_OPEN_S: Final = 0.5  # how long a waiting trainer waits for shards that are opened ahead
_AHEAD_OPEN_S: Final = 15.0  # well below the deadline at which other ranks would take this one for dead
_OPEN_AT_ONCE: Final = 16

_EARLY: Final = "an EpochLoader was asked for its batches, length or dataset"

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
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

    def join(self, job: Job) -> None:
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
            segment.places = PlacesAhead(
                segment.order,
                segment.plan,
                segment.place,
                segment.maps,
                self._executor,
                blocks=not (self._gathering.feed and can_flow(segment)),
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
