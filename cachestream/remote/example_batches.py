"""Many serialized `tf.train.Example`s at once: parsed side by side, a field of all of them in one step.

Only what writers of TFRecords make is read here: each feature one packed list of numbers, or one string of bytes.
`parse_example` reads everything else; what both read, both read alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.remote.examples import Feature, layout_of
from cachestream.remote.varints import decode_varints, last_bytes

__all__ = ["FeatureColumn", "parse_examples", "rows_of"]

_ORDERS: Final = 4  # of the features in the records of a batch: maps have none
_LENGTH_BYTES: Final = 5
_FLOATS, _INTEGERS = 2, 3
_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureColumn:
    """One feature of n examples: the numbers of all of them, int64 or float32, those of i from ends[i - 1] to ends[i];
    or the bytes of each, `ends` then None.
    """

    values: npt.NDArray[Any] | list[bytes]
    ends: _Places | None

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self.values if self.ends is None else self.ends)

    @property
    def each(self) -> int | None:
        """How many numbers each example has; None where they differ."""
        if self.ends is None:
            return None
        first = int(self.ends[0])
        return first if np.array_equal(self.ends, np.arange(1, len(self) + 1) * first) else None

    @property
    def features(self) -> Iterator[Feature]:
        """The feature of each example, as `parse_example` gives it."""
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
    """The features of the examples that lie from starts[i] to stops[i] in `data`, at least one.

    None where they do not all have the same features, or one of them is not as writers make it: `parse_example`
    reads them then, or says what is wrong.
    """
    first, last = np.array(starts, np.int64), np.array(stops, np.int64)
    spans: dict[tuple[str, int], tuple[_Places, _Places]] = {}
    left: _Places = np.arange(len(first))
    for _ in range(_ORDERS):
        one = int(left[0])
        layout = layout_of(data[starts[one] : stops[one]])
        if layout is None:
            return None
        fits, found = _side_by_side(data, first[left], last[left], layout)
        if not spans:
            spans = {feature: (np.empty_like(first), np.empty_like(first)) for feature in layout}
        if spans.keys() != set(layout) or not fits[0]:
            return None
        for feature, ends in zip(layout, found, strict=True):
            for whole, part in zip(spans[feature], ends, strict=True):
                whole[left[fits]] = part[fits]
        left = left[~fits]
        if not len(left):
            return _columns(data, spans)
    return None


def rows_of(columns: Mapping[str, FeatureColumn]) -> Iterator[dict[str, Feature]]:
    """The features of each example, as `parse_example` gives them."""
    for features in zip(*(column.features for column in columns.values()), strict=True):
        yield dict(zip(columns, features, strict=True))


def _columns(
    data: bytes, spans: dict[tuple[str, int], tuple[_Places, _Places]]
) -> dict[str, FeatureColumn] | None:
    found = {}
    for (name, which), (begins, ends) in spans.items():
        parts = [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        if which not in (_FLOATS, _INTEGERS):
            found[name] = FeatureColumn(parts, None)
            continue
        column = _numbers(b"".join(parts), ends - begins, which)
        if column is None:
            return None
        found[name] = column
    return found


def _numbers(packed: bytes, nbytes: _Places, which: int) -> FeatureColumn | None:
    """The numbers that lie in `packed`, `nbytes` of each example; None where one of them is cut off."""
    ends = np.cumsum(nbytes)
    if which == _FLOATS:
        return None if (nbytes % 4).any() else FeatureColumn(np.frombuffer(packed, "<f4"), ends // 4)
    stops = last_bytes(packed)
    count_ends = np.searchsorted(stops, ends)
    # The last byte of each example's numbers is the last of a number.
    if not np.array_equal(np.concatenate([[-1], stops])[count_ends], ends - 1):
        return None
    try:
        return FeatureColumn(decode_varints(packed, stops), count_ends)
    except ValueError:
        return None


def _side_by_side(
    data: bytes, starts: _Places, stops: _Places, layout: Sequence[tuple[str, int]]
) -> tuple[npt.NDArray[np.bool_], list[tuple[_Places, _Places]]]:
    """Which of the examples have the features of `layout` in this order, and where the values of each of these lie."""
    at = _Cursors(data, starts)
    at.expect(b"\x0a")  # Example.features
    end = at.length() + at.places
    at.fits &= end == stops
    found = []
    for number, (name, which) in enumerate(layout):
        encoded = name.encode()
        at.expect(b"\x0a")  # Features.feature: an entry of the map
        entry_end = at.length() + at.places
        at.expect(b"\x0a" + _length(len(encoded)) + encoded + b"\x12")  # key, value
        ends = [at.length() + at.places]
        for tag in (which << 3 | 2, 0x0A):  # the kind of list; what is in it
            at.expect(bytes([tag]))
            ends.append(at.length() + at.places)
        for inner in ends:
            at.fits &= inner == entry_end
        found.append((at.places, entry_end))
        at.places = entry_end
        if number == len(layout) - 1:
            at.fits &= entry_end == end
    return at.fits, found


def _length(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


class _Cursors:
    """Places in `data` that go forward together; `fits` says which of them found what was expected so far."""

    def __init__(self, data: bytes, places: _Places) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.places = places
        self.fits = np.ones(len(places), np.bool_)

    def expect(self, pattern: bytes) -> None:
        """Go past `pattern`."""
        if len(pattern) > len(self._data):
            self.fits[:] = False
        elif len(pattern) == 1:
            self.fits &= self._data.take(self.places, mode="clip") == pattern[0]
        else:
            every = np.lib.stride_tricks.sliding_window_view(self._data, len(pattern))
            windows = every[np.minimum(self.places, len(every) - 1)]
            self.fits &= (windows == np.frombuffer(pattern, np.uint8)).all(axis=1)
        self.places = self.places + len(pattern)

    def length(self) -> _Places:
        """Go past a length, of at most five bytes; what it says."""
        value = np.zeros(len(self.places), np.int64)
        more = np.ones(len(self.places), np.bool_)
        for place in range(_LENGTH_BYTES):
            byte = self._data.take(self.places, mode="clip")
            value |= np.where(more, byte & 0x7F, 0).astype(np.int64) << 7 * place
            self.places = self.places + more
            more &= byte >= 0x80
            if not more.any():
                return value
        self.fits &= ~more
        return value
