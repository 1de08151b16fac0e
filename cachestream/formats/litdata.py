"""LitData's data sets, read from their own chunks without conversion and without pickle.

(litdata 0.2.76, streaming/framed_zstd.py, item_loader.py and serializers.py, utilities/_pytree.py; numbers
are little-endian unless said otherwise.)
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.formats.indexed import (
    FieldChoice,
    IndexedFormat,
    IndexedSource,
    ItemLayout,
    Items,
    Reader,
    as_count,
    as_mapping,
    cut_items,
    files_beside,
    pickled_error,
    read_table,
    unknown_error,
)
from cachestream.formats.mds import decode_images, decode_pil, decode_text
from cachestream.sources.api import (
    CacheStreamError,
    ColumnOptions,
    Columns,
    ConfigError,
    File,
    FileList,
    ImageOptions,
    Item,
    SampleError,
    Size,
    Skipped,
    Stream,
    Url,
    call_decoder,
    check_columns,
    decode_image,
    decoded,
    decompressed,
    json_field,
    load_arrow,
    require,
    usable_rows,
)

_FRAMED: Final = b"LDFZ01\0\0"
_FRAMED_HEAD: Final = struct.Struct("<8sHHIII")
_FRAME: Final = struct.Struct("<IIQII")
_ROWS_END: Final = b"LDARW01\0"
MAX_LEAVES: Final = 10_000
_JSON_FORMATS: Final = ("str", "int", "float", "bool", "bytes", "json")
_COMPRESSION_UNITS: Final = ("chunk", "batch")  # the defaults of older and newer writers
_LAST_TAG: Final = 0x20  # the first byte of JSON text is above
_JSON, _STRS, _I64S, _F64S, _BOOLS, _DICT, _RECORDS, _STR, _I64, _F64, _BOOL, _NONE = range(12)
# The tags of values in records; the values are encoded as with the tags above.
_RECORD_KINDS: Final = {0x10: _NONE, 0x11: _STR, 0x12: _I64, 0x13: _F64, 0x14: _BOOL}
_U32: Final = struct.Struct("<I")
MAX_AXES: Final = 64
# By LitData's index. numpy has no bfloat16 (10); numpy's objects (14) and the like are pickled.
_TORCH_DTYPES: Final = (
    "f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "?",
    "u1", "i1", "i2", "i2", "i4", "i4", "i8", "i8", "?1", "u2",
)  # fmt: skip
_NUMPY_DTYPES: Final = (
    "i1", "i2", "i4", "i8", "u1", "u2", "u4",
    "u8", "f2", "f4", "f8", "c8", "c16", "?1",
)  # fmt: skip
_FILES: Final = ("bytes", "file", "video", "audio", "nifti", "mesh", "pdf", "tifffile", "tiff")
_PICKLES: Final = ("pickle", "graph")
Container = Literal["dict", "tuple", "bare"]


class LitDataFormat(IndexedFormat):
    """Chunks of LitData: see `LitDataSource` for the options."""

    name = "litdata"
    file_names = re.compile(r"chunk-.*\.bin")
    nouns = ("chunk", "visit")

    def _read_whole(self, stream: Stream, file: File, count: int) -> Iterator[Item]:
        if self._compression_unit == "batch":
            return self._decoded(_framed(stream, count), file)
        inner = decompressed(stream, required=True) if self._compression_unit == "chunk" else stream
        table = read_table(inner, count, 0, count)
        if self._has_sizes and table[0] == table[-1]:
            # The chunk holds an Arrow table in place of items.
            return decoded(_arrow_rows(inner.read_whole(), self._choice.images, count), self._row, "sample")
        return self._decoded(cut_items(inner, table, 0), file)

    def _decode(self, file: File, data: memoryview) -> Any:
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

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the chosen fields of a row of an Arrow table."""
        for name in self._choice.names:
            if name not in row:
                raise SampleError(f"there is no field {name!r}; there are {', '.join(row)[:300]}")
        for name, decoder in self._choice.decoders.items():
            if isinstance(row[name], bytes):
                row[name] = call_decoder(f"the decoder of '{name}'", decoder, row[name])
        columns = self._choice.columns
        return row if columns is None else {name: row[name] for name in columns}

    # --- the index

    def files_of(self, index: FileList, content: Mapping[str, Any]) -> FileList:
        """Return the chunks that hold samples; set the compression and the layout of all chunks."""
        if not isinstance(content.get("chunks"), list) or "config" not in content:
            raise ValueError("no chunks and config of LitData's; is this another data set's?")
        config = as_mapping(content["config"], "config")
        _check_kind(config)
        chunks = [as_mapping(one, "a chunk") for one in content["chunks"]]
        self._compression_unit = _compression_unit(config)
        # The sizes of leaves stand before them; the only leaf of a TokensLoader's item has none.
        self._has_sizes = config.get("item_loader") != "TokensLoader"
        self._container, self._layout = self._new_layout(config)
        self.is_compressed = self._compression_unit != "none"
        chunks = [one for one in chunks if as_count(one["chunk_size"], "chunk_size")]
        self.counts = np.array([one["chunk_size"] for one in chunks], np.int64)
        return files_beside(index, [one["filename"] for one in chunks])

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

    reads = LitDataFormat

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
        choice = FieldChoice(columns, dict(decoders or {}), ImageOptions(resize, crop))
        super().__init__(LitDataFormat(choice, samples_per_visit), url, storage_options)


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


def _framed(stream: Stream, count: int) -> Items:
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
    table = np.frombuffer(words, "<u4").astype(np.int64)
    return cut_items(decompressed(stream, required=True), table, 0)


def _arrow_rows(
    data: memoryview, images: ImageOptions, count: int
) -> Iterator[tuple[int, dict[str, Any]] | Skipped]:
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
            yield from usable_rows(*columns.fields(batch), first, "sample")
            first += batch.num_rows
    except CacheStreamError as error:
        raise SampleError(str(error)) from error
    except Exception as error:  # pyarrow raises errors of many classes
        raise SampleError(f"malformed: {type(error).__name__}: {error}"[:300]) from error


# --- the tree ----------------------------------------------------------------------------------


def leaf_names(spec: str | None, count: int) -> tuple[Container, tuple[str, ...]]:
    """Return the container of a sample, and the names of its leaves in order, such as "image", "box.0", "0".

    `spec` is a serialised TreeSpec of `count` leaves. Raises ValueError or LookupError if it is malformed,
    and RecursionError if it is too deep.
    """
    if spec is None:
        return "tuple", tuple(map(str, range(count)))
    protocol, tree = json.loads(spec)
    if protocol != 1:
        raise ValueError(f"a data_spec of the protocol {protocol!r}")
    names = tuple(".".join(path) for path in _paths(tree))
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"a data_spec of {len(names)} leaves, and a data_format of {count}")
    if names == ("",):
        return "bare", ("0",)
    is_tuple = names == tuple(map(str, range(count))) and "dict" not in str(tree["type"]).lower()
    return "tuple" if is_tuple else "dict", names


def _paths(tree: Any) -> Iterator[tuple[str, ...]]:
    children = tree["children_spec"]
    if tree["type"] is None:
        yield ()
        return
    names: Any = range(len(children))
    if tree["type"] in ("builtins.dict", "collections.OrderedDict"):
        names = json.loads(tree["context"])
    for name, child in zip(names, children, strict=True):
        yield from ((str(name), *path) for path in _paths(child))


# --- leaves ------------------------------------------------------------------------------------


def leaf_reader(images: ImageOptions, name: str, kind: str) -> Reader:
    """Return the decoder of a leaf. Raises ConfigError for a format that is not known, or not safe."""
    base, _, details = kind.partition(":")
    if base in _PICKLES:
        raise pickled_error("field", name)
    if base in ("no_header_tensor", "no_header_numpy"):
        dtypes = _TORCH_DTYPES if base == "no_header_tensor" else _NUMPY_DTYPES
        try:
            return partial(_flat, _dtype(dtypes, int(details)))
        except ValueError as error:
            raise ConfigError(f"field '{name}' has the format {kind[:60]!r}: {error}") from error
    image = partial(decode_image, options=images)
    readers: dict[str, Reader] = {
        "str": decode_text,
        "text": decode_text,
        "bool": _bool,
        "int": partial(_scalar, "<q"),
        "float": partial(_scalar, "<d"),
        "tensor": partial(_array, ">", _TORCH_DTYPES),
        "numpy": partial(_array, "<", _NUMPY_DTYPES),
        "json": _json,
        "jpeg": image,
        "image": image,
        "pil": partial(decode_pil, options=images),
        "jpeg_array": partial(decode_images, image),
        **dict.fromkeys(_FILES, bytes),
    }
    if base not in readers:
        raise unknown_error("field", name, f"the format {kind[:60]!r}")
    return readers[base]


def _bool(data: memoryview) -> bool:
    if len(data) != 1:
        raise ValueError(f"{len(data)} bytes, not 1")
    return data[0] != 0


def _scalar(form: str, data: memoryview) -> Any:
    return struct.unpack(form, data)[0]


def _json(data: memoryview) -> Any:
    return json_field(parse_nested(data))


def _dtype(dtypes: tuple[str, ...], index: int) -> np.dtype[Any]:
    code = dtypes[index] if 0 <= index < len(dtypes) else "?"
    if code == "?":
        raise ValueError(f"the type number {index}, which is not known")
    return np.dtype(bool) if code == "?1" else np.dtype(f"<{code}")


def _flat(dtype: np.dtype[Any], data: memoryview) -> npt.NDArray[Any]:
    values = np.frombuffer(data, dtype)
    return values if values.flags.aligned else values.copy()


def _array(order: str, dtypes: tuple[str, ...], data: memoryview) -> npt.NDArray[Any]:
    """Decode an array: its type and number of axes, their lengths (u32, in byte `order`), its data."""
    kind, axes = struct.unpack_from(f"{order}II", data)
    if axes > MAX_AXES:
        raise ValueError(f"an array of {axes} axes")
    shape = struct.unpack_from(f"{order}{axes}I", data, 8)
    return _flat(_dtype(dtypes, kind), data[8 + 4 * axes :]).reshape(shape)


# --- nested values -----------------------------------------------------------------------------


def parse_nested(data: memoryview) -> Any:
    """Parse a nested value (`_nested_loads` of LitData).

    Raises ValueError or LookupError for malformed data, RecursionError for data that is too deep.
    """
    if not len(data) or data[0] > _LAST_TAG:
        return json.loads(bytes(data))
    return _Parser(data).value()


class _Parser:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._place = 0

    def value(self) -> Any:
        return self._tagged(self._byte())

    def _byte(self) -> int:
        value = self._data[self._place]
        self._place += 1
        return value

    def _bytes(self, nbytes: int) -> memoryview:
        found = self._data[self._place : self._place + nbytes]
        if len(found) < nbytes:
            raise ValueError("it ends early")
        self._place += nbytes
        return found

    def _count(self) -> int:
        """Read the number of the items that follow; each takes at least one byte."""
        (count,) = _U32.unpack(self._bytes(_U32.size))
        if count > len(self._data):
            raise ValueError(f"{count} items in {len(self._data)} bytes")
        return int(count)

    def _text(self) -> str:
        return str(self._bytes(self._count()), "utf-8")

    def _tagged(self, tag: int) -> Any:
        if tag == _JSON:
            return json.loads(bytes(self._bytes(self._count())))
        if tag == _STRS:
            return [self._text() for _ in range(self._count())]
        if tag in (_I64S, _F64S):
            return np.frombuffer(self._bytes(8 * self._count()), "<i8" if tag == _I64S else "<f8").tolist()
        if tag == _BOOLS:
            return list(map(bool, self._bytes(self._count())))
        if tag == _DICT:
            return {self._text(): self.value() for _ in range(self._count())}
        if tag == _RECORDS:
            return self._records()
        return self._scalar(tag)

    def _scalar(self, tag: int) -> Any:
        if tag == _STR:
            return self._text()
        if tag in (_I64, _F64):
            return struct.unpack("<q" if tag == _I64 else "<d", self._bytes(8))[0]
        if tag == _BOOL:
            return bool(self._byte())
        if tag != _NONE:
            raise ValueError(f"the tag {tag}, which is not known")
        return None

    def _records(self) -> list[dict[str, Any]]:
        count, num_keys = self._count(), self._count()
        keys = [self._text() for _ in range(num_keys)]
        return [{key: self._scalar(_RECORD_KINDS[self._byte()]) for key in keys} for _ in range(count)]
