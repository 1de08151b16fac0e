"""How far the filling is, as the catalogue keeps it: passes, the claims on their positions, and suspects."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Claim", "PassRow", "ProgressTables", "Suspect"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A run of positions of a pass that one sampling process works on; progress moves its start."""

    id: int
    pass_id: int
    position: int
    offset: int
    stop: int


@dataclass(frozen=True, slots=True)
class PassRow:
    """One pass over the remote: `plan` (JSON) says the order, `next_position` what is claimed."""

    id: int
    plan: str
    length: int | None
    next_position: int
    evicted_before: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A position that was being read when its process died, and how often."""

    position: int
    deaths: int
    reason: str


class ProgressTables:
    """The statements on the progress of the filling, within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany

    # --- progress

    def passes(self) -> list[PassRow]:
        rows = self.execute("SELECT id, plan, length, next_position, evicted_before FROM passes ORDER BY id")
        return [PassRow(*row) for row in rows]

    def insert_pass(self, plan: str, length: int | None, evicted_before: int) -> int:
        cursor = self.execute(
            "INSERT INTO passes (plan, length, next_position, evicted_before) VALUES (?, ?, 0, ?)",
            (plan, length, evicted_before),
        )
        return int(cursor.lastrowid or 0)

    def earlier_pass(self, plan: str, length: int | None) -> int:
        """The id of the pass of this plan, entered before all others if it is not known (any more)."""
        ids = {row.plan: row.id for row in self.passes()}
        if plan not in ids:
            # Below 0, because 0 is no pass: the last one stays the one that is worked on.
            ids[plan] = min([0, *ids.values()]) - 1
            self.execute("INSERT INTO passes VALUES (?, ?, ?, 0, -1)", (ids[plan], plan, length))
        return ids[plan]

    def forget_old_passes(self) -> None:
        """Drop the passes of which no shard is cached, but for the last."""
        self.execute(
            "DELETE FROM passes WHERE id NOT IN (SELECT DISTINCT pass_id FROM shards) "
            "AND id < (SELECT max(id) FROM passes)"
        )

    def advance_pass(self, pass_id: int, next_position: int) -> None:
        self.execute("UPDATE passes SET next_position = ? WHERE id = ?", (next_position, pass_id))

    def extend_pass(self, pass_id: int, plan: str, length: int | None) -> None:
        """The pass has grown. One of the same plan that was rebuilt from shards is the same pass."""
        same = self.execute("SELECT id FROM passes WHERE plan = ? AND id != ?", (plan, pass_id)).fetchone()
        if same is not None:
            self.execute("UPDATE shards SET pass_id = ? WHERE pass_id = ?", (pass_id, same[0]))
            self.execute("DELETE FROM passes WHERE id = ?", same)
        self.execute("UPDATE passes SET plan = ?, length = ? WHERE id = ?", (plan, length, pass_id))

    def claims(self, pass_id: int) -> list[tuple[Claim, str]]:
        rows = self.execute(
            "SELECT id, pass_id, position, offset, stop, owner FROM claims WHERE pass_id = ? ORDER BY position",
            (pass_id,),
        ).fetchall()
        return [(Claim(*row[:5]), row[5]) for row in rows]

    def positions_done(self, row: PassRow) -> int:
        """How many positions of a pass are done: claimed, and not in a claim any more."""
        return row.next_position - sum(claim.stop - claim.position for claim, _ in self.claims(row.id))

    def insert_claim(self, pass_id: int, position: int, stop: int, owner: str) -> Claim:
        cursor = self.execute(
            "INSERT INTO claims (pass_id, position, offset, stop, owner) VALUES (?, ?, 0, ?, ?)",
            (pass_id, position, stop, owner),
        )
        return Claim(int(cursor.lastrowid or 0), pass_id, position, 0, stop)

    def take_claim(self, claim_id: int, owner: str) -> None:
        self.execute("UPDATE claims SET owner = ? WHERE id = ?", (owner, claim_id))

    def move_claim(self, claim_id: int, position: int, offset: int) -> None:
        """The work up to (`position`, `offset`) is done; a finished claim goes."""
        self.execute("UPDATE claims SET position = ?, offset = ? WHERE id = ?", (position, offset, claim_id))
        self.execute("DELETE FROM claims WHERE id = ? AND position >= stop", (claim_id,))

    def split_claim(self, claim_id: int, position: int, offset: int, owner: str) -> int:
        """Give `position`, at which the work on a claim is and which is done up to `offset`, a claim of its own; its id."""
        ((pass_id,),) = self.execute("SELECT pass_id FROM claims WHERE id = ?", (claim_id,)).fetchall()
        own = self.insert_claim(pass_id, position, position + 1, owner)
        self.move_claim(own.id, position, offset)
        self.move_claim(claim_id, position + 1, 0)
        return own.id

    def suspects(self, pass_id: int) -> list[Suspect]:
        rows = self.execute("SELECT position, deaths, reason FROM suspects WHERE pass_id = ?", (pass_id,))
        return [Suspect(*row) for row in rows]

    def add_suspect(self, pass_id: int, position: int, deaths: int, reason: str) -> None:
        self.execute(
            "INSERT INTO suspects VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET deaths = deaths + excluded.deaths, reason = excluded.reason",
            (pass_id, position, deaths, reason),
        )

    def clear_suspects(self, pass_id: int, positions: Iterable[int]) -> None:
        self.executemany(
            "DELETE FROM suspects WHERE pass_id = ? AND position = ?", [(pass_id, p) for p in positions]
        )
