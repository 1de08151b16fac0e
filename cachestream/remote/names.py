"""A list of many paths in little memory: the bytes of all in one block, and where each begins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import xxhash

__all__ = ["Names"]


class Names(Sequence[str]):
    """An immutable sequence of texts, 8 bytes above their UTF-8 each; cheap to pickle.

    A Python list of 10 million paths takes 1.2 GB, and every forked reader copies it page by page
    as it counts references. File names that are not UTF-8 pass through (surrogateescape).
    """

    __slots__ = ("_block", "_offsets")

    def __init__(self, names: Iterable[str]) -> None:
        encoded = list(map(os.fsencode, names))
        self._offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=self._offsets[1:])
        self._block = b"".join(encoded)

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
        return os.fsdecode(self._block[start:stop])

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes that the names take up in memory."""
        return len(self._block) + int(self._offsets.nbytes)

    @property
    def digest(self) -> str:
        """xxh3 (64 bits, hexadecimal) of all names in their order."""
        state = xxhash.xxh3_64(self._offsets.tobytes())
        state.update(self._block)
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"<{len(self):,} names, {self.nbytes:,} bytes>"
