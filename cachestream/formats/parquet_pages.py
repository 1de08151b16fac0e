"""A Parquet file whose pages are checked before they are unpacked: a page of a few bytes may hold gigabytes.

Only the headers of the pages are parsed here (Thrift's compact protocol); pyarrow decodes the rest.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cachestream.sources.api import RemoteObject, SeekableFile, Span, check_object

# Pages hold many values, and no writer makes them larger unless a value is: smaller ones are always read.
LEAST_LIMIT_BYTES: Final = 64 << 20
_HEADER_BYTES: Final = 1 << 20  # a header may hold the least and the largest value
_HEAD_BYTES: Final = 1024  # the header of a dictionary takes about 20
_UNPACKED, _PACKED, _DICTIONARY, _COUNT = 2, 3, 7, 1  # numbers of fields: of a page header, of its parts

Fields = dict[int, Any]


class PagedFile(SeekableFile):
    """A Parquet file of which pyarrow reads the column chunks `chunks`, each from its beginning.

    A read that reaches the header of a page that is above the limit for one object, when unpacked, raises
    TooLargeError: pyarrow would take memory for all of it.
    """

    def __init__(self, file: RemoteObject, spans: Sequence[Span], chunks: Sequence[Span]) -> None:
        super().__init__(file, spans)
        ordered = sorted(chunks)
        self._starts = [start for start, _ in ordered]
        self._ahead = [[start, stop] for start, stop in ordered]  # the next header and the end of each chunk

    def dictionaries(self, chunks: Sequence[Span]) -> Iterator[tuple[int, int]]:
        """Yield the size of each chunk's dictionary when unpacked, and its number of values."""
        spans = [(start, min(stop, start + _HEAD_BYTES)) for start, stop in chunks]
        # By one call, which has several requests under way.
        heads = (
            [super(PagedFile, self)._bytes(*span) for span in spans]
            if self._held
            else self._file.read_spans(spans)
        )
        for (start, stop), head in zip(chunks, heads, strict=True):
            header = _parse(head)
            if header is None and stop - start > len(head):  # cut off
                header = _parse(super()._bytes(start, min(stop, start + _HEADER_BYTES)))
            dictionary = header and header[0].get(_DICTIONARY)
            if header and isinstance(dictionary, dict):
                yield _number(header[0], _UNPACKED), max(1, _number(dictionary, _COUNT))

    def _bytes(self, start: int, stop: int) -> memoryview:
        data = super()._bytes(start, stop)
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0:
            return data
        chunk = self._ahead[index]
        while start <= chunk[0] < min(stop, chunk[1]):
            at = chunk[0]
            header = _parse(data[at - start :])
            if header is None:  # cut off
                header = _parse(super()._bytes(at, min(chunk[1], at + _HEADER_BYTES)))
            if header is None:
                chunk[0] = chunk[1]  # pyarrow refuses it, too
                break
            unpacked = _number(header[0], _UNPACKED)
            if unpacked > LEAST_LIMIT_BYTES:
                check_object(unpacked)
            chunk[0] = at + header[1] + max(0, _number(header[0], _PACKED))
        return data


def _number(fields: Fields, number: int) -> int:
    found = fields.get(number)
    return found if isinstance(found, int) else 0


def _parse(data: memoryview) -> tuple[Fields, int] | None:
    """Return the fields of the header that `data` begin with, by number, and its size; None if it is cut
    off.
    """
    try:
        return _struct(data, 0, 0)
    except (IndexError, ValueError):
        return None


def _struct(data: memoryview, at: int, depth: int) -> tuple[Fields, int]:
    fields: Fields = {}
    number = 0
    while data[at]:
        kind, delta = data[at] & 15, data[at] >> 4
        at += 1
        if delta:
            number += delta
        else:
            number, at = _integer(data, at)
        fields[number], at = (kind == 1, at) if kind in (1, 2) else _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a value and the place behind it; None for one that no check needs."""
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 12 and depth < 8:
        return _struct(data, at, depth + 1)
    if kind in (1, 2, 3):  # of a list
        return None, at + 1
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return None, at + length
    if kind in (9, 10) and depth < 8:
        count, items = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        for _ in range(min(count, len(data))):
            _, at = _value(data, at, items, depth + 1)
            if at > len(data):
                raise IndexError
        return None, at
    raise ValueError(f"a value of the kind {kind}")


def _integer(data: memoryview, at: int) -> tuple[int, int]:
    found, at = _varint(data, at)
    return (found >> 1) ^ -(found & 1), at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
    raise ValueError("an integer of more than 64 bits")
