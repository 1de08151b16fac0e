"""Publishing: a shard becomes visible whole, together with the progress of its units, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cachestream.config import format_size
from cachestream.errors import CacheError
from cachestream.linux import begin_writeback, move, open_private
from cachestream.schema import Span
from cachestream.shard_format import ShardContent, encode_header
from cachestream.storage.layout import Directory, accounted_bytes, allocated_bytes
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import FailureRow

if TYPE_CHECKING:
    from cachestream.storage.catalogue import Catalogue
    from cachestream.storage.reservations import Reservations
    from cachestream.storage.tables import Tables

_PIECE_BYTES: Final = 8 << 20


class CatalogueReplacedError(CacheError):
    """The catalogue was lost and rebuilt. Work begun under the previous one is void: start again."""


@dataclass(frozen=True, slots=True)
class UnitProgress:
    """The progress of units in one commit: positions of claims, and samples skipped on the way.

    `claims` holds (claim id, position, offset): everything before that is done. `settled` are positions of
    suspects that were read without a crash, or that were given up.
    """

    pass_id: int
    claims: tuple[tuple[int, int, int], ...] = ()
    settled: tuple[int, ...] = ()
    failures: tuple[FailureRow, ...] = ()


class Publisher:
    """Writes shards for one sampling process, known to the others as `owner`.

    It publishes only into the catalogue that exists at its creation. In a rebuilt one, ids of passes and
    claims have another meaning, and another process may read the same samples. Every method then raises
    CatalogueReplacedError.
    """

    def __init__(
        self, directory: Directory, catalogue: Catalogue, reservations: Reservations, owner: str
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._reservations = reservations
        self._owner = owner
        with catalogue.reading() as tables:
            self._catalogue_id = tables.meta("catalogue_id")

    def publish(
        self,
        contents: Sequence[ShardContent],
        spans: Sequence[Span],
        progress: UnitProgress,
        *,
        may_evict: bool = True,
        spare_unused: bool = True,
        reserved: Sequence[int] = (),
        only_if: Callable[[Tables], bool] | None = None,
    ) -> list[int] | None:
        """Write each of `contents` as a new shard with the same spans, and commit `progress` with them.

        `reserved`: ids of reservations that were made for the first of them. `only_if` is called in the
        transaction that publishes: nothing is published if it returns False.

        Returns the shards' ids, or None when there is no space now (nothing has changed then). Raises
        CacheFullError when the disk refuses the bytes, CacheError when it fails, and SchemaMismatchError when
        the cache holds other samples.
        """
        headers = [encode_header(content) for content in contents]
        sizes = [len(header) + content.data_bytes for header, content in zip(headers, contents, strict=True)]
        footprints = [self._reservations.footprint(size_bytes) for size_bytes in sizes]
        shard_ids = list(reserved)
        try:
            for footprint in footprints[len(shard_ids) :]:
                shard_id = self._reservations.reserve(
                    footprint, self._owner, may_evict=may_evict, spare_unused=spare_unused
                )
                if shard_id is None:
                    self._cancel(shard_ids)
                    return None
                shard_ids.append(shard_id)
            occupied = list(map(self._write, shard_ids, headers, contents, footprints))
            with self._transaction() as tables:
                is_wanted = only_if is None or only_if(tables)
                if is_wanted:
                    self._enter(tables, shard_ids, contents, occupied, spans, progress)
            if not is_wanted:
                self._cancel(shard_ids)
                return None
        except BaseException as error:
            self._cancel(shard_ids)
            if isinstance(error, CacheError):
                with self._catalogue.reading() as tables:
                    self._check_same(tables)  # a rebuild removes files that are being written
            raise
        return shard_ids

    def _enter(
        self,
        tables: Tables,
        shard_ids: Sequence[int],
        contents: Sequence[ShardContent],
        occupied: Sequence[int],
        spans: Sequence[Span],
        progress: UnitProgress,
    ) -> None:
        for shard_id, content, size_bytes in zip(shard_ids, contents, occupied, strict=True):
            if not tables.publish(
                shard_id,
                self._owner,
                size_bytes,
                content.num_samples,
                content.schema,
                content.fill,
                progress.pass_id,
                spans,
            ):
                raise CacheError(
                    f"{self._directory.root}: another process has released the reservation of shard {shard_id}, "
                    "because this one seemed to be gone; its samples will be fetched again"
                )
        tables.add("written_samples", sum(content.num_samples for content in contents))
        _commit(tables, progress)

    def _cancel(self, shard_ids: list[int]) -> None:
        with ExitStack() as stack:  # each of them, also if another one fails
            for shard_id in shard_ids:
                stack.callback(self._reservations.cancel, shard_id, self._owner)

    def commit(self, progress: UnitProgress) -> None:
        """Commit progress that brought no samples."""
        with self._transaction() as tables:
            _commit(tables, progress)

    def split_claim(self, claim_id: int, position: int, offset: int) -> int:
        """Give the current `position` of a claim a claim of its own, and return its id."""
        with self._transaction() as tables:
            return tables.split_claim(claim_id, position, offset, self._owner)

    @contextmanager
    def _transaction(self) -> Iterator[Tables]:
        with self._catalogue.transaction() as tables:
            self._check_same(tables)
            yield tables

    def _check_same(self, tables: Tables) -> None:
        if tables.meta("catalogue_id") != self._catalogue_id:
            raise CatalogueReplacedError(
                f"{self._directory.root}: the catalogue was replaced since this began; what is not cached is to "
                "be fetched again"
            )

    def _write(self, shard_id: int, header: bytes, content: ShardContent, most_bytes: int) -> int:
        """Write the file within `most_bytes` of disk, and return its accounted size."""
        temporary = self._directory.temporary_shard(shard_id)
        size_bytes = len(header) + content.data_bytes
        with translated_disk_errors(temporary, f"writing {format_size(size_bytes)}"):
            fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                _allocate(fd, size_bytes)
                _check_occupied(temporary, fd, most_bytes)
                _write_all(fd, header)
                for column in content.columns:
                    _write_all(fd, column.data.data)
                _check_occupied(temporary, fd, most_bytes)
                accounted = accounted_bytes(os.fstat(fd))
            finally:
                os.close(fd)
            move(temporary, shard_path(self._directory.root, shard_id))
        return accounted


def _allocate(fd: int, size_bytes: int) -> None:
    """Allocate all blocks at once.

    A full disk then shows before a byte is written, and XFS does not allocate ahead, past the reservation.
    """
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _check_occupied(path: str, fd: int, most_bytes: int) -> None:
    occupied = allocated_bytes(os.fstat(fd))
    if occupied > most_bytes:
        raise CacheError(
            f"{path} occupies {occupied} bytes on this disk, more than the {most_bytes} reserved for it; "
            "put the cache on a disk with ordinary blocks (ext4, XFS)"
        )


def _commit(tables: Tables, progress: UnitProgress) -> None:
    for claim_id, position, offset in progress.claims:
        tables.move_claim(claim_id, position, offset)
    tables.clear_suspects(progress.pass_id, progress.settled)
    for failure in progress.failures:
        tables.add_failure(failure.kind, failure.reason, failure.count, failure.example)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Write `data` in pieces, and start the writeback of each whole one: small files come in one burst."""
    view = memoryview(data).cast("B")
    while view:
        written = os.write(fd, view[:_PIECE_BYTES])
        if written == _PIECE_BYTES:
            begin_writeback(fd, written)
        view = view[written:]
