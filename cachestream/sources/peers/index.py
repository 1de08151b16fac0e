"""Data sets of files named by an `index.json`; each file begins with an offset table of its items.

A file is `[count: u32] [begin of each item, and end of the last: u32 × (count + 1)] … [items]`; all numbers
are little-endian.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.config import check_count, format_size
from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.names import Names
from cachestream.sources.base import Problems
from cachestream.sources.decode.compression import unpacked
from cachestream.transport import bounds
from cachestream.transport.network_stream import open_stream
from cachestream.transport.remote import Remote
from cachestream.transport.stream import Stream

INDEX_NAME: Final = "index.json"
MAX_INDEX_BYTES: Final = 256 << 20
MAX_NAME: Final = 4096
MAX_ITEMS: Final = 1 << 24  # in one file; its table of 4 bytes an item is held in memory


_WORD: Final = 4
Items = Iterator[tuple[int, memoryview]]


@dataclass(frozen=True, slots=True)
class ItemFile:
    """A file of `count` items; `is_compressed` if the file as a whole is compressed."""

    remote: Remote
    path: str = field(repr=False)  # may hold a signature
    where: str
    count: int
    is_compressed: bool = False


def read_items(
    file: ItemFile,
    first: int,
    stop: int,
    problems: Problems,
    check: Callable[[Stream], None] | None = None,
) -> Items:
    """Yield the number and the bytes of the items from `first` up to `stop`; add unusable ones to `problems`.

    A whole file is read as one stream. Of a part of a file, only the table and the items are fetched. `check`
    is called with the stream of a whole file before the first item.
    """
    try:
        if stop - first == file.count:
            with open_stream(file.remote, file.path, file.where) as stream:
                if check is not None:
                    check(stream)
                inner = decompressed(stream) if file.is_compressed else stream
                yield from cut_items(inner, read_table(inner, file.count, 0, stop), 0, problems)
            return
        table_end = _WORD * (stop + 2)
        with open_stream(file.remote, file.path, file.where, 0, table_end) as stream:
            table = read_table(stream, file.count, first, stop)
        begin, end = int(table[0]), int(table[-1])
        with open_stream(file.remote, file.path, file.where, begin, max(begin, end)) as stream:
            yield from cut_items(stream, table, first, problems)
    except SampleError as error:
        problems.add(str(error))


def decompressed(stream: Stream) -> Stream:
    """Return a stream of the decompressed bytes of `stream`. Raises SampleError if it is not compressed."""
    inner = unpacked(stream)
    if inner is stream:
        raise SampleError(f"{stream.where}: it is not compressed, as the index says it is")
    return inner


def read_table(stream: Stream, count: int, first: int, stop: int) -> npt.NDArray[np.int64]:
    """Return the offsets of the items from `first` up to `stop`, and the end of the last one.

    Raises SampleError if the table of the file is not that of `count` items.
    """
    head = stream.read(_WORD)
    found = int.from_bytes(head, "little")
    if len(head) < _WORD or found != count:
        what = "is empty" if len(head) < _WORD else f"holds {found:,} samples"
        raise SampleError(f"{stream.where}: it {what}, and the index says {count:,}: replaced, or damaged")
    stream.skip(_WORD * first)
    table = stream.read(_WORD * (stop - first + 1))
    if len(table) < _WORD * (stop - first + 1):
        raise SampleError(f"{stream.where}: it ends in the middle of its table")
    return np.frombuffer(table, "<u4").astype(np.int64)


def cut_items(stream: Stream, table: npt.NDArray[np.int64], first: int, problems: Problems) -> Items:
    """Yield the items of `stream` at the offsets in `table`, numbered from `first`."""
    for number, (begin, end) in enumerate(zip(table[:-1].tolist(), table[1:].tolist(), strict=True), first):
        if begin < stream.position or end < begin:
            problems.add(f"sample {number}: the table says that it lies at {begin} to {end}: it is damaged")
            return
        try:
            bounds.check(end - begin)
        except bounds.TooLargeError as error:
            problems.add(f"sample {number}: {error}")
            continue
        stream.skip(begin - stream.position)
        data = stream.read(end - begin)
        if len(data) < end - begin:
            problems.add(f"sample {number}: the file ends in the middle of it, or before")
            return
        yield number, data


class IndexedFolder:
    """The files that the index of a folder names. Picklable, small, thread-safe.

    Raises ConfigError for a URL or options that cannot work, SourceError if the index is missing or
    forbidden, and SourceUnavailableError if the remote does not answer.
    """

    def __init__(self, url: Url, storage_options: Mapping[str, Any] | None, owner: str) -> None:
        given: Any = url
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise ConfigError(f"{owner} takes the path or URL of one folder that holds an {INDEX_NAME}")
        folder = os.fspath(url).removesuffix(INDEX_NAME).rstrip("/") or "/"
        files = FileList(f"{folder}/{INDEX_NAME}", storage_options, owner=owner)
        if len(files) > 1:
            raise ConfigError(f"{files.shown}: {owner} takes one folder; for several, mix a source of each")
        self.remote = files.remote
        self.shown = files.where(0).removesuffix(INDEX_NAME)
        self.identity = tuple(part.removesuffix(f"/{INDEX_NAME}") for part in files.identity)
        self._root = files.path(0).removesuffix(INDEX_NAME)
        self._names = Names(())
        self.digest = ""

    def __len__(self) -> int:
        return len(self._names)

    def load(self) -> Any:
        """Read and parse the index. Raises ConfigError if it is not a JSON object."""
        where = self.shown + INDEX_NAME
        with open_stream(self.remote, self._root + INDEX_NAME, where) as stream:
            data = stream.read(MAX_INDEX_BYTES + 1)
        if len(data) > MAX_INDEX_BYTES:
            raise ConfigError(f"{where}: an index of more than {format_size(MAX_INDEX_BYTES)}")
        try:
            return as_mapping(json.loads(bytes(data)), "it")
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{where}: not an index: {error}") from error

    @contextmanager
    def index_errors(self) -> Iterator[None]:
        """Turn the errors of parsing a malformed index into a ConfigError that names the index."""
        try:
            yield
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            if reason.startswith(self.shown):
                raise
            raise ConfigError(f"{self.shown}{INDEX_NAME}: {reason}") from error

    def name_files(self, names: Sequence[Any]) -> None:
        """Set the names of the files. Raises ValueError for no names, and a name outside the folder."""
        for name in names:
            if not isinstance(name, str) or not name or len(name) > MAX_NAME:
                raise ValueError(f"the file name {str(name)[:100]!r}")
            parts = name.replace("\\", "/").split("/")
            if ".." in parts or "" in parts or "\0" in name or "::" in name or not name.isprintable():
                raise ValueError(f"the file name {name[:100]!r}, which leads out of the folder")
        if not names:
            raise ValueError("it names no files")
        self._names = Names(names)
        self.digest = self._names.digest

    def path(self, index: int) -> str:
        """Return the path of file `index`, for the driver; it may hold secrets."""
        return self._root + self._names[index]

    def name(self, index: int) -> str:
        return self._names[index]

    def where(self, index: int) -> str:
        """Return the path of file `index`, for messages."""
        return self.shown + self._names[index]

    def __repr__(self) -> str:
        return f"<IndexedFolder {self.shown}, {len(self):,} files>"


class Visits:
    """Division of files of `counts` items into units: files, or visits of about `per_visit` items each."""

    def __init__(self, counts: Sequence[int], per_visit: int | None) -> None:
        if per_visit is not None:
            per_visit = check_count("samples_per_visit", per_visit)
        self._counts = np.array(counts, np.int64)
        visits = np.ones_like(self._counts) if per_visit is None else -(-self._counts // per_visit)
        self._ends: npt.NDArray[np.int64] = np.cumsum(visits, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def num_items(self) -> int:
        return int(self._counts.sum())

    def locate(self, unit: int) -> tuple[int, int, int, int]:
        """Return the index of the file of `unit`, its number of items, and the range of items to read."""
        index = int(np.searchsorted(self._ends, unit, side="right"))
        before = int(self._ends[index - 1]) if index else 0
        visits, count = int(self._ends[index]) - before, int(self._counts[index])
        first, stop = (count * visit // visits for visit in (unit - before, unit - before + 1))
        return index, count, first, stop


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Return `value`, found in an index. Raises TypeError if it is not an object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} is {str(value)[:60]!r}, not an object")
    return value


def as_count(value: Any, what: str) -> int:
    """Return `value`, found in an index. Raises ValueError unless a file may hold so many items."""
    if type(value) is not int or not 0 <= value <= MAX_ITEMS:
        raise ValueError(f"{what} is {str(value)[:60]!r}, not a number from 0 to {MAX_ITEMS:,}")
    return value
