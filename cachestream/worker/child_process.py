"""The processes of a supervisor, which it forks itself.

A fork takes milliseconds and shares memory; a new Python takes up to a second of a processor, most of it to
import the driver of the remote. The supervisor has loaded the modules that they need. It has one thread and
runs no code of the user's, so it is safe to fork.

Each process leads a session of its own, and what it has started ends with it. If the supervisor is killed,
its processes are killed with it (PR_SET_PDEATHSIG), and a guardian ends what they had started.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Final

from cachestream.linux import die_with_parent, lower_session, name_process
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.channel import Channel, Message
from cachestream.worker.processes import EndedSessions, detach_from_terminal, reap_orphans

_PID: Final = struct.Struct("<i")
_LAST_OUTPUT_BYTES: Final = 8192
_OUTPUT_BYTES: Final = 65_536
_LOGGED_CHARS: Final = 1000
_NICE: Final = 5
START_DEADLINE_S: Final = 120.0
_END_S: Final = 10.0  # in which a process that was killed ends, unless the system does not let it
_LEAST_PATIENCE_S: Final = 5.0  # a process that shows life does so every half a second

logger = logging.getLogger("cachestream.worker")


class Guardian:
    """A process that outlives a supervisor that is killed, and ends the sessions of its processes.

    `answer`: the supervisor's pipe to its caller, whose end tells the caller that the supervisor is gone.
    """

    def __init__(self, answer: BinaryIO) -> None:
        watched, self._told = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self._told)
                answer.close()
                name_process("cs-guardian")
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                detach_from_terminal()
                _guard(watched)
            finally:
                os._exit(0)
        os.close(watched)

    def watch(self, pid: int) -> None:
        """End the session of process `pid` if the supervisor is killed."""
        self._tell(pid)

    def forget(self, pid: int) -> None:
        """Leave the session of process `pid` alone: it has been ended."""
        self._tell(-pid)

    def _tell(self, number: int) -> None:
        with suppress(OSError):  # it was killed
            os.write(self._told, _PID.pack(number))

    def close(self) -> None:
        """End the guardian, once it has ended the sessions that are left: none after an orderly end."""
        os.close(self._told)
        with suppress(ChildProcessError):
            wait_for_end(self._pid)

    def close_in_child(self) -> None:
        os.close(self._told)


def _guard(watched: int) -> None:
    """Keep the numbers of the processes until the supervisor has ended, and then end their sessions."""
    leaders: set[int] = set()
    while data := os.read(watched, _PID.size):
        (number,) = _PID.unpack(data)
        leaders.add(number) if number > 0 else leaders.discard(-number)
    EndedSessions(leaders).wait()


def wait_for_end(pid: int) -> int | None:
    """Wait up to 10 s for the end of a child; return its status, or None if it goes on."""
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return None


class Forks:
    """The things that all processes of a supervisor have in common: its selector, its guardian, the ends that
    it has open.

    `close_in_child` closes what else a forked process must not keep. `clock`: the time in seconds by which
    the supervisor waits.
    """

    def __init__(
        self,
        guardian: Guardian,
        close_in_child: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.ended = EndedSessions()
        self.guardian = guardian
        self.clock = clock
        self.children: list[ChildProcess] = []
        self._close = close_in_child

    def process(self, name: str, run: Callable[[socket.socket], int]) -> ChildProcess:
        """Make a process, which is not started yet; see `ChildProcess`."""
        return ChildProcess(name, self, run)

    def end_orphans(self) -> None:
        """End the processes that dead ones leave behind, and reap orphans; no other code does."""
        self.ended.end_members()
        reap_orphans([child.pid for child in self.children])

    def lower_sessions(self) -> None:
        """Have the trainer come before the next process that has begun; called several times a second."""
        new = next((child for child in self.children if child.pid is not None and not child.is_lowered), None)
        if new is not None and new.pid is not None:
            new.is_lowered = lower_session(new.pid, _NICE)

    def close_in_child(self) -> None:
        """Close the supervisor's files in a process that it has forked."""
        self.selector.close()
        self.guardian.close_in_child()
        for child in self.children:
            child.close_ends()
        self._close()


class ChildProcess:
    """A process that runs `run(its end of the messages)` and exits with what that returns.

    It can be started again after its end. Its output goes to the log, under `name`, and the last lines are
    kept.
    """

    def __init__(self, name: str, forks: Forks, run: Callable[[socket.socket], int]) -> None:
        self.name = name
        self._forks, self._run = forks, run
        self.pid: int | None = None
        self.channel: Channel | None = None
        self._output = -1
        self._rest = b""
        self._last_lines: deque[str] = deque(maxlen=64)
        self.life_s: float | None = None  # the time of its last message
        self.start_at_s: float | None = None  # the time at which it is to be started
        self.started_s = 0.0
        self.is_lowered = False  # its session, below that of the trainer
        forks.children.append(self)

    @property
    def running(self) -> bool:
        return self.pid is not None

    @property
    def is_over(self) -> bool:
        """True if the process does not run, and is not to be started."""
        return self.pid is None and self.start_at_s is None

    def is_silent(self, now_s: float, resumed_s: float, patience_s: float) -> bool:
        """True if the process runs but has sent nothing for `patience_s`, or for 120 s after its start.

        `resumed_s`: the time at which all processes continued after a stop; none could show life before.
        """
        if self.life_s is None:
            return self.running and now_s - max(self.started_s, resumed_s) > START_DEADLINE_S
        silent_s = now_s - max(self.life_s, resumed_s)
        return self.running and silent_s > max(_LEAST_PATIENCE_S, patience_s)

    def start(self, now_s: float) -> None:
        """Start the process; it stays due if the system refuses."""
        self._last_lines.clear()
        self._rest, self.life_s, self.start_at_s = b"", None, now_s
        self.is_lowered = False
        ours, theirs = socket.socketpair()
        try:
            output, to_output = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
        try:
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                self._become(parent, ours, theirs, output, to_output)
        except OSError:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(to_output)
        os.set_blocking(output, False)
        self.pid, self.channel, self._output = pid, Channel(ours), output
        self.started_s, self.start_at_s = now_s, None
        self._forks.guardian.watch(pid)
        self._forks.selector.register(self.channel, selectors.EVENT_READ, self)
        self._forks.selector.register(output, selectors.EVENT_READ, self)

    def _become(
        self, parent: int, ours: socket.socket, theirs: socket.socket, output: int, to_output: int
    ) -> None:
        """Be the new process; does not return."""
        code = 1
        try:
            os.setsid()  # its descendants are found by this session, and end with it
            die_with_parent()
            if os.getppid() != parent:
                return
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            ours.close()
            os.close(output)
            self._forks.close_in_child()
            detach_from_terminal()
            for target in (1, 2):
                os.dup2(to_output, target)
            os.close(to_output)
            with suppress(OSError):
                os.nice(_NICE)  # the trainer comes first
            if random := sys.modules.get("numpy.random"):
                random.seed()  # else all processes would draw the same from the global generator
            code = self._run(theirs)
        except BaseException:  # noqa: BLE001  a process's main: the traceback goes to the supervisor
            traceback.print_exc()
        finally:
            os._exit(code)

    # --- messages and output

    @property
    def outputs(self) -> list[int]:
        """The descriptor of its output, while that is open."""
        return [self._output] if self._output >= 0 else []

    def receive(self) -> list[Message]:
        """The messages that have arrived."""
        if self.channel is None:
            return []
        messages = self.channel.receive()
        if messages is None:
            with suppress(KeyError):
                self._forks.selector.unregister(self.channel)
            return []
        if messages:
            self.life_s = self._forks.clock()
        return messages

    def read_output(self) -> None:
        """Log what the process has printed, without the secrets of URLs."""
        while self._output >= 0:
            try:
                data = os.read(self._output, _OUTPUT_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            if not data or len(self._rest) > _LAST_OUTPUT_BYTES:  # a very long line comes in pieces
                lines.append(self._rest)
                self._rest = b""
            for line in filter(None, lines):
                text = redact_text(line.decode("utf-8", "replace"))
                self._last_lines.append(text + "\n")
                logger.info("%s: %s", self.name, text[:_LOGGED_CHARS].rstrip())
            if not data:
                self._close_output()

    @property
    def last_output(self) -> str:
        """The end of what the process printed: its traceback, if it had one."""
        return "".join(self._last_lines)[-_LAST_OUTPUT_BYTES:]

    # --- its end

    def reap(self) -> int | None:
        """The exit code of a process that has ended, negative for a signal; None while it runs, or without
        one.

        What the process has started ends with it, except for processes in a session of their own.
        """
        if self.pid is None:
            return None
        done, status = os.waitpid(self.pid, os.WNOHANG)
        return self._ended(status) if done else None

    def _ended(self, status: int) -> int:
        assert self.pid is not None
        ended = self._forks.ended
        ended.add(self.pid)
        ended.end_members()  # now: they may keep our end of its output open
        self._forks.guardian.forget(self.pid)
        self.read_output()
        self.close_ends()
        self.pid = None
        return os.waitstatus_to_exitcode(status)

    def close_ends(self) -> None:
        """Close this side of the messages and of the output."""
        if self.channel is not None:
            with suppress(KeyError, ValueError, RuntimeError):
                self._forks.selector.unregister(self.channel)
            self.channel.close()
            self.channel = None
        self._close_output()

    def _close_output(self) -> None:
        if self._output >= 0:
            with suppress(KeyError, ValueError, RuntimeError):
                self._forks.selector.unregister(self._output)
            os.close(self._output)
            self._output = -1

    def ask_to_stop(self) -> None:
        """Ask the process to publish what it has, and to end."""
        if self.channel is not None:
            self.channel.tell("stop")

    def kill(self) -> None:
        """Kill the process; `reap` ends what it has started."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and wait for it; what it has started ends as after `reap`."""
        if self.pid is not None:
            self.kill()
            status = wait_for_end(self.pid)
            if status is None:
                logger.warning(
                    "%s, process %d, does not end: a disk or a network file system may hang",
                    self.name,
                    self.pid,
                )
            self._ended(signal.SIGKILL if status is None else status)
