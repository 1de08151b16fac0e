"""The process of a cache that shares its filling with a group of caches, and the actors of the group.

The process reports to the directory of the group what the cache holds and makes, gives its sampling processes
the positions that they are to make, and copies the shards of the other caches. Ray carries the shards from
node to node. While the group does not answer, the cache is filled from the remote alone.

It may be killed at any point: the cache's claims and shards tell the next one where it stood.
"""

from __future__ import annotations

import logging
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheFullError, CorruptShardError, SourceUnavailableError, WorkerError
from cachestream.linux import name_process
from cachestream.schema import Span
from cachestream.shard_format import LENGTH_BYTES, ShardContent, ShardData, header_bytes
from cachestream.storage.cache import Cache
from cachestream.storage.filling import SharedPass
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.publish import CatalogueReplacedError, Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.child_process import ChildProcess, ForkServer
from cachestream.worker.cluster.connection import NAMESPACE, ClusterOptions, connect
from cachestream.worker.cluster.directory import Answer, Copy, Directory, HeldShard, Report
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job, load_shared
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import EXIT_FATAL, exit_code, exit_now, tie_to_supervisor

SYNC_S: Final = 0.3
_RETRY_S: Final = 15.0  # until the next process looks for a cluster: importing Ray takes a second
_ALONE: Final = "no Ray cluster answers: filling alone"
ANSWER_S: Final = 10.0  # without an answer for so long the cache goes on alone
_AT_ONCE: Final = 4  # copies under way
_AVOID_S: Final = 10.0  # a cache that did not give a shard is not asked
_COPY_S, _COPY_BYTES_PER_S = 15.0, 1 << 20  # a copy that is slower is given up
_OFFERED: Final = 2  # claims ready for each sampling process
_MOST_FAILURES: Final = 5
_EXCHANGES: Final = 8  # shards asked for at once

logger = logging.getLogger("cachestream.worker")


class SharingProcess:
    """The supervisor's side: the process is started again whenever it ends.

    `message` tells while it finds no cluster.
    """

    def __init__(self, job: Job, server: ForkServer, job_fd: int) -> None:
        self.process = ChildProcess(
            "cachestream.worker.cluster.sharing", "sharing", server, job.sys_path, job_fd
        )

        self.message = ""

    def begin(self, now_s: float) -> None:
        self.process.start(now_s)

    def tick(self, now_s: float) -> None:
        """Reap and restart the process; raises GiveUpError if the group refuses the cache."""
        code = self.process.reap()
        if code == EXIT_FATAL:
            raise GiveUpError(self.process.last_output)
        if code is not None:
            self.message = _ALONE if code == 0 else ""
            logger.warning(
                "the process that shares the filling ended with code %d: another one follows", code
            )
            self.process.start_at_s = now_s + (_RETRY_S if code == 0 else LATER_PAUSE_S)
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self.process.start(now_s)
        if self.process.running and now_s - self.process.started_s > ANSWER_S:
            self.message = ""


# --- actors


class Group:
    """The actor of a group: its directory, and the shard servers of its caches.

    `identity` names what all caches of the group have in common. The actor ends with its last cache.
    """

    def __init__(self, identity: tuple[tuple[str, str], ...], replicas: int | None) -> None:
        self._identity, self._directory = identity, Directory(replicas)
        self._servers: dict[str, Any] = {}

    def join(self, name: str, identity: tuple[tuple[str, str], ...], server: Any) -> str:
        """Take in the cache `name`; returns the difference if it is filled with something else, "" if not."""
        self._directory.forget_silent(time.monotonic())
        if not self._directory.members:
            self._identity = identity  # what caches that are gone had in common binds no one
        for (what, ours), (_, theirs) in zip(self._identity, identity, strict=True):
            if ours != theirs:
                return f"{what} {theirs or 'none'}, and the group has {ours or 'none'}"
        self._servers[name] = server
        return ""

    def sync(self, name: str, report: Report) -> tuple[Answer, dict[str, Any]]:
        """The decisions for the cache `name`, and the servers of the caches that they name."""
        if name not in self._servers:
            return Answer(is_known=False), {}
        answer = self._directory.sync(name, report, time.monotonic())
        members = set(self._directory.members)
        self._servers = {one: server for one, server in self._servers.items() if one in members}
        holders = {one for copy in answer.copies for one, _ in copy.holders}
        return answer, {one: self._servers[one] for one in holders if one in self._servers}

    def leave(self, name: str) -> bool:
        """Forget the cache `name`; True if it was the last one."""
        self._directory.leave(name)
        self._servers.pop(name, None)
        return not self._servers


class ShardServer:
    """The actor that gives the shards of the cache at `root` to other caches; it runs on the cache's node."""

    def __init__(self, root: str) -> None:
        self._cache = Cache(root)

    def read(self, shard_id: int) -> npt.NDArray[np.uint8]:
        """The file of a shard, uint8 `[nbytes]`; raises FileNotFoundError for one that was evicted."""
        lease = self._cache.reservations.hold(np.array([[shard_id, shard_id]], np.int64))
        try:
            return np.fromfile(shard_path(self._cache.path, shard_id), np.uint8)
        finally:
            lease.release()


def _identity(job: Job, transform: str) -> tuple[tuple[str, str], ...]:
    return (
        ("it is filled from the source", job.fingerprint),
        ("it lists the units", f"{job.num_units} {job.listing}"),
        ("it has the transform", transform),
        ("it has the order", job.kind),
        ("it has the seed", str(job.seed)),
        ("it keeps replicas:", str(job.cluster.replicas) if job.cluster else ""),
    )


# --- the process


@dataclass(slots=True)
class _Fetch:
    """A shard under way, into a reservation of this cache."""

    copy: Copy
    holder: str
    reserved: int
    until_s: float


class GroupMember:
    """Shares the filling of `cache` with its group, until `stop`."""

    def __init__(self, job: Job, cluster: ClusterOptions, cache: Cache, stop: threading.Event) -> None:
        self._job, self._cluster, self._cache, self._stop = job, cluster, cache, stop
        self.name = f"{socket.gethostname()}:{cache.path}"
        self._owner = Owner.temporary(cache.directory, "copy")
        self._publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, self._owner.name)
        self._shards: dict[int, HeldShard | None] = {}  # as reported; None for one that cannot be shared
        self._fetches: dict[Any, _Fetch] = {}
        self._arrived: set[str] = set()  # the contents of shards copied since the last report
        self._avoid_s: dict[str, float] = {}
        self._copies: list[Copy] = []
        self._servers: dict[str, Any] = {}
        self._group: Any = None
        self._joins = True
        self._failures = 0  # in succession
        self._server: Any = None
        self._exchanged = -1.0  # shards still to be exchanged; below 0 before the first report
        self._snapshots = 0

    def run(self) -> None:
        """Report and copy until told to stop; raises WorkerError if the group refuses the cache."""
        ray = connect(self._cluster.address)
        node = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        server = ray.remote(ShardServer)
        self._server = server.options(num_cpus=0, scheduling_strategy=strategy).remote(self._cache.path)
        try:
            while not self._stop.is_set():
                self._step(ray)
        finally:
            for fetch in self._fetches.values():
                self._cache.reservations.cancel(fetch.reserved, self._owner.name)
            self._owner.release()
        self._leave(ray)

    def _step(self, ray: Any) -> None:
        """Synchronise with the group, and take what has arrived by the time of the next synchronisation."""
        next_s = time.monotonic() + SYNC_S
        try:
            if self._group is None:
                self._join(ray)
            self._sync(ray)
        except (ray.exceptions.RayError, SourceUnavailableError) as error:
            self._go_on_alone(error)
            self._stop.wait(LATER_PAUSE_S)
        while (left_s := next_s - time.monotonic()) > 0:
            self._begin_copies()
            if not self._fetches:
                self._stop.wait(left_s)
                return
            ready, _ = ray.wait(list(self._fetches), num_returns=1, timeout=left_s)
            for ref in ready:
                self._take(ray, ref)
        self._give_up_late(ray)

    def _join(self, ray: Any) -> None:
        """Join the group: the first cache makes its actor, which outlives that cache."""
        transform = "" if self._job.cluster is None else self._job.cluster.transform
        identity = _identity(self._job, transform)
        group = ray.remote(Group).options(
            name=f"group {self._cluster.group}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
        )
        self._group = group.remote(identity, self._cluster.replicas)
        difference = ray.get(self._group.join.remote(self.name, identity, self._server), timeout=3 * ANSWER_S)
        if difference:
            raise WorkerError(
                f"the cache {self._cache.path} does not fit the group {self._cluster.group!r}: {difference}; "
                "give the group another name, or all its caches the same"
            )
        self._cache.filling.share()
        self._shards.clear()
        self._joins = True

    def _sync(self, ray: Any) -> None:
        shared = self._cache.filling.shared_pass()
        if shared is None or shared.row.length is None:
            return
        known = dict(self._shards)
        report = self._report(shared)
        try:
            answer, servers = ray.get(self._group.sync.remote(self.name, report), timeout=ANSWER_S)
        except BaseException:
            self._shards = known  # the changes are reported again
            raise
        if not answer.is_known:
            self._group = None
            return
        self._joins, self._failures = False, 0
        plan = PassPlan.from_json(shared.row.plan)
        if answer.ordinal > plan.ordinal:
            self._cache.filling.follow_group(shared.row, replace(plan, ordinal=answer.ordinal).to_json())
            return
        for ref in [ref for ref, fetch in self._fetches.items() if fetch.copy.touches(answer.make)]:
            self._drop(self._fetches.pop(ref), "")  # before another process makes what is in it
        if answer.make or answer.done:
            self._cache.filling.decide(shared.row.id, make=answer.make, done=answer.done)
        self._copies = [copy for copy in answer.copies if not copy.touches(answer.make)]
        self._servers = servers

    def _report(self, shared: SharedPass) -> Report:
        added, removed = self._changes()
        wanted = _OFFERED * self._job.num_workers - shared.offered
        return Report(
            shared.row.plan,
            shared.row.length or 0,
            shared.undecided,
            shared.making,
            added,
            removed,
            max(0, wanted),
            self._exchange(),
            self._joins,
        )

    def _exchange(self) -> int:
        """The number of shards that this cache takes in exchange now: a share of its shards each epoch."""
        if not self._cluster.exchange:
            return 0
        snapshots = self._cache.filling.state().snapshots
        if self._exchanged < 0:
            self._exchanged, self._snapshots = 0.0, snapshots
        self._exchanged += self._cluster.exchange * len(self._shards) * (snapshots - self._snapshots)
        self._snapshots = snapshots
        return min(_EXCHANGES, int(self._exchanged))

    def _changes(self) -> tuple[tuple[HeldShard, ...], tuple[str, ...]]:
        """The shards that have come and gone since the last report."""
        ids = self._cache.filling.shard_ids()
        self._arrived.clear()
        gone = [self._shards.pop(shard_id) for shard_id in self._shards.keys() - ids]
        added = []
        for shard_id in sorted(ids - self._shards.keys()):
            held = self._shards[shard_id] = _held_shard(self._cache.path, shard_id)
            if held is not None:
                added.append(held)
        return tuple(added), tuple(held.content for held in gone if held is not None)

    def _go_on_alone(self, error: Exception) -> None:
        """Have the sampling processes take all positions, until the group answers again."""
        sys.stderr.write(
            f"the group {self._cluster.group!r} does not answer ({error}); filling alone meanwhile\n"
        )
        self._group, self._copies = None, []
        make_all(self._cache)
        self._failures += 1
        if self._failures == _MOST_FAILURES:  # a head that was started again is another cluster
            raise SourceUnavailableError(f"the Ray cluster at {self._cluster.address} is away")

    # --- copies

    def _begin_copies(self) -> None:
        held = {shard.content for shard in self._shards.values() if shard is not None} | self._arrived
        held |= {fetch.copy.content for fetch in self._fetches.values()}
        now_s = time.monotonic()
        while self._copies and len(self._fetches) < _AT_ONCE:
            copy = self._copies.pop(0)
            holders = [
                one
                for one in copy.holders
                if one[0] in self._servers and self._avoid_s.get(one[0], 0.0) < now_s
            ]
            if copy.content in held or not holders:
                continue
            reserved = self._reserve(copy.nbytes)
            if reserved is None:
                self._copies.clear()  # no space: asked again at the next report
                return
            holder, shard_id = random.choice(holders)
            until_s = now_s + _COPY_S + copy.nbytes / _COPY_BYTES_PER_S
            ref = self._servers[holder].read.remote(shard_id)
            self._fetches[ref] = _Fetch(copy, holder, reserved, until_s)

    def _reserve(self, nbytes: int) -> int | None:
        """Reserve space for a shard before it is asked for; None if there is none now."""
        reservations, may_evict = self._cache.reservations, self._job.when_full == "evict"
        try:
            return reservations.reserve(reservations.footprint(nbytes), self._owner.name, may_evict=may_evict)
        except (CacheFullError, DiskFailedError):
            return None

    def _take(self, ray: Any, ref: Any) -> None:
        """Publish a shard that has arrived, or avoid the cache that did not give it."""
        fetch = self._fetches.pop(ref)
        try:
            self._publish(fetch, ray.get(ref, timeout=ANSWER_S))
        except (ray.exceptions.RayError, CorruptShardError, CacheFullError, DiskFailedError) as error:
            self._drop(fetch, str(error))

    def _give_up_late(self, ray: Any) -> None:
        now_s = time.monotonic()
        for ref in [ref for ref, fetch in self._fetches.items() if now_s > fetch.until_s]:
            ray.cancel(ref)
            self._drop(self._fetches.pop(ref), "it takes too long")

    def _drop(self, fetch: _Fetch, reason: str) -> None:
        """Give up a copy; if there is a `reason`, its holder is avoided for a while."""
        if reason:
            sys.stderr.write(f"no shard from {fetch.holder}: {reason.strip().splitlines()[-1]}\n")
            self._avoid_s[fetch.holder] = time.monotonic() + _AVOID_S
        self._cache.reservations.cancel(fetch.reserved, self._owner.name)

    def _publish(self, fetch: _Fetch, data: npt.NDArray[np.uint8]) -> None:
        content, spans = _checked(data, fetch.copy)
        shared = self._cache.filling.shared_pass()
        assert shared is not None
        plan = str(content.fill["plan"])
        if plan == shared.row.plan:
            pass_id = shared.row.id
        elif PassPlan.from_json(plan).partition not in (None, self._job.partition):
            source, length = self._job.fingerprint, content.fill["length"]
            pass_id = self._cache.filling.enter_earlier_pass(source, plan, length)
            self._exchanged -= 1
        else:  # of a pass that is over here
            self._cache.reservations.cancel(fetch.reserved, self._owner.name)
            return
        self._publisher.publish([content], spans, UnitProgress(pass_id), reserved=[fetch.reserved])
        self._arrived.add(fetch.copy.content)

    def _leave(self, ray: Any) -> None:
        try:
            if self._group is not None and ray.get(self._group.leave.remote(self.name), timeout=1.0):
                ray.kill(self._group)
        except ray.exceptions.RayError:
            pass  # the group notices by itself


def make_all(cache: Cache) -> None:
    """Have the sampling processes take the positions on which the group has not decided."""
    shared = cache.filling.shared_pass()
    if shared is not None and shared.undecided:
        cache.filling.decide(shared.row.id, make=shared.undecided, done=())


def _held_shard(root: str, shard_id: int) -> HeldShard | None:
    """A shard as the directory knows it; None for one that is gone, or that no pass knows."""
    try:
        shard = MappedShard(shard_path(root, shard_id))
    except CorruptShardError:
        return None
    try:
        spans, plan = _spans(shard.fill["spans"]), str(shard.fill["plan"])
    except (KeyError, TypeError, ValueError):
        return None
    finally:
        shard.close()
    return HeldShard(shard.content_hash, shard_id, shard.size_bytes, plan, spans)


def _spans(values: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    return tuple(Span((int(a), int(b)), (int(c), int(d))) for a, b, c, d in values)


def _checked(data: npt.NDArray[np.uint8], copy: Copy) -> tuple[ShardContent, tuple[Span, ...]]:
    """The content of a shard file that has come from another cache, and its spans.

    Raises CorruptShardError unless all checksums match, and it is the shard that was asked for.
    """
    try:
        stop = LENGTH_BYTES + header_bytes(data[:LENGTH_BYTES].tobytes(), len(data))
        shard = ShardData(data[LENGTH_BYTES:stop].tobytes(), data)
        shard.check()
        if shard.content_hash != copy.content:
            raise ValueError("it is another shard")
    except ValueError as error:
        raise CorruptShardError(f"the shard {copy.content} came damaged: {error}") from error
    return shard.content(), _spans(shard.fill["spans"])


def main() -> None:
    """The main of the process: its job comes through stdin, whose end means stop."""
    stop = threading.Event()
    (job_fd,) = tie_to_supervisor(stop)
    name_process("cs-sharing")
    job = load_shared(job_fd)

    def work() -> None:
        assert job.cluster is not None
        cache = Cache(job.root)
        try:
            GroupMember(job, job.cluster, cache, stop).run()
        except SourceUnavailableError as error:  # another process tries again
            sys.stderr.write(f"{error}; filling alone meanwhile\n")
            make_all(cache)

    exit_now(exit_code(work, fatal=WorkerError, restart=(CatalogueReplacedError,)))
