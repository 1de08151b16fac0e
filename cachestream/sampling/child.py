"""One sampling process seen from the supervisor: started, watched, its last words kept."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections import deque
from typing import IO, Any, Final

from cachestream.sampling.health import Death, Suspicion, is_hanging, suspicions
from cachestream.sampling.job import Job, write_frame
from cachestream.storage.board import STARTING, Board

__all__ = ["Child", "start_python"]

_LAST_WORDS_BYTES: Final = 8192
logger = logging.getLogger("cachestream.worker")
# The child imports from where its parent does, and leaves the cores to the trainer's own threads.
_BOOT: Final = (
    "import os, sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "[os.environ.setdefault(n, '1') for n in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')]; "
    "sys.argv[1:] = []; from {module} import main; main()"
)


def start_python(module: str, sys_path: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
    """Start `main()` of `module` in a Python of its own: no fork of our state, no main guard needed."""
    command = [sys.executable, "-c", _BOOT.format(module=module), json.dumps(sys_path)]
    return subprocess.Popen(command, close_fds=True, **options)


class Child:
    """The process in slot `index`; `start` again after a death."""

    def __init__(self, job: Job, index: int, board: Board) -> None:
        self._job = job
        self.index = index
        self._board = board
        self._process: subprocess.Popen[bytes] | None = None
        self._words: deque[bytes] = deque(maxlen=64)
        self._listener: threading.Thread | None = None
        self._work_before = 0
        self._killed_as_hanging = False
        self.not_before_s = 0.0
        self.started_s = 0.0

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self, now_s: float) -> None:
        """Start the process; its output becomes its last words, and goes to the log."""
        self._board.clear_flights(self.index)
        slot = self._board.slot(self.index)
        slot["state"], slot["beat_s"] = STARTING, now_s
        self._work_before = self._work()
        self._killed_as_hanging = False
        self.started_s = now_s
        owner = f"{os.getpid()}-{self.index}-{secrets.token_hex(6)}"
        self._process = start_python(
            "cachestream.sampling.process",
            self._job.sys_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._words.clear()
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()
        try:
            write_frame(self._process.stdin, (self._job, self.index, owner))
        except BrokenPipeError:
            pass  # it died already; reap tells

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._words.append(line[-_LAST_WORDS_BYTES:])
                logger.info("process %d: %s", self.index, line[:1000].decode("utf-8", "replace").rstrip())

    def _work(self) -> int:
        slot = self._board.slot(self.index)
        return int(slot["written_bytes"]) + int(slot["failures"]) + int(slot["dropped"])

    def kill_if_hanging(self, now_s: float, timeout_s: float, start_deadline_s: float) -> None:
        """End a process that shows no life."""
        if self._process is None:
            return
        slot = self._board.slot(self.index)
        if int(slot["state"]) == STARTING:
            hanging = now_s - self.started_s > start_deadline_s
        else:
            beats = [
                beat
                for flight, beat in zip(
                    slot["flights"].tolist(), slot["flight_beats_s"].tolist(), strict=True
                )
                if flight
            ]
            hanging = is_hanging(now_s, float(slot["beat_s"]), beats, timeout_s)
        if hanging:
            self._killed_as_hanging = True
            self._process.kill()

    def reap(self, now_s: float) -> tuple[Death, list[Suspicion], int] | None:
        """How the process ended, whom it leaves under suspicion, and in which pass; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        process, self._process = self._process, None
        if process.stdin is not None:
            _close(process.stdin)
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        slot = self._board.slot(self.index)
        death = Death(now_s, process.returncode, self._killed_as_hanging, self._work() > self._work_before)
        flights = [int(flight) - 1 for flight in slot["flights"].tolist() if flight]
        in_transform = int(slot["alone"]) - 1 if slot["alone"] else None
        found = suspicions(death, flights, in_transform)
        self._board.clear_flights(self.index)
        return death, found, int(slot["pass_id"])

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
            self._process.kill()
            self._process.wait(timeout=5.0)


def _close(stream: IO[bytes]) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        pass
