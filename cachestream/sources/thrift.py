"""The column chunks of a Parquet file, located by its footer.

Parsed here, as pyarrow (26) ends the process when it is asked this of a damaged footer: its binding does
not catch what the C++ library throws. (Format: Thrift's compact protocol, apache/thrift
doc/specs/thrift-compact-protocol.md; apache/parquet-format parquet.thrift.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS: Final = (4, 5, 6)
MAX_VARINT_BYTES: Final = 10


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group: its path in the schema, its bytes in the file, its size when unpacked."""

    path: str
    start: int
    stop: int
    unpacked_bytes: int


def column_chunks(footer: bytes) -> list[list[ColumnChunk]]:
    """The column chunks of each row group. Raises ValueError for what is no footer."""
    try:
        reader = _Reader(footer)
        for field, kind in reader.fields():
            if field == 4 and kind == _LIST:
                return [_row_group(reader) for _ in range(reader.list_of(_STRUCT))]
            reader.skip(kind)
    except (IndexError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"the footer is damaged ({type(error).__name__})") from error
    return []


def _row_group(reader: _Reader) -> list[ColumnChunk]:
    chunks: list[ColumnChunk] = []
    for field, kind in reader.fields():
        if field == 1 and kind == _LIST:
            chunks = [_column(reader) for _ in range(reader.list_of(_STRUCT))]
        else:
            reader.skip(kind)
    return chunks


def _column(reader: _Reader) -> ColumnChunk:
    chunk = ColumnChunk("", 0, 0, 0)
    for field, kind in reader.fields():
        if field == 3 and kind == _STRUCT:
            chunk = _column_metadata(reader)
        else:
            reader.skip(kind)
    return chunk


def _column_metadata(reader: _Reader) -> ColumnChunk:
    path, numbers = "", dict.fromkeys((6, 7, 9, 11), 0)
    for field, kind in reader.fields():
        if field == 3 and kind == _LIST:
            path = ".".join(reader.binary().decode() for _ in range(reader.list_of(_BINARY)))
        elif field in numbers and kind in _INTEGERS:
            numbers[field] = reader.integer()
        else:
            reader.skip(kind)
    data, dictionary = numbers[9], numbers[11]
    start = min(data, dictionary) if dictionary > 0 else data
    if start < 4 or numbers[7] < 0:
        raise ValueError(f"column '{path}' lies at byte {start}, with {numbers[7]} bytes")
    return ColumnChunk(path, start, start + numbers[7], max(0, numbers[6]))


class _Reader:
    """Reads Thrift's compact protocol. IndexError at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def varint(self) -> int:
        value = shift = 0
        for at in range(self._at, self._at + MAX_VARINT_BYTES):
            byte = self._data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self._at = at + 1
                return value
            shift += 7
        raise ValueError("the footer is damaged (a number of more than 64 bits)")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self) -> bytes:
        length = self.varint()
        start = self._at
        self._pass(length)
        return self._data[start : self._at]

    def fields(self) -> Iterator[tuple[int, int]]:
        """The number and the type of each field of a struct; the caller reads or skips what it holds."""
        field = 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self.integer()
            yield field, head & 0x0F

    def list_of(self, kind: int) -> int:
        """How many elements the list has that begins here. ValueError if they are of another type."""
        found, count = self._list()
        if count and found != kind:
            raise ValueError("the footer is damaged (a list of another type)")
        return count

    def skip(self, kind: int) -> None:
        if kind in _INTEGERS:
            self.varint()
        elif kind == _BINARY:
            self._pass(self.varint())
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner)
        elif kind in (_LIST, _SET):
            inner, count = self._list()
            for _ in range(count):
                self._skip_element(inner)
        elif kind == _MAP:
            self._skip_map()
        elif kind in (_BYTE, _DOUBLE):
            self._pass(1 if kind == _BYTE else 8)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"the footer is damaged (type {kind})")

    def _byte(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        return byte

    def _pass(self, nbytes: int) -> None:
        if nbytes > len(self._data) - self._at:
            raise IndexError
        self._at += nbytes

    def _list(self) -> tuple[int, int]:
        head = self._byte()
        return head & 0x0F, self.varint() if head >> 4 == 15 else head >> 4

    def _skip_map(self) -> None:
        count = self.varint()
        kinds = self._byte() if count else 0
        for _ in range(count):
            self._skip_element(kinds >> 4)
            self._skip_element(kinds & 0x0F)

    def _skip_element(self, kind: int) -> None:
        if kind in (_TRUE, _FALSE):  # outside of a struct it takes a byte
            self._pass(1)
        else:
            self.skip(kind)
