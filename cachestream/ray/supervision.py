"""The supervisor's side of a filling that is shared with a group of caches.

Of this folder, the supervisor loads only this module, which does not import Ray. While the group does not
answer, the supervisor has positions made without it: few at a time, at random places, so that little was made
twice once the group answers again.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cachestream.schema import IntArray
from cachestream.storage.progress import PassRow, Positions
from cachestream.worker.channel import Channel, Message
from cachestream.worker.child_process import Forks
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job
from cachestream.worker.passes import block_size
from cachestream.worker.processes import EXIT_FATAL
from cachestream.worker.sampling.messages import Publication

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.worker.planner import Planner
    from cachestream.worker.requests import Requests

ANSWER_S: Final = 10.0  # without an answer of the group for so long the cache goes on alone
CONNECT_S: Final = 50.0  # more, at first
SILENT_S: Final = 60.0  # Ray may block for long while the head of the cluster is away
OFFERED: Final = 2  # blocks of units ready for each sampling process
ALONE: Final = "the group of caches does not answer: filling alone"
WAITING: Final = "the group of caches does not answer: waiting for it, as share_required=True says"

logger = logging.getLogger("cachestream.worker")


@dataclass(frozen=True, slots=True)
class SharedPass:
    """The current pass of a cache that shares its filling.

    `undecided`: positions on which the group decides. `making`: positions that sampling processes have, or
    may take; `wants`: the number of blocks that they could take besides.
    """

    row: PassRow
    undecided: tuple[Positions, ...]
    making: tuple[Positions, ...]
    wants: int

    def is_undecided(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """For each of `positions`: True if the group decides on it."""
        starts, stops = np.array(self.undecided, np.int64).reshape(-1, 2).T
        begun = np.searchsorted(starts, positions, side="right")
        is_in: npt.NDArray[np.bool_] = begun > np.searchsorted(stops, positions, side="right")
        return is_in


class SharingProcess:
    """Starts the process that talks to the group, answers it, and starts it again whenever it ends.

    `message`: see `Sharing`.
    """

    def __init__(self, job: Job, cache: Cache, forks: Forks, planner: Planner, requests: Requests) -> None:
        assert job.cluster is not None
        self._job, self._cache, self._planner, self._requests = job, cache, planner, requests
        self._group, self._must_wait = job.cluster.group, job.cluster.required
        self._answered_s, self._has_answered = math.inf, False
        self.process = forks.process("sharing", self._run)
        self.message = ""

    def _run(self, end: socket.socket) -> int:
        code: int = importlib.import_module("cachestream.ray.sharing").run(end, self._job)
        return code

    def begin(self, now_s: float) -> None:
        self._answered_s = now_s + CONNECT_S
        self.process.start(now_s)

    def tick(self, now_s: float, resumed_s: float) -> int | None:
        """Reap, restart or kill the process as needed; the exit code if it has ended.

        `resumed_s`: see `ChildProcess.is_silent`. Raises GiveUpError if the group refuses the cache.
        """
        code = self.process.reap()
        if code == EXIT_FATAL:
            raise GiveUpError(self.process.last_output)
        if code is not None:
            logger.warning(
                "the process that shares the filling ended with code %d: another one follows", code
            )
            self.process.start_at_s = now_s + LATER_PAUSE_S
        elif self.process.is_silent(now_s, resumed_s, max(SILENT_S, self._job.hang_timeout_s)):
            logger.warning("the process that shares the filling shows no sign of life: it is killed")
            self.process.kill()
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self.process.start(now_s)
        silent_s = now_s - max(self._answered_s, resumed_s)
        if silent_s > ANSWER_S and not self.message:
            self._go_alone(f"for {silent_s:.0f} s")
        if self.message and not self._must_wait:
            self._offer()
        return code

    def _go_alone(self, reason: str) -> None:
        logger.warning("the group %r does not answer (%s)", self._group, reason)
        self.message, self._has_answered = WAITING if self._must_wait else ALONE, False

    def _offer(self) -> None:
        """Have some positions made without the group."""
        size = self._block_size
        while (shared := self._shared_pass()) is not None and shared.undecided and shared.wants:
            start, stop = random.choice(shared.undecided)
            start = random.randrange(start, stop, size)
            self._planner.queue.decide([(start, min(stop, start + size))])
            self._planner.is_dirty = True

    def handle(self, process: int, channel: Channel, message: Message) -> bool:
        """Act on a message of the process; False for one that is not about sharing."""
        kind, number, arguments = message
        if kind == "group":
            self._hear(*arguments)
            return True
        answer = getattr(self, f"_on_{kind}", None)
        if answer is None:
            return False
        self._requests.answer(channel, number, lambda: answer(process, *arguments))
        return True

    def _hear(self, reason: str) -> None:
        """Note that the group has answered ("" as the reason), or why it cannot."""
        if reason:
            if not self.message:
                self._go_alone(reason)
            return
        if not self._has_answered:
            logger.info("the group %r answers", self._group)
        self.message, self._answered_s, self._has_answered = "", time.monotonic(), True

    # --- what the process asks for

    def _on_share(self, _process: int) -> None:
        self._planner.share()

    def _on_shared_pass(self, _process: int) -> SharedPass | None:
        return self._shared_pass()

    @property
    def _block_size(self) -> int:
        plan = self._planner.plan
        return block_size(None if plan is None else plan.length, self._job.num_workers)

    def _shared_pass(self) -> SharedPass | None:
        planner, queue = self._planner, self._planner.queue
        if planner.plan is None:
            return None
        waiting = sum(stop - position for position, _, stop in queue.waiting)
        return SharedPass(
            planner.row_without_progress,
            tuple(queue.undecided or ()),
            tuple((position, stop) for position, _, stop in queue.open),
            max(0, OFFERED * self._job.num_workers - -(-waiting // self._block_size)),
        )

    def _on_decide(self, _process: int, pass_id: int, make: list[Positions]) -> None:
        if pass_id == self._planner.row_without_progress.id:
            self._planner.queue.decide(make)
            self._planner.is_dirty = True

    def _on_follow(self, _process: int, pass_id: int, ordinal: int) -> bool:
        """Follow the group to another pass, if nothing is done of this one."""
        planner, queue = self._planner, self._planner.queue
        row, plan = planner.row, planner.plan
        assert plan is not None
        is_new = row.id == pass_id and queue.undecided == [(0, row.length)] and not row.open
        if is_new and not self._requests.status.has_samples:
            planner.follow_pass(ordinal)
            return True
        return False

    def _on_earlier(self, _process: int, source: str, plan: str, length: int | None) -> int:
        return self._cache.filling.enter_earlier_pass(source, plan, length)

    def _on_import(self, process: int, publication: Publication, positions: IntArray) -> bool:
        """Publish a copied shard, if the group decides on all of its `positions` in the current pass.

        Of these this cache has made nothing; the process has left out what it holds besides.
        """
        shared = self._shared_pass()
        if shared is None or not shared.is_undecided(positions).all():
            return False
        self._requests.publish(process, publication)
        return True
