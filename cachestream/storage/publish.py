"""Publishing: a shard becomes visible whole, together with the progress of its units, or not at all.

A file is written under a temporary name, within the bytes that were reserved for it, by any process
(`write_shard`). Whoever holds the supervisor's lock renames it and commits its row (`Publisher`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import format_size
from cachestream.errors import CacheError
from cachestream.linux import begin_writeback, move, open_private
from cachestream.schema import Schema, Span
from cachestream.shard_format import ShardContent, encode_header
from cachestream.storage.layout import Directory, accounted_bytes, allocated_bytes
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.progress import PassRow
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import REPLACED, FailureRow

if TYPE_CHECKING:
    from cachestream.storage.catalogue import Catalogue
    from cachestream.storage.reservations import Reservations
    from cachestream.storage.tables import Tables

_PIECE_BYTES: Final = 8 << 20
_ENTERED: Final = ("part", "holdout", "held_out", "transform")  # of a shard's `fill`, what its row records


class CatalogueReplacedError(CacheError):
    """The catalogue was lost and rebuilt. Work begun under the previous one is void: start again."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A shard that is to be written: its id, and the most bytes of disk that its file may occupy."""

    id: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard that lies under its temporary name, as its row describes it; `size_bytes`: its accounted
    size.
    """

    id: int
    size_bytes: int
    num_samples: int
    schema: Schema
    fill: Mapping[str, Any]


def write_shard(
    directory: Directory, reserved: Reserved, header: bytes, content: ShardContent
) -> WrittenShard:
    """Write a shard under its temporary name.

    Raises CacheFullError when the disk refuses the bytes, CacheError when it fails: then the file is to be
    removed.
    """
    path = directory.temporary_shard(reserved.id)
    size_bytes = len(header) + content.data_bytes
    with translated_disk_errors(path, f"writing {format_size(size_bytes)}"):
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _allocate(fd, size_bytes)
            _check_occupied(path, fd, reserved.most_bytes)
            _write_all(fd, header)
            for column in content.columns:
                _write_all(fd, column.data.data)
            _check_occupied(path, fd, reserved.most_bytes)
            accounted = accounted_bytes(os.fstat(fd))
        finally:
            os.close(fd)
    entered = {name: content.fill[name] for name in _ENTERED if name in content.fill}
    return WrittenShard(reserved.id, accounted, content.num_samples, content.schema, entered)


@dataclass(frozen=True, slots=True)
class Progress:
    """The record that is committed with shards: the progress of the pass `row`, and samples skipped on the
    way.
    """

    row: PassRow | None = None
    failures: tuple[FailureRow, ...] = ()


class Publisher:
    """Reserves, and commits written shards, in the name of `owner`.

    It commits only to the catalogue that exists at its creation. In a rebuilt one, the ids of passes have
    another meaning. Every method then raises CatalogueReplacedError.
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

    def reserve(
        self, sizes: Sequence[int], *, may_evict: bool = True, spare_unused: bool = True
    ) -> list[Reserved] | None:
        """Reserve space for files of these sizes in bytes; None when there is no space now.

        Raises CacheFullError when the disk refuses even that.
        """
        reserved: list[Reserved] = []
        try:
            for footprint in map(self._reservations.footprint, sizes):
                shard_id = self._reservations.reserve(
                    footprint, self._owner, may_evict=may_evict, spare_unused=spare_unused
                )
                if shard_id is None:
                    self.cancel(reserved)
                    return None
                reserved.append(Reserved(shard_id, footprint))
        except BaseException:
            self.cancel(reserved)
            raise
        return reserved

    def cancel(self, reserved: Sequence[Reserved | WrittenShard]) -> None:
        """Remove the files of reservations, and then the reservations; a shard that was published stays."""
        with ExitStack() as stack:  # each of them, also if another one fails
            for one in reserved:
                stack.callback(self._reservations.cancel, one.id, self._owner)

    def publish(
        self,
        content: ShardContent,
        pass_id: int,
        spans: Sequence[Span],
        *,
        may_evict: bool = True,
        spare_unused: bool = True,
    ) -> int | None:
        """Reserve space for a shard, write it and commit it; its id, or None when there is no space now."""
        header = encode_header(content)
        sizes = (len(header) + content.data_bytes,)
        reserved = self.reserve(sizes, may_evict=may_evict, spare_unused=spare_unused)
        if reserved is None:
            return None
        try:
            written = write_shard(self._directory, reserved[0], header, content)
        except BaseException:
            self.cancel(reserved)
            raise
        self.commit([written], pass_id, spans, Progress())
        return written.id

    def commit(
        self,
        shards: Sequence[WrittenShard],
        pass_id: int,
        spans: Sequence[Span],
        progress: Progress,
        *,
        decided: Schema | None = None,
        replaces: Collection[int] = (),
    ) -> None:
        """Publish `shards`, which all hold `spans` of the pass, and record `progress`, in one transaction.

        They hold samples of the shards `replaces`, made anew: these join no new epoch, shard by shard, also
        where a part of their samples is yet to be made, and are removed when no epoch holds them.

        `decided`: see `Tables._admit_schema`. The reservations are cancelled after an error. Raises
        SchemaMismatchError when the cache holds other samples.
        """
        try:
            with translated_disk_errors(self._directory.shards, "publishing"):
                for shard in shards:
                    move(
                        self._directory.temporary_shard(shard.id), shard_path(self._directory.root, shard.id)
                    )
            with self._transaction() as tables:
                self._enter(tables, shards, pass_id, spans, decided)
                tables.retire(replaces, REPLACED)
                _record(tables, progress)
        except BaseException as error:
            self.cancel(shards)
            if isinstance(error, CacheError):
                self.check_same()  # a rebuild removes files that are being written
            raise

    def _enter(
        self,
        tables: Tables,
        shards: Sequence[WrittenShard],
        pass_id: int,
        spans: Sequence[Span],
        decided: Schema | None,
    ) -> None:
        for shard in shards:
            if not tables.publish(
                shard.id,
                self._owner,
                shard.size_bytes,
                shard.num_samples,
                shard.schema,
                shard.fill,
                pass_id,
                spans,
                decided,
            ):
                raise CacheError(
                    f"{self._directory.root}: another process has released the reservation of shard "
                    f"{shard.id}, because this one seemed to be gone; its samples will be fetched again"
                )
        if shards:
            tables.add("written_samples", sum(shard.num_samples for shard in shards))

    @contextmanager
    def _transaction(self) -> Iterator[Tables]:
        with self._catalogue.transaction() as tables:
            self._check_same(tables)
            yield tables

    def check_same(self) -> None:
        """Raise CatalogueReplacedError if the catalogue is another one than at first."""
        with self._catalogue.reading() as tables:
            self._check_same(tables)

    def _check_same(self, tables: Tables) -> None:
        if tables.meta("catalogue_id") != self._catalogue_id:
            raise CatalogueReplacedError(
                f"{self._directory.root}: the catalogue was replaced since this began; what is not cached is "
                "to be fetched again"
            )


def _record(tables: Tables, progress: Progress) -> None:
    if progress.row is not None:
        tables.record_progress(progress.row)
    for failure in progress.failures:
        tables.add_failure(failure.kind, failure.reason, failure.count, failure.example)


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


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Write `data` in pieces, and start the writeback of each whole one: small files come in one burst."""
    view = memoryview(data).cast("B")
    while view:
        written = os.write(fd, view[:_PIECE_BYTES])
        if written == _PIECE_BYTES:
            begin_writeback(fd, written)
        view = view[written:]
