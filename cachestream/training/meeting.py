"""Where the ranks of a job meet: a store that all reach, and a connection of our own to it that cannot hang.

Torch's calls wait for an answer for as long as the network says nothing: on a host that is cut off, for a quarter of
an hour. So the socket under the connection gets a time limit.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed as dist

from cachestream.errors import RankMismatchError

if TYPE_CHECKING or dist.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["PAUSES_S", "Cancelled", "Line", "meet_at"]

PAUSES_S: Final = (0.002, 0.1)  # between two looks at the store: the first, and the most
_CONNECT_S: Final = 30.0
_ANSWER_S: Final = 20.0
_connecting = threading.Lock()
T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 - not an error: nobody waits for the result any more
    """A preparation was given up because the trainer went elsewhere, or the loader was closed."""


class Line:
    """A connection to a store; `serve` does what rank 0 owes to those that are still on their way.

    Once the store has not answered, all further calls fail at once: what is late may still come, and would be taken
    for the answer to another call. Used by one thread.
    """

    def __init__(self, store: Store, serve: Callable[[], None] = lambda: None) -> None:
        self.serve = serve
        self._store = store
        self._failure: str | None = None

    def call(self, ask: Callable[[Store], T]) -> T:
        """What `ask` gets from the store. Raises RankMismatchError when the store does not answer."""
        if self._failure is not None:
            raise RankMismatchError(self._failure)
        try:
            return ask(self._store)
        except (RuntimeError, OSError) as error:  # torch's DistError among them
            self._failure = (
                f"the store that the ranks agree through does not answer ({str(error).splitlines()[0]}): the "
                "process that hosts it (torchrun's agent, or rank 0) has ended, or the network is cut"
            )
            raise RankMismatchError(self._failure) from error


def meet_at(prefix: str, where: str, deadline_s: float, answer_s: float, closed: threading.Event) -> Line:
    """The line of this rank of the job of `torch.distributed`, under a name that no earlier run has used.

    torchrun may keep the job's store, and what is written there, when it starts the ranks again. So nobody believes
    what is there already: each rank asks under a number of its own, and rank 0 answers with that number. `where`
    says what the ranks come for. Raises RankMismatchError when rank 0 does not come within `deadline_s`, Cancelled.
    """
    default = dist.distributed_c10d._get_default_store()
    exchange = PrefixStore(prefix, default)
    if dist.get_rank() == 0:
        server, own_host, port = _server(default)
        address = {"host": own_host, "port": port, "own": server is not None, "token": secrets.token_hex(8)}
        return Line(_reach(address, server, answer_s), _answerer(exchange, address))
    mine, rank = secrets.token_hex(8), dist.get_rank()
    exchange.set(f"ask/{rank}", mine)
    exchange.add("asked", 1)
    give_up = time.monotonic() + deadline_s
    pause_s, most_s = PAUSES_S
    while True:
        if exchange.check([f"answer/{rank}"]):
            answer = json.loads(exchange.get(f"answer/{rank}"))
            if answer["to"] == mine:
                return Line(_reach(answer, None, answer_s))
        if time.monotonic() > give_up:
            raise RankMismatchError(
                f"rank 0 has not come to {where} within {deadline_s:.3g} s: dead, or stuck? "
                "Every rank must make and iterate the same loaders"
            )
        if closed.wait(pause_s):
            raise Cancelled
        pause_s = min(2 * pause_s, most_s)


def _answerer(exchange: Store, address: dict[str, Any]) -> Callable[[], None]:
    """Rank 0's part: tell everyone who has asked since the last call where to meet."""
    answered: dict[int, str] = {}
    seen = [-1]

    def serve() -> None:
        asked = exchange.add("asked", 0)
        if asked == seen[0]:
            return
        seen[0] = asked
        for rank in range(1, dist.get_world_size()):
            if not exchange.check([f"ask/{rank}"]):
                continue
            number = exchange.get(f"ask/{rank}").decode()
            if answered.get(rank) != number:
                exchange.set(f"answer/{rank}", json.dumps({**address, "to": number}))
                answered[rank] = number

    return serve


def _reach(address: dict[str, Any], server: TCPStore | None, answer_s: float) -> Store:
    """The store at `address`, under the name that its token gives."""
    host = str(address["host"])
    if address["own"] and host == socket.gethostname():
        host = "127.0.0.1"
    return PrefixStore(
        address["token"], server or _client(host, int(address["port"]), min(answer_s, _ANSWER_S))
    )


def _client(host: str, port: int, answer_s: float) -> TCPStore:
    """A connection whose calls fail when no answer comes within `answer_s`."""
    with _connecting:
        before = set(_sockets_to(port))
        client = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
        seconds, fraction = divmod(answer_s, 1.0)
        limit = struct.pack("ll", int(seconds), int(1e6 * fraction))
        for fd in set(_sockets_to(port)) - before:
            try:
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            except OSError:
                continue  # closed meanwhile, so not that of the client
    return client


def _sockets_to(port: int) -> list[int]:
    """The file descriptors of this process's sockets that are connected to `port` somewhere."""
    if socket.getdefaulttimeout() is not None:
        return []  # a look would change the sockets: Python makes those that it opens non-blocking then
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                if copy.getpeername()[1] == port:
                    found.append(fd)
        except (OSError, IndexError, TypeError):
            continue  # closed meanwhile, not connected, or of another family
    return found


def _server(default: Store) -> tuple[TCPStore | None, str, int]:
    """Where the ranks can meet: the job's own TCPStore server, or a new one where the job has none."""
    store = default
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return None, store.host, store.port
    server = TCPStore(
        "0.0.0.0",  # noqa: S104 - the ranks may be on other hosts
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
    return server, socket.gethostname(), server.port
