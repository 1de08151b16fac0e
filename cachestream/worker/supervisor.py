"""The supervisor of a cache: it starts, watches, restarts and stops the sampling processes.

The supervisor reads no samples and holds no state that must survive. It loads neither torch nor fsspec,
unless the user's sampler or eviction function does (the latter comes with the source and the transform). Its
process (`main`) loads what it needs while the caller opens the source, takes the job, becomes the supervisor
of the cache, answers, and supervises.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType
from typing import BinaryIO, Final

from cachestream.errors import CacheError, CacheFullError, CacheLockedError, CacheStreamError, WorkerError
from cachestream.linux import move, name_process, open_private
from cachestream.storage.cache import Cache
from cachestream.storage.filling import RESTS, SHARED, WAITS
from cachestream.storage.layout import remove_if_there
from cachestream.storage.locks import HeldFile, lock_file
from cachestream.storage.os_errors import CatalogueDamagedError, DiskFailedError, translated_disk_errors
from cachestream.storage.reservations import Owner
from cachestream.storage.status import describe_skipped, shortage_of_disk
from cachestream.storage.telemetry import NO_SPACE, NOTHING_FREE, STATE_NAMES, WRITING, Board, History
from cachestream.worker.attachments import Attachments
from cachestream.worker.child_process import ChildProcess, ForkServer
from cachestream.worker.cluster.connection import describe
from cachestream.worker.cluster.supervision import SharingProcess
from cachestream.worker.health import GiveUpError, SamplingProcesses, SystemErrors, was_suspended
from cachestream.worker.job import Job, share, unpack
from cachestream.worker.lister import Lister
from cachestream.worker.listings import Listings
from cachestream.worker.passes import begin_next, begin_or_resume, follow_mixture, has_failed_units
from cachestream.worker.processes import (
    detach_from_terminal,
    read_frame,
    reap_orphans,
    reset_inherited_state,
    write_frame,
)
from cachestream.worker.user_order import UserOrder

_TICK_S: Final = 0.1
_HOUSEKEEPING_S: Final = 1.0
_SIZES_S: Final = 60.0
_STOP_S: Final = 4.0
_LEAVE_S: Final = 1.0
_END_CHECKS: Final = 40
_LOG_AGAIN_S: Final = 60.0
_LOG_BYTES: Final = 64 * 1024
_LOCK_TIMEOUT_S: Final = 1.0
_FULL_AFTER_S: Final = 3.0  # by then all processes that wait for space have tried again

logger = logging.getLogger("cachestream.worker")


class Supervisor:
    """Runs the processes of one job until it is stopped; `run` returns the exit code."""

    def __init__(self, job: Job, cache: Cache, lock: HeldFile, server: ForkServer) -> None:
        self._job, self._cache, self._lock, self._server = job, cache, lock, server
        self._board = Board(cache.directory.worker_file("board"))
        self._record = FillRecord(job, cache, self._board)
        self._history = History(cache.directory.worker_file("history"))
        self._attachments = Attachments(cache.directory)
        server.load(job.protocols, job.source_module)
        job_fd = share(job)
        self._samplers = SamplingProcesses(job, server, job_fd, self._board)
        self._lister = Lister(job, server, job_fd, Listings(cache.directory))
        self._sharing: SharingProcess | None = None
        if job.cluster is not None and job.cluster.group:
            self._shared = Owner(cache.directory, SHARED)  # held until this process ends
            self._sharing = SharingProcess(job, server, job_fd)
        self.order = UserOrder(job)
        self._stop = threading.Event()
        self._look_for_changes = self._has_promoted = self._resting = False
        self.asks_failed_again = False  # after the pass that is open, by one more
        self._system_errors = SystemErrors()
        self._full_logged_s = -math.inf
        self._housekeeping_at_s = self._sizes_at_s = 0.0
        self._ticked_s, self._resumed_s = math.inf, -math.inf
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop.is_set():
            self._board.end()
            os._exit(128 + number)  # the second signal ends the process at once; its children die with it
        self._stop.set()

    def start(self, *, is_complete: bool) -> None:
        """Start the sampling processes; if the pass `is_complete`, then look for changes of the remote."""
        self._look_for_changes = is_complete and self._job.growing
        self._record.write_looking(self._look_for_changes or self.asks_failed_again)
        self._record.write("filling")
        self._record.write_transform()
        now_s = time.monotonic()
        self._board.reset(os.getpid(), self._job.num_workers, now_s)
        if self._job.growing:
            self._lister.begin()
        if self._sharing is not None:
            self._cache.filling.share()  # before a process can take what others make
            self._sharing.begin(now_s)
        self._samplers.begin(now_s)
        self._samplers.start_due(now_s)

    def run(self) -> int:
        """Watch until asked to stop, until no process needs the worker any more, or until it fails."""
        try:
            while not self._try(self._leave):
                self._try(self._tick)
                self._stop.wait(_TICK_S)
            self._end()
        except Exception as error:  # a process's main: all who wait get the error
            output = error.output if isinstance(error, GiveUpError) else traceback.format_exc()
            logger.exception("giving up")
            self._give_up(str(error) or type(error).__name__, output)
            return 1
        try:
            if self._record.state == "filling" or self._record.message == RESTS:
                self._record.write("stopped")
        except CacheFullError:
            logger.exception("the end could not be recorded")
        self._cache.close()
        self._board.end()
        return 0

    def _give_up(self, message: str, output: str) -> None:
        try:
            if self._lock.is_ours:
                try:
                    # Until this process ends: no process is to attach to a worker that has failed.
                    with suppress(CacheLockedError):
                        self._attachments.attach_lock(_LEAVE_S)
                    self._end()
                finally:  # it may fail for the same reason
                    self._record.write("failed", message, output)
                    self._board.end()
        except (CacheStreamError, OSError):
            logger.exception("the end could not be recorded")  # the children die with this process

    def _leave(self) -> bool:
        """Take the attach lock until this process ends, if it is to end and no process attaches meanwhile."""
        if not self._should_end():
            return False
        try:
            lock = self._attachments.attach_lock(_LEAVE_S)
        except CacheLockedError:
            # After a signal, do not wait for a process that was stopped while it attached.
            return self._stop.is_set()
        is_over = False
        try:
            is_over = self._should_end()
        finally:
            if not is_over:
                lock.release()
        return is_over

    def _should_end(self) -> bool:
        if self._stop.is_set() or self._attachments.stop_requested():
            return True
        if self._record.state == "full" and self._job.when_full == "stop":
            return True
        return not self._attachments.is_needed()

    def _try(self, step: Callable[[], bool]) -> bool:
        """Return the result of `step`, or False if it fails for a reason that may be over soon."""
        now_s = time.monotonic()
        try:
            try:
                return step()
            except CatalogueDamagedError as error:
                logger.warning("%s; rebuilding it", error)
                self._cache.rebuild(error)
        except CacheLockedError:
            # By a process that was stopped. If it is one of ours, the next tick replaces it: this process has
            # waited for the lock, and was not suspended.
            self._ticked_s = time.monotonic()
            logger.exception("the catalogue is locked")
        except (CacheFullError, DiskFailedError) as error:  # the step is repeated until that is over
            if now_s - self._full_logged_s > _LOG_AGAIN_S:
                self._full_logged_s = now_s
                logger.warning("%s; waiting for that", error)
        except (CacheError, OSError):  # too few descriptors or processes, a failed read: temporary or lasting
            before, self._system_errors = self._system_errors, self._system_errors.again(now_s)
            if self._system_errors.is_lasting or self._stop.is_set():
                raise
            if self._system_errors.since_s != before.since_s:
                logger.exception("going on, unless it lasts")
        return False

    def _tick(self) -> bool:
        if not self._lock.is_ours:
            raise GiveUpError("", f"{self._lock.path} is gone: the cache was removed")
        now_s = time.monotonic()
        if was_suspended(now_s - self._ticked_s, self._job.hang_timeout_s):
            self._resumed_s = now_s  # the job was suspended: no process could show life
        self._ticked_s = now_s
        # Before the catalogue is asked: a stopped process may hold its lock until it is killed here.
        self._samplers.check(now_s, self._resumed_s)
        self._lister.tick(now_s, self._resumed_s)
        if self._sharing is not None:
            self._sharing.tick(now_s, self._resumed_s)
        if now_s >= self._housekeeping_at_s:
            self._housekeeping_at_s = now_s + _HOUSEKEEPING_S
            self._reap_orphans()
            self._housekeep(now_s)
        if self._samplers.unrecorded:  # before another process reads them
            self._cache.filling.record_suspects(self._samplers.unrecorded)
            self._samplers.unrecorded.clear()
        if self._samplers.have_ended:
            self._next_pass(now_s)
        self._samplers.start_due(now_s)
        if not self._resting:
            self._record.write_filling(self._samplers.running, now_s, self._shared_message)
        return True

    @property
    def _shared_message(self) -> str:
        return "" if self._sharing is None else self._sharing.message

    @property
    def _processes(self) -> list[ChildProcess]:
        sharing = [] if self._sharing is None else [self._sharing.process]
        return [*self._samplers.processes, self._lister.process, *sharing]

    def _reap_orphans(self) -> None:
        """End the processes that dead ones leave behind, and reap orphans; no other code does."""
        self._server.ended.end_members()
        reap_orphans([one.pid for one in self._processes])

    def _next_pass(self, now_s: float) -> None:
        """Begin another pass, or rest. All processes have ended, as nothing was left to claim."""
        if self._look_for_changes:
            self._look_for_changes = False
            self._lister.look_for_changes()
        if self._lister.running and not self._resting:
            return  # the pass may grow until the listing ends
        self._has_promoted |= self._lister.promote()  # kept until a pass over the new listing has begun
        is_due = self._has_promoted or self.asks_failed_again
        has_more = begin_next(self._cache, self._job, self.order, is_due=is_due)
        has_changed, self._has_promoted, self.asks_failed_again = self._has_promoted, False, False
        self._record.write_looking(False)
        if not has_more:
            if not self._resting:
                self._record.write_complete(self._shared_message)
                self._resting = True
            return
        self._resting = False
        if self._sharing is not None:
            self._cache.filling.share()
        if self._job.growing and not has_changed:
            self._lister.look_for_changes()
        self._samplers.begin(now_s)

    def _housekeep(self, now_s: float) -> None:
        if now_s >= self._sizes_at_s:
            self._sizes_at_s = now_s + _SIZES_S
            if (problem := self._cache.check_sizes()) is not None:
                logger.warning("%s: corrected", problem)
        self._cache.enforce_limit()
        state = self._cache.filling.state()
        if self._job.mix:
            follow_mixture(self._cache, self._job, state)
        if self._record.write_anew(state.catalogue_id):
            self._resting = False
        self._history.append(
            state.num_samples,
            self._cache.size_bytes,
            state.size_limit,
            state.written_samples,
            state.evicted_samples,
            self._board.totals().fetched_bytes,
            state.snapshots,
        )

    def _end(self) -> None:
        self._lister.stop()
        processes = self._processes
        for process in processes:
            process.ask_to_stop()
        deadline_s = time.monotonic() + _STOP_S
        while any(process.running for process in processes) and time.monotonic() < deadline_s:
            for process in processes:
                process.reap()
            time.sleep(0.01)
        for process in processes:
            process.end()
        self._server.ended.wait(_END_CHECKS)
        self._attachments.clear_requests()
        try:
            self._cache.recover()  # removes unfinished shards of processes that were killed
            self._housekeep(time.monotonic())
        except CacheFullError:
            logger.exception("the clean-up is left to the next process that opens the cache")


class FillRecord:
    """The state of the filling and its reason, recorded in the catalogue when they change."""

    def __init__(self, job: Job, cache: Cache, board: Board) -> None:
        self._job, self._cache, self._board = job, cache, board
        self.state = self.message = ""
        self._is_looking: bool | None = None  # unknown at first: an earlier supervisor may have been killed
        self._waited_at_bytes = -1
        self._room_expected_s = -math.inf
        self._catalogue_id: str | None = None

    def write(self, state: str, message: str = "", output: str = "") -> None:
        """Record the state, its reason, and the last output of a process that has failed."""
        written_bytes = self._board.totals().written_bytes
        # Filling may take the room that an epoch leaves between two ticks: then it waits for another epoch.
        waits_anew = message == WAITS and written_bytes > self._waited_at_bytes
        if (state, message) == (self.state, self.message) and not waits_anew:
            return
        if message == WAITS:
            self._waited_at_bytes = written_bytes
        catalogue_id = self._cache.filling.record(state, message, output)
        self._catalogue_id = self._catalogue_id or catalogue_id
        self.state, self.message = state, message

    def write_looking(self, is_looking: bool) -> None:
        """Record whether the remote is still searched for changes, so that another pass may follow."""
        if is_looking != self._is_looking:
            self._cache.filling.record_looking(is_looking)
            self._is_looking = is_looking

    def write_transform(self) -> None:
        """Record the transform of this worker."""
        self._cache.filling.record_transform(self._job.transform)

    def write_complete(self, shared: str) -> None:
        """Record that the pass is complete, and for which reasons the cache lacks samples of the remote.

        `shared`: the message of a group of caches that does not answer.

        A transform that drops some samples does so on purpose, one that drops all hardly does.
        """
        state = self._cache.filling.state()
        dropped = self._board.totals().dropped
        all_dropped = f"transform returned None for {dropped} samples, which leaves them out"
        dropped_all = all_dropped if dropped and not state.num_samples else ""
        reasons = shared, describe_skipped(state.failures), dropped_all
        self.write("complete", "; ".join(filter(None, reasons)))

    def write_filling(self, running: Collection[int], now_s: float, message: str) -> None:
        """Record that the `running` processes fill the cache, or that all of them wait for space."""
        states = self._board.states()
        found = {states[index] for index in running}
        if self._board.sharing_slot["state"] == NO_SPACE:  # the shards of others do not fit
            found = {STATE_NAMES[NO_SPACE] if one == STATE_NAMES[NOTHING_FREE] else one for one in found}
        if not found or found - {STATE_NAMES[NO_SPACE], STATE_NAMES[WRITING]}:
            self.write("filling", message)
        elif STATE_NAMES[WRITING] not in found:  # such a process may be about to find that there is no space
            self._write_full(now_s)

    def _write_full(self, now_s: float) -> None:
        evicts = self._job.when_full == "evict" and self._cache.eviction != "none"
        state = self._cache.filling.state()
        # Files outside the cache take the space, and may be removed at any time.
        is_short = bool(shortage_of_disk(self._cache.directory, state.min_free))
        has_room = state.phase != self.state  # the process that made room recorded another state
        is_used = evicts and self._cache.reservations.leases.count() > 0
        if is_short or has_room or is_used:
            self._room_expected_s = now_s
        if now_s - self._room_expected_s > _FULL_AFTER_S:
            self.write("full", RESTS if evicts else "")
        else:
            self.write("filling", WAITS if is_used and not is_short else "")

    def write_anew(self, catalogue_id: str | None) -> bool:
        """Record the state again if the catalogue was rebuilt from the shards; False if it was not."""
        if catalogue_id == self._catalogue_id:
            return False
        logger.warning("the catalogue was lost, and was made anew from the shards: going on with that")
        self._catalogue_id = catalogue_id
        is_looking, self._is_looking = bool(self._is_looking), None
        self.write_looking(is_looking)
        self.write_transform()
        self.state = ""  # a pass is open again, or the next tick corrects that
        self.write("filling")
        return True


def main() -> None:
    """The main of the supervisor: its job comes through stdin, one answer goes to a pipe of its own.

    The user's code that is loaded here may print.
    """
    name_process("cs-supervisor")
    reset_inherited_state()
    os.dup2(2, 1)
    answer = os.fdopen(int(sys.argv[1]), "wb")
    os.set_inheritable(answer.fileno(), False)
    server = ForkServer(sys.argv[2:], answer)  # first: it must not inherit the files and locks below
    try:
        supervisor = _begin(server, answer)
        code = 0 if supervisor is None else supervisor.run()
    finally:
        server.close()
    logging.shutdown()
    os._exit(code)  # the lock is released with the process: a free lock means that nothing of it is left


def _begin(server: ForkServer, answer: BinaryIO) -> Supervisor | None:
    """Take the job, start its processes and answer; None if there is nothing to supervise."""
    try:
        job: Job = read_frame(sys.stdin.buffer)
    except EOFError:
        return None  # the source could not be opened, or the caller has died
    sys.path[:] = job.sys_path  # the user's code is imported as in the caller
    try:
        cache = Cache(job.root, eviction=unpack(job.payload).eviction if job.custom_eviction else None)
        lock = _become_the_supervisor(cache)
        cache.catalogue.patience_s = 0.0  # this process rebuilds it where others wait
        _open_log(cache)
        removed = cache.recover()
        _reset_budget(cache)
        lock.write(describe(job.cluster).encode())
        supervisor = Supervisor(job, cache, lock, server)
        try:
            has_more = begin_or_resume(cache, job, supervisor.order)
        except CatalogueDamagedError as error:
            cache.rebuild(error)
            has_more = begin_or_resume(cache, job, supervisor.order)
        supervisor.asks_failed_again = has_failed_units(cache)
        supervisor.start(is_complete=not has_more)
    except CacheStreamError as error:
        write_frame(answer, error)
        return None
    except Exception as error:  # a process's main: the caller gets the traceback
        write_frame(answer, WorkerError(f"the worker cannot start: {error}", traceback.format_exc()))
        raise
    try:
        with answer:
            write_frame(answer, "ready")
    except BrokenPipeError:
        return None  # the caller has died
    logger.info("started, %d left-over files removed", removed)
    detach_from_terminal()
    return supervisor


def _become_the_supervisor(cache: Cache) -> HeldFile:
    lock = lock_file(cache.directory.worker_file("supervisor.lock"), timeout_s=_LOCK_TIMEOUT_S)
    if lock is None:
        raise CacheLockedError(f"another supervisor runs for {cache.path}; attach to it by starting again")
    return lock


def _reset_budget(cache: Cache) -> None:
    """Remove the budget file: bytes spent under a mistyped bandwidth limit could delay others for days."""
    budget = cache.directory.worker_file("budget")
    with translated_disk_errors(budget, "removing it"):
        remove_if_there(budget)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A log file that only its owner can read, because it holds the output of transforms."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_private)

    def doRollover(self) -> None:  # noqa: N802  logging's name
        if self.stream is not None:
            self.stream.close()
        with suppress(OSError):
            move(self.baseFilename, self.baseFilename + ".1")
        self.stream = self._open()


def _open_log(cache: Cache) -> None:
    path = cache.directory.worker_file("log.txt")
    with translated_disk_errors(path):
        handler = _PrivateLog(path, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
