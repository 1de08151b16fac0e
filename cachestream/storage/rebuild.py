"""Making the catalogue anew from the shard files, each of which says what it is."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Final

from cachestream.errors import CorruptShardError, SchemaMismatchError
from cachestream.model import Schema, ShardRow, Span
from cachestream.storage.directory import TEMPORARY_SUFFIX, Directory, remove_if_there, size_of_file
from cachestream.storage.publish import merge_schema
from cachestream.storage.quarantine import move_aside
from cachestream.storage.shard import SUFFIX, MappedShard
from cachestream.storage.tables import Tables

__all__ = ["SHARD_NAME", "TEMPORARY_NAME", "rebuild"]

# What a writer and a published shard are called; the group is the shard's id.
SHARD_NAME: Final = re.compile(rf"([0-9]{{12,18}}){re.escape(SUFFIX)}")
TEMPORARY_NAME: Final = re.compile(rf"([0-9]{{12,18}}){re.escape(TEMPORARY_SUFFIX)}")
# Processes that hold ids of the lost catalogue may still be writing: theirs must not be given out again.
_IDS_SKIPPED: Final = 1000


def rebuild(directory: Directory, tables: Tables) -> None:
    """Fill new `tables` from the shard files; those that cannot be read are put aside.

    Only headers are read: the data is verified on first use, like all data. What was being written is
    removed: its reservation is lost, and its samples will be fetched again.
    """
    book = _Book(tables)
    if tables.holdout is not None:
        tables.hold_out(tables.holdout)
    last_id = _IDS_SKIPPED if os.path.exists(directory.settings) else 0
    for name in sorted(os.listdir(directory.shards)):
        if TEMPORARY_NAME.fullmatch(name):
            remove_if_there(os.path.join(directory.shards, name))
        match = SHARD_NAME.fullmatch(name)
        if match is None:
            continue
        last_id = max(last_id, int(match[1]) + _IDS_SKIPPED)
        path = os.path.join(directory.shards, name)
        try:
            book.adopt(int(match[1]), path)
        except (CorruptShardError, SchemaMismatchError):
            move_aside(directory, path, int(tables.meta("size_limit")))
            tables.add("quarantined", 1)
    tables.set_meta("last_shard_id", last_id)
    tables.set_meta("rebuilt", time.time())


class _Book:
    """The rows of adopted shards, with what many of them share looked up once."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._passes: dict[str, int] = {row.plan: row.id for row in tables.passes()}
        self._schema_ids: dict[Schema, int] = {}
        self._source = tables.meta("source")

    def adopt(self, shard_id: int, path: str) -> None:
        """Enter the shard at `path`; raises CorruptShardError, or SchemaMismatchError for other fields."""
        tables = self._tables
        shard = MappedShard(path)
        if not shard.num_samples:  # no writer makes one: its spans would pass over samples that nobody has
            raise CorruptShardError(f"{path}: it holds no samples")
        if shard.schema not in self._schema_ids:
            self._schema_ids[shard.schema] = merge_schema(tables, shard.schema)
        pass_id, spans = self._place(shard.fill)
        row = ShardRow(shard_id, size_of_file(path), shard.num_samples, 0, 0)
        tables.insert_shard(row, self._schema_ids[shard.schema], pass_id, spans)
        if "part" in shard.fill and tables.holdout is None:
            tables.hold_out(float(shard.fill["holdout"]))
        tables.enter_split(shard_id, shard.fill)

    def _place(self, fill: dict[str, Any]) -> tuple[int, list[Span]]:
        """The pass and the spans that a shard's `fill` tells; pass 0 where it tells none."""
        try:
            source, plan, length = fill["source"], fill["plan"], fill["length"]
            spans = [Span((int(a), int(b)), (int(c), int(d))) for a, b, c, d in fill["spans"]]
            numbers = [length or 0, *(number for span in spans for number in (*span.start, *span.stop))]
            if max(map(abs, numbers)) >= 2**63:
                return 0, []
        except (KeyError, TypeError, ValueError, OverflowError):
            return 0, []
        if not (isinstance(source, str) and isinstance(plan, str) and isinstance(length, int | None)):
            return 0, []
        if self._source is None:
            self._tables.set_meta("source", source)
            self._source = source
        if plan not in self._passes:
            # Where the pass had got to is lost: the worker begins it anew and skips what is cached.
            self._passes[plan] = self._tables.insert_pass(plan, length, -1)
        return self._passes[plan], spans
