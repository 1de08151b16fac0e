"""Files that begin with a table of where each item lies: MDS shards and LitData chunks.

`[count: u32] [where each item begins, and the end of the last: u32 × (count + 1)] … [items]`, all
numbers little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError
from cachestream.remote import bounds
from cachestream.remote.filesystem import Remote
from cachestream.remote.grouping import Problems
from cachestream.remote.stream import Stream
from cachestream.remote.stream_open import open_stream
from cachestream.remote.unpack import unpacked

__all__ = ["HeldStream", "ItemFile", "cut_items", "read_items", "read_table"]

_WORD: Final = 4
Items = Iterator[tuple[int, memoryview]]


@dataclass(frozen=True, slots=True)
class ItemFile:
    """A file of `count` items; `is_packed` where all of it is compressed."""

    remote: Remote
    path: str = field(repr=False)  # may be signed
    where: str
    count: int
    is_packed: bool = False


class HeldStream(Stream):
    """Bytes that are in memory."""

    def __init__(self, data: memoryview, where: str) -> None:
        super().__init__(where, start=len(data))
        self.push_back(data)

    def _next_piece(self) -> memoryview:
        return memoryview(b"")


def read_items(
    file: ItemFile,
    first: int,
    stop: int,
    problems: Problems,
    check: Callable[[Stream], None] | None = None,
) -> Items:
    """The number and the bytes of items `first` to `stop`. What is not usable goes to `problems`.

    A whole file is one stream, a part of one is fetched alone. `check` may look at a whole file first.
    """
    try:
        if stop - first == file.count:
            with open_stream(file.remote, file.path, file.where) as stream:
                if check is not None:
                    check(stream)
                inner = _unpacked(stream) if file.is_packed else stream
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


def _unpacked(stream: Stream) -> Stream:
    inner = unpacked(stream)
    if inner is stream:
        raise SampleError(f"{stream.where}: it is not compressed, as the index says it is")
    return inner


def read_table(stream: Stream, count: int, first: int, stop: int) -> npt.NDArray[np.int64]:
    """Where items `first` to `stop` begin, and the end of the last; of a file that holds `count`."""
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
    """The items that `table` says where to find in `stream`, numbered from `first`."""
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
