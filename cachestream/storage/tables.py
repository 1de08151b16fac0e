"""What can be said to the catalogue within one transaction: typed statements, no decisions."""

# ruff: noqa: S608  the names put into statements are constants of this package, never input

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from cachestream.model import IntArray, Schema, ShardRow, Span
from cachestream.split import HELD_OUT, TRAIN, WHOLE
from cachestream.storage.eviction import ORDERS
from cachestream.storage.layout import SPLIT_STATEMENTS
from cachestream.storage.progress import Claim, PassRow, ProgressTables, Suspect

__all__ = ["Claim", "FailureRow", "PassRow", "Reservation", "Suspect", "Tables"]

_ROW: Final = "id, size_bytes, num_samples, uses, last_used"
_MAX_REASONS: Final = 200
_MAX_WORDS: Final = 500  # characters of a reason or an example that are kept
_SCHEMAS_BETWEEN_CLEARING: Final = 64
_MAX_RANGES: Final = 100  # SQLite limits how deep an expression is


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes promised to a shard being written, or still held by a victim not yet unlinked."""

    id: int
    size_bytes: int
    owner: str
    doomed: bool


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Samples that were skipped for one reason; `example` is the first of them."""

    kind: str
    reason: str
    count: int
    example: str


def _storable(text: str) -> str | bytes:
    """`text` as SQLite takes it: in bytes where it holds a path that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _legible(words: str) -> str:
    """What is kept of words that are for people alone: text, also where a path in them is not UTF-8."""
    return words[:_MAX_WORDS].encode("utf-8", "replace").decode()


def _as_set(value: Any) -> Any:
    """A value as it was before `_storable`."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


class Tables(ProgressTables):
    """The statements of one transaction. Valid only inside the `with` that gave it."""

    # --- settings and counters

    def meta(self, key: str, default: Any = None) -> Any:
        row = self.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else _as_set(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        stored = _storable(value) if isinstance(value, str) else value
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, stored))

    def all_meta(self) -> dict[str, Any]:
        rows = self.execute("SELECT key, value FROM meta").fetchall()
        return {key: _as_set(value) for key, value in rows}

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key`; returns its new value."""
        value = int(self.meta(key, 0)) + amount
        self.set_meta(key, value)
        return value

    def go_on_filling(self) -> None:
        """A full cache has room again: it is not known any more to be full."""
        self.execute("UPDATE meta SET value = 'filling' WHERE key = 'fill_state' AND value = 'full'")

    # --- shards

    def totals(self) -> tuple[int, int, int]:
        """Shards, samples, bytes; kept by triggers, so that asking costs the same at any size."""
        row = self.execute("SELECT shards, samples, size_bytes FROM totals").fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def shards(
        self, policy: str = "fifo", but: IntArray | None = None, *, used_only: bool = False
    ) -> Generator[ShardRow, None, None]:
        """All shards, or those that some epoch has used, in the order of a named eviction policy, first to go first.

        Without those in `but`, ranges `[n, 2]` of ids (first, last); of many ranges some are left to the
        caller to leave out. SQLite sorts, so only the rows that are asked for become objects.
        """
        order = ", ".join(f"{key[1:]} DESC" if key.startswith("-") else key for key in ORDERS[policy])
        ranges = [] if but is None else but[:_MAX_RANGES].tolist()
        where = " AND ".join(["uses > 0" if used_only else "1"] + ["id NOT BETWEEN ? AND ?"] * len(ranges))
        cursor = self.execute(
            f"SELECT {_ROW} FROM shards WHERE {where} ORDER BY {order or 'id'}",
            list(chain.from_iterable(ranges)),
        )
        try:
            for row in cursor:
                yield ShardRow(*row)
        finally:
            cursor.close()  # a statement that is not done would keep its lock past the commit

    def shard_columns(self, *columns: str, policy: str = "fifo") -> list[IntArray]:
        """Columns of all shards as int64 arrays `[n]`, in the order of a named eviction policy."""
        order = ", ".join(f"{key[1:]} DESC" if key.startswith("-") else key for key in ORDERS[policy])
        rows = self.execute(f"SELECT {', '.join(columns)} FROM shards ORDER BY {order or 'id'}")
        table = np.fromiter(chain.from_iterable(rows.fetchall()), np.int64).reshape(-1, len(columns))
        return list(np.ascontiguousarray(table.T))

    def bytes_within(self, ranges: IntArray) -> int:
        """Bytes of the shards in `ranges` `[n, 2]` of ids (first, last), which are disjoint."""
        question = "SELECT coalesce(sum(size_bytes), 0) FROM shards WHERE id BETWEEN ? AND ?"
        return sum(int(self.execute(question, pair).fetchone()[0]) for pair in ranges.tolist())

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
        self.executemany("DELETE FROM shards WHERE id = ?", [(shard_id,) for shard_id in ids])

    def mark_used(self, ranges: IntArray, times: int = 1) -> None:
        """Count `times` more snapshots, the last of them now, each of the shards in `ranges` `[n, 2]` of ids."""
        now = self.add("clock", times)
        self.executemany(
            "UPDATE shards SET uses = uses + ?, last_used = ? WHERE id BETWEEN ? AND ?",
            [(times, now, first, last) for first, last in ranges.tolist()],
        )

    def sums(self) -> tuple[int, int, int]:
        """What `totals` should be, from the rows."""
        question = "SELECT count(*), coalesce(sum(num_samples), 0), coalesce(sum(size_bytes), 0) FROM shards"
        shards, samples, size_bytes = map(int, self.execute(question).fetchone())
        return shards, samples, size_bytes

    def sizes(self) -> dict[int, int]:
        """The bytes of all shards, by id."""
        return dict(self.execute("SELECT id, size_bytes FROM shards"))

    def correct_sizes(self, sizes: Mapping[int, int]) -> None:
        """Book other sizes of shards, by id, and all sums anew."""
        self.executemany(
            "UPDATE shards SET size_bytes = ? WHERE id = ?", [(size, key) for key, size in sizes.items()]
        )
        self.execute("UPDATE totals SET shards = ?, samples = ?, size_bytes = ?", self.sums())

    def spans(self, part: int = WHOLE) -> dict[int, list[Span]]:
        """What the shards hold of each pass: pass id → spans. Of one `part`, what holds its samples."""
        found: dict[int, list[Span]] = {}
        other = None if self.holdout is None else {TRAIN: HELD_OUT, HELD_OUT: TRAIN}.get(part)
        without = f" WHERE id NOT IN (SELECT id FROM splits WHERE part = {other})" if other else ""
        for pass_id, blob in self.execute(f"SELECT pass_id, spans FROM shards{without}"):
            found.setdefault(pass_id, []).extend(unpack_spans(blob))
        return found

    def forget_filling(self) -> None:
        """Drop the progress of the filling, its failures and the schema; counters and settings stay."""
        for table in ("passes", "claims", "suspects", "failures", "schemas"):
            self.execute(f"DELETE FROM {table}")
        self.execute(
            "DELETE FROM meta WHERE key IN ('schema', 'source', 'transform', 'fill_state', 'fill_message', 'votes')"
        )

    # --- the held-out split

    @property
    def holdout(self) -> float | None:
        """The share of the samples that is held out; None where that was never asked for."""
        value = self.meta("holdout")
        return None if value is None else float(value)

    def hold_out(self, holdout: float) -> None:
        """Hold out the share `holdout` from now on; `insert_split` may be called then."""
        for statement in SPLIT_STATEMENTS:
            self.execute(statement)
        self.set_meta("holdout", holdout)

    def insert_split(self, shard_id: int, held_out: int, part: int = WHOLE) -> None:
        """`held_out` of a shard's samples are held out; it is a `part` of what its spans tell of."""
        self.execute(
            "INSERT OR IGNORE INTO splits SELECT id, ?, ? FROM shards WHERE id = ?",
            (held_out, part, shard_id),
        )

    def enter_split(self, shard_id: int, fill: Mapping[str, Any]) -> None:
        """Note what a shard's `fill` says of the split, if it was made under the same holdout."""
        if "part" in fill and self.holdout == fill["holdout"]:
            self.insert_split(shard_id, int(fill["held_out"]), int(fill["part"]))

    def uncounted_shards(self) -> list[int]:
        """The shards of which it is not known how many samples are held out."""
        rows = self.execute("SELECT id FROM shards WHERE id NOT IN (SELECT id FROM splits)")
        return [row[0] for row in rows]

    def held_out(self) -> tuple[int, int]:
        """Samples that are held out, as far as they are counted, and bytes of the shards that hold nothing else."""
        if self.holdout is None:
            return 0, 0
        row = self.execute(
            "SELECT coalesce(sum(held_out), 0), coalesce(sum(CASE WHEN held_out = num_samples THEN size_bytes END), 0) "
            "FROM splits JOIN shards USING (id)"
        ).fetchone()
        return int(row[0]), int(row[1])

    def held_out_shards(self) -> set[int]:
        """The shards that hold nothing but held-out samples: they stay while others can go."""
        if self.holdout is None:
            return set()
        rows = self.execute("SELECT id FROM splits JOIN shards USING (id) WHERE held_out = num_samples")
        return {row[0] for row in rows}

    def held_out_counts(self) -> IntArray:
        """How many samples of each shard are held out, int64 `[num_shards]` by ascending id; -1 where that is not known."""
        rows = self.execute(
            "SELECT coalesce(held_out, -1) FROM shards LEFT JOIN splits USING (id) ORDER BY id"
        )
        return np.fromiter((row[0] for row in rows), np.int64)

    # --- schemas

    def vote(self, owner: str, votes: Sequence[tuple[Schema, int]]) -> list[tuple[Schema, int]]:
        """Note of which schemas the first samples are that the process `owner` has read; returns what others have noted."""
        noted: dict[str, list[list[Any]]] = json.loads(self.meta("votes", "{}"))
        others = [
            (Schema.from_json(text), count) for name in noted if name != owner for text, count in noted[name]
        ]
        noted[owner] = [[schema.to_json(), count] for schema, count in votes]
        self.set_meta("votes", json.dumps(noted))
        return others

    def schema_id(self, schema: Schema) -> int:
        text = schema.to_json()
        found = self.execute("SELECT id FROM schemas WHERE json = ?", (text,)).fetchone()
        if found is not None:
            return int(found[0])
        (count,) = self.execute("SELECT count(*) FROM schemas").fetchone()
        if count % _SCHEMAS_BETWEEN_CLEARING == 0:  # images of all sizes would leave a schema each
            self.execute("DELETE FROM schemas WHERE id NOT IN (SELECT schema_id FROM shards)")
        return int(self.execute("INSERT INTO schemas (json) VALUES (?)", (text,)).lastrowid or 0)

    def schemas(self, ids: Iterable[int] | None = None) -> list[Schema]:
        wanted = None if ids is None else set(ids)
        rows = self.execute("SELECT id, json FROM schemas").fetchall()
        return [Schema.from_json(text) for key, text in rows if wanted is None or key in wanted]

    # --- reservations

    def reserved_bytes(self) -> tuple[int, int]:
        """Bytes promised to shards being written, and bytes of victims that are not unlinked yet."""
        question = "SELECT coalesce(sum(size_bytes), 0) FROM reservations WHERE doomed = ?"
        promised, doomed = (int(self.execute(question, (flag,)).fetchone()[0]) for flag in (0, 1))
        return promised, doomed

    def reservations(self) -> list[Reservation]:
        rows = self.execute("SELECT id, size_bytes, owner, doomed FROM reservations").fetchall()
        return [Reservation(row[0], row[1], row[2], bool(row[3])) for row in rows]

    def insert_reservation(self, reservation: Reservation) -> None:
        self.execute(
            "INSERT INTO reservations VALUES (?, ?, ?, ?)",
            (reservation.id, reservation.size_bytes, reservation.owner, int(reservation.doomed)),
        )

    def take_reservations(self, ids: Iterable[int], owner: str) -> None:
        """Doom reservations, in the name of `owner` from now on."""
        self.executemany(
            "UPDATE reservations SET owner = ?, doomed = 1 WHERE id = ?", [(owner, key) for key in ids]
        )

    def fulfil_reservation(self, shard_id: int, owner: str) -> bool:
        """The shard is written: its reservation goes; whether `owner` still had it."""
        cursor = self.execute(
            "DELETE FROM reservations WHERE id = ? AND owner = ? AND doomed = 0", (shard_id, owner)
        )
        return cursor.rowcount > 0

    def delete_reservations(self, ids: Iterable[int]) -> int:
        """Returns how many there were."""
        return self.executemany("DELETE FROM reservations WHERE id = ?", [(key,) for key in ids]).rowcount

    # --- skipped samples

    def add_failure(self, kind: str, reason: str, count: int, example: str) -> None:
        """Count `count` skipped samples; past a cap of distinct reasons, under "other reasons"."""
        reason, example = _legible(reason), _legible(example)
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

    def forget_failures(self, *kinds: str) -> None:
        """Forget the failures of some kinds."""
        marks = ", ".join("?" * len(kinds))
        self.execute(f"DELETE FROM failures WHERE kind IN ({marks})", kinds)

    def failures(self) -> list[FailureRow]:
        rows = self.execute("SELECT kind, reason, count, example FROM failures ORDER BY count DESC, reason")
        return [FailureRow(*row) for row in rows]


def pack_spans(spans: Sequence[Span]) -> bytes:
    return np.array([[*span.start, *span.stop] for span in spans], np.int64).tobytes()


def unpack_spans(blob: bytes) -> list[Span]:
    rows = np.frombuffer(blob, np.int64).reshape(-1, 4).tolist()
    return [Span((row[0], row[1]), (row[2], row[3])) for row in rows]
