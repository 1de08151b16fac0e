"""Listing in the background: the process that lists page by page into the cache, started and watched by the supervisor.

What it has stored is good whenever it is killed; the next one goes on after the last name. Every now and then
it prints an empty line: a sign of life for whoever watches.
"""

from __future__ import annotations

import logging
import math
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from typing import IO, Final

from cachestream.errors import CacheFullError, CacheLockedError, SourceError, SourceUnavailableError
from cachestream.listing.names import read_mark
from cachestream.sources.base import as_growing
from cachestream.storage.cache import Cache
from cachestream.transport import metering
from cachestream.transport.remote_errors import backoff_delays
from cachestream.worker.child import (
    EXIT_FATAL,
    EXIT_LATER,
    end_now,
    end_process,
    live_with_parent,
    poll_process,
    start_sampling,
    words_of,
)
from cachestream.worker.fork_server import Forked, ForkServer
from cachestream.worker.health import START_DEADLINE_S
from cachestream.worker.job import Job, load_shared, unpack, write_frame
from cachestream.worker.processes import name_process
from cachestream.worker.stored_listings import Listings, open_store, store_rest

_BEAT_S: Final = 0.2


def main() -> None:
    """The process's main: what to list comes through stdin, whose end means stop."""
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
    except (
        CacheFullError,
        CacheLockedError,
    ) as error:  # the disk or the catalogue, by others: they may let go of it
        sys.stderr.write(f"{error}\n")
        code = EXIT_LATER
    except BaseException:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        code = 1
    end_now(code)


def _run(job: Job, *, is_next: bool, stop: threading.Event) -> None:
    source = as_growing(unpack(job.payload).source)
    assert source is not None
    life = _Life()
    metering.install(life.show)

    def wait(delay_s: float) -> bool:
        return life.wait(stop, delay_s)

    cache = Cache(job.root)
    with open_store(source, cache, wait, is_next=is_next, may_evict=job.when_full == "evict") as store:
        delays = backoff_delays(random.Random())
        while not stop.is_set():
            known = store.last
            try:
                store_rest(source, store, stop)
            except SourceUnavailableError as error:
                sys.stderr.write(f"{error}; asking again\n")  # to the worker's log
                delays = delays if store.last == known else backoff_delays(random.Random())
                wait(next(delays))
            else:
                return


class _Life:
    """Empty lines, as long as something goes on; to be shown from any thread."""

    def __init__(self) -> None:
        self._shown_s = -math.inf

    def show(self, _nbytes: int = 0) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _BEAT_S:
            self._shown_s = now_s
            sys.stdout.write("\n")
            sys.stdout.flush()

    def wait(self, stop: threading.Event, delay_s: float) -> bool:
        """Wait, alive; whether to stop."""
        deadline_s = time.monotonic() + delay_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not stop.wait(min(left_s, metering.TICK_S)):
            self.show()
        return stop.is_set()


_MOST_DEATHS: Final = 5
_LONGEST_PAUSE_S: Final = 5.0
_LATER_PAUSE_S: Final = 2.0
_LAST_WORDS_BYTES: Final = 8192
_LEAST_PATIENCE_S: Final = 5.0  # it shows life every half a second
logger = logging.getLogger("cachestream.worker")


class ListingError(Exception):
    """The listing cannot go on; `words` is what the process said at its end."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


class Lister:
    """Lists for one job: what the current listing lacks, and on demand another one, to see what has changed."""

    def __init__(self, job: Job, server: ForkServer | None, job_fd: int, listings: Listings) -> None:
        self._job, self._server, self._job_fd, self._listings = job, server, job_fd, listings
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._words: deque[bytes] = deque(maxlen=64)
        self._listener: threading.Thread | None = None
        self._is_next = False
        self._deaths = 0
        self._listed_before = 0
        self.life_s: float | None = None  # when the process last showed life; it has not yet
        self._started_s = 0.0
        self._start_at_s: float | None = None
        self.has_changed = False

    @property
    def running(self) -> bool:
        """Whether it lists, or is about to."""
        return self._process is not None or self._start_at_s is not None

    @property
    def pids(self) -> list[int | None]:
        """The process's number while it runs; None where it is not known yet."""
        return [] if self._process is None else [self._process.pid]

    def begin(self) -> None:
        """List what is missing of the current listing."""
        self._listings.drop_next()
        if not self._listings.is_complete:
            self._start(is_next=False)

    def look_for_changes(self) -> None:
        """List all anew beside the current listing; `has_changed` tells at the end."""
        if not self.running:
            self.has_changed = False
            self._listings.drop_next()
            self._start(is_next=True)

    def promote(self) -> bool:
        """Go on by the new listing, if it is another one. To be called while no samples are read."""
        if not self.has_changed:
            return False
        self._listings.promote()
        self.has_changed = False
        return True

    def tick(self, now_s: float, resumed_s: float = -math.inf) -> None:
        """See how it is doing; raises ListingError where the current listing cannot go on.

        `resumed_s`: when all processes went on after a stop; none could show life before.
        """
        if self._process is not None and poll_process(self._process) is not None:
            self._ended(now_s)
        elif self._process is not None and self._hangs(now_s, resumed_s):
            logger.warning("the lister shows no sign of life: it is ended, and another one goes on")
            self._process.kill()
        if self._start_at_s is not None and now_s >= self._start_at_s:
            self._start(is_next=self._is_next)

    def _hangs(self, now_s: float, resumed_s: float) -> bool:
        if self.life_s is None:
            return now_s - max(self._started_s, resumed_s) > START_DEADLINE_S
        return now_s - max(self.life_s, resumed_s) > max(_LEAST_PATIENCE_S, self._job.hang_timeout_s)

    def stop(self) -> None:
        """End it: what it has stored of the current listing is good, and the next one begins anew."""
        if self._process is not None:
            end_process(self._process)
            self._reap()
            self._listings.drop_next()
        self._start_at_s = None

    def _start(self, is_next: bool) -> None:
        self._started_s, self.life_s = time.monotonic(), None
        self._is_next, self._start_at_s = is_next, self._started_s  # and still due, where it fails
        self._listings.clean()  # one that died before its first mark has left files that nobody knows
        self._listed_before = self._listed
        self._process = start_sampling(
            "cachestream.worker.lister", self._server, self._job.sys_path, self._job_fd
        )
        self._start_at_s = None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._words.clear()
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()
        try:
            write_frame(self._process.stdin, (self._job_fd, is_next))
        except BrokenPipeError:
            pass  # it died already; the next tick tells

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            for line in words_of(stream):
                if line == b"\n":
                    self.life_s = time.monotonic()
                    continue
                self._words.append(line)
                logger.info("lister: %s", line[:1000].decode("utf-8", "replace").rstrip())

    @property
    def _listed(self) -> int:
        """How many names are stored of what it lists."""
        mark = read_mark(self._listings.next if self._is_next else self._listings.current)
        return 0 if mark is None else mark.count

    def _reap(self) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        if process.stdin is not None:
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        code = process.poll()
        assert code is not None
        return code

    def _ended(self, now_s: float) -> None:
        code = self._reap()
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
        words = b"".join(self._words)[-_LAST_WORDS_BYTES:].decode("utf-8", "replace")
        self._deaths = self._deaths + 1 if self._listed == self._listed_before else 1
        if code != EXIT_FATAL and self._deaths < _MOST_DEATHS:
            logger.warning("the lister ended with code %d", code)
            self._start_at_s = now_s + random.uniform(0.0, _LONGEST_PAUSE_S)
        elif self._is_next:
            logger.warning("whether the remote has changed cannot be found out; going on by what is known")
            self._listings.drop_next()
        else:
            raise ListingError(
                words or f"the process that lists ended {self._deaths} times, with code {code}"
            )
