"""The process of a cache that shares its filling with a group of caches.

The process reports to the actor of the group what the cache holds and makes, gives its sampling processes the
positions that they are to make, and copies the shards of the other caches. Ray carries the shards from node
to node.

It may be killed at any point: the supervisor and the shards tell the next one where it stood.
"""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from cachestream.errors import CorruptShardError, SourceUnavailableError, WorkerError
from cachestream.linux import name_process
from cachestream.ray.connection import connect
from cachestream.ray.copier import Copier, last_line
from cachestream.ray.group import (
    CacheReport,
    GroupActor,
    GroupView,
    HeldShard,
    ShardServer,
    identity_of,
    parsed,
)
from cachestream.ray.supervision import ANSWER_S, CONNECT_S, SharedPass
from cachestream.schema import WHOLE, spans_of
from cachestream.storage.cache import Cache
from cachestream.storage.progress import Positions
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.cached_units import merge_spans
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.cluster import ClusterOptions
from cachestream.worker.health import LATER_PAUSE_S
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import end_soon, exit_code, exit_now, heed_signals

SYNC_S: Final = 0.3
_COPIES: Final = 16  # looked at between two reports
_MOST_FAILURES: Final = 5
_LEAVE_S: Final = 1.0
_OFTEN: Final = 16  # larger groups synchronise less often
# The group's actor runs on the head: another node that is cut off does not take the actor with it.
_LASTING: Final[dict[str, Any]] = {"max_restarts": -1, "resources": {"node:__internal_head__": 0.001}}


class HeldShards:
    """The shards of `cache` that the group knows, and their `contents`."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._shards: dict[int, HeldShard | None] = {}  # None for one that cannot be shared
        self.contents: set[str] = set()

    def changes(self) -> tuple[tuple[HeldShard, ...], tuple[str, ...]]:
        """The shards that have come since the last call, and the contents of those that have gone."""
        ids = self._cache.filling.shard_ids()
        gone = [self._shards.pop(shard_id) for shard_id in self._shards.keys() - ids]
        new = {one: _held_shard(self._cache.path, one) for one in sorted(ids - self._shards.keys())}
        self._shards |= new
        self.contents = {shard.content for shard in self._shards.values() if shard is not None}
        return tuple(filter(None, new.values())), tuple(shard.content for shard in gone if shard is not None)

    def whole(self, plan: str) -> list[Positions]:
        """The positions of the pass `plan` of which the cache holds all samples."""
        cached = self._cache.filling.cached_spans(PassPlan.from_json, (WHOLE,))
        spans = merge_spans(cached.of(parsed(plan))).tolist()
        return [(first + (offset > 0), last) for first, offset, last, _ in spans]


class GroupMember:
    """Shares the filling of `cache` with its group, until `stop`."""

    def __init__(
        self,
        ray: Any,
        job: Job,
        cluster: ClusterOptions,
        cache: Cache,
        link: SupervisorLink,
        stop: threading.Event,
    ) -> None:
        self._ray, self._job, self._cluster, self._cache = ray, job, cluster, cache
        self._link, self._stop = link, stop
        self.name = f"{socket.gethostname()}:{cache.path}"
        self._shards, self._copier = HeldShards(cache), Copier(ray, job, cache, link)
        self._view: GroupView | None = None  # None before it has joined
        node = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        server = ray.remote(ShardServer).options(num_cpus=0, scheduling_strategy=strategy)
        self._server = server.remote(cache.path)
        self._ready, self._ready_by_s = self._server.ready.remote(), time.monotonic() + CONNECT_S
        self._groups: list[Any] = []  # an actor ends once the process that has made it has no handle on it
        self._failures = 0  # in succession

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
        members = 0 if self._view is None else len(self._view.servers)
        next_s = time.monotonic() + SYNC_S * max(1.0, members / _OFTEN)
        try:
            view = self._view or self._join()
            self._watch_server()
            self._sync(view)
        except self._ray.exceptions.RayError as error:
            self._lose_group(error)
        if not self._copier.run(next_s):
            self._stop.wait(max(0.0, next_s - time.monotonic()))

    def _join(self) -> GroupView:
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
        self._shards, self._view = HeldShards(self._cache), GroupView()
        return self._view

    def _watch_server(self) -> None:
        """Raise SourceUnavailableError if the shard server does not start, or has ended with its node."""
        if self._ray.wait([self._ready], timeout=0)[0] or time.monotonic() > self._ready_by_s:
            try:
                self._ray.get(self._ready, timeout=0)
            except self._ray.exceptions.RayError as error:
                raise SourceUnavailableError(f"no shard server runs: {last_line(error)}") from error
            self._ready, self._ready_by_s = self._server.ready.remote(), math.inf

    def _sync(self, view: GroupView) -> None:
        shared: SharedPass | None = self._link.ask("shared_pass")
        if shared is None or (length := shared.row.length) is None:
            return
        plan = shared.row.plan
        added, removed = self._shards.changes()
        current, earlier, free = view.choose(
            plan,
            length,
            shared.undecided,
            self._shards.contents,
            has_room=self._copier.has_room and not self._cache.filling.state().evicted_shards,
        )
        # A cache that joins makes nothing before it knows and has what the others hold.
        wants = 0 if earlier or view.seen < 0 else shared.wants
        report = CacheReport(plan, length, view.seen, free, shared.making, added, removed, wants)
        answer = self._ray.get(self._groups[-1].sync.remote(self.name, report), timeout=ANSWER_S)
        if answer is None:
            self._leave()
            return
        self._link.tell("group", "")
        self._failures = 0
        view.take(answer)
        if answer.ordinal > parsed(plan).ordinal and self._link.ask("follow", shared.row.id, answer.ordinal):
            return
        self._copier.want((current + earlier)[:_COPIES], view)
        make = list(answer.make)
        if added:
            make += self._shards.whole(plan)  # where these are handed out, they are passed over
        if make:
            self._link.ask("decide", shared.row.id, make)

    def _leave(self) -> None:
        """Join again at the next step."""
        self._view = None
        self._copier.want((), GroupView())

    def _lose_group(self, error: Exception) -> None:
        """Join again at the next step, or raise SourceUnavailableError after several failures in succession.

        Another process then connects anew: the head of the cluster may have been started again.
        """
        sys.stderr.write(f"the group {self._cluster.group!r} is away: {last_line(error)}\n")
        self._leave()
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            raise SourceUnavailableError(f"the Ray cluster at {self._cluster.address} is away")
        self._stop.wait(LATER_PAUSE_S if self._failures > 1 else 0.0)


def _held_shard(root: str, shard_id: int) -> HeldShard | None:
    """A shard as the group knows it; None for one that is gone, or that no pass knows."""
    try:
        shard = MappedShard(shard_path(root, shard_id))
    except CorruptShardError:
        return None
    try:
        spans, plan = spans_of(shard.fill["spans"]), str(shard.fill["plan"])
    except (KeyError, TypeError, ValueError):
        return None
    finally:
        shard.close()
    return HeldShard(shard.content_hash, shard_id, shard.size_bytes, plan, spans) if spans else None


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
        while not stop.is_set():
            try:
                ray = connect(cluster.address)
            except SourceUnavailableError as error:
                link.tell("group", str(error))
                stop.wait(LATER_PAUSE_S)
                continue
            try:
                GroupMember(ray, job, cluster, cache, link, stop).run()
            except SourceUnavailableError as error:  # another process connects again
                sys.stderr.write(f"{error}\n")
            return

    code = exit_code(work, fatal=WorkerError)
    exit_now(code)
    return code
