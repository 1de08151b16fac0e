"""Decoding of MDS columns into the fields of a sample, after MosaicML Streaming 0.13.

(streaming/base/format/mds/encodings.py; all numbers are little-endian.)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.sources.decode.images import ImageOptions, Pixels, decode_image, decode_raw_image
from cachestream.sources.decode.values import decode_integer, decode_json_value
from cachestream.sources.peers.index import Reader, pickled_error, unknown_error

_SCALARS: Final = (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16",
    "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_VALUE_DTYPES: Final = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_SHAPE_DTYPES: Final = ("<u1", "<u2", "<u4", "<u8")
_PIL_HEAD: Final = struct.Struct("<III")
MAX_IMAGES: Final = 4096
MAX_IMAGES_BYTES: Final = 1 << 30  # of the decoded images of one value


def column_reader(images: ImageOptions, name: str, encoding: str) -> Reader:
    """Return the decoder of a column. Raises ConfigError for an encoding that is not known, or not safe."""
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        return _array_reader(name, encoding, details)
    if kind == "pkl":
        raise pickled_error("column", name)
    if encoding in _SCALARS:
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
        if found[-1].shape != found[0].shape:
            raise ValueError("images of several sizes, which make no array: give resize= and crop=")
        if count * found[0].nbytes > MAX_IMAGES_BYTES:
            raise ValueError(f"{count} images of {found[0].nbytes:,} bytes, unpacked")
    return np.stack(found)


def _listed(decode: Reader, data: memoryview) -> npt.NDArray[np.uint8]:
    """Decode as `decode_images` does, after four unused bytes."""
    return decode_images(decode, data[4:])
