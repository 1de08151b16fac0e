"""The process that lists: from the remote into the cache, page by page, until the listing has ended.

What it has stored is good whenever it is killed; the next one goes on after the last name. Every now and then
it prints an empty line: a sign of life for whoever watches.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
import traceback
from typing import Final

from cachestream.errors import CacheFullError, CacheLockedError, SourceError, SourceUnavailableError
from cachestream.remote import pulse
from cachestream.remote.growing import as_growing
from cachestream.remote.retry import backoff_delays
from cachestream.sampling.job import Job, load_shared, unpack
from cachestream.sampling.kinship import name_process
from cachestream.sampling.process import EXIT_FATAL, EXIT_LATER, end_now, live_with_parent
from cachestream.sampling.storing import open_store, store_rest
from cachestream.storage.cache import Cache

__all__ = ["main"]

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
    pulse.install(life.show)

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
        while (left_s := deadline_s - time.monotonic()) > 0 and not stop.wait(min(left_s, pulse.TICK_S)):
            self.show()
        return stop.is_set()


if __name__ == "__main__":
    main()
