"""The process of a cache that shares its filling with a group of caches.

The process reports to the directory of the group what the cache holds and makes, gives its sampling processes
the positions that they are to make, and copies the shards of the other caches. Ray carries the shards from
node to node. While the group does not answer, the cache is filled from the remote alone.

It may be killed at any point: the supervisor and the shards tell the next one where it stood.
"""

from __future__ import annotations

import math
import random
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from cachestream.errors import CorruptShardError, SourceUnavailableError, WorkerError
from cachestream.linux import name_process
from cachestream.schema import spans_of
from cachestream.storage.cache import Cache
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.cluster.connection import ClusterOptions, connect
from cachestream.worker.cluster.copier import ANSWER_S, Copier, last_line
from cachestream.worker.cluster.directory import CacheReport, HeldShard
from cachestream.worker.cluster.group import GroupActor, ShardServer, identity_of
from cachestream.worker.cluster.supervision import ALONE, WAITING
from cachestream.worker.health import LATER_PAUSE_S
from cachestream.worker.job import Job
from cachestream.worker.messages import SharedPass
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import block_size
from cachestream.worker.processes import end_soon, exit_code, exit_now, heed_signals

SYNC_S: Final = 0.3
_OFFERED: Final = 2  # blocks of units ready for each sampling process
_MOST_FAILURES: Final = 5
_LEAVE_S: Final = 1.0
_CONNECT_S: Final = 50.0  # longer than an answer
_OFTEN: Final = 16  # larger groups synchronise less often
# The group's actor runs on the head: another node that is cut off does not take the directory with it.
_LASTING: Final[dict[str, Any]] = {"max_restarts": -1, "resources": {"node:__internal_head__": 0.001}}


class FillingAlone:
    """Gives the sampling processes positions to make while the group does not answer.

    A thread does this: Ray may block for a minute while the head of the cluster is away. Few positions are
    given at a time, at random places: once the group answers again, little was made twice.
    """

    def __init__(
        self, link: SupervisorLink, cluster: ClusterOptions, num_workers: int, stop: threading.Event
    ) -> None:
        self._link, self._group, self._num_workers, self._stop = link, cluster.group, num_workers, stop
        self._must_wait = cluster.required
        self._answered_s = time.monotonic() + _CONNECT_S
        self._is_alone: bool | None = None  # None until it is known
        threading.Thread(target=self._run, name="alone", daemon=True).start()

    def answered(self) -> None:
        """Note that the group has answered."""
        if self._is_alone is not False:
            sys.stderr.write(f"the group {self._group!r} answers\n")
            self._link.tell("group", "")
        self._answered_s, self._is_alone = time.monotonic(), False

    def begin(self, reason: str) -> None:
        """Begin at once: the group cannot answer."""
        self._answered_s = -math.inf
        self._note(reason)

    def _note(self, reason: str) -> None:
        if not self._is_alone:
            self._is_alone = True
            sys.stderr.write(f"the group {self._group!r} does not answer ({reason})\n")
            self._link.tell("group", WAITING if self._must_wait else ALONE)

    def _run(self) -> None:
        while not self._stop.wait(SYNC_S):
            self._link.tell("alive")  # here: this thread never waits for Ray
            silent_s = time.monotonic() - self._answered_s
            if silent_s > ANSWER_S:
                self._note(f"for {silent_s:.0f} s")
                if not self._must_wait:
                    self._offer()

    def _offer(self) -> None:
        shared: SharedPass | None = self._link.ask("shared_pass")
        if shared is None or not shared.undecided:
            return
        size = block_size(shared.row.length, self._num_workers)
        for _ in range(_OFFERED * self._num_workers - shared.offered):
            start, stop = random.choice(shared.undecided)
            start = random.randrange(start, stop, size)
            self._link.ask("decide", shared.row.id, [(start, min(stop, start + size))], [])


class HeldShards:
    """The shards of `cache`, and those of them that the group knows."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._shards: dict[int, HeldShard | None] = {}  # None for one that cannot be shared
        self._reported: set[int] = set()

    @property
    def contents(self) -> set[str]:
        """The contents of all shards, as of the last call of `changes`."""
        return {shard.content for shard in self._shards.values() if shard is not None}

    def report_all(self) -> None:
        """Have the next changes name all shards."""
        self._reported.clear()

    def changes(self) -> tuple[tuple[HeldShard, ...], tuple[str, ...]]:
        """The shards that have come since the last call, and the contents of those that have gone."""
        ids = self._cache.filling.shard_ids()
        gone = [(shard_id, self._shards.pop(shard_id)) for shard_id in self._shards.keys() - ids]
        for shard_id in sorted(ids - self._shards.keys()):
            self._shards[shard_id] = _held_shard(self._cache.path, shard_id)
        added = [self._shards[shard_id] for shard_id in sorted(self._shards.keys() - self._reported)]
        removed = [held for shard_id, held in gone if shard_id in self._reported]
        self._reported = set(self._shards)
        return tuple(filter(None, added)), tuple(held.content for held in removed if held is not None)


class GroupMember:
    """Shares the filling of `cache` with its group, until `stop`."""

    def __init__(
        self,
        ray: Any,
        job: Job,
        cache: Cache,
        link: SupervisorLink,
        alone: FillingAlone,
        stop: threading.Event,
    ) -> None:
        assert job.cluster is not None
        self._link = link
        self._ray, self._job, self._cluster, self._cache = ray, job, job.cluster, cache
        self._alone, self._stop = alone, stop
        self.name = f"{socket.gethostname()}:{cache.path}"
        self._shards, self._copier = HeldShards(cache), Copier(ray, job, cache, link)
        node = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        server = ray.remote(ShardServer).options(num_cpus=0, scheduling_strategy=strategy)
        self._server = server.remote(cache.path)
        self._ready, self._ready_by_s = self._server.ready.remote(), time.monotonic() + _CONNECT_S
        self._groups: list[Any] = []  # an actor ends once the process that has made it has no handle on it
        self._has_joined = self._joins = False
        self._num_refused = 0  # of the shards that the copier has refused, as reported
        self._failures = 0  # in succession
        self._num_members = 1

    def run(self) -> None:
        """Report and copy until told to stop; raises WorkerError if the group refuses the cache."""
        try:
            while not self._stop.is_set():
                self._step()
        finally:
            self._copier.close()
        if self._groups:
            with suppress(self._ray.exceptions.RayError):  # the group notices by itself
                self._ray.get(self._groups[-1].leave.remote(self.name), timeout=_LEAVE_S)

    def _step(self) -> None:
        """Synchronise with the group, and copy until the next synchronisation."""
        next_s = time.monotonic() + SYNC_S * max(1.0, self._num_members / _OFTEN)
        try:
            if not self._has_joined:
                self._join()
            self._watch_server()
            self._sync()
        except self._ray.exceptions.RayError as error:
            self._lose_group(error)
        if not self._copier.run(next_s, self._shards.contents):
            self._stop.wait(max(0.0, next_s - time.monotonic()))

    def _join(self) -> None:
        """Join the group. Its actor is made by the first cache, and by another one when that is gone."""
        members = identity_of(self._job)
        actor = self._ray.remote(GroupActor).options(
            name=f"group {self._cluster.group}", get_if_exists=True, num_cpus=0, **_LASTING
        )
        group = actor.remote(members)
        self._groups.append(group)
        difference = self._ray.get(group.join.remote(self.name, members, self._server), timeout=3 * ANSWER_S)
        if difference:
            raise WorkerError(
                f"the cache {self._cache.path} does not fit the group {self._cluster.group!r}: {difference}; "
                "give the group another name, or all its caches the same"
            )
        self._link.ask("share")
        self._shards.report_all()
        self._num_refused = 0
        self._has_joined = self._joins = True

    def _watch_server(self) -> None:
        """Raise SourceUnavailableError if the shard server does not start, or has ended with its node."""
        if self._ray.wait([self._ready], timeout=0)[0] or time.monotonic() > self._ready_by_s:
            try:
                self._ray.get(self._ready, timeout=0)
            except self._ray.exceptions.RayError as error:
                raise SourceUnavailableError(f"no shard server runs: {last_line(error)}") from error
            self._ready, self._ready_by_s = self._server.ready.remote(), math.inf

    def _sync(self) -> None:
        shared: SharedPass | None = self._link.ask("shared_pass")
        if shared is None or shared.row.length is None:
            return
        report = self._report(shared)
        answer, servers = self._ray.get(self._groups[-1].sync.remote(self.name, report), timeout=ANSWER_S)
        if not answer.is_known:
            self._has_joined = False
            return
        self._alone.answered()
        self._joins, self._failures, self._num_members = False, 0, answer.num_members
        plan = PassPlan.from_json(shared.row.plan)
        if answer.ordinal > plan.ordinal and self._link.ask("follow", shared.row.id, answer.ordinal):
            return
        self._copier.want(answer.copies, servers, shared.row.plan)
        if answer.make or answer.done:
            self._link.ask("decide", shared.row.id, list(answer.make), list(answer.done))

    def _report(self, shared: SharedPass) -> CacheReport:
        added, removed = self._shards.changes()
        self._copier.arrived.clear()
        wanted = _OFFERED * self._job.num_workers - shared.offered
        refused = self._copier.refused[self._num_refused :]
        self._num_refused += len(refused)
        return CacheReport(
            shared.row.plan,
            shared.row.length or 0,
            shared.undecided,
            shared.making,
            added,
            removed,
            tuple(refused),
            wants=max(0, wanted),
            has_room=self._copier.has_room and not self._cache.filling.state().evicted_shards,
            joins=self._joins,
        )

    def _lose_group(self, error: Exception) -> None:
        """Join again at the next step, or raise SourceUnavailableError after several failures in succession.

        Another process then connects anew: the head of the cluster may have been started again.
        """
        sys.stderr.write(f"the group {self._cluster.group!r} is away: {last_line(error)}\n")
        self._has_joined = False
        self._copier.want((), {}, "")
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            raise SourceUnavailableError(f"the Ray cluster at {self._cluster.address} is away")
        self._stop.wait(LATER_PAUSE_S if self._failures > 1 else 0.0)


def _connect(cluster: ClusterOptions, alone: FillingAlone, stop: threading.Event) -> Any:
    """Connect to the cluster as soon as its head answers; the cache is filled alone until then.

    None if told to stop before that.
    """
    while not stop.is_set():
        try:
            return connect(cluster.address)
        except SourceUnavailableError as error:
            alone.begin(str(error))
            stop.wait(LATER_PAUSE_S)
    return None


def _held_shard(root: str, shard_id: int) -> HeldShard | None:
    """A shard as the directory knows it; None for one that is gone, or that no pass knows."""
    try:
        shard = MappedShard(shard_path(root, shard_id))
    except CorruptShardError:
        return None
    try:
        spans, plan = spans_of(shard.fill["spans"]), str(shard.fill["plan"])
        is_part = bool(shard.fill.get("is_part"))
    except (KeyError, TypeError, ValueError):
        return None
    finally:
        shard.close()
    if not spans:
        return None
    return HeldShard(shard.content_hash, shard_id, shard.size_bytes, plan, spans, is_part)


def run(end: socket.socket, job: Job) -> int:
    """Be the process that shares the filling of `job`; does not return."""
    stop = threading.Event()
    heed_signals(stop)
    name_process("cs-sharing")

    def on_message(kind: str, *_: Any) -> None:
        if kind == "stop":
            stop.set()

    def work() -> None:
        cluster, cache = job.cluster, Cache(job.root)
        assert cluster is not None
        link = SupervisorLink(end, on_message, lambda: end_soon(stop))
        alone = FillingAlone(link, cluster, job.num_workers, stop)
        try:
            if (ray := _connect(cluster, alone, stop)) is not None:
                GroupMember(ray, job, cache, link, alone, stop).run()
        except SourceUnavailableError as error:  # another process connects again
            sys.stderr.write(f"{error}\n")

    code = exit_code(work, fatal=WorkerError)
    exit_now(code)
    return code
