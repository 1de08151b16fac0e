"""A background process from both sides: the supervisor starts, watches and reaps it; the process itself stops with the supervisor."""

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
from cachestream.worker.health import Death, Suspicion, hanging_positions, suspicions
from cachestream.worker.job import read_frame, write_frame
from cachestream.worker.processes import (
    die_with_parent,
    end_group,
    end_group_of_dead,
    is_stopped,
    start_python,
)

EXIT_FATAL: Final = 3
EXIT_RESTART: Final = 4
EXIT_LATER: Final = 5
GRACE_S: Final = 3.0
_NICE: Final = 5
_LAST_WORDS_BYTES: Final = 8192
logger = logging.getLogger("cachestream.worker")


def start_sampling(
    module: str, server: ForkServer | None, sys_path: tuple[str, ...], job_fd: int
) -> subprocess.Popen[bytes] | Forked:
    """Start `main()` of `module` with pipes to and from it; in a Python of its own if there is no fork server any more."""
    forked = None if server is None else server.start(module, job_fd)
    return forked or start_python(
        module,
        sys_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(job_fd,),
        start_new_session=True,  # as the fork server gives them
    )


def poll_process(process: subprocess.Popen[bytes] | Forked) -> int | None:
    """Its exit code, None while it runs. What it started goes with it, but for what has a session of its own."""
    if process.pid is not None and process.returncode is None:
        end_group_of_dead(process.pid)
    return process.poll()


def end_process(process: subprocess.Popen[bytes] | Forked) -> None:
    """End it now, with all that it started."""
    if process.pid is not None and poll_process(process) is None:
        end_group(process.pid)
    process.kill()
    process.wait(timeout=5.0)


def words_of(stream: IO[bytes]) -> Iterator[bytes]:
    """What a process says, line by line, without the secrets of URLs. One that never ends its line comes in pieces: memory
    is bounded.
    """
    for line in iter(lambda: stream.readline(_LAST_WORDS_BYTES), b""):
        yield redact_text(line.decode("utf-8", "replace")).encode()


class Child:
    """The process in slot `index`; `start` again after a death. `job_fd` is the job, see `job.share`."""

    def __init__(
        self, server: ForkServer, job_fd: int, sys_path: tuple[str, ...], index: int, board: Board
    ) -> None:
        self._server = server
        self._job_fd = job_fd
        self._sys_path = sys_path
        self.index = index
        self._board = board
        self._slot = board.slot(index)
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._words: deque[bytes] = deque(maxlen=64)
        self._listener: threading.Thread | None = None
        self._work_before = 0
        self._hung: list[int] | None = None
        self._was_stopped = False
        self.start_at_s: float | None = None  # when it is due to be started again
        self.started_s = 0.0

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> list[int | None]:
        """The process's number while it runs; None where it is not known yet."""
        return [] if self._process is None else [self._process.pid]

    def start(self, now_s: float) -> None:
        """Start the process; its output becomes its last words, and goes to the log."""
        self._board.clear_flights(self.index)
        self._slot["state"], self._slot["beat_s"] = STARTING, now_s
        self._work_before = self._work()
        self._hung, self._was_stopped = None, False
        owner = f"{os.getpid()}-{self.index}-{secrets.token_hex(6)}"
        self._process = start_sampling(
            "cachestream.worker.sampler", self._server, self._sys_path, self._job_fd
        )
        self.started_s, self.start_at_s = now_s, None  # where that fails it is still due
        self._words.clear()
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()
        try:
            write_frame(self._process.stdin, (self._job_fd, self.index, owner))
        except BrokenPipeError:
            pass  # it died already; reap tells

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            for line in words_of(stream):
                self._words.append(line)
                logger.info("process %d: %s", self.index, line[:1000].decode("utf-8", "replace").rstrip())

    def _work(self) -> int:
        """What its successor need not do again."""
        return int(self._slot["committed"])

    def _flights(self) -> list[tuple[float, int]]:
        """The fetching threads' last beats, and the positions they read."""
        beats, flights = self._slot["flight_beats_s"].tolist(), self._slot["flights"].tolist()
        return [
            (beat_s, unit_read - 1) for beat_s, unit_read in zip(beats, flights, strict=True) if unit_read
        ]

    def _in_transform(self) -> int | None:
        return int(self._slot["alone"]) - 1 if self._slot["alone"] else None

    def kill_if_hanging(
        self, now_s: float, resumed_s: float, timeout_s: float, start_deadline_s: float
    ) -> None:
        """End a process that shows no life, nor has since all went on after a stop, at `resumed_s`."""
        if self._process is None or self._hung is not None:
            return
        if int(self._slot["state"]) == STARTING:
            if now_s - max(self.started_s, resumed_s) > start_deadline_s:
                self._hung = []
        elif now_s - resumed_s > timeout_s:
            main = (float(self._slot["beat_s"]), self._in_transform())
            self._hung = hanging_positions(now_s, timeout_s, main, self._flights())
        if self._hung is not None:
            pid = self._process.pid
            self._was_stopped = pid is not None and is_stopped(pid)
            self._process.kill()

    def reap(self, now_s: float) -> tuple[Death, list[Suspicion], int] | None:
        """How the process ended, whom it leaves under suspicion, and in which pass; None while it runs."""
        if self._process is None or (code := poll_process(self._process)) is None:
            return None
        process, self._process = self._process, None
        if process.stdin is not None:
            _close(process.stdin)
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        positions = self._hung
        if positions is None:
            in_transform = self._in_transform()
            positions = [unit_read for _, unit_read in self._flights()]
            positions += [] if in_transform is None else [in_transform]
        death = Death(
            now_s,
            code,
            hanging=self._hung is not None,
            stopped=self._was_stopped,
            # A process that says nothing was ended by what it worked on, with whatever exit code.
            orderly=int(self._slot["state"]) == ENDED,
            progressed=self._work() > self._work_before,
            suspects=len(set(positions)),
        )
        pass_id = int(self._slot["pass_id"])
        self._board.clear_flights(self.index)
        return death, suspicions(death, positions), pass_id

    @property
    def last_words(self) -> str:
        """The end of what the process printed: its traceback, if it had one."""
        return b"".join(self._words)[-_LAST_WORDS_BYTES:].decode("utf-8", "replace")

    def ask_to_stop(self) -> None:
        """Close the pipe: the process publishes what it has and ends."""
        if self._process is not None and self._process.stdin is not None:
            _close(self._process.stdin)

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            end_process(self._process)


def _close(stream: IO[bytes]) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        pass


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


def _watch_parent(fd: int, stop: threading.Event) -> None:
    """Wait for the end of the pipe from the supervisor; then stop, at once if that takes too long."""
    # Not through sys.stdin, whose lock would be held for ever in what the user's code forks: multiprocessing closes it there.
    with suppress(OSError):
        while os.read(fd, 1):
            pass
    stop.set()
    time.sleep(GRACE_S)  # the process ends meanwhile, and this thread with it
    os._exit(0)
