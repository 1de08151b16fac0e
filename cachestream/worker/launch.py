"""Starting the supervisor: its Python loads what it needs while the source is still being opened."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from cachestream.errors import CacheStreamError, WorkerError
from cachestream.storage.cache import Cache
from cachestream.storage.locks import lock_file
from cachestream.worker.child import import_path, start_python
from cachestream.worker.job import Job, frame, read_frame

START_TIMEOUT_S: Final = 60.0


class Launch:
    """A supervisor's Python that waits for its job; `protocols` name the fsspec drivers that it loads meanwhile."""

    def __init__(self, protocols: Collection[str] = ()) -> None:
        self._sys_path = import_path()
        self._process: subprocess.Popen[bytes] | None = start_python(
            "cachestream.worker.background",
            self._sys_path,
            *protocols,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer; the end of its life is for both
        )

    def give(self, job: Job) -> subprocess.Popen[bytes]:
        """Hand over the job, and wait for the answer: the process, which fills the cache from now on.

        Raises what the supervisor could not start for, or WorkerError if it says nothing.
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
        """End the Python that got no job."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            _end(process)


@contextmanager
def head_start(cache: Cache, protocols: Collection[str]) -> Iterator[Launch | None]:
    """A Launch, unless a worker runs already or another process is about to start one; ended if it is not used."""
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
        # Outside: closing the pipe to a dead process sends what is left in the buffer, and fails again.
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
    """Write all of `data`; False at the deadline: a job is larger than a pipe, and who is to read it may be stopped."""
    os.set_blocking(fd, False)
    view = memoryview(data)
    while view:
        if not _is_ready(fd, select.POLLOUT, deadline_s):
            return False
        with suppress(BlockingIOError):
            view = view[os.write(fd, view) :]
    return True


def _is_ready(fd: int, event: int, deadline_s: float) -> bool:
    """Wait until `fd` can be read, written, or is at its end; False at the deadline."""
    waiter = select.poll()  # select() takes no descriptor above 1023
    waiter.register(fd, event)
    return bool(waiter.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))))
