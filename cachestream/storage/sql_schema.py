"""The SQL schema of the catalogue, and the values that its rows can have.

SQLite has no checksums: after a bit flip, a page may be well-formed and hold another value. A value that is
possible but wrong is found by comparison with the shards, which describe themselves (`recovery.verify`).
"""

from __future__ import annotations

import json
import sqlite3
from functools import cache
from typing import TYPE_CHECKING, Final, get_args

from cachestream.schema import Container, FieldKind, Schema, storage_of

if TYPE_CHECKING:
    from cachestream.storage.tables import Tables

APPLICATION_ID: Final = 0x43535452  # "CSTR"
SCHEMA_VERSION: Final = 1
# The order in which a policy evicts shards, in SQL. The id breaks ties: older shards are evicted first.
ORDERS: Final = {
    "lru": "last_used, id",
    "fifo": "id",
    "least-fresh": "uses DESC, last_used, id",
    "none": "id",  # for listings: it evicts nothing
}

STATEMENTS: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE schemas (id INTEGER PRIMARY KEY, json TEXT NOT NULL UNIQUE)",
    """CREATE TABLE passes (
        id INTEGER PRIMARY KEY, plan TEXT NOT NULL UNIQUE, length INTEGER, next_position INTEGER NOT NULL,
        evicted_before INTEGER NOT NULL)""",
    """CREATE TABLE claims (
        id INTEGER PRIMARY KEY, pass_id INTEGER NOT NULL, position INTEGER NOT NULL,
        offset INTEGER NOT NULL, stop INTEGER NOT NULL, owner TEXT NOT NULL)""",
    """CREATE TABLE shards (
        id INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL, num_samples INTEGER NOT NULL,
        uses INTEGER NOT NULL, last_used INTEGER NOT NULL, schema_id INTEGER NOT NULL,
        pass_id INTEGER NOT NULL, spans BLOB NOT NULL)""",
    """CREATE TABLE reservations (
        id INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL, owner TEXT NOT NULL, doomed INTEGER NOT NULL)""",
    """CREATE TABLE suspects (
        pass_id INTEGER NOT NULL, position INTEGER NOT NULL, deaths INTEGER NOT NULL, reason TEXT NOT NULL,
        PRIMARY KEY (pass_id, position)) WITHOUT ROWID""",
    """CREATE TABLE failures (
        kind TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, example TEXT NOT NULL,
        PRIMARY KEY (kind, reason)) WITHOUT ROWID""",
    # The sums over all shards, kept by triggers: every reservation reads them.
    "CREATE TABLE totals (shards INTEGER NOT NULL, samples INTEGER NOT NULL, size_bytes INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0, 0, 0)",
    """CREATE TRIGGER shard_comes AFTER INSERT ON shards BEGIN
        UPDATE totals SET shards = shards + 1, samples = samples + NEW.num_samples,
            size_bytes = size_bytes + NEW.size_bytes; END""",
    """CREATE TRIGGER shard_goes AFTER DELETE ON shards BEGIN
        UPDATE totals SET shards = shards - 1, samples = samples - OLD.num_samples,
            size_bytes = size_bytes - OLD.size_bytes; END""",
    """CREATE TRIGGER shard_resized AFTER UPDATE OF size_bytes ON shards BEGIN
        UPDATE totals SET size_bytes = size_bytes + NEW.size_bytes - OLD.size_bytes; END""",
)

# In a cache with a held-out split: a shard's number of held-out samples, and the `part` of its spans that it
# holds (WHOLE, TRAIN, HELD_OUT). A shard without a row is whole, and not counted yet.
SPLIT_STATEMENTS: Final = (
    """CREATE TABLE IF NOT EXISTS splits (
        id INTEGER PRIMARY KEY, held_out INTEGER NOT NULL, part INTEGER NOT NULL)""",
    """CREATE TRIGGER IF NOT EXISTS split_goes AFTER DELETE ON shards BEGIN
        DELETE FROM splits WHERE id = OLD.id; END""",
)

# --- impossible values

# The errors that a damaged value may raise.
DAMAGE_ERRORS: Final = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
_COUNTERS: Final = (
    "size_limit", "min_free", "last_shard_id", "clock", "evicted_shards", "evicted_samples",
    "evicted_unused_samples", "written_samples", "quarantined", "listing", "is_looking", "epoch_waits",
    "epoch_waits_seen",
)  # fmt: skip
_SETTINGS: Final = ("cache_id", "size_limit", "min_free", "eviction")
_MOST_ID: Final = 10**17  # as many digits as a file name may have

# Conditions that hold for every row, besides the declared types of the columns.
_RULES: Final = {
    "passes": "next_position BETWEEN 0 AND coalesce(length, next_position)",
    "claims": "position BETWEEN 0 AND stop AND offset >= 0",
    "shards": (
        "id > 0 AND size_bytes >= 0 AND num_samples >= 0 AND uses >= 0 AND length(spans) % 32 = 0 "
        "AND schema_id IN (SELECT id FROM schemas)"
    ),
    "reservations": "size_bytes >= 0 AND doomed IN (0, 1)",
}


def impossible_value(tables: Tables) -> str | None:
    """The first impossible value of a catalogue; None without one.

    Raises one of DAMAGE_ERRORS where a value cannot be read.
    """
    if not has_expected_tables(tables):
        return "its tables are not those of a catalogue"
    names = tables.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'meta'"
    ).fetchall()
    for (table,) in names:
        columns = tables.execute(f"PRAGMA table_info({table})").fetchall()
        holds = " AND ".join([*map(_type_rule, columns), _RULES.get(table, "1")])
        if tables.execute(f"SELECT 1 FROM {table} WHERE ({holds}) IS NOT 1 LIMIT 1").fetchone():  # noqa: S608
            return f"a row of '{table}' makes no sense"
    if tables.execute("SELECT count(*) FROM totals").fetchone() != (1,):
        return "the sums are missing"
    return _impossible_setting(tables) or _impossible_text(tables)


def _type_rule(column: tuple[int, str, str, int, object, int]) -> str:
    """The SQL condition that a value has the declared type of its column, a row of `PRAGMA table_info`."""
    _, name, declared, is_required, _, is_key = column
    null = "" if is_required or is_key else ", 'null'"
    return f"typeof({name}) IN ('{declared.lower()}'{null})"


def has_expected_tables(tables: Tables) -> bool:
    """Return whether the tables and triggers are those that this version creates."""
    return tables.execute(_LAYOUT).fetchall() in (
        _layout_of(STATEMENTS),
        _layout_of(STATEMENTS + SPLIT_STATEMENTS),
    )


_LAYOUT: Final = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"


@cache
def _layout_of(statements: tuple[str, ...]) -> list[tuple[str, ...]]:
    model = sqlite3.connect(":memory:")
    try:
        for statement in statements:
            model.execute(statement)
        return model.execute(_LAYOUT).fetchall()
    finally:
        model.close()


def _impossible_setting(tables: Tables) -> str | None:
    meta = tables.all_meta()
    for key in _COUNTERS:
        if key in meta and not (type(meta[key]) is int and meta[key] >= 0):
            return f"{key} is {meta[key]!r}"
    missing = [key for key in _SETTINGS if key not in meta]
    if missing:
        return f"{missing[0]} is missing"
    if not isinstance(meta["cache_id"], str) or meta["eviction"] not in ORDERS:
        return "cache_id or eviction makes no sense"
    if tables.holdout is not None and not 0 < tables.holdout < 1:
        return f"holdout is {tables.holdout}"
    (last,) = tables.execute(
        "SELECT max(coalesce((SELECT max(id) FROM shards), 0), "
        "coalesce((SELECT max(id) FROM reservations), 0))"
    ).fetchone()
    if not last <= meta.get("last_shard_id", 0) < _MOST_ID:
        return f"last_shard_id is {meta.get('last_shard_id', 0)}, and there is a shard {last}"
    return None


def _impossible_text(tables: Tables) -> str | None:
    schemas = [_read_schema(text) for (text,) in tables.execute("SELECT json FROM schemas").fetchall()]
    known = tables.meta("schema")
    if known is not None:
        merged = _read_schema(known)
        if any(merged.merge(schema) != merged for schema in schemas):
            return "the schema does not cover that of all shards"
    labels = tables.meta("label_names")
    if labels is not None:
        count, digest = json.loads(labels)
        if type(count) is not int or not isinstance(digest, str):
            return "label_names makes no sense"
    for row in tables.passes():
        json.loads(row.plan)
    tables.failures(), tables.reservations(), tables.votes()  # raises for invalid text
    return None


def _read_schema(text: str) -> Schema:
    """Parse a schema; raises one of DAMAGE_ERRORS for one that no shard can have."""
    schema = Schema.from_json(text)
    for field in schema.fields:
        storage_of(field.dtype)
        numbers = (field.ndim, *(field.shape or ()))
        if field.kind not in get_args(FieldKind) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"the field '{field.name}' makes no sense")
    if schema.container not in get_args(Container):
        raise ValueError(f"samples are no {schema.container!r}")
    return schema
