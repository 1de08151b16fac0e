"""LitData's chunks in the forms that it writes them: plain, packed by frame or by item, or as Arrow's rows.

(litdata 0.2.76, streaming/framed_zstd.py and item_loader.py.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from cachestream.errors import CacheStreamError, ConfigError, SampleError
from cachestream.remote.columns import Columns, Unusable
from cachestream.remote.extras import require
from cachestream.remote.grouping import Problems
from cachestream.remote.images import ImageOptions
from cachestream.remote.items import HeldStream, ItemFile, cut_items, read_table
from cachestream.remote.stream import Stream
from cachestream.remote.stream_open import open_stream
from cachestream.remote.unpack import unpacked

__all__ = ["Rows", "read_chunk", "unpack_item"]

_FRAMED: Final = b"LDFZ01\0\0"
_FRAMED_HEAD: Final = struct.Struct("<8sHHIII")
_FRAME: Final = struct.Struct("<IIQII")
_ROWS_END: Final = b"LDARW01\0"


class Rows:
    """The rows of a chunk that holds a table of Arrow's in place of items."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def samples(self, images: ImageOptions, count: int) -> Iterator[dict[str, Any] | Unusable]:
        """`count` samples. Raises SampleError for what is malformed."""
        try:
            arrow = require("pyarrow", "parquet", "LitData's rows in Arrow's format")
            ipc, _ = (require(f"pyarrow.{name}", "parquet", "this") for name in ("ipc", "compute"))
        except ConfigError as error:
            raise SampleError(str(error)) from error
        data = self._data
        nbytes = int.from_bytes(data[-12:-8], "little")
        if bytes(data[-8:]) != _ROWS_END or nbytes + 12 > len(data):
            raise SampleError("it holds neither samples nor a table of Arrow's")
        table = arrow.py_buffer(data[-12 - nbytes : -12])
        try:
            is_file = bytes(data[-12 - nbytes :][:6]) == b"ARROW1"
            batches = list(_batches(ipc.open_file(table))) if is_file else list(ipc.open_stream(table))
            if sum(batch.num_rows for batch in batches) != count:
                raise SampleError(f"the index says {count:,} samples, and its table has others")
            for batch in batches:
                batch.validate(full=True)
                columns = Columns(arrow, batch.schema, nulls={}, decode_images=True, images=(), made=images)
                yield from columns.rows(batch)
        except CacheStreamError as error:
            raise SampleError(str(error)) from error
        except Exception as error:  # pyarrow raises whatever its parts do
            raise SampleError(f"malformed: {type(error).__name__}: {error}"[:300]) from error


def _batches(reader: Any) -> Iterator[Any]:
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def read_chunk(
    file: ItemFile, level: str, has_rows: bool, problems: Problems
) -> Iterator[tuple[int, memoryview] | Rows]:
    """The items of a whole chunk by number, or its rows where it `has_rows`. `level`: what is packed together."""
    try:
        with open_stream(file.remote, file.path, file.where) as stream:
            if level == "batch":
                yield from _framed(stream, file.count, problems)
                return
            inner = unpacked(stream) if level == "chunk" else stream
            if inner is stream and level == "chunk":
                raise SampleError(f"{file.where}: it is not compressed, as the index says it is")
            table = read_table(inner, file.count, 0, file.count)
            if has_rows and table[0] == table[-1]:
                yield Rows(inner.read_whole())
            else:
                yield from cut_items(inner, table, 0, problems)
    except SampleError as error:
        problems.add(str(error))


def _framed(stream: Stream, count: int, problems: Problems) -> Iterator[tuple[int, memoryview]]:
    """Items in frames of zstd, each of several, that follow one another."""
    head = stream.read(_FRAMED_HEAD.size)
    if len(head) < _FRAMED_HEAD.size:
        raise SampleError(f"{stream.where}: it ends in the middle of its head")
    magic, version, _, found, _, frames = _FRAMED_HEAD.unpack(head)
    if (magic, version) != (_FRAMED, 1):
        raise SampleError(f"{stream.where}: it is not packed in frames, as the index says it is")
    if found != count or not 0 < frames <= count:
        raise SampleError(f"{stream.where}: {found:,} samples in {frames:,} frames, the index says {count:,}")
    words, places = stream.read(4 * (count + 1)), stream.read(_FRAME.size * frames)
    if len(words) + len(places) < 4 * (count + 1) + _FRAME.size * frames:
        raise SampleError(f"{stream.where}: it ends in the middle of its table")
    begin = stream.position
    for _, _, offset, packed_bytes, _ in _FRAME.iter_unpack(places):
        if offset != begin:
            raise SampleError(f"{stream.where}: its frames do not follow one another: it is damaged")
        begin += packed_bytes
    inner = unpacked(stream)
    if inner is stream:
        raise SampleError(f"{stream.where}: its frames are not compressed by zstd")
    yield from cut_items(inner, np.frombuffer(words, "<u4").astype(np.int64), 0, problems)


def unpack_item(data: memoryview, where: str) -> memoryview:
    """An item that is packed by itself. Raises SampleError."""
    held = HeldStream(data, where)
    stream = unpacked(held)
    if stream is held:
        raise SampleError("it is not compressed by zstd")
    return stream.read_whole()
