"""The process that lists, as the supervisor sees it: started while there is something to list, watched, restarted."""

from __future__ import annotations

import logging
import math
import random
import subprocess
import threading
import time
from collections import deque
from typing import IO, Final

from cachestream.remote.stored import read_mark
from cachestream.sampling.child import end_process, poll_process, start_sampling, words_of
from cachestream.sampling.forkserver import Forked, ForkServer
from cachestream.sampling.health import START_DEADLINE_S
from cachestream.sampling.job import Job, write_frame
from cachestream.sampling.listings import Listings
from cachestream.sampling.process import EXIT_FATAL, EXIT_LATER

__all__ = ["Lister", "ListingError"]

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
            "cachestream.sampling.listing", self._server, self._job.sys_path, self._job_fd
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
