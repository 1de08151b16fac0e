"""How the ranks of a job agree on an epoch: through a store, with deadlines, never through collectives.

The agreement runs in a background thread while the trainer's own collectives run, so it must not touch the
process group: it talks through a connection of its own to a TCPStore, and every wait names who was waited for.
Ranks that share a cache are found by the cache's identity; the lowest of them leads: it takes the snapshot, the
others join its lease.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch.distributed as dist

from cachestream import errors
from cachestream.errors import CacheStreamError, EpochError, RankMismatchError

if TYPE_CHECKING or dist.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["Alone", "Cancelled", "Deadlines", "Group", "Payload", "Ranks", "StoreRanks", "find_ranks"]

_CONNECT_S: Final = 30.0
_PAUSES_S: Final = (0.002, 0.1)  # between two looks at the store: the first, and the most

Payload = dict[str, Any]
Group = tuple[int, ...]  # the ranks that share a cache, ascending; the first leads


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a rank waits for the others, seconds: the first time, when some still start up, and later."""

    first: float
    later: float = 60.0


class Cancelled(Exception):  # noqa: N818 - not an error: nobody waits for the result any more
    """A preparation was given up because the trainer went elsewhere, or the loader was closed."""


class Ranks(Protocol):
    """The ranks of a job, as the preparation of epochs sees them."""

    rank: int
    size: int
    group: Group

    @property
    def leads(self) -> bool:
        """Whether this rank takes the snapshot for its group."""
        ...

    def request(self, name: str) -> None:
        """Ask all ranks to take part in round `name`."""
        ...

    def requested(self, name: str) -> bool:
        """Whether a rank has asked for round `name`."""
        ...

    def share(self, name: str, make: Callable[[], Payload], cancelled: Callable[[], bool]) -> Payload:
        """What the group's leader made in round `name`."""
        ...

    def agree(self, name: str, mine: Payload, cancelled: Callable[[], bool]) -> list[Payload]:
        """What every rank said in round `name`, by rank. The error of any rank is raised on all."""
        ...

    def report(self, name: str, error: Exception) -> None:
        """Tell the others that this rank fails in round `name`."""
        ...


class Alone:
    """A job of one rank: it agrees with itself."""

    rank = 0
    size = 1
    group: Group = (0,)
    leads = True

    def request(self, name: str) -> None: ...

    def requested(self, name: str) -> bool:
        return False

    def share(self, name: str, make: Callable[[], Payload], cancelled: Callable[[], bool]) -> Payload:
        return make()

    def agree(self, name: str, mine: Payload, cancelled: Callable[[], bool]) -> list[Payload]:
        return [mine]

    def report(self, name: str, error: Exception) -> None: ...


class StoreRanks:
    """The ranks of a `torch.distributed` job. Used by one thread, `close` by any.

    Raises RankMismatchError, on all ranks, when they were given other settings, or when one of them does not
    answer within the deadline.
    """

    def __init__(
        self, store: Store, rank: int, size: int, deadlines_s: Deadlines, closed: threading.Event
    ) -> None:
        self.rank = rank
        self.size = size
        self.group: Group = (rank,)
        self._store = store
        self._deadlines_s = deadlines_s
        self._agreed_once = False
        self._names = [f"rank {r}" for r in range(size)]
        self._old_keys: list[str] = []
        self._keys: list[str] = []
        self._closed = closed

    @property
    def leads(self) -> bool:
        return self.group[0] == self.rank

    def meet(self, settings: Mapping[str, Any], cache_id: str) -> None:
        """Learn who the others are; raises RankMismatchError for other `settings` than rank 0's."""
        me = {"settings": dict(settings), "cache": cache_id, "host": socket.gethostname(), "pid": os.getpid()}
        self._guarded(lambda: self._store.set(f"hello/{self.rank}", json.dumps(me)))
        hellos = self._collect("hello", range(self.size), "come to its EpochLoader", self._deadlines_s.first)
        self._names = [f"rank {r} (pid {h['pid']} on {h['host']})" for r, h in enumerate(hellos)]
        for r, hello in enumerate(hellos):
            for name, value in hellos[0]["settings"].items():
                if hello["settings"].get(name) != value:
                    raise RankMismatchError(
                        f"{self._names[r]} has {name}={hello['settings'].get(name)!r}, rank 0 has {name}={value!r}: "
                        "give all ranks the same arguments, and make the loaders in the same order"
                    )
        self.group = tuple(r for r, hello in enumerate(hellos) if hello["cache"] == cache_id)

    def request(self, name: str) -> None:
        self._guarded(lambda: self._store.set(f"{name}/request", "1"))

    def requested(self, name: str) -> bool:
        return bool(self._guarded(lambda: self._store.check([f"{name}/request"])))

    def share(self, name: str, make: Callable[[], Payload], cancelled: Callable[[], bool]) -> Payload:
        if self.leads:
            made = make()
            self._post(f"{name}/made/{self.rank}", made)
            return made
        # Earlier than `agree` gives up, so that all hear of it from this rank, in the same words.
        deadline_s = 0.75 * self._round_deadline_s
        leader = self.group[0]
        return self._collect(f"{name}/made", [leader], "prepared the epoch", deadline_s, cancelled)[0]

    def agree(self, name: str, mine: Payload, cancelled: Callable[[], bool]) -> list[Payload]:
        self._post(f"{name}/ready/{self.rank}", mine)
        answers = self._collect(
            f"{name}/ready", range(self.size), "prepared the epoch", self._round_deadline_s, cancelled
        )
        self._agreed_once = True
        self._forget_last_round(name)
        return answers

    def report(self, name: str, error: Exception) -> None:
        failure = {"error": type(error).__name__, "message": str(error)}
        try:
            if self.leads:
                self._post(f"{name}/made/{self.rank}", failure)
            self._post(f"{name}/ready/{self.rank}", failure)
        except RankMismatchError:
            pass  # the store has gone: the others know by that

    @property
    def _round_deadline_s(self) -> float:
        return self._deadlines_s.later if self._agreed_once else self._deadlines_s.first

    def _post(self, key: str, payload: Payload) -> None:
        self._keys.append(key)
        self._guarded(lambda: self._store.set(key, json.dumps(payload)))

    def _forget_last_round(self, name: str) -> None:
        """Whoever is ready for this round has read all of the one before."""
        if self.rank == 0:
            self._keys.append(f"{name}/request")
        for key in self._old_keys:
            self._guarded(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]
        self._old_keys, self._keys = self._keys, []

    def _collect(
        self,
        prefix: str,
        ranks: Sequence[int],
        done: str,
        deadline_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Payload]:
        """The payloads under `prefix` of `ranks`; waits for them, and raises the first error among them."""
        keys = [f"{prefix}/{rank}" for rank in ranks]
        give_up = time.monotonic() + deadline_s
        pause_s, most_s = _PAUSES_S
        # Store.wait would do the waiting, but cannot be cancelled, and prints a warning at every timeout.
        while not self._guarded(lambda: self._store.check(keys)):
            if time.monotonic() > give_up:
                raise RankMismatchError(self._late(ranks, keys, done, deadline_s))
            if cancelled() or self._closed.wait(pause_s):
                raise Cancelled
            pause_s = min(2 * pause_s, most_s)
        payloads = [json.loads(data) for data in self._guarded(lambda: self._store.multi_get(keys))]
        for rank, payload in zip(ranks, payloads, strict=True):
            if "error" in payload:
                raise _error_of(payload, self._names[rank], rank == self.rank)
        return payloads

    def _late(self, ranks: Sequence[int], keys: list[str], done: str, deadline_s: float) -> str:
        """Names the ranks that have not posted their keys."""
        there = self._guarded(lambda: [self._store.check([key]) for key in keys])
        late = [rank for rank, is_there in zip(ranks, there, strict=True) if not is_there] or list(ranks)
        names = ", ".join(self._names[rank] for rank in late[:8]) + (", …" if len(late) > 8 else "")
        have = "has" if len(late) == 1 else "have"
        return (
            f"{names} {have} not {done} within {deadline_s:.3g} s: dead, or stuck? See the log of that process; "
            "every rank must iterate its EpochLoader"
        )

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch's DistError among them
            raise RankMismatchError(
                f"the store that the ranks agree through does not answer ({str(error).splitlines()[0]}): the "
                "process that hosts it (torchrun's agent, or rank 0) has ended"
            ) from error


def _error_of(payload: Payload, name: str, own: bool) -> CacheStreamError:
    """The error that a rank reported, as the class it was."""
    kind = getattr(errors, payload["error"], None)
    message = payload["message"]
    if not (isinstance(kind, type) and issubclass(kind, CacheStreamError)):
        kind, message = EpochError, f"{payload['error']}: {message}"
    return kind(message if own else f"{name}: {message}")


def find_ranks(
    instance: int,
    settings: Mapping[str, Any],
    cache_id: str,
    deadlines_s: Deadlines,
    closed: threading.Event,
) -> Ranks:
    """The ranks of this process's job: those of `torch.distributed`, if it is initialised, else one.

    `instance` counts the loaders of a process; those of one number, on all ranks, belong together. All waits
    end when `closed` is set. Raises RankMismatchError, Cancelled.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Alone()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = _connect(f"cachestream/{instance}", rank, deadlines_s.first, closed)
    ranks = StoreRanks(store, rank, size, deadlines_s, closed)
    ranks.meet(settings, cache_id)
    return ranks


def _connect(prefix: str, rank: int, deadline_s: float, closed: threading.Event) -> Store:
    """A connection of our own to a store that all ranks reach, under a name that no earlier run has used."""
    default = dist.distributed_c10d._get_default_store()
    exchange = PrefixStore(prefix, default)
    server: TCPStore | None = None
    address: dict[str, Any]
    if rank == 0:
        server, own_host, port = _server(default)
        address = {"host": own_host, "port": port, "own": server is not None, "token": secrets.token_hex(8)}
        exchange.set("address", json.dumps(address))
    else:
        give_up = time.monotonic() + deadline_s
        while not exchange.check(["address"]):
            if time.monotonic() > give_up:
                raise RankMismatchError(
                    f"rank 0 has not come to its EpochLoader within {deadline_s:.3g} s: dead, or stuck? "
                    "Every rank must make and iterate the same EpochLoaders"
                )
            if closed.wait(_PAUSES_S[1]):
                raise Cancelled
        address = json.loads(exchange.get("address"))
    host = str(address["host"])
    if address["own"] and host == socket.gethostname():
        host = "127.0.0.1"
    client = server or TCPStore(
        host, address["port"], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    return PrefixStore(address["token"], client)


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
