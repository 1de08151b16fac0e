"""The process of a cache that shares its filling with a group of caches.

The process reports to the directory of the group what the cache holds and makes, gives its sampling processes
the positions that they are to make, and copies the shards of the other caches. Ray carries the shards from
node to node. While the group does not answer, the cache is filled from the remote alone.

It may be killed at any point: the cache's claims and shards tell the next one where it stood.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import (
    CacheError,
    CacheFullError,
    CacheLockedError,
    CorruptShardError,
    SourceUnavailableError,
    WorkerError,
)
from cachestream.linux import name_process
from cachestream.schema import WHOLE, Span
from cachestream.shard_format import LENGTH_BYTES, ShardContent, ShardData, header_bytes
from cachestream.storage.cache import Cache
from cachestream.storage.filling import SharedPass, is_open
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.publish import CatalogueReplacedError, Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.storage.telemetry import FETCHING, NO_SPACE, Board
from cachestream.worker.child_process import ChildProcess, ForkServer
from cachestream.worker.cluster.connection import ClusterOptions, connect
from cachestream.worker.cluster.directory import Copy, HeldShard, Report
from cachestream.worker.cluster.group import Group, ShardServer, identity_of
from cachestream.worker.health import LATER_PAUSE_S, GiveUpError
from cachestream.worker.job import Job, load_shared
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import block_size
from cachestream.worker.processes import EXIT_FATAL, exit_code, exit_now, tie_to_supervisor
from cachestream.worker.sampling.cached_units import holds_units

SYNC_S: Final = 0.3
_ALONE: Final = "no Ray cluster answers: filling alone"
ANSWER_S: Final = 10.0  # without an answer for so long the cache goes on alone
_AT_ONCE: Final = 4  # copies under way
_AVOID_S: Final = 10.0  # a cache that did not give a shard is not asked
_COPY_S, _COPY_BYTES_PER_S = 15.0, 1 << 20  # a copy that is slower is given up
_OFFERED: Final = 2  # claims ready for each sampling process
_MOST_FAILURES: Final = 5
_MOST_ATTEMPTS: Final = 3  # to copy a shard; then its samples are made
_LEAVE_S: Final = 1.0
_LINE_CHARS: Final = 200
_CONNECT_S: Final = 50.0  # longer than an answer
_OFTEN: Final = 16  # larger groups synchronise less often
_EXCHANGES: Final = 8  # shards asked for at once

logger = logging.getLogger("cachestream.worker")


class SharingProcess:
    """The supervisor's side: the process is started again whenever it ends.

    `message` tells while the group does not answer.
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
            logger.warning(
                "the process that shares the filling ended with code %d: another one follows", code
            )
            self.process.start_at_s = now_s + LATER_PAUSE_S
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self.process.start(now_s)
        if output := self.process.last_output:
            self.message = _ALONE if output.rstrip().endswith(_ALONE) else ""


# --- the process


@dataclass(slots=True)
class _Fetch:
    """A shard under way, into a reservation of this cache."""

    copy: Copy
    holder: str
    reserved: int
    until_s: float


class FillingAlone:
    """Gives the sampling processes positions to make while the group does not answer.

    A thread does this: Ray may block for a minute while the head of the cluster is away. Few positions are
    given at a time, and places are drawn: once the group answers again, little was made twice.
    """

    def __init__(self, cache: Cache, group: str, num_workers: int, stop: threading.Event) -> None:
        self._cache, self._group, self._num_workers, self._stop = cache, group, num_workers, stop
        self._answered_s = time.monotonic() + _CONNECT_S
        self._is_alone: bool | None = None  # None until it is known
        threading.Thread(target=self._run, name="alone", daemon=True).start()

    def answered(self) -> None:
        """Note that the group has answered."""
        if self._is_alone is not False:
            sys.stderr.write(f"the group {self._group!r} answers\n")
        self._answered_s, self._is_alone = time.monotonic(), False

    def begin(self, reason: str) -> None:
        """Begin at once: the group cannot answer."""
        self._answered_s = -math.inf
        self._note(reason)

    def _note(self, reason: str) -> None:
        if not self._is_alone:
            self._is_alone = True
            sys.stderr.write(f"the group {self._group!r} does not answer ({reason})\n{_ALONE}\n")

    def _run(self) -> None:
        while not self._stop.wait(SYNC_S):
            silent_s = time.monotonic() - self._answered_s
            if silent_s > ANSWER_S:
                self._note(f"for {silent_s:.0f} s")
                with suppress(CacheError):  # another try follows
                    self._offer()

    def _offer(self) -> None:
        shared = self._cache.filling.shared_pass()
        if shared is None or not shared.undecided:
            return
        for _ in range(_OFFERED * self._num_workers - shared.offered):
            start, stop = random.choice(shared.undecided)
            size = block_size(shared.row.length, self._num_workers)
            start = random.randrange(start, stop, size)
            self._cache.filling.decide(shared.row.id, make=[(start, min(stop, start + size))], done=())


class GroupMember:
    """Shares the filling of `cache` with its group, until `stop`."""

    def __init__(self, job: Job, cluster: ClusterOptions, cache: Cache, stop: threading.Event) -> None:
        self._job, self._cluster, self._cache, self._stop = job, cluster, cache, stop
        self.name = f"{socket.gethostname()}:{cache.path}"
        self._owner = Owner.temporary(cache.directory, "copy")
        self._slot = Board(cache.directory.worker_file("board")).sharing_slot
        self._publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, self._owner.name)
        self._alone = FillingAlone(cache, cluster.group, job.num_workers, stop)
        self._shards: dict[int, HeldShard | None] = {}  # None for one that cannot be shared
        self._reported: set[int] = set()
        self._fetches: dict[Any, _Fetch] = {}
        self._arrived: set[str] = set()  # the contents of shards copied since the last report
        self._avoid_s: dict[str, float] = {}
        self._attempts: Counter[str] = Counter()  # failed ones, of each shard
        self._refused: list[str] = []
        self._num_refused = 0  # of them, as reported
        self._copies: list[Copy] = []
        self._servers: dict[str, Any] = {}
        self._group: Any = None
        self._groups: list[Any] = []  # an actor ends once the process that has made it has no handle on it
        self._has_joined = False
        self._joins = True
        self._failures = 0  # in succession
        self._server: Any = None
        self._exchanged = -1.0  # shards still to be exchanged; below 0 before the first report
        self._snapshots = 0
        self._num_members = 1

    def run(self) -> None:
        """Report and copy until told to stop; raises WorkerError if the group refuses the cache."""
        try:
            ray = self._connect()
            while not self._stop.is_set():
                self._step(ray)
        finally:
            for fetch in self._fetches.values():
                self._cancel(fetch)
            self._owner.release()
        if self._group is not None:
            with suppress(ray.exceptions.RayError):  # the group notices by itself
                ray.get(self._group.leave.remote(self.name), timeout=_LEAVE_S)

    def _connect(self) -> Any:
        """Connect to the cluster as soon as its head answers; the cache is filled alone until then."""
        while not self._stop.is_set():
            try:
                ray = connect(self._cluster.address)
            except SourceUnavailableError as error:
                self._alone.begin(str(error))
                self._stop.wait(LATER_PAUSE_S)
                continue
            node = ray.get_runtime_context().get_node_id()
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            server = ray.remote(ShardServer)
            self._server = server.options(num_cpus=0, scheduling_strategy=strategy).remote(self._cache.path)
            return ray
        return None

    def _step(self, ray: Any) -> None:
        """Synchronise with the group, and take what has arrived by the time of the next synchronisation."""
        next_s = time.monotonic() + SYNC_S * max(1.0, self._num_members / _OFTEN)
        try:
            if not self._has_joined:
                self._join(ray)
            self._sync(ray)
        except ray.exceptions.RayError as error:
            self._lose_group(error)
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
        """Join the group. Its actor is made by the first cache, and by another one when that is gone."""
        members = identity_of(self._job, self._cluster)
        group = ray.remote(Group).options(
            name=f"group {self._cluster.group}", get_if_exists=True, num_cpus=0, max_restarts=-1
        )
        self._group = group.remote(members, self._cluster.replicas)
        self._groups.append(self._group)
        difference = ray.get(self._group.join.remote(self.name, members, self._server), timeout=3 * ANSWER_S)
        if difference:
            raise WorkerError(
                f"the cache {self._cache.path} does not fit the group {self._cluster.group!r}: {difference}; "
                "give the group another name, or all its caches the same"
            )
        self._cache.filling.share()
        self._reported.clear()
        self._num_refused = 0
        self._has_joined = self._joins = True

    def _sync(self, ray: Any) -> None:
        shared = self._cache.filling.shared_pass()
        if shared is None or shared.row.length is None:
            return
        report = self._report(shared)
        answer, servers = ray.get(self._group.sync.remote(self.name, report), timeout=ANSWER_S)
        if not answer.is_known:
            self._has_joined = False
            return
        self._alone.answered()
        self._joins, self._failures, self._num_members = False, 0, answer.num_members
        plan = PassPlan.from_json(shared.row.plan)
        if answer.ordinal > plan.ordinal and self._cache.filling.follow_group(
            shared.row, replace(plan, ordinal=answer.ordinal).to_json()
        ):
            return
        for ref in [ref for ref, fetch in self._fetches.items() if fetch.copy.touches(answer.make)]:
            self._cancel(self._fetches.pop(ref))  # it would come for nothing
        if answer.make or answer.done:
            self._cache.filling.decide(shared.row.id, make=answer.make, done=answer.done)
        self._copies = [copy for copy in answer.copies if not copy.touches(answer.make)]
        self._servers = servers
        if not self._copies:
            self._slot["state"] = FETCHING

    def _report(self, shared: SharedPass) -> Report:
        added, removed = self._changes()
        wanted = _OFFERED * self._job.num_workers - shared.offered
        refused, self._num_refused = self._refused[self._num_refused :], len(self._refused)
        return Report(
            shared.row.plan,
            shared.row.length or 0,
            shared.undecided,
            shared.making,
            added,
            removed,
            tuple(refused),
            wants=max(0, wanted),
            exchange=self._exchange(),
            joins=self._joins,
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
        gone = [(shard_id, self._shards.pop(shard_id)) for shard_id in self._shards.keys() - ids]
        for shard_id in sorted(ids - self._shards.keys()):
            self._shards[shard_id] = _held_shard(self._cache.path, shard_id)
        added = [self._shards[shard_id] for shard_id in sorted(self._shards.keys() - self._reported)]
        removed = [held for shard_id, held in gone if shard_id in self._reported]
        self._reported = set(self._shards)
        return tuple(filter(None, added)), tuple(held.content for held in removed if held is not None)

    def _lose_group(self, error: Exception) -> None:
        """Join again, as a new cluster if the group does not answer for long: a head may be started again."""
        sys.stderr.write(f"the group {self._cluster.group!r} is away: {_last_line(error)}\n")
        self._has_joined, self._copies = False, []
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            raise SourceUnavailableError(f"the Ray cluster at {self._cluster.address} is away")
        self._stop.wait(LATER_PAUSE_S if self._failures > 1 else 0.0)

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
            self._slot["state"] = NO_SPACE if reserved is None else FETCHING
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
        except (CacheFullError, CacheLockedError, DiskFailedError):
            return None

    def _take(self, ray: Any, ref: Any) -> None:
        """Publish a shard that has arrived, or avoid the cache that did not give it."""
        fetch = self._fetches.pop(ref)
        try:
            self._publish(fetch, ray.get(ref, timeout=ANSWER_S))
        except CatalogueReplacedError:
            raise
        except CorruptShardError as error:
            self._drop(fetch, error)
            for holder, shard_id in fetch.copy.holders:
                if holder == fetch.holder and holder in self._servers:
                    self._servers[holder].check.remote(shard_id)
        except (ray.exceptions.RayError, CacheError) as error:
            self._drop(fetch, error)

    def _give_up_late(self, ray: Any) -> None:
        now_s = time.monotonic()
        for ref in [ref for ref, fetch in self._fetches.items() if now_s > fetch.until_s]:
            ray.cancel(ref)
            self._drop(self._fetches.pop(ref), "it takes too long")

    def _cancel(self, fetch: _Fetch) -> None:
        self._cache.reservations.cancel(fetch.reserved, self._owner.name)

    def _drop(self, fetch: _Fetch, reason: object) -> None:
        """Give up a copy, and avoid its holder for some time; after some attempts the samples are made here."""
        sys.stderr.write(f"no shard from {fetch.holder}: {_last_line(reason)}\n")
        if not isinstance(reason, CorruptShardError | FileNotFoundError):  # it may well give others
            self._avoid_s[fetch.holder] = time.monotonic() + _AVOID_S
        self._cancel(fetch)
        content = fetch.copy.content
        self._attempts[content] += 1
        if self._attempts[content] >= min(_MOST_ATTEMPTS, 1 + len(fetch.copy.holders)):
            del self._attempts[content]
            self._refused.append(content)

    def _publish(self, fetch: _Fetch, data: npt.NDArray[np.uint8]) -> None:
        content, spans = _checked(data, fetch.copy)
        shared, source = self._cache.filling.shared_pass(), self._job.fingerprint
        assert shared is not None
        text = str(content.fill["plan"])
        plan, is_foreign = PassPlan.from_json(text), False
        pass_id = shared.row.id
        if text != shared.row.plan:
            is_foreign = plan.partition not in (None, self._job.partition)
            if not is_foreign:  # of a pass that is over here
                self._cancel(fetch)
                return
            pass_id = self._cache.filling.enter_earlier_pass(source, text, content.fill["length"])
        if holds_units(self._cache.filling.cached_spans(PassPlan.from_json, (WHOLE,)), plan, spans):
            self._cancel(fetch)
            self._refused.append(fetch.copy.content)
            return
        progress = UnitProgress(pass_id)
        is_wanted = partial(is_open, pass_id=pass_id, spans=spans, is_shared=not is_foreign)
        shard_ids = self._publisher.publish(
            [content], spans, progress, reserved=[fetch.reserved], only_if=is_wanted
        )
        self._arrived.add(fetch.copy.content)
        self._attempts.pop(fetch.copy.content, None)
        self._exchanged -= is_foreign and shard_ids is not None


def _last_line(reason: object) -> str:
    """The last line of a message; errors of remote tasks come with their traceback."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[-1][:_LINE_CHARS]


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
        try:
            GroupMember(job, job.cluster, Cache(job.root), stop).run()
        except SourceUnavailableError as error:  # another process connects again
            sys.stderr.write(f"{error}\n")

    exit_now(exit_code(work, fatal=WorkerError, restart=(CatalogueReplacedError,)))
