"""The process that lists a remote page by page into a stored listing, and its supervision.

It may be killed at any point: the next one continues after the last name that is stored.
"""

from __future__ import annotations

import logging
import math
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from cachestream import tracing
from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.linux import name_process
from cachestream.listing.names import read_mark
from cachestream.sources.base import NamedSource, as_incremental
from cachestream.storage.layout import Directory
from cachestream.storage.publish import Reserved
from cachestream.transport import metering
from cachestream.transport.remote_errors import backoff_delays
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.child_process import Forks
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job, unpack
from cachestream.worker.listings import Listings, keep_names, open_store, store_rest
from cachestream.worker.processes import (
    EXIT_FATAL,
    EXIT_LATER,
    end_soon,
    exit_code,
    exit_now,
    heed_signals,
)

_MOST_DEATHS: Final = 5
_LONGEST_PAUSE_S: Final = 5.0
_BEAT_S: Final = 0.2

logger = logging.getLogger("cachestream.worker")


class Lister:
    """Completes the current listing of one job, and makes the next one when it is to look for changes.

    The names of a source that was listed at once are only stored.
    """

    def __init__(self, job: Job, forks: Forks, listings: Listings) -> None:
        self._job, self._listings = job, listings
        self._clock = forks.clock
        self.process = forks.process("lister", self._run)
        self._is_next = False
        self._deaths = 0
        self._listed_before = 0
        self.has_changed = False

    def _run(self, end: socket.socket) -> int:
        return run(end, self._job, is_next=self._is_next)

    @property
    def running(self) -> bool:
        """True if a process lists, or is about to."""
        return not self.process.is_over

    def keeps_names(self) -> bool:
        """True while the names of a source that was listed at once are being stored."""
        return self._job.has_names and self.running

    def begin(self) -> None:
        """Complete the current listing."""
        self._listings.drop_next()
        if self._job.has_names or (self._job.growing and not self._listings.is_complete):
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

    def tick(self, now_s: float, resumed_s: float) -> None:
        """Reap, restart or kill the process as needed; raises GiveUpError if the current listing has failed.

        `resumed_s`: see `ChildProcess.is_silent`.
        """
        code = self.process.reap()
        if code is not None:
            self._ended(code, now_s)
        elif self.process.is_silent(now_s, resumed_s, self._job.hang_timeout_s):
            logger.warning("the lister shows no sign of life: it is killed, and another one goes on")
            self.process.kill()
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self._start(is_next=self._is_next)

    def stop(self) -> None:
        """End the process; the next one continues the current listing, or restarts a listing for changes."""
        if self.process.running:
            self.process.end()
            self._listings.drop_next()
        self.process.start_at_s = None

    def _start(self, is_next: bool) -> None:
        self._is_next = is_next
        self.process.start_at_s = self._clock()  # it stays due if the disk or the system refuses
        self._listings.clean()  # a process that died before its first mark has left files that no mark names
        self._listed_before = self._listed
        self.process.start(self._clock())

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
        elif self._job.has_names:
            logger.warning(
                "the names of the units cannot be stored: what is cached under another listing is fetched "
                "again"
            )
        elif self._is_next:
            logger.warning(
                "the remote cannot be listed again to find changes; going on with the current listing"
            )
            self._listings.drop_next()
        else:
            words = self.process.last_output
            raise GiveUpError(words or f"the process that lists ended {self._deaths} times, with code {code}")


class SupervisorSpace:
    """Space for names, which the supervisor reserves."""

    def __init__(self, link: SupervisorLink) -> None:
        self._link = link

    def reserve(
        self, sizes: Sequence[int], *, may_evict: bool, spare_unused: bool
    ) -> Sequence[Reserved] | None:
        reserved: Sequence[Reserved] | None = self._link.ask(
            "reserve_now", tuple(sizes), may_evict, spare_unused, beat=self._beat
        )
        return reserved

    def cancel(self, reserved: Sequence[Reserved]) -> None:
        self._link.ask("cancel", tuple(reserved), beat=self._beat)

    def _beat(self) -> bool:
        self._link.tell("alive")
        return True


def run(end: socket.socket, job: Job, *, is_next: bool) -> int:
    """Be the lister of `job`; does not return."""
    stop = threading.Event()
    heed_signals(stop)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one goes on after the names that are stored
    name_process("cs-lister")
    if job.growing:
        tracing.join(job.trace, "lister")

    def on_message(kind: str, *_: Any) -> None:
        if kind == "stop":
            exit_now(0)

    code = exit_code(
        lambda: _list(job, SupervisorLink(end, on_message, lambda: end_soon(stop)), is_next=is_next),
        fatal=SourceError,
    )
    exit_now(code)
    return code


class _Life:
    """Signs of life for the supervisor, five a second at most."""

    def __init__(self, link: SupervisorLink) -> None:
        self._link, self._shown_s = link, -math.inf

    def show(self, _nbytes: int = 0) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _BEAT_S:
            self._shown_s = now_s
            self._link.tell("alive")


def _list(job: Job, link: SupervisorLink, *, is_next: bool) -> None:
    metering.install(_Life(link).show)
    given, directory, space = unpack(job.payload).source, Directory(job.root), SupervisorSpace(link)
    source = as_incremental(given)
    if source is None:
        assert isinstance(given, NamedSource)
        keep_names(given, directory, space)
        return

    def wait(delay_s: float) -> bool:
        metering.wait(delay_s)
        return False

    delays = backoff_delays(random.Random())
    may_evict = job.when_full == "evict"
    with open_store(source, directory, space, wait, is_next=is_next, may_evict=may_evict) as store:
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
