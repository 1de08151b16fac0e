"""The rows of shards, the counters and the schema, within one transaction on the catalogue.

One row of `shards` is one file in the folder of shards, and its bytes count from the reservation until the
file is gone:

    reserved ─publish─▶ live ◀─retire─▶ retiring ─doom─▶ doomed ─forget─▶ (no row)
        │                └─────▶ replaced ──────────────────▲
        └────────────────────────────bury───────────────────┘

A reserved row is a file that its owner may be writing; what a dead owner leaves is buried by whoever finds
it. A doomed one is a file that whoever finds it removes, unless its owner does. A retiring shard is cached
like a live one, but joins no new epoch and is evicted first. Of a replaced one other shards hold the samples:
it is there for the epochs that lease it, and removed after the last of them.
"""
# ruff: noqa: S608  the names put into statements are constants of this package, never input

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np

from cachestream.schema import HELD_OUT, TRAIN, WHOLE, IntArray, Schema, ShardRow, Span, span_array
from cachestream.storage.eviction import ORDERS
from cachestream.storage.layout import Directory
from cachestream.storage.progress import ProgressTables
from cachestream.storage.settings import Settings, read_settings

RESERVED: Final = "reserved"
LIVE: Final = "live"
RETIRING: Final = "retiring"
REPLACED: Final = "replaced"
DOOMED: Final = "doomed"
STRAY: Final = "stray"  # of row 0: the unknown files in the folder, together

# `held_out`: held-out samples, NULL until they are counted. `part`: the samples of its spans that the shard
# holds (WHOLE, TRAIN, HELD_OUT). `weight`: the mean weight of its samples, NULL until a loader has weighed
# them. `transform`: the identity of the transform that made it. `shapes`: the shape of each field, in the
# order of the cache's schema, null where it varies.
SHARD_STATEMENTS: Final = (
    """CREATE TABLE shards (
        id INTEGER PRIMARY KEY, state TEXT NOT NULL, owner TEXT NOT NULL, size_bytes INTEGER NOT NULL,
        num_samples INTEGER NOT NULL DEFAULT 0, uses INTEGER NOT NULL DEFAULT 0,
        last_used INTEGER NOT NULL DEFAULT 0,
        held_out INTEGER, part INTEGER NOT NULL DEFAULT 0, weight REAL, transform TEXT, shapes TEXT,
        pass_id INTEGER NOT NULL DEFAULT 0, spans BLOB NOT NULL DEFAULT x'')""",
    # The sums over all shards, which every reservation needs, are read from this index alone.
    "CREATE INDEX sizes ON shards (state, size_bytes, num_samples)",
    f"CREATE VIEW live AS SELECT * FROM shards WHERE state IN ('{LIVE}', '{RETIRING}')",
    f"CREATE VIEW whole AS SELECT * FROM shards WHERE state IN ('{LIVE}', '{RETIRING}', '{REPLACED}')",
)

# The shards of transforms other than one, as far as the two can be compared: see `_others`.
_OF_OTHERS: Final = "transform != ? AND substr(transform, 1, ?) = ?"
_MAX_REASONS: Final = 200
_MAX_CHARS: Final = 500  # characters of a reason or an example that are kept


@dataclass(frozen=True, slots=True)
class FileRow:
    """A shard that is being written (reserved) or removed (doomed) by `owner`; "" is anybody."""

    id: int
    state: str
    owner: str


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Samples skipped for one reason; `example` is the first of them."""

    kind: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class OutdatedShard:
    """A live shard that another transform has made; `spans` of the pass `pass_id`, as `span_array`."""

    id: int
    num_samples: int
    size_bytes: int
    pass_id: int
    spans: IntArray


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


class Tables(ProgressTables):
    """One transaction. Valid only inside the `with` block that yielded it."""

    def __init__(self, connection: sqlite3.Connection, directory: Directory) -> None:
        super().__init__(connection)
        self._directory = directory

    @cached_property
    def settings(self) -> Settings:
        return read_settings(self._directory)

    @property
    def holdout(self) -> float | None:
        """The share of the samples that is held out; None where that was never requested."""
        return self.settings.holdout

    # --- counters

    def meta(self, key: str, default: Any = None) -> Any:
        row = self.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else _restored(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _storable(value)))

    def all_meta(self) -> dict[str, Any]:
        rows = self.execute("SELECT key, value FROM meta").fetchall()
        return {key: _restored(value) for key, value in rows}

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key` and return its new value."""
        value = int(self.meta(key, 0)) + amount
        self.set_meta(key, value)
        return value

    def note_room(self) -> None:
        """Note that space was made: a full cache is being filled again."""
        self.add("room_made", 1)
        self.execute("UPDATE meta SET value = 'filling' WHERE key = 'fill_state' AND value = 'full'")

    def forget_filling(self) -> None:
        """Delete the progress of the filling, its failures and the schema. Counters stay."""
        for table in ("passes", "failures"):
            self.execute(f"DELETE FROM {table}")
        self.execute(
            "DELETE FROM meta WHERE key IN ('schema', 'source', 'fill_state', 'fill_message', 'mixture')"
        )

    # --- the life of a shard

    def reserve(self, size_bytes: int, owner: str) -> int:
        """Reserve `size_bytes` for a new shard of `owner`; return its id."""
        shard_id = self.add("last_shard_id", 1)
        row = (shard_id, RESERVED, owner, size_bytes)
        self.execute("INSERT INTO shards (id, state, owner, size_bytes) VALUES (?, ?, ?, ?)", row)
        return shard_id

    def publish(
        self,
        shard_id: int,
        owner: str,
        size_bytes: int,
        num_samples: int,
        schema: Schema,
        fill: Mapping[str, Any],
        pass_id: int,
        spans: Sequence[Span],
        decided: Schema | None = None,
    ) -> bool:
        """Make the shard that `owner` has reserved and written live; False if the reservation is not its own
        any more.

        `fill` describes the samples; `decided` is the schema of which most of the first samples were. Raises
        SchemaMismatchError for other fields than the cache's.
        """
        self._admit_schema(schema, decided)
        identity = fill.get("transform")
        is_counted = "part" in fill and self.holdout == fill["holdout"]
        row = {
            "state": LIVE,
            "owner": "",
            "size_bytes": size_bytes,
            "num_samples": num_samples,
            "last_used": int(self.meta("clock", 0)),
            "held_out": int(fill["held_out"]) if is_counted else None,
            "part": int(fill["part"]) if is_counted else WHOLE,
            "transform": identity if isinstance(identity, str) else None,
            "shapes": json.dumps([field.shape for field in schema.fields]),
            "pass_id": pass_id,
            "spans": span_array(spans).tobytes(),
        }
        cursor = self.execute(
            f"UPDATE shards SET {', '.join(f'{name} = ?' for name in row)} WHERE id = ? AND owner = ? AND "
            "state = ?",
            (*row.values(), shard_id, owner, RESERVED),
        )
        return cursor.rowcount > 0

    def retire(self, shard_ids: Iterable[int], state: str = RETIRING) -> None:
        """Have live shards join no new epoch and go first: as RETIRING, until `keep_retiring`, or for good,
        as REPLACED by others that hold their samples.
        """
        self.executemany(
            "UPDATE shards SET state = ? WHERE id = ? AND state IN (?, ?)",
            [(state, shard_id, LIVE, RETIRING) for shard_id in shard_ids],
        )

    def keep_retiring(self) -> None:
        """Have all retiring shards be live again."""
        self.execute("UPDATE shards SET state = ? WHERE state = ?", (LIVE, RETIRING))

    def doom(self, shard_ids: Iterable[int], owner: str = "") -> None:
        """Take shards out of the cache; their rows are to be forgotten when their files are gone: by `owner`,
        and by anybody without one, or when it has ended.
        """
        self.executemany(
            "UPDATE shards SET state = ?, owner = ? WHERE id = ? AND state IN (?, ?, ?)",
            [(DOOMED, owner, shard_id, LIVE, RETIRING, REPLACED) for shard_id in shard_ids],
        )

    def bury(self, reserved: Iterable[tuple[int, str]]) -> list[int]:
        """Doom reservations, (id, owner) each, that are still their owner's; return the ids."""
        taken = []
        for shard_id, owner in reserved:
            cursor = self.execute(
                "UPDATE shards SET state = ?, owner = '' WHERE id = ? AND owner = ? AND state = ?",
                (DOOMED, shard_id, owner, RESERVED),
            )
            taken += [shard_id] * cursor.rowcount
        return taken

    def forget(self, shard_ids: Iterable[int]) -> None:
        """Delete the rows of files that are gone; those of shards stay."""
        self.executemany(
            "DELETE FROM shards WHERE id = ? AND state IN (?, ?)",
            [(shard_id, RESERVED, DOOMED) for shard_id in shard_ids],
        )

    # --- the shards

    def totals(self, view: str = "live") -> tuple[int, int, int]:
        """The shards in a view, their samples, their bytes."""
        row = self.execute(
            f"SELECT count(*), coalesce(sum(num_samples), 0), coalesce(sum(size_bytes), 0) FROM {view}"
        ).fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def bytes_of_files(self) -> int:
        """The bytes of all shards, live or not: what the folder of shards may take."""
        return int(self.execute("SELECT coalesce(sum(size_bytes), 0) FROM shards").fetchone()[0])

    def bytes_in(self, *states: str) -> int:
        """The bytes of the shards in `states`."""
        marks = ", ".join("?" * len(states))
        question = f"SELECT coalesce(sum(size_bytes), 0) FROM shards WHERE state IN ({marks})"
        return int(self.execute(question, states).fetchone()[0])

    def unfinished(self) -> list[FileRow]:
        """The shards that are being written or removed."""
        rows = self.execute("SELECT id, state, owner FROM shards WHERE state IN (?, ?)", (RESERVED, DOOMED))
        return [FileRow(*row) for row in rows.fetchall()]

    def shards(self, *, used_only: bool = False) -> Generator[ShardRow, None, None]:
        """Iterate over the live shards, or those that some epoch has used, by id."""
        return self._scan(f"live WHERE uses > {0 if used_only else -1} ORDER BY id")

    def evictable(self, policy: str, *, used_only: bool) -> Generator[ShardRow, None, None]:
        """Iterate over what may be evicted: first what is retiring, then the rest in the order of the policy;
        with `used_only`, that of it which some epoch has used.

        SQLite sorts, so only the rows that are consumed become objects.
        """
        some = f"uses > {0 if used_only else -1} OR state = '{RETIRING}'"
        return self._scan(f"live WHERE {some} ORDER BY state = '{LIVE}', {ORDERS[policy]}")

    def _scan(self, rows: str) -> Generator[ShardRow, None, None]:
        self.scans.append(self.execute(f"SELECT id, size_bytes, num_samples, uses, last_used FROM {rows}"))
        for row in self.scans[-1]:
            yield ShardRow(*row)

    def shard_columns(self, *columns: str, policy: str = "fifo", view: str = "live") -> list[IntArray]:
        """Columns of the shards in a view as int64 arrays `[n]`, in the order of an eviction policy; -1 for
        NULL.
        """
        names = ", ".join(f"coalesce({name}, -1)" for name in columns)
        rows = self.execute(f"SELECT {names} FROM {view} ORDER BY {ORDERS[policy]}")
        table = np.fromiter(chain.from_iterable(rows.fetchall()), np.int64).reshape(-1, len(columns))
        return list(np.ascontiguousarray(table.T))

    def shard_ids(self, *states: str) -> set[int]:
        """The ids of all shards, or of those in `states`."""
        where = f"shards WHERE state IN ({', '.join('?' * len(states))})" if states else "whole"
        return {row[0] for row in self.execute(f"SELECT id FROM {where}", states).fetchall()}

    def bytes_within(self, ranges: IntArray) -> int:
        """Bytes of the shards in `ranges` `[n, 2]` of ids (first, last), which are disjoint."""
        question = "SELECT coalesce(sum(size_bytes), 0) FROM whole WHERE id BETWEEN ? AND ?"
        return sum(int(self.execute(question, pair).fetchone()[0]) for pair in ranges.tolist())

    def mark_used(self, ranges: IntArray, times: int = 1) -> None:
        """Count `times` more snapshots, the last of them now, of each shard in `ranges` `[n, 2]` of ids."""
        now = self.add("clock", times)
        self.executemany(
            "UPDATE shards SET uses = uses + ?, last_used = ? WHERE id BETWEEN ? AND ?",
            [(times, now, first, last) for first, last in ranges.tolist()],
        )

    def samples_of_others(self, identity: str) -> int:
        """The number of samples that a transform other than `identity` has made.

        Identities made by another version of Python, the part before the colon, cannot be compared: they do
        not count.
        """
        question = f"SELECT coalesce(sum(num_samples), 0) FROM live WHERE {_OF_OTHERS}"
        return int(self.execute(question, _others(identity)).fetchone()[0])

    def outdated(self, identity: str) -> list[OutdatedShard]:
        """The shards whose samples `samples_of_others` counts, by id."""
        question = (
            f"SELECT id, num_samples, size_bytes, pass_id, spans FROM live WHERE {_OF_OTHERS} ORDER BY id"
        )
        rows = self.execute(question, _others(identity)).fetchall()
        return [
            OutdatedShard(shard_id, num_samples, size_bytes, pass_id, _unpack_spans([blob]))
            for shard_id, num_samples, size_bytes, pass_id, blob in rows
        ]

    def spans(self, part: int = WHOLE, identity: str = "") -> dict[int, IntArray]:
        """The spans of each pass that the shards hold: pass id → `span_array`.

        With `part` TRAIN or HELD_OUT, shards that hold only samples of the other split are left out. With the
        `identity` of a transform, so are those of others.
        """
        found: dict[int, list[bytes]] = {}
        other = {TRAIN: HELD_OUT, HELD_OUT: TRAIN}.get(part, -1)
        question = f"SELECT pass_id, spans FROM live WHERE part != ? AND ({_OF_OTHERS}) IS NOT 1"
        rows = self.execute(question, (other, *_others(identity)))
        for pass_id, blob in rows.fetchall():
            found.setdefault(pass_id, []).append(blob)
        return {pass_id: _unpack_spans(blobs) for pass_id, blobs in found.items()}

    # --- the held-out split

    def held_out(self) -> tuple[int, int]:
        """The number of held-out samples counted so far, and the bytes of shards that hold nothing else."""
        if self.holdout is None:
            return 0, 0
        row = self.execute(
            "SELECT coalesce(sum(held_out), 0), "
            "coalesce(sum(CASE WHEN held_out = num_samples THEN size_bytes END), 0) FROM live"
        ).fetchone()
        return int(row[0]), int(row[1])

    def held_out_shards(self) -> set[int]:
        """The shards of held-out samples alone. New samples never evict them; a lower limit does, last."""
        if self.holdout is None:
            return set()
        rows = self.execute("SELECT id FROM live WHERE held_out = num_samples").fetchall()
        return {row[0] for row in rows}

    # --- the schema

    @property
    def schema(self) -> Schema | None:
        """The fields of the cached samples; None before the first."""
        text = self.meta("schema")
        return None if text is None else Schema.from_json(text)

    def shapes(self, ranges: IntArray | None = None) -> list[tuple[tuple[int, ...] | None, ...]]:
        """The different shapes of the fields in the shards of `ranges` `[n, 2]` of ids, replaced or not; in
        all live ones without `ranges`.
        """
        view, pairs = ("live", [[0, 2**62]]) if ranges is None else ("whole", ranges.tolist())
        found: set[str] = set()
        for pair in pairs:
            rows = self.execute(f"SELECT DISTINCT shapes FROM {view} WHERE id BETWEEN ? AND ?", pair)
            found.update(text for (text,) in rows.fetchall())
        return [tuple(None if one is None else tuple(one) for one in json.loads(text)) for text in found]

    def _admit_schema(self, schema: Schema, decided: Schema | None) -> None:
        """Widen the cache's schema by that of a shard.

        The first shard may hold integers alone where samples of the schema `decided` have floats. Raises
        SchemaMismatchError for other fields.
        """
        known = self.schema
        merged = schema if known is None else known.merge(schema)
        if known is None and decided is not None:
            merged = merged.with_dtypes(merged.merge(decided).dtypes)
        if merged != known:
            self.set_meta("schema", merged.to_json())

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


def _others(identity: str) -> tuple[str, int, str]:
    """The arguments of `_OF_OTHERS`."""
    version = identity.partition(":")[0] + ":" if identity else "no version"
    return identity, len(version), version


def _unpack_spans(blobs: Iterable[bytes]) -> IntArray:
    return np.frombuffer(b"".join(blobs), np.int64).reshape(-1, 4)
