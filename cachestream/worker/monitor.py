"""The monitor of a worker: it replaces a worker that was killed, for as long as this process needs one.

A supervisor that the out-of-memory killer ends, or that ends with its container, cannot tell anybody;
training would go on for ever over what was cached by then.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Final

from cachestream.config import NO_THREADS
from cachestream.errors import CacheFullError, CacheLockedError, CacheStreamError, WorkerError
from cachestream.storage.cache import Cache
from cachestream.storage.status import forget_lost_worker, has_worker, lost_worker, warn_of_loss
from cachestream.worker.attachments import Attachments
from cachestream.worker.health import BREAKER_WINDOW_S, Death, is_crash_loop, longest_pause_s
from cachestream.worker.job import Job
from cachestream.worker.launch import Launch

_LOOK_S: Final = 1.0
_SETTLED_S: Final = 60.0  # the death of a worker that has lived so long is not counted as a repetition

logger = logging.getLogger("cachestream")


class WorkerMonitor:
    """Checks the worker of `cache` every second in a thread, while `is_needed()` and until `close`.

        runs ─ killed ─▶ lost ─ pause ─▶ replaced by the first monitor to get the attach lock ─▶ runs
        runs ─ stopped, done or failed ─▶ over: it is not replaced
        lost ─ the fifth time in ten minutes, soon after the start ─▶ failed, for all monitors

    The pause is random; at most 0.5 s, doubled with each death soon after a start. `process` is the worker if
    this process has started it: the monitor reaps it.
    """

    def __init__(
        self, cache: Cache, job: Job, process: subprocess.Popen[bytes] | None, is_needed: Callable[[], bool]
    ) -> None:
        self.process = process
        self._cache = cache
        self._job = job
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
                    logger.warning("%s: looking after its worker: %s", self._cache.path, error)
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
                self.process = Launch(self._job.protocols).give(self._job)
                logger.warning("%s: another worker fills it now", self._cache.path)

    def _give_up(self) -> None:
        message = (
            f"its workers were killed {len(self._deaths)} times within {BREAKER_WINDOW_S / 60:.0f} minutes, soon after they had "
            "started: the system's log says by what (a lack of memory?); mend that, and start another"
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
