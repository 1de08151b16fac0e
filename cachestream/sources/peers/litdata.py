"""LitData's data sets, read from their own chunks without conversion and without pickle.

(litdata 0.2.76, streaming/framed_zstd.py and item_loader.py.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from cachestream.config import require
from cachestream.errors import CacheStreamError, ConfigError, SampleError
from cachestream.listing.file_list import Url
from cachestream.sources.base import Problems
from cachestream.sources.decode.arrow import Columns, load_arrow
from cachestream.sources.decode.compression import decompressed
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.decode.table_columns import ColumnOptions, usable_rows
from cachestream.sources.fields import check_columns
from cachestream.sources.peers.index import (
    FieldChoice,
    IndexedSource,
    ItemLayout,
    Items,
    Visit,
    as_count,
    as_mapping,
    cut_items,
    files_beside,
    open_index,
    read_index,
    read_table,
)
from cachestream.sources.peers.litdata_formats import Container, leaf_names, leaf_reader
from cachestream.sources.user_code import call_decoder
from cachestream.transport.stream import Stream

_FRAMED: Final = b"LDFZ01\0\0"
_FRAMED_HEAD: Final = struct.Struct("<8sHHIII")
_FRAME: Final = struct.Struct("<IIQII")
_ROWS_END: Final = b"LDARW01\0"
MAX_LEAVES: Final = 10_000
_JSON_FORMATS: Final = ("str", "int", "float", "bool", "bytes", "json")
_COMPRESSION_UNITS: Final = ("chunk", "batch")  # the defaults of older and newer writers


class LitDataSource(IndexedSource):
    """The samples of a LitData set, as `litdata.optimize` writes them; a unit is a chunk.

    url: the folder that holds its `index.json`, such as "s3://bucket/set/train".

    A sample has the form that was stored: a dict by its names, with names such as "box.x" and "pair.0" for
    the values of dicts and lists inside it; a tuple; or a single value. Numbers, bools, str and bytes stay as
    they are; tensors and arrays become arrays; "jpeg", "image" and "pil" become uint8 `[3, H, W]` RGB,
    several images `[N, 3, H, W]`; lists of numbers in dicts become arrays, other lists JSON text; files of
    video, audio and the like become bytes. Rows that LitData stores as an Arrow table are decoded as by
    `ParquetSource`, and need pyarrow. A sample of a `TokensLoader`'s chunks is one array as it was given to
    the writer. The key is "chunk#number".

    columns, decoders, samples_per_visit, resize and crop are those of `MDSSource`, with fields for columns
    and chunks for shards.

    Chunks may be compressed by zstd (needs `pip install 'cachestream[zstd]'`), whole or in frames of several
    samples. Encrypted chunks, and chunks of samples that are compressed one by one, are refused. A chunk is
    read from begin to end in bounded memory. A damaged chunk gives the samples before the damage, and is then
    counted as a failure. Raises ConfigError for an index that is malformed or names something that cannot be
    read, and the errors of `FileSource` otherwise.
    """

    def __init__(
        self,
        url: Url,
        *,
        storage_options: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        samples_per_visit: int | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
    ) -> None:
        check_columns(columns)
        self._choice = FieldChoice(columns, dict(decoders or {}), ImageOptions(resize, crop))
        index = open_index(url, storage_options, "LitDataSource")
        with read_index(index) as content:
            chunks = self._read_index(content)
            files = files_beside(index, [one["filename"] for one in chunks])
        counts = [one["chunk_size"] for one in chunks]
        is_compressed = self._compression_unit != "none"
        super().__init__(
            "litdata", "chunk", files, counts, self._choice, samples_per_visit, is_compressed=is_compressed
        )

    def _read_whole(self, stream: Stream, visit: Visit, problems: Problems) -> Iterator[tuple[int, Any]]:
        if self._compression_unit == "batch":
            return self._decoded(_framed(stream, visit.count, problems), visit, problems)
        inner = decompressed(stream, required=True) if self._compression_unit == "chunk" else stream
        table = read_table(inner, visit.count, 0, visit.count)
        if self._has_sizes and table[0] == table[-1]:
            return self._rows(inner.read_whole(), visit.count, problems)
        return self._decoded(cut_items(inner, table, 0, problems), visit, problems)

    def _decode(self, _index: int, data: memoryview) -> Any:
        layout = self._layout
        if not self._has_sizes:
            found = layout.only_field(data)
        elif len(data):
            found = layout.fields(data)
        else:
            raise SampleError(
                "it is a row of an Arrow table, which is read whole: leave out samples_per_visit"
            )
        if not found:
            raise SampleError(
                f"none of the chosen fields is there; there are {', '.join(layout.names)[:300]}"
            )
        if self._container == "dict" or self._choice.columns is not None:
            return found
        return tuple(found.values()) if self._container == "tuple" else found["0"]

    def _rows(self, data: memoryview, count: int, problems: Problems) -> Iterator[tuple[int, Any]]:
        """Yield the rows of a chunk that holds an Arrow table in place of items."""
        for number, row in _arrow_rows(data, self._choice.images, count, problems):
            for name in self._choice.names:
                if name not in row:
                    raise SampleError(f"there is no field {name!r}; there are {', '.join(row)[:300]}")
            for name, decoder in self._choice.decoders.items():
                if isinstance(row[name], bytes):
                    row[name] = call_decoder(f"the decoder of '{name}'", decoder, row[name])
            columns = self._choice.columns
            yield number, row if columns is None else {name: row[name] for name in columns}

    # --- the index

    def _read_index(self, index: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the chunks that hold samples; set the compression and the layout of all chunks."""
        if not isinstance(index.get("chunks"), list) or "config" not in index:
            raise ValueError("no chunks and config of LitData's; is this another data set's?")
        config = as_mapping(index["config"], "config")
        _check_kind(config)
        chunks = [as_mapping(one, "a chunk") for one in index["chunks"]]
        self._compression_unit = _compression_unit(config)
        # The sizes of leaves stand before them; the only leaf of a TokensLoader's item has none.
        self._has_sizes = config.get("item_loader") != "TokensLoader"
        self._container, self._layout = self._new_layout(config)
        return [one for one in chunks if as_count(one["chunk_size"], "chunk_size")]

    def _new_layout(self, config: Mapping[str, Any]) -> tuple[Container, ItemLayout]:
        formats, spec = config["data_format"], config.get("data_spec")
        if not isinstance(formats, list) or not 0 < len(formats) <= MAX_LEAVES:
            raise ValueError("data_format is no list of leaves")
        if not all(isinstance(one, str) for one in formats) or not isinstance(spec, str | None):
            raise ValueError("data_format or data_spec, which are no texts")
        container, names = leaf_names(spec, len(formats))
        known = set(names)
        # The chunks may hold Arrow rows. Below the top level, their names are not those in the index.
        if all(one in _JSON_FORMATS for one in formats):
            tops = {name.partition(".")[0] for name in names}
            known.update(name for name in self._choice.names if name.partition(".")[0] in tops)
        for name in self._choice.names:
            if name not in known:
                raise ValueError(f"there is no field {name!r}; there are {', '.join(names)[:500]}")
        readers = self._choice.readers(names, formats, partial(leaf_reader, self._choice.images))
        sizes = (0,) * len(names)
        return container, ItemLayout(names, tuple(formats), sizes, readers, ("field", "leaf", "leaves"))


def _check_kind(config: Mapping[str, Any]) -> None:
    loader = config.get("item_loader")
    if loader == "ParquetLoader":
        raise ValueError("this is an index of Parquet files: read them with ParquetSource")
    if loader not in (None, "PyTreeLoader", "TokensLoader"):
        raise ValueError(f"chunks of a {str(loader)[:60]!r}, which are not known here")
    if config.get("encryption"):
        raise ValueError("its chunks are encrypted: write them without, or give a source of your own")


def _compression_unit(config: Mapping[str, Any]) -> str:
    """Return what is compressed at a time: "chunk", "batch", or "none"."""
    compression, level = config.get("compression"), config.get("compression_level") or "chunk"
    if not compression:
        return "none"
    if str(compression).partition(":")[0] != "zstd" or level not in _COMPRESSION_UNITS:
        raise ValueError(
            f"its chunks are compressed by {str(compression)[:40]!r}, a {str(level)[:40]!r} at a time, "
            "which cannot be read here: write them with compression='zstd' and no compression_level, "
            "or without"
        )
    require("zstandard", "zstd", "LitData compressed by zstd")
    return str(level)


# --- chunks ------------------------------------------------------------------------------------


def _framed(stream: Stream, count: int, problems: Problems) -> Items:
    """Return the items of a chunk in consecutive zstd frames, each of several items."""
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
    return cut_items(
        decompressed(stream, required=True), np.frombuffer(words, "<u4").astype(np.int64), 0, problems
    )


def _arrow_rows(
    data: memoryview, images: ImageOptions, count: int, problems: Problems
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the usable rows of the table at the end of a chunk. Raises SampleError if it is malformed."""
    try:
        arrow, ipc = load_arrow(), require("pyarrow.ipc", "parquet", "the Arrow tables of LitData")
    except ConfigError as error:
        raise SampleError(str(error)) from error
    nbytes = int.from_bytes(data[-12:-8], "little")
    if bytes(data[-8:]) != _ROWS_END or nbytes + 12 > len(data):
        raise SampleError("it holds neither samples nor an Arrow table")
    try:
        reader = ipc.open_file(arrow.py_buffer(data[-12 - nbytes : -12]))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        if sum(batch.num_rows for batch in batches) != count:
            raise SampleError(f"the index says {count:,} samples, and its table has others")
        first = 0
        for batch in batches:
            batch.validate(full=True)
            columns = Columns(arrow, batch.schema, ColumnOptions(images=images))
            for row, sample in usable_rows(*columns.fields(batch), first, problems, "sample"):
                yield first + row, sample
            first += batch.num_rows
    except CacheStreamError as error:
        raise SampleError(str(error)) from error
    except Exception as error:  # pyarrow raises errors of many classes
        raise SampleError(f"malformed: {type(error).__name__}: {error}"[:300]) from error
