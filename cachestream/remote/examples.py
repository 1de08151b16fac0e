"""`tf.train.Example` messages → the values of their features, without TensorFlow.

Reads protobuf's wire format (protobuf.dev/programming-guides/encoding) of tensorflow/core/example/feature.proto:
lists of bytes, of float32 and of int64, packed or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Feature", "parse_example"]

# bytes_list, float_list or int64_list: what the feature holds, in its order.
Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
_FEW: Final = 24  # bytes of varints that a loop decodes faster than numpy
_SIGN: Final = 1 << 63
_WORD_BYTES: Final = 8
# The bits of a varint of 1, 2, … 8 bytes that tell its value.
_LOW_BITS: Final = np.array(
    [0x7F7F7F7F7F7F7F7F >> 8 * (_WORD_BYTES - 1 - length) for length in range(_WORD_BYTES)], np.uint64
)
_FOLDS: Final = tuple(
    (np.uint64(mask), np.uint64(shift))
    for mask, shift in ((0x007F007F007F007F, 1), (0x00003FFF00003FFF, 2), (0x000000000FFFFFFF, 4))
)


def parse_example(data: bytes) -> dict[str, Feature]:
    """The features of a serialized Example by name; those without any list are left out.

    Raises ValueError for what is none, a SequenceExample among it.
    """
    features: dict[str, Feature] = {}
    for number, kind, start, stop in _fields(data, 0, len(data)):
        if number == 2 and kind == _BYTES:
            raise ValueError("a SequenceExample; only tf.train.Example is read")
        if number != 1 or kind != _BYTES:
            raise ValueError("no tf.train.Example")
        for inner, entry_kind, first, last in _fields(data, start, stop):
            if inner == 1 and entry_kind == _BYTES:
                name, feature = _entry(data, first, last)
                if feature is not None:
                    features[name] = feature
    return features


def _entry(data: bytes, start: int, stop: int) -> tuple[str, Feature | None]:
    """One entry of the map of features."""
    name, feature = "", None
    for number, kind, first, last in _fields(data, start, stop):
        if kind == _BYTES and number == 1:
            name = data[first:last].decode()
        elif kind == _BYTES and number == 2:
            for which, inner, begin, end in _fields(data, first, last):
                if inner == _BYTES and which in _LISTS:
                    feature = _LISTS[which](data, begin, end)
    return name, feature


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, and where the value lies; (value, 0) for a varint."""
    at = start
    while at < stop:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == _BYTES:
            length = data[at]
            at += 1
            if length >= 0x80:
                length, at = _varint(data, at - 1)
        elif kind == _I32:
            length = 4
        elif kind == _I64:
            length = 8
        elif kind == _VARINT:
            _, end = _varint(data, at)
            length = end - at
        else:
            raise ValueError(f"malformed: wire type {kind}")
        if length > stop - at:
            raise ValueError("malformed: a field reaches past its message")
        yield tag >> 3, kind, at, at + length
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
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


def _bytes_list(data: bytes, start: int, stop: int) -> list[bytes]:
    return [
        data[first:last]
        for number, kind, first, last in _fields(data, start, stop)
        if number == 1 and kind == _BYTES
    ]


def _float_list(data: bytes, start: int, stop: int) -> npt.NDArray[np.float32]:
    parts: list[bytes] = []
    for number, kind, first, last in _fields(data, start, stop):
        if number != 1 or kind not in (_BYTES, _I32):
            continue
        if (last - first) % 4:
            raise ValueError("malformed: floats of a broken length")
        parts.append(data[first:last])
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    return np.frombuffer(whole, "<f4")


def _int64_list(data: bytes, start: int, stop: int) -> npt.NDArray[np.int64]:
    parts = [
        data[first:last]
        for number, kind, first, last in _fields(data, start, stop)
        if number == 1 and kind in (_BYTES, _VARINT)
    ]
    return _varints(parts[0] if len(parts) == 1 else b"".join(parts))


def _varints(packed: bytes) -> npt.NDArray[np.int64]:
    """The int64 that lie in `packed`, 7 bits a byte, the lowest first."""
    if not packed:
        return np.empty(0, np.int64)
    if packed[-1] >= 0x80:
        raise ValueError("malformed: a number is cut off")
    if len(packed) <= _FEW:
        few, at = [], 0
        while at < len(packed):
            value, at = _varint(packed, at)
            value &= 2 * _SIGN - 1
            few.append(value - 2 * _SIGN if value >= _SIGN else value)
        return np.array(few, np.int64)
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) == len(data):  # small numbers all
        return data.astype(np.int64)
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    lengths = ends - starts
    longest = int(lengths.max()) + 1
    if longest > _MAX_VARINT_BYTES:
        raise ValueError("malformed: a number of more than 64 bits")
    if longest <= _WORD_BYTES:
        return _words(packed, starts, lengths)
    low = (data & 0x7F).astype(np.uint64)
    values = low.take(starts)
    for place in range(1, longest):
        starts += 1
        part = low.take(starts, mode="clip")
        part *= lengths >= place
        part <<= np.uint64(7 * place)
        values |= part
    return values.view(np.int64)


def _words(
    packed: bytes, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The numbers of at most 8 bytes that begin at `starts`; `lengths` are those of the bytes less one.

    Each is a word, whose groups of 7 bits are moved together two by two.
    """
    padded = packed + bytes(_WORD_BYTES - 1)
    every = np.ndarray((len(packed),), "<u8", padded, 0, (1,))
    words = every.take(starts)
    words &= _LOW_BITS.take(lengths)
    for mask, shift in _FOLDS:
        high = words & ~mask
        high >>= shift
        words &= mask
        words |= high
    return words.view(np.int64)


_LISTS: Final[dict[int, Any]] = {1: _bytes_list, 2: _float_list, 3: _int64_list}
