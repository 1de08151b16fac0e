"""Verification and repair: compare catalogue, directory and checksums, and rebuild a lost catalogue."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from cachestream.errors import CorruptShardError, SchemaMismatchError
from cachestream.schema import Schema, ShardRow, Span
from cachestream.storage.books import contradiction, sizes_of_shards, wrong_sizes
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.layout import (
    TEMPORARY_SUFFIX,
    Directory,
    move_aside,
    remove_if_there,
    size_of_file,
    sync_folder,
)
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.publish import merge_schema
from cachestream.storage.reservations import Reservations
from cachestream.storage.shard import SUFFIX, MappedShard, shard_path
from cachestream.storage.status import VerifyReport
from cachestream.storage.tables import Tables

# The file names of published shards and of shards being written; the group is the shard's id.
SHARD_NAME: Final = re.compile(rf"([0-9]{{12,18}}){re.escape(SUFFIX)}")
TEMPORARY_NAME: Final = re.compile(rf"([0-9]{{12,18}}){re.escape(TEMPORARY_SUFFIX)}")
# Processes with ids from the lost catalogue may still be writing: those ids must not be given out again.
_IDS_SKIPPED: Final = 1000


def rebuild(directory: Directory, tables: Tables) -> None:
    """Fill new `tables` from the shard files; unreadable ones are quarantined.

    Only headers are read: data is verified on first use. Temporary files are removed: their reservations are
    lost, and their samples will be fetched again.
    """
    importer = _RowImporter(tables)
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
            importer.insert(int(match[1]), path)
        except (CorruptShardError, SchemaMismatchError):
            move_aside(directory, path, int(tables.meta("size_limit")))
            tables.add("quarantined", 1)
    tables.set_meta("last_shard_id", last_id)
    tables.set_meta("rebuilt", time.time())


class _RowImporter:
    """Inserts rows for existing shards, and caches the ids that many of them share."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._passes: dict[str, int] = {row.plan: row.id for row in tables.passes()}
        self._schema_ids: dict[Schema, int] = {}
        self._source = tables.meta("source")

    def insert(self, shard_id: int, path: str) -> None:
        """Insert the shard at `path`; raises CorruptShardError, or SchemaMismatchError for other fields."""
        tables = self._tables
        shard = MappedShard(path)
        if not shard.num_samples:  # no writer makes one, and its spans would hide samples that are not cached
            raise CorruptShardError(f"{path}: it holds no samples")
        if shard.schema not in self._schema_ids:
            self._schema_ids[shard.schema] = merge_schema(tables, shard.schema)
        pass_id, spans = self._pass_and_spans(shard.fill)
        row = ShardRow(shard_id, size_of_file(path), shard.num_samples, 0, 0)
        tables.insert_shard(row, self._schema_ids[shard.schema], pass_id, spans)
        if "part" in shard.fill and tables.holdout is None:
            tables.hold_out(float(shard.fill["holdout"]))
        tables.enter_split(shard_id, shard.fill)

    def _pass_and_spans(self, fill: dict[str, Any]) -> tuple[int, list[Span]]:
        """The pass and the spans that a shard's `fill` names; pass 0 where it names none."""
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
            # The position in the pass is lost: the worker begins it again and skips what is cached.
            self._passes[plan] = self._tables.insert_pass(plan, length, -1)
        return self._passes[plan], spans


@dataclass(frozen=True, slots=True)
class _Findings:
    """The problems of shards, by id: damage, a missing file, a header that contradicts the catalogue."""

    corrupt: dict[int, str]
    missing: list[int]
    contradicted: dict[int, str]

    def among(self, ids: Collection[int]) -> _Findings:
        """The findings for the shards `ids`; others were evicted meanwhile."""
        return _Findings(
            {i: problem for i, problem in self.corrupt.items() if i in ids},
            [i for i in self.missing if i in ids],
            {i: problem for i, problem in self.contradicted.items() if i in ids},
        )


class Checker:
    """Verifies one cache; `put_aside(shard_id, reason)` quarantines a shard, or deletes a lost one's row."""

    def __init__(
        self,
        directory: Directory,
        catalogue: Catalogue,
        reservations: Reservations,
        put_aside: Callable[[int, str], None],
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._reservations = reservations
        self._put_aside = put_aside

    def verify(self, repair: bool, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
        """Check everything; with `repair`, quarantine damaged shards and remove unknown files."""
        problem = self._catalogue.integrity_problem()
        if problem is not None:
            if not repair:
                return VerifyReport(0, 0, (), (), (), problem, repaired=False)
            self._catalogue.heal()
        if repair:
            self._reservations.clear_dead()
        with self._catalogue.reading() as tables:
            rows = list(tables.shards())
        found = self._check(rows, on_progress)
        if repair and found.contradicted:
            self._catalogue.heal(condemned=True)
        problem = problem or next(iter(found.contradicted.values()), None)
        problem = check_books(self._directory, self._catalogue, correct=repair) or problem
        if repair:
            with self._catalogue.reading() as tables:
                found = found.among(tables.shard_ids())
            for shard_id, reason in found.corrupt.items():
                self._put_aside(shard_id, reason)
            for shard_id in found.missing:
                self._put_aside(shard_id, f"shard {shard_id}: missing")
        orphans = _files_to_remove(self._directory, self._catalogue) if repair else []
        with self._catalogue.reading() as tables:
            shards, samples, _ = tables.totals()
            if not repair:
                orphans = list(_unknown_files(self._directory, tables))
                found = found.among(tables.shard_ids())
        stuck = any(not _remove_file(path) for path in orphans) if repair else bool(orphans)
        corrupt, missing = tuple(found.corrupt.values()), tuple(found.missing)
        return VerifyReport(
            shards, samples, corrupt, missing, tuple(orphans), problem, repaired=repair and not stuck
        )

    def _check(self, rows: list[ShardRow], on_progress: Callable[[int, int], None] | None) -> _Findings:
        found = _Findings({}, [], {})
        for done, row in enumerate(rows, 1):
            path = shard_path(self._directory.root, row.id)
            try:
                shard = MappedShard(path)
                shard.verify()
                if shard.num_samples != row.num_samples:
                    found.corrupt[row.id] = (
                        f"{path}: {shard.num_samples} samples, the catalogue says {row.num_samples}"
                    )
                with self._catalogue.reading() as tables:
                    problem = contradiction(tables, row.id, shard)
                if problem is not None:
                    found.contradicted[row.id] = problem
                shard.close()
            except CorruptShardError as error:
                if os.path.lexists(path):
                    found.corrupt[row.id] = str(error)
                else:
                    found.missing.append(row.id)
            if on_progress is not None:
                on_progress(done, len(rows))
        return found


def check_books(directory: Directory, catalogue: Catalogue, *, correct: bool) -> str | None:
    """Compare recorded sizes with the files, and sums with the rows; return the first problem, or None.

    With `correct`, both are corrected: a bit has flipped, or the shards were copied from another disk.
    """
    with translated_disk_errors(directory.shards, "listing it"):
        actual = sizes_of_shards(directory.shards)
    with catalogue.reading() as tables:
        wrong, sums, totals = wrong_sizes(tables, actual), tables.sums(), tables.totals()
    if not wrong and sums == totals:
        return None
    if correct:
        with catalogue.transaction() as tables:
            tables.correct_sizes(wrong)
    return (
        f"{len(wrong)} shards are booked with a wrong size"
        if wrong
        else f"the sums are {totals} and not {sums}"
    )


def remove_leftovers(directory: Directory, catalogue: Catalogue) -> int:
    """Remove our files that belong to no shard and no writer (after a power loss); return their number."""
    leftovers = [path for path in _files_to_remove(directory, catalogue) if _id_in(path) is not None]
    leftovers += [
        os.path.join(directory.root, name)
        for name in os.listdir(directory.root)
        if name.startswith("cache.json.")
    ]
    removed = sum(map(_remove_file, leftovers))
    if removed:
        with translated_disk_errors(directory.shards):
            sync_folder(directory.shards)
    return removed


def _files_to_remove(directory: Directory, catalogue: Catalogue) -> list[str]:
    """Unknown files among the shards, whose ids are never given out from now on.

    With an older copy of the catalogue, an id could be given out again, and the new shard's file be removed.
    """
    with catalogue.transaction() as tables:
        paths = list(_unknown_files(directory, tables))
        ids = [shard_id for path in paths if (shard_id := _id_in(path)) is not None]
        tables.set_meta("last_shard_id", max([int(tables.meta("last_shard_id", 0)), *ids]))
    return paths


def _id_in(path: str) -> int | None:
    """The shard's id in the name of one of our files; None for other files."""
    name = os.path.basename(path)
    match = SHARD_NAME.fullmatch(name) or TEMPORARY_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _unknown_files(directory: Directory, tables: Tables) -> Iterator[str]:
    """Files among the shards that belong to no shard and no reservation."""
    reserved = {reservation.id for reservation in tables.reservations()}
    known = tables.shard_ids() | reserved
    for name in sorted(os.listdir(directory.shards)):
        shard, temporary = SHARD_NAME.fullmatch(name), TEMPORARY_NAME.fullmatch(name)
        is_known = (shard is not None and int(shard[1]) in known) or (
            temporary is not None and int(temporary[1]) in reserved
        )
        if not is_known:
            yield os.path.join(directory.shards, name)


def _remove_file(path: str) -> bool:
    """Remove the file `path` and return whether it is gone. A folder is not ours, and stays."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True
    if is_folder:
        return False
    with translated_disk_errors(path, "removing it"):
        remove_if_there(path)
    return True
