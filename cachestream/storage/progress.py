"""SQL statements on the progress of the filling: passes over the remote, claims and suspects."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass


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
    """One pass over the remote.

    `plan` (JSON) gives the order of units; positions below `next_position` are claimed. `evicted_before` is
    the number of shards that were ever evicted when the pass began; -1 for a pass that was restored from its
    shards, of which that is unknown.
    """

    id: int
    plan: str
    length: int | None
    next_position: int
    evicted_before: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A position that was being read when processes died; `deaths` is the sum of these deaths' weights
    (`worker/health.py`).
    """

    position: int
    deaths: int
    reason: str


class Statements:
    """Statements of one transaction. Valid only inside the `with` block that yielded it.

    A statement with unfetched rows keeps its lock past the end of the transaction, so all rows are fetched
    at once; those of `scans` are not, and are closed with the transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        self.scans: list[sqlite3.Cursor] = []

    def close(self) -> None:
        """Finish the statements that were left."""
        for cursor in self.scans:
            cursor.close()


class ProgressTables(Statements):
    """The passes, claims and suspects, within one transaction."""

    def passes(self) -> list[PassRow]:
        rows = self.execute("SELECT id, plan, length, next_position, evicted_before FROM passes ORDER BY id")
        return [PassRow(*row) for row in rows.fetchall()]

    def last_pass(self) -> PassRow | None:
        """The current pass; None before the first."""
        return next(reversed(self.passes()), None)

    def insert_pass(self, plan: str, length: int | None, evicted_before: int) -> int:
        # The id is above 0 even if all known passes are earlier ones, with ids below 0.
        cursor = self.execute(
            "INSERT INTO passes SELECT max(0, coalesce(max(id), 0)) + 1, ?, ?, 0, ? FROM passes",
            (plan, length, evicted_before),
        )
        return int(cursor.lastrowid or 0)

    def earlier_pass(self, plan: str, length: int | None) -> int:
        """Return the id of the pass with this plan. An unknown one is inserted before all others."""
        known = self.pass_id(plan)
        if known is not None:
            return known
        # Below 0, because 0 means no pass. The pass with the highest id stays the current one.
        cursor = self.execute(
            "INSERT INTO passes SELECT min(0, coalesce(min(id), 0)) - 1, ?, ?, 0, -1 FROM passes",
            (plan, length),
        )
        return int(cursor.lastrowid or 0)

    def pass_id(self, plan: str) -> int | None:
        row = self.execute("SELECT id FROM passes WHERE plan = ?", (plan,)).fetchone()
        return None if row is None else int(row[0])

    def extend_pass(self, pass_id: int, plan: str, length: int | None) -> None:
        """Replace the plan of a pass that has grown.

        A pass with the same plan that was rebuilt from shards is the same pass: the two are merged.
        """
        same = self.pass_id(plan)
        if same not in (None, pass_id):
            self.execute("UPDATE shards SET pass_id = ? WHERE pass_id = ?", (pass_id, same))
            self.execute("DELETE FROM passes WHERE id = ?", (same,))
        self.execute("UPDATE passes SET plan = ?, length = ? WHERE id = ?", (plan, length, pass_id))

    def claims(self, pass_id: int) -> list[tuple[Claim, str]]:
        rows = self.execute(
            "SELECT id, pass_id, position, offset, stop, owner FROM claims WHERE pass_id = ? "
            "ORDER BY position",
            (pass_id,),
        ).fetchall()
        return [(Claim(*row[:5]), row[5]) for row in rows]

    def positions_done(self, row: PassRow) -> int:
        """The number of positions of a pass that are claimed and no longer part of a claim."""
        return row.next_position - sum(claim.stop - claim.position for claim, _ in self.claims(row.id))

    def insert_claim(self, pass_id: int, position: int, stop: int, owner: str) -> Claim:
        cursor = self.execute(
            "INSERT INTO claims (pass_id, position, offset, stop, owner) VALUES (?, ?, 0, ?, ?)",
            (pass_id, position, stop, owner),
        )
        return Claim(int(cursor.lastrowid or 0), pass_id, position, 0, stop)

    def move_claim(self, claim_id: int, position: int, offset: int) -> None:
        """Record that the work up to (`position`, `offset`) is done. A finished claim is deleted."""
        self.execute("UPDATE claims SET position = ?, offset = ? WHERE id = ?", (position, offset, claim_id))
        self.execute("DELETE FROM claims WHERE id = ? AND position >= stop", (claim_id,))

    def split_claim(self, claim_id: int, position: int, offset: int, owner: str) -> int:
        """Give the current `position` of a claim, done up to `offset`, a claim of its own; return its id."""
        ((pass_id,),) = self.execute("SELECT pass_id FROM claims WHERE id = ?", (claim_id,)).fetchall()
        own = self.insert_claim(pass_id, position, position + 1, owner)
        self.move_claim(own.id, position, offset)
        self.move_claim(claim_id, position + 1, 0)
        return own.id

    def suspects(self, pass_id: int) -> list[Suspect]:
        rows = self.execute("SELECT position, deaths, reason FROM suspects WHERE pass_id = ?", (pass_id,))
        return [Suspect(*row) for row in rows.fetchall()]

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
