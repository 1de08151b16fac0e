"""The process that lists a remote page by page into a stored listing, and its supervision.

The process prints empty lines as signs of life. It may be killed at any point: the next one continues after
the last name that is stored.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from typing import Final

from cachestream import tracing
from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.linux import name_process
from cachestream.listing.names import read_mark
from cachestream.sources.base import as_incremental
from cachestream.storage.cache import Cache
from cachestream.transport import metering
from cachestream.transport.remote_errors import backoff_delays
from cachestream.worker.child_process import ChildProcess, ForkServer
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job, load_shared, unpack
from cachestream.worker.listings import Listings, open_store, store_rest
from cachestream.worker.processes import (
    EXIT_FATAL,
    EXIT_LATER,
    SignsOfLife,
    exit_code,
    exit_now,
    tie_to_supervisor,
)

_MOST_DEATHS: Final = 5
_LONGEST_PAUSE_S: Final = 5.0

logger = logging.getLogger("cachestream.worker")


class Lister:
    """Completes the current listing of one job, and makes the next one when it is to look for changes."""

    def __init__(self, job: Job, server: ForkServer | None, job_fd: int, listings: Listings) -> None:
        self._hang_timeout_s, self._listings = job.hang_timeout_s, listings
        self.process = ChildProcess("cachestream.worker.lister", "lister", server, job.sys_path, job_fd)
        self._is_next = False
        self._deaths = 0
        self._listed_before = 0
        self.has_changed = False

    @property
    def running(self) -> bool:
        """True if a process lists, or is about to."""
        return not self.process.is_over

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
        """Reap, restart or kill the process as needed; raises GiveUpError if the current listing has failed.

        `resumed_s`: see `ChildProcess.is_silent`.
        """
        code = self.process.reap()
        if code is not None:
            self._ended(code, now_s)
        elif self.process.is_silent(now_s, resumed_s, self._hang_timeout_s):
            logger.warning("the lister shows no sign of life: it is killed, and another one goes on")
            self.process.kill()
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self._start(is_next=self._is_next)

    def stop(self) -> None:
        """End the process; the next one continues the current listing, or restarts a listing for changes."""
        if self.process.running:
            self.process.end()
            self.process.reap()
            self._listings.drop_next()
        self.process.start_at_s = None

    def _start(self, is_next: bool) -> None:
        self._is_next = is_next
        self.process.start_at_s = time.monotonic()  # it stays due if the disk or the system refuses
        self._listings.clean()  # a process that died before its first mark has left files that no mark names
        self._listed_before = self._listed
        self.process.start(time.monotonic(), is_next)

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
            self.process.start_at_s = now_s + LATER_PAUSE_S
            return
        self._deaths = self._deaths + 1 if self._listed == self._listed_before else 1
        if code != EXIT_FATAL and self._deaths < _MOST_DEATHS:
            logger.warning("the lister ended with code %d", code)
            self.process.start_at_s = now_s + random.uniform(0.0, _LONGEST_PAUSE_S)
        elif self._is_next:
            logger.warning(
                "the remote cannot be listed again to find changes; going on with the current listing"
            )
            self._listings.drop_next()
        else:
            words = self.process.last_output
            raise GiveUpError(words or f"the process that lists ended {self._deaths} times, with code {code}")


def main() -> None:
    """The main of the process: its arguments come through stdin, whose end means stop."""
    job_fd, is_next = tie_to_supervisor()
    name_process("cs-lister")
    job = load_shared(job_fd)
    tracing.join(job.trace, "lister")
    exit_now(exit_code(lambda: _run(job, is_next=is_next), fatal=SourceError))


def _run(job: Job, *, is_next: bool) -> None:
    source = as_incremental(unpack(job.payload).source)
    assert source is not None
    metering.install(SignsOfLife().show)

    def wait(delay_s: float) -> bool:
        metering.wait(delay_s)
        return False

    cache, delays = Cache(job.root), backoff_delays(random.Random())
    with open_store(source, cache, wait, is_next=is_next, may_evict=job.when_full == "evict") as store:
        while True:
            known = store.last
            try:
                store_rest(source, store)
            except SourceUnavailableError as error:
                sys.stderr.write(f"{error}; asking again\n")  # to the worker's log
                delays = delays if store.last == known else backoff_delays(random.Random())
                metering.wait(next(delays))
            else:
                return
