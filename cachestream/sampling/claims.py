"""Who reads what: runs of positions handed to processes, and taken over from those that died."""

from __future__ import annotations

from dataclasses import dataclass

from cachestream.storage.admission import owner_is_alive
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.directory import Directory
from cachestream.storage.tables import Claim, PassRow, Suspect

__all__ = ["Assignment", "block_size", "next_claim"]

MOST_POSITIONS = 1024
SHARES = 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """A claim, the pass it belongs to, and the positions in it that killed a process before."""

    claim: Claim
    row: PassRow
    suspects: tuple[Suspect, ...]


def block_size(length: int | None, num_workers: int) -> int:
    """Positions in a claim: few enough that all processes have work until the end, many enough to be rare."""
    if length is None:
        return 256
    return max(1, min(MOST_POSITIONS, length // (num_workers * SHARES)))


def next_claim(catalogue: Catalogue, directory: Directory, owner: str, num_workers: int) -> Assignment | None:
    """The next run of positions for `owner`: what a dead process left first, then new ones; None at the end."""
    with catalogue.transaction() as tables:
        passes = tables.passes()
        if not passes:
            return None
        row = passes[-1]
        claim: Claim | None = None
        for candidate, holder in tables.claims(row.id):
            if holder != owner and not owner_is_alive(directory, holder):
                tables.take_claim(candidate.id, owner)
                claim = candidate
                break
        if claim is None:
            stop = row.next_position + block_size(row.length, num_workers)
            stop = stop if row.length is None else min(stop, row.length)
            if stop <= row.next_position:
                return None
            claim = tables.insert_claim(row.id, row.next_position, stop, owner)
            tables.advance_pass(row.id, stop)
        suspects = [s for s in tables.suspects(row.id) if claim.position <= s.position < claim.stop]
        return Assignment(claim, row, tuple(suspects))
