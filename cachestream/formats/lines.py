"""JSON Lines, CSV and TSV files: a line is a sample.

| value | field |
|-|-|
| JSON: number, bool, string, (nested) list of numbers | a number, a bool, str, an array |
| JSON: nested object | a field for each member, "name.member" |
| JSON: other lists | JSON text |
| CSV: column of whole numbers; of numbers; other | int64; float64; str |

The types of CSV columns are those of the first rows of the first file that has any, or of their defaults.
"""

from __future__ import annotations

import codecs
import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import numpy as np

from cachestream.sources.api import (
    COMPRESSED_ENDINGS,
    NUMBER_TYPES,
    ConfigError,
    Defaults,
    File,
    Files,
    FilesSource,
    Format,
    Item,
    Part,
    SampleError,
    Skipped,
    Stream,
    Url,
    check_columns,
    check_encoding,
    decompressed,
    format_size,
    is_sound_csv,
    json_field,
    parse_float,
    parse_int,
    plain_fields,
    require_decompressor,
)

logger = logging.getLogger("cachestream")

RANGE_BYTES: Final = 16 << 20  # the part of a JSON Lines file that is a unit
MAX_LINE_BYTES: Final = 64 << 20
MAX_FIELD: Final = 16 << 20  # characters of a value of CSV; a quote left open swallows so many
_ROWS_FOR_TYPES: Final = 1000  # rows of CSV that determine the types
_DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}


class LinesFormat(Format):
    """JSON Lines, CSV and TSV: see `LinesSource` for the options. A part is a range of bytes of JSON
    Lines.
    """

    name = "lines"
    endings = tuple(
        ending + packed
        for ending in (".jsonl", ".ndjson", ".csv", ".tsv")
        for packed in ("", ".gz", ".bz2", ".xz", ".zst")
    )
    holds_many = False  # among files of other kinds, lines usually describe those

    def __init__(
        self,
        columns: Sequence[str] | None,
        defaults: Mapping[str, Any],
        encoding: str = "utf-8",
        delimiter: str | None = None,
    ) -> None:
        check_columns(columns)
        self._defaults, self._encoding = dict(defaults), check_encoding(encoding)
        if codecs.encode("\n,", self._encoding.removesuffix("-sig")) != b"\n,":
            raise ConfigError(
                f"encoding={encoding!r}: lines are split at ASCII bytes, which this encoding has not; "
                "convert the files to UTF-8"
            )
        given: Any = delimiter
        is_one = isinstance(given, str) and len(given) == 1 and given.isascii() and given not in '"\r\n'
        if given is not None and not is_one:
            raise ConfigError(f"delimiter={given!r}: give one character, such as ';' or '|'")
        self._delimiter = delimiter
        self._found: dict[str, str] = {}  # the delimiter of the tables that should have another one
        self._columns = columns
        self._chosen = None if columns is None else frozenset(columns)
        self._prefixes = tuple(f"{name}." for name in columns or ())
        self._types: dict[str, type] = {}
        self.identity = [] if columns is None else [f"columns={','.join(sorted(columns))}"]
        self.identity += [] if self._encoding == "utf-8-sig" else [f"encoding={encoding}"]
        self.identity += [] if delimiter is None else [f"delimiter={delimiter}"]

    def folder_columns(self) -> tuple[Sequence[str] | None, Mapping[str, Any]]:
        return self._columns, self._defaults

    def check(self, files: Files, folders: Sequence[str]) -> None:
        for file in files:
            require_decompressor(file.key)
        self._types = self._column_types(files, folders)

    def parts(self, file: File) -> Sequence[str]:
        if _usual_delimiter(file) or file.is_compressed:
            return ("",)
        try:
            size_bytes = file.size()
        except SampleError:  # the server gives no size, or the file is gone, which the read will report
            return ("",)
        count = max(1, -(-size_bytes // RANGE_BYTES))
        return list(map(str, range(count))) if count > 1 else ("",)

    def _column_types(self, files: Files, folders: Sequence[str]) -> dict[str, type]:
        """Return the columns' types, judged by the first rows of the first table that has any.

        Raises ConfigError for malformed rows, and for chosen columns that the table has not.
        """
        found = ((file, *self._first_rows(file)) for file in files if _usual_delimiter(file))
        file, names, rows = next((table for table in found if table[2]), (files[0], [], []))
        known, where = {*names, *self._defaults, *folders}, file.where
        for name in sorted((self._chosen or known) - known if names else ()):
            raise ConfigError(f"{where}: no column '{name}'; there are {', '.join(names)}")
        for name in self._chosen or names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{where}: several columns are called '{name}': give each a name of its own"
                )
        types = {name: _type_of([row[i] for row in rows]) for i, name in enumerate(names)}
        given = {name: type(value) for name, value in self._defaults.items() if name in types}
        return types | {name: kind for name, kind in given.items() if kind in (int, float, str)}

    def _first_rows(self, file: File) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns of a table, and its first rows of so many values.

        A table of one column, all of whose lines hold another usual delimiter, has that one, and so do all
        tables of its ending: this is logged. Raises ConfigError for a malformed table.
        """
        delimiter, where = self._delimiter_of(file), file.where
        with file.stream() as stream:
            taken = list[str]()
            rows = self._csv_reader(_lines(decompressed(stream)), delimiter, taken)
            try:
                names = _names_of_columns(rows, taken, delimiter)
                taken.clear()
                first = list(islice(rows, _ROWS_FOR_TYPES))
            except (ValueError, csv.Error) as error:
                raise ConfigError(f"{where}: not a usable table: {error}; check encoding=") from error
        is_open = self._delimiter is None and not self._found.get(_usual_delimiter(file))
        if is_open and len(names) == 1 and (other := _other_delimiter([names, *first], delimiter)):
            logger.warning(
                "%s: its values stand between %r and not between %r, and so it is read, with all files of "
                "its ending; say delimiter=%r if that is right, else delimiter=%r",
                *(where, other, delimiter, other, delimiter),
            )
            self._found[delimiter] = other
            return self._first_rows(file)
        return names, [row for row in first if len(row) == len(names)]

    def _delimiter_of(self, file: File) -> str:
        """Return the delimiter of a file's columns; "" for JSON Lines."""
        usual = _usual_delimiter(file)
        return (self._delimiter or self._found.get(usual, usual)) if usual else ""

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the lines of a part in order."""
        delimiter, begin = self._delimiter_of(file), part.number * RANGE_BYTES
        end = begin + RANGE_BYTES if part.number + 1 < part.count else None
        # A part begins after the first line end at or after the byte before its range.
        with file.stream(max(0, begin - 1), end) as stream:
            plain = stream if begin else decompressed(stream)
            yield from self._rows(plain, delimiter) if delimiter else self._objects(plain, begin, end)

    def _is_chosen(self, name: str) -> bool:
        return self._chosen is None or name in self._chosen or name.startswith(self._prefixes)

    def _objects(self, stream: Stream, begin: int, end: int | None) -> Iterator[Item]:
        lines = _lines(stream)
        if begin and next(lines, None) is None:
            raise _cut_short(stream, begin)
        for at, line in lines:
            if end is not None and at >= end:
                return
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode(self._encoding))
                sample = _json_fields(value, self._defaults)
            except (ValueError, RecursionError, SampleError) as error:  # the encoding, JSON, or deep nesting
                yield Skipped(f"line at byte {at}: not a usable line of JSON: {error}")
                continue
            if self._chosen is not None:
                sample = {name: value for name, value in sample.items() if self._is_chosen(name)}
            yield at, sample
        if end is not None and stream.position < end:
            raise _cut_short(stream, end)

    def _rows(self, stream: Stream, delimiter: str) -> Iterator[Item]:
        taken = list[str]()  # the lines of the record that was read last
        rows = self._csv_reader(_lines(stream), delimiter, taken)
        try:
            names = _names_of_columns(rows, taken, delimiter)
        except (ValueError, csv.Error) as error:
            yield Skipped(f"the names of the columns: {error}", max(1, len(taken)))
            return
        chosen = [(i, name) for i, name in enumerate(names) if self._is_chosen(name)]
        number = -1
        while True:
            taken.clear()
            try:
                row = next(rows, None)
                if row is None:
                    return
                # A quote that belongs to the text, at the beginning of a value, takes the rows up to the next
                # one.
                found = self._taken_apart(row, taken, names, delimiter) if _may_be_open(taken) else (row,)
            except (ValueError, csv.Error) as error:
                number += 1
                yield Skipped(f"row {number}: {error}", max(1, len(taken)))
                continue
            for row in found:
                number += 1
                try:
                    if len(row) != len(names) and row:
                        raise ValueError(f"{len(row)} values for {len(names)} columns")
                    if row:
                        yield number, {name: self._typed(name, row[i]) for i, name in chosen}
                except ValueError as error:
                    yield Skipped(f"row {number}: {error}")

    def _taken_apart(
        self, row: list[str], lines: list[str], names: list[str], delimiter: str
    ) -> Sequence[list[str]]:
        """Return the rows in the `lines` of a record: `row` if it is sound, else each line if all are rows.

        Raises csv.Error where neither holds.
        """
        if is_sound_csv(lines, delimiter):
            return (row,)
        alone = [line.rstrip("\r\n").split(delimiter) for line in lines]
        if all(self._is_row(values, names) for values in alone):
            return alone
        raise csv.Error(
            f"a quote takes {len(lines)} lines into one value; if the quote belongs to the text, "
            'write "" inside a quoted value'
        )

    def _is_row(self, values: list[str], names: list[str]) -> bool:
        try:
            for name, text in zip(names, values, strict=True):
                self._typed(name, text)
        except ValueError:
            return False
        return True

    def _typed(self, name: str, text: str) -> Any:
        kind = self._types.get(name, str)
        if not text and (kind is not str or name in self._defaults):
            return None
        try:
            return parse_int(text) if kind is int else parse_float(text) if kind is float else text
        except ValueError:
            if kind is int and name not in self._defaults:  # of whole numbers until now
                with suppress(ValueError):
                    return parse_float(text)
            raise ValueError(
                f"column '{name}' holds {text[:40]!r}, and {kind.__name__} before; "
                "a default in fields= says its type"
            ) from None

    def _csv_reader(
        self, lines: Iterator[tuple[int, bytes]], delimiter: str, taken: list[str]
    ) -> Iterator[list[str]]:
        """Return a reader of rows, which adds the lines that it takes to `taken`."""
        csv.field_size_limit(max(MAX_FIELD, csv.field_size_limit()))  # of the process; 128 KiB by default

        def decoded(numbered_line: tuple[int, bytes]) -> str:
            taken.append(line := numbered_line[1].decode(self._encoding))
            return line

        # Not a generator, which would end at the first line that cannot be decoded.
        return csv.reader(map(decoded, lines), delimiter=delimiter)


class LinesSource(FilesSource):
    """The lines of JSON Lines, and the rows of CSV and TSV, plain or compressed (gzip, bzip2, xz, zstd).

    urls: a URL, a folder, a `{000..127}` range, a wildcard, or a list of these.

    A sample is a dict. In JSON Lines its fields are the members of the object in a line: numbers, bools and
    str as they are, lists of numbers as arrays, objects as fields "name.member", other lists as JSON text; a
    line with another value has the one field "json". In CSV its fields are the columns, named in the first
    line: int64, float64 or str, judged by the first 1,000 rows of the first file that has any. A line that is
    malformed, or has a null or an empty number without a default, is skipped and counted. Folders such as
    "label=cat/" name fields, as in `ParquetSource`.

    columns: the columns or members to keep, "name.member" for those of objects. fields: a default for each
    optional field, `{"caption": ""}`; in CSV its type is that of the column. encoding: an extension of ASCII.
    delimiter: one character between the values of tables. None: "," in CSV and a tab in TSV, unless the first
    table has one column and all of its lines hold a tab, ";", "|" or ",", which is then used, and logged.

    A unit is 16 MiB of JSON Lines, or a whole file if it is compressed or CSV. The key is "file#byte", or
    "file#row" for CSV. Other arguments and errors are those of `FileSource`.
    """

    reads = LinesFormat

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        columns: Sequence[str] | None = None,
        fields: Mapping[str, Any] | None = None,
        encoding: str = "utf-8",
        delimiter: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            LinesFormat(columns, Defaults(fields).values, encoding, delimiter), urls, storage_options, fields
        )


def _usual_delimiter(file: File) -> str:
    """Return the delimiter of a table by its ending; "" for JSON Lines."""
    name = file.key.lower()
    for packed in COMPRESSED_ENDINGS:
        name = name.removesuffix(packed)
    return _DELIMITERS.get(name[-4:], "")


def _other_delimiter(rows: list[list[str]], delimiter: str) -> str:
    """Return the usual delimiter that all rows hold, in place of `delimiter`; "" if there is none."""
    lines = [delimiter.join(row) for row in rows if row]
    return next((one for one in "\t;|," if one != delimiter and all(one in line for line in lines)), "")


def _names_of_columns(rows: Iterator[list[str]], taken: list[str], delimiter: str) -> list[str]:
    """Return the first row that has values. Raises csv.Error where a quote takes other rows into it."""
    names = next(filter(None, rows), [])
    if _may_be_open(taken) and not is_sound_csv(taken, delimiter):
        raise csv.Error("a quote is left open")
    return names


def _may_be_open(lines: list[str]) -> bool:
    return len(lines) > 1 or (len(lines) == 1 and lines[0].count('"') % 2 == 1)


def _lines(stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of `stream` with their line ends, and the byte at which each begins."""
    at, parts, have = stream.position, list[bytes](), 0
    while len(piece := stream.take()):
        data = bytes(piece)
        start = 0
        while (stop := data.find(b"\n", start) + 1) > 0:
            line = b"".join((*parts, data[start:stop]))
            yield at, line
            at, start, have = at + len(line), stop, 0
            parts.clear()
        parts.append(data[start:])
        have += len(data) - start
        if have > MAX_LINE_BYTES:
            raise SampleError(
                f"{stream.where}: a line of more than {format_size(MAX_LINE_BYTES)}; is it a file of lines?"
            )
    if have:
        yield at, b"".join(parts)


def _cut_short(stream: Stream, least_bytes: int) -> SampleError:
    """Return the error for a file that had more than `least_bytes` when its units were counted."""
    ends = min(stream.position, stream.size_bytes or stream.position)
    return SampleError(
        f"{stream.where}: ends after {ends:,} bytes, and had more than {least_bytes:,} when it was opened; "
        "its last lines are gone"
    )


def _json_fields(value: Any, empty: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"json": json_field(value)}
    flat = plain_fields(value, empty)
    return {name: json_field(item) if isinstance(item, list) else item for name, item in flat.items()}


def _type_of(texts: list[str]) -> type:
    """Return int or float if all strings but empty ones are such numbers, else str."""
    given = [text for text in texts if text]
    for kind, read in NUMBER_TYPES:
        try:
            for text in given:
                read(text)
        except ValueError:
            continue
        if given:
            return kind
    return str
