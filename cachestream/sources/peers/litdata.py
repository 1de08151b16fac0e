"""LitData's data sets, read from their own chunks without conversion and without pickle.

(litdata 0.2.76, streaming/framed_zstd.py and item_loader.py.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from cachestream.config import require
from cachestream.errors import CacheStreamError, ConfigError, SampleError
from cachestream.listing.file_list import Url, check_unit
from cachestream.sources.arrow import Columns, Unusable
from cachestream.sources.base import Problems
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.fields import check_columns, identity_of
from cachestream.sources.peers.index import (
    IndexedFolder,
    ItemFile,
    Visits,
    as_count,
    as_mapping,
    cut_items,
    decompressed,
    read_items,
    read_table,
)
from cachestream.sources.peers.litdata_leaves import Tree, leaf_names, leaf_reader
from cachestream.sources.user_code import foreign_errors
from cachestream.transport.network_stream import open_stream
from cachestream.transport.stream import Stream

_FRAMED: Final = b"LDFZ01\0\0"
_FRAMED_HEAD: Final = struct.Struct("<8sHHIII")
_FRAME: Final = struct.Struct("<IIQII")
_ROWS_END: Final = b"LDARW01\0"
MAX_LEAVES: Final = 10_000
_JSON_FORMATS: Final = ("str", "int", "float", "bool", "bytes", "json")
_COMPRESSION_UNITS: Final = ("chunk", "batch")  # the defaults of older and newer writers


class ArrowRows:
    """The rows of a chunk that holds an Arrow table instead of items."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def samples(self, images: ImageOptions, count: int) -> Iterator[dict[str, Any] | Unusable]:
        """Yield the samples of the `count` rows. Raises SampleError if the table is malformed."""
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
                columns = Columns(
                    arrow, batch.schema, nulls={}, decode_images=True, images=(), image_options=images
                )
                yield from columns.rows(batch)
        except CacheStreamError as error:
            raise SampleError(str(error)) from error
        except Exception as error:  # pyarrow raises errors of many classes
            raise SampleError(f"malformed: {type(error).__name__}: {error}"[:300]) from error


def _batches(reader: Any) -> Iterator[Any]:
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def read_chunk(
    file: ItemFile, level: str, has_rows: bool, problems: Problems
) -> Iterator[tuple[int, memoryview] | ArrowRows]:
    """Yield the numbered items of a whole chunk, or its rows if it holds an Arrow table.

    `level`: what is compressed at a time: "chunk", "batch", or "none". `has_rows`: an Arrow table may be
    there.
    """
    try:
        with open_stream(file.remote, file.path, file.where) as stream:
            if level == "batch":
                yield from _framed(stream, file.count, problems)
                return
            inner = decompressed(stream) if level == "chunk" else stream
            table = read_table(inner, file.count, 0, file.count)
            if has_rows and table[0] == table[-1]:
                yield ArrowRows(inner.read_whole())
            else:
                yield from cut_items(inner, table, 0, problems)
    except SampleError as error:
        problems.add(str(error))


def _framed(stream: Stream, count: int, problems: Problems) -> Iterator[tuple[int, memoryview]]:
    """Yield the items of a chunk in consecutive zstd frames, each of several items."""
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
    yield from cut_items(decompressed(stream), np.frombuffer(words, "<u4").astype(np.int64), 0, problems)


class LitDataSource:
    """The samples of a LitData set, as `litdata.optimize` writes them; a unit is a chunk.

    url: the folder that holds its `index.json`, such as "s3://bucket/set/train".

    A sample has the form that was stored: a dict by its names, with names such as "box.x" and "pair.0" for
    the values of dicts and lists inside it; a tuple; or a single value. Numbers, bools, str and bytes stay as
    they are; tensors and arrays become arrays; "jpeg", "image" and "pil" become uint8 `[3, H, W]` RGB,
    several images `[N, 3, H, W]`; lists of numbers in dicts become arrays, other lists JSON text; files of
    video, audio and the like become bytes. Rows that LitData stores in Arrow's format are decoded as by
    `ParquetSource`, and need pyarrow. A sample of a `TokensLoader`'s chunks is one array as it was given to
    the writer. The key is "chunk#number".

    columns: the names of the fields to read. None: all fields.

    decoders: functions of bytes by field name, used instead of the decoding above: `{"extra": pickle.loads}`
    for a pickled field, which is refused otherwise.

    samples_per_visit: read about this many samples of a chunk at a time, and then samples of other chunks, so
    that early epochs hold samples of many chunks. The chunks must not be compressed. None: a whole chunk.

    resize and crop are for images, see `ImageOptions`: the shorter side or (height, width), and the middle.

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
        self._images = ImageOptions(resize, crop)
        self._chosen, self._decoders = columns, dict(decoders or {})
        self._named_fields = (*(columns or ()), *self._decoders)
        self._folder = IndexedFolder(url, storage_options, "LitDataSource")
        counts = self._read_index()
        if samples_per_visit is not None and self._compression_unit != "none":
            raise ConfigError(
                f"{self._folder.shown}: a compressed chunk can only be read from its begin; "
                "leave out samples_per_visit"
            )
        self._visits = Visits(counts, samples_per_visit)
        self.listing_digest = self._folder.digest
        options = identity_of(columns, self._decoders, samples_per_visit)
        self.fingerprint = "litdata:" + "|".join((*self._folder.identity, *options, *self._images.identity))

    @property
    def num_units(self) -> int:
        return len(self._visits)

    @property
    def num_samples(self) -> int:
        """The number of samples according to the index."""
        return self._visits.num_items

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the samples of a chunk, or of a visit to it, in order. Raises the errors of `Source.read`."""
        check_unit(self, unit, self.num_units)
        index, count, first, stop = self._visits.locate(unit)
        folder = self._folder
        problems = Problems(folder.where(index))
        file = ItemFile(folder.remote, folder.path(index), folder.where(index), count)
        if stop - first < count:
            found: Iterator[Any] = read_items(file, first, stop, problems)
        else:
            found = read_chunk(file, self._compression_unit, self._tree.has_sizes, problems)
        for number, sample in self._samples(found, file, problems):
            yield f"{folder.name(index)}#{number}", sample
        problems.raise_any()

    def _samples(self, found: Iterator[Any], file: ItemFile, problems: Problems) -> Iterator[tuple[int, Any]]:
        for item in found:
            if isinstance(item, ArrowRows):
                yield from self._rows(item, file, problems)
                return
            number, data = item
            try:
                if not len(data) and self._tree.has_sizes:
                    raise SampleError(
                        "it lies in a table of Arrow's, which is read whole: leave out samples_per_visit"
                    )
                sample = self._tree.sample(data)
            except SampleError as error:
                problems.add(f"sample {number}: {error}")
                continue
            yield number, sample

    def _rows(self, rows: ArrowRows, file: ItemFile, problems: Problems) -> Iterator[tuple[int, Any]]:
        try:
            for number, sample in enumerate(rows.samples(self._images, file.count)):
                if isinstance(sample, Unusable):
                    problems.add(f"sample {number}: {sample.reason}")
                else:
                    yield number, self._of_row(sample)
        except SampleError as error:
            problems.add(str(error))

    def _of_row(self, row: dict[str, Any]) -> dict[str, Any]:
        for name in self._named_fields:
            if name not in row:
                raise SampleError(f"there is no field {name!r}; there are {', '.join(row)[:300]}")
        for name, decoder in self._decoders.items():
            if isinstance(row[name], bytes):
                with foreign_errors(f"the decoder of '{name}'"):
                    row[name] = decoder(row[name])
        return row if self._chosen is None else {name: row[name] for name in self._chosen}

    # --- the index

    def _read_index(self) -> list[int]:
        """Return the number of samples of each chunk; set the compression and the layout of all chunks."""
        with self._folder.index_errors():
            index = self._folder.load()
            if not isinstance(index.get("chunks"), list) or "config" not in index:
                raise ValueError("no chunks and config of LitData's; is this another data set's?")
            config = as_mapping(index["config"], "config")
            self._check_kind(config)
            chunks = [as_mapping(one, "a chunk") for one in index["chunks"]]
            chunks = [one for one in chunks if as_count(one["chunk_size"], "chunk_size")]
            self._folder.name_files([one["filename"] for one in chunks])
            self._compression_unit = _compression_unit(config)
            self._tree = self._new_tree(config)
            return [one["chunk_size"] for one in chunks]

    def _check_kind(self, config: Mapping[str, Any]) -> None:
        loader = config.get("item_loader")
        if loader == "ParquetLoader":
            raise ValueError("this is an index of Parquet files: read them with ParquetSource")
        if loader not in (None, "PyTreeLoader", "TokensLoader"):
            raise ValueError(f"chunks of a {str(loader)[:60]!r}, which are not known here")
        if config.get("encryption"):
            raise ValueError("its chunks are encrypted: write them without, or give a source of your own")

    def _new_tree(self, config: Mapping[str, Any]) -> Tree:
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
            known.update(name for name in self._named_fields if name.partition(".")[0] in tops)
        for name in self._named_fields:
            if name not in known:
                raise ValueError(f"there is no field {name!r}; there are {', '.join(names)[:500]}")
        readers = tuple(
            leaf_reader(name, kind, self._decoders, self._images)
            if self._chosen is None or name in self._chosen
            else None
            for name, kind in zip(names, formats, strict=True)
        )
        return Tree(
            "dict" if self._chosen is not None else container,
            names,
            tuple(formats),
            readers,
            has_sizes=config.get("item_loader") != "TokensLoader",
        )

    def __repr__(self) -> str:
        return f"<LitDataSource {self._folder.shown}, {len(self._folder):,} chunks, {self.num_samples:,} samples>"


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
