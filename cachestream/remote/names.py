"""A list of many paths in little memory: the bytes of all in one block, and where each begins."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from pickle import PickleBuffer
from typing import Any, Final, overload

import numpy as np
import xxhash

from cachestream.model import IntArray

__all__ = ["Names", "NamesBuilder"]

_CUT_AT_ONCE: Final = 65_536


class Names(Sequence[str]):
    """An immutable sequence of texts, 8 bytes above their UTF-8 each; cheap to pickle, or to map.

    A Python list of 10 million paths takes 1.2 GB, and every forked reader copies it page by page
    as it counts references. File names that are not UTF-8 pass through (surrogateescape).
    """

    __slots__ = ("_block", "_offsets")

    def __init__(self, names: Iterable[str]) -> None:
        encoded = list(map(os.fsencode, names))
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        self._hold(b"".join(encoded), offsets)

    def _hold(self, block: bytes | memoryview, offsets: IntArray) -> None:
        offsets.flags.writeable = False
        self._block, self._offsets = block, offsets

    @classmethod
    def of_block(cls, block: bytes | memoryview, offsets: IntArray) -> Names:
        """Names whose bytes lie in `block`, name i from `offsets[i]` to `offsets[i + 1]`."""
        names = cls.__new__(cls)
        names._hold(block, offsets)
        return names

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """With protocol 5 the names may lie outside of the pickle, in memory that processes share."""
        block = PickleBuffer(self._block) if protocol >= 5 else bytes(self._block)
        return Names.of_block, (block, self._offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        start, stop = self._offsets[index : index + 2].tolist()
        return os.fsdecode(bytes(self._block[start:stop]))

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _CUT_AT_ONCE):
            for start, stop in pairwise(self._offsets[first : first + _CUT_AT_ONCE + 1].tolist()):
                yield os.fsdecode(bytes(self._block[start:stop]))

    @property
    def nbytes(self) -> int:
        """Bytes that the names take up in memory."""
        return len(self._block) + int(self._offsets.nbytes)

    @property
    def digest(self) -> str:
        """xxh3 (64 bits, hexadecimal) of all names in their order."""
        return self.digest_of(len(self))

    def digest_of(self, count: int) -> str:
        """The digest of the first `count` names alone."""
        offsets = self._offsets[: count + 1]
        state = xxhash.xxh3_64(np.ascontiguousarray(offsets).data)
        state.update(memoryview(self._block)[: int(offsets[-1])])
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"<{len(self):,} names, {self.nbytes:,} bytes>"


class NamesBuilder:
    """Names that come one by one, without a Python object kept for each."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._offsets = array("q", [0])
        self._least = self._greatest = b""

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(self, name: str) -> None:
        encoded = os.fsencode(name)
        if not len(self):
            self._least = self._greatest = encoded
        elif encoded < self._least:
            self._least = encoded
        elif encoded > self._greatest:
            self._greatest = encoded
        self._block += encoded
        self._offsets.append(len(self._block))

    @property
    def folder(self) -> str:
        """The folder that all names begin with, up to its "/"; what comes after a "?" names none."""
        pairs = zip(self._least, self._greatest, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        common = self._least[:same].partition(b"?")[0]
        return os.fsdecode(common[: common.rfind(b"/") + 1])

    def names(self, root: str = "") -> Names:
        """The names without `root`, with which all begin. The builder is empty then."""
        cut, count = len(os.fsencode(root)), len(self)
        offsets = np.frombuffer(self._offsets, np.int64)
        block, self._block = self._block, bytearray()
        if cut:
            whole, block = memoryview(block), bytearray()
            for first in range(0, count, _CUT_AT_ONCE):
                ends = offsets[first : first + _CUT_AT_ONCE + 1].tolist()
                block += b"".join(whole[a + cut : b] for a, b in pairwise(ends))
        offsets = offsets - cut * np.arange(count + 1)
        self._offsets = array("q", [0])
        return Names.of_block(bytes(block), offsets)
