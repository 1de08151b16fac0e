"""Typed SQL statements on the catalogue, for one transaction, without decisions."""
# ruff: noqa: S608  the names put into statements are constants of this package, never input

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np

from cachestream.errors import SchemaMismatchError
from cachestream.schema import HELD_OUT, TRAIN, WHOLE, IntArray, Schema, ShardRow, Span, span_array
from cachestream.storage.eviction import ORDERS
from cachestream.storage.layout import Directory
from cachestream.storage.progress import ProgressTables, Statements
from cachestream.storage.settings import Settings, read_settings

_SHARD_COLUMNS: Final = "id, size_bytes, num_samples, uses, last_used"  # the fields of ShardRow
_MAX_REASONS: Final = 200
_MAX_CHARS: Final = 500  # characters of a reason or an example that are kept
_SCHEMAS_BETWEEN_CLEARING: Final = 64
# In a cache with a held-out split: a shard's number of held-out samples, and the `part` of its spans that it
# holds (WHOLE, TRAIN, HELD_OUT). A shard without a row is whole, and not counted yet.
_SPLIT_STATEMENTS: Final = (
    """CREATE TABLE IF NOT EXISTS splits (
        id INTEGER PRIMARY KEY, held_out INTEGER NOT NULL, part INTEGER NOT NULL)""",
    """CREATE TRIGGER IF NOT EXISTS split_goes AFTER DELETE ON shards BEGIN
        DELETE FROM splits WHERE id = OLD.id; END""",
)
# The identity of the transform that made each shard; a shard without a row is of a version that kept none.
_TRANSFORM_STATEMENTS: Final = (
    "CREATE TABLE IF NOT EXISTS transforms (id INTEGER PRIMARY KEY, identity TEXT NOT NULL)",
    """CREATE TRIGGER IF NOT EXISTS transform_goes AFTER DELETE ON shards BEGIN
        DELETE FROM transforms WHERE id = OLD.id; END""",
)
# In a cache that evicts by weight: the mean weight of the samples of each shard that was drawn by weights.
_WEIGHT_STATEMENTS: Final = (
    "CREATE TABLE IF NOT EXISTS weights (id INTEGER PRIMARY KEY, weight REAL NOT NULL)",
    """CREATE TRIGGER IF NOT EXISTS weight_goes AFTER DELETE ON shards BEGIN
        DELETE FROM weights WHERE id = OLD.id; END""",
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes promised to a shard being written, or held by an evicted shard until its file is unlinked."""

    id: int
    size_bytes: int
    owner: str
    doomed: bool


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Samples skipped for one reason; `example` is the first of them."""

    kind: str
    reason: str
    count: int
    example: str


def _storable(value: Any) -> Any:
    """The value as SQLite takes it: bytes for text with a path that is not UTF-8. `_restored` undoes it."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def _restored(value: Any) -> Any:
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _clipped(text: str) -> str:
    """The part of a message that is kept; bytes that are not UTF-8 are replaced."""
    return text[:_MAX_CHARS].encode("utf-8", "replace").decode()


class MetaTable(Statements):
    """The settings and counters, within one transaction on the catalogue in `directory`."""

    def __init__(self, connection: sqlite3.Connection, directory: Directory) -> None:
        super().__init__(connection)
        self._directory = directory

    @cached_property
    def settings(self) -> Settings:
        return read_settings(self._directory)

    def make_tables_for(self, settings: Settings) -> None:
        """Make the table that the policy "least-weight" sorts by, and that of the held-out split."""
        needed = [_WEIGHT_STATEMENTS] if settings.eviction == "least-weight" else []
        needed += [_SPLIT_STATEMENTS] if settings.holdout is not None else []
        for statement in chain.from_iterable(needed):
            self.execute(statement)

    def meta(self, key: str, default: Any = None) -> Any:
        row = self.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else _restored(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _storable(value)))

    def all_meta(self) -> dict[str, Any]:
        rows = self.execute("SELECT key, value FROM meta").fetchall()
        return {key: _restored(value) for key, value in rows}


class SplitTables(MetaTable):
    """The held-out split: the samples and the parts of spans that shards hold, within one transaction."""

    @property
    def holdout(self) -> float | None:
        """The share of the samples that is held out; None where that was never requested."""
        return self.settings.holdout

    def insert_split(self, shard_id: int, held_out: int, part: int = WHOLE) -> None:
        """Record a shard's number of held-out samples, and the `part` of its spans that it holds."""
        self.execute(
            "INSERT OR IGNORE INTO splits SELECT id, ?, ? FROM shards WHERE id = ?",
            (held_out, part, shard_id),
        )

    def enter_split(self, shard_id: int, fill: Mapping[str, Any]) -> None:
        """Record the split that a shard's `fill` describes, if it was made with the same holdout."""
        if "part" in fill and self.holdout == fill["holdout"]:
            self.insert_split(shard_id, int(fill["held_out"]), int(fill["part"]))

    def uncounted_shards(self) -> list[int]:
        """The shards whose number of held-out samples is not known."""
        rows = self.execute("SELECT id FROM shards WHERE id NOT IN (SELECT id FROM splits)").fetchall()
        return [row[0] for row in rows]

    def held_out(self) -> tuple[int, int]:
        """The number of held-out samples counted so far, and the bytes of shards that hold nothing else."""
        if self.holdout is None:
            return 0, 0
        row = self.execute(
            "SELECT coalesce(sum(held_out), 0), "
            "coalesce(sum(CASE WHEN held_out = num_samples THEN size_bytes END), 0) "
            "FROM splits JOIN shards USING (id)"
        ).fetchone()
        return int(row[0]), int(row[1])

    def held_out_shards(self) -> set[int]:
        """The shards of held-out samples alone. New samples never evict them; a lower limit does, last."""
        if self.holdout is None:
            return set()
        rows = self.execute("SELECT id FROM splits JOIN shards USING (id) WHERE held_out = num_samples")
        return {row[0] for row in rows.fetchall()}

    def held_out_counts(self) -> IntArray:
        """Held-out samples of each shard, int64 `[num_shards]` by ascending id; -1 where not known."""
        rows = self.execute(
            "SELECT coalesce(held_out, -1) FROM shards LEFT JOIN splits USING (id) ORDER BY id"
        )
        return np.array([row[0] for row in rows.fetchall()], np.int64)

    def spans(self, part: int = WHOLE) -> dict[int, IntArray]:
        """The spans of each pass that the shards hold: pass id → `span_array`.

        With `part` TRAIN or HELD_OUT, shards that hold only samples of the other split are left out.
        """
        found: dict[int, list[bytes]] = {}
        other = None if self.holdout is None else {TRAIN: HELD_OUT, HELD_OUT: TRAIN}.get(part)
        without = f" WHERE id NOT IN (SELECT id FROM splits WHERE part = {other})" if other else ""
        for pass_id, blob in self.execute(f"SELECT pass_id, spans FROM shards{without}").fetchall():
            found.setdefault(pass_id, []).append(blob)
        return {pass_id: _unpack_spans(blobs) for pass_id, blobs in found.items()}

    def spans_of(self, pass_id: int) -> IntArray:
        """The spans of one pass that shards hold, as `span_array`."""
        blobs = self.execute("SELECT spans FROM shards WHERE pass_id = ?", (pass_id,))
        return _unpack_spans(blob for (blob,) in blobs.fetchall())


class Tables(ProgressTables, SplitTables):
    """The statements of one transaction. Valid only inside the `with` block that yielded it."""

    # --- counters

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key` and return its new value."""
        value = int(self.meta(key, 0)) + amount
        self.set_meta(key, value)
        return value

    def resume_filling(self) -> None:
        """Set the state "full" back to "filling": space has been made."""
        self.execute("UPDATE meta SET value = 'filling' WHERE key = 'fill_state' AND value = 'full'")

    # --- shards

    def totals(self) -> tuple[int, int, int]:
        """Shards, samples, bytes. Triggers keep the sums, so the cost does not depend on the size."""
        row = self.execute("SELECT shards, samples, size_bytes FROM totals").fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def shards(self, policy: str = "fifo", *, used_only: bool = False) -> Generator[ShardRow, None, None]:
        """Iterate over all shards, or those that some epoch has used, in the order of an eviction policy.

        The first to evict comes first. SQLite sorts, so only the rows that are consumed become objects.
        """
        where = "WHERE uses > 0" if used_only else ""
        self.scans.append(
            self.execute(f"SELECT {_SHARD_COLUMNS} FROM shards {where} ORDER BY {ORDERS[policy]}")
        )
        for row in self.scans[-1]:
            yield ShardRow(*row)

    def shard_columns(self, *columns: str, policy: str = "fifo") -> list[IntArray]:
        """Columns of all shards as int64 arrays `[n]`, in the order of an eviction policy."""
        rows = self.execute(f"SELECT {', '.join(columns)} FROM shards ORDER BY {ORDERS[policy]}")
        table = np.fromiter(chain.from_iterable(rows.fetchall()), np.int64).reshape(-1, len(columns))
        return list(np.ascontiguousarray(table.T))

    def bytes_within(self, ranges: IntArray) -> int:
        """Bytes of the shards in `ranges` `[n, 2]` of ids (first, last), which are disjoint."""
        question = "SELECT coalesce(sum(size_bytes), 0) FROM shards WHERE id BETWEEN ? AND ?"
        return sum(int(self.execute(question, pair).fetchone()[0]) for pair in ranges.tolist())

    def shard_ids(self) -> set[int]:
        return {row[0] for row in self.execute("SELECT id FROM shards").fetchall()}

    def shard(self, shard_id: int) -> ShardRow | None:
        row = self.execute(f"SELECT {_SHARD_COLUMNS} FROM shards WHERE id = ?", (shard_id,)).fetchone()
        return None if row is None else ShardRow(*row)

    def insert_shard(self, row: ShardRow, schema_id: int, pass_id: int, spans: Sequence[Span]) -> None:
        values = (*astuple(row), schema_id, pass_id, span_array(spans).tobytes())
        self.execute("INSERT INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    def delete_shards(self, ids: Iterable[int]) -> None:
        self.executemany("DELETE FROM shards WHERE id = ?", [(shard_id,) for shard_id in ids])

    def enter_transform(self, shard_id: int, fill: Mapping[str, Any]) -> None:
        """Record the transform that a shard's `fill` names."""
        if isinstance(identity := fill.get("transform"), str):
            for statement in _TRANSFORM_STATEMENTS:
                self.execute(statement)
            self.execute("INSERT INTO transforms VALUES (?, ?)", (shard_id, identity))

    def samples_of_others(self, identity: str) -> int:
        """The number of samples that a transform other than `identity` has made.

        Identities made by another version of Python, the part before the colon, cannot be compared: they do not count.
        """
        known = "SELECT 1 FROM sqlite_master WHERE name = 'transforms'"
        if not identity or self.execute(known).fetchone() is None:
            return 0
        row = self.execute(
            "SELECT coalesce(sum(num_samples), 0) FROM transforms JOIN shards USING (id) "
            "WHERE identity != ? AND substr(identity, 1, ?) = ?",
            (identity, len(version := identity.partition(":")[0] + ":"), version),
        ).fetchone()
        return int(row[0])

    def mark_used(self, ranges: IntArray, times: int = 1) -> None:
        """Count `times` more snapshots, the last of them now, of each shard in `ranges` `[n, 2]` of ids."""
        now = self.add("clock", times)
        self.executemany(
            "UPDATE shards SET uses = uses + ?, last_used = ? WHERE id BETWEEN ? AND ?",
            [(times, now, first, last) for first, last in ranges.tolist()],
        )

    def weights(self) -> dict[int, float]:
        """The recorded weights of shards, by id. Requires "least-weight"."""
        return dict(self.execute("SELECT id, weight FROM weights").fetchall())

    def weigh(self, weights: Mapping[int, float]) -> None:
        """Record the mean weights of shards, by id; one that is gone is left out. Requires "least-weight"."""
        self.executemany(
            "INSERT OR REPLACE INTO weights SELECT id, ? FROM shards WHERE id = ?",
            [(weight, shard_id) for shard_id, weight in weights.items()],
        )

    def sums(self) -> tuple[int, int, int]:
        """The correct value of `totals`, computed from the rows."""
        question = "SELECT count(*), coalesce(sum(num_samples), 0), coalesce(sum(size_bytes), 0) FROM shards"
        shards, samples, size_bytes = map(int, self.execute(question).fetchone())
        return shards, samples, size_bytes

    def sizes(self, newest: int | None = None) -> dict[int, int]:
        """The bytes of all shards, or of the `newest`, by id."""
        limit = -1 if newest is None else newest
        question = "SELECT id, size_bytes FROM shards ORDER BY id DESC LIMIT ?"
        return dict(self.execute(question, (limit,)).fetchall())

    def correct_sizes(self, sizes: Mapping[int, int]) -> None:
        """Set the sizes of some shards, by id, and recompute all sums."""
        self.executemany(
            "UPDATE shards SET size_bytes = ? WHERE id = ?", [(size, key) for key, size in sizes.items()]
        )
        self.execute("UPDATE totals SET shards = ?, samples = ?, size_bytes = ?", self.sums())

    def forget_filling(self) -> None:
        """Delete the progress of the filling, its failures and the schema. Counters and settings stay."""
        for table in ("passes", "claims", "suspects", "failures", "schemas"):
            self.execute(f"DELETE FROM {table}")
        self.execute(
            "DELETE FROM meta WHERE key IN "
            "('schema', 'source', 'fill_state', 'fill_message', 'votes', 'mixture')"
        )

    # --- schemas

    def vote(self, owner: str, votes: Sequence[tuple[Schema, int]]) -> list[tuple[Schema, int]]:
        """Record the schemas of the first samples that `owner` has read; return those of all others."""
        others = {name: given for name, given in self.votes().items() if name != owner}
        texts = {
            name: [[schema.to_json(), count] for schema, count in given]
            for name, given in {**others, owner: votes}.items()
        }
        self.set_meta("votes", json.dumps(texts))
        return list(chain.from_iterable(others.values()))

    def votes(self) -> dict[str, list[tuple[Schema, int]]]:
        """The schemas of the first samples that each owner has read, with counts."""
        noted: dict[str, list[list[Any]]] = json.loads(self.meta("votes", "{}"))
        return {
            owner: [(Schema.from_json(text), int(count)) for text, count in given]
            for owner, given in noted.items()
        }

    @property
    def schema(self) -> Schema | None:
        """The fields of the cached samples; None before the first."""
        text = self.meta("schema")
        return None if text is None else Schema.from_json(text)

    def admit_schema(self, schema: Schema) -> int:
        """Widen the cache's schema by that of a shard, and return the id of the latter.

        The first shard may hold integers alone where the first samples of other processes have floats: their
        votes widen the cache's schema, too. Raises SchemaMismatchError for other fields.
        """
        known = self.schema
        merged = schema if known is None else known.merge(schema)
        if known is None:
            for voted, _ in chain.from_iterable(self.votes().values()):
                with suppress(SchemaMismatchError):
                    merged = merged.with_dtypes(merged.merge(voted).dtypes)
            self.set_meta("votes", "{}")
        if merged != known:
            self.set_meta("schema", merged.to_json())
        return self.schema_id(schema)

    def schema_id(self, schema: Schema) -> int:
        text = schema.to_json()
        found = self.execute("SELECT id FROM schemas WHERE json = ?", (text,)).fetchone()
        if found is not None:
            return int(found[0])
        (count,) = self.execute("SELECT count(*) FROM schemas").fetchone()
        if count % _SCHEMAS_BETWEEN_CLEARING == 0:  # images of many sizes would leave one schema each
            self.execute("DELETE FROM schemas WHERE id NOT IN (SELECT schema_id FROM shards)")
        return int(self.execute("INSERT INTO schemas (json) VALUES (?)", (text,)).lastrowid or 0)

    def schemas(self, ids: Collection[int]) -> list[Schema]:
        rows = self.execute("SELECT id, json FROM schemas").fetchall()
        return [Schema.from_json(text) for key, text in rows if key in ids]

    # --- reservations

    def reserved_bytes(self) -> tuple[int, int]:
        """Bytes promised to shards being written, and bytes of evicted shards not yet unlinked."""
        question = "SELECT coalesce(sum(size_bytes), 0) FROM reservations WHERE doomed = ?"
        promised, doomed = (int(self.execute(question, (flag,)).fetchone()[0]) for flag in (0, 1))
        return promised, doomed

    def reservations(self) -> list[Reservation]:
        rows = self.execute("SELECT id, size_bytes, owner, doomed FROM reservations").fetchall()
        return [Reservation(row[0], row[1], row[2], bool(row[3])) for row in rows]

    def insert_reservation(self, reservation: Reservation) -> None:
        self.execute("INSERT INTO reservations VALUES (?, ?, ?, ?)", astuple(reservation))

    def take_reservation(self, shard_id: int, before: str, owner: str) -> bool:
        """Doom the reservation that `before` has, for `owner` to release; return whether it still had it."""
        cursor = self.execute(
            "UPDATE reservations SET owner = ?, doomed = 1 WHERE id = ? AND owner = ?",
            (owner, shard_id, before),
        )
        return cursor.rowcount > 0

    def fulfil_reservation(self, shard_id: int, owner: str) -> bool:
        """Delete the reservation of a written shard; return whether `owner` still had it."""
        cursor = self.execute(
            "DELETE FROM reservations WHERE id = ? AND owner = ? AND doomed = 0", (shard_id, owner)
        )
        return cursor.rowcount > 0

    def delete_reservations(self, ids: Iterable[int]) -> None:
        self.executemany("DELETE FROM reservations WHERE id = ?", [(key,) for key in ids])

    # --- skipped samples

    def add_failure(self, kind: str, reason: str, count: int, example: str) -> None:
        """Count skipped samples. Past a maximum of distinct reasons, they count as "other reasons"."""
        reason, example = _clipped(reason), _clipped(example)
        known = self.execute(
            "SELECT 1 FROM failures WHERE kind = ? AND reason = ?", (kind, reason)
        ).fetchone()
        if known is None:
            (reasons,) = self.execute("SELECT count(*) FROM failures").fetchone()
            if reasons >= _MAX_REASONS:
                reason = "other reasons"
        self.execute(
            "INSERT INTO failures VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET count = count + excluded.count",
            (kind, reason, count, example),
        )

    def failures(self) -> list[FailureRow]:
        rows = self.execute("SELECT kind, reason, count, example FROM failures ORDER BY count DESC, reason")
        return [FailureRow(*row) for row in rows.fetchall()]


def _unpack_spans(blobs: Iterable[bytes]) -> IntArray:
    return np.frombuffer(b"".join(blobs), np.int64).reshape(-1, 4)
