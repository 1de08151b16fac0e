"""The supervisor of a cache: the only process that fills it, with one thread and one loop.

It forks the sampling processes, hands units out to them, reserves space, and publishes what they have
written, with the progress of the pass. It reads no samples, runs no code of the user's, and holds no state
that must survive. Its process (`main`) loads what its children need while the caller opens the source; then
it takes the job, becomes the supervisor of the cache, answers, and supervises.
"""

from __future__ import annotations

import gc
import importlib
import logging
import logging.handlers
import math
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from types import FrameType
from typing import BinaryIO, Final

from cachestream.errors import CacheError, CacheFullError, CacheLockedError, CacheStreamError, WorkerError
from cachestream.linux import adopt_orphans, move, name_process, open_private
from cachestream.storage.cache import Cache
from cachestream.storage.filling import RESTS
from cachestream.storage.layout import remove_if_there
from cachestream.storage.locks import HeldFile, lock_file
from cachestream.storage.os_errors import CatalogueDamagedError, DiskFailedError, translated_disk_errors
from cachestream.storage.publish import CatalogueReplacedError
from cachestream.storage.telemetry import Board, History
from cachestream.worker.attachments import Attachments
from cachestream.worker.channel import Channel, Message
from cachestream.worker.child_process import ChildProcess, Forks, Guardian
from cachestream.worker.cluster import Sharing, describe, ray_module
from cachestream.worker.fill_record import FillRecord
from cachestream.worker.health import (
    GiveUpError,
    SamplingProcess,
    SamplingProcesses,
    SystemErrors,
    was_suspended,
)
from cachestream.worker.job import Job
from cachestream.worker.lister import Lister
from cachestream.worker.listings import Listings
from cachestream.worker.passes import begin_next, begin_or_resume, follow_mixture, has_failed_units
from cachestream.worker.planner import Planner
from cachestream.worker.processes import (
    detach_from_terminal,
    read_frame,
    reset_inherited_state,
    write_frame,
)
from cachestream.worker.requests import Requests
from cachestream.worker.user_process import UnwantedError, UserCode

_TICK_S: Final = 0.1
_PRESSED_S: Final = 0.02  # between two looks at what may make space, while a process waits for it
_HOUSEKEEPING_S: Final = 1.0
_SIZES_S: Final = 60.0
_STOP_S: Final = 4.0
_LEAVE_S: Final = 1.0
_END_CHECKS: Final = 40
_LOG_AGAIN_S: Final = 60.0
_LOG_BYTES: Final = 64 * 1024
_LOCK_TIMEOUT_S: Final = 1.0
_LISTER, _SHARING = -1, -2  # as `Requests` knows them
# The modules that the processes need; the module of the source is known when there is a job.
_PRELOADED: Final = (
    "cachestream.worker.sampling.sampler",
    "cachestream.formats.files",
)

logger = logging.getLogger("cachestream.worker")


class Supervisor:
    """Runs the processes of one job until it is stopped; `run` returns the exit code."""

    def __init__(self, job: Job, cache: Cache, lock: HeldFile, forks: Forks, order: UserCode) -> None:
        self._job, self._cache, self._lock, self._forks = job, cache, lock, forks
        self._clock = forks.clock
        self._order = order
        order.must_stop = self._should_end
        self._board = Board(cache.directory.worker_file("board"))
        self._record = FillRecord(job, cache, self._board)
        self._history = History(cache.directory.worker_file("history"))
        self._attachments = Attachments(cache.directory, self._clock)
        is_shared = job.cluster is not None and bool(job.cluster.group)
        self._planner = Planner(job, cache, is_shared=is_shared)
        self._lister = Lister(job, forks, Listings(cache.directory))
        self._requests = Requests(
            job, cache, self._planner, self._board, self._lister.keeps_names, self._clock
        )
        children = [self._sampling_process(index) for index in range(job.num_workers)]
        self._samplers = SamplingProcesses(
            children, self._board, job.hang_timeout_s, self._requests.has_ended
        )
        self._numbers = {child.process: child.index for child in children}
        self._numbers[self._lister.process] = _LISTER
        self._sharing: Sharing | None = None
        if is_shared:
            sharing: Sharing = ray_module("supervision").SharingProcess(
                job, cache, forks, self._planner, self._requests
            )
            self._sharing, self._numbers[sharing.process] = sharing, _SHARING
        self._look_for_changes = self._has_promoted = self._resting = self._is_stopping = False
        self.asks_failed_again = False  # after the pass that is open, by one more
        self._system_errors = SystemErrors()
        self._full_logged_s = -math.inf
        self._housekeeping_at_s = self._sizes_at_s = self._tick_at_s = self._next_pass_at_s = 0.0
        self._ticked_s, self._resumed_s = math.inf, -math.inf

    def _sampling_process(self, index: int) -> SamplingProcess:
        job, board = self._job, self._board

        def run(end: socket.socket) -> int:
            module = importlib.import_module("cachestream.worker.sampling.sampler")
            if job.cluster and job.cluster.num_actors:
                module = ray_module("remote_sampling")
            code: int = module.run(
                end, job, index, board.slot(index), self._requests.status, self._requests.schema
            )
            return code

        return SamplingProcess(index, self._forks.process(f"process {index}", run), board)

    def heed_signals(self) -> None:
        """End in order at SIGTERM and SIGINT, which also end a wait."""
        self._woken, self._wake = socket.socketpair()  # both are kept open
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._forks.selector.register(self._woken, selectors.EVENT_READ, None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            self._board.end()
            os._exit(128 + number)  # the second signal ends the process at once; its children die with it
        self._is_stopping = True

    def start(self, *, is_complete: bool) -> None:
        """Start the sampling processes; if the pass `is_complete`, then look for changes of the remote."""
        self._look_for_changes = is_complete and self._job.growing
        self._record.write_looking(self._look_for_changes or self.asks_failed_again)
        self._record.write("filling")
        self._record.write_transform()
        now_s = self._clock()
        self._board.reset(os.getpid(), self._job.num_workers, now_s)
        self._lister.begin()
        if self._sharing is not None:
            self._sharing.begin(now_s)
        self._samplers.begin(now_s)
        self._start_due(now_s)

    def _begin_sampling(self, now_s: float) -> None:
        self._requests.begin()
        self._samplers.begin(now_s)
        self._start_due(now_s)

    def _start_due(self, now_s: float) -> None:
        """Start the sampling processes that are due; raises OSError if the system refuses: they stay due."""
        try:
            self._samplers.start_due(now_s)
        finally:
            for process, number in self._numbers.items():
                if number >= 0 and process.channel is not None:
                    self._requests.has_started(number, process.channel)

    def run(self) -> int:
        """Watch until asked to stop, until no process needs the worker any more, or until it fails."""
        try:
            while not self.turn():
                pass
            self._end()
        except Exception as error:  # a process's main: all who wait get the error
            output = error.output if isinstance(error, GiveUpError) else traceback.format_exc()
            logger.exception("giving up")
            self._give_up(str(error) or type(error).__name__, output)
            return 1
        try:
            if self._record.state == "filling" or self._record.message == RESTS:
                self._record.write("stopped")
        except CacheError:
            logger.exception("the end could not be recorded")
        self._cache.close()
        self._board.end()
        return 0

    # --- the loop

    def turn(self) -> bool:
        """Serve the processes once, and do what is due; True if the worker is to end."""
        now_s = self._clock()
        if now_s >= self._tick_at_s:
            self._tick_at_s = now_s + _TICK_S
            if self._try(self._leave):
                return True
            self._try(self._tick)
        self._attend()
        return False

    def _attend(self) -> None:
        """Serve the processes, and wait until one of them tells something, or until the next tick."""
        is_pressing = self._try(lambda: self._requests.serve(self._clock()))
        timeout_s = max(0.0, self._tick_at_s - self._clock())
        if is_pressing:
            timeout_s = 0.0
        elif self._requests.is_pressed:
            timeout_s = min(timeout_s, _PRESSED_S)
        for key, _ in self._forks.selector.select(timeout_s):
            process = key.data
            if process is None:
                with suppress(BlockingIOError):
                    self._woken.recv(64)
                self._tick_at_s = 0.0
            elif key.fileobj is process.channel:
                self._hear(process)
            else:
                process.read_output()
        for process in self._numbers:
            if process.channel is not None and process.channel.is_blocked:
                process.channel.flush()

    def _hear(self, process: ChildProcess) -> None:
        """Act on the messages of a process; one that has ended is reaped at once."""
        channel, number = process.channel, self._numbers.get(process)
        messages = process.receive()
        if channel is None or number is None:
            return
        if not messages:
            self._tick_at_s = 0.0
        for message in messages:
            if process.channel is channel:  # else what was handed out is void
                self._try(partial(self._handle, number, channel, message))

    def _handle(self, number: int, channel: Channel, message: Message) -> bool:
        sharing = self._sharing if number == _SHARING else None
        if sharing is None or not sharing.handle(number, channel, message):
            self._requests.handle(number, channel, message)
        return True

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
            return self._is_stopping
        is_over = False
        try:
            is_over = self._should_end()
        finally:
            if not is_over:
                lock.release()
        return is_over

    def _should_end(self) -> bool:
        if self._is_stopping or self._attachments.stop_requested():
            return True
        if self._record.state == "full" and self._job.when_full == "stop":
            return True
        return not self._attachments.is_needed()

    def _try(self, step: Callable[[], bool]) -> bool:
        """Return the result of `step`, or False if it fails for a reason that may be over soon."""
        now_s = self._clock()
        try:
            try:
                return step()
            except CatalogueDamagedError as error:
                logger.warning("%s; rebuilding it", error)
                self._cache.rebuild(error)
                self._begin_anew()
            except CatalogueReplacedError:
                self._begin_anew()
        except UnwantedError:
            self._tick_at_s = 0.0  # the next tick ends the loop
        except CacheLockedError:
            # By a process that was stopped, a trainer for one: this process has waited for it, and was not
            # suspended.
            self._ticked_s = self._clock()
            logger.exception("the catalogue is locked")
        except (CacheFullError, DiskFailedError) as error:  # the step is repeated until that is over
            if now_s - self._full_logged_s > _LOG_AGAIN_S:
                self._full_logged_s = now_s
                logger.warning("%s; waiting for that", error)
        except (CacheError, OSError):  # too few descriptors or processes, a failed read: temporary or lasting
            before, self._system_errors = self._system_errors, self._system_errors.again(now_s)
            if self._system_errors.is_lasting or self._is_stopping:
                raise
            if self._system_errors.since_s != before.since_s:
                logger.exception("going on, unless it lasts")
        return False

    def _begin_anew(self) -> None:
        """Go on with a catalogue that was rebuilt from the shards: what was handed out is void."""
        if self._requests.is_closed:
            return  # the processes are about to end
        logger.warning("the catalogue was lost, and was made anew from the shards: going on with that")
        self._samplers.end()
        for number in self._numbers.values():
            self._requests.has_ended(number)
        begin_or_resume(self._cache, self._job, self._order)
        self._record.write_anew()
        self._resting = False
        self._begin_sampling(self._clock())

    def _tick(self) -> bool:
        if not self._lock.is_ours:
            raise GiveUpError("", f"{self._lock.path} is gone: the cache was removed")
        now_s = self._clock()
        if was_suspended(now_s - self._ticked_s, self._job.hang_timeout_s):
            self._resumed_s = now_s  # the job was suspended: no process could show life
        self._ticked_s = now_s
        self._forks.lower_sessions()
        self._samplers.check(now_s, self._resumed_s)
        self._lister.tick(now_s, self._resumed_s)
        if self._sharing is not None and self._sharing.tick(now_s, self._resumed_s) is not None:
            self._requests.has_ended(_SHARING)
        if now_s >= self._housekeeping_at_s:
            self._housekeeping_at_s = now_s + _HOUSEKEEPING_S
            self._forks.end_orphans()
            self._housekeep(now_s)
        if self._samplers.have_ended and now_s >= self._next_pass_at_s:
            self._next_pass_at_s = now_s + (_HOUSEKEEPING_S if self._resting else 0.0)
            self._requests.record()
            self._next_pass(now_s)
        self._start_due(now_s)
        if not self._resting:
            self._record.write_filling(self._samplers.running, now_s, self._shared_message)
        return True

    @property
    def _shared_message(self) -> str:
        return "" if self._sharing is None else self._sharing.message

    def _next_pass(self, now_s: float) -> None:
        """Begin another pass, or rest. All processes have ended, as nothing was left to hand out."""
        if self._planner.is_open and not self._resting:
            self._samplers.begin(now_s)  # units of a process that died wait
            return
        if self._look_for_changes:
            self._look_for_changes = False
            self._lister.look_for_changes()
        if self._lister.running and not self._resting:
            return  # the pass may grow until the listing ends
        self._has_promoted |= self._lister.promote()  # kept until a pass over the new listing has begun
        is_due = self._has_promoted or self.asks_failed_again
        has_more = begin_next(self._cache, self._job, self._order, is_due=is_due)
        has_changed, self._has_promoted, self.asks_failed_again = self._has_promoted, False, False
        self._record.write_looking(False)
        if not has_more:
            if not self._resting:
                self._record.write_complete(self._shared_message)
                self._resting = True
            return
        self._resting = False
        if self._job.growing and not has_changed:
            self._lister.look_for_changes()
        self._begin_sampling(now_s)

    def _housekeep(self, now_s: float) -> None:
        if now_s >= self._sizes_at_s:
            self._sizes_at_s = now_s + _SIZES_S
            if (problem := self._cache.check_sizes()) is not None:
                logger.warning("%s: corrected", problem)
        self._cache.enforce_limit()
        state = self._cache.filling.state()
        if not self._record.is_of(state.catalogue_id):
            raise CatalogueReplacedError(f"{self._cache.path}: the catalogue was replaced")
        if self._job.mix:
            follow_mixture(self._cache, self._job, self._planner, state.mixture)
        self._history.append(
            state.num_samples,
            self._cache.size_bytes,
            state.size_limit,
            state.written_samples,
            state.evicted_samples,
            self._board.totals().fetched_bytes,
            state.snapshots,
        )

    def abandon(self) -> None:
        """End all processes: nobody waits for what they do."""
        self._requests.close()
        for process in self._forks.children:
            process.end()
        self._requests.release()
        self._cache.close()

    def _end(self) -> None:
        self._requests.close()
        self._lister.stop()
        processes = self._forks.children
        for process in processes:
            process.ask_to_stop()
        deadline_s = self._clock() + _STOP_S
        while any(process.running for process in processes) and self._clock() < deadline_s:
            self._tick_at_s = self._clock() + 0.01
            self._attend()
            for process in processes:
                process.reap()
        for process in processes:
            process.end()
        for number in self._numbers.values():
            self._requests.has_ended(number)
        self._forks.ended.wait(_END_CHECKS)
        self._attachments.clear_requests()
        try:
            self._requests.release()
            self._requests.record()
            self._cache.recover()  # removes unfinished shards of processes that were killed
            self._housekeep(self._clock())
        except CacheError:
            logger.exception("the clean-up is left to the next process that opens the cache")


def main() -> None:
    """The main of the supervisor: its job comes through stdin, one answer goes to a pipe of its own.

    What is loaded here may print.
    """
    name_process("cs-supervisor")
    reset_inherited_state()
    os.dup2(2, 1)
    answer = os.fdopen(int(sys.argv[1]), "wb")
    os.set_inheritable(answer.fileno(), False)
    guardian = Guardian(answer)  # first: it must not inherit the files and locks below
    adopt_orphans()
    gc.disable()  # what is loaded stays
    for module in _PRELOADED:
        importlib.import_module(module)
    _load(sys.argv[2:])
    try:
        supervisor = _begin(guardian, answer)
        code = 0 if supervisor is None else supervisor.run()
    finally:
        guardian.close()
    logging.shutdown()
    os._exit(code)  # the lock is released with the process: a free lock means that nothing of it is left


def _load(protocols: list[str] | tuple[str, ...]) -> None:
    """Load the fsspec drivers of `protocols`."""
    if protocols:
        remote = importlib.import_module("cachestream.transport.remote")
        for protocol in protocols:
            with suppress(Exception):  # the process that needs the driver reports the error
                remote.load_driver(protocol)


def _begin(guardian: Guardian, answer: BinaryIO) -> Supervisor | None:
    """Take the job, start its processes and answer; None if there is nothing to supervise."""
    try:
        job: Job = read_frame(sys.stdin.buffer)
    except EOFError:
        return None  # the source could not be opened, or the caller has died
    _load(job.protocols)
    if job.source_module:
        importlib.import_module(job.source_module)
    gc.freeze()  # a garbage collection in a child would write to shared memory, and so copy it
    gc.enable()
    sys.path[:] = job.sys_path  # the user's code is imported as in the caller, by the children

    def close_in_child() -> None:
        if not answer.closed:
            answer.close()
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True

    forks = Forks(guardian, close_in_child)
    try:
        order = UserCode(job, forks)
        cache = Cache(job.root, eviction=order.evict if job.custom_eviction else None)
        lock = _become_the_supervisor(cache)
        cache.catalogue.patience_s = 0.0  # this process rebuilds it where others wait
        _open_log(cache)
        removed = cache.recover()
        _reset_budget(cache)
        lock.write(describe(job.cluster).encode())
        try:
            has_more = begin_or_resume(cache, job, order)
        except CatalogueDamagedError as error:
            cache.rebuild(error)
            has_more = begin_or_resume(cache, job, order)
        supervisor = Supervisor(job, cache, lock, forks, order)
        supervisor.heed_signals()
        supervisor.asks_failed_again = has_failed_units(cache)
        supervisor.start(is_complete=not has_more)
    except Exception as error:  # a process's main: the caller gets the traceback
        _refuse(forks, answer, error)
        if isinstance(error, CacheStreamError):
            return None
        raise
    try:
        with answer:
            write_frame(answer, "ready")
    except BrokenPipeError:  # the caller has died
        supervisor.abandon()
        return None
    logger.info("started, %d left-over files removed", removed)
    detach_from_terminal()
    return supervisor


def _refuse(forks: Forks, answer: BinaryIO, error: Exception) -> None:
    """Tell the caller why the worker cannot start, once the process of the user's code has ended: the guardian
    would wait for that.
    """
    for process in forks.children:
        process.end()
    if not isinstance(error, CacheStreamError):
        error = WorkerError(f"the worker cannot start: {error}", traceback.format_exc())
    write_frame(answer, error)


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
