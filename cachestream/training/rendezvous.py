"""The rendezvous of a job's ranks: a store that all reach, over a connection that cannot hang.

A call of torch's store waits for an answer until TCP gives up, a quarter of an hour if the host is cut off.
So a thread makes each call, and whoever asks waits for it up to a limit.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed as dist

from cachestream.errors import RankMismatchError
from cachestream.training.threads import make_thread, start_once, watched

if TYPE_CHECKING:
    from cachestream.training.threads import Flag
if TYPE_CHECKING or dist.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


PAUSES_S: Final = (0.002, 0.1)  # between two polls of the store: the first pause, and the longest
ANNOUNCED_AT: Final = 0.3  # of the deadline: then a warning says for whom a rank waits
_CONNECT_S: Final = 30.0
_LEAST_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 20.0
T = TypeVar("T")
logger = logging.getLogger("cachestream")


class Cancelled(Exception):  # noqa: N818 - not an error: the result is not wanted any more
    """A preparation was cancelled because the trainer jumped, or the loader was closed."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The rank of this process in a job; `group`, a weak reference, makes jobs compare unequal."""

    rank: int
    size: int
    group: object


class StoreConnection:
    """A connection to a store. On rank 0 `serve` answers ranks that still connect. Used by one thread.

    After a call without an answer within `answer_s` all further calls fail at once: that one still waits.
    """

    def __init__(
        self, store: Store, answer_s: float = _ANSWER_S, serve: Callable[[], None] = lambda: None
    ) -> None:
        self.serve = serve
        self._store = store
        self._answer_s = answer_s
        self._failure: str | None = None

    def call(self, ask: Callable[[Store], T]) -> T:
        """Return `ask(store)`. Raises RankMismatchError when the store does not answer."""
        if self._failure is not None:
            raise RankMismatchError(self._failure)
        try:
            return _within(self._answer_s, lambda: ask(self._store))
        except _NO_ANSWER as error:
            tcp = _tcp_below(self._store)
            self._failure = _no_answer("" if tcp is None else f" at {tcp.host}:{tcp.port}", error)
            raise RankMismatchError(self._failure) from error


# torch's DistError is a RuntimeError.
_NO_ANSWER: Final = (RuntimeError, OSError, futures.TimeoutError)


def _within(limit_s: float, ask: Callable[[], T]) -> T:
    """Return `ask()`, called in a thread. Raises what it raises, and TimeoutError after `limit_s`."""
    answer: futures.Future[T] = futures.Future()

    def call() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001 - raised by `result`
            answer.set_exception(error)

    start_once(make_thread(call, "rendezvous"))
    left_s = limit_s
    while not answer.done() and left_s > 0:
        left_s -= watched(lambda moment_s: futures.wait([answer], moment_s), left_s)
    return answer.result(0)


def _no_answer(at: str, error: Exception) -> str:
    said = (str(error) or type(error).__name__).splitlines()[0]
    return (
        f"the store that the ranks agree through{at} does not answer ({said}): the process that hosts it "
        "(torchrun's agent, or rank 0) has ended, or the network is cut; see its log, and start the job again"
    )


def meet_at(
    job: ProcessGroup, prefix: str, where: str, deadline_s: float, answer_s: float, closed: Flag
) -> StoreConnection:
    """Connect this rank of `job` to the store, under a prefix that no earlier run has used.

    torchrun may keep the job's store with its contents when it restarts the ranks. So each rank asks with a
    random token, and rank 0 answers with that token. `where` names the call in error messages. Raises
    Cancelled, and RankMismatchError when the store does not answer, or rank 0 does not connect within
    `deadline_s`.
    """
    began_s, rank = time.monotonic(), job.rank
    connect_s, answer_s = max(_LEAST_CONNECT_S, min(0.3 * deadline_s, _CONNECT_S)), min(answer_s, _ANSWER_S)
    default = _default_store()
    # While torch waits there for a key of the trainer's, it holds the job's own connection for itself: calls
    # on that may last as long as the meeting, and the answer of the host is looked for on another one.
    exchange, tcp = StoreConnection(PrefixStore(prefix, default), deadline_s), _tcp_below(default)
    store = None if tcp is None else _client(tcp.host, tcp.port, connect_s)
    if rank == 0:
        address: dict[str, Any] = {"token": secrets.token_hex(8)}
        if store is None:
            store = _start_store()
            address |= {"host": socket.gethostname(), "port": store.port}
        serve = _answerer(exchange, address, job.size)
        return StoreConnection(PrefixStore(address["token"], store), answer_s, serve)
    mine = secrets.token_hex(8)
    exchange.call(lambda store: store.set(f"ask/{rank}", mine))
    exchange.call(lambda store: store.add("asked", 1))
    alive = None if store is None else StoreConnection(store, answer_s)
    pause_s, most_s = PAUSES_S
    announced = False
    while True:
        if alive is not None:
            alive.call(lambda store: store.check([mine]))
        if exchange.call(lambda store: store.check([f"answer/{rank}"])):
            answer = json.loads(exchange.call(lambda store: store.get(f"answer/{rank}")))
            if answer["to"] == mine:
                found = store or _reach(answer, connect_s)
                return StoreConnection(PrefixStore(answer["token"], found), answer_s)
        waited_s = time.monotonic() - began_s
        if waited_s > deadline_s:
            raise RankMismatchError(
                f"rank 0 has not come to {where} within {deadline_s:.3g} s: dead, or stuck? "
                "Every rank must call cs.stream, or make and iterate the same loaders"
            )
        if not announced and waited_s > ANNOUNCED_AT * deadline_s:
            announced = True
            words = "rank %d has waited %.3g s for rank 0 to come to %s, and gives up after %.3g s"
            logger.warning(words, rank, waited_s, where, deadline_s)
        if closed.wait(pause_s):
            raise Cancelled
        pause_s = min(2 * pause_s, most_s)


def _default_store() -> Store:
    """The store of the job. Raises RankMismatchError when the job has ended meanwhile."""
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RankMismatchError(
            "the process group was destroyed while its ranks were looked for; make it again, and iterate the "
            "loader once more"
        ) from error


def _answerer(exchange: StoreConnection, address: dict[str, Any], size: int) -> Callable[[], None]:
    """The `serve` of rank 0: send the address to the ranks that have asked since the last call."""
    answered: dict[int, str] = {}
    seen = [-1]

    def answer(store: Store) -> None:
        asked = store.add("asked", 0)
        if asked == seen[0]:
            return
        seen[0] = asked
        for rank in range(1, size):
            if not store.check([f"ask/{rank}"]):
                continue
            token = store.get(f"ask/{rank}").decode()
            if answered.get(rank) != token:
                store.set(f"answer/{rank}", json.dumps({**address, "to": token}))
                answered[rank] = token

    return lambda: exchange.call(answer)


def _reach(address: dict[str, Any], connect_s: float) -> TCPStore:
    """The store that rank 0 serves."""
    host = str(address["host"])
    if host == socket.gethostname():
        host = "127.0.0.1"
    return _client(host, int(address["port"]), connect_s)


def _client(host: str, port: int, connect_s: float) -> TCPStore:
    """A connection of our own. Raises RankMismatchError when there is none within `connect_s`."""
    timeout = timedelta(seconds=connect_s)  # of the connecting only, not of the first answer
    try:
        return _within(
            connect_s,
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
        )
    except _NO_ANSWER as error:
        raise RankMismatchError(_no_answer(f" at {host}:{port}", error)) from error


def _tcp_below(store: Store) -> TCPStore | None:
    """The TCPStore under the prefixes of `store`; None if it is another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _start_store() -> TCPStore:
    """Start a store for the ranks of a job that has no TCPStore."""
    return TCPStore(
        "0.0.0.0",  # noqa: S104 - the ranks may be on other hosts
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
