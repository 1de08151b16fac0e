"""Agreement of a job's ranks on an epoch: through a store, with deadlines, never through collectives.

The agreement runs in a background thread while the trainer's own collectives run, so it must not touch the
process group: it uses its own connection to a TCPStore, and the error of every wait names the late ranks.
Ranks that share a cache form a group, found by the cache's identity. The lowest rank of a group leads it: it
takes the snapshot, and the others join its lease. Ranks that get equal batches have one data rank.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from cachestream import errors
from cachestream.errors import CacheStreamError, EpochError, RankMismatchError, warn_caller
from cachestream.training.rendezvous import (
    ANNOUNCED_AT,
    PAUSES_S,
    Cancelled,
    ProcessGroup,
    StoreConnection,
    meet_at,
)
from cachestream.training.replication import Replication
from cachestream.training.threads import Flag

_meetings = itertools.count()
logger = logging.getLogger("cachestream")

Payload = dict[str, Any]
Group = tuple[int, ...]  # the ranks that share a cache, ascending; the first leads


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The longest waits for other ranks, in seconds: the first, when some still start up, and later ones."""

    first: float
    later: float = 60.0

    def since(self, began_s: float) -> Deadlines:
        """The deadlines for the second part of a first wait that began at `began_s`; a tenth is always left.

        Ranks that rank 0 has answered late come to the second part together, so that is enough.
        """
        left_s = self.first - (time.monotonic() - began_s)
        return replace(self, first=max(0.1 * self.first, left_s))


class Ranks:
    """The ranks of a job, as the preparation of epochs sees them. This class is a job of a single rank.

    `data_ranks`: the data rank of each rank of the job; ranks with an equal one get equal batches.
    """

    rank = 0
    size = 1
    group: Group = (0,)
    data_ranks: Sequence[int] = (0,)

    @property
    def data_rank(self) -> int:
        """The data rank of this one."""
        return self.data_ranks[self.rank]

    @property
    def num_data_ranks(self) -> int:
        """The number of different data ranks in the job."""
        return len(set(self.data_ranks))

    @property
    def sharers(self) -> Group:
        """The first rank of the group with each data rank: those that share the order of the group's
        samples.
        """
        first = {self.data_ranks[rank]: rank for rank in reversed(self.group)}
        return tuple(first[number] for number in sorted(first))

    @property
    def place(self) -> int:
        """The place of this rank's batches among those of `sharers`."""
        return [self.data_ranks[rank] for rank in self.sharers].index(self.data_rank)

    @property
    def leads(self) -> bool:
        """True if this rank takes the snapshot for its group."""
        return self.group[0] == self.rank

    def request(self, name: str, cancelled: Flag) -> None:
        """Ask all ranks to take part in round `name`; once `cancelled`, this rank's waits raise Cancelled."""

    def requested(self, name: str) -> bool:
        """Return whether a rank has asked for round `name`."""
        return False

    def share(self, name: str, mine: Payload | None) -> Payload:
        """The payload of the group's leader in round `name`; the other ranks give None."""
        assert mine is not None
        return mine

    def agree(self, name: str, mine: Payload, *, in_group: bool = False) -> list[Payload]:
        """The payloads of all ranks, or of those in the group, in round `name`, in ascending order. An error
        of any of them is raised on all.
        """
        return [mine]

    def report(self, name: str, error: Exception) -> None:
        """Tell the others that this rank fails in round `name`."""


class StoreRanks(Ranks):
    """The ranks of a `torch.distributed` job. Used by one thread.

    Raises RankMismatchError, on all ranks, when they have different settings, or when one of them does not
    answer within the deadline.
    """

    def __init__(
        self,
        connection: StoreConnection,
        rank: int,
        size: int,
        deadlines_s: Deadlines,
        cancelled: Flag,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group: Group = (rank,)
        self.data_ranks: Sequence[int] = range(size)
        self._connection = connection
        self._deadlines_s = deadlines_s
        self._agreed_once = False
        self._names = [f"rank {r}" for r in range(size)]
        self._old_keys: list[str] = []
        self._keys: list[str] = []
        self._cancelled = cancelled

    def meet(
        self,
        settings: Mapping[str, Any],
        cache_id: str,
        where: str = "come to its EpochLoader",
        data_rank: int | None = None,
    ) -> list[str]:
        """Exchange settings and identities with all ranks; return their caches' identities, by rank.

        `data_rank`: None for that of a rank whose batches are its own. Raises RankMismatchError for
        `settings` that differ from rank 0's, and for ranks with different caches that are to get equal
        batches.
        """
        me = {"settings": dict(settings), "cache": cache_id, "host": socket.gethostname(), "pid": os.getpid()}
        me["data_rank"] = self.rank if data_rank is None else data_rank
        self._connection.call(lambda store: store.set(f"hello/{self.rank}", json.dumps(me)))
        hellos = self._collect("hello", range(self.size), where, self._deadlines_s.first)
        self._connection.serve = lambda: None  # the other one keeps the job's store and port from a new job
        self._names = [f"rank {r} (pid {h['pid']} on {h['host']})" for r, h in enumerate(hellos)]
        first = hellos[0]["settings"]
        for r, hello in enumerate(hellos):
            given = hello["settings"]
            for name in first | given:  # some settings are there only where an argument is given
                if given.get(name) != first.get(name):
                    raise RankMismatchError(
                        f"{self._names[r]} has {name}={given.get(name)!r}, rank 0 has "
                        f"{name}={first.get(name)!r}: give all ranks the same arguments, and make the "
                        "loaders in the same order"
                    )
        caches = [str(hello["cache"]) for hello in hellos]
        self.group = tuple(r for r, cache in enumerate(caches) if cache == cache_id)
        self.data_ranks = [int(hello["data_rank"]) for hello in hellos]
        firsts: dict[int, int] = {}
        for r, number in enumerate(self.data_ranks):
            first = firsts.setdefault(number, r)
            if caches[r] != caches[first]:
                raise RankMismatchError(
                    f"{self._names[r]} and {self._names[first]} are to get equal batches (replicate=), and "
                    "have caches of their own: let them share one, or replicate along dimensions within a "
                    "node"
                )
        return caches

    def request(self, name: str, cancelled: Flag) -> None:
        self._cancelled = cancelled
        self._connection.call(lambda store: store.set(f"{name}/request", "1"))

    def requested(self, name: str) -> bool:
        return bool(self._connection.call(lambda store: store.check([f"{name}/request"])))

    def share(self, name: str, mine: Payload | None) -> Payload:
        if mine is not None:
            self._post(f"{name}/made/{self.rank}", mine)
            return mine
        return self._collect(f"{name}/made", self.group[:1], "prepared the epoch", self._group_deadline_s)[0]

    def agree(self, name: str, mine: Payload, *, in_group: bool = False) -> list[Payload]:
        self._post(f"{name}/ready/{self.rank}", mine)
        if in_group:
            ranks, deadline_s = self.group, self._group_deadline_s
        else:
            ranks, deadline_s = tuple(range(self.size)), self._round_deadline_s
        answers = self._collect(f"{name}/ready", ranks, "prepared the epoch", deadline_s)
        if not in_group:  # ranks of other groups may still read the previous round
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
            pass  # the store is gone, and with it every other rank's round

    @property
    def _round_deadline_s(self) -> float:
        return self._deadlines_s.later if self._agreed_once else self._deadlines_s.first

    @property
    def _group_deadline_s(self) -> float:
        """The deadline of a group's rounds, below that of `agree`: all ranks raise the same error."""
        return 0.75 * self._round_deadline_s

    def _post(self, key: str, payload: Payload) -> None:
        self._keys.append(key)
        self._connection.call(lambda store: store.set(key, json.dumps(payload)))

    def _forget_last_round(self, name: str) -> None:
        """Delete the keys of the previous round, which every rank that posts in this round has read."""
        if self.rank == 0:
            self._keys.append(f"{name}/request")
        for key in self._old_keys:
            self._connection.call(lambda store, key=key: store.delete_key(key))  # type: ignore[misc]
        self._old_keys, self._keys = self._keys, []

    def _collect(self, prefix: str, ranks: Sequence[int], done: str, deadline_s: float) -> list[Payload]:
        """Wait for the payloads of `ranks` under `prefix`; raise the first error among them."""
        keys = [f"{prefix}/{rank}" for rank in ranks]
        began_s, announced = time.monotonic(), False
        pause_s, most_s = PAUSES_S
        # Store.wait cannot be cancelled, and prints a warning at every timeout.
        while not self._connection.call(lambda store: store.check(keys)):
            self._connection.serve()
            waited_s = time.monotonic() - began_s
            if waited_s > deadline_s:
                raise RankMismatchError(
                    f"{self._late(ranks, keys, done, deadline_s)}: dead, or stuck? See the log of that "
                    "process; every rank must call cs.stream, or iterate its EpochLoader"
                )
            if not announced and waited_s > ANNOUNCED_AT * deadline_s:
                announced = True
                late = self._late(ranks, keys, done, waited_s)
                logger.warning("rank %d waits, and gives up after %.3g s: %s", self.rank, deadline_s, late)
            if self._cancelled.wait(pause_s):
                raise Cancelled
            pause_s = min(2 * pause_s, most_s)
        payloads = [json.loads(data) for data in self._connection.call(lambda store: store.multi_get(keys))]
        for rank, payload in zip(ranks, payloads, strict=True):
            if "error" in payload:
                raise _error_of(payload, self._names[rank], rank == self.rank)
        return payloads

    def _late(self, ranks: Sequence[int], keys: list[str], done: str, within_s: float) -> str:
        """The words that name the ranks which have not posted their keys."""
        there = self._connection.call(lambda store: [store.check([key]) for key in keys])
        late = [rank for rank, is_there in zip(ranks, there, strict=True) if not is_there] or list(ranks)
        names = ", ".join(self._names[rank] for rank in late[:8]) + (", …" if len(late) > 8 else "")
        have = "has" if len(late) == 1 else "have"
        return f"{names} {have} not {done} within {within_s:.3g} s"


def _error_of(payload: Payload, name: str, own: bool) -> CacheStreamError:
    """The error that a rank reported, in its own class if that is one of this package."""
    kind = getattr(errors, payload["error"], None)
    message = payload["message"]
    if not (isinstance(kind, type) and issubclass(kind, CacheStreamError)):
        kind, message = EpochError, f"{payload['error']}: {message}"
    return kind(message if own else f"{name}: {message}")


def pack_numbers(numbers: npt.NDArray[Any], kind: str = "<i8") -> str:
    """`numbers` `[n]`, stored as numpy's `kind`, as a value of a payload."""
    return base64.b64encode(numbers.astype(kind).tobytes()).decode()


def unpack_numbers(text: str, kind: str = "<i8") -> npt.NDArray[Any]:
    """The numbers of `pack_numbers`, `[n]`, in the byte order of this machine."""
    return np.frombuffer(base64.b64decode(text), kind).astype(np.dtype(kind).newbyteorder("="))


# Whether this process is in a job, as torch says it: at each task of a loader, one call of torch and none of
# ours.
is_initialized = dist.is_initialized if dist.is_available() else dist.is_available


def find_job() -> ProcessGroup | None:
    """The `torch.distributed` job of this process; None if none is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), weakref.ref(dist.group.WORLD))


def warn_if_early(asked: str, told: str) -> bool:
    """Warn that `asked` came too early, if a launcher started ranks that have no process group yet."""
    size = os.environ.get("WORLD_SIZE", "1")
    is_early = find_job() is None and size.isdecimal() and int(size) > 1
    if is_early:
        warn_caller(
            f"{asked} before torch.distributed.init_process_group(), and WORLD_SIZE is {size}: {told}. "
            "Call init_process_group() first"
        )
    return is_early


def find_ranks(
    instance: int,
    settings: Mapping[str, Any],
    cache_id: str,
    deadlines_s: Deadlines,
    closed: Flag,
    job: ProcessGroup | None,
    replication: Replication,
) -> Ranks:
    """The ranks of `job`; a single rank if it is None.

    `instance` counts the loaders of a process; loaders with the same number belong together. All waits end
    when `closed` is set. Raises RankMismatchError, ConfigError for a `replication` of another job, Cancelled.
    """
    data_rank = replication.number_of(*((0, 1) if job is None else (job.rank, job.size)))
    if job is None or job.size == 1:
        return Ranks()
    began_s = time.monotonic()
    connection = meet_at(
        job, f"cachestream/{instance}", "its EpochLoader", deadlines_s.first, deadlines_s.later, closed
    )
    ranks = StoreRanks(connection, job.rank, job.size, deadlines_s.since(began_s), closed)
    ranks.meet(settings, cache_id, data_rank=data_rank)
    return ranks


def find_share(cache_id: str, deadline_s: float) -> tuple[int, int] | None:
    """The share of cache `cache_id` among all caches of the job: (i, n), by the lowest rank on each.

    None when all ranks share one cache, or there is one rank. Waits for all ranks to call it; raises
    RankMismatchError when one does not within `deadline_s`.
    """
    job = find_job()
    if job is None and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        warn_if_early(
            "cs.stream was called", "a node with a cache of its own reads all of the remote, not its share"
        )
    if job is None or job.size == 1:
        return None
    began_s, never, deadlines_s = time.monotonic(), Flag(), Deadlines(deadline_s, deadline_s)
    connection = meet_at(
        job, f"cachestream/share/{next(_meetings)}", "cs.stream", deadline_s, deadline_s, never
    )
    ranks = StoreRanks(connection, job.rank, job.size, deadlines_s.since(began_s), never)
    caches = list(dict.fromkeys(ranks.meet({}, cache_id, "come to cs.stream")))
    return (caches.index(cache_id), len(caches)) if len(caches) > 1 else None


def is_elastic() -> bool:
    """Return whether torchrun started this process and restarts it after a failure (`--max-restarts`)."""
    launched = dist.is_available() and dist.is_torchelastic_launched()
    return launched and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def warn_of_kept_store() -> None:
    """Warn, on rank 0 at the first start, that ranks which torchrun starts again may hang in torch.

    torchrun's agent keeps its store, and with it the addresses under which gloo and NCCL met. A rank that
    reads such an address before the other rank has replaced it tries to connect to it, or waits to be called
    by it: for half an hour, in `init_process_group` (pytorch/pytorch#135712).
    """
    job = {name: os.environ.get(name) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT")}
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if kept and set(job.values()) == {"0"} and os.environ.get("WORLD_SIZE", "1") != "1" and is_elastic():
        logger.warning(
            "torchrun keeps its store when it starts the ranks again (--max-restarts), and "
            "init_process_group() may then connect to ranks that are gone: it fails, or hangs for 30 "
            "minutes. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d or "
            "--standalone"
        )
