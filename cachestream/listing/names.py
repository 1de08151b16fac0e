"""Lists of many paths in little memory: one block of bytes and its offsets, in memory or in growing files.

`NAME.names` holds the bytes of all names, and `NAME.ends` int64 offsets into it, beginning with 0. The
mark, a small JSON file that is replaced after every page, tells how many bytes of both files are valid. Bytes
beyond these were left by a writer that died in the middle of a page; the next writer truncates them.
"""

from __future__ import annotations

import json
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pickle import PickleBuffer
from typing import Any, Final, NamedTuple, overload

import numpy as np
import xxhash

from cachestream.errors import SourceError
from cachestream.linux import move, open_private
from cachestream.schema import IntArray

_NAMES_PER_BATCH: Final = 65_536


class Page(NamedTuple):
    """Names below the root, in order, after those of the previous page; `is_last` ends the listing."""

    names: list[str]
    is_last: bool


class Names(Sequence[str]):
    """An immutable sequence of strings that takes 8 bytes each above their UTF-8; cheap to pickle and to map.

    A Python list of 10 million paths takes 1.2 GB, and every forked reader copies it page by page
    through reference counts. File names that are not UTF-8 pass through (surrogateescape).
    """

    __slots__ = ("_held",)

    def __init__(self, names: Iterable[str]) -> None:
        block, sizes, rest = bytearray(), array("q"), iter(names)
        while batch := list(map(os.fsencode, islice(rest, _NAMES_PER_BATCH))):
            block += b"".join(batch)
            sizes.extend(map(len, batch))
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        self._hold(bytes(block), offsets)

    def _hold(self, block: bytes | memoryview, offsets: IntArray) -> None:
        offsets.flags.writeable = False
        self._held = block, offsets  # one tuple: stored names are replaced while other threads read them

    @classmethod
    def of_block(cls, block: bytes | memoryview, offsets: IntArray) -> Names:
        """Return names whose bytes lie in `block`, name i from `offsets[i]` to `offsets[i + 1]`."""
        names = cls.__new__(cls)
        names._hold(block, offsets)
        return names

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """With protocol 5 the bytes of the names are an out-of-band buffer, which processes can share."""
        block, offsets = self._held
        return Names.of_block, (PickleBuffer(block) if protocol >= 5 else bytes(block), offsets)

    def __len__(self) -> int:
        return len(self._held[1]) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        block, offsets = self._held
        if index < 0:
            index += len(offsets) - 1
        if not 0 <= index < len(offsets) - 1:
            raise IndexError(f"name {index} of {len(offsets) - 1}")
        start, stop = offsets[index : index + 2].tolist()
        return os.fsdecode(bytes(block[start:stop]))

    def __iter__(self) -> Iterator[str]:
        block, offsets = self._held
        for first in range(0, len(offsets) - 1, _NAMES_PER_BATCH):
            for start, stop in pairwise(offsets[first : first + _NAMES_PER_BATCH + 1].tolist()):
                yield os.fsdecode(bytes(block[start:stop]))

    @property
    def nbytes(self) -> int:
        """The size of the names in memory."""
        return len(self._held[0]) + int(self._held[1].nbytes)

    @property
    def digest(self) -> str:
        """xxh3 (64 bits, hexadecimal) of all names in their order."""
        return self.digest_of(len(self)) or ""

    def digest_of(self, count: int) -> str | None:
        """Return the digest of the first `count` names; None if there are fewer."""
        block, offsets = self._held
        if count >= len(offsets):
            return None
        state = xxhash.xxh3_64(np.ascontiguousarray(offsets[: count + 1]).data)
        state.update(memoryview(block)[: int(offsets[count])])
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"<{len(self):,} names, {self.nbytes:,} bytes>"


_OFFSET_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """The progress of a stored listing: `count` names of `size_bytes` in the files `stem`.

    `fingerprint` is that of the source; `is_complete` is true once the listing has ended.
    """

    stem: str
    fingerprint: str
    count: int = 0
    size_bytes: int = 0
    is_complete: bool = False


def read_mark(path: str) -> Mark | None:
    """Return the mark at `path`; None if there is none, or if its files are missing or too short."""
    try:
        with open(path, encoding="utf-8", opener=open_private) as file:
            mark = Mark(**json.load(file))
        folder = os.path.dirname(path)
        paths = [os.path.join(folder, name) for name in file_names(mark.stem)]
        names, ends = (os.stat(path).st_size for path in paths)
    except (OSError, ValueError, TypeError):
        return None
    whole = (
        all(map(os.path.isfile, paths))
        and names >= mark.size_bytes
        and ends >= (mark.count + 1) * _OFFSET_BYTES
    )
    return mark if whole else None


def file_names(stem: str) -> tuple[str, str]:
    """Return the names of the two files of a listing."""
    return f"{stem}.names", f"{stem}.ends"


class StoredNames(Names):
    """The stored names of the mark at `path`, as many as there were at the last call of `look` or `reach`.

    All processes share one copy in memory, that of the page cache. Picklable.
    """

    __slots__ = ("_mark", "path")

    def __init__(self, path: str) -> None:
        super().__init__(())
        self.path = path
        self._mark: Mark | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return StoredNames, (self.path,)

    def look(self) -> Mark | None:
        """Read the mark, map the names that it counts, and return it."""
        mark = read_mark(self.path)
        if mark is not None and mark != self._mark:
            self._hold(*_map(os.path.dirname(self.path), mark))
            self._mark = mark
        return mark

    def reach(self, count: int) -> None:
        """Map at least `count` names. Raises SourceError if there are fewer."""
        if count > len(self):
            self.look()
        if count > len(self):
            raise SourceError(
                f"{self.path}: {len(self):,} names are listed and {count:,} were; start the worker again"
            )

    def __repr__(self) -> str:
        return f"<StoredNames {self.path}: {len(self):,}>"


def _map(folder: str, mark: Mark) -> tuple[memoryview, IntArray]:
    """Return the bytes of the names that `mark` counts, and their offsets."""
    names, ends = (os.path.join(folder, name) for name in file_names(mark.stem))
    offsets = np.frombuffer(_mapped(ends, (mark.count + 1) * _OFFSET_BYTES), "<i8")
    if offsets[0] != 0 or offsets[-1] != mark.size_bytes:
        raise SourceError(f"{ends}: the stored listing is damaged; run 'cachestream clear' on this cache")
    return _mapped(names, mark.size_bytes), offsets


def _mapped(path: str, size_bytes: int) -> memoryview:
    if not size_bytes:
        return memoryview(b"")
    fd = open_private(path, os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


class NamesWriter:
    """A writer that appends names to the stored listing at `path`, after those of `mark`."""

    def __init__(self, path: str, mark: Mark) -> None:
        self._path = path
        self.mark = mark
        folder = os.path.dirname(path)
        names, ends = file_names(mark.stem)
        with ExitStack() as stack:
            self._names = _open(os.path.join(folder, names), mark.size_bytes)
            stack.callback(os.close, self._names)
            # A new file is filled with zeros, and the first offset is 0.
            self._ends = _open(os.path.join(folder, ends), (mark.count + 1) * _OFFSET_BYTES)
            stack.pop_all()

    def add(self, names: Sequence[str], is_complete: bool) -> None:
        """Append `names`. When this returns they are durable and visible to all processes."""
        encoded = list(map(os.fsencode, names))
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = self.mark.size_bytes + np.cumsum(sizes)
        _write(self._names, b"".join(encoded))
        _write(self._ends, ends.astype("<i8").tobytes())
        for fd in (self._names, self._ends):
            os.fsync(fd)
        mark = replace(
            self.mark,
            count=self.mark.count + len(encoded),
            size_bytes=self.mark.size_bytes + int(sizes.sum()),
            is_complete=is_complete,
        )
        fd = _open(self._path + ".new", 0)
        try:
            _write(fd, json.dumps(asdict(mark)).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        move(self._path + ".new", self._path)
        self.mark = mark

    def close(self) -> None:
        os.close(self._names)
        os.close(self._ends)


def _open(path: str, size_bytes: int) -> int:
    """Open the file at `path` cut to `size_bytes`, positioned at its end."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, size_bytes)
        os.lseek(fd, size_bytes, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
