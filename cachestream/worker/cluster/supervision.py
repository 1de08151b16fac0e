"""The supervisor's side of a filling that is shared with a group of caches.

Of this folder, the supervisor loads only this module and `connection`: neither imports Ray.
"""

from __future__ import annotations

import importlib
import logging
import socket
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.schema import IntArray, Span
from cachestream.storage.filling import overlapping
from cachestream.storage.progress import Positions
from cachestream.storage.publish import SpansOf
from cachestream.worker.channel import Channel, Message
from cachestream.worker.child_process import ChildProcess, Forks
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job
from cachestream.worker.messages import Import, SharedPass
from cachestream.worker.passes import block_size
from cachestream.worker.processes import EXIT_FATAL

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.worker.planner import Planner
    from cachestream.worker.requests import Requests

ALONE: Final = "the group of caches does not answer: filling alone"
WAITING: Final = "the group of caches does not answer: waiting for it, as share_required=True says"

logger = logging.getLogger("cachestream.worker")


class SharingProcess:
    """Starts the process that talks to the group, answers it, and starts it again whenever it ends.

    `message`: the reason of the state of the filling while the group does not answer; else empty.
    """

    def __init__(self, job: Job, cache: Cache, forks: Forks, planner: Planner, requests: Requests) -> None:
        self._job, self._cache, self._planner, self._requests = job, cache, planner, requests
        self.process = ChildProcess("sharing", forks, self._run)
        self.message = ""

    def _run(self, end: socket.socket) -> int:
        code: int = importlib.import_module("cachestream.worker.cluster.sharing").run(end, self._job)
        return code

    def begin(self, now_s: float) -> None:
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
        elif self.process.is_silent(now_s, resumed_s, self._job.hang_timeout_s):
            logger.warning("the process that shares the filling shows no sign of life: it is killed")
            self.process.kill()
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self.process.start(now_s)
        return code

    def handle(self, process: int, channel: Channel, message: Message) -> bool:
        """Act on a message of the process; False for one that is not about sharing."""
        kind, number, arguments = message
        if kind == "group":
            (self.message,) = arguments
            return True
        answer = getattr(self, f"_on_{kind}", None)
        if answer is None:
            return False
        self._requests.answer(channel, number, lambda: answer(process, *arguments))
        return True

    # --- what the process asks for

    def _on_share(self, _process: int) -> None:
        self._planner.queue.share()
        self._planner.is_dirty = True

    def _on_shared_pass(self, _process: int) -> SharedPass | None:
        return self._shared_pass()

    def _shared_pass(self) -> SharedPass | None:
        planner, queue = self._planner, self._planner.queue
        if planner.plan is None:
            return None
        waiting = sum(stop - position for position, _, stop in queue.waiting)
        return SharedPass(
            planner.row_without_progress,
            tuple(queue.undecided or ()),
            tuple((position, stop) for position, _, stop in queue.open),
            -(-waiting // block_size(planner.plan.length, self._job.num_workers)),
        )

    def _on_decide(self, _process: int, pass_id: int, make: list[Positions], done: list[Positions]) -> None:
        if pass_id == self._planner.row_without_progress.id:
            self._planner.queue.decide(make, done)
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

    def _on_import(self, process: int, imported: Import) -> bool:
        """Publish a copied shard, unless this cache holds or makes its samples by now."""
        pass_id, spans = imported.publication.pass_id, imported.publication.spans

        def is_wanted(spans_of: SpansOf) -> bool:
            shared = self._shared_pass()
            assert shared is not None
            return _is_open(spans_of, pass_id, spans, shared, imported.positions)

        return self._requests.publish(process, imported.publication, is_wanted)


def _is_open(
    spans_of: SpansOf, pass_id: int, spans: tuple[Span, ...], shared: SharedPass, positions: IntArray
) -> bool:
    """True if this cache neither holds nor makes the samples of `spans` of the pass `pass_id`.

    In its current pass, which may be another one, they are at `positions`.
    """
    if len(overlapping(spans_of(pass_id), spans)):
        return False
    if pass_id != shared.row.id:
        made = spans_of(shared.row.id)
        held = [(int(first), int(last) + int(until > 0)) for first, _, last, until in made]
        if any(np.any((positions >= start) & (positions < stop)) for start, stop in held):
            return False
    return not np.any(shared.is_making(positions))
