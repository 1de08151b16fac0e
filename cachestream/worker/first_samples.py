"""The first samples of an empty cache: held back until most of them agree, as they decide the fields of all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cachestream.errors import SchemaMismatchError
from cachestream.schema import Schema
from cachestream.worker.encode import Table
from cachestream.worker.packer import Part

Votes = list[tuple[Schema, int]]  # how many samples have which schema

ALIKE: Final = 8  # of one process: so many, and none that differs anywhere, decide
ALIKE_S: Final = 0.5  # or all that have come by then
MIXED: Final = 32  # of all processes, where some differ
MIXED_S: Final = 3.0


@dataclass(slots=True)
class FirstSamples:
    """The samples that one process holds back since `since_s`, in their order, and their `votes`.

    `others` are the votes of the other processes, None while these were not asked for.
    """

    parts: list[Part] = field(default_factory=list)
    votes: Votes = field(default_factory=list)
    others: Votes | None = None
    nbytes: int = 0
    since_s: float = 0.0

    def add(self, part: Part, now_s: float) -> None:
        """Hold `part` back too."""
        shown, count = (part, len(part)) if isinstance(part, Table) else (part[1], 1)
        self.since_s = self.since_s if self.parts else now_s
        self.parts.append(part)
        self.nbytes += shown.nbytes
        self.votes = counted(self.votes, [(shown.schema, count)])

    @property
    def all_votes(self) -> Votes:
        """The votes that are known of all processes."""
        return counted(self.votes, self.others or [])

    def due_in_s(self, now_s: float, most_bytes: int) -> float:
        """The time left until the next step, to ask for the other votes or then to decide; 0 where that is due: there
        are enough votes, or more than `most_bytes` are held.
        """
        if not self.parts or self.nbytes >= most_bytes:
            return 0.0
        enough, longest_s = (ALIKE, ALIKE_S) if self.others is None else (MIXED, MIXED_S)
        votes = self.all_votes
        if sum(count for _, count in votes) >= enough or (self.others is not None and len(votes) == 1):
            return 0.0
        return max(0.0, self.since_s + longest_s - now_s)


def majority(votes: Votes) -> Schema | None:
    """The schema of most; of as many, the one that came first. None where there are none."""
    return max(votes, key=lambda vote: vote[1])[0] if votes else None


def counted(votes: Votes, more: Votes) -> Votes:
    """`votes` and `more`, those together that can be merged."""
    found = list(votes)
    for schema, count in more:
        for i, (known, before) in enumerate(found):
            try:
                found[i] = known.merge(schema, widen=True), before + count
            except SchemaMismatchError:
                continue
            break
        else:
            found.append((schema, count))
    return found
