"""One sampling process: claim, fetch, transform, pack, publish, until there is nothing left to claim.

Everything it did is in the catalogue or did not happen: it may be killed at any point.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Final

from cachestream.errors import WorkerError
from cachestream.sampling.filler import Filler
from cachestream.sampling.job import Job, load_shared, read_frame, unpack
from cachestream.sampling.outbox import StartAgainError
from cachestream.storage.board import ENDED, STARTING, Board
from cachestream.storage.cache import Cache
from cachestream.storage.directory import Directory

__all__ = ["EXIT_FATAL", "EXIT_RESTART", "main"]

EXIT_FATAL: Final = 3
EXIT_RESTART: Final = 4
GRACE_S: Final = 3.0
_NICE: Final = 5
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """The process's main: its job comes through stdin, whose end means stop."""
    faulthandler.enable()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    with suppress(OSError):
        os.nice(_NICE)  # the trainer comes first
    stream = sys.stdin.buffer
    job_fd, index, owner = read_frame(stream)
    job = load_shared(job_fd)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_watch_parent, args=(stream, stop), name="parent", daemon=True).start()
    code = _run(job, index, owner, stop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # fetching threads may hang in a dead connection: nobody waits for them


def _run(job: Job, index: int, owner: str, stop: threading.Event) -> int:
    board = Board(Directory(job.root).worker_file("board"))
    slot = board.slot(index)
    slot["pid"], slot["state"], slot["beat_s"] = os.getpid(), STARTING, time.monotonic()
    code = 0
    try:
        payload = unpack(job.payload)
        cache = Cache(job.root, eviction=payload.eviction)
        gc.collect()
        gc.freeze()  # what is there now stays: it is not to be looked through again and again
        Filler(job, payload, cache, slot, owner=owner, stop=stop).run()
    except StartAgainError:
        code = EXIT_RESTART
    except WorkerError:
        traceback.print_exc()
        code = EXIT_FATAL
    except BaseException:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        code = 1
    slot["state"] = ENDED  # tells this end from one that a sample or a signal made
    return code


def _watch_parent(stream: object, stop: threading.Event) -> None:
    """Wait for the end of the pipe from the supervisor; then stop, at once if that takes too long."""
    with suppress(OSError, ValueError):
        while stream.read(1):  # type: ignore[attr-defined]
            pass
    stop.set()
    time.sleep(GRACE_S)  # the process ends meanwhile, and this thread with it
    os._exit(0)


if __name__ == "__main__":
    main()
