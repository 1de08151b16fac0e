"""A group of caches that share one filling: its actor, what each cache knows of the others, and their
servers.

All caches of the group have the same pass: the same unit lies at the same position for each of them. The
positions are cut into blocks. A cache makes the blocks that it is given (its own processes read, transform
and store their units), and copies the shards of the others.

The actor tells each cache which shards the others have. It keeps no account of what it has given: a block is
taken while a report names it as being made, and held once a shard of it is known. It ends with the process
that has made it; the next cache that misses it makes another one, which is told everything anew.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import CorruptShardError
from cachestream.schema import Span
from cachestream.storage.cache import Cache
from cachestream.storage.progress import Positions
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan

Identity = tuple[tuple[str, str], ...]

MOST_BLOCKS: Final = 4096
SILENT_S: Final = 20.0  # a cache that is silent for so long is gone: its blocks go to others
_OVERDUE_S: Final = 10.0  # a block that takes longer, and 4 times the usual time, is given to another too
# A cache that joins alone, and not empty, may come from an actor that was lost: the others follow, and have
# their blocks before any are given.
_SETTLE_S: Final = 3.0
_RUNS: Final = 8  # a run of blocks is this part of a cache's share of what is left
_MOST_RUNS: Final = 256  # of a pass
_RECENT: Final = 64  # blocks

parsed = functools.lru_cache(maxsize=64)(PassPlan.from_json)


def identity_of(job: Job) -> Identity:
    """The properties that all caches of a group have in common, as (beginning of a sentence, value)."""
    return (
        ("it is filled from the source", job.fingerprint),
        ("it lists the units", f"{job.num_units} {job.listing}"),
        ("it has the transform", job.transform),
        ("it has the order", job.kind),
        ("it has the seed", str(job.seed)),
        ("it divides the units among nodes:", str(job.partition.count) if job.partition else ""),
    )


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard of one cache: `content` is the hash of its content, the same wherever it is copied to."""

    content: str
    shard_id: int
    nbytes: int
    plan: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The state of one cache, sent again and again.

    `plan` and `length` are those of its pass. `seen`: as in the last Answer; -1 at first. `free`: positions
    that wait for the group, and of which no cache is known to have a shard. `making`: positions that its
    sampling processes have, or may take. `added` and `removed`: shards since its last report, all of them at
    first. `wants`: the number of runs that it could begin to make.
    """

    plan: str
    length: int
    seen: int
    free: tuple[Positions, ...] = ()
    making: tuple[Positions, ...] = ()
    added: tuple[HeldShard, ...] = ()
    removed: tuple[str, ...] = ()
    wants: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Shards that a cache has got and lost."""

    name: str
    added: tuple[HeldShard, ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The shards that the other caches have got and lost since the last answer, and positions to make here.

    `seen`: the number of all changes so far. `ordinal`: the highest of the passes of the group. `servers`:
    the shard server of each cache.
    """

    changes: tuple[Change, ...]
    seen: int
    make: tuple[Positions, ...]
    ordinal: int
    servers: dict[str, Any]


class Blocks:
    """The blocks of a pass."""

    def __init__(self, length: int) -> None:
        self._length, self._size = length, max(1, -(-length // MOST_BLOCKS))
        self.count = -(-length // self._size)

    def within(self, ranges: Iterable[Positions]) -> set[int]:
        """The blocks that have a position in `ranges`."""
        found: set[int] = set()
        for start, stop in ranges:
            if start < stop:
                found.update(range(start // self._size, (stop - 1) // self._size + 1))
        return found

    def of_shards(self, shards: Iterable[HeldShard]) -> set[int]:
        """The blocks that have samples in `shards`."""
        spans = (span for shard in shards for span in shard.spans)
        return self.within((span.start[0], span.stop[0] + (span.stop[1] > 0)) for span in spans)

    def ranges(self, blocks: Iterable[int]) -> tuple[Positions, ...]:
        """The positions of `blocks`, in order."""
        found: list[Positions] = []
        for block in sorted(blocks):
            start, stop = block * self._size, min(self._length, (block + 1) * self._size)
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return tuple(found)


@dataclass(slots=True, eq=False)
class _Member:
    """A cache of the group as of its last report.

    `making`: the blocks that it makes, each with the time since when. A block that it was given is one of
    them until the next report, which tells whether the answer has arrived.
    """

    server: Any
    seen_s: float
    seen: int | None = None
    plan: str = ""
    making: dict[int, float] = field(default_factory=dict)
    shards: dict[str, HeldShard] = field(default_factory=dict)


class GroupActor:
    """The actor of a group."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._members: dict[str, _Member] = {}
        self._changes: deque[Change] = deque()  # those that some cache has not seen
        self._num_changes = 0
        self._times_s: deque[float] = deque(maxlen=_RECENT)  # that the last blocks took
        self._give_at_s = 0.0

    def join(self, name: str, identity: Identity, server: Any, now_s: float | None = None) -> str:
        """Take in the cache `name`; returns the difference if it is filled with something else, "" if not."""
        now_s = time.monotonic() if now_s is None else now_s
        self._forget_silent(now_s)
        if not self._members:
            self._identity = identity  # what caches that are gone had in common binds no one
        for (what, ours), (_, theirs) in zip(self._identity, identity, strict=True):
            if ours != theirs:
                return f"{what} {theirs or 'none'}, and the group has {ours or 'none'}"
        member = self._members.setdefault(name, _Member(server, now_s))
        member.server, member.seen_s = server, now_s
        return ""

    def leave(self, name: str) -> None:
        """Forget the cache `name`: what it was making is free, and what it holds cannot be copied from it."""
        if (member := self._members.pop(name, None)) is not None:
            self._note(Change(name, (), tuple(member.shards)))

    def sync(self, name: str, report: CacheReport, now_s: float | None = None) -> Answer | None:
        """Take the report of the cache `name`; None if it has to join (again)."""
        now_s = time.monotonic() if now_s is None else now_s
        self._forget_silent(now_s)
        if (member := self._members.get(name)) is None:
            return None
        changes = self._take(name, member, report, now_s)
        given: set[int] = set()
        blocks = Blocks(report.length)
        if now_s >= self._give_at_s:
            new = (shard for change in changes for shard in change.added if shard.plan == report.plan)
            given = self._give(member, blocks, blocks.within(report.free) - blocks.of_shards(new), report)
            member.making |= dict.fromkeys(given, now_s)
        return Answer(
            changes,
            self._num_changes,
            blocks.ranges(given),
            max(parsed(one.plan).ordinal for one in self._members.values() if one.plan),
            {other: one.server for other, one in self._members.items()},
        )

    def _take(self, name: str, member: _Member, report: CacheReport, now_s: float) -> tuple[Change, ...]:
        """Note a report; returns the changes of the others that its cache has not seen."""
        others = {other: one for other, one in self._members.items() if one is not member and one.plan}
        removed = report.removed
        if report.seen < 0:
            if not others and (report.added or report.making):
                self._give_at_s = now_s + _SETTLE_S
            removed = tuple(member.shards.keys() - {shard.content for shard in report.added})
            changes = tuple(Change(other, tuple(one.shards.values())) for other, one in others.items())
        else:
            first = self._num_changes - len(self._changes)
            news = list(self._changes)[max(0, report.seen - first) :]
            changes = tuple(change for change in news if change.name != name)
        for content in removed:
            member.shards.pop(content, None)
        member.shards |= {shard.content: shard for shard in report.added}
        if report.added or removed:
            self._note(Change(name, report.added, removed))
        blocks, before = Blocks(report.length), member.making if member.plan == report.plan else {}
        making = blocks.within(report.making)
        made = before.keys() - making - blocks.within(report.free)
        self._times_s.extend(now_s - before[block] for block in made)
        member.seen, member.seen_s, member.plan = self._num_changes, now_s, report.plan
        member.making = {block: before.get(block, now_s) for block in making}
        return changes

    def _note(self, change: Change) -> None:
        self._changes.append(change)
        self._num_changes += 1
        seen = [one.seen for one in self._members.values() if one.seen is not None]
        while len(self._changes) > self._num_changes - min(seen, default=self._num_changes):
            self._changes.popleft()

    def _forget_silent(self, now_s: float) -> None:
        for name in [one for one, member in self._members.items() if now_s - member.seen_s > SILENT_S]:
            self.leave(name)

    def _give(self, member: _Member, blocks: Blocks, free: set[int], report: CacheReport) -> set[int]:
        """Give as many runs of the blocks in `free` as are wanted; at the end those that are late, singly.

        Runs become shorter towards the end (Polychronopoulos and Kuck, "Guided Self-Scheduling", 1987).
        """
        peers = [one for one in self._members.values() if one is not member and one.plan == report.plan]
        since_s: dict[int, float] = {}  # of the blocks that others make, the last to begin
        for one in peers:
            for block, begun_s in one.making.items():
                since_s[block] = max(begun_s, since_s.get(block, begun_s))
        left = sorted(free - since_s.keys())
        usual_s = statistics.median(self._times_s) if self._times_s else 0.0
        late_s = member.seen_s - max(_OVERDUE_S, 4 * usual_s)
        late = sorted(free & since_s.keys(), key=lambda block: since_s[block])
        late = [block for block in late if since_s[block] < late_s]
        given: list[int] = []
        for _ in range(report.wants):
            size = max(1, blocks.count // _MOST_RUNS, len(left) // (_RUNS * len(self._members)))
            given += left[:size] or late[:1]
            late, left = late[not left :], left[size:]
        return set(given)


class GroupView:
    """The shards of the other caches of the group, as one cache knows them.

    `refused`: the contents of shards that it cannot use in this pass, as long as a cache holds them.
    """

    def __init__(self) -> None:
        self.seen = -1
        self.refused: set[str] = set()
        self._plan = ""
        self.servers: dict[str, Any] = {}
        self._shards: dict[str, HeldShard] = {}
        self._holders: dict[str, dict[str, int]] = {}

    def take(self, answer: Answer) -> None:
        """Take the news of an answer."""
        self.seen, self.servers = answer.seen, answer.servers
        for change in answer.changes:
            for shard in change.added:
                self._shards.setdefault(shard.content, shard)
                self._holders.setdefault(shard.content, {})[change.name] = shard.shard_id
            for content in change.removed:
                holders = self._holders.get(content, {})
                holders.pop(change.name, None)
                if not holders:
                    self._holders.pop(content, None)
                    self._shards.pop(content, None)
                    self.refused.discard(content)

    def holders(self, shard: HeldShard) -> list[tuple[str, int]]:
        """The caches that hold a shard, each with the id that it has there."""
        return [one for one in self._holders.get(shard.content, {}).items() if one[0] in self.servers]

    def choose(
        self,
        plan: str,
        length: int,
        undecided: Sequence[Positions],
        held: Collection[str],
        *,
        has_room: bool,
    ) -> tuple[list[HeldShard], list[HeldShard], tuple[Positions, ...]]:
        """The shards of this pass and of earlier ones that the cache lacks, and the positions that it may
        have to make.

        The cache has the shards with the contents `held`. Shards of earlier passes are for one that
        `has_room`: the latest come first.
        """
        if plan != self._plan:
            self._plan = plan
            self.refused.clear()
        lacking = [
            shard
            for content, shard in self._shards.items()
            if content not in held and content not in self.refused
        ]
        blocks = Blocks(length)
        wanted = blocks.within(undecided)
        current = [shard for shard in lacking if shard.plan == plan and wanted & blocks.of_shards([shard])]
        earlier: list[HeldShard] = []
        if has_room:
            earlier = [shard for shard in lacking if parsed(shard.plan).precedes(parsed(plan))]
            earlier.sort(key=lambda shard: -parsed(shard.plan).ordinal)
        return current, earlier, blocks.ranges(wanted - blocks.of_shards(current))


class ShardServer:
    """The actor that gives the shards of the cache at `root` to other caches; it runs on the cache's node."""

    def __init__(self, root: str) -> None:
        self._root = root

    def ready(self) -> None:
        """Do nothing: an answer shows that the server runs."""

    def read(self, shard_id: int) -> npt.NDArray[np.uint8]:
        """The file of a shard, uint8 `[nbytes]`; raises FileNotFoundError for one that was evicted."""
        return np.fromfile(shard_path(self._root, shard_id), np.uint8)  # an open file outlives its name

    def check(self, shard_id: int) -> None:
        """Quarantine a shard if it is damaged: another cache has found it so."""
        try:
            with closing(MappedShard(shard_path(self._root, shard_id))) as shard:
                shard.verify()
        except CorruptShardError as error:
            with Cache(self._root) as cache:
                cache.quarantine(shard_id, str(error))
