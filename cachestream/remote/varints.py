"""Protobuf's varints → int64: 7 bits a byte, the lowest first (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["decode_varints", "last_bytes", "one_varint"]

_MAX_BYTES: Final = 10
_FEW: Final = 24  # bytes that a loop decodes faster than numpy
_SIGN: Final = 1 << 63
_BLOCK: Final = 8192  # numbers at a time: what is between lies in the processor's cache
# Of words of 4 and of 8 bytes: the bits that say that a number goes on, those of its value, and how the groups of
# 7 bits are moved together, two by two.
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
    """The number, not signed, that begins at `at`, and where the next byte is. Raises IndexError at the end of `data`."""
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
    """Where the last byte of each number in `packed` lies."""
    return np.flatnonzero(np.frombuffer(packed, np.uint8) < 0x80)


def decode_varints(packed: bytes, ends: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """The numbers that lie in `packed`; `ends` are their `last_bytes`, if known.

    Raises ValueError where one is cut off, or longer than 10 bytes.
    """
    if not packed:
        return np.empty(0, np.int64)
    if packed[-1] >= 0x80:
        raise ValueError("malformed: a number is cut off")
    if len(packed) <= _FEW:
        return _few(packed)
    data = np.frombuffer(packed, np.uint8)
    ends = last_bytes(packed) if ends is None else ends
    if len(ends) == len(data):  # small numbers all
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
        if not _words(padded, base, begins, out):
            _long(data[base:], begins, stops - base, out)
    return found


def _few(packed: bytes) -> npt.NDArray[np.int64]:
    found, at = [], 0
    while at < len(packed):
        value, at = one_varint(packed, at)
        value &= 2 * _SIGN - 1
        found.append(value - 2 * _SIGN if value >= _SIGN else value)
    return np.array(found, np.int64)


def _words(padded: bytes, base: int, starts: npt.NDArray[np.int64], out: npt.NDArray[np.int64]) -> bool:
    """The numbers that begin at `starts` after `base`, each out of a word; False where one is of more than 8 bytes."""
    for more_bits, value_bits, folds in _WORDS:
        if starts[-1] > more_bits.itemsize * len(starts):
            continue
        # `take` copies what overlaps: no more than these numbers' own bytes.
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


def _long(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Numbers of any length that begin at `starts`, byte by byte."""
    lengths = ends - starts
    longest = int(lengths.max()) + 1
    if longest > _MAX_BYTES:
        raise ValueError("malformed: a number of more than 64 bits")
    values = np.zeros(len(starts), np.uint64)
    for place in range(longest):
        part = (data.take(starts + place, mode="clip") & 0x7F).astype(np.uint64)
        part *= lengths >= place
        part <<= np.uint64(7 * place)
        values |= part
    out[:] = values.view(np.int64)
