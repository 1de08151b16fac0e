"""The directory of a group of caches: which cache makes which positions, and which caches hold which shards.

All caches of the group have the same pass: the same unit lies at the same position for each of them. The
positions are cut into blocks. A cache makes the blocks that it is given (its own processes read, transform
and store their units), and copies the shards of the others. Nothing here does I/O or reads a clock: times
come with the calls.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import xxhash

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
    ones, say. `wants`: the number of runs that it could begin to make. `exchange`: the number of shards of
    other partitions that it wants. `has_evicted`: it has evicted shards in this pass. `has_room`: it has
    never evicted any, and has room for more.
    """

    plan: str
    length: int
    undecided: tuple[Range, ...] = ()
    making: tuple[Range, ...] = ()
    added: tuple[HeldShard, ...] = ()
    removed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    wants: int = 0
    exchange: int = 0
    has_evicted: bool = False
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

    def touches(self, plan: str, ranges: Iterable[Range]) -> bool:
        """True if the shard has samples of positions in `ranges` of the pass with this plan."""
        return plan == self.plan and overlap(
            self.spans, [Span((start, 0), (stop, 0)) for start, stop in ranges]
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The decisions on a report.

    `make`: positions that the cache is to make. `done`: positions with which it is done without making them.
    `copies`: shards that it is to copy. `is_known` is False for a cache that has to join (again). `ordinal`:
    the highest ordinal of the passes of the group. `num_members`: the number of its caches.
    """

    make: tuple[Range, ...] = ()
    done: tuple[Range, ...] = ()
    copies: tuple[Copy, ...] = ()
    is_known: bool = True
    ordinal: int = 0
    num_members: int = 1


@dataclass(slots=True)
class _KnownShard:
    nbytes: int
    plan: str
    spans: tuple[Span, ...]
    is_part: bool
    holders: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Member:
    """A cache of the group, as of its last `report`, and the `blocks` of its pass."""

    name: str
    report: CacheReport
    blocks: _Blocks
    seen_s: float
    undecided: set[int] = field(default_factory=set)
    making: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)  # both
    waiting: set[int] = field(default_factory=set)  # undecided, and no part of them made here
    shards: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    spans: dict[str, list[Span]] = field(default_factory=dict)  # of each plan, in order

    def take(self, report: CacheReport, blocks: _Blocks, now_s: float) -> None:
        """Take a report; `blocks` are those of its pass."""
        self.report, self.blocks, self.seen_s = report, blocks, now_s
        self.undecided, self.making = blocks.within(report.undecided), blocks.within(report.making)
        self.unfinished, self.waiting = self.undecided | self.making, self.undecided - self.making

    @property
    def held(self) -> list[Span]:
        """The spans of its pass that it holds."""
        return self.spans.get(self.report.plan, [])

    def add(self, content: str, shard: _KnownShard) -> None:
        if content not in self.shards:
            self.shards.add(content)
            _insert(self.spans.setdefault(shard.plan, []), shard.spans)

    def remove(self, content: str, shard: _KnownShard) -> None:
        self.shards.discard(content)
        gone = set(shard.spans)
        spans = [span for span in self.spans.pop(shard.plan, ()) if span not in gone]
        if spans:
            self.spans[shard.plan] = spans


class _Copies:
    """The copies of one answer.

    No two of a pass have samples in common, nor with what the cache holds, but for those of earlier passes.
    """

    def __init__(self, member: _Member) -> None:
        self.chosen: dict[str, Copy] = {}
        self._coming = {plan: list(spans) for plan, spans in member.spans.items()}

    def add(self, content: str, shard: _KnownShard, *, may_overlap: bool = False) -> None:
        """Choose a shard, if there is room for another one."""
        coming = self._coming.setdefault(shard.plan, [])
        is_apart = may_overlap or not overlap(coming, shard.spans)
        if len(self.chosen) < _COPIES and content not in self.chosen and is_apart:
            holders = tuple(sorted(shard.holders.items()))
            self.chosen[content] = Copy(content, shard.nbytes, shard.plan, shard.spans, holders)
            _insert(coming, shard.spans)


class _Blocks:
    """The blocks of one pass: their makers, since when, and those that were made whole."""

    def __init__(self, length: int) -> None:
        self.size = max(1, -(-length // MOST_BLOCKS))
        self.length = length
        self.count = -(-length // self.size)
        self.makers: list[str] = [""] * self.count
        self.since_s = [0.0] * self.count
        self.is_made = [False] * self.count
        self.shards: list[set[str]] = [set() for _ in range(self.count)]
        self.times_s: list[float] = []  # of the last blocks

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
        ranges = ((span.start[0], span.stop[0] + (span.stop[1] > 0)) for span in spans)
        return {block for block in self.within(ranges) if block < self.count}

    def enter(self, content: str, spans: Iterable[Span]) -> None:
        for block in self.of_spans(spans):
            self.shards[block].add(content)

    def give(self, block: int, maker: str, now_s: float) -> None:
        self.makers[block], self.since_s[block], self.is_made[block] = maker, now_s, False

    def made(self, block: int, now_s: float) -> None:
        self.is_made[block] = True
        if self.since_s[block]:
            self.times_s = [*self.times_s[-63:], now_s - self.since_s[block]]

    def overdue(self, now_s: float) -> list[int]:
        """The blocks that take far longer than most, the oldest first."""
        usual_s = statistics.median(self.times_s) if self.times_s else 0.0
        late_s = now_s - max(_OVERDUE_S, 4 * usual_s)
        late = [
            block
            for block in range(self.count)
            if self.makers[block] and not self.is_made[block] and self.since_s[block] < late_s
        ]
        return sorted(late, key=lambda block: self.since_s[block])


class GroupDirectory:
    """The directory of one group.

    `replicas`: the number of caches that keep a shard; None for all.

    A shard of the pass is copied to a cache that holds and makes none of its samples, so no cache gets a
    sample twice, whatever was made twice: by a cache that was believed gone, say. Of a shard of an earlier
    pass, the cache stores the units that it lacks.
    """

    def __init__(self, replicas: int | None = None) -> None:
        self.replicas = replicas
        self._members: dict[str, _Member] = {}
        self._shards: dict[str, _KnownShard] = {}
        self._passes: dict[str, _Blocks] = {}
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
        if report.joins:
            self._members[name] = _Member(name, report, blocks, now_s)
        member = self._members[name]
        member.take(report, blocks, now_s)
        self._note_shards(member)
        self._note_progress(member, now_s)
        return self._decide(member, now_s)

    def _enter_pass(self, name: str, report: CacheReport) -> _Blocks:
        """The blocks of the pass of a report; passes that no cache is in any more are forgotten."""
        plan = report.plan
        current = {one.report.plan for other, one in self._members.items() if other != name} | {plan}
        self._passes = {known: blocks for known, blocks in self._passes.items() if known in current}
        if plan not in self._passes:
            self._passes[plan] = blocks = _Blocks(report.length)
            for content, shard in self._shards.items():
                if shard.plan == plan:
                    blocks.enter(content, shard.spans)
        return self._passes[plan]

    def forget_silent(self, now_s: float) -> list[str]:
        """Forget the caches that have not reported for long, and return them."""
        silent = [one for one, member in self._members.items() if now_s - member.seen_s > SILENT_S]
        for name in silent:
            self.leave(name)
        return silent

    def leave(self, name: str) -> None:
        """Forget the cache `name`: what it was making is free, and what it holds cannot be copied from it."""
        member = self._members.pop(name, None)
        if member is None:
            return
        for content in member.shards:
            self._drop(content, name)
        for blocks in self._passes.values():
            for block, maker in enumerate(blocks.makers):
                if maker == name and not blocks.is_made[block]:
                    blocks.give(block, "", 0.0)

    def _note_shards(self, member: _Member) -> None:
        report = member.report
        for content in report.removed:
            if content in member.shards:
                member.remove(content, self._shards[content])
                self._drop(content, member.name)
        for held in report.added:
            shard = self._shards.get(held.content)
            if shard is None:
                shard = self._shards[held.content] = _KnownShard(
                    held.nbytes, held.plan, held.spans, held.is_part
                )
            shard.holders[member.name] = held.shard_id
            member.add(held.content, shard)
            if (blocks := self._passes.get(held.plan)) is not None:
                blocks.enter(held.content, held.spans)
        member.refused.update(content for content in report.refused if content in self._shards)

    def _drop(self, content: str, name: str) -> None:
        shard = self._shards[content]
        shard.holders.pop(name, None)
        if not shard.holders:
            del self._shards[content]
            for member in self._members.values():
                member.refused.discard(content)
            if (blocks := self._passes.get(shard.plan)) is not None:
                for block in blocks.of_spans(shard.spans):
                    blocks.shards[block].discard(content)

    def _note_progress(self, member: _Member, now_s: float) -> None:
        """Note what the cache makes, and what it has made."""
        blocks, name = member.blocks, member.name
        for block in range(blocks.count):
            if blocks.makers[block] == name:
                if block in member.making or blocks.is_made[block]:
                    continue
                if block in member.undecided:  # the answer that gave it was lost
                    blocks.give(block, "", 0.0)
                else:
                    blocks.made(block, now_s)
            elif not blocks.makers[block] and member.report.joins:
                if block in member.making:
                    blocks.give(block, name, now_s)
                elif block not in member.undecided and covers(member.held, *blocks.range_of(block)):
                    blocks.give(block, name, 0.0)
                    blocks.made(block, now_s)

    def _decide(self, member: _Member, now_s: float) -> Answer:
        report, blocks, copies = member.report, member.blocks, _Copies(member)
        done, free, lost = self._sort_undecided(member, copies)
        # A cache that joins makes nothing before it has what the others hold.
        wants = 0 if self._add_earlier(member, copies) else report.wants
        given = self._give(member, free, lost, wants, now_s)
        if self.replicas is not None and now_s >= self._give_at_s and not report.has_evicted:
            self._restore(member, copies, self.replicas)
        self._exchange(member, copies)
        return Answer(
            _joined(map(blocks.range_of, given)),
            _joined(map(blocks.range_of, done)),
            tuple(copies.chosen.values()),
            ordinal=max(PassPlan.from_json(one.report.plan).ordinal for one in self._members.values()),
            num_members=len(self._members),
        )

    def _sort_undecided(self, member: _Member, copies: _Copies) -> tuple[list[int], list[int], list[int]]:
        """Return of the undecided blocks those that are done, free, and lost: made, but nobody has a copy.

        A block that another cache makes, or has made, stays undecided; shards of it are added to `copies`.
        """
        blocks, done, free, lost = member.blocks, list[int](), list[int](), list[int]()
        makers = {blocks.makers[block] for block in member.undecided}
        keepers = {maker: self._keepers(maker, member.report.plan) for maker in makers}
        for block in sorted(member.undecided):
            maker, is_made = blocks.makers[block], blocks.is_made[block]
            if covers(member.held, *blocks.range_of(block)):
                done.append(block)
            elif not maker:
                free.append(block)
            elif member.name not in keepers[maker]:
                others = (self._members[one] for one in keepers[maker])
                if is_made and not any(block in one.unfinished for one in others):
                    done.append(block)
            elif len(copies.chosen) < _COPIES or is_made:
                found = self._copies_of(block, member)
                for content in found:
                    copies.add(content, self._shards[content])
                if not found and is_made:
                    lost.append(block)
        return done, free, lost

    def _copies_of(self, block: int, member: _Member) -> list[str]:
        """The shards with samples of `block` that the cache could copy: it waits for all blocks of each.

        Whole shards come before parts. Where samples were made twice, the shards of one cache come first:
        those of several would leave gaps.
        """
        found = {content: self._shards[content] for content in member.blocks.shards[block] - member.refused}
        return sorted(
            (
                content
                for content, shard in found.items()
                if member.name not in shard.holders
                and member.blocks.of_spans(shard.spans) <= member.waiting
                and not overlap(member.held, shard.spans)
            ),
            key=lambda content: (found[content].is_part, min(found[content].holders), content),
        )

    def _give(self, member: _Member, free: list[int], lost: list[int], wants: int, now_s: float) -> list[int]:
        """Give the cache `wants` runs of blocks to make: free ones, those whose samples are lost, or those
        that take long.

        Runs become shorter towards the end (Polychronopoulos and Kuck, "Guided Self-Scheduling", 1987).
        """
        given: list[int] = []
        blocks, name = member.blocks, member.name
        for _ in range(wants if now_s >= self._give_at_s else 0):
            chosen = free or lost
            if not chosen:
                late = [block for block in blocks.overdue(now_s) if blocks.makers[block] != name]
                chosen = [block for block in late if block in member.undecided][:1]
            size = max(1, blocks.count // _MOST_RUNS, len(chosen) // (_RUNS * len(self._members)))
            run, chosen[:size] = chosen[:size], []
            for block in run:
                blocks.give(block, name, now_s)
            given += run
        return given

    def _keepers(self, maker: str, plan: str) -> list[str]:
        """The caches that are to have what `maker` makes: itself, and those after it in a ring.

        Few choices change with the members (Karger et al., "Consistent Hashing and Random Trees", 1997).
        """
        ring = sorted(
            (_place(one), one) for one, member in self._members.items() if member.report.plan == plan
        )
        names = [one for _, one in ring]
        if self.replicas is None:
            return names
        first = bisect_left(ring, (_place(maker), maker))
        return (names[first:] + names[:first])[: self.replicas]

    def _restore(self, member: _Member, copies: _Copies, replicas: int) -> None:
        """Add shards of which replicas were lost, as with a cache that is gone, if this one is to keep them.

        A cache that evicts is offered none: it would have to evict others for them.
        """
        blocks, keepers = member.blocks, dict[str, list[str]]()
        excluded = member.shards | member.refused
        for content, shard in self._shards.items():
            block = shard.spans[0].start[0] // blocks.size
            if (
                len(shard.holders) < replicas
                and shard.plan == member.report.plan
                and block not in member.unfinished
                and content not in excluded
            ):
                maker = blocks.makers[block]
                if maker not in keepers:
                    keepers[maker] = self._keepers(maker, shard.plan)
                if member.name in keepers[maker] and not blocks.of_spans(shard.spans) & member.unfinished:
                    copies.add(content, shard)

    def _add_earlier(self, member: _Member, copies: _Copies) -> bool:
        """Add shards of earlier passes, the latest first, if the cache has room; False if it lacks none.

        The cache takes of each the units that it does not hold.
        """
        if not member.report.has_room:
            return False
        now = PassPlan.from_json(member.report.plan)
        plans = {text: PassPlan.from_json(text) for text in {shard.plan for shard in self._shards.values()}}
        ordinals = {text: plan.ordinal for text, plan in plans.items() if plan.precedes(now)}
        found = (
            (-ordinals[shard.plan], shard.is_part, content)
            for content, shard in self._shards.items()
            if shard.plan in ordinals and member.name not in shard.holders and content not in member.refused
            if self.replicas is None or len(shard.holders) < self.replicas
            if not _cover_all(member.spans.get(shard.plan, []), shard.spans)
        )
        lacking = [content for *_, content in sorted(found)]
        for content in lacking:
            copies.add(content, self._shards[content], may_overlap=True)
        return bool(lacking)

    def _exchange(self, member: _Member, copies: _Copies) -> None:
        """Add shards of other partitions, a choice of its own for each cache.

        Of one partition only those of one pass: two passes have the same samples in different shards.
        """
        if not member.report.exchange:
            return
        ours = PassPlan.from_json(member.report.plan).partition
        allowed: dict[str, str] = {}
        for plan in [*member.spans, *self._passes]:
            if partition := PassPlan.from_json(plan).partition:
                allowed.setdefault(str(partition), plan)
        allowed.pop(str(ours), None)
        plans = set(allowed.values())
        found = sorted(
            (xxhash.xxh3_64_intdigest(f"{content} {member.name}".encode()), content)
            for content, shard in self._shards.items()
            if shard.plan in plans and member.name not in shard.holders and content not in member.refused
        )
        wanted = min(_COPIES, len(copies.chosen) + member.report.exchange)
        for _, content in found:
            if len(copies.chosen) >= wanted:
                break
            copies.add(content, self._shards[content])


def _place(name: str) -> int:
    """The place of a cache in the ring."""
    return xxhash.xxh3_64_intdigest(name.encode())


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
