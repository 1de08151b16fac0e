"""The supervision of the process that shares a filling.

Of this folder, the supervisor loads only this module and `connection`: neither imports Ray.
"""

from __future__ import annotations

import logging
from typing import Final

from cachestream.worker.child_process import ChildProcess, ForkServer
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job
from cachestream.worker.processes import EXIT_FATAL

ALONE: Final = "the group of caches does not answer: filling alone"
WAITING: Final = "the group of caches does not answer: waiting for it, as share_required=True says"
ANSWERS: Final = "the group of caches answers"

logger = logging.getLogger("cachestream.worker")


class SharingProcess:
    """Starts the process, and starts it again whenever it ends.

    `message`: the reason of the state of the filling while the group does not answer; else empty.
    """

    def __init__(self, job: Job, server: ForkServer, job_fd: int) -> None:
        self.process = ChildProcess(
            "cachestream.worker.cluster.sharing", "sharing", server, job.sys_path, job_fd
        )
        self.message = ""
        self._hang_timeout_s = job.hang_timeout_s

    def begin(self, now_s: float) -> None:
        self.process.start(now_s)

    def tick(self, now_s: float, resumed_s: float) -> None:
        """Reap, restart or kill the process as needed; raises GiveUpError if the group refuses the cache.

        `resumed_s`: see `ChildProcess.is_silent`.
        """
        code = self.process.reap()
        if code == EXIT_FATAL:
            raise GiveUpError(self.process.last_output)
        if code is not None:
            logger.warning(
                "the process that shares the filling ended with code %d: another one follows", code
            )
            self.process.start_at_s = now_s + LATER_PAUSE_S
        elif self.process.is_silent(now_s, resumed_s, self._hang_timeout_s):
            logger.warning("the process that shares the filling shows no sign of life: it is killed")
            self.process.kill()
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self.process.start(now_s)
        output = self.process.last_output
        place, said = max((output.rfind(text), text) for text in (ALONE, WAITING, ANSWERS))
        if place >= 0:
            self.message = "" if said == ANSWERS else said
