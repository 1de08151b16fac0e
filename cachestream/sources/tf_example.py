"""A parser of `tf.train.Example` messages, one at a time or many at once.

It reads protobuf's wire format (protobuf.dev/programming-guides/encoding) of
tensorflow/core/example/feature.proto: lists of bytes, of float32 and of int64, packed or not.

`parse_example` reads any message. `parse_examples` reads many at once, if each is in the form that TFRecord
writers produce (every feature a single packed list of numbers, or a single string of bytes), and gives the
same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# The values of a bytes_list, a float_list or an int64_list, in order.
Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5  # wire types
_STRINGS, _FLOATS, _INTEGERS = 1, 2, 3  # numbers of bytes_list, float_list and int64_list in Feature
_UNPACKED: Final = {_STRINGS: _BYTES, _FLOATS: _I32, _INTEGERS: _VARINT}  # wire type of a value by itself
_MAX_ORDERS: Final = 4  # different orders of the features in one batch, at most: maps have no order
_MAX_LENGTH_BYTES: Final = 5
_Positions = npt.NDArray[np.int64]
_MAX_VARINT_BYTES: Final = 10
_FEW: Final = 24  # up to this many bytes, a loop is faster than numpy
_SIGN: Final = 1 << 63
_BLOCK: Final = 8192  # numbers decoded at a time, so that temporary arrays fit the processor's cache
# For words of 4 and of 8 bytes: the continuation bits, the value bits, and the (mask, shift) steps that join
# neighbouring groups of 7, then 14, then 28 bits.
_WORDS: Final[tuple[tuple[Any, Any, tuple[tuple[Any, Any], ...]], ...]] = (
    (
        np.uint32(0x80808080),
        np.uint32(0x7F7F7F7F),
        ((np.uint32(0x007F007F), np.uint32(1)), (np.uint32(0x3FFF), np.uint32(2))),
    ),
    (
        np.uint64(0x8080808080808080),
        np.uint64(0x7F7F7F7F7F7F7F7F),
        (
            (np.uint64(0x007F007F007F007F), np.uint64(1)),
            (np.uint64(0x00003FFF00003FFF), np.uint64(2)),
            (np.uint64(0x000000000FFFFFFF), np.uint64(4)),
        ),
    ),
)


def one_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned number at `at`, and the position after it. Raises IndexError at the end."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("malformed: a number of more than 64 bits")


def last_bytes(packed: bytes) -> npt.NDArray[np.int64]:
    """Return the position of the last byte of each number in `packed`."""
    return np.flatnonzero(np.frombuffer(packed, np.uint8) < 0x80)


def decode_varints(packed: bytes, ends: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """Return the numbers in `packed`; `ends` are their `last_bytes`, if known.

    Raises ValueError if a number is truncated, or longer than 10 bytes.
    """
    if not packed:
        return np.empty(0, np.int64)
    if packed[-1] >= 0x80:
        raise ValueError("malformed: a number is cut off")
    if len(packed) <= _FEW:
        return _decode_few(packed)
    data = np.frombuffer(packed, np.uint8)
    ends = last_bytes(packed) if ends is None else ends
    if len(ends) == len(data):  # one byte each
        return data.astype(np.int64)
    found = np.empty(len(ends), np.int64)
    starts = np.empty(min(_BLOCK, len(ends)), np.int64)
    padded = packed + bytes(7)
    for first in range(0, len(ends), _BLOCK):
        out = found[first : first + _BLOCK]
        base = int(ends[first - 1]) + 1 if first else 0
        begins, stops = starts[: len(out)], ends[first : first + len(out)]
        begins[0] = 0
        np.subtract(stops[:-1], base - 1, out=begins[1:])
        if not _decode_words(padded, base, begins, out):
            _decode_long(data[base:], begins, stops - base, out)
    return found


def _decode_few(packed: bytes) -> npt.NDArray[np.int64]:
    found, at = [], 0
    while at < len(packed):
        value, at = one_varint(packed, at)
        value &= 2 * _SIGN - 1
        found.append(value - 2 * _SIGN if value >= _SIGN else value)
    return np.array(found, np.int64)


def _decode_words(
    padded: bytes, base: int, starts: npt.NDArray[np.int64], out: npt.NDArray[np.int64]
) -> bool:
    """Decode the numbers at `base + starts`, each from one word of 4 or 8 bytes; False if one is longer.

    The steps are SWAR ("SIMD within a register"): the bytes after a number are masked away, and its groups of
    7 bits are joined two by two.
    """
    for more_bits, value_bits, folds in _WORDS:
        if starts[-1] > more_bits.itemsize * len(starts):
            continue
        # `every` are overlapping words, one at each byte: `take` copies only those that begin a number.
        kind = more_bits.dtype.newbyteorder("<")
        every: npt.NDArray[Any] = np.ndarray((int(starts[-1]) + 1,), kind, padded, base, (1,))
        words = every.take(starts)
        last = ~words
        last &= more_bits  # the lowest of these bits is that of the number's last byte
        if not last.all():
            continue
        last ^= last - more_bits.dtype.type(1)
        words &= last
        words &= value_bits
        for mask, shift in folds:
            high = words & ~mask
            high >>= shift
            words &= mask
            words |= high
        out[:] = words.view(np.int64) if words.itemsize == 8 else words
        return True
    return False


def _decode_long(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Decode numbers of any length, which begin at `starts`, byte by byte."""
    lengths = ends - starts
    longest = int(lengths.max()) + 1
    if longest > _MAX_VARINT_BYTES:
        raise ValueError("malformed: a number of more than 64 bits")
    values = np.zeros(len(starts), np.uint64)
    for place in range(longest):
        part = (data.take(starts + place, mode="clip") & 0x7F).astype(np.uint64)
        part *= lengths >= place
        part <<= np.uint64(7 * place)
        values |= part
    out[:] = values.view(np.int64)


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return the features of a serialized Example by name; features without a list are left out.

    Raises ValueError, or IndexError at the end of `data`, for anything else, such as a SequenceExample.
    """
    return {name: _values(data, list_kind, start, stop) for name, list_kind, start, stop in _lists(data)}


def _lists(data: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name of each feature of an Example, the kind of its list, and the range of the list."""
    for number, kind, start, stop in _fields(data, 0, len(data)):
        if number == 2 and kind == _BYTES:
            raise ValueError("a SequenceExample; only tf.train.Example is read")
        if number != 1 or kind != _BYTES:
            raise ValueError("no tf.train.Example")
        for inner, entry_kind, first, last in _fields(data, start, stop):
            if inner == 1 and entry_kind == _BYTES:
                name, found = _parse_entry(data, first, last)
                if found is not None:
                    yield name, *found


def _layout_of(data: bytes) -> list[tuple[str, int]] | None:
    """Return the names of the features of an Example in order, and the kinds of their lists.

    None if it has no features, or one twice, or is malformed.
    """
    try:
        found = [(name, list_kind) for name, list_kind, _, _ in _lists(data)]
    except (ValueError, IndexError):
        return None
    return found if found and len(dict(found)) == len(found) else None


def _parse_entry(data: bytes, start: int, stop: int) -> tuple[str, tuple[int, int, int] | None]:
    """Return the name in an entry of the map of features, and the kind and the range of its list."""
    name, found = "", None
    for number, kind, first, last in _fields(data, start, stop):
        if kind == _BYTES and number == 1:
            name = data[first:last].decode()
        elif kind == _BYTES and number == 2:
            for list_kind, inner, begin, end in _fields(data, first, last):
                if inner == _BYTES and list_kind in _UNPACKED:
                    found = list_kind, begin, end
    return name, found


def _values(data: bytes, list_kind: int, start: int, stop: int) -> Feature:
    """Return the values of a list, packed or not."""
    kinds = (_BYTES, _UNPACKED[list_kind])
    parts = [
        data[first:last]
        for number, kind, first, last in _fields(data, start, stop)
        if number == 1 and kind in kinds
    ]
    if list_kind == _STRINGS:
        return parts
    if list_kind == _INTEGERS:
        return decode_varints(b"".join(parts))
    if any(len(part) % 4 for part in parts):
        raise ValueError("malformed: floats of a broken length")
    return np.frombuffer(b"".join(parts), "<f4")


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of a message: number, wire type, and the range of the value's bytes."""
    at = start
    while at < stop:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = one_varint(data, at - 1)
        kind = tag & 7
        if kind == _BYTES:
            length = data[at]
            at += 1
            if length >= 0x80:
                length, at = one_varint(data, at - 1)
        elif kind == _I32:
            length = 4
        elif kind == _I64:
            length = 8
        elif kind == _VARINT:
            _, end = one_varint(data, at)
            length = end - at
        else:
            raise ValueError(f"malformed: wire type {kind}")
        if length > stop - at:
            raise ValueError("malformed: a field reaches past its message")
        yield tag >> 3, kind, at, at + length
        at += length


@dataclass(frozen=True, slots=True, eq=False)
class FeatureColumn:
    """One feature of n examples.

    `values` are the int64 or float32 numbers of all examples, and `values[ends[i - 1]:ends[i]]` those of
    example i; or the bytes of each example, and `ends` is None.
    """

    values: npt.NDArray[Any] | list[bytes]
    ends: _Positions | None

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.values if self.ends is None else self.ends)

    @property
    def each(self) -> int | None:
        """The number of values in each example; None if it differs between examples, or for bytes."""
        if self.ends is None:
            return None
        first = int(self.ends[0])
        return first if np.array_equal(self.ends, np.arange(1, len(self) + 1) * first) else None

    @property
    def features(self) -> Iterator[Feature]:
        """The feature of each example, as `parse_example` returns it."""
        if isinstance(self.values, list):
            yield from ([value] for value in self.values)
        elif self.ends is not None:
            begin = 0
            for end in self.ends.tolist():
                yield self.values[begin:end]
                begin = end


def parse_examples(
    data: bytes, starts: Sequence[int], stops: Sequence[int]
) -> dict[str, FeatureColumn] | None:
    """Return the features of the examples `data[starts[i]:stops[i]]`, of which there is at least one.

    None if the examples have different features, or one is not in the usual form: `parse_example` then reads
    them, or reports the error.
    """
    first, last = np.array(starts, np.int64), np.array(stops, np.int64)
    spans: dict[tuple[str, int], tuple[_Positions, _Positions]] = {}
    left: _Positions = np.arange(len(first))
    for _ in range(_MAX_ORDERS):
        one = int(left[0])
        layout = _layout_of(data[starts[one] : stops[one]])
        if layout is None:
            return None
        matches, found = _match_layout(data, first[left], last[left], layout)
        if not spans:
            spans = {feature: (np.empty_like(first), np.empty_like(first)) for feature in layout}
        if spans.keys() != set(layout) or not matches[0]:  # `one` is not in the usual form itself
            return None
        for feature, ends in zip(layout, found, strict=True):
            for whole, part in zip(spans[feature], ends, strict=True):
                whole[left[matches]] = part[matches]
        left = left[~matches]
        if not len(left):
            return _columns(data, spans)
    return None


def rows_of(columns: Mapping[str, FeatureColumn]) -> Iterator[dict[str, Feature]]:
    """Yield the features of each example, as `parse_example` returns them."""
    for features in zip(*(column.features for column in columns.values()), strict=True):
        yield dict(zip(columns, features, strict=True))


def _columns(
    data: bytes, spans: dict[tuple[str, int], tuple[_Positions, _Positions]]
) -> dict[str, FeatureColumn] | None:
    found = {}
    for (name, list_kind), (begins, ends) in spans.items():
        parts = [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        if list_kind == _STRINGS:
            found[name] = FeatureColumn(parts, None)
            continue
        column = _numbers(b"".join(parts), ends - begins, list_kind)
        if column is None:
            return None
        found[name] = column
    return found


def _numbers(packed: bytes, nbytes: _Positions, list_kind: int) -> FeatureColumn | None:
    """Decode the numbers in `packed`, `nbytes[i]` bytes for example i; None if one is truncated."""
    ends = np.cumsum(nbytes)
    if list_kind == _FLOATS:
        return None if (nbytes % 4).any() else FeatureColumn(np.frombuffer(packed, "<f4"), ends // 4)
    stops = last_bytes(packed)
    count_ends = np.searchsorted(stops, ends)
    # The bytes of each example must end with the last byte of a number.
    if not np.array_equal(np.concatenate([[-1], stops])[count_ends], ends - 1):
        return None
    try:
        return FeatureColumn(decode_varints(packed, stops), count_ends)
    except ValueError:
        return None


def _match_layout(
    data: bytes, starts: _Positions, stops: _Positions, layout: Sequence[tuple[str, int]]
) -> tuple[npt.NDArray[np.bool_], list[tuple[_Positions, _Positions]]]:
    """Match the examples against `layout`, all in step.

    Returns a mask of the examples that have these features in this order, and for each feature the ranges of
    its values.
    """
    cursors = _Cursors(data, starts)
    cursors.expect(b"\x0a")  # Example.features
    end = cursors.length() + cursors.positions
    cursors.matches &= end == stops
    found = []
    for name, list_kind in layout:
        encoded = name.encode()
        cursors.expect(b"\x0a")  # Features.feature: an entry of the map
        entry_end = cursors.length() + cursors.positions
        cursors.expect(b"\x0a" + _encode_length(len(encoded)) + encoded + b"\x12")  # key, value
        ends = [cursors.length() + cursors.positions]
        for tag in (list_kind << 3 | 2, 0x0A):  # the kind of list, the list's values
            cursors.expect(bytes([tag]))
            ends.append(cursors.length() + cursors.positions)
        for inner in ends:
            cursors.matches &= inner == entry_end
        found.append((cursors.positions, entry_end))
        cursors.positions = entry_end
    cursors.matches &= cursors.positions == end
    return cursors.matches, found


def _encode_length(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


class _Cursors:
    """Positions in `data` that advance in step; `matches` is True for those that have matched so far."""

    def __init__(self, data: bytes, positions: _Positions) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.positions = positions
        self.matches = np.ones(len(positions), np.bool_)

    def expect(self, pattern: bytes) -> None:
        """Advance past `pattern`; positions without it no longer fit."""
        if len(pattern) > len(self._data):
            self.matches[:] = False
        elif len(pattern) == 1:
            self.matches &= self._data.take(self.positions, mode="clip") == pattern[0]
        else:
            every = np.lib.stride_tricks.sliding_window_view(self._data, len(pattern))
            windows = every[np.minimum(self.positions, len(every) - 1)]
            self.matches &= (windows == np.frombuffer(pattern, np.uint8)).all(axis=1)
        self.positions = self.positions + len(pattern)

    def length(self) -> _Positions:
        """Advance past a length of at most five bytes, and return it."""
        value = np.zeros(len(self.positions), np.int64)
        more = np.ones(len(self.positions), np.bool_)
        for place in range(_MAX_LENGTH_BYTES):
            byte = self._data.take(self.positions, mode="clip")
            value |= np.where(more, byte & 0x7F, 0).astype(np.int64) << 7 * place
            self.positions = self.positions + more
            more &= byte >= 0x80
            if not more.any():
                return value
        self.matches &= ~more
        return value
