"""The directory of a group of caches: which cache makes which positions, and which caches hold which shards.

All caches of the group have the same pass: the same unit lies at the same position for each of them. The
positions are cut into blocks. A cache makes the blocks that it is given (its own processes read, transform
and store their units), and copies the shards of the others. Nothing here does I/O or reads a clock: times
come with the calls.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from cachestream.schema import Span
from cachestream.worker.order import PassPlan

Range = tuple[int, int]  # positions [start, stop)

MOST_BLOCKS: Final = 4096
SILENT_S: Final = 20.0  # a cache that is silent for so long is gone: its blocks go to others
_OVERDUE_S: Final = 10.0  # a block that takes longer, and 4 times the usual time, is given to another too
# A cache that joins alone, and not empty, may come from a directory that was lost: the others follow, and
# have their blocks before any are given.
_SETTLE_S: Final = 3.0
_RUNS: Final = 8  # a run of blocks is this part of a cache's share of what is left
_MOST_RUNS: Final = 256  # of a pass
_COPIES: Final = 16  # told at once
_RECENT: Final = 64  # blocks
_start = attrgetter("start")


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard of one cache: `content` is the hash of its content, the same wherever it is copied to.

    `is_part`: it has only some samples of the shard that it was copied from.
    """

    content: str
    shard_id: int
    nbytes: int
    plan: str
    spans: tuple[Span, ...]
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The state of one cache, sent again and again.

    `plan` and `length` are those of its pass. `undecided`: positions that wait for the directory. `making`:
    positions that its sampling processes have, or may take. `added` and `removed`: shards since its last
    report, all of them if it `joins`. `refused`: shards that it cannot have, since its last report: damaged
    ones, say. `wants`: the number of runs that it could begin to make. `has_room`: it has never evicted a
    shard, and has room for more.
    """

    plan: str
    length: int
    undecided: tuple[Range, ...] = ()
    making: tuple[Range, ...] = ()
    added: tuple[HeldShard, ...] = ()
    removed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    wants: int = 0
    has_room: bool = False
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A shard to be copied: `holders` are caches, each with the id that the shard has there."""

    content: str
    nbytes: int
    plan: str
    spans: tuple[Span, ...]
    holders: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The decisions on a report.

    `make`: positions that the cache is to make. `done`: positions of which it holds all samples. `copies`:
    shards that it is to copy. `is_known` is False for a cache that has to join (again). `ordinal`: the
    highest ordinal of the passes of the group. `num_members`: the number of its caches.
    """

    make: tuple[Range, ...] = ()
    done: tuple[Range, ...] = ()
    copies: tuple[Copy, ...] = ()
    is_known: bool = True
    ordinal: int = 0
    num_members: int = 1


class _Pass:
    """The blocks of one pass: the shards that have samples of each, and how long the last ones took."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.size = max(1, -(-length // MOST_BLOCKS))
        self.count = -(-length // self.size)
        self.shards: defaultdict[int, set[str]] = defaultdict(set)
        self.times_s: deque[float] = deque(maxlen=_RECENT)

    def range_of(self, block: int) -> Range:
        return block * self.size, min(self.length, (block + 1) * self.size)

    def within(self, ranges: Iterable[Range]) -> set[int]:
        """The blocks that have a position in `ranges`."""
        found: set[int] = set()
        for start, stop in ranges:
            if start < stop:
                found.update(range(start // self.size, (stop - 1) // self.size + 1))
        return found

    def of_spans(self, spans: Iterable[Span]) -> set[int]:
        """The blocks in which `spans` lie."""
        return self.within((span.start[0], span.stop[0] + (span.stop[1] > 0)) for span in spans)

    def enter(self, content: str, spans: Iterable[Span]) -> None:
        for block in self.of_spans(spans):
            self.shards[block].add(content)


@dataclass(slots=True, eq=False)
class _Member:
    """A cache of the group as of its last report.

    `making`: the blocks that it makes, each with the time since when. A block that it was given is one of
    them until the next report, which tells whether the answer has arrived.
    """

    report: CacheReport
    blocks: _Pass
    seen_s: float
    undecided: set[int] = field(default_factory=set)
    making: dict[int, float] = field(default_factory=dict)
    shards: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    spans: dict[str, list[Span]] = field(default_factory=dict)  # of each plan, in order

    def take(self, report: CacheReport, blocks: _Pass, now_s: float) -> None:
        """Take a report; `blocks` are those of its pass."""
        before = self.making if blocks is self.blocks else {}
        self.report, self.blocks, self.seen_s = report, blocks, now_s
        self.undecided, making = blocks.within(report.undecided), blocks.within(report.making)
        made = before.keys() - making - self.undecided
        blocks.times_s.extend(now_s - before[block] for block in made)
        self.making = {block: before.get(block, now_s) for block in making}

    @property
    def held(self) -> list[Span]:
        """The spans of its pass that it holds."""
        return self.spans.get(self.report.plan, [])

    def add(self, shard: HeldShard) -> None:
        if shard.content not in self.shards:
            self.shards.add(shard.content)
            _insert(self.spans.setdefault(shard.plan, []), shard.spans)

    def remove(self, shard: HeldShard) -> None:
        self.shards.discard(shard.content)
        gone = set(shard.spans)
        self.spans[shard.plan] = [span for span in self.spans[shard.plan] if span not in gone]


class GroupDirectory:
    """The directory of one group. It keeps no account of its own decisions: the reports tell what came of
    them.

    A block that a cache lacks is copied from those that hold it. If none does, and none makes it, the cache
    may make it; that holds for blocks never made, of caches that are gone, and evicted before all had them.

    A shard of the pass is copied to a cache that holds and makes none of its samples, so no cache gets a
    sample twice, whatever was made twice: by a cache that was believed gone, say. Of a shard of an earlier
    pass, the cache stores the units that it lacks.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._shards: dict[str, HeldShard] = {}  # by content, as one of the holders has reported each
        self._holders: dict[str, dict[str, int]] = {}
        self._passes: dict[str, _Pass] = {}
        self._give_at_s = 0.0

    @property
    def members(self) -> list[str]:
        return sorted(self._members)

    def sync(self, name: str, report: CacheReport, now_s: float) -> Answer:
        """Take the report of the cache `name`, and decide on what it is to do."""
        self.forget_silent(now_s)
        if report.joins:
            self.leave(name)
            if not self._members and (report.added or report.making):
                self._give_at_s = now_s + _SETTLE_S
        elif name not in self._members:
            return Answer(is_known=False)
        blocks = self._enter_pass(name, report)
        member = self._members.setdefault(name, _Member(report, blocks, now_s))
        member.take(report, blocks, now_s)
        self._note_shards(name, member)
        return self._decide(member, now_s)

    def _enter_pass(self, name: str, report: CacheReport) -> _Pass:
        """The blocks of the pass of a report; passes that no cache is in any more are forgotten."""
        plan = report.plan
        current = {one.report.plan for other, one in self._members.items() if other != name} | {plan}
        self._passes = {known: blocks for known, blocks in self._passes.items() if known in current}
        if plan not in self._passes:
            self._passes[plan] = _Pass(report.length)
            for shard in self._shards.values():
                if shard.plan == plan:
                    self._passes[plan].enter(shard.content, shard.spans)
        return self._passes[plan]

    def forget_silent(self, now_s: float) -> list[str]:
        """Forget the caches that have not reported for long, and return them."""
        silent = [one for one, member in self._members.items() if now_s - member.seen_s > SILENT_S]
        for name in silent:
            self.leave(name)
        return silent

    def leave(self, name: str) -> None:
        """Forget the cache `name`: what it was making is free, and what it holds cannot be copied from it."""
        if (member := self._members.pop(name, None)) is not None:
            for content in member.shards:
                self._drop(content, name)

    def _note_shards(self, name: str, member: _Member) -> None:
        report = member.report
        for content in report.removed:
            if content in member.shards:
                member.remove(self._shards[content])
                self._drop(content, name)
        for shard in report.added:
            self._shards.setdefault(shard.content, shard)
            self._holders.setdefault(shard.content, {})[name] = shard.shard_id
            member.add(shard)
            if (blocks := self._passes.get(shard.plan)) is not None:
                blocks.enter(shard.content, shard.spans)
        member.refused.update(content for content in report.refused if content in self._shards)

    def _drop(self, content: str, name: str) -> None:
        del self._holders[content][name]
        if not self._holders[content]:
            shard = self._shards.pop(content)
            del self._holders[content]
            for member in self._members.values():
                member.refused.discard(content)
            if (blocks := self._passes.get(shard.plan)) is not None:
                for block in blocks.of_spans(shard.spans):
                    blocks.shards[block].discard(content)

    def _decide(self, member: _Member, now_s: float) -> Answer:
        blocks, peers = member.blocks, [one for one in self._members.values() if one.blocks is member.blocks]
        made_since_s: dict[int, float] = {}  # blocks that are being made, by the last cache to begin
        for one in peers:
            for block, since_s in one.making.items():
                made_since_s[block] = max(since_s, made_since_s.get(block, since_s))
        waiting = member.undecided - member.making.keys()
        done, free, wanted = list[int](), list[int](), dict[str, HeldShard]()
        for block in sorted(member.undecided):
            others = blocks.shards[block] - member.shards - member.refused
            if blocks.shards[block] and covers(member.held, *blocks.range_of(block)):
                done.append(block)
            elif others and len(wanted) >= _COPIES:
                pass  # enough for one answer
            elif found := self._copies_of(others, member, waiting):
                wanted |= {shard.content: shard for shard in found}
            elif block not in made_since_s:
                free.append(block)
        # A cache that joins makes nothing before it has what the others hold.
        earlier = self._earlier(member)
        given: list[int] = []
        if not earlier and now_s >= self._give_at_s:
            new = set(free).intersection(*(one.undecided for one in peers))
            lost = [block for block in free if block not in new]
            given = self._give(member, sorted(new), lost, _late(member, made_since_s, now_s))
        member.making |= dict.fromkeys(given, now_s)
        return Answer(
            _joined(map(blocks.range_of, given)),
            _joined(map(blocks.range_of, done)),
            self._copies(wanted.values(), earlier),
            ordinal=max(PassPlan.from_json(one.report.plan).ordinal for one in self._members.values()),
            num_members=len(self._members),
        )

    def _copies_of(self, contents: set[str], member: _Member, waiting: set[int]) -> list[HeldShard]:
        """The shards among `contents` that the cache could copy: it is `waiting` for all blocks of each.

        Whole shards come before parts. Where samples were made twice, the shards of one cache come first:
        those of several would leave gaps.
        """
        found = [
            shard
            for shard in map(self._shards.__getitem__, contents)
            if member.blocks.of_spans(shard.spans) <= waiting and not overlap(member.held, shard.spans)
        ]
        return sorted(
            found, key=lambda shard: (shard.is_part, min(self._holders[shard.content]), shard.content)
        )

    def _give(self, member: _Member, new: list[int], lost: list[int], late: list[int]) -> list[int]:
        """Give the cache as many runs of blocks as it wants: new ones, those whose samples are lost, or late
        ones singly.

        Runs become shorter towards the end (Polychronopoulos and Kuck, "Guided Self-Scheduling", 1987).
        """
        given: list[int] = []
        for _ in range(member.report.wants):
            left = new or lost or late
            part = len(left) // (_RUNS * len(self._members))
            size = 1 if left is late else max(1, member.blocks.count // _MOST_RUNS, part)
            given += left[:size]
            del left[:size]
        return given

    def _earlier(self, member: _Member) -> list[HeldShard]:
        """The shards of earlier passes that the cache lacks, the latest first; none unless it has room.

        The cache takes of each the units that it does not hold.
        """
        if not member.report.has_room:
            return []
        now = PassPlan.from_json(member.report.plan)
        plans = {text: PassPlan.from_json(text) for text in {shard.plan for shard in self._shards.values()}}
        ordinals = {text: plan.ordinal for text, plan in plans.items() if plan.precedes(now)}
        found = (
            shard
            for content, shard in self._shards.items()
            if shard.plan in ordinals and content not in member.shards and content not in member.refused
            if not _cover_all(member.spans.get(shard.plan, []), shard.spans)
        )
        return sorted(found, key=lambda shard: (-ordinals[shard.plan], shard.is_part, shard.content))

    def _copies(self, wanted: Iterable[HeldShard], earlier: Iterable[HeldShard]) -> tuple[Copy, ...]:
        """The first copies: no two of the pass have samples in common, but those of `earlier` passes may."""
        chosen, coming = dict[str, HeldShard](), list[Span]()
        for shard in wanted:
            if len(chosen) < _COPIES and not overlap(coming, shard.spans):
                chosen[shard.content] = shard
                _insert(coming, shard.spans)
        for shard in itertools.islice(earlier, _COPIES - len(chosen)):
            chosen[shard.content] = shard
        return tuple(
            Copy(
                one.content,
                one.nbytes,
                one.plan,
                one.spans,
                tuple(sorted(self._holders[one.content].items())),
            )
            for one in chosen.values()
        )


def _late(member: _Member, made_since_s: dict[int, float], now_s: float) -> list[int]:
    """The blocks that others have made for far longer than most take, the oldest first."""
    times_s = member.blocks.times_s
    late_s = now_s - max(_OVERDUE_S, 4 * (statistics.median(times_s) if times_s else 0.0))
    late = member.undecided & {block for block, since_s in made_since_s.items() if since_s < late_s}
    return sorted(late - member.making.keys(), key=made_since_s.__getitem__)


def _insert(spans: list[Span], others: Iterable[Span]) -> None:
    """Insert `others` into `spans`, which are ascending."""
    for other in others:
        insort(spans, other, key=_start)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """`ranges` in ascending order, with neighbours joined."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def covers(spans: Sequence[Span], start: int, stop: int) -> bool:
    """True if `spans`, in ascending order, hold all samples of the positions `start` to `stop`."""
    return _cover_all(spans, [Span((start, 0), (stop, 0))])


def _cover_all(spans: Sequence[Span], others: Iterable[Span]) -> bool:
    """True if `spans`, in ascending order, hold all samples of `others`."""
    for other in others:
        reached = other.start
        for span in _from(spans, reached):
            if span.start > reached or reached >= other.stop:
                break
            reached = max(reached, span.stop)
        if reached < other.stop:
            return False
    return True


def overlap(spans: Sequence[Span], others: Iterable[Span]) -> bool:
    """True if one of `spans`, in ascending order, has samples in common with one of `others`."""
    for other in others:
        for span in _from(spans, other.start):
            if span.start >= other.stop:
                break
            if span.stop > other.start:
                return True
    return False


def _from(spans: Sequence[Span], start: tuple[int, int]) -> Iterator[Span]:
    """The spans that may reach `start` or begin later; `spans` are ascending and hardly overlap."""
    index = bisect_right(spans, start, key=_start)
    return iter(spans[max(0, index - 2) :])
