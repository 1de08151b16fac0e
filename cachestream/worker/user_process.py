"""The user's code that decides for a supervisor: samplers, curricula and eviction functions, in a process of
their own.

The supervisor runs no code of the user's: it forks, and must not hang.
"""

from __future__ import annotations

import operator
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cachestream.errors import CacheStreamError, ConfigError, WorkerError
from cachestream.linux import name_process
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.child_process import ChildProcess, Forks
from cachestream.worker.job import Job, unpack
from cachestream.worker.processes import end_soon, exit_now, heed_signals
from cachestream.worker.user_order import UserOrder

if TYPE_CHECKING:
    from cachestream.schema import IntArray, ShardRow

_DRAW_S: Final = 600.0
_EVICT_S: Final = 15.0  # below the time for which others wait for the catalogue
_LOOK_S: Final = 0.5


class UnwantedError(BaseException):
    """The supervisor is to end while it waits for the user's code. As an interrupt: no handler of errors on the
    way takes it for one.
    """


class UserCode:
    """The process that draws the orders of passes, and chooses what to evict; started when it is needed.

    `must_stop()` is asked again and again while the user's code runs, which may take minutes.
    """

    def __init__(self, job: Job, forks: Forks) -> None:
        self._process = forks.process("user code", lambda end: run(end, job))
        self.must_stop: Callable[[], bool] = lambda: False

    @property
    def process(self) -> ChildProcess:
        return self._process

    def draw(self, ordinal: int) -> IntArray:
        """The units of pass `ordinal` in their order.

        Raises ConfigError for a sampler that does not work, and UnwantedError if the supervisor is to stop.
        """
        drawn: IntArray = self._ask("draw", ordinal, timeout_s=_DRAW_S)
        return drawn

    def evict(self, rows: Sequence[ShardRow]) -> Sequence[int]:
        """The ids of the shards to evict among `rows`, the first to go first. Raises as `draw`."""
        ids: Sequence[int] = self._ask("evict", tuple(rows), timeout_s=_EVICT_S)
        return ids

    def _ask(self, what: str, argument: Any, timeout_s: float) -> Any:
        process, deadline_s = self._process, time.monotonic() + timeout_s
        process.reap()  # it may have been killed since
        if not process.running:
            process.start(time.monotonic())
        assert process.channel is not None
        process.channel.tell(what, argument)
        while time.monotonic() < deadline_s:
            channel = process.channel.fileno()
            select.select(
                [channel, *process.outputs], [channel] if process.channel.is_blocked else [], [], _LOOK_S
            )
            process.channel.flush()
            process.read_output()
            for kind, _, arguments in process.receive():
                if kind == "error":
                    raise arguments[0]
                if kind == "made":
                    return arguments[0]
            if self.must_stop():
                process.end()
                raise UnwantedError
            if process.reap() is not None:
                raise WorkerError(f"the process of the user's code ended: {process.last_output.strip()}")
        process.end()
        raise ConfigError(f"{what}: the user's code did not return within {timeout_s:g} s")


def run(end: socket.socket, job: Job) -> int:
    """Be the process of the user's code of `job`; does not return."""
    stop = threading.Event()
    heed_signals(stop)
    name_process("cs-user-code")
    asked: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    link = SupervisorLink(end, lambda kind, *given: asked.put((kind, *given[:1])), lambda: end_soon(stop))
    order = UserOrder(job)
    while True:
        kind, *given = asked.get()
        if kind == "stop":
            exit_now(0)
        try:
            if kind == "draw":
                link.tell("made", order.draw(given[0]))
            elif kind == "evict":
                link.tell("made", _chosen(job, given[0]))
        except CacheStreamError as error:
            link.tell("error", error)
        except Exception as error:  # noqa: BLE001  the user's code raises anything
            words = f"the user's code failed ({kind}): {type(error).__name__}: {error}"
            link.tell("error", WorkerError(words, traceback.format_exc()))


def _chosen(job: Job, rows: Sequence[ShardRow]) -> Any:
    """Return the answer of the user's eviction function, as it can be sent."""
    answer = unpack(job.payload).eviction(rows)
    if not hasattr(answer, "__iter__"):
        raise ConfigError(
            f"the eviction function returned a {type(answer).__name__}; return some of the rows it gets"
        )
    return [operator.index(getattr(one, "id", one)) for one in answer]
