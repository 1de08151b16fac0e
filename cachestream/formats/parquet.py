"""Parquet files read one row group at a time: only the chosen columns, in small batches of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cachestream.formats.parquet_pages import LEAST_LIMIT_BYTES, PagedFile
from cachestream.sources.api import (
    PIECE_BYTES,
    Batch,
    CacheStreamError,
    ColumnOptions,
    Columns,
    ConfigError,
    Defaults,
    File,
    FileList,
    Files,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Part,
    RemoteObject,
    SampleError,
    SeekableFile,
    Size,
    Url,
    check_object,
    load_arrow,
    malformed,
    refuse_tables,
    require,
    same_columns,
    table_rows,
)

TAIL_BYTES: Final = 64 << 10
MAX_FOOTER_BYTES: Final = 256 << 20
_MAGIC: Final = b"PAR1"
PREFETCH_BYTES: Final = 16 << 20  # row groups up to this size are fetched at once, larger ones in pieces
BUFFER_BYTES: Final = 32 << 20  # read buffers of all columns together, where a row group comes in pieces
BATCH_BYTES: Final = 8 << 20
MAX_BATCH_ROWS: Final = 4096
EXPANDED_BYTES: Final = 256 << 20  # of a batch in which every value is as large as its whole dictionary
LARGE_DICTIONARY_BYTES: Final = 2 << 20  # above what writers make: they end a dictionary at about 1 MiB
# Bytes of a decoded value. A list of a million zeros takes a few bytes in its file.
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group: its bytes in the file, and its size when unpacked and decoded, at
    least.
    """

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


def _batch_rows(file: PagedFile, chunks: Iterable[ColumnChunk], row_bytes: float) -> int:
    """Return the number of rows that take about BATCH_BYTES, and EXPANDED_BYTES at most for large
    dictionaries.

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


class ParquetFormat(Format):
    """Tables of Parquet: see `ParquetSource` for the options. A part is a row group, named by its rows."""

    name = "parquet"
    endings = (".parquet", ".pq")
    nouns = ("file", "row group")

    def __init__(self, options: ColumnOptions) -> None:
        require("pyarrow.parquet", "parquet", "Parquet")
        self._options, self.images, self.identity = options, options.images, options.identity
        self._last: tuple[Any, Columns, tuple[str, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    @classmethod
    def begins(cls, head: bytes) -> bool:
        return head.startswith(_MAGIC)

    @classmethod
    def check_list(cls, files: FileList) -> None:
        refuse_tables(files)

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        files = super().find(urls, storage_options, owner)
        self.check_list(files)
        return files

    def folder_columns(self) -> tuple[Sequence[str] | None, Mapping[str, Any]]:
        return self._options.columns, {**self._options.defaults, **(self._options.nulls or {})}

    def check(self, files: Files, folders: Sequence[str]) -> None:
        self._options = replace(self._options, of_folders=tuple(folders))

    def parts(self, file: File) -> Sequence[str]:
        """Return the names of the row groups: the number of the first row, and of the rows, "0+1000"."""
        metadata = self._footer(file).metadata
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        firsts = np.cumsum([0, *rows])
        return [f"{first}+{count}" for first, count in zip(firsts, rows, strict=False)]

    def part_bytes(self, file: File) -> int:
        return sum(chunk.unpacked_bytes for chunk in self._footer(file).chunks(0))

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the rows of a row group, as `Rows` where all of a batch are usable and have the same
        shapes.
        """
        first, _, num_rows = part.name.partition("+")
        with file.parsed():
            footer = self._footer(file)
        metadata = footer.metadata
        if metadata.num_row_groups <= part.number or metadata.row_group(part.number).num_rows != int(
            num_rows
        ):
            raise file.replaced()
        yield from table_rows(self._batches(file, footer, part.number), int(first))

    def _batches(self, file: File, footer: Footer, group: int) -> Iterator[Batch]:
        """Yield the rows of a row group in batches of at most about BATCH_BYTES."""
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        chunks, left = footer.chunks(group), footer.metadata.row_group(group).num_rows
        packed = sum(chunk.stop - chunk.start for chunk in chunks)
        row_bytes = sum(chunk.unpacked_bytes for chunk in chunks) / max(1, left)
        places = [(chunk.start, chunk.stop) for chunk in chunks]
        try:
            with file.errors_mapped():
                if row_bytes > LEAST_LIMIT_BYTES:
                    check_object(int(row_bytes))
                paged = PagedFile(footer.file, places if packed <= PREFETCH_BYTES else [], places)
            with file.parsed(paged):
                table = parquet.ParquetFile(
                    paged,
                    metadata=footer.metadata,
                    buffer_size=max(64 << 10, min(PIECE_BYTES, BUFFER_BYTES // max(1, len(chunks)))),
                    pre_buffer=False,  # pyarrow's threads would read, for no unit
                    page_checksum_verification=True,
                )
                for batch in table.iter_batches(
                    batch_size=_batch_rows(paged, chunks, row_bytes),
                    row_groups=[group],
                    columns=list(footer.names),
                    use_threads=False,
                ):
                    found = (batch.num_rows, *footer.columns.fields(batch))
                    left -= batch.num_rows
                    yield found
        except SampleError as error:
            error.lost = max(1, left)
            raise

    # --- footers

    def _footer(self, file: File) -> Footer:
        return file.keep(lambda: self._read_footer(file))

    def _read_footer(self, file: File) -> tuple[Footer, int]:
        """Return the footer of a file, and its size. Raises ConfigError if the options do not suit it."""
        where, remote = file.where, file.ranges()
        tail = remote.tail(TAIL_BYTES)
        if len(tail) < 12 or bytes(tail[-4:]) != _MAGIC:
            raise SampleError(f"{where}: not a Parquet file: it does not end as one")
        nbytes = int.from_bytes(tail[-8:-4], "little") + 8
        if nbytes > min(MAX_FOOTER_BYTES, remote.look().size_bytes):
            raise SampleError(f"{where}: malformed: a footer of {nbytes} bytes")
        if nbytes > len(tail):
            tail = remote.tail(nbytes)
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        try:
            metadata = parquet.read_metadata(load_arrow().BufferReader(tail[-nbytes:]))
            columns, names = self._choose(metadata.schema.to_arrow_schema(), where)
            leaves = _leaves(metadata.schema, names)
        except CacheStreamError:
            raise
        except Exception as error:
            raise malformed(where, error) from error
        return Footer(remote, metadata, columns, names, leaves), nbytes

    def _choose(self, schema: Any, where: str) -> tuple[Columns, tuple[str, ...]]:
        """Return the converter for the chosen columns and their names; files of equal columns share them."""
        last = self._last
        if last is None or not same_columns(schema, last[0]):
            last = self._last = schema, *self._options.choose(schema, where, of_parquet=True)
        return last[1], last[2]


class ParquetSource(FilesSource):
    """The rows of Parquet files; a unit is a row group.

    urls: a URL, a folder, a `{000..127}` range, a wildcard, or a list of these; Hugging Face data sets
    are `hf://datasets/name/*.parquet`, where huggingface_hub is installed.

    A sample is a dict of the columns: numbers with their own type, str, bytes, lists of numbers as
    arrays (nested ones, too), structs as fields "column.member", dates and times as int64 in the
    column's own unit (days, or since 1970 in UTC), decimals as float64, other lists and maps as JSON
    text, unless they hold binary. Images in the layout of Hugging Face (a struct of "bytes" and "path") are
    decoded to uint8 `[3, H, W]` RGB, its other files are bytes. The key is "file#row".

    Folders such as "label=cat/" name a column of their own, as in pyarrow: below the folder or wildcard
    given, or anywhere in the paths of a list of files. It is int64 if all its values are whole numbers, else
    str.

    columns: those to read, by name, or "struct.member"; only they are fetched. None: all of them.

    fields: a default for each optional field, `{"caption": ""}`: it replaces nulls, and columns that some
    files lack.

    nulls: a replacement for nulls, by field; columns that are missing remain an error. A row with any other
    null is skipped and counted, as is a row with a broken image or with lists of unequal lengths.

    decode_images: False leaves images as bytes. A list of names decodes these binary columns, too.

    decoders: `{"mask": "index"}` keeps the values of a column's images as they are stored, `[H, W]`: the
    numbers of a mask with a palette, depth of 16 bits; "raw" leaves the bytes of a column.

    resize, crop: the size of decoded images, see `ImageOptions`.

    Tables of Delta Lake, Iceberg and Hudi are refused: their files also hold rows that were deleted.

    Raises ConfigError for columns that are missing or cannot be stored, and otherwise as
    `FileSource`. Needs pyarrow: `pip install 'cachestream[parquet]'`.
    """

    reads = ParquetFormat

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
        decoders: Mapping[str, str] | None = None,
    ) -> None:
        images, defaults = ImageOptions(resize, crop), Defaults(fields).values
        options = ColumnOptions(columns, decode_images, images, nulls, defaults, decoders=decoders)
        super().__init__(ParquetFormat(options), urls, storage_options, fields)
        if not self.num_rows:
            raise ConfigError(f"{self._files.shown}: the tables have no rows")

    @property
    def num_rows(self) -> int:
        """The number of rows in all files, including unusable ones."""
        return sum(int(name.rpartition("+")[2]) for name in self.first_names)

    def _size(self) -> str:
        return f", {self.num_rows:,} rows"
