"""The supervisor of a cache: it starts, watches, restarts and stops the sampling processes.

The supervisor reads no samples and holds no state that must survive. It loads neither torch nor fsspec,
unless the user's sampler does.
"""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from cachestream.config import NO_THREADS
from cachestream.errors import CacheError, CacheFullError, CacheLockedError, CacheStreamError
from cachestream.schema import IntArray
from cachestream.storage.cache import Cache
from cachestream.storage.filling import RESTS, WAITS
from cachestream.storage.locks import HeldFile
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.status import describe_skipped, shortage_of_disk
from cachestream.storage.tables import Suspect
from cachestream.storage.telemetry import NO_SPACE, STATE_NAMES, WRITING, Board, History
from cachestream.worker.attachments import Attachments
from cachestream.worker.child import EXIT_FATAL, EXIT_LATER, EXIT_RESTART, SamplingProcess
from cachestream.worker.fork_server import ForkServer
from cachestream.worker.health import (
    Death,
    Trouble,
    is_crash_loop,
    longest_pause_s,
    was_away,
)
from cachestream.worker.job import Job, share, unpack_sampler
from cachestream.worker.lister import Lister, ListingError
from cachestream.worker.order import all_units, check_drawn, draw_curriculum
from cachestream.worker.passes import go_on
from cachestream.worker.processes import end_orphans, reap_orphans
from cachestream.worker.stored_listings import Listings

_TICK_S: Final = 0.1
_HOUSEKEEPING_S: Final = 1.0
_BOOKS_S: Final = 60.0
_STOP_S: Final = 4.0
_LEAVE_S: Final = 1.0
_LATER_PAUSE_S: Final = 2.0
_LOG_AGAIN_S: Final = 60.0
_FULL_AFTER_S: Final = 3.0  # by then all processes that wait for space have tried again

logger = logging.getLogger("cachestream.worker")


class _GiveUpError(Exception):
    """The filling cannot continue; the message and the traceback of the child (`output`) are for the user."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


class Supervisor:
    """Runs the processes of one job until it is stopped; `run` returns the exit code."""

    def __init__(self, job: Job, cache: Cache, lock: HeldFile, server: ForkServer) -> None:
        self._job = job
        self._cache = cache
        self._lock = lock
        self._server = server
        self._board = Board(cache.directory.worker_file("board"))
        server.load(job.protocols)
        job_fd = share(job)
        self._children = [
            SamplingProcess(server, job_fd, job.sys_path, index, self._board)
            for index in range(job.num_workers)
        ]
        self._lister = Lister(job, server, job_fd, Listings(cache.directory))
        self._look_for_changes = False
        self._is_looking: bool | None = None  # unknown at first: an earlier supervisor may have been killed
        self._attachments = Attachments(cache.directory)
        self._history = History(cache.directory.worker_file("history"))
        self._deaths: list[Death] = []
        self._trouble = Trouble()
        self._unrecorded: list[tuple[int, Suspect]] = []
        self._full_logged_s = self._room_expected_s = -math.inf
        self._has_promoted = False
        self._sampler: Any = None
        self._leave_lock: HeldFile | None = None
        self._resting = False
        self._state = self._message = ""
        self._waited_at_bytes = -1
        self._catalogue_id: str | None = None
        self._stop = threading.Event()
        self._housekeeping_at_s = self._books_at_s = 0.0
        self._ticked_s, self._resumed_s = math.inf, -math.inf
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop.is_set():
            self._board.end()
            os._exit(128 + number)  # the second signal ends the process at once; its children die with it
        self._stop.set()

    def run(self) -> int:
        """Watch until asked to stop, until no process needs the worker any more, or until it fails."""
        try:
            while not (self._try(self._should_end) and self._leave()):
                self._try(self._tick)
                self._stop.wait(_TICK_S)
            self._end()
        except Exception as error:  # a process's main: all who wait get the error
            output = error.output if isinstance(error, _GiveUpError) else traceback.format_exc()
            logger.exception("giving up")
            self._give_up(str(error) or type(error).__name__, output)
            return 1
        try:
            if self._state == "filling" or self._message == RESTS:
                self._record_state("stopped")
        except CacheFullError:
            logger.exception("the end could not be recorded")
        self._board.end()
        return 0

    def _give_up(self, message: str, output: str) -> None:
        try:
            if self._lock.is_ours:
                try:
                    # Until this process ends: no process is to attach to a worker that has failed.
                    with suppress(CacheLockedError):
                        self._leave_lock = self._attachments.attach_lock(_LEAVE_S)
                    self._end()
                finally:  # it may fail for the same reason
                    self._record_state("failed", message, output)
                    self._board.end()
        except (CacheStreamError, OSError):
            logger.exception("the end could not be recorded")  # the children die with this process

    def start(self, *, is_complete: bool) -> None:
        """Start the sampling processes; if the pass `is_complete`, look for changes of the remote first."""
        self._look_for_changes = is_complete and self._job.growing
        self._record_looking(self._look_for_changes)
        self._record_state("filling")
        self._board.reset(os.getpid(), self._job.num_workers, time.monotonic())
        if self._job.growing:
            self._lister.begin()
        for child in self._children:
            child.start(time.monotonic())

    def _leave(self) -> bool:
        """Take the attach lock until this process ends; False if a process attached at the last moment."""
        try:
            self._leave_lock = self._attachments.attach_lock(_LEAVE_S)
        except CacheLockedError:
            # After a signal, do not wait for a process that was stopped while it attached.
            return self._stop.is_set()
        if self._should_end():
            return True
        self._leave_lock.release()
        return False

    def _should_end(self) -> bool:
        if self._stop.is_set() or self._attachments.stop_requested():
            return True
        if self._state == "full" and self._job.when_full == "stop":
            return True
        return not self._attachments.is_needed()

    def _try(self, step: Callable[[], bool]) -> bool:
        """The result of `step`; False if it fails for a reason that may be over soon."""
        now_s = time.monotonic()
        try:
            return step()
        except CacheLockedError:
            logger.exception("the catalogue is locked")  # by a process that was stopped, and may continue
        except (CacheFullError, DiskFailedError) as error:  # the step is repeated until that is over
            if now_s - self._full_logged_s > _LOG_AGAIN_S:
                self._full_logged_s = now_s
                logger.warning("%s; waiting for that", error)
        except (CacheError, OSError):  # too few descriptors or processes, a failed read: temporary or lasting
            before, self._trouble = self._trouble, self._trouble.again(now_s)
            if self._trouble.is_lasting or self._stop.is_set():
                raise
            if self._trouble.since_s != before.since_s:
                logger.exception("going on, unless it lasts")
        return False

    def _tick(self) -> bool:
        if not self._lock.is_ours:
            raise _GiveUpError(f"{self._lock.path} is gone: the cache was removed", "")
        now_s = time.monotonic()
        if was_away(now_s - self._ticked_s, self._job.hang_timeout_s):
            self._resumed_s = now_s  # the job was suspended: no process could show life
        self._ticked_s = now_s
        for child in self._children:
            child.kill_if_hanging(now_s, self._resumed_s, self._job.hang_timeout_s)
            self._reap(child, now_s)
        if now_s >= self._housekeeping_at_s:
            self._housekeeping_at_s = now_s + _HOUSEKEEPING_S
            self._reap_orphans()
            self._housekeep()
        self._record_suspects()
        self._watch_lister(now_s)
        if not any(child.process.running or child.start_at_s is not None for child in self._children):
            self._next_pass(now_s)
        for child in self._children:
            if child.start_at_s is not None and now_s >= child.start_at_s:
                child.start(now_s)
        if not self._resting:
            self._record_state(*self._space_state(now_s))
        return True

    def _reap(self, child: SamplingProcess, now_s: float) -> None:
        ended = child.reap(now_s)
        if ended is None:
            return
        death, suspicions, pass_id = ended
        if death.orderly and death.returncode == 0:
            return
        if death.orderly and death.returncode == EXIT_RESTART:
            child.start_at_s = now_s
            return
        if death.orderly and death.returncode == EXIT_LATER:
            child.start_at_s = now_s + _LATER_PAUSE_S
            return
        logger.warning("sampling process %d %s", child.index, death)
        if death.orderly and death.returncode == EXIT_FATAL:
            raise _GiveUpError(_last_error(child.process.last_words), child.process.last_words)
        self._deaths.append(death)
        if is_crash_loop(self._deaths, now_s, self._job.num_workers):
            how = _last_error(child.process.last_words) if death.orderly else f"what they read {death}"
            raise _GiveUpError(
                f"the sampling processes died {len(self._deaths)} times: {how}", child.process.last_words
            )
        self._board.count_restart()
        child.start_at_s = now_s + random.uniform(0.0, longest_pause_s(self._deaths))
        self._unrecorded += [(pass_id, Suspect(one.position, one.weight, str(death))) for one in suspicions]

    def _record_suspects(self) -> None:
        """Record the suspects before another process reads them."""
        if self._unrecorded:
            self._cache.filling.record_suspects(self._unrecorded)
            self._unrecorded.clear()

    def _reap_orphans(self) -> None:
        """Wait for processes that transforms leave behind; no other code does."""
        self._server.listen()
        if self._server.give_up_if_stopped(time.monotonic()):
            logger.warning("the fork server was stopped; processes are started without it")
        waited_for = [pid for child in self._children for pid in child.process.pids] + self._lister.pids
        known = [pid for pid in waited_for if pid is not None]
        if len(known) == len(waited_for):  # else an orphan might be a child whose id is not known yet
            reap_orphans(known)

    def _watch_lister(self, now_s: float) -> None:
        try:
            self._lister.tick(now_s, self._resumed_s)
        except ListingError as error:
            raise _GiveUpError(_last_error(error.output), error.output) from error

    def _next_pass(self, now_s: float) -> None:
        """Begin another pass, or rest. All processes have ended, because there was nothing left to claim."""
        if self._look_for_changes:
            self._look_for_changes = False
            self._lister.look_for_changes()
        if self._lister.running and not self._resting:
            return  # the pass may grow until the listing ends
        self._has_promoted |= self._lister.promote()  # kept until a pass over the new listing has begun
        has_more = go_on(self._cache, self._job, self.draw, has_changed=self._has_promoted)
        has_changed, self._has_promoted = self._has_promoted, False
        self._record_looking(False)
        if not has_more:
            if not self._resting:
                self._record_state("complete", self._missing_message())
                self._resting = True
            return
        self._resting = False
        if self._job.growing and not has_changed:
            self._lister.look_for_changes()
        for child in self._children:
            child.start_at_s = now_s

    def _record_looking(self, looking: bool) -> None:
        """Record whether the remote is still searched for changes, so that another pass may follow."""
        if looking != self._is_looking:
            self._cache.filling.record_looking(looking)
            self._is_looking = looking

    def _missing_message(self) -> str:
        """The reasons for which the cache holds fewer samples than the remote; "" if there are none.

        A transform that drops some samples does so on purpose, one that drops all hardly does.
        """
        state = self._cache.filling.state()
        skipped = describe_skipped(state.failures)
        dropped = self._board.totals().dropped
        all_dropped = f"transform returned None for {dropped} samples, which leaves them out"
        return "; ".join(filter(None, (skipped, all_dropped if dropped and not state.num_samples else "")))

    def draw(self, ordinal: int) -> IntArray:
        """Draw the units of pass `ordinal` by the user's sampler or curriculum."""
        if self._sampler is None:
            self._sampler = unpack_sampler(self._job.sampler)  # kept: its generator continues
        job, sampler = self._job, self._sampler
        if job.kind == "curriculum" and job.num_units is not None:
            share = all_units(job.num_units, job.partition)
            return draw_curriculum(sampler, share, job.num_units, seed=job.seed, ordinal=ordinal)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(ordinal)
        return check_drawn(sampler, job.num_units, job.partition)

    def _space_state(self, now_s: float) -> tuple[str, str]:
        """The state of the filling while it is not over, and a message if all processes wait for space."""
        states = self._board.states()
        running = {states[child.index] for child in self._children if child.process.running}
        if not running or running - {STATE_NAMES[NO_SPACE], STATE_NAMES[WRITING]}:
            return "filling", ""
        if STATE_NAMES[WRITING] in running:  # the process may be about to find that there is no space
            return self._state, self._message
        evicts = self._job.when_full == "evict" and self._cache.eviction != "none"
        state = self._cache.filling.state()
        # Files outside the cache take the space, and may be removed at any time.
        is_short = bool(shortage_of_disk(self._cache.directory, state.min_free))
        has_room = state.phase != self._state  # the process that made room has recorded another state
        is_used = evicts and self._cache.admission.leases.count() > 0
        if is_short or has_room or is_used:
            self._room_expected_s = now_s
        if now_s - self._room_expected_s > _FULL_AFTER_S:
            return "full", RESTS if evicts else ""
        return "filling", WAITS if is_used and not is_short else ""

    def _housekeep(self) -> None:
        if (now_s := time.monotonic()) >= self._books_at_s:
            self._books_at_s = now_s + _BOOKS_S
            if (problem := self._cache.check_books()) is not None:
                logger.warning("%s: corrected", problem)
        self._cache.enforce_limit()
        state = self._cache.filling.state()
        if state.catalogue_id != self._catalogue_id:
            logger.warning("the catalogue was lost, and was made anew from the shards: going on with that")
            self._catalogue_id = state.catalogue_id
            self._record_anew()
        self._history.append(
            state.num_samples,
            self._cache.size_bytes,
            state.size_limit,
            state.written_samples,
            state.evicted_samples,
            self._board.totals().fetched_bytes,
            state.snapshots,
        )

    def _record_state(self, state: str, message: str = "", output: str = "") -> None:
        written_bytes = self._board.totals().written_bytes
        # Filling may take the room that an epoch leaves between two ticks: then it waits for another epoch.
        waits_anew = message == WAITS and written_bytes > self._waited_at_bytes
        if (state, message) == (self._state, self._message) and not waits_anew:
            return
        if message == WAITS:
            self._waited_at_bytes = written_bytes
        catalogue_id = self._cache.filling.record(state, message, output)
        self._catalogue_id = self._catalogue_id or catalogue_id
        self._state, self._message = state, message

    def _record_anew(self) -> None:
        """Record the state of the filling in a rebuilt catalogue; the shards do not hold it."""
        looking, self._is_looking = bool(self._is_looking), None
        self._record_looking(looking)
        self._state, self._resting = "", False  # a pass is open again, or the next tick corrects that
        self._record_state("filling")

    def _end(self) -> None:
        self._lister.stop()
        for child in self._children:
            child.process.ask_to_stop()
        deadline_s = time.monotonic() + _STOP_S
        while any(child.process.running for child in self._children) and time.monotonic() < deadline_s:
            for child in self._children:
                child.reap(time.monotonic())
            time.sleep(0.01)
        for child in self._children:
            child.process.end()
        end_orphans()
        self._attachments.clear_requests()
        try:
            self._cache.recover()  # removes unfinished shards of processes that were killed
            self._housekeep()
        except CacheFullError:
            logger.exception("left to the next who opens the cache")


def _last_error(output: str) -> str:
    """The message of the error at the end of `output`."""
    lines = output.strip().splitlines()
    if not lines:
        return "the worker cannot go on"
    message = lines[-1].partition(": ")[2] or lines[-1]
    return f"{message}: {NO_THREADS}" if "can't start new thread" in message else message
