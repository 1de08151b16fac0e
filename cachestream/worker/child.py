"""A background process from both sides: the supervisor starts, watches and reaps it.

The process itself stops with the supervisor.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, Final

from cachestream.storage.telemetry import ENDED, STARTING, Board
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.fork_server import Forked, ForkServer
from cachestream.worker.health import START_DEADLINE_S, Death, Suspicion, hanging_positions, suspicions
from cachestream.worker.job import read_frame, write_frame
from cachestream.worker.processes import (
    die_with_parent,
    end_group,
    end_group_of_dead,
    is_stopped,
    start_python,
)

EXIT_FATAL: Final = 3  # another process would fail, too
EXIT_RESTART: Final = 4  # another process is to go on at once
EXIT_LATER: Final = 5  # another process is to go on once the disk or the catalogue may be free
GRACE_S: Final = 3.0
_NICE: Final = 5
_LAST_WORDS_BYTES: Final = 8192
logger = logging.getLogger("cachestream.worker")


def words_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines that a process prints, without the secrets of URLs; an endless line comes in pieces."""
    for line in iter(lambda: stream.readline(_LAST_WORDS_BYTES), b""):
        yield redact_text(line.decode("utf-8", "replace")).encode()


class ChildProcess:
    """A process that runs `main()` of `module` and gets its arguments through a pipe.

    The process can be started again after its end. All that it prints goes to the log, under `name`; its last
    lines are kept. An empty line is a sign of life only. `job_fd` is the shared job, see `job.share`. The
    process is forked by `server`, or is a Python of its own if there is no fork server any more.
    """

    def __init__(
        self, module: str, name: str, server: ForkServer | None, sys_path: tuple[str, ...], job_fd: int
    ) -> None:
        self._module, self._name = module, name
        self._server, self._sys_path, self._job_fd = server, sys_path, job_fd
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._listener: threading.Thread | None = None
        self._last_lines: deque[bytes] = deque(maxlen=64)
        self.life_s: float | None = None  # the time of its last sign of life

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> list[int | None]:
        """The process's id while it runs; None where it is not known yet."""
        return [] if self._process is None else [self._process.pid]

    def start(self, *arguments: object) -> None:
        """Start the process, and send it the descriptor of the job and its `arguments`."""
        self._last_lines.clear()
        self.life_s = None
        self._process = process = self._start()
        assert process.stdout is not None
        assert process.stdin is not None
        listener = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        listener.start()
        self._listener = listener
        with suppress(BrokenPipeError):  # it died already; `reap` tells
            write_frame(process.stdin, (self._job_fd, *arguments))

    def _start(self) -> subprocess.Popen[bytes] | Forked:
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
            for line in words_of(stream):
                if line == b"\n":
                    self.life_s = time.monotonic()
                    continue
                self._last_lines.append(line)
                logger.info("%s: %s", self._name, line[:1000].decode("utf-8", "replace").rstrip())

    @property
    def last_words(self) -> str:
        """The end of what the process printed: its traceback, if it had one."""
        return b"".join(self._last_lines)[-_LAST_WORDS_BYTES:].decode("utf-8", "replace")

    def reap(self) -> int | None:
        """The exit code of a process that has ended; None while it runs, or if there is none.

        What the process has started ends with it, except for processes in a session of their own.
        """
        process = self._process
        if process is None or (code := self._poll(process)) is None:
            return None
        self.ask_to_stop()
        self._process = None
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        return code

    @staticmethod
    def _poll(process: subprocess.Popen[bytes] | Forked) -> int | None:
        if process.pid is not None and process.returncode is None:
            end_group_of_dead(process.pid)
        return process.poll()

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
        """Kill the process with all that it has started, and wait for it."""
        process = self._process
        if process is None:
            return
        if process.pid is not None and self._poll(process) is None:
            end_group(process.pid)
        process.kill()
        process.wait(timeout=5.0)


class SamplingProcess:
    """The sampling process in slot `index` of the board: started, watched and reaped."""

    def __init__(
        self, server: ForkServer, job_fd: int, sys_path: tuple[str, ...], index: int, board: Board
    ) -> None:
        self.index = index
        self.process = ChildProcess(
            "cachestream.worker.sampler", f"process {index}", server, sys_path, job_fd
        )
        self._board = board
        self._slot = board.slot(index)
        self._committed_before = 0
        self._hung: list[int] | None = None
        self._was_stopped = False
        self.start_at_s: float | None = None  # when it is due to be started again
        self.started_s = 0.0

    def start(self, now_s: float) -> None:
        """Start the process; it stays due if the system refuses."""
        self._board.clear_flights(self.index)
        self._slot["state"], self._slot["beat_s"] = STARTING, now_s
        self._committed_before = int(self._slot["committed"])
        self._hung, self._was_stopped = None, False
        try:
            self.process.start(self.index, f"{os.getpid()}-{self.index}-{secrets.token_hex(6)}")
        finally:
            if self.process.running:
                self.started_s, self.start_at_s = now_s, None

    def _reads(self) -> list[tuple[float, int]]:
        """The fetching threads' last beats, and the positions they read."""
        beats, positions = self._slot["flight_beats_s"].tolist(), self._slot["flights"].tolist()
        return [(beat_s, one - 1) for beat_s, one in zip(beats, positions, strict=True) if one]

    def _in_transform(self) -> int | None:
        """The position of the sample that is being transformed."""
        return int(self._slot["alone"]) - 1 if self._slot["alone"] else None

    def kill_if_hanging(self, now_s: float, resumed_s: float, timeout_s: float) -> None:
        """Kill the process if it shows no life.

        Time before `resumed_s`, when all went on after a stop, does not count.
        """
        if not self.process.running or self._hung is not None:
            return
        if int(self._slot["state"]) == STARTING:
            if now_s - max(self.started_s, resumed_s) > START_DEADLINE_S:
                self._hung = []
        elif now_s - resumed_s > timeout_s:
            main = (float(self._slot["beat_s"]), self._in_transform())
            self._hung = hanging_positions(now_s, timeout_s, main, self._reads())
        if self._hung is not None:
            (pid,) = self.process.pids
            self._was_stopped = pid is not None and is_stopped(pid)
            self.process.kill()

    def reap(self, now_s: float) -> tuple[Death, list[Suspicion], int] | None:
        """The death of the process, the positions that it leaves under suspicion, and their pass.

        None while it runs.
        """
        code = self.process.reap()
        if code is None:
            return None
        positions = self._hung
        if positions is None:
            in_transform = self._in_transform()
            positions = [position for _, position in self._reads()]
            positions += [] if in_transform is None else [in_transform]
        death = Death(
            now_s,
            code,
            hanging=self._hung is not None,
            stopped=self._was_stopped,
            # A process that did not show its end was ended by what it worked on, whatever its exit code.
            orderly=int(self._slot["state"]) == ENDED,
            progressed=int(self._slot["committed"]) > self._committed_before,
            suspects=len(set(positions)),
        )
        pass_id = int(self._slot["pass_id"])
        self._board.clear_flights(self.index)
        return death, suspicions(death, positions), pass_id


def live_with_parent(stop: threading.Event) -> Any:
    """Tie this process to the supervisor: die with it, and set `stop` when the supervisor asks for that.

    Returns the arguments that the supervisor sends first.
    """
    faulthandler.enable()
    die_with_parent()
    # The supervisor handles Ctrl-C. SIG_IGN would outlast an exec.
    signal.signal(signal.SIGINT, lambda *_: None)
    with suppress(OSError):
        os.nice(_NICE)  # the trainer comes first
    stream = sys.stdin.buffer
    message = read_frame(stream)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM]),
        after_in_child=_restore_signals,
    )
    fd = stream.fileno()
    threading.Thread(target=_watch_parent, args=(fd, stop), name="parent", daemon=True).start()
    return message


def _restore_signals() -> None:
    """Restore the default signal handlers in a process that the user's code has forked, and unblock SIGTERM.

    A multiprocessing pool waits for ever for a process that ignores SIGTERM. The signal is blocked during the
    fork: our handler would take it, in a process that has nothing to stop.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_now(code: int) -> None:
    """End the process without waiting for its threads, which may hang in a dead connection."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch_parent(fd: int, stop: threading.Event) -> None:
    """Wait for the end of the pipe from the supervisor, then set `stop`.

    End the process if it still runs after a grace time.
    """
    # Not through sys.stdin: a process that the user's code forks would hold its lock for ever, and
    # multiprocessing closes it.
    with suppress(OSError):
        while os.read(fd, 1):
            pass
    stop.set()
    time.sleep(GRACE_S)  # as a rule the process, and this thread with it, ends meanwhile
    os._exit(0)
