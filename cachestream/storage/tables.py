"""What can be said to the catalogue within one transaction: typed statements, no decisions."""

# ruff: noqa: S608  the names put into statements are constants of this package, never input

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cachestream.model import IntArray, Schema, ShardRow, Span
from cachestream.storage.eviction import ORDERS

__all__ = ["Claim", "FailureRow", "PassRow", "Reservation", "Suspect", "Tables"]

_ROW: Final = "id, size_bytes, num_samples, uses, last_used"
_MAX_REASONS: Final = 200


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
class Reservation:
    """Bytes promised to a shard being written, or still held by a victim not yet unlinked."""

    id: int
    size_bytes: int
    owner: str
    doomed: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A position that was being read when its process died, and how often."""

    position: int
    deaths: int
    reason: str


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Samples that were skipped for one reason; `example` is the first of them."""

    kind: str
    reason: str
    count: int
    example: str


class Tables:
    """The statements of one transaction. Valid only inside the `with` that gave it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self._executemany = connection.executemany

    # --- settings and counters

    def meta(self, key: str, default: Any = None) -> Any:
        row = self.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else row[0]

    def set_meta(self, key: str, value: Any) -> None:
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def all_meta(self) -> dict[str, Any]:
        return dict(self.execute("SELECT key, value FROM meta").fetchall())

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key`; returns its new value."""
        value = int(self.meta(key, 0)) + amount
        self.set_meta(key, value)
        return value

    # --- shards

    def totals(self) -> tuple[int, int, int]:
        """Shards, samples, bytes."""
        row = self.execute(
            "SELECT count(*), coalesce(sum(num_samples), 0), coalesce(sum(size_bytes), 0) FROM shards"
        ).fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def shards(self, policy: str = "fifo") -> Iterator[ShardRow]:
        """All shards in the order of a named eviction policy, first to go first."""
        order = ", ".join(f"{key[1:]} DESC" if key.startswith("-") else key for key in ORDERS[policy])
        for row in self.execute(f"SELECT {_ROW} FROM shards ORDER BY {order or 'id'}"):
            yield ShardRow(*row)

    def shard_counts(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ids, samples and schema ids of all shards, in order of arrival."""
        rows = self.execute("SELECT id, num_samples, schema_id FROM shards ORDER BY id").fetchall()
        table = np.array(rows, np.int64).reshape(-1, 3)
        return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()

    def shard_ids(self) -> set[int]:
        return {row[0] for row in self.execute("SELECT id FROM shards")}

    def shard(self, shard_id: int) -> ShardRow | None:
        row = self.execute(f"SELECT {_ROW} FROM shards WHERE id = ?", (shard_id,)).fetchone()
        return None if row is None else ShardRow(*row)

    def insert_shard(self, row: ShardRow, schema_id: int, pass_id: int, spans: Sequence[Span]) -> None:
        self.execute(
            "INSERT INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.id,
                row.size_bytes,
                row.num_samples,
                row.uses,
                row.last_used,
                schema_id,
                pass_id,
                pack_spans(spans),
            ),
        )

    def delete_shards(self, ids: Iterable[int]) -> None:
        self._executemany("DELETE FROM shards WHERE id = ?", [(shard_id,) for shard_id in ids])

    def mark_used(self, ids: IntArray, clock: int) -> None:
        """Count one more use of every shard of `ids`, at logical time `clock`."""
        self._executemany(
            "UPDATE shards SET uses = uses + 1, last_used = ? WHERE id = ?",
            [(clock, shard_id) for shard_id in ids.tolist()],
        )

    def spans(self) -> dict[int, list[Span]]:
        """What the shards hold of each pass: pass id → spans."""
        found: dict[int, list[Span]] = {}
        for pass_id, blob in self.execute("SELECT pass_id, spans FROM shards"):
            found.setdefault(pass_id, []).extend(unpack_spans(blob))
        return found

    def forget_filling(self) -> None:
        """Drop the progress of the filling, its failures and the schema; counters and settings stay."""
        for table in ("passes", "claims", "suspects", "failures", "schemas"):
            self.execute(f"DELETE FROM {table}")
        self.execute("DELETE FROM meta WHERE key IN ('schema', 'source', 'fill_state', 'fill_message')")

    # --- schemas

    def schema_id(self, schema: Schema) -> int:
        text = schema.to_json()
        self.execute("INSERT OR IGNORE INTO schemas (json) VALUES (?)", (text,))
        return int(self.execute("SELECT id FROM schemas WHERE json = ?", (text,)).fetchone()[0])

    def schemas(self, ids: Iterable[int] | None = None) -> list[Schema]:
        wanted = None if ids is None else set(ids)
        rows = self.execute("SELECT id, json FROM schemas").fetchall()
        return [Schema.from_json(text) for key, text in rows if wanted is None or key in wanted]

    # --- reservations

    def reserved_bytes(self) -> int:
        return int(self.execute("SELECT coalesce(sum(size_bytes), 0) FROM reservations").fetchone()[0])

    def doomed_bytes(self) -> int:
        """Bytes of victims that are not unlinked yet."""
        row = self.execute("SELECT coalesce(sum(size_bytes), 0) FROM reservations WHERE doomed").fetchone()
        return int(row[0])

    def reservations(self) -> list[Reservation]:
        rows = self.execute("SELECT id, size_bytes, owner, doomed FROM reservations").fetchall()
        return [Reservation(row[0], row[1], row[2], bool(row[3])) for row in rows]

    def insert_reservation(self, reservation: Reservation) -> None:
        self.execute(
            "INSERT INTO reservations VALUES (?, ?, ?, ?)",
            (reservation.id, reservation.size_bytes, reservation.owner, int(reservation.doomed)),
        )

    def delete_reservations(self, ids: Iterable[int]) -> None:
        self._executemany("DELETE FROM reservations WHERE id = ?", [(key,) for key in ids])

    # --- progress

    def passes(self) -> list[PassRow]:
        columns = "id, plan, length, next_position, evicted_before"
        return [PassRow(*row) for row in self.execute(f"SELECT {columns} FROM passes ORDER BY id")]

    def insert_pass(self, plan: str, length: int | None, evicted_before: int) -> int:
        cursor = self.execute(
            "INSERT INTO passes (plan, length, next_position, evicted_before) VALUES (?, ?, 0, ?)",
            (plan, length, evicted_before),
        )
        return int(cursor.lastrowid or 0)

    def forget_old_passes(self) -> None:
        """Drop the passes of which no shard is cached, but for the last."""
        self.execute(
            "DELETE FROM passes WHERE id NOT IN (SELECT DISTINCT pass_id FROM shards) "
            "AND id < (SELECT max(id) FROM passes)"
        )

    def advance_pass(self, pass_id: int, next_position: int) -> None:
        self.execute("UPDATE passes SET next_position = ? WHERE id = ?", (next_position, pass_id))

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
        self._executemany(
            "DELETE FROM suspects WHERE pass_id = ? AND position = ?", [(pass_id, p) for p in positions]
        )

    # --- skipped samples

    def add_failure(self, kind: str, reason: str, count: int, example: str) -> None:
        """Count `count` skipped samples; past a cap of distinct reasons, under "other reasons"."""
        known = self.execute(
            "SELECT 1 FROM failures WHERE kind = ? AND reason = ?", (kind, reason)
        ).fetchone()
        if known is None:
            (reasons,) = self.execute("SELECT count(*) FROM failures").fetchone()
            if reasons >= _MAX_REASONS:
                reason = "other reasons"
        self.execute(
            "INSERT INTO failures VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count",
            (kind, reason, count, example),
        )

    def failures(self) -> list[FailureRow]:
        rows = self.execute("SELECT kind, reason, count, example FROM failures ORDER BY count DESC, reason")
        return [FailureRow(*row) for row in rows]


def pack_spans(spans: Sequence[Span]) -> bytes:
    return np.array([[*span.start, *span.stop] for span in spans], np.int64).tobytes()


def unpack_spans(blob: bytes) -> list[Span]:
    rows = np.frombuffer(blob, np.int64).reshape(-1, 4).tolist()
    return [Span((row[0], row[1]), (row[2], row[3])) for row in rows]
