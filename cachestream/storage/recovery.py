"""Opening, rebuilding, verification and repair: the catalogue is compared with the self-describing shards."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import format_size
from cachestream.errors import CacheError, CorruptShardError, SchemaMismatchError
from cachestream.linux import boot_id, kind_of, move, other_owner
from cachestream.schema import Span, spans_of
from cachestream.shard_format import SUFFIX
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.layout import (
    TEMPORARY_SUFFIX,
    Directory,
    accounted_bytes,
    bytes_below,
    move_aside,
    remove_if_there,
    size_of_file,
)
from cachestream.storage.locks import file_identity, is_held, locked
from cachestream.storage.os_errors import (
    CatalogueDamagedError,
    CatalogueUnreadableError,
    check_own,
    lock_timeout,
    translated_disk_errors,
)
from cachestream.storage.settings import Settings, find_settings, read_settings, write_settings
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.storage.tables import STRAY
from cachestream.storage.telemetry import forget_dead_loaders

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.tables import Tables

logger = logging.getLogger("cachestream")

# The file names of published shards and of shards being written; the group is the shard's id.
_SHARD_NAME: Final = re.compile(rf"([0-9]{{12,18}}){re.escape(SUFFIX)}")
_TEMPORARY_NAME: Final = re.compile(rf"([0-9]{{12,18}}){re.escape(TEMPORARY_SUFFIX)}")
# Processes with ids from the lost catalogue may still be writing: those ids must not be given out again.
_IDS_SKIPPED: Final = 1000
_OPEN_TIMEOUT_S: Final = 60.0


def open_catalogue(directory: Directory) -> Catalogue:
    """Return the catalogue of `directory`, created or rebuilt if need be."""
    catalogue = Catalogue(directory.catalogue)
    if _trouble(directory, catalogue) is not None:
        rebuild_catalogue(directory, catalogue)
    catalogue.is_mended = partial(is_held, directory.supervisor_lock)
    settings = find_settings(directory)
    if settings is None or settings.boot != boot_id():
        with suppress(CacheError):  # where nothing can be written, or not now
            _note_boot(directory, catalogue)
    return catalogue


def opening_lock(directory: Directory) -> AbstractContextManager[None]:
    """Keep other processes from making the catalogue."""
    path = directory.opening_lock
    return locked(path, _OPEN_TIMEOUT_S, lock_timeout(path, _OPEN_TIMEOUT_S))


def _note_boot(directory: Directory, catalogue: Catalogue) -> None:
    with catalogue.transaction():
        settings = find_settings(directory)
        if settings is None:
            settings = Settings.default(directory.root)
            logger.warning(
                "%s: cache.json and its copy are lost; its limit is %s now",
                directory.root,
                format_size(settings.size_limit),
            )
        write_settings(directory, settings)


def _trouble(directory: Directory, catalogue: Catalogue) -> str | None:
    """The reason to make the catalogue anew; None for one that is sound."""
    if (problem := catalogue.problem()) is not None:
        return problem
    settings = find_settings(directory)
    if settings is None or settings.boot in (None, boot_id()):
        return None
    if not os.access(directory.root, os.W_OK, effective_ids=True) or other_owner(directory.root) is not None:
        return None  # this process only looks
    # A power cut may leave pages of different times, which together make sense to SQLite.
    if settings.seal == catalogue.digest() and _shard_files(directory) == _shard_rows(catalogue):
        return None
    return (
        "the machine has restarted while the cache was in use, and may not have written all of its catalogue"
    )


def _shard_files(directory: Directory) -> set[int]:
    names = os.listdir(directory.shards)
    return {int(match[1]) for name in names if (match := _SHARD_NAME.fullmatch(name))}


def _shard_rows(catalogue: Catalogue) -> set[int]:
    with catalogue.reading() as tables:
        return tables.shard_ids()


def seal_catalogue(directory: Directory, catalogue: Catalogue) -> None:
    """Note what the catalogue holds, so that the next boot finds it whole, if nothing changes it until then.

    Not synced: what a power cut takes of it differs from the note.
    """
    with catalogue.transaction():
        write_settings(directory, replace(read_settings(directory), seal=catalogue.digest()))


def rebuild_catalogue(
    directory: Directory, catalogue: Catalogue, error: CatalogueDamagedError | None = None
) -> None:
    """Replace a lost or damaged catalogue by one made from the shards, unless another process has done so.

    A file that passes the checks stays, unless `error` concerns contents that the checks do not read. The new
    file is made beside the old one, and put in its place when it is whole.
    """
    with opening_lock(directory), translated_disk_errors(directory.root, "making its catalogue"):
        found = file_identity(catalogue.path)
        if found is not None:
            is_condemned = error is not None and not isinstance(error, CatalogueUnreadableError)
            if not (is_condemned and found == catalogue.identity):
                if (trouble := _trouble(directory, catalogue)) is None:
                    return
                logger.warning("%s: %s; it is made anew from the shards", directory.root, trouble)
        catalogue.close()
        known = find_settings(directory)
        settings = known or Settings.default(directory.root)
        new = Catalogue(os.path.join(directory.root, "catalogue.new"))
        for path in (new.path, new.path + "-journal"):
            remove_if_there(path)  # of a process that was killed here

        def fill(tables: Tables) -> None:
            tables.set_meta("catalogue_id", uuid.uuid4().hex)  # a new one for each catalogue
            _enter_shards(directory, tables, _IDS_SKIPPED if known else 0)

        write_settings(directory, settings)
        new.create(fill)
        new.close()
        # SQLite would apply the old journal to the new catalogue. The old file stays until the new one takes
        # its place: whoever reads meanwhile finds a damaged file, and not none.
        for path in (new.path + "-journal", catalogue.path + "-journal"):
            remove_if_there(path)
        if kind_of(catalogue.path) is not None:  # a directory, which no file can replace
            remove_if_there(catalogue.path)
        move(new.path, catalogue.path)


def _enter_shards(directory: Directory, tables: Tables, last_id: int) -> None:
    """Enter the shard files in new `tables`; unreadable ones are quarantined.

    Only headers are read: data is verified on first use. Temporary files are removed: their reservations are
    lost, and their samples will be fetched again.
    """
    for name in sorted(os.listdir(directory.shards)):
        path = os.path.join(directory.shards, name)
        if _TEMPORARY_NAME.fullmatch(name):
            remove_if_there(path)
        if (match := _SHARD_NAME.fullmatch(name)) is None:
            continue
        last_id = max(last_id, int(match[1]) + _IDS_SKIPPED)
        try:
            _enter_shard(tables, int(match[1]), path)
        except (CorruptShardError, SchemaMismatchError):
            tables.forget([int(match[1])])
            move_aside(directory, path, tables.settings.size_limit)
            tables.add("quarantined", 1)
    tables.set_meta("last_shard_id", last_id)


def _enter_shard(tables: Tables, shard_id: int, path: str) -> None:
    """Insert the shard at `path`; raises CorruptShardError, or SchemaMismatchError for other fields."""
    shard = MappedShard(path)
    if not shard.num_samples:  # no writer makes one, and its spans would hide samples that are not cached
        raise CorruptShardError(f"{path}: it holds no samples")
    size_bytes = accounted_bytes(os.lstat(path))
    tables.set_meta("last_shard_id", shard_id - 1)
    tables.reserve(size_bytes, "")
    pass_id, spans = _origin(tables, shard.fill)
    tables.publish(shard_id, "", size_bytes, shard.num_samples, shard.schema, shard.fill, pass_id, spans)


def _origin(tables: Tables, fill: dict[str, Any]) -> tuple[int, Sequence[Span]]:
    """The pass and the spans that a shard's `fill` names; pass 0 where it names none."""
    try:
        source, plan, length = fill["source"], fill["plan"], fill["length"]
        spans = spans_of(fill["spans"])
        numbers = [length or 0, *(number for span in spans for number in (*span.start, *span.stop))]
        if max(map(abs, numbers)) >= 2**63:
            return 0, []
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0, []
    if not (isinstance(source, str) and isinstance(plan, str) and isinstance(length, int | None)):
        return 0, []
    if tables.meta("source") is None:
        tables.set_meta("source", source)
        if isinstance(data := fill.get("data"), str):
            tables.set_meta("data", data)
    known = tables.pass_id(plan)
    # The position in the pass is lost: the worker begins it again and skips what is cached.
    return tables.insert_pass(plan, length, -1) if known is None else known, spans


# --- verification


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: damaged and missing shards, unknown files, and whether they were repaired.

    `ok` is true when nothing is wrong any more: nothing was found, or all of it was repaired.
    """

    num_shards: int
    num_samples: int
    corrupt: tuple[str, ...]
    missing: tuple[int, ...]
    orphans: tuple[str, ...]
    catalogue_problem: str | None
    repaired: bool

    @property
    def problems(self) -> int:
        found = len(self.corrupt) + len(self.missing) + len(self.orphans)
        return found + (self.catalogue_problem is not None)

    @property
    def ok(self) -> bool:
        return self.repaired or self.problems == 0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.num_shards} shards, {self.num_samples} samples: all sound"
        found = (
            f"{len(self.corrupt)} corrupt, {len(self.missing)} missing, {len(self.orphans)} unknown files"
            + (f", catalogue: {self.catalogue_problem}" if self.catalogue_problem else "")
        )
        folders = [path for path in self.orphans if path.endswith("/")]
        advice = f"remove {folders[0]}, which is not the cache's" if folders else ""
        advice = advice or "run 'cachestream verify CACHE --repair'"
        action = "repaired" if self.repaired else advice
        return f"{self.num_shards} shards: {found}; {action}"


def verify(cache: Cache, repair: bool, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Check everything; with `repair`, quarantine damaged shards and remove unknown files."""
    directory, catalogue = cache.directory, cache.catalogue
    if repair:
        check_own(directory.root)
    problem = catalogue.problem()
    if problem is not None:
        if not repair:
            return VerifyReport(0, 0, (), (), (), problem, repaired=False)
        rebuild_catalogue(directory, catalogue)
    if repair:
        cache.reservations.clear_dead()
    damage = _check_shards(directory, catalogue, on_progress)
    problem = check_sizes(directory, catalogue, correct=repair) or problem
    with catalogue.reading() as tables:
        known = tables.shard_ids()
    damage = {shard_id: said for shard_id, said in damage.items() if shard_id in known}  # others were evicted
    if repair:
        for shard_id, said in damage.items():
            cache.quarantine(shard_id, said or f"shard {shard_id}: missing")
    orphans, stuck = _unknown_files(directory, catalogue), False
    if repair:
        stuck = sum(map(_remove_file, orphans)) < len(orphans)
        count_strays(directory, catalogue)
        cache.enforce_limit()  # which whoever lowered it may have been killed over
    with catalogue.reading() as tables:
        shards, samples, _ = tables.totals()
    corrupt = tuple(filter(None, damage.values()))
    missing = tuple(shard_id for shard_id, said in damage.items() if not said)
    return VerifyReport(
        shards, samples, corrupt, missing, tuple(orphans), problem, repaired=repair and not stuck
    )


def _check_shards(
    directory: Directory, catalogue: Catalogue, on_progress: Callable[[int, int], None] | None
) -> dict[int, str]:
    """The damaged shards: id → damage ("" for a missing file)."""
    with catalogue.reading() as tables:
        rows = list(tables.shards())
    damage: dict[int, str] = {}
    for done, row in enumerate(rows, 1):
        path = shard_path(directory.root, row.id)
        try:
            shard = MappedShard(path)
            shard.verify()
            if shard.num_samples != row.num_samples:
                damage[row.id] = f"{path}: {shard.num_samples} samples, the catalogue says {row.num_samples}"
            shard.close()
        except CorruptShardError as error:
            damage[row.id] = str(error) if os.path.lexists(path) else ""
        if on_progress is not None:
            on_progress(done, len(rows))
    return damage


def check_sizes(
    directory: Directory, catalogue: Catalogue, *, correct: bool, newest: int | None = None
) -> str | None:
    """Compare recorded sizes with the files; return the problem, or None.

    With `newest`, the sizes of that many shards are compared, and all only if something is wrong. With
    `correct`, they are corrected: a bit has flipped, or the shards were copied from another disk.
    """
    with catalogue.reading() as tables:
        question = "SELECT id, size_bytes FROM whole ORDER BY id DESC LIMIT ?"
        booked = dict(tables.execute(question, (-1 if newest is None else newest,)).fetchall())
    wrong = {}
    with translated_disk_errors(directory.shards, "reading the sizes of its files"):
        for shard_id, size_bytes in booked.items():
            with suppress(FileNotFoundError):  # evicted meanwhile
                actual_bytes = accounted_bytes(os.lstat(shard_path(directory.root, shard_id)))
                if actual_bytes != size_bytes:
                    wrong[shard_id] = actual_bytes
    if not wrong:
        return None
    if newest is not None:
        return check_sizes(directory, catalogue, correct=correct)
    if correct:
        with catalogue.transaction() as tables:
            pairs = [(size_bytes, shard_id) for shard_id, size_bytes in wrong.items()]
            tables.executemany("UPDATE shards SET size_bytes = ? WHERE id = ?", pairs)
    return f"the recorded size of {len(wrong)} of {len(booked)} shards is wrong"


# --- leftovers


def remove_leftovers(directory: Directory, catalogue: Catalogue) -> int:
    """Remove our files that belong to no shard and no writer (after a power loss); return their number."""
    leftovers = [path for path in _unknown_files(directory, catalogue) if _id_in(path) is not None]
    removed = sum(map(_remove_file, leftovers))
    count_strays(directory, catalogue)
    forget_dead_loaders(directory)
    return removed


def count_strays(directory: Directory, catalogue: Catalogue) -> None:
    """Have unknown files among the shards count as used, in a row of their own."""
    paths = _unknown_files(directory, catalogue)
    with catalogue.reading() as tables:
        known = tables.bytes_in(STRAY)
    found = sum(size_of_file(path) + (bytes_below(path) if path.endswith("/") else 0) for path in paths)
    if found != known:
        with catalogue.transaction() as tables:
            tables.execute(
                "INSERT OR REPLACE INTO shards (id, state, owner, size_bytes) VALUES (0, ?, '', ?)",
                (STRAY, found),
            )


def _id_in(path: str) -> int | None:
    """The shard's id in the name of one of our files; None for other files."""
    name = os.path.basename(path)
    match = _SHARD_NAME.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _unknown_files(directory: Directory, catalogue: Catalogue) -> list[str]:
    """The files among the shards that belong to no shard and no reservation.

    A folder whose name is not ours ends in "/".
    """
    # Listed before the rows are read: a file that is written later would belong to a later reservation.
    with translated_disk_errors(directory.shards, "listing it"):
        names = sorted(os.listdir(directory.shards))
    with catalogue.reading() as tables:
        reserved = {row.id for row in tables.unfinished()}
        known = tables.shard_ids() | reserved
    found = [
        os.path.join(directory.shards, name)
        for name in names
        if _id_in(name) not in (known if name.endswith(SUFFIX) else reserved)
    ]
    return [
        os.path.join(path, "") if _id_in(path) is None and kind_of(path) == "directory" else path
        for path in found
        if os.path.lexists(path)  # a writer or an evictor has removed the others
    ]


def _remove_file(path: str) -> bool:
    """Remove the file `path` and return whether it is gone. A folder that is not ours stays."""
    if path.endswith("/"):
        return False
    with translated_disk_errors(path, "removing it"):
        remove_if_there(path)
    return True
