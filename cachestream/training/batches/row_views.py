"""Memory seen as rows that begin at any byte, so that one call gathers rows of any number of mapped files.

All maps that a batch may draw from lie in one window of the address space. A tensor over the window whose
rows overlap (one begins at every byte) turns a gather across thousands of shards into a single
`torch.index_select` with the rows' addresses as indices: one release of the GIL, at the speed of memcpy,
whatever the number of shards. Holes between the maps are never touched: no index names them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cachestream.schema import IntArray

_MAX_BYTES: Final = 1 << 62  # of overlapping rows: torch and numpy count them in an int64
_LARGE_SPAN_BYTES: Final = 32 * 1024
_CHUNKS: Final = (256, 64, 16)  # multiples of every dtype's width, 16 at most
_ALIGNMENT: Final = 64
_MOST_ELEMENTS: Final = 32 * 1024 - 1  # of a row that torch copies in one go
_MOST_PIECES: Final = 64

# Elements that rows are copied as, by their bytes.
_UNITS: Final = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# Copies rows of the first tensor to the last one; the second says which, int64 `[n]`.
Select: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def select_shared(rows: torch.Tensor, wanted: torch.Tensor, out: torch.Tensor) -> None:
    """By as many of torch's threads as this thread is to use."""
    torch.index_select(rows, 0, wanted, out=out)


@dataclass(frozen=True, slots=True)
class Pieces:
    """How rows are copied: each in `count` pieces of `num_bytes`, whose elements have `unit` bytes.

    `torch.index_select` copies pieces of fewer than 32,768 elements by memcpy and shares them among its threads
    once a call, without the GIL. Larger ones it shares one by one, which costs a third of the speed here, and most
    of it where others use the cores. So elements are as wide as the addresses allow, and large rows are cut.
    """

    unit: int
    num_bytes: int
    count: int

    @classmethod
    def of(cls, row_bytes: int, offsets: IntArray) -> Pieces:
        """The pieces of rows of `row_bytes` at `offsets` in a window."""
        bits = int(np.bitwise_or.reduce(offsets, initial=row_bytes)) | 16
        unit = bits & -bits
        elements = row_bytes // unit
        for count in range(-(-elements // _MOST_ELEMENTS), _MOST_PIECES + 1):
            if elements % count == 0:
                return cls(unit, row_bytes // count, count)
        return cls(unit, row_bytes, 1)

    def index(self, offsets: IntArray) -> IntArray:
        """The pieces of the rows at `offsets` as row numbers of the window's `rows`, int64 `[n * count]`."""
        if self.count > 1:
            offsets = (offsets[:, None] + np.arange(self.count) * self.num_bytes).reshape(-1)
        return offsets >> (self.unit.bit_length() - 1)  # a third of the time of a division


def rows_of(flat: torch.Tensor, row_bytes: int, unit: int) -> torch.Tensor:
    """Bytes, uint8 `[n * row_bytes]`, as `[n, row_bytes / unit]` of elements of `unit` bytes: 16, 8, 4, 2 or 1.

    Rows of one element come as `[n]`, as in `Window.rows`.
    """
    elements = flat.view(_UNITS[unit])
    return elements if row_bytes == unit else elements.view(-1, row_bytes // unit)


class Window:
    """The addresses [low, high) as bytes. Immutable; it keeps nothing alive: its users keep the maps."""

    __slots__ = ("_bytes", "_rows", "array", "high", "low")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        span = (ctypes.c_uint8 * (high - low)).from_address(low)
        self.array = np.frombuffer(memoryview(span), np.uint8)
        self._bytes = torch.from_numpy(self.array)
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def most_elements(self, unit: int) -> int:
        """How many elements of `unit` bytes a row may have, so that the bytes of all rows of the window can be counted."""
        elements = max(1, (self.high - self.low) // unit)
        return max(1, _MAX_BYTES // (elements * unit))

    def covers(self, low: int, high: int) -> bool:
        return self.low <= low and high <= self.high

    def rows(self, row_bytes: int, unit: int = 1) -> torch.Tensor:
        """`[elements, row_bytes / unit]` of elements of `unit` bytes: row i begins at element i, and overlaps the
        next ones. Rows of one element come as `[elements]`, which torch gathers five times as fast. Of rows with more
        than `most_elements` there are only the first.
        """
        view = self._rows.get((row_bytes, unit))
        if view is None:
            width, elements = row_bytes // unit, (self.high - self.low) // unit
            count = min(elements - width + 1, _MAX_BYTES // row_bytes)
            flat = self._bytes[: elements * unit].view(_UNITS[unit])
            view = flat if width == 1 else flat.as_strided((count, width), (1, 1))
            self._rows[row_bytes, unit] = view
        return view

    def items(self, num_bytes: int) -> npt.NDArray[np.void]:
        """Items of `num_bytes`, few, one beginning at every byte: numpy takes short ones as fast as torch takes rows."""
        count = self.high - self.low - num_bytes + 1
        return np.ndarray((count,), f"V{num_bytes}", self.array, strides=(1,))

    def index(self, addresses: IntArray) -> torch.Tensor:
        """`addresses` as row numbers of `rows`, int64 `[n]`."""
        return torch.from_numpy(addresses - self.low)


def gather_rows(window: Window, addresses: IntArray, width: int) -> IntArray:
    """`width` int64 numbers from each of `addresses`, int64 `[n, width]`."""
    found = window.items(8 * width)[addresses - window.low]
    return found.view(np.int64).reshape(-1, width)


class SpanLayout:
    """Where runs of bytes of different lengths go in one buffer, and how they get there.

    Short runs are cut into chunks that are gathered by one call, the last chunk of each ending with the run:
    what is read too much lies *before* a run, in the same file (there is at least the header), never after the
    end of a map. Long runs are copied one by one.
    """

    __slots__ = ("_addresses", "_chunk", "_lengths", "_rows", "num_bytes", "starts")

    def __init__(self, addresses: IntArray, lengths: IntArray, room_before: int) -> None:
        self._addresses = addresses
        self._lengths = lengths
        fits = [chunk for chunk in _CHUNKS if chunk <= room_before]
        large = not fits or (len(lengths) and int(lengths.sum()) >= _LARGE_SPAN_BYTES * len(lengths))
        self._chunk = 0 if large else fits[0]
        unit = self._chunk or _ALIGNMENT
        self._rows = -(-lengths // unit)
        stops = np.cumsum(self._rows) * unit
        self.num_bytes = int(stops[-1]) if len(stops) else 0
        # Where each run begins in the buffer, int64 [n]: at its chunks' end, or aligned at their start.
        self.starts: IntArray = stops - (lengths if self._chunk else self._rows * unit)

    @property
    def row_bytes(self) -> int:
        """How wide the rows are that `copy` wants its target in."""
        return self._chunk or _ALIGNMENT

    def copy(self, window: Window, out: torch.Tensor, select: Select = select_shared) -> None:
        """Copy the runs into `out`, uint8 `[num_bytes / row_bytes, row_bytes]`: short ones by `select`."""
        if not self._chunk:
            flat, places = out.numpy().reshape(-1), self._addresses - window.low
            for place, start, length in zip(
                places.tolist(), self.starts.tolist(), self._lengths.tolist(), strict=True
            ):
                flat[start : start + length] = window.array[place : place + length]
            return
        chunk, rows = self._chunk, self._rows
        before = np.cumsum(rows) - rows
        firsts = self._addresses + self._lengths - (rows + before) * chunk
        addresses = np.repeat(firsts, rows) + np.arange(len(out), dtype=np.int64) * chunk
        select(window.rows(chunk), window.index(addresses), out)
