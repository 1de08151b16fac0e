"""`tf.train.Example` messages → the values of their features, without TensorFlow.

Reads protobuf's wire format (protobuf.dev/programming-guides/encoding) of tensorflow/core/example/feature.proto:
lists of bytes, of float32 and of int64, packed or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.remote.varints import decode_varints, one_varint

__all__ = ["Feature", "layout_of", "parse_example"]

# bytes_list, float_list or int64_list: what the feature holds, in its order.
Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5


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


def layout_of(data: bytes) -> list[tuple[str, int]] | None:
    """The features of a serialized Example in their order, each with the number of its kind: 1 bytes, 2 float32, 3 int64.

    None for one that is empty or malformed, that has a feature twice, or one that is not a single packed list of numbers,
    or a single string of bytes.
    """
    try:
        features = _only(data, 0, len(data), 1)
        found: dict[str, int] = {}
        for number, kind, start, stop in _fields(data, *features):
            (name_at, value_at) = [(first, last) for _, _, first, last in _fields(data, start, stop)]
            ((which, _, first, last),) = _fields(data, *value_at)
            _only(data, first, last, 1)
            name = data[slice(*name_at)].decode()
            tags = number, kind, data[start], data[name_at[1]], data[value_at[0]]
            if name in found or which not in _LISTS or tags != (1, _BYTES, 0x0A, 0x12, which << 3 | _BYTES):
                return None
            found[name] = which
    except (ValueError, IndexError):
        return None
    return list(found.items()) or None


def _only(data: bytes, start: int, stop: int, wanted: int) -> tuple[int, int]:
    """Where the one field of a message lies, which has the number `wanted`; raises ValueError if it is another."""
    ((number, kind, first, last),) = _fields(data, start, stop)
    if (number, kind) != (wanted, _BYTES):
        raise ValueError(f"field {number} of type {kind}")
    return first, last


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
    return decode_varints(parts[0] if len(parts) == 1 else b"".join(parts))


_LISTS: Final[dict[int, Any]] = {1: _bytes_list, 2: _float_list, 3: _int64_list}
