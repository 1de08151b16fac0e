"""Parquet files read one row group at a time: only the chosen columns, in small batches of rows."""

from __future__ import annotations

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cachestream.config import require
from cachestream.errors import CacheStreamError, ConfigError, SampleError, SourceError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.names import Names
from cachestream.listing.patterns import PARQUET_ENDINGS
from cachestream.listing.table_formats import refuse_tables
from cachestream.schema import IntArray
from cachestream.sources.base import Problems, Rows, in_own_context, one_by_one
from cachestream.sources.decode.arrow import Batch, Columns, load_arrow
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.decode.parquet_pages import LEAST_LIMIT_BYTES, PagedFile
from cachestream.sources.decode.table_columns import ColumnOptions, same_columns, table_rows
from cachestream.sources.fields import Defaults
from cachestream.sources.hive import FolderColumns
from cachestream.sources.sample_files import FileUnits, SampleFiles, parts_for_diversity
from cachestream.transport import object_limit
from cachestream.transport.file_objects import SeekableFile
from cachestream.transport.remote_errors import ChangedError, classify, map_errors
from cachestream.transport.remote_object import RemoteObject, patiently

TAIL_BYTES: Final = 64 << 10
MAX_FOOTER_BYTES: Final = 256 << 20
KEPT_BYTES: Final = 32 << 20  # of cached footers, by their size in the file
_MAGIC: Final = b"PAR1"
FOOTERS_AT_ONCE: Final = 16
PREFETCH_BYTES: Final = 16 << 20  # row groups up to this size are fetched at once, larger ones in pieces
PIECE_BYTES: Final = 4 << 20
BUFFER_BYTES: Final = 32 << 20  # read buffers of all columns together, where a row group comes in pieces
BATCH_BYTES: Final = 8 << 20
MAX_BATCH_ROWS: Final = 4096
EXPANDED_BYTES: Final = 256 << 20  # of a batch in which every value is as large as its whole dictionary
LARGE_DICTIONARY_BYTES: Final = 2 << 20  # above what writers make: they end a dictionary at about 1 MiB
# Bytes of a decoded value. A list of a million zeros takes a few bytes in its file.
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group: its bytes in the file, and its size when unpacked and decoded, at least."""

    start: int
    stop: int
    unpacked_bytes: int
    has_dictionary: bool  # of values of any size


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of one version of a file; `leaves` are the indices of the chosen leaf columns."""

    file: RemoteObject
    metadata: Any
    columns: Columns
    names: tuple[str, ...]
    leaves: tuple[int, ...]

    def chunks(self, group: int) -> list[ColumnChunk]:
        """Return the chosen column chunks of a row group. Raises SampleError where the footer is damaged."""
        self._check(group)
        row_group = self.metadata.row_group(group)
        return [self._chunk(row_group.column(leaf)) for leaf in self.leaves]

    def _check(self, group: int) -> None:
        """Open the column readers of a row group without reading. Raises SampleError for damaged metadata.

        `RowGroupMetaData.column` aborts the process where the metadata of a column chunk are damaged: pyarrow
        (26) does not catch the C++ exception there. The readers construct the same objects, and pyarrow does
        catch their exceptions.
        """
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        unread = _UnreadableFile(self.file)
        try:
            # Without a buffer, columns would be read when they are opened.
            table = parquet.ParquetFile(unread, metadata=self.metadata, buffer_size=1, pre_buffer=False)
            next(table.iter_batches(1, [group], list(self.names), use_threads=False), None)
        except Exception as error:
            if not unread.was_read:
                raise malformed(self.file.shown, error) from error

    def _chunk(self, column: Any) -> ColumnChunk:
        start, nbytes = column.data_page_offset, column.total_compressed_size
        if 0 < (column.dictionary_page_offset or 0) < start:  # 0: some writers set it where there is none
            start = column.dictionary_page_offset
        if start < len(_MAGIC) or nbytes < 0:
            where = self.file.shown
            raise SampleError(f"{where}: malformed: a column chunk of {nbytes} bytes at byte {start}")
        width = _WIDTHS.get(column.physical_type, 0)
        return ColumnChunk(
            start,
            start + nbytes,
            max(0, column.total_uncompressed_size, column.num_values * width),
            has_dictionary=not width and bool(column.has_dictionary_page),
        )


class _UnreadableFile(SeekableFile):
    """A file that ends at the first read. An exception would take longer, on its way through C++."""

    was_read = False

    def read(self, size: int = -1) -> memoryview:
        self.was_read = True
        return memoryview(b"")


class Footers:
    """An LRU cache of the footers of `files`. Thread-safe, picklable.

    Raises SampleError for a file that is not Parquet, ConfigError for `options` that do not suit one, and the
    driver's errors.
    """

    def __init__(self, files: FileList, options: ColumnOptions) -> None:
        self._files, self._options = files, options
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, tuple[Footer, int]] = OrderedDict()
        self._kept_bytes = 0
        self._last: tuple[Any, Columns, tuple[str, ...]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Footers, (self._files, self._options)

    def get(self, index: int) -> Footer:
        """Return the footer of file `index`, from the cache or the remote."""
        with self._lock:
            known = self._kept.get(index)
            if known is not None:
                self._kept.move_to_end(index)
                return known[0]
        footer, nbytes = patiently(lambda: self._read(index))
        with self._lock:
            self.drop(index)
            self._kept[index] = footer, nbytes
            self._kept_bytes += nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self.drop(next(iter(self._kept)))
        return footer

    def drop(self, index: int) -> None:
        with self._lock:
            _, nbytes = self._kept.pop(index, (None, 0))
            self._kept_bytes -= nbytes

    def _read(self, index: int) -> tuple[Footer, int]:
        where = self._files.where(index)
        file = RemoteObject(self._files.remote, self._files.path(index), where)
        tail = file.tail(TAIL_BYTES)
        if len(tail) < 12 or bytes(tail[-4:]) != _MAGIC:
            raise SampleError(f"{where}: not a Parquet file: it does not end as one")
        nbytes = int.from_bytes(tail[-8:-4], "little") + 8
        if nbytes > min(MAX_FOOTER_BYTES, file.look().size_bytes):
            raise SampleError(f"{where}: malformed: a footer of {nbytes} bytes")
        if nbytes > len(tail):
            tail = file.tail(nbytes)
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        try:
            metadata = parquet.read_metadata(load_arrow().BufferReader(tail[-nbytes:]))
            columns, names = self._choose(metadata.schema.to_arrow_schema(), where)
            leaves = _leaves(metadata.schema, names)
        except CacheStreamError:
            raise
        except Exception as error:
            raise malformed(where, error) from error
        return Footer(file, metadata, columns, names, leaves), nbytes

    def _choose(self, schema: Any, where: str) -> tuple[Columns, tuple[str, ...]]:
        """Return the converter for the chosen columns and their names; files of equal columns share them."""
        last = self._last
        if last is None or not same_columns(schema, last[0]):
            last = self._last = schema, *self._options.choose(schema, where, of_parquet=True)
        return last[1], last[2]


def _batch_rows(file: PagedFile, chunks: Iterable[ColumnChunk], row_bytes: float) -> int:
    """Return the number of rows that take about BATCH_BYTES, and EXPANDED_BYTES at most for large dictionaries.

    Values of a dictionary are decoded as often as they occur, and are in the file once.
    """
    largest = 1
    for nbytes, count in file.dictionaries([(one.start, one.stop) for one in chunks if one.has_dictionary]):
        row_bytes += nbytes / count
        if nbytes > LARGE_DICTIONARY_BYTES:
            largest = max(largest, nbytes)
    most = min(BATCH_BYTES / max(1.0, row_bytes), EXPANDED_BYTES / largest)
    return max(1, min(MAX_BATCH_ROWS, int(most)))


def _leaves(schema: Any, names: Iterable[str]) -> tuple[int, ...]:
    """Return the indices of the leaf columns in `names`; a nested column stands for all leaves below it."""
    chosen = set(names)
    paths = [schema.column(leaf).path + "." for leaf in range(len(schema))]
    ends = ((leaf, dot.start()) for leaf, path in enumerate(paths) for dot in re.finditer(r"\.", path))
    return tuple(dict.fromkeys(leaf for leaf, end in ends if paths[leaf][:end] in chosen))


def malformed(where: str, error: Exception) -> SampleError:
    """Return the SampleError for a file that pyarrow refused with `error`."""
    return SampleError(f"{where}: malformed: {type(error).__name__}: {error}"[:500])


class ParquetSource(SampleFiles):
    """The rows of Parquet files; a unit is a row group.

    urls: a URL, a folder, a `{000..127}` range, a wildcard, or a list of these; Hugging Face data sets
    are `hf://datasets/name/*.parquet`, where huggingface_hub is installed.

    A sample is a dict of the columns: numbers with their own type, str, bytes, lists of numbers as
    arrays (nested ones, too), structs as fields "column.member", dates and times as int64 in the
    column's own unit (days, or since 1970 in UTC), decimals as float64, other lists and maps as JSON
    text, unless they hold binary. Images in the layout of Hugging Face (a struct of "bytes" and "path") are
    decoded to uint8 `[3, H, W]` RGB, its other files are bytes. The key is "file#row".

    Folders such as "label=cat/" name a column of their own, as in pyarrow: below the folder or wildcard given, or
    anywhere in the paths of a list of files. It is int64 if all its values are whole numbers, else str.

    columns: those to read, by name, or "struct.member"; only they are fetched. None: all of them.

    fields: a default for each optional field, `{"caption": ""}`: it replaces nulls, and columns that some
    files lack.

    nulls: a replacement for nulls, by field; columns that are missing remain an error. A row with any other
    null is skipped and counted, as is a row with a broken image or with lists of unequal lengths.

    decode_images: False leaves images as bytes. A list of names decodes these binary columns, too.

    resize, crop: the size of decoded images, see `ImageOptions`.

    Tables of Delta Lake, Iceberg and Hudi are refused: their files also hold rows that were deleted.

    Raises ConfigError for columns that are missing or cannot be stored, and otherwise as
    `FileSource`. Needs pyarrow: `pip install 'cachestream[parquet]'`.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        columns: Sequence[str] | None = None,
        nulls: Mapping[str, Any] | None = None,
        decode_images: bool | Sequence[str] = True,
        storage_options: Mapping[str, Any] | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        defaults, images = Defaults(fields), ImageOptions(resize, crop)
        options = ColumnOptions(columns, decode_images, images, nulls, defaults.values)
        require("pyarrow.parquet", "parquet", "Parquet")
        files = FileList(urls, storage_options, owner="ParquetSource", preferred=PARQUET_ENDINGS)
        refuse_tables(files)
        self._folders = FolderColumns(files, columns, {**defaults.values, **(nulls or {})})
        options = replace(options, of_folders=self._folders.names)
        identity = [*options.identity, *self._folders.identity]
        super().__init__("parquet", files, identity, defaults, images)
        self._footers = Footers(files, options)
        groups = self._read_footers()
        self._rows: IntArray = np.concatenate(groups)
        self._first_rows: IntArray = np.concatenate([np.cumsum(rows) - rows for rows in groups])
        if not self.num_rows:
            raise ConfigError(f"{files.shown}: the tables have no rows")
        self._set_groups(FileUnits([len(rows) for rows in groups]))

    def _read_footers(self) -> list[IntArray]:
        """Read all footers. Return the number of rows in each row group, for each file."""

        def look(index: int) -> IntArray:
            with map_errors(self._files.where(index), secrets=self._files.remote.secrets):
                found = self._footers.get(index).metadata
            return np.array([found.row_group(i).num_rows for i in range(found.num_row_groups)], np.int64)

        look(0)  # wrong options fail here, before all other files are asked
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            return list(pool.map(look, range(len(self._files))))

    def _set_groups(self, units: FileUnits) -> None:
        """Set the units, row groups, which are named by file, first row and number of rows."""
        names, every = self._files.names, np.arange(len(units))
        places = units.place(every)
        rows = zip(units.locate(every)[0], self._first_rows[places], self._rows[places], strict=True)
        self._set_units(units, Names(f"{names[file]}#{row}+{num_rows}" for file, row, num_rows in rows))

    @property
    def num_rows(self) -> int:
        """The number of rows in all files, including unusable ones."""
        return int(self._rows.sum())

    @property
    def round_ends(self) -> tuple[int, ...]:
        """See `DivisibleSource`."""
        return self._units.round_ends

    def parts_for(self, limit_bytes: int) -> int:
        """Return the number of shares to read each file's row groups in: see `DivisibleSource`."""
        groups = self._units.counts
        index, most = int(groups.argmax()), int(groups.max())
        try:
            with map_errors(self._files.where(index), secrets=self._files.remote.secrets):
                chunks = self._footers.get(index).chunks(0)
        except SourceError:
            return 1  # reading the unit will report the error
        file_bytes = most * sum(chunk.unpacked_bytes for chunk in chunks)
        return parts_for_diversity(limit_bytes, len(groups), file_bytes, most)

    def divided(self, parts: int) -> ParquetSource:
        """Return a source of the same row groups in `parts` rounds, each with a share of every file's."""
        made = copy.copy(self)
        made._set_groups(FileUnits(self._units.counts, parts))
        return made

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of a row group in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    @in_own_context
    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the same rows, as `Rows` where all rows of a batch are usable and have the same shapes."""
        index, group = self._locate(unit)
        place = int(self._units.place(unit))
        problems = Problems(self._files.where(index))
        batches = self._folders.added_to(self._read_group(index, group, int(self._rows[place])), index)
        rows = table_rows(batches, self._files.key(index), int(self._first_rows[place]), problems)
        with object_limit.applied(self._files.remote.max_object_bytes):
            yield from self._defaults.fill_all(rows)
        problems.raise_any()

    def _read_group(self, index: int, group: int, num_rows: int) -> Iterator[Batch]:
        """Yield the batches of row group `group` of file `index`, with errors mapped."""
        where = self._files.where(index)
        with map_errors(where, one_of_many=True, secrets=self._files.remote.secrets):
            try:
                footer = self._footers.get(index)
            except ConfigError as error:  # the file was replaced since the source was made
                raise SampleError(str(error)) from error
        if footer.metadata.num_row_groups <= group or footer.metadata.row_group(group).num_rows != num_rows:
            raise SampleError(f"{where}: was replaced by another table; start again with a new source")
        batches, left = self._batches(footer, group, where), num_rows
        while True:
            try:
                with map_errors(where, one_of_many=True, secrets=self._files.remote.secrets):
                    batch = next(batches, None)
            except CacheStreamError as error:
                self._footers.drop(index)  # it may have been replaced
                if isinstance(error, SampleError):
                    error.lost = max(1, left)
                raise
            if batch is None:
                return
            left -= batch[0]
            yield batch

    def _batches(self, footer: Footer, group: int, where: str) -> Iterator[Batch]:
        """Yield the rows of a row group in batches of at most about BATCH_BYTES."""
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        chunks = footer.chunks(group)
        packed = sum(chunk.stop - chunk.start for chunk in chunks)
        num_rows = max(1, footer.metadata.row_group(group).num_rows)
        row_bytes = sum(chunk.unpacked_bytes for chunk in chunks) / num_rows
        if row_bytes > LEAST_LIMIT_BYTES:
            object_limit.check(int(row_bytes))
        places = [(chunk.start, chunk.stop) for chunk in chunks]
        file = PagedFile(footer.file, places if packed <= PREFETCH_BYTES else [], places)
        try:
            table = parquet.ParquetFile(
                file,
                metadata=footer.metadata,
                buffer_size=max(64 << 10, min(PIECE_BYTES, BUFFER_BYTES // max(1, len(chunks)))),
                pre_buffer=False,  # it reads in threads of pyarrow's, whose bytes are accounted to no unit
                page_checksum_verification=True,
            )
            for batch in table.iter_batches(
                batch_size=_batch_rows(file, chunks, row_bytes),
                row_groups=[group],
                columns=list(footer.names),
                use_threads=False,
            ):
                yield (batch.num_rows, *footer.columns.fields(batch))
        except Exception as error:
            file.raise_error()
            if isinstance(error, CacheStreamError | ChangedError) or classify(error) != "other":
                raise
            raise malformed(where, error) from error

    def __repr__(self) -> str:
        return f"<ParquetSource {self._files.shown}, {self.num_units:,} row groups, {self.num_rows:,} rows>"
