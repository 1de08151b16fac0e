"""MDS data sets of MosaicML Streaming, read from their own shards without conversion and without pickle.

(streaming 0.13, base/format/mds/encodings.py; all numbers are little-endian.)
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.formats.indexed import (
    FieldChoice,
    IndexedFormat,
    IndexedSource,
    ItemLayout,
    Reader,
    as_count,
    as_mapping,
    check_file_name,
    cut_items,
    files_beside,
    pickled_error,
    read_table,
    unknown_error,
)
from cachestream.sources.api import (
    ConfigError,
    File,
    FileList,
    ImageOptions,
    Item,
    Part,
    Pixels,
    SampleError,
    Size,
    Stream,
    Url,
    check_columns,
    decode_image,
    decode_integer,
    decode_json_value,
    decode_raw_image,
    decompressed,
    require,
    stack_images,
)

MAX_COLUMNS: Final = 10_000
_COMPRESSIONS: Final = ("zstd", "gz", "bz2")  # MDS also has br and snappy
_DIGESTS: Final = hashlib.algorithms_guaranteed - {"shake_128", "shake_256"}
_VALUE_DTYPES: Final = {
    8: "uint8", 16: "uint16", 32: "uint32", 64: "uint64",
    9: "int8", 17: "int16", 33: "int32", 65: "int64",
    18: "float16", 34: "float32", 66: "float64",
}  # fmt: skip
_SHAPE_DTYPES: Final = ("<u1", "<u2", "<u4", "<u8")
_PIL_HEAD: Final = struct.Struct("<III")
MAX_IMAGES: Final = 4096
MAX_IMAGES_BYTES: Final = 1 << 30  # of the decoded images of one value


@dataclass(frozen=True, slots=True)
class _Shard:
    """The entry of a shard in the index.

    `name` is that of the file that is read, `key` that of the uncompressed file.
    """

    name: str
    key: str
    count: int
    is_compressed: bool
    layout: ItemLayout
    hashes: Mapping[str, str]


class MDSFormat(IndexedFormat):
    """Shards of MDS: see `MDSSource` for the options."""

    name = "mds"
    file_names = re.compile(r".*\.mds(\.\w+)?")
    nouns = ("shard", "visit")

    def __init__(self, choice: FieldChoice, samples_per_visit: int | None, *, check_hashes: bool) -> None:
        super().__init__(choice, samples_per_visit)
        self._check_hashes = check_hashes

    def files_of(self, index: FileList, content: Mapping[str, Any]) -> FileList:
        self._shards = _shards(content, self._choice)
        files = files_beside(index, [shard.name for shard in self._shards])
        self.counts = np.array([shard.count for shard in self._shards], np.int64)
        self.is_compressed = any(shard.is_compressed for shard in self._shards)
        hashes = (_known_hash(files.shown, one) for one in self._shards if self._check_hashes)
        self._hashes = tuple(hashes)
        return files

    def prefix(self, file: File, part: Part) -> str:
        return f"{self._shards[file.index].key}#"

    def _decode(self, file: File, data: memoryview) -> dict[str, Any]:
        return self._shards[file.index].layout.fields(data)

    def _read_whole(self, stream: Stream, file: File, count: int) -> Iterator[Item]:
        if self._hashes:
            _check_hash(*self._hashes[file.index], stream)
        inner = decompressed(stream, required=True) if self._shards[file.index].is_compressed else stream
        table = read_table(inner, count, 0, count)
        return self._decoded(cut_items(inner, table, 0), file)


class MDSSource(IndexedSource):
    """The samples of an MDS data set, as MosaicML Streaming's `MDSWriter` writes them; a unit is a shard.

    url: the folder that holds its `index.json`, such as "s3://bucket/set/train".

    A sample is a dict of the columns. By encoding: "int", "uint8" and the like become numbers; "str" and
    "bytes" stay as they are; "ndarray" becomes an array; "jpeg", "png" and "pil" become uint8 `[3, H, W]`
    RGB, lists of images `[N, 3, H, W]`; "json" becomes a value, or the text of an object; "str_int" and
    "str_float" become numbers, "str_decimal" a float64. The key is "shard#number".

    columns: the names of the columns to read. None: all columns.

    decoders: functions of bytes by column name, used instead of the decoding above: `{"extra": pickle.loads}`
    for a "pkl" column, which is refused otherwise; `{"image": bytes}` to keep images encoded.

    samples_per_visit: read about this many samples of a shard at a time, and then samples of other shards, so
    that early epochs hold samples of many shards. The shards must not be compressed. None: a whole shard.

    check_hashes: compare each whole shard, which is then held in memory, with its hash in the index before
    the shard is used. An index without hashes is a ConfigError.

    resize and crop are for images, see `ImageOptions`: the shorter side or (height, width), and the middle.

    Shards may be compressed by zstd (needs `pip install 'cachestream[zstd]'`), gz or bz2. A shard is read
    from begin to end in bounded memory. A damaged shard gives the samples before the damage, and is then
    counted as a failure. Raises ConfigError for an index that is malformed or names something that cannot be
    read, and the errors of `FileSource` otherwise.
    """

    reads = MDSFormat

    def __init__(
        self,
        url: Url,
        *,
        storage_options: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        samples_per_visit: int | None = None,
        check_hashes: bool = False,
        resize: Size | None = None,
        crop: Size | None = None,
    ) -> None:
        check_columns(columns)
        choice = FieldChoice(columns, dict(decoders or {}), ImageOptions(resize, crop))
        super().__init__(
            MDSFormat(choice, samples_per_visit, check_hashes=check_hashes), url, storage_options
        )


# --- the index ---------------------------------------------------------------------------------


def _shards(index: Mapping[str, Any], choice: FieldChoice) -> list[_Shard]:
    """Return the shards with samples. Raises ValueError, LookupError or TypeError for a malformed index."""
    if index.get("version") != 2 or not isinstance(index.get("shards"), list):
        raise ValueError("not version 2 of MDS with a list of shards; is this another data set's?")
    layouts: dict[Any, ItemLayout] = {}  # shards of equal columns share one
    shards = [_shard(as_mapping(one, "a shard"), choice, layouts) for one in index["shards"]]
    return [shard for shard in shards if shard.count]


def _layout_of(shard: Mapping[str, Any], choice: FieldChoice, layouts: dict[Any, ItemLayout]) -> ItemLayout:
    lists = [shard[f"column_{what}"] for what in ("names", "encodings", "sizes")]
    if not all(isinstance(one, list) for one in lists) or len({len(one) for one in lists}) != 1:
        raise ValueError("the names, encodings and sizes of columns, which do not fit")
    names, encodings, sizes = key = tuple(tuple(one) for one in lists)
    if not 0 < len(names) <= MAX_COLUMNS or len(set(map(str, names))) != len(names):
        raise ValueError(f"{len(names)} columns, or several of one name")
    if not all(isinstance(text, str) for text in (*names, *encodings)):
        raise ValueError("names or encodings of columns that are no texts")
    if not all(size is None or (type(size) is int and 0 <= size < 1 << 32) for size in sizes):
        raise ValueError("sizes of columns that are no numbers of bytes")
    if key not in layouts:
        for name in choice.names:
            if name not in names:
                raise ConfigError(f"there is no column {name!r}; there are {', '.join(names)[:500]}")
        readers = choice.readers(names, encodings, partial(column_reader, choice.images))
        fixed = tuple(size or 0 for size in sizes)
        layouts[key] = ItemLayout(names, encodings, fixed, readers, ("column", "value", "columns"))
    return layouts[key]


def _shard(shard: Mapping[str, Any], choice: FieldChoice, layouts: dict[Any, ItemLayout]) -> _Shard:
    if shard.get("format") != "mds" or shard.get("version") != 2:
        raise ValueError(f"shards of the format {str(shard.get('format'))[:60]!r}; only 'mds' can be read")
    raw, zip_data = as_mapping(shard["raw_data"], "raw_data"), shard.get("zip_data")
    stored = as_mapping(zip_data, "zip_data") if zip_data else raw
    if zip_data:
        _check_compression(str(shard.get("compression")).partition(":")[0])
    hashes = stored.get("hashes") or {}
    return _Shard(
        name=stored["basename"],
        key=check_file_name(raw["basename"]),
        count=as_count(shard["samples"], "the number of samples of a shard"),
        is_compressed=bool(zip_data),
        layout=_layout_of(shard, choice, layouts),
        hashes={str(name): str(value) for name, value in as_mapping(hashes, "hashes").items()},
    )


def _check_compression(packer: str) -> None:
    if packer not in _COMPRESSIONS:
        raise ValueError(
            f"shards are compressed by {packer[:40]!r}, which cannot be unpacked here: write them with "
            f"one of {', '.join(_COMPRESSIONS)}, or without"
        )
    if packer == "zstd":
        require("zstandard", "zstd", "MDS compressed by zstd")


# --- hashes ------------------------------------------------------------------------------------


def _known_hash(shown: str, shard: _Shard) -> tuple[str, str]:
    """Return the algorithm and the value of the first hash of a shard whose algorithm is known here."""
    for name, value in shard.hashes.items():
        if name in xxhash.algorithms_available or name in _DIGESTS:
            return name, value
    raise ConfigError(
        f"{shown}: the index has no hash of {shard.name} that is known here; leave out check_hashes"
    )


def _check_hash(name: str, expected: str, stream: Stream) -> None:
    data = stream.read_whole()
    digest = hashlib.new(name, data) if name in _DIGESTS else getattr(xxhash, name)(data)
    if digest.hexdigest() != expected:
        raise SampleError(f"{stream.where}: its {name} is not the one in the index: it is damaged")
    stream.push_back(data)


# --- columns -----------------------------------------------------------------------------------


def column_reader(images: ImageOptions, name: str, encoding: str) -> Reader:
    """Return the decoder of a column. Raises ConfigError for an encoding that is not known, or not safe."""
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        return _array_reader(name, encoding, details)
    if kind == "pkl":
        raise pickled_error("column", name)
    if encoding in _VALUE_DTYPES.values():
        return partial(_scalar, np.dtype(encoding).newbyteorder("<"))
    image = partial(decode_image, options=images)
    pil = partial(decode_pil, options=images)
    readers: dict[str, Reader] = {
        "bytes": bytes,
        "str": decode_text,
        "int": partial(_scalar, np.dtype("<i8")),
        "str_int": decode_integer,
        "str_float": _float,
        "str_decimal": _float,
        "json": decode_json_value,
        "jpeg": image,
        "png": image,
        "pil": pil,
        "jpeg_array": partial(decode_images, image),
        "jpegarray": partial(decode_images, image),
        **dict.fromkeys(("list[jpeg]", "list[png]"), partial(_listed, image)),
        "list[pil]": partial(_listed, pil),
    }
    if encoding not in readers:
        raise unknown_error("column", name, f"the encoding {encoding[:60]!r}")
    return readers[encoding]


# --- numbers and texts -------------------------------------------------------------------------


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes, not {dtype.itemsize}")
    return np.frombuffer(data, dtype)[0]


def decode_text(data: memoryview) -> str:
    return str(data, "utf-8")


def _float(data: memoryview) -> float:
    return float(decode_text(data))


# --- arrays ------------------------------------------------------------------------------------


def _array_reader(name: str, encoding: str, details: str) -> Reader:
    dtype, _, lengths = details.partition(":")
    try:
        shape = tuple(map(int, lengths.split(","))) if lengths else None
    except ValueError:
        shape = (0,)
    if (dtype and dtype not in _VALUE_DTYPES.values()) or (shape is not None and min(shape) < 1):
        raise ConfigError(f"column '{name}' has the encoding {encoding[:60]!r}, which is not known")
    return partial(_array, dtype, shape)


def _array(fixed_dtype: str, fixed_shape: Sequence[int] | None, data: memoryview) -> npt.NDArray[Any]:
    dtype, shape, place = fixed_dtype, fixed_shape, 0
    if not dtype:
        dtype, place = _VALUE_DTYPES[data[0]], 1
    if shape is None:
        ndim, kind = data[place] >> 2, np.dtype(_SHAPE_DTYPES[data[place] & 3])
        shape = np.frombuffer(data, kind, ndim, place + 1).tolist()
        place += 1 + ndim * kind.itemsize
    values = np.frombuffer(data[place:], np.dtype(dtype).newbyteorder("<"))
    values = values.reshape(shape)
    return values if values.flags.aligned and values.dtype.isnative else values.astype(dtype)


# --- images ------------------------------------------------------------------------------------


def decode_pil(data: memoryview, options: ImageOptions) -> Pixels:
    """Decode a raw PIL image: width, height, length of the mode's name (u32 each), the name, the pixels."""
    width, height, length = _PIL_HEAD.unpack_from(data)
    if length > 16:
        raise ValueError(f"a mode of {length} characters")
    pixels = _PIL_HEAD.size + length
    mode = str(data[_PIL_HEAD.size : pixels], "ascii")
    return decode_raw_image(mode, (width, height), data[pixels:], options)


def decode_images(decode: Reader, data: memoryview) -> npt.NDArray[np.uint8]:
    """Decode several images to uint8 `[N, 3, H, W]`: their number and the bytes of each (u32), the images."""
    (count,) = struct.unpack_from("<I", data)
    if not 0 < count <= MAX_IMAGES:
        raise ValueError(f"{count} images, from 1 to {MAX_IMAGES} can be read")
    sizes = struct.unpack_from(f"<{count}I", data, 4)
    place = 4 + 4 * count
    if place + sum(sizes) != len(data):
        raise ValueError(f"images of {sum(sizes)} bytes in {len(data)}")
    found: list[Pixels] = []
    for size in sizes:
        found.append(decode(data[place : place + size]))
        place += size
        if count * found[0].nbytes > MAX_IMAGES_BYTES:
            raise ValueError(f"{count} images of {found[0].nbytes:,} bytes, unpacked")
    return stack_images(found)


def _listed(decode: Reader, data: memoryview) -> npt.NDArray[np.uint8]:
    """Decode as `decode_images` does, after four unused bytes."""
    return decode_images(decode, data[4:])
