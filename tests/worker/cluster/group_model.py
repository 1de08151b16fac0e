"""A model of a group of caches around a real `GroupDirectory`: claims, shards and copies as sets of samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from cachestream.schema import Span
from cachestream.worker.cluster.directory import Answer, CacheReport, Copy, GroupDirectory, HeldShard
from cachestream.worker.order import Partition, PassPlan

Sample = tuple[int, int]  # position, offset; a unit of n samples has n + 1 of them: the last one is its end

MOST_COPIES = 16


def plan_of(length: int, ordinal: int = 0, partition: Partition | None = None) -> str:
    """The plan of a pass of `length` positions."""
    units = length if partition is None else length * partition.count
    return PassPlan("shuffle", 0, ordinal, units, "", length, partition).to_json()


def ranges_of(positions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of `positions`."""
    found: list[list[int]] = []
    for position in sorted(positions):
        if found and found[-1][1] == position:
            found[-1][1] = position + 1
        else:
            found.append([position, position + 1])
    return tuple((start, stop) for start, stop in found)


@dataclass(frozen=True)
class Units:
    """The units of a pass by their numbers of samples; those in `failing` cannot be read."""

    sizes: tuple[int, ...]
    failing: frozenset[int] = frozenset()

    def samples(self, spans: Iterable[Span]) -> set[Sample]:
        """The samples in `spans`."""
        found: set[Sample] = set()
        for span in spans:
            for position in range(span.start[0], min(span.stop[0] + 1, len(self.sizes))):
                first = span.start[1] if position == span.start[0] else 0
                last = span.stop[1] if position == span.stop[0] else self.sizes[position] + 1
                found.update((position, offset) for offset in range(first, last))
        return found

    def spans(self, samples: Iterable[Sample]) -> tuple[Span, ...]:
        """The spans of `samples`, each as long as can be."""
        found: list[list[Sample]] = []
        for position, offset in sorted(samples):
            stop = (position + 1, 0) if offset == self.sizes[position] else (position, offset + 1)
            if found and found[-1][1] == (position, offset):
                found[-1][1] = stop
            else:
                found.append([(position, offset), stop])
        return tuple(Span(start, stop) for start, stop in found)

    def of(self, positions: Iterable[int]) -> list[Sample]:
        """The samples at `positions`, without those of failing units."""
        return [
            (position, offset)
            for position in positions
            if position not in self.failing
            for offset in range(self.sizes[position] + 1)
        ]

    def real(self, samples: Iterable[Sample]) -> set[Sample]:
        """`samples` without the ends of units."""
        return {(position, offset) for position, offset in samples if offset < self.sizes[position]}


@dataclass
class MemberModel:
    """A cache: the state of its catalogue, and the process that shares its filling."""

    name: str
    units: Units
    plan: str
    undecided: set[int]
    making: set[int] = field(default_factory=set)
    half_made: set[Sample] = field(default_factory=set)  # done, of the units in `making`
    shards: dict[str, HeldShard] = field(default_factory=dict)
    held: set[Sample] = field(default_factory=set)
    evicted: set[Sample] = field(default_factory=set)
    made: list[int] = field(default_factory=list)  # positions
    known: dict[str, HeldShard] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    arriving: list[HeldShard] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    joins: bool = True
    has_room: bool = False

    @property
    def is_done(self) -> bool:
        return not self.undecided and not self.making

    def report(self) -> CacheReport:
        if self.joins:
            self.known = {}
        added = tuple(shard for content, shard in self.shards.items() if content not in self.known)
        removed = tuple(content for content in self.known if content not in self.shards)
        self.known = dict(self.shards)
        return CacheReport(
            self.plan,
            len(self.units.sizes),
            ranges_of(self.undecided),
            ranges_of(self.making),
            added,
            removed,
            tuple(self.refused),
            2 if len(self.making) < 4 else 0,
            self.has_room and not self.evicted,
            self.joins,
        )

    def follow(self, answer: Answer) -> None:
        """Carry out `answer`, as the catalogue does: only undecided positions are touched."""
        if not answer.is_known:
            self.rejoin()
            return
        self.joins = False
        for start, stop in answer.make:
            self.making |= self.undecided & set(range(start, stop))
            self.undecided -= set(range(start, stop))
        for start, stop in answer.done:
            self.undecided -= set(range(start, stop))
        self.copies = list(answer.copies)

    def rejoin(self) -> None:
        self.joins, self.copies = True, []

    def make(self, most: int) -> None:
        """Make up to `most` samples, and publish them as one shard: it may end in the middle of a unit."""
        new: list[Sample] = []
        for position in sorted(self.making):
            rest = [one for one in self.units.of([position]) if one not in self.held | self.half_made]
            took = rest[: max(0, most - len(new))]
            if took == rest[:-1]:  # the end of a unit lies in the shard of its last sample
                took = rest
            new += took
            self.made += [position] if took else []
            if len(took) < len(rest):
                self.half_made |= set(took)
                break
            self.making.discard(position)
            self.half_made = {one for one in self.half_made if one[0] != position}
        if self.units.real(new):
            self.publish(self.units.spans(new), self.name)

    def publish(self, spans: tuple[Span, ...], maker: str, plan: str = "", *, is_part: bool = False) -> None:
        plan = plan or self.plan
        content = f"{plan} {maker} {spans}"
        assert content not in self.shards
        self._enter(HeldShard(content, len(self.shards) + 1, 100, plan, spans, is_part))

    def make_earlier(self, number: int) -> None:
        """Hold a shard of the pass before, of some units that it neither holds nor has made."""
        held = {position for position, _ in self.held}
        chosen = sorted(self.undecided - held)[number % 3 :: 2][:3]
        if samples := self.units.of(chosen):
            earlier = replace(PassPlan.from_json(self.plan), ordinal=-1).to_json()
            self.publish(self.units.spans(samples), self.name, earlier)

    def _enter(self, shard: HeldShard) -> None:
        samples = self.samples(shard)
        assert not samples & self.held, "a sample is held twice"
        self.held |= samples
        self.shards[shard.content] = shard

    def samples(self, shard: HeldShard) -> set[Sample]:
        """The samples of a shard of this pass, or of an earlier one: each unit has one position in all passes."""
        is_ours = shard.plan == self.plan or self.is_earlier(shard)
        return self.units.samples(shard.spans) if is_ours else set()

    def is_earlier(self, shard: HeldShard) -> bool:
        return PassPlan.from_json(shard.plan).precedes(PassPlan.from_json(self.plan))

    def held_in(self, plan: str) -> set[Sample]:
        """The samples that it holds in shards of one pass."""
        shards = (shard for shard in self.shards.values() if shard.plan == plan)
        return set().union(*(self.units.samples(shard.spans) for shard in shards))

    def ask(self, others: dict[str, MemberModel], number: int) -> None:
        """Ask the holders of one of the copies for it."""
        if not self.copies:
            return
        copy = self.copies.pop(number % len(self.copies))
        for holder, _ in copy.holders:
            if holder in others and copy.content in others[holder].shards:
                self.arriving.append(others[holder].shards[copy.content])
                return

    def arrive(self, number: int) -> None:
        """Publish what a shard that was asked for has of units that it neither holds nor makes meanwhile."""
        if not self.arriving:
            return
        shard = self.arriving.pop(number % len(self.arriving))
        samples = self.samples(shard)
        elsewhere = {position for position, _ in self.held - self.held_in(shard.plan)}
        unwanted = elsewhere | {position for position, _ in samples & self.held}
        if self.is_earlier(shard):
            unwanted |= self.making
        kept = {one for one in samples if one[0] not in unwanted}
        if kept == samples:
            if shard.content not in self.shards and not {position for position, _ in kept} & self.making:
                self._enter(shard)
        elif not self.units.real(kept):
            self.refused.add(shard.content)
        elif not {position for position, _ in kept} & self.making:
            self.publish(self.units.spans(kept), f"{self.name} of {shard.content}", shard.plan, is_part=True)

    def evict(self, number: int) -> None:
        if self.shards:
            shard = self.shards.pop(sorted(self.shards)[number % len(self.shards)])
            gone = self.samples(shard)
            self.evicted |= gone
            self.held -= gone


class GroupModel:
    """Caches around a directory; each exchange with it is checked."""

    def __init__(self, units: Units, names: Sequence[str]) -> None:
        self.units, self.directory = units, GroupDirectory()
        self.now_s = 100.0
        self.members: dict[str, MemberModel] = {}
        self.plan = plan_of(len(units.sizes))
        for name in names:
            self.enter(name)

    def enter(self, name: str, plan: str | None = None) -> MemberModel:
        positions = set(range(len(self.units.sizes)))
        self.members[name] = MemberModel(name, self.units, plan or self.plan, positions)
        return self.members[name]

    def sync(self, name: str, *, is_lost: bool = False) -> None:
        """Let the cache report; with `is_lost`, the answer does not come, and the cache joins again."""
        member = self.members[name]
        undecided, making, held = set(member.undecided), set(member.making), member.held_in(member.plan)
        report = member.report()
        answer = self.directory.sync(name, report, self.now_s)
        if answer.is_known:
            self.check(member, report, answer, undecided, making, held)
        if is_lost:
            member.rejoin()
        else:
            member.follow(answer)

    def check(
        self,
        member: MemberModel,
        report: CacheReport,
        answer: Answer,
        undecided: set[int],
        making: set[int],
        held: set[Sample],
    ) -> None:
        """Check the invariants of an answer."""
        make, done = (
            {position for start, stop in ranges for position in range(start, stop)}
            for ranges in (answer.make, answer.done)
        )
        assert not make & done
        assert set(self.units.of(done & undecided)) <= held
        coming: set[tuple[str, Sample]] = set()
        assert len(answer.copies) <= MOST_COPIES
        for copy in answer.copies:
            shard = next(
                one.shards.get(copy.content) or one.known[copy.content]
                for one in self.members.values()
                if copy.content in one.known
            )
            samples = {(shard.plan, one) for one in self.units.samples(shard.spans)}
            assert copy.content not in member.known
            assert not samples & coming or member.is_earlier(shard), "two copies have a sample in common"
            coming |= samples
            if shard.plan == member.plan:
                positions = {position for _, (position, _) in samples}
                assert not {one for _, one in samples} & held
                assert not positions & making
                assert positions <= undecided
            else:
                assert member.is_earlier(shard)
                assert report.has_room
                assert not answer.make

    def step(self, name: str, action: str, number: int = 0) -> None:
        member = self.members[name]
        if action == "sync":
            self.sync(name)
        elif action == "lose":
            self.sync(name, is_lost=True)
        elif action == "make":
            member.make(1 + number)
        elif action == "ask":
            member.ask(self.members, number)
        elif action == "arrive":
            member.arrive(number)
        elif action == "earlier":
            member.make_earlier(number)
        elif action == "evict":
            member.evict(number)
        elif action == "alone":  # the group did not answer: some positions are made without it
            chosen = set(sorted(member.undecided)[: 1 + number])
            member.undecided -= chosen
            member.making |= chosen
            member.rejoin()
        else:
            raise AssertionError(action)

    def finish(self, rng: Random, most_rounds: int, pause_s: float = 0.2) -> int:
        """Run until all caches are done; returns the number of rounds."""
        for number in range(most_rounds):
            if all(member.is_done for member in self.members.values()):
                return number
            self.round(rng, pause_s)
        raise AssertionError(f"not done after {most_rounds} rounds: {self.members}")

    def round(self, rng: Random, pause_s: float) -> None:
        """Let each cache report, make samples and copy shards once."""
        for name in rng.sample(sorted(self.members), len(self.members)):
            member = self.members[name]
            self.sync(name)
            member.make(rng.randint(1, 12))
            for _ in range(4):
                member.ask(self.members, rng.randrange(8))
            while member.arriving:
                member.arrive(0)
        self.now_s += pause_s

    def check_ended(self) -> None:
        """Check that each cache has all samples, except for what it has evicted."""
        all_samples = self.units.real(self.units.of(range(len(self.units.sizes))))
        for member in self.members.values():
            assert all_samples <= member.held | member.evicted, f"{member.name} lacks samples"
