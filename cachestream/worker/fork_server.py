"""Sampling processes are forked from one that has loaded what they need: in milliseconds, on memory that they share.

A Python of its own takes each of them up to a second of a processor, most of it for the driver of the remote. The fork
server has one thread, runs nothing of the user's and holds no lock, so that forking it is safe. What it forks are
children of the supervisor, as if that had started them: the fork server forks twice, and the supervisor takes the orphan in.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from types import FrameType
from typing import IO, Any, Final

from cachestream.worker.processes import (
    adopt_orphans,
    die_with_parent,
    end_sessions,
    is_stopped,
    is_there,
    let_go_of_terminal,
    name_process,
)

_PID: Final = struct.Struct("<i")
_MESSAGE_BYTES: Final = 4096
_PAUSE_S: Final = 0.005
_ORPHANED_TURNS: Final = 400
_STOPPED_S: Final = 3.0  # a suspended job may go on with its supervisor first
# What a sampling process loads of ours before it gets its source, and of those that `open_source` makes.
_OURS: Final = ("cachestream.worker.sampler", "cachestream.sources.open")


class Forked:
    """A process that a fork server starts, as the supervisor sees it: used as a `subprocess.Popen`.

    `pid` is None until the fork server has told it. A process that was lost with the fork server counts as killed.
    """

    def __init__(self, server: ForkServer, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._server = server
        self._pid: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    @property
    def pid(self) -> int | None:
        if self._pid is None:
            self._server.listen()
        return self._pid

    def begun(self, pid: int) -> None:
        """The fork server says that it runs, or with -1 that the system refused."""
        if pid < 0:
            self.returncode = 1
        else:
            self._pid = pid

    def lost(self) -> None:
        """The fork server is gone, and whether it had started this is not known."""
        self.returncode = -signal.SIGKILL

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        pid = self.pid
        if self.returncode is None and pid is not None:
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                self.lost()
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        """End it now."""
        if self.poll() is not None:
            return
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
        else:
            self._server.close()  # if it runs by now, it will stop at the end of its pipe

    def wait(self, timeout: float) -> int:
        """The exit code; raises subprocess.TimeoutExpired while it runs after `timeout` seconds."""
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(_PAUSE_S)
        return code


class ForkServer:
    """The supervisor's side. To be made before it has threads, locks or children."""

    def __init__(self, protocols: Collection[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._waiting: deque[Forked] = deque()
        self._is_gone = False
        self._stopped_since_s: float | None = None
        can_adopt = adopt_orphans()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._socket.close()
                _serve(theirs, protocols)
            finally:
                os._exit(1)
        theirs.close()
        self._socket.setblocking(False)
        if not can_adopt:
            self.close()

    def load(self, protocols: Collection[str]) -> None:
        """Load the fsspec drivers of `protocols` ahead of the processes that need them."""
        self._send({"protocols": list(protocols)})

    def start(self, module: str, job_fd: int) -> Forked | None:
        """Run `main()` of `module` in a process with pipes to its stdin and from its output, which finds `job_fd` under the
        same number; None if the fork server is gone.
        """
        stdin, to_stdin = os.pipe()
        try:
            from_output, output = os.pipe()
        except OSError:
            os.close(stdin)
            os.close(to_stdin)
            raise
        sent = self._send({"module": module, "job_fd": job_fd}, [stdin, output, job_fd])
        os.close(stdin)
        os.close(output)
        if not sent:
            os.close(to_stdin)
            os.close(from_output)
            return None
        forked = Forked(self, os.fdopen(to_stdin, "wb"), os.fdopen(from_output, "rb"))
        self._waiting.append(forked)
        return forked

    def _send(self, message: dict[str, Any], fds: Collection[int] = ()) -> bool:
        if self._is_gone:
            return False
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))
        except OSError:  # it is gone, or so busy that a hundred messages wait for it
            self.close()
            return False
        return True

    def listen(self) -> None:
        """Take in what the fork server has said since."""
        if not self._is_gone and self._take_in():
            self.close()

    def give_up_if_stopped(self, now_s: float) -> bool:
        """End a fork server that somebody has stopped, if it is waited for; whether it was. To be asked every second."""
        if self._is_gone or not self._waiting or not is_stopped(self._pid):
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        elif now_s - self._stopped_since_s >= _STOPPED_S:
            self.close()
            return True
        return False

    def _take_in(self) -> bool:
        """Give the processes their numbers; whether that was all that will come."""
        while True:
            try:
                said = self._socket.recv(_PID.size)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not said:
                return True
            self._waiting.popleft().begun(*_PID.unpack(said))

    def close(self) -> None:
        """End the fork server; what it has started goes on."""
        if self._is_gone:
            return
        self._is_gone = True
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._take_in()
        self._socket.close()
        for forked in self._waiting:
            forked.lost()
        self._waiting.clear()


def _serve(supervisor: socket.socket, protocols: Collection[str]) -> None:
    """The fork server's main: until the supervisor is gone. If that was killed, what its processes had started goes too."""
    ours, parent, sessions = os.getpid(), os.getppid(), set[int]()

    def leave(_number: int, _frame: FrameType | None) -> None:
        if os.getpid() == ours and _is_orphaned(parent):
            end_sessions(sessions)
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    die_with_parent(signal.SIGTERM)
    with suppress(OSError):  # the socket of one that was killed before it had read all says so
        _answer(supervisor, protocols, parent, sessions)
    end_sessions(sessions)  # even if the signal comes later: the socket closes before the parent changes


def _is_orphaned(parent: int) -> bool:
    """Whether `parent` is gone. The signal of its end comes with that of its main thread; others may take a moment more."""
    for _ in range(_ORPHANED_TURNS):
        if os.getppid() != parent:
            return True
        time.sleep(_PAUSE_S)
    return False


def _answer(supervisor: socket.socket, protocols: Collection[str], parent: int, sessions: set[int]) -> None:
    """Fork what is asked for, until nobody asks any more. Each leads one of `sessions`."""
    name_process("cs-forkserver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    let_go_of_terminal()  # nor are its supervisor's pipes to the caller to be kept open
    for module in _OURS:
        importlib.import_module(module)
    _load(protocols)
    gc.collect()
    gc.freeze()  # looking through what is shared would copy it
    while True:
        said, fds, _, _ = socket.recv_fds(supervisor, _MESSAGE_BYTES, 3)
        if not said:
            return
        message = json.loads(said)
        _load(message.get("protocols", ()))
        if "module" in message:  # an answer for each, also where the system had no room for the descriptors
            sessions -= {session for session in sessions if not is_there(session)}
            pid = _fork(message["module"], message["job_fd"], fds, supervisor, parent)
            if pid > 0:
                sessions.add(pid)
            supervisor.send(_PID.pack(pid))
            for fd in fds:
                os.close(fd)


def _load(protocols: Collection[str]) -> None:
    if not protocols:
        return
    fsspec = importlib.import_module("fsspec")
    for protocol in protocols:
        with suppress(Exception):  # the process that needs it tells what is wrong with it
            fsspec.get_filesystem_class(protocol)


def _fork(module: str, job_fd: int, fds: list[int], supervisor: socket.socket, parent: int) -> int:
    """Fork a process, and leave it to the supervisor: its number, or -1 if the system refuses."""
    from_between, to_us = os.pipe()
    try:
        between = os.fork()
        if not between:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                between = os.getpid()
                pid = os.fork()
                if pid:
                    os.write(to_us, _PID.pack(pid))
                    os._exit(0)
                os.setsid()  # what it starts shall be told from others' children, and go with it
                for fd in (from_between, to_us):
                    os.close(fd)
                supervisor.close()
                while os.getppid() == between:  # which is about to end
                    time.sleep(_PAUSE_S)
                if os.getppid() == parent:
                    _become(module, job_fd, fds)
            except BaseException:  # noqa: BLE001  a process's main: the supervisor gets it
                traceback.print_exc()
            finally:
                os._exit(1)
        os.waitpid(between, 0)
        os.set_blocking(from_between, False)
        said = os.read(from_between, _PID.size)
    except OSError:  # EAGAIN: too many processes, or too little memory
        return -1
    finally:
        os.close(from_between)
        os.close(to_us)
    return int(_PID.unpack(said)[0])


def _become(module: str, job_fd: int, fds: list[int]) -> None:
    """Run `main()` of `module` in this process: the pipes and the job in their places."""
    stdin, output, job = fds
    for fd, target in ((stdin, 0), (output, 1), (output, 2), (job, job_fd)):
        if fd != target:
            os.dup2(fd, target)
    for fd in {stdin, output, job} - {0, 1, 2, job_fd}:
        os.close(fd)
    if random := sys.modules.get("numpy.random"):  # a driver has loaded it
        random.seed()  # all would draw the same from the global generator
    importlib.import_module(module).main()
