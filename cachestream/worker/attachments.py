"""The processes that need a worker: they are attached to it, and replace it if it is killed.

Each attached process holds a locked, empty file for as long as it lives. The attach lock makes "is a worker
there?" and "I need it" one step: no process attaches to a worker that is about to end because no process
needs it.

A process that releases the worker removes its file. A process that dies leaves the file, whose name says for
how long the worker is to go on, so that a job that is started again finds it at work.

A supervisor that is killed, by a lack of memory or with its container, cannot tell the trainers, which would
go on for ever over what was cached by then. So each attached process monitors the supervisor.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from cachestream.config import NO_THREADS
from cachestream.errors import CacheFullError, CacheLockedError, CacheStreamError, WorkerError
from cachestream.linux import open_private
from cachestream.storage.layout import Directory, remove_if_there
from cachestream.storage.locks import HeldFile, is_held, lock_file, locked, remove_unheld
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.status import forget_lost_worker, has_worker, lost_worker, warn_of_loss
from cachestream.worker.health import (
    BREAKER_WINDOW_S,
    Death,
    is_crash_loop,
    longest_pause_s,
    recent_deaths,
)

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

_SUFFIX: Final = ".attached"
ATTACH_TIMEOUT_S: Final = 60.0
LINGER_AT_MOST_S: Final = 86_400.0
_LOOK_S: Final = 1.0
_SETTLED_S: Final = 60.0  # the death of a worker that has lived so long is not counted as a repetition

logger = logging.getLogger("cachestream")


# Attachments of this process; they last as long as it does, also where the caller dropped the Worker.
_own: set[HeldFile] = set()


def release(attachment: HeldFile) -> None:
    """End a need for the worker."""
    attachment.release(unlink=True)
    _own.discard(attachment)


@atexit.register
def _release_at_exit() -> None:
    """Release all attachments at an orderly exit; after an error a restarted job may need the workers."""
    if not hasattr(sys, "last_value"):
        for attachment in list(_own):
            release(attachment)


def _attach_timeout(path: str, timeout_s: float) -> CacheLockedError:
    return CacheLockedError(f"{path} was held for {timeout_s:.0f} s; look for a stopped process")


class Attachments:
    """The processes that need the worker of the cache in `directory`."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._dead_since_s: dict[str, float] = {}

    def attach_lock(self, timeout_s: float = ATTACH_TIMEOUT_S) -> HeldFile:
        """Return the lock to hold while deciding whether a worker is there.

        Raises CacheLockedError at the deadline.
        """
        path = self._directory.worker_file("attach.lock")
        lock = lock_file(path, timeout_s=timeout_s)
        if lock is None:
            raise _attach_timeout(path, timeout_s)
        return lock

    def locked(self) -> AbstractContextManager[None]:
        """Hold the attach lock during the block; raises CacheLockedError as `attach_lock`."""
        path = self._directory.worker_file("attach.lock")
        return locked(path, ATTACH_TIMEOUT_S, _attach_timeout(path, ATTACH_TIMEOUT_S))

    def attach(self, linger_s: float = 0.0) -> HeldFile:
        """Register a need for the worker until `release`, or until `linger_s` after this process has died."""
        name = f"{os.getpid()}-{secrets.token_hex(6)}-{1000 * linger_s:.0f}{_SUFFIX}"
        held = lock_file(self._directory.worker_file(name), timeout_s=ATTACH_TIMEOUT_S)
        if held is None:
            raise CacheLockedError(f"{self._directory.worker_file(name)} was removed; try again")
        _own.add(held)
        self._remove_dead()  # the job that the worker waited for is here
        return held

    def release_own(self) -> None:
        """Release the attachments of this process."""
        for held in list(_own):
            if os.path.dirname(held.path) == self._directory.worker:
                release(held)

    def is_needed(self) -> bool:
        """True if the worker is detached, or a process that needs it lives or lingers."""
        return any(self._look()) or self._is_requested("detached")

    def is_used(self) -> bool:
        """True if the worker is detached or a process that needs it lives."""
        return self._look()[0] or self._is_requested("detached")

    def _look(self) -> tuple[bool, bool]:
        """(a process that needs the worker lives, one of them died less than its `linger_s` ago).

        Removes the files of all other processes.
        """
        lives, lingers, now_s = False, False, self._clock()
        for path in self._attached():
            if is_held(path):
                lives = True
            elif now_s - self._dead_since_s.setdefault(path, now_s) < _linger_s(path):
                lingers = True
            elif not remove_unheld(path):  # a process that attaches has made it, and locks it now
                lives = True
        return lives, lingers

    def _attached(self) -> list[str]:
        names = [name for name in os.listdir(self._directory.worker) if name.endswith(_SUFFIX)]
        return list(map(self._directory.worker_file, names))

    def _remove_dead(self) -> None:
        for path in self._attached():
            remove_unheld(path)

    def request_stop(self) -> None:
        """Ask the worker to stop."""
        self._request("stop")

    def stop_requested(self) -> bool:
        return self._is_requested("stop")

    def detach(self) -> None:
        """Ask the worker to go on when no process needs it any more."""
        self._request("detached")

    def clear_requests(self) -> None:
        """Remove earlier requests to the worker, and the files of dead processes."""
        self._remove_dead()
        for name in ("stop", "detached"):
            path = self._directory.worker_file(name)
            with translated_disk_errors(path):
                remove_if_there(path)

    def _request(self, name: str) -> None:
        path = self._directory.worker_file(name)
        with translated_disk_errors(path):
            os.close(open_private(path, os.O_WRONLY | os.O_CREAT))

    def _is_requested(self, name: str) -> bool:
        return os.path.exists(self._directory.worker_file(name))


def _linger_s(path: str) -> float:
    """The time for which the worker is to go on after the process that held the file `path` has died."""
    digits = path.removesuffix(_SUFFIX).rpartition("-")[2]
    return min(int(digits) / 1000, LINGER_AT_MOST_S) if digits.isdecimal() else 0.0


class WorkerMonitor:
    """Checks the worker of `cache` every second in a thread, while `is_needed()` and until `close`.

        runs ─ killed ─▶ lost ─ pause ─▶ replaced by the first monitor to get the attach lock ─▶ runs
        runs ─ stopped, done or failed ─▶ over: it is not replaced
        lost ─ the fifth time in ten minutes, soon after the start ─▶ failed, for all monitors

    The pause is random; at most 0.5 s, doubled with each death soon after a start. `process` is the worker if
    this process has started it: the monitor reaps it.
    """

    def __init__(
        self,
        cache: Cache,
        process: subprocess.Popen[bytes] | None,
        start_another: Callable[[], subprocess.Popen[bytes]],
        is_needed: Callable[[], bool],
    ) -> None:
        self.process = process
        self._cache = cache
        self._start = start_another
        self._is_needed = is_needed
        self._deaths: list[Death] = []
        self._since_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cachestream-worker", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            if process is not None:
                process.kill()
                process.wait(timeout=5.0)
            raise WorkerError(f"{error}: {NO_THREADS}") from error

    def will_replace(self) -> bool:
        """True if the worker is lost and is about to be replaced."""
        return self._thread.is_alive() and lost_worker(self._cache.directory) is not None

    def close(self) -> None:
        """Stop the monitor."""
        self._over.set()

    def end(self, timeout_s: float) -> None:
        """Stop the monitor, and wait until the ended process is reaped and the thread has ended."""
        self.close()
        if self.process is not None:
            self.process.wait(timeout=timeout_s)
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        try:
            while not self._over.wait(_LOOK_S) and self._is_needed():
                try:
                    if not self._look():
                        break
                except (CacheStreamError, OSError) as error:
                    logger.warning("%s: monitoring its worker: %s", self._cache.path, error)
        finally:
            if self.process is not None:
                self.process.wait()  # no other code reaps it

    def _look(self) -> bool:
        """Replace a lost worker; False if there is nothing left to monitor."""
        directory = self._cache.directory
        if lost_worker(directory) is not None:
            self._replace()
            return True
        # In this order: a worker that is killed in between is found lost by the second call.
        if has_worker(directory) or lost_worker(directory) is not None:
            return True
        self._log_failure()
        return False

    def _replace(self) -> None:
        now_s = time.monotonic()
        self._deaths = [*self._deaths[-9:], Death(now_s, 1, progressed=now_s - self._since_s > _SETTLED_S)]
        if is_crash_loop(self._deaths, now_s, 1):
            self._give_up()
            return
        warn_of_loss(self._cache, "another is started, which goes on where it stopped")
        if self._over.wait(random.uniform(0.0, longest_pause_s(self._deaths))):
            return
        try:
            self._start_another()
        except (CacheFullError, CacheLockedError) as error:
            self._deaths.pop()  # caused by others: it may be over soon, and is no fault of the worker
            logger.warning("%s: no worker can be started for now: %s", self._cache.path, error)
        except CacheStreamError as error:
            logger.warning("%s: another worker could not be started: %s", self._cache.path, error)
        self._since_s = time.monotonic()

    def _start_another(self) -> None:
        attachments = Attachments(self._cache.directory)
        with attachments.locked():
            is_lost = lost_worker(self._cache.directory) is not None
            if is_lost and self._is_needed() and not attachments.stop_requested():
                if self.process is not None:
                    self.process.wait(timeout=5.0)
                self.process = self._start()
                logger.warning("%s: another worker fills it now", self._cache.path)

    def _give_up(self) -> None:
        num_deaths = len(recent_deaths(self._deaths, self._deaths[-1].at_s))
        message = (
            f"its workers were killed {num_deaths} times within {BREAKER_WINDOW_S / 60:.0f} minutes, soon "
            "after they had started: the system's log says by what (a lack of memory?); mend that, and start "
            "another"
        )
        with Attachments(self._cache.directory).locked():
            if lost_worker(self._cache.directory) is not None:
                self._cache.filling.record("failed", message)
                forget_lost_worker(self._cache.directory)

    def _log_failure(self) -> None:
        """Log once that the worker has failed; training goes on without it."""
        # Reading the state would recreate the catalogue of a cache that was removed.
        if os.path.exists(self._cache.catalogue.path):
            state = self._cache.filling.state()
            if state.phase == "failed":
                logger.error("%s is not filled any more: %s", self._cache.path, state.message)
