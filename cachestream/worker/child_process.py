"""A process of the supervisor: started and restarted, with its output in the log."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Final

from cachestream.transport.remote_errors import redact_text
from cachestream.worker.fork_server import ForkedProcess, ForkServer
from cachestream.worker.processes import start_python, write_frame

_LAST_OUTPUT_BYTES: Final = 8192

logger = logging.getLogger("cachestream.worker")


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

    @property
    def is_over(self) -> bool:
        """True if the process does not run, and is not to be started."""
        return self._process is None and self.start_at_s is None

    @property
    def pid(self) -> int | None:
        """The id of the running process; None where it is not known yet."""
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
