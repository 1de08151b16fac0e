"""Hold the catalogue against the directory, and each shard against its checksums; repair; rebuild.

The catalogue can be lost: shards describe themselves, so it is rebuilt from them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from cachestream.errors import CorruptShardError, SchemaMismatchError
from cachestream.model import ShardRow, Span
from cachestream.storage.admission import Admission
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.directory import Directory, allocated_bytes, sync_folder
from cachestream.storage.publish import merge_schema
from cachestream.storage.shard import SUFFIX, MappedShard, shard_path
from cachestream.storage.status import VerifyReport
from cachestream.storage.tables import Tables

__all__ = ["put_aside", "rebuild", "verify"]

QUARANTINED_AT_MOST: Final = 4


def put_aside(directory: Directory, tables: Tables, shard_id: int) -> bool:
    """Quarantine a shard: its row goes, its file is kept aside (the newest few); whether it was there."""
    known = tables.shard(shard_id)
    tables.delete_shards([shard_id])
    path = shard_path(directory.root, shard_id)
    moved = _move_aside(directory, path)
    if known is not None:
        tables.add("quarantined", 1)
        tables.add("evicted_shards", 1)  # so that the worker knows there is something to fetch again
    return known is not None or moved


def _move_aside(directory: Directory, path: str) -> bool:
    try:
        os.replace(path, os.path.join(directory.quarantine, os.path.basename(path)))
    except FileNotFoundError:
        return False
    kept = sorted(os.scandir(directory.quarantine), key=lambda entry: entry.name)
    for entry in kept[:-QUARANTINED_AT_MOST]:
        os.unlink(entry.path)
    sync_folder(directory.quarantine)
    return True


def verify(
    directory: Directory,
    catalogue: Catalogue,
    admission: Admission,
    repair: bool,
    on_progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Check everything; with `repair` quarantine what is damaged and drop what nobody knows."""
    problem = catalogue.integrity_problem()
    admission.clear_dead()
    with catalogue.reading() as tables:
        known = {row.id: row for row in tables.shards()}
        in_work = {reservation.id for reservation in tables.reservations()}
    corrupt, missing = _check_shards(directory, known, on_progress)
    with catalogue.transaction() as tables:
        # Between the two looks shards may have been evicted or published: judge by the rows of now.
        now = tables.shard_ids()
        corrupt = {i: why for i, why in corrupt.items() if i in now}
        missing = [i for i in missing if i in now]
        in_work |= {reservation.id for reservation in tables.reservations()}
        orphans = _orphans(directory, now | in_work)
        if repair:
            for shard_id in (*corrupt, *missing):
                put_aside(directory, tables, shard_id)
            for path in orphans:
                os.unlink(path)
        shards, samples, _ = tables.totals()
    return VerifyReport(
        shards,
        samples,
        tuple(corrupt.values()),
        tuple(missing),
        tuple(orphans),
        problem,
        repair and problem is None,
    )


def _check_shards(
    directory: Directory, known: dict[int, ShardRow], on_progress: Callable[[int, int], None] | None
) -> tuple[dict[int, str], list[int]]:
    corrupt: dict[int, str] = {}
    missing: list[int] = []
    for done, row in enumerate(known.values(), 1):
        path = shard_path(directory.root, row.id)
        try:
            shard = MappedShard(path)
            shard.verify()
            if shard.num_samples != row.num_samples:
                corrupt[row.id] = f"{path}: {shard.num_samples} samples, the catalogue says {row.num_samples}"
            shard.close()
        except CorruptShardError as error:
            if os.path.exists(path):
                corrupt[row.id] = str(error)
            else:
                missing.append(row.id)
        if on_progress is not None:
            on_progress(done, len(known))
    return corrupt, missing


def remove_orphans(directory: Directory, catalogue: Catalogue) -> int:
    """Remove shard files that belong to nobody (left by a power loss); returns how many."""
    with catalogue.transaction() as tables:
        known = tables.shard_ids() | {reservation.id for reservation in tables.reservations()}
        orphans = _orphans(directory, known)
        for path in orphans:
            os.unlink(path)
    return len(orphans)


def _orphans(directory: Directory, known: set[int]) -> list[str]:
    """Files among the shards that belong to no shard and to no reservation."""
    paths = []
    for entry in os.scandir(directory.shards):
        stem = entry.name.partition(".")[0]
        if not stem.isdigit() or int(stem) not in known:
            paths.append(entry.path)
    return sorted(paths)


def rebuild(directory: Directory, catalogue: Catalogue) -> int:
    """Fill an empty catalogue from the shard files; the shards that cannot be read are put aside.

    The old catalogue is to be moved away first. Returns the number of shards. Idempotent: shards that
    have a row already are left alone.
    """
    with catalogue.transaction() as tables:
        known = tables.shard_ids()
        passes: dict[str, int] = {row.plan: row.id for row in tables.passes()}
        for name in sorted(os.listdir(directory.shards)):
            path = os.path.join(directory.shards, name)
            stem = name.partition(".")[0]
            if not (stem.isdigit() and name.endswith(SUFFIX)) or int(stem) in known:
                continue
            try:
                shard = MappedShard(path)
                shard.verify()
                _adopt(tables, int(stem), shard, passes)
            except (CorruptShardError, SchemaMismatchError):
                _move_aside(directory, path)
        ids = tables.shard_ids()
        tables.set_meta("last_shard_id", max(ids, default=int(tables.meta("last_shard_id", 0))))
        tables.set_meta("rebuilt", time.time())
        return len(ids)


def _adopt(tables: Tables, shard_id: int, shard: MappedShard, passes: dict[str, int]) -> None:
    plan, length = shard.fill["plan"], shard.fill["length"]
    if plan not in passes:
        # Where the pass had got to is lost: the worker begins it anew and skips what is cached.
        passes[plan] = tables.insert_pass(plan, length, -1)
    spans = [Span((s[0], s[1]), (s[2], s[3])) for s in shard.fill["spans"]]
    row = ShardRow(shard_id, allocated_bytes(os.stat(shard.path)), shard.num_samples, 0, 0)
    tables.insert_shard(row, merge_schema(tables, shard.schema), passes[plan], spans)
    if tables.meta("source") is None:
        tables.set_meta("source", shard.fill["source"])
    shard.close()
