"""The processes of a supervisor, forked from a process that has loaded the modules that they need.

A fork takes milliseconds and shares memory; a new Python takes up to a second of a processor, most of it to
import the driver of the remote. The fork server has one thread, runs no code of the user and holds no lock:
it is safe to fork. It forks twice, and the supervisor adopts the orphan: each process is a child of the
supervisor. Without a fork server each process is a new Python.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import FrameType
from typing import IO, Any, BinaryIO, Final

from cachestream.linux import adopt_orphans, die_with_parent, is_there, name_process
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.processes import EndedSessions, detach_from_terminal, start_python, write_frame

_PID: Final = struct.Struct("<i")
_MESSAGE_BYTES: Final = 4096
_PAUSE_S: Final = 0.005
_ORPHANED_CHECKS: Final = 400
_ANSWER_S: Final = 10.0  # the fork server may still be loading
_LAST_OUTPUT_BYTES: Final = 8192
START_DEADLINE_S: Final = 120.0
_LEAST_PATIENCE_S: Final = 5.0  # a process that shows life does so every half a second
# The modules that the processes need; the module of the source is known when there is a job.
_PRELOADED: Final = (
    "cachestream.worker.sampling.sampler",
    "cachestream.worker.lister",
    "cachestream.formats.files",
)

logger = logging.getLogger("cachestream.worker")


class ForkedProcess:
    """The process `pid`, started by a fork server, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        """Kill the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

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

    To be made before the supervisor has threads, locks or children. `answer`: the supervisor's pipe to its
    caller, which the fork server does not keep.
    """

    def __init__(self, protocols: Collection[str] = (), answer: BinaryIO | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ended = EndedSessions()  # of processes that the fork server has started
        can_adopt = adopt_orphans()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._socket.close()
                if answer is not None:
                    answer.close()
                _serve(theirs, protocols)
            finally:
                os._exit(1)
        theirs.close()
        self._socket.settimeout(_ANSWER_S)
        if not can_adopt:
            self.close()

    def load(self, protocols: Collection[str], source: str) -> None:
        """Load the fsspec drivers of `protocols`, and the module `source`, before a process needs them."""
        self._send({"protocols": list(protocols), "source": source})

    def start(self, module: str, job_fd: int) -> ForkedProcess | None:
        """Run `main()` of `module` in a process with pipes to its stdin and from its output.

        The process inherits the descriptor `job_fd` under the same number. Returns None if the fork server is
        gone, does not answer or is refused a process by the system.
        """
        stdin, to_stdin = os.pipe()
        try:
            from_output, output = os.pipe()
        except OSError:
            os.close(stdin)
            os.close(to_stdin)
            raise
        pid = self._fork(module, job_fd, [stdin, output, job_fd])
        os.close(stdin)
        os.close(output)
        if pid is not None:
            return ForkedProcess(pid, os.fdopen(to_stdin, "wb"), os.fdopen(from_output, "rb"))
        os.close(to_stdin)
        os.close(from_output)
        return None

    def _fork(self, module: str, job_fd: int, fds: list[int]) -> int | None:
        """The id of a new process; None if there is no fork server any more."""
        if not self._send({"module": module, "job_fd": job_fd}, fds):
            return None
        try:
            answer = self._socket.recv(_PID.size)
        except OSError:  # also at the deadline
            answer = b""
        if not answer:
            logger.warning("the fork server is gone; processes are started without it")
            self.close()
            return None
        return int(_PID.unpack(answer)[0])

    def _send(self, message: dict[str, Any], fds: Collection[int] = ()) -> bool:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """End the fork server; the processes that it has started continue."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(supervisor: socket.socket, protocols: Collection[str]) -> None:
    """The main of the fork server: serve until the supervisor is gone, then end all sessions."""
    ours, parent, sessions = os.getpid(), os.getppid(), set[int]()

    def leave(_number: int, _frame: FrameType | None) -> None:
        if os.getpid() == ours and _is_orphaned(parent):
            EndedSessions(sessions).wait()
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    die_with_parent(signal.SIGTERM)
    # The supervisor was killed, or the system refuses a process: then the supervisor learns of it at once.
    with suppress(OSError), supervisor:
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
        if "module" in message:
            sessions -= {session for session in sessions if not is_there(session)}
            pid = _fork(message["module"], message["job_fd"], fds, supervisor, parent)
            sessions.add(pid)
            supervisor.send(_PID.pack(pid))
            for fd in fds:
                os.close(fd)


def _load(protocols: Collection[str]) -> None:
    if not protocols:
        return
    remote = importlib.import_module("cachestream.transport.remote")
    for protocol in protocols:
        with suppress(Exception):  # the process that needs the driver reports the error
            remote.load_driver(protocol)


def _fork(module: str, job_fd: int, fds: list[int], supervisor: socket.socket, parent: int) -> int:
    """Fork a process that the supervisor adopts, and return its id; raises OSError if the system refuses."""
    from_fork, to_us = os.pipe()
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


def printed_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of `stream` without the secrets of URLs; a very long line comes in pieces."""
    for line in iter(lambda: stream.readline(_LAST_OUTPUT_BYTES), b""):
        yield redact_text(line.decode("utf-8", "replace")).encode()


class ChildProcess:
    """A process of the supervisor, which runs `main()` of `module` and gets its arguments through a pipe.

    It can be started again after its end. Its output goes to the log, under `name`, and the last lines are
    kept; an empty line is only a sign of life. `job_fd` is the shared job, see `job.share`. The process is
    forked by `server`, or is a new Python if there is no fork server any more.
    """

    def __init__(
        self, module: str, name: str, server: ForkServer | None, sys_path: tuple[str, ...], job_fd: int
    ) -> None:
        self._module, self._name = module, name
        self._server, self._sys_path, self._job_fd = server, sys_path, job_fd
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._listener: threading.Thread | None = None
        self._last_lines: deque[bytes] = deque(maxlen=64)
        self.life_s: float | None = None  # the time of its last sign of life
        self.start_at_s: float | None = None  # the time at which it is to be started
        self.started_s = 0.0

    @property
    def running(self) -> bool:
        return self._process is not None

    def is_silent(self, now_s: float, resumed_s: float, patience_s: float) -> bool:
        """True if the process runs but has shown no sign of life for `patience_s`, or 120 s after its start.

        `resumed_s`: the time at which all processes continued after a stop; none could show life before.
        """
        if self.life_s is None:
            return self.running and now_s - max(self.started_s, resumed_s) > START_DEADLINE_S
        silent_s = now_s - max(self.life_s, resumed_s)
        return self.running and silent_s > max(_LEAST_PATIENCE_S, patience_s)

    @property
    def is_over(self) -> bool:
        """True if the process does not run, and is not to be started."""
        return self._process is None and self.start_at_s is None

    @property
    def pid(self) -> int | None:
        """The id of the running process."""
        return None if self._process is None else self._process.pid

    def start(self, now_s: float, *arguments: object) -> None:
        """Start the process, and send it the descriptor of the job and its `arguments`.

        It stays due if the system refuses.
        """
        self._last_lines.clear()
        self.life_s, self.start_at_s = None, now_s
        self._process = process = self._start()
        self.started_s, self.start_at_s = now_s, None
        assert process.stdout is not None
        assert process.stdin is not None
        self._listener = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        self._listener.start()
        with suppress(BrokenPipeError):  # it has died already; see `reap`
            write_frame(process.stdin, (self._job_fd, *arguments))

    def _start(self) -> subprocess.Popen[bytes] | ForkedProcess:
        forked = None if self._server is None else self._server.start(self._module, self._job_fd)
        return forked or start_python(
            self._module,
            self._sys_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self._job_fd,),
            start_new_session=True,  # as the fork server does
        )

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            for line in printed_lines(stream):
                if line == b"\n":
                    self.life_s = time.monotonic()
                    continue
                self._last_lines.append(line)
                logger.info("%s: %s", self._name, line[:1000].decode("utf-8", "replace").rstrip())

    @property
    def last_output(self) -> str:
        """The end of what the process printed: its traceback, if it had one."""
        return b"".join(self._last_lines)[-_LAST_OUTPUT_BYTES:].decode("utf-8", "replace")

    def reap(self) -> int | None:
        """The exit code of a process that has ended; None while it runs, or if there is none.

        What the process has started ends with it (`ForkServer.ended`), except for processes in a session of
        their own.
        """
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._end_session()
            self.ask_to_stop()
            self._process = None
            if self._listener is not None:
                self._listener.join(timeout=1.0)
        return code

    def _end_session(self) -> None:
        if self._server is not None and self.pid is not None:
            self._server.ended.add(self.pid)
            self._server.ended.end_members()  # now: they may keep our end of their output open

    def ask_to_stop(self) -> None:
        """Close the pipe: its end asks the process to stop."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process; `reap` ends what it has started."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill the process, and wait for it; what it has started ends as after `reap`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=5.0)
            self._end_session()
