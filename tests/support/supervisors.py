"""Supervisors that are forked from a process that has loaded what they need; else each loads it for a second.

What only a new Python shows has one: another environment of the interpreter, other limits, forked processes.
"""

from __future__ import annotations

import array
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import pytest

from cachestream.worker import launch, processes

LIMITS: Final = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
# The variables that an interpreter and its libraries read when they begin.
FIRST: Final = ("LD_", "PYTHON", "MALLOC_", "ASAN_", "COVERAGE_")
# A process with more threads than one cannot be forked.
ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def surroundings() -> tuple[Any, ...]:
    """What a process has of its parent that is not handed over."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(FIRST)}
    limits = [resource.getrlimit(limit) for limit in LIMITS]
    return os.getpid(), variables, limits, os.geteuid(), os.getpriority(os.PRIO_PROCESS, 0), sys.executable


class Child:
    """A child of this process, as `subprocess.Popen` has it."""

    def __init__(self, pid: int, stdin: BinaryIO) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends_s, pause_s = None if timeout is None else time.monotonic() + timeout, 0.001
        while (code := self.poll()) is None:
            if ends_s is not None and time.monotonic() > ends_s:
                raise subprocess.TimeoutExpired("a supervisor", timeout or 0.0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Supervisors:
    """Starts supervisors from a process of its own, where that shows the same."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("zygote.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno()), *processes.import_path()],
                env={**dict.fromkeys(ONE_THREAD, "1"), **os.environ},
                pass_fds=(theirs.fileno(),),
            )
        self._lock = threading.Lock()
        self._surroundings = surroundings()

    def start(self, module: str, sys_path: tuple[str, ...], *arguments: str, **options: Any) -> Any:
        """Start one as `processes.start_python` does."""
        if surroundings() != self._surroundings:
            return processes.start_python(module, sys_path, *arguments, **options)
        answer, *protocols = arguments
        read, write = os.pipe()
        path = processes._standard_library_first(sys_path)
        cwd = processes._current_folder() or "/"
        request = pickle.dumps((path, protocols, cwd, dict(os.environ)))
        with self._lock, open(read, "rb"):
            fds = array.array("i", [read, 2, int(answer)])
            self._requests.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            pid = int(self._requests.recv(32))
        return Child(pid, open(write, "wb", buffering=0))

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


@contextmanager
def installed(supervisors: Supervisors) -> Iterator[None]:
    """Have this process fork the supervisors that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_python", supervisors.start)
        yield
