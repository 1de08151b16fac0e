"""Claims on units: runs of positions, handed to processes and taken over from those that died."""

from __future__ import annotations

from functools import partial

from cachestream.listing.names import StoredNames
from cachestream.storage.filling import Assignment, Filling, PlannedPass
from cachestream.storage.tables import PassRow
from cachestream.worker.order import PassPlan

MOST_POSITIONS = 1024
SHARES = 16


class NotYetError(Exception):
    """All listed units are claimed, and the listing continues."""


def block_size(length: int | None, num_workers: int) -> int:
    """The number of positions in a claim: all processes are busy until the end, and claims are rare."""
    if length is None:
        return 256
    return max(1, min(MOST_POSITIONS, length // (num_workers * SHARES)))


def next_claim(
    filling: Filling, owner: str, num_workers: int, listing: StoredNames | None = None
) -> Assignment | None:
    """The next run of positions for `owner`: what a dead process left first, then new ones; None at the end.

    A pass that grows takes up what `listing` holds by now when all that it knew is claimed; raises
    NotYetError where that is nothing.
    """
    seen = filling.open_pass()
    if seen is None:
        return None
    growth = None if listing is None else _growth(seen.row, listing)
    found = filling.claim(owner, seen, growth, partial(block_size, num_workers=num_workers))
    if isinstance(found, PassRow):
        if PassPlan.from_json(found.plan).growing:
            raise NotYetError
        return None
    return found


def _growth(row: PassRow, listing: StoredNames) -> PlannedPass | None:
    """The pass with what was listed since, if all of it is claimed and that is enough to go on with."""
    if row.next_position != row.length:
        return None
    plan = PassPlan.from_json(row.plan)
    mark = listing.look() if plan.growing else None
    if mark is None or not plan.takes_up(mark.count, is_complete=mark.is_complete):
        return None
    plan = plan.grown(mark.count, listing.digest, is_complete=mark.is_complete)
    return PlannedPass(plan.to_json(), plan.length, plan.growing)
