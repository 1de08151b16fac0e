"""The layout of the catalogue: its tables, and what tells it from other SQLite files."""

from __future__ import annotations

from typing import Final

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "SPLIT_STATEMENTS", "STATEMENTS"]

APPLICATION_ID: Final = 0x43535452  # "CSTR"
SCHEMA_VERSION: Final = 1

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
    # The sums over all shards, kept by the triggers: every reservation asks for them.
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

# Of a cache that holds samples out: how many of a shard's, and which `part` of its stretches of the remote the shard has
# (WHOLE, TRAIN, HELD_OUT). A shard that is not listed is whole, and its samples are not counted yet.
SPLIT_STATEMENTS: Final = (
    """CREATE TABLE IF NOT EXISTS splits (
        id INTEGER PRIMARY KEY, held_out INTEGER NOT NULL, part INTEGER NOT NULL)""",
    """CREATE TRIGGER IF NOT EXISTS split_goes AFTER DELETE ON shards BEGIN
        DELETE FROM splits WHERE id = OLD.id; END""",
)
