"""The processes of a supervisor, forked from a process that has loaded the modules that they need.

A fork takes milliseconds and shares memory; a new Python takes up to a second of a processor, most of it to
import the driver of the remote. The fork server has one thread, runs no code of the user and holds no lock:
it is safe to fork. It forks twice, and the supervisor adopts the orphan: each process is a child of the
supervisor.
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

from cachestream.linux import adopt_orphans, die_with_parent, is_stopped, is_there, name_process
from cachestream.worker.processes import EndedSessions, detach_from_terminal

_PID: Final = struct.Struct("<i")
_MESSAGE_BYTES: Final = 4096
_PAUSE_S: Final = 0.005
_ORPHANED_CHECKS: Final = 400
_STOPPED_S: Final = 3.0  # when a suspended job continues, its supervisor may be the first
# The modules that the processes need; the module of the source is known when there is a job.
_PRELOADED: Final = (
    "cachestream.worker.sampling.sampler",
    "cachestream.worker.lister",
    "cachestream.sources.files",
)


class ForkedProcess:
    """A process started by a fork server, with the interface of `subprocess.Popen`.

    `pid` is None until the fork server has reported it. A process that is lost with the fork server counts as
    killed.
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

    def set_pid(self, pid: int) -> None:
        """Take the id that the fork server reported; -1 if the system refused to fork."""
        if pid < 0:
            self.returncode = 1
        else:
            self._pid = pid

    def count_as_killed(self) -> None:
        """Count the process as killed: the fork server is gone, and may not have started it."""
        self.returncode = -signal.SIGKILL

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        pid = self.pid
        if self.returncode is None and pid is not None:
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                self.count_as_killed()
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        """Kill the process."""
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
    """The supervisor's side of the fork server.

    To be made before the supervisor has threads, locks or children.
    """

    def __init__(self, protocols: Collection[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._waiting: deque[ForkedProcess] = deque()
        self._is_gone = False
        self._stopped_since_s: float | None = None
        self.ended = EndedSessions()  # of processes that the fork server has started
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

    def load(self, protocols: Collection[str], source: str) -> None:
        """Load the fsspec drivers of `protocols`, and the module `source`, before a process needs them."""
        self._send({"protocols": list(protocols), "source": source})

    def start(self, module: str, job_fd: int) -> ForkedProcess | None:
        """Run `main()` of `module` in a process with pipes to its stdin and from its output.

        The process inherits the descriptor `job_fd` under the same number. Returns None if the fork server is
        gone.
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
        forked = ForkedProcess(self, os.fdopen(to_stdin, "wb"), os.fdopen(from_output, "rb"))
        self._waiting.append(forked)
        return forked

    def _send(self, message: dict[str, Any], fds: Collection[int] = ()) -> bool:
        if self._is_gone:
            return False
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))
        except OSError:  # the fork server is gone, or so busy that a hundred messages wait for it
            self.close()
            return False
        return True

    def listen(self) -> None:
        """Read what the fork server has reported since the last call."""
        if not self._is_gone and self._receive_pids():
            self.close()

    def give_up_if_stopped(self, now_s: float) -> bool:
        """End a fork server that has been stopped (SIGSTOP) if a process waits for it; True if so.

        To be called every second.
        """
        if self._is_gone or not self._waiting or not is_stopped(self._pid):
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        elif now_s - self._stopped_since_s >= _STOPPED_S:
            self.close()
            return True
        return False

    def _receive_pids(self) -> bool:
        """Give processes their reported ids; True if the fork server is gone."""
        while True:
            try:
                data = self._socket.recv(_PID.size)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._waiting.popleft().set_pid(*_PID.unpack(data))

    def close(self) -> None:
        """End the fork server; the processes that it has started continue."""
        if self._is_gone:
            return
        self._is_gone = True
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._receive_pids()
        self._socket.close()
        for forked in self._waiting:
            forked.count_as_killed()
        self._waiting.clear()


def _serve(supervisor: socket.socket, protocols: Collection[str]) -> None:
    """The main of the fork server: serve until the supervisor is gone, then end all sessions."""
    ours, parent, sessions = os.getpid(), os.getppid(), set[int]()

    def leave(_number: int, _frame: FrameType | None) -> None:
        if os.getpid() == ours and _is_orphaned(parent):
            EndedSessions(sessions).wait()
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    die_with_parent(signal.SIGTERM)
    with suppress(OSError):  # ECONNRESET if the supervisor was killed before it had read all
        _answer(supervisor, protocols, parent, sessions)
    EndedSessions(sessions).wait()  # the signal may come later: the socket closes before the parent changes


def _is_orphaned(parent: int) -> bool:
    """True if `parent` is gone.

    The signal comes when the main thread of the parent ends; its other threads may take a moment longer.
    """
    for _ in range(_ORPHANED_CHECKS):
        if os.getppid() != parent:
            return True
        time.sleep(_PAUSE_S)
    return False


def _answer(supervisor: socket.socket, protocols: Collection[str], parent: int, sessions: set[int]) -> None:
    """Fork the requested processes until the socket closes; each leads one of `sessions`."""
    name_process("cs-forkserver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    detach_from_terminal()  # this also closes the pipes of the supervisor to its caller
    gc.disable()  # what is loaded stays
    for module in _PRELOADED:
        importlib.import_module(module)
    _load(protocols)
    gc.freeze()  # a garbage collection would write to shared memory, and so copy it
    gc.enable()
    while True:
        data, fds, _, _ = socket.recv_fds(supervisor, _MESSAGE_BYTES, 3)
        if not data:
            return
        message = json.loads(data)
        _load(message.get("protocols", ()))
        if source := message.get("source"):
            importlib.import_module(source)
        if "module" in message:  # each gets an answer, also if the system had no room for the descriptors
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
        with suppress(Exception):  # the process that needs the driver reports the error
            fsspec.get_filesystem_class(protocol)


def _fork(module: str, job_fd: int, fds: list[int], supervisor: socket.socket, parent: int) -> int:
    """Fork a process that the supervisor adopts; returns its id, or -1 if the system refuses."""
    from_fork, to_us = os.pipe()
    try:
        intermediate = os.fork()
        if not intermediate:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                intermediate = os.getpid()
                pid = os.fork()
                if pid:
                    os.write(to_us, _PID.pack(pid))
                    os._exit(0)
                os.setsid()  # its descendants are found by this session, and end with it
                for fd in (from_fork, to_us):
                    os.close(fd)
                supervisor.close()
                while os.getppid() == intermediate:  # it is about to end
                    time.sleep(_PAUSE_S)
                if os.getppid() == parent:
                    _run_main(module, job_fd, fds)
            except BaseException:  # noqa: BLE001  a process's main: the traceback goes to the supervisor
                traceback.print_exc()
            finally:
                os._exit(1)
        os.waitpid(intermediate, 0)
        os.set_blocking(from_fork, False)
        data = os.read(from_fork, _PID.size)
    except OSError:  # EAGAIN: too many processes, or too little memory
        return -1
    finally:
        os.close(from_fork)
        os.close(to_us)
    return int(_PID.unpack(data)[0])


def _run_main(module: str, job_fd: int, fds: list[int]) -> None:
    """Run `main()` of `module` in this process, with the pipes and the job under their numbers."""
    stdin, output, job = fds
    for fd, target in ((stdin, 0), (output, 1), (output, 2), (job, job_fd)):
        if fd != target:
            os.dup2(fd, target)
    for fd in {stdin, output, job} - {0, 1, 2, job_fd}:
        os.close(fd)
    if random := sys.modules.get("numpy.random"):  # loaded by a driver
        random.seed()  # else all processes would draw the same from the global generator
    importlib.import_module(module).main()
