"""Listing in the background: a process lists page by page into the cache, watched by the supervisor.

The process may be killed at any point: the next one continues after the last name that is stored. It prints
empty lines as signs of life.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import threading
import time
import traceback
from typing import Final

from cachestream.errors import CacheFullError, CacheLockedError, SourceError, SourceUnavailableError
from cachestream.listing.names import read_mark
from cachestream.sources.base import as_growing
from cachestream.storage.cache import Cache
from cachestream.storage.os_errors import DiskFailedError
from cachestream.transport import metering
from cachestream.transport.remote_errors import backoff_delays
from cachestream.worker.child import (
    EXIT_FATAL,
    EXIT_LATER,
    ChildProcess,
    end_now,
    live_with_parent,
)
from cachestream.worker.fork_server import ForkServer
from cachestream.worker.health import START_DEADLINE_S
from cachestream.worker.job import Job, load_shared, unpack
from cachestream.worker.processes import name_process
from cachestream.worker.stored_listings import Listings, open_store, store_rest

_BEAT_S: Final = 0.2
_MOST_DEATHS: Final = 5
_LONGEST_PAUSE_S: Final = 5.0
_LATER_PAUSE_S: Final = 2.0
_LEAST_PATIENCE_S: Final = 5.0  # the process shows life every half a second
logger = logging.getLogger("cachestream.worker")


class ListingError(Exception):
    """The listing has failed; `output` is the last output of the process."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


class Lister:
    """Lists for one job: completes the current listing, and on demand makes another one to find changes."""

    def __init__(self, job: Job, server: ForkServer | None, job_fd: int, listings: Listings) -> None:
        self._hang_timeout_s, self._listings = job.hang_timeout_s, listings
        self._process = ChildProcess("cachestream.worker.lister", "lister", server, job.sys_path, job_fd)
        self._is_next = False
        self._deaths = 0
        self._listed_before = 0
        self._started_s = 0.0
        self._start_at_s: float | None = None
        self.has_changed = False

    @property
    def life_s(self) -> float | None:
        """The time of the process's last sign of life; None before the first."""
        return self._process.life_s

    @property
    def running(self) -> bool:
        """True if a process lists, or is about to."""
        return self._process.running or self._start_at_s is not None

    @property
    def pids(self) -> list[int | None]:
        """See `ChildProcess.pids`."""
        return self._process.pids

    def begin(self) -> None:
        """Complete the current listing."""
        self._listings.drop_next()
        if not self._listings.is_complete:
            self._start(is_next=False)

    def look_for_changes(self) -> None:
        """List all again beside the current listing; sets `has_changed` at the end."""
        if not self.running:
            self.has_changed = False
            self._listings.drop_next()
            self._start(is_next=True)

    def promote(self) -> bool:
        """Replace the current listing by the new one if they differ.

        To be called while no sampling process runs.
        """
        if not self.has_changed:
            return False
        self._listings.promote()
        self.has_changed = False
        return True

    def tick(self, now_s: float, resumed_s: float = -math.inf) -> None:
        """Reap, restart or kill the process as needed; raises ListingError if the current listing has failed.

        `resumed_s`: the time at which all processes continued after a stop; none could show life before.
        """
        code = self._process.reap()
        if code is not None:
            self._ended(code, now_s)
        elif self._process.running and self._hangs(now_s, resumed_s):
            logger.warning("the lister shows no sign of life: it is ended, and another one goes on")
            self._process.kill()
        if self._start_at_s is not None and now_s >= self._start_at_s:
            self._start(is_next=self._is_next)

    def _hangs(self, now_s: float, resumed_s: float) -> bool:
        if self.life_s is None:
            return now_s - max(self._started_s, resumed_s) > START_DEADLINE_S
        return now_s - max(self.life_s, resumed_s) > max(_LEAST_PATIENCE_S, self._hang_timeout_s)

    def stop(self) -> None:
        """End the process; the next one continues the current listing, or restarts a listing for changes."""
        if self._process.running:
            self._process.end()
            self._process.reap()
            self._listings.drop_next()
        self._start_at_s = None

    def _start(self, is_next: bool) -> None:
        self._started_s = self._start_at_s = time.monotonic()  # it stays due if the system refuses
        self._is_next = is_next
        self._listings.clean()  # a process that died before its first mark has left files that no mark names
        self._listed_before = self._listed
        try:
            self._process.start(is_next)
        finally:
            if self._process.running:
                self._start_at_s = None

    @property
    def _listed(self) -> int:
        """The number of names that are stored of the listing in progress."""
        mark = read_mark(self._listings.next if self._is_next else self._listings.current)
        return 0 if mark is None else mark.count

    def _ended(self, code: int, now_s: float) -> None:
        if code == 0:
            self._deaths = 0
            if self._is_next:
                self.has_changed = self._listings.differs()
                if not self.has_changed:
                    self._listings.drop_next()
            return
        if code == EXIT_LATER:
            self._start_at_s = now_s + _LATER_PAUSE_S
            return
        self._deaths = self._deaths + 1 if self._listed == self._listed_before else 1
        if code != EXIT_FATAL and self._deaths < _MOST_DEATHS:
            logger.warning("the lister ended with code %d", code)
            self._start_at_s = now_s + random.uniform(0.0, _LONGEST_PAUSE_S)
        elif self._is_next:
            logger.warning("whether the remote has changed cannot be found out; going on by what is known")
            self._listings.drop_next()
        else:
            raise ListingError(
                self._process.last_words
                or f"the process that lists ended {self._deaths} times, with code {code}"
            )


def main() -> None:
    """The main of the process: its arguments come through stdin, whose end means stop."""
    stop = threading.Event()
    job_fd, is_next = live_with_parent(stop)
    name_process("cs-lister")
    job = load_shared(job_fd)
    code = 0
    try:
        _run(job, is_next=is_next, stop=stop)
    except SourceError:
        traceback.print_exc()
        code = EXIT_FATAL
    except (CacheFullError, CacheLockedError, DiskFailedError) as error:  # may be over soon
        sys.stderr.write(f"{error}\n")
        code = EXIT_LATER
    except BaseException:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        code = 1
    end_now(code)


def _run(job: Job, *, is_next: bool, stop: threading.Event) -> None:
    source = as_growing(unpack(job.payload).source)
    assert source is not None
    life = _Life(stop)
    metering.install(life.show)
    cache = Cache(job.root)
    with open_store(source, cache, life.wait, is_next=is_next, may_evict=job.when_full == "evict") as store:
        delays = backoff_delays(random.Random())
        while not stop.is_set():
            known = store.last
            try:
                store_rest(source, store, stop)
            except SourceUnavailableError as error:
                sys.stderr.write(f"{error}; asking again\n")  # to the worker's log
                delays = delays if store.last == known else backoff_delays(random.Random())
                life.wait(next(delays))
            else:
                return


class _Life:
    """Prints empty lines as signs of life; thread-safe."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._shown_s = -math.inf

    def show(self, _nbytes: int = 0) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _BEAT_S:
            self._shown_s = now_s
            sys.stdout.write("\n")
            sys.stdout.flush()

    def wait(self, delay_s: float) -> bool:
        """Wait for `delay_s` and show life meanwhile; returns True if the process is to stop."""
        deadline_s = time.monotonic() + delay_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._stop.wait(min(left_s, metering.TICK_S)):
                break
            self.show()
        return self._stop.is_set()
