"""Claims on units: runs of positions, handed to processes and taken over from those that died."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cachestream.listing.names import StoredNames
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.layout import Directory
from cachestream.storage.reservations import owner_is_alive
from cachestream.storage.tables import Claim, PassRow, Suspect, Tables
from cachestream.worker.order import PassPlan

MOST_POSITIONS = 1024
SHARES = 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """A claim, the pass it belongs to, and the positions in it that killed a process before."""

    claim: Claim
    row: PassRow
    suspects: tuple[Suspect, ...]


class NotYetError(Exception):
    """All listed units are claimed, and the listing continues."""


def block_size(length: int | None, num_workers: int) -> int:
    """The number of positions in a claim: all processes are busy until the end, and claims are rare."""
    if length is None:
        return 256
    return max(1, min(MOST_POSITIONS, length // (num_workers * SHARES)))


def next_claim(
    catalogue: Catalogue,
    directory: Directory,
    owner: str,
    num_workers: int,
    listing: StoredNames | None = None,
) -> Assignment | None:
    """The next run of positions for `owner`: what a dead process left first, then new ones; None at the end.

    A pass that grows takes up what `listing` holds by now when all that it knew is claimed; raises NotYetError
    where that is nothing.
    """
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
            if row.next_position == row.length and listing is not None:
                row = _grow(tables, row, listing)
            claim = _new_claim(tables, row, owner, num_workers)
        if claim is not None:
            suspects = [s for s in tables.suspects(row.id) if claim.position <= s.position < claim.stop]
            return Assignment(claim, row, tuple(suspects))
    if PassPlan.from_json(row.plan).growing:
        raise NotYetError
    return None


def _new_claim(tables: Tables, row: PassRow, owner: str, num_workers: int) -> Claim | None:
    stop = row.next_position + block_size(row.length, num_workers)
    stop = stop if row.length is None else min(stop, row.length)
    if stop <= row.next_position:
        return None
    tables.advance_pass(row.id, stop)
    return tables.insert_claim(row.id, row.next_position, stop, owner)


def _grow(tables: Tables, row: PassRow, listing: StoredNames) -> PassRow:
    """The pass with what was listed since, if that is enough."""
    plan = PassPlan.from_json(row.plan)
    mark = listing.look() if plan.growing else None
    if mark is None or not plan.takes_up(mark.count, is_complete=mark.is_complete):
        return row
    plan = plan.grown(mark.count, listing.digest, is_complete=mark.is_complete)
    tables.set_meta("listing", int(plan.growing))
    tables.extend_pass(row.id, plan.to_json(), plan.length)
    return replace(row, plan=plan.to_json(), length=plan.length)
