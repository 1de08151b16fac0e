"""One sampling process: claim, fetch, transform, pack, publish, until there is nothing left to claim.

Everything it did is in the catalogue or did not happen: it may be killed at any point.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from cachestream.errors import CacheFullError, CacheLockedError, WorkerError
from cachestream.sources.base import as_growing
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.publish import CatalogueReplacedError
from cachestream.storage.telemetry import ENDED, STARTING, Board
from cachestream.worker.job import Job, load_shared, read_frame, unpack
from cachestream.worker.processes import die_with_parent, name_process
from cachestream.worker.sampler import Sampler
from cachestream.worker.shard_writer import StartAgainError
from cachestream.worker.stored_listings import Listings, keep_names

EXIT_FATAL: Final = 3
EXIT_RESTART: Final = 4
EXIT_LATER: Final = 5
GRACE_S: Final = 3.0
_NICE: Final = 5


def main() -> None:
    """The process's main: its job comes through stdin, whose end means stop."""
    stop = threading.Event()
    job_fd, index, owner = live_with_parent(stop)
    name_process(f"cs-sampler-{index}")
    end_now(_run(load_shared(job_fd), index, owner, stop))


def live_with_parent(stop: threading.Event) -> Any:
    """Become a child of the supervisor: die with it, stop when asked to. Returns what it said first."""
    faulthandler.enable()
    die_with_parent()
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # Ctrl-C is the supervisor's to handle; SIG_IGN would outlast an exec
    with suppress(OSError):
        os.nice(_NICE)  # the trainer comes first
    stream = sys.stdin.buffer
    said = read_frame(stream)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM]),
        after_in_child=_be_ordinary,
    )
    fd = stream.fileno()
    threading.Thread(target=_watch_parent, args=(fd, stop), name="parent", daemon=True).start()
    return said


def _be_ordinary() -> None:
    """Let what the user's code has forked be ended as any process can: a pool waits for ever for one that takes no SIGTERM.

    Until then that is blocked: it would go to our handler, in a process that has nothing to stop.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_now(code: int) -> None:
    """End the process: its threads may hang in a dead connection, and nobody waits for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(job: Job, index: int, owner: str, stop: threading.Event) -> int:
    board = Board(Directory(job.root).worker_file("board"))
    slot = board.slot(index)
    slot["pid"], slot["state"], slot["beat_s"] = os.getpid(), STARTING, time.monotonic()
    code = 0
    try:
        payload = unpack(job.payload)
        cache = Cache(job.root, eviction=payload.eviction)
        if (source := as_growing(payload.source)) is not None:
            payload = replace(payload, source=source.over(Listings(cache.directory).load()))
        elif index == 0:
            keep_names(payload.source, cache)
        gc.collect()
        gc.freeze()  # what is there now stays: it is not to be looked through again and again
        Sampler(job, payload, cache, slot, owner=owner, stop=stop).run()
    except (StartAgainError, CatalogueReplacedError):
        code = EXIT_RESTART
    except (CacheFullError, CacheLockedError, DiskFailedError) as error:  # all of that may be over soon
        sys.stderr.write(f"{error}\n")
        code = EXIT_LATER
    except WorkerError:
        traceback.print_exc()
        code = EXIT_FATAL
    except BaseException:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        code = 1
    slot["state"] = ENDED  # tells this end from one that a sample or a signal made
    return code


def _watch_parent(fd: int, stop: threading.Event) -> None:
    """Wait for the end of the pipe from the supervisor; then stop, at once if that takes too long."""
    # Not through sys.stdin, whose lock would be held for ever in what the user's code forks: multiprocessing closes it there.
    with suppress(OSError):
        while os.read(fd, 1):
            pass
    stop.set()
    time.sleep(GRACE_S)  # the process ends meanwhile, and this thread with it
    os._exit(0)


if __name__ == "__main__":
    main()
