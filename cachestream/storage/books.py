"""Values of a catalogue that cannot be true.

SQLite has no checksums: after a bit flip, a page may be well-formed and hold another value. A value that is
possible but wrong is found by comparison with the shards, which describe themselves (`recovery.verify`).
"""

from __future__ import annotations

import json
import sqlite3
from functools import cache
from typing import Final, get_args

from cachestream.schema import Container, FieldKind, Schema
from cachestream.storage.eviction import ORDERS
from cachestream.storage.shard import storage_of
from cachestream.storage.tables import SPLIT_STATEMENTS, STATEMENTS, Tables

# The errors that a damaged value may raise.
DAMAGE_ERRORS: Final = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
_COUNTERS: Final = (
    "size_limit", "min_free", "last_shard_id", "clock", "evicted_shards", "evicted_samples", "evicted_bytes",
    "evicted_unused_samples", "written_samples", "written_bytes", "quarantined", "lost_shards", "listing",
    "is_looking", "epoch_waits", "epoch_waits_seen",
)  # fmt: skip
_SETTINGS: Final = ("cache_id", "size_limit", "min_free", "eviction")
_MOST_ID: Final = 10**17  # as many digits as a file name may have

# For each table: its integer columns, and a condition that holds for every row.
_ROWS: Final = {
    "schemas": (("id",), "typeof(json) = 'text'"),
    "passes": (
        ("id", "next_position", "evicted_before"),
        (
            "typeof(plan) = 'text' AND typeof(length) IN ('integer', 'null') "
            "AND next_position BETWEEN 0 AND coalesce(length, next_position)"
        ),
    ),
    "claims": (
        ("id", "pass_id", "position", "offset", "stop"),
        "typeof(owner) = 'text' AND position BETWEEN 0 AND stop AND offset >= 0",
    ),
    "shards": (
        ("id", "size_bytes", "num_samples", "uses", "last_used", "schema_id", "pass_id"),
        (
            "id > 0 AND size_bytes >= 0 AND num_samples >= 0 AND uses >= 0 AND typeof(spans) = 'blob' "
            "AND length(spans) % 32 = 0 AND schema_id IN (SELECT id FROM schemas)"
        ),
    ),
    "reservations": (
        ("id", "size_bytes", "doomed"),
        "typeof(owner) = 'text' AND size_bytes >= 0 AND doomed IN (0, 1)",
    ),
    "suspects": (("pass_id", "position", "deaths"), "typeof(reason) = 'text'"),
    "failures": (
        ("count",),
        "typeof(kind) = 'text' AND typeof(reason) = 'text' AND typeof(example) = 'text'",
    ),
    "totals": (("shards", "samples", "size_bytes"), "1"),
}


def impossible_value(tables: Tables) -> str | None:
    """Return the first impossible value of a catalogue, or None.

    Also raises one of DAMAGE_ERRORS where a value cannot be read.
    """
    if not has_expected_tables(tables):
        return "its tables are others"
    for table, (integers, rule) in _ROWS.items():
        holds = " AND ".join([*(f"typeof({name}) = 'integer'" for name in integers), rule])
        if tables.execute(f"SELECT 1 FROM {table} WHERE ({holds}) IS NOT 1 LIMIT 1").fetchone():  # noqa: S608
            return f"a row of '{table}' makes no sense"
    if tables.execute("SELECT count(*) FROM totals").fetchone() != (1,):
        return "the sums are missing"
    return _impossible_setting(tables) or _impossible_text(tables)


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
    schemas, known = _schemas(tables).values(), tables.meta("schema")
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


def _schemas(tables: Tables) -> dict[int, Schema]:
    rows = tables.execute("SELECT id, json FROM schemas").fetchall()
    return {key: _read_schema(text) for key, text in rows}


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
