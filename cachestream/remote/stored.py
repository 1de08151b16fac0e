"""Names in files that grow: written page by page by one process, mapped by others as far as they are whole.

`NAME.names` holds the bytes of all names, `NAME.ends` int64 offsets into it, 0 first, and the mark, a small
JSON file that is replaced after every page, how much of both is good. What lies after that is the rest of
a page whose writer died, and is cut off by the next one. So whatever is killed, the mark tells the truth.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, overload

import numpy as np

from cachestream.errors import SourceError
from cachestream.private import move, open_private
from cachestream.remote.names import Names

__all__ = ["AnyNames", "Mark", "NamesWriter", "StoredNames", "read_mark"]

_OFFSET_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a listing has come: `count` names of `size_bytes` in the files `stem`.

    `fingerprint` names the data they are of; `is_complete` when the listing has ended.
    """

    stem: str
    fingerprint: str
    count: int = 0
    size_bytes: int = 0
    is_complete: bool = False


def read_mark(path: str) -> Mark | None:
    """The mark at `path`; None where there is none, or none whose files are there."""
    try:
        with open(path, encoding="utf-8") as file:
            mark = Mark(**json.load(file))
        folder = os.path.dirname(path)
        names, ends = (os.stat(os.path.join(folder, name)).st_size for name in file_names(mark.stem))
    except (OSError, ValueError, TypeError):
        return None
    whole = names >= mark.size_bytes and ends >= (mark.count + 1) * _OFFSET_BYTES
    return mark if whole else None


def file_names(stem: str) -> tuple[str, str]:
    """The names of the two files of a listing."""
    return f"{stem}.names", f"{stem}.ends"


class StoredNames(Sequence[str]):
    """The names behind the mark at `path`, as far as they were there when it was last looked at.

    All processes share one copy in memory, the page cache's. Picklable. `look` before more is used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._names = Names([])
        self._mark: Mark | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredNames, (self.path,)

    def look(self) -> Mark | None:
        """The mark as it is now; what it says is there can be used from now on."""
        mark = read_mark(self.path)
        if mark is not None and mark != self._mark:
            self._names = _map(os.path.dirname(self.path), mark)
            self._mark = mark
        return mark

    def reach(self, count: int) -> None:
        """Have `count` names at least; raises SourceError where they are not."""
        if count > len(self._names):
            self.look()
        if count > len(self._names):
            raise SourceError(
                f"{self.path}: {len(self._names):,} names are listed and {count:,} were; start the worker again"
            )

    def digest_of(self, count: int) -> str | None:
        """The digest of the first `count` names, as `Names` has it; None where there are fewer."""
        return self._names.digest_of(count) if count <= len(self._names) else None

    @property
    def digest(self) -> str:
        """The digest of the names that are there."""
        return self._names.digest

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._names[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __repr__(self) -> str:
        return f"<StoredNames {self.path}: {len(self):,}>"


AnyNames = Names | StoredNames


def _map(folder: str, mark: Mark) -> Names:
    names, ends = (os.path.join(folder, name) for name in file_names(mark.stem))
    offsets = np.frombuffer(_mapped(ends, (mark.count + 1) * _OFFSET_BYTES), "<i8")
    if offsets[0] != 0 or offsets[-1] != mark.size_bytes:
        raise SourceError(f"{ends}: the stored listing is damaged; run 'cachestream clear' on this cache")
    return Names.of_block(_mapped(names, mark.size_bytes), offsets)


def _mapped(path: str, size_bytes: int) -> memoryview:
    if not size_bytes:
        return memoryview(b"")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


class NamesWriter:
    """Adds names behind the mark at `path`: goes on after those of `mark`, whose files it opens or makes."""

    def __init__(self, path: str, mark: Mark) -> None:
        self._path = path
        self.mark = mark
        folder = os.path.dirname(path)
        names, ends = file_names(mark.stem)
        with ExitStack() as stack:
            self._names = _open(os.path.join(folder, names), mark.size_bytes)
            stack.callback(os.close, self._names)
            self._ends = _open(
                os.path.join(folder, ends), (mark.count + 1) * _OFFSET_BYTES if mark.count else 0
            )
            stack.callback(os.close, self._ends)
            if not mark.count:
                _write(self._ends, bytes(_OFFSET_BYTES))
            stack.pop_all()

    def add(self, names: Sequence[str], is_complete: bool) -> None:
        """Write `names`; they are there for all once this returns, whatever dies after it."""
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
    """The file at `path`, cut to `size_bytes`, to be written after them."""
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
