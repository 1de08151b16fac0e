"""The start of a supervisor, from both sides.

The caller starts a Python for the supervisor while the source is still being opened (`head_start`), hands
over the job and waits for the answer (`Launch.give`). The supervisor's process (`main`) loads what it needs
meanwhile, takes the job, becomes the supervisor of the cache, answers, and supervises.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, Final

from cachestream.errors import CacheLockedError, CacheStreamError, WorkerError
from cachestream.linux import move, open_private
from cachestream.storage.cache import Cache
from cachestream.storage.layout import remove_if_there
from cachestream.storage.locks import HeldFile, lock_file
from cachestream.storage.os_errors import CatalogueDamagedError, translated_disk_errors
from cachestream.worker.fork_server import ForkServer
from cachestream.worker.job import Job, frame, read_frame, unpack, write_frame
from cachestream.worker.passes import begin
from cachestream.worker.processes import (
    begin_clean,
    detach_from_terminal,
    import_path,
    name_process,
    start_python,
)
from cachestream.worker.supervisor import Supervisor

START_TIMEOUT_S: Final = 60.0
_LOG_BYTES: Final = 64 * 1024
_LOCK_TIMEOUT_S: Final = 1.0

logger = logging.getLogger("cachestream.worker")


class Launch:
    """A Python for a supervisor: it loads the fsspec drivers of `protocols` and waits for its job."""

    def __init__(self, protocols: Collection[str] = ()) -> None:
        self._sys_path = import_path()
        self._process: subprocess.Popen[bytes] | None = start_python(
            "cachestream.worker.launch",
            self._sys_path,
            *protocols,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer, whose end ends the worker
        )

    def give(self, job: Job) -> subprocess.Popen[bytes]:
        """Hand over the job and wait for the answer; returns the process, which fills the cache from now on.

        Raises the error of a supervisor that could not start, or WorkerError if it does not answer.
        """
        process, self._process = self._process, None
        assert process is not None
        try:
            answer = _ask(process, job)
        except BaseException:
            _end(process)
            raise
        if isinstance(answer, CacheStreamError):
            process.wait(timeout=START_TIMEOUT_S)
            raise answer
        return process

    def close(self) -> None:
        """End a Python that got no job."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            _end(process)


@contextmanager
def head_start(cache: Cache, protocols: Collection[str]) -> Iterator[Launch | None]:
    """Yield a Launch, closed at the end.

    None if a worker runs already, or another process is about to start one.
    """
    lock = None if cache.has_worker() else lock_file(cache.directory.worker_file("launch.lock"))
    if lock is None:
        yield None
        return
    launch = None
    try:
        launch = Launch(protocols)
        yield launch
    finally:
        lock.release(unlink=True)
        if launch is not None:
            launch.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=5.0)


def _ask(process: subprocess.Popen[bytes], job: Job) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # Inside the `try`: closing the pipe to a dead process flushes its buffer, and fails again.
        with process.stdin, process.stdout:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            if _send(process.stdin.fileno(), frame(job), deadline_s) and _is_ready(
                process.stdout.fileno(), select.POLLIN, deadline_s
            ):
                return read_frame(process.stdout)
        problem = f"did not answer within {START_TIMEOUT_S:.0f} s"
    except (BrokenPipeError, EOFError):
        problem = f"ended at once (exit code {process.wait(timeout=5.0)}); its error is on stderr"
    raise WorkerError(f"the background worker for {job.root} {problem}")


def _send(fd: int, data: bytes, deadline_s: float) -> bool:
    """Write all of `data`; False at the deadline.

    A job may be larger than the pipe, and its reader may be stopped.
    """
    os.set_blocking(fd, False)
    view = memoryview(data)
    while view:
        if not _is_ready(fd, select.POLLOUT, deadline_s):
            return False
        with suppress(BlockingIOError):
            view = view[os.write(fd, view) :]
    return True


def _is_ready(fd: int, event: int, deadline_s: float) -> bool:
    """Wait until `fd` is ready for `event` or closed at the other end; False at the deadline."""
    waiter = select.poll()  # select() takes no descriptor above 1023
    waiter.register(fd, event)
    return bool(waiter.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))))


def main() -> None:
    """The main of the supervisor: its job comes through stdin, one answer goes to stdout."""
    name_process("cs-supervisor")
    begin_clean()
    server = ForkServer(sys.argv[1:])  # first: it must not inherit the files and locks below
    try:
        supervisor = _begin(server)
        code = 0 if supervisor is None else supervisor.run()
    finally:
        server.close()
    logging.shutdown()
    os._exit(code)  # the lock is released with the process: a free lock means that nothing of it is left


def _begin(server: ForkServer) -> Supervisor | None:
    """Take the job, start its processes and answer; None if there is nothing to supervise."""
    try:
        job: Job = read_frame(sys.stdin.buffer)
    except EOFError:
        return None  # the source could not be opened, or the caller has died
    answer = sys.stdout.buffer
    try:
        cache = Cache(job.root, eviction=unpack(job.payload).eviction if job.custom_eviction else None)
        lock = _become_the_supervisor(cache)
        _open_log(cache)
        removed = cache.recover()
        _forget_debts(cache)
        supervisor = Supervisor(job, cache, lock, server)
        try:
            has_more = begin(cache, job, supervisor.draw)
        except CatalogueDamagedError:  # the next use rebuilds the catalogue
            has_more = begin(cache, job, supervisor.draw)
        supervisor.start(is_complete=not has_more)
        write_frame(answer, "ready")
    except CacheStreamError as error:
        write_frame(answer, error)
        return None
    except Exception as error:  # a process's main: the caller gets the traceback
        write_frame(answer, WorkerError(f"the worker cannot start: {error}", traceback.format_exc()))
        raise
    logger.info("started, %d left-over files removed", removed)
    detach_from_terminal()
    return supervisor


def _become_the_supervisor(cache: Cache) -> HeldFile:
    lock = lock_file(cache.directory.worker_file("supervisor.lock"), timeout_s=_LOCK_TIMEOUT_S)
    if lock is None:
        raise CacheLockedError(f"another supervisor runs for {cache.path}; attach to it by starting again")
    return lock


def _forget_debts(cache: Cache) -> None:
    """Remove the budget file: a debt under a mistyped bandwidth limit could last for days."""
    budget = cache.directory.worker_file("budget")
    with translated_disk_errors(budget, "removing it"):
        remove_if_there(budget)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A log file that only its owner can read, because it holds the output of transforms."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_private)

    def doRollover(self) -> None:  # noqa: N802  logging's name
        if self.stream is not None:
            self.stream.close()
        with suppress(OSError):
            move(self.baseFilename, self.baseFilename + ".1")
        self.stream = self._open()


def _open_log(cache: Cache) -> None:
    handler = _PrivateLog(
        cache.directory.worker_file("log.txt"), maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
