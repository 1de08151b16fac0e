"""The footers of Parquet files: what lies where, read when first needed and kept for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from cachestream.errors import CacheStreamError, SampleError
from cachestream.remote.columns import Columns
from cachestream.remote.extras import require
from cachestream.remote.filelist import FileList
from cachestream.remote.ranges import RangedFile, patiently
from cachestream.remote.thrift import ColumnChunk, column_chunks

__all__ = ["Footer", "Footers"]

TAIL_BYTES: Final = 64 << 10
MAX_FOOTER_BYTES: Final = 256 << 20
KEPT_BYTES: Final = 32 << 20  # of footers as they are stored
_MAGIC: Final = b"PAR1"


@dataclass(frozen=True)
class Footer:
    """What is known of one version of one file: `raw` is its footer, `metadata` pyarrow's reading of it."""

    file: RangedFile
    raw: bytes
    metadata: Any
    columns: Columns
    names: tuple[str, ...]

    @property
    def group_rows(self) -> list[int]:
        """How many rows each row group has."""
        return [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]

    def chunks(self, group: int) -> list[ColumnChunk]:
        """The column chunks of a row group that are read."""
        groups = self._groups
        if len(groups) <= group:
            raise SampleError(f"{self.file.shown}: malformed: row group {group} of {len(groups)}")
        return [chunk for chunk in groups[group] if any(_is_inside(chunk.path, name) for name in self.names)]

    @cached_property
    def _groups(self) -> list[list[ColumnChunk]]:
        try:
            return column_chunks(self.raw)
        except ValueError as error:
            raise SampleError(f"{self.file.shown}: malformed: {error}") from error


class Footers:
    """The footers of the files of `files`. `columns_of` makes what reads the columns of a schema.

    Thread-safe, picklable. Raises SampleError for what is no Parquet file, and the driver's errors.
    """

    def __init__(
        self, files: FileList, columns_of: Callable[[Any, str], tuple[Columns, tuple[str, ...]]]
    ) -> None:
        self._files, self._columns_of = files, columns_of
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Footer, int]] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> tuple[Any, ...]:
        return self._files, self._columns_of

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._files, self._columns_of = state
        self._reset()

    def get(self, index: int) -> Footer:
        """The footer of file `index`."""
        with self._lock:
            known = self._kept.get(index)
            if known is not None:
                self._kept.move_to_end(index)
                return known[0]
        footer, nbytes = patiently(lambda: self._read(index))
        with self._lock:
            self._forget(index)
            self._kept[index] = footer, nbytes
            self._kept_bytes += nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._forget(next(iter(self._kept)))
        return footer

    def forget(self, index: int) -> None:
        """Read the footer of file `index` anew when it is next needed."""
        with self._lock:
            self._forget(index)

    def _forget(self, index: int) -> None:
        known = self._kept.pop(index, None)
        if known is not None:
            self._kept_bytes -= known[1]

    def _read(self, index: int) -> tuple[Footer, int]:
        where = self._files.where(index)
        file = RangedFile(self._files.remote, self._files.path(index), where)
        tail = file.tail(TAIL_BYTES)
        if len(tail) < 12 or bytes(tail[-4:]) != _MAGIC:
            raise SampleError(f"{where}: not a Parquet file: it does not end as one")
        nbytes = int.from_bytes(tail[-8:-4], "little") + 8
        if nbytes > min(MAX_FOOTER_BYTES, file.look().size_bytes):
            raise SampleError(f"{where}: malformed: a footer of {nbytes} bytes")
        if nbytes > len(tail):
            tail = file.tail(nbytes)
        arrow, parquet = (
            require("pyarrow", "parquet", "Parquet"),
            require("pyarrow.parquet", "parquet", "Parquet"),
        )
        try:
            metadata = parquet.read_metadata(arrow.BufferReader(tail[-nbytes:]))
            columns, names = self._columns_of(metadata.schema.to_arrow_schema(), where)
        except CacheStreamError:
            raise
        except Exception as error:
            raise SampleError(f"{where}: malformed: {type(error).__name__}: {error}"[:500]) from error
        return Footer(file, bytes(tail[-nbytes:-8]), metadata, columns, names), nbytes


def _is_inside(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
