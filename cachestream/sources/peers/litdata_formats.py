"""Decoding of the leaves of LitData's samples into fields, and the tree of a sample.

(litdata 0.2.76, streaming/serializers.py and utilities/_pytree.py; numbers are little-endian unless said
otherwise.)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.sources.decode.images import ImageOptions, decode_image
from cachestream.sources.decode.values import json_field
from cachestream.sources.peers.index import Reader, pickled_error, unknown_error
from cachestream.sources.peers.mds import decode_images, decode_pil, decode_text

_LAST_TAG: Final = 0x20  # the first byte of JSON text is above
_JSON, _STRS, _I64S, _F64S, _BOOLS, _DICT, _RECORDS, _STR, _I64, _F64, _BOOL, _NONE = range(12)
# The tags of values in records; the values are encoded as with the tags above.
_RECORD_KINDS: Final = {0x10: _NONE, 0x11: _STR, 0x12: _I64, 0x13: _F64, 0x14: _BOOL}
_U32: Final = struct.Struct("<I")
Container = Literal["dict", "tuple", "bare"]

MAX_AXES: Final = 64
MAX_DEPTH: Final = 100
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


# --- the tree ----------------------------------------------------------------------------------


def leaf_names(spec: str | None, count: int) -> tuple[Container, tuple[str, ...]]:
    """Return the container of a sample, and the names of its leaves in order, such as "image", "box.0", "0".

    `spec` is a serialised TreeSpec of `count` leaves. Raises ValueError or LookupError if it is malformed.
    """
    if spec is None:
        return "tuple", tuple(map(str, range(count)))
    protocol, tree = json.loads(spec)
    if protocol != 1:
        raise ValueError(f"a data_spec of the protocol {protocol!r}")
    names = tuple(".".join(path) for path in _paths(tree, 0))
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"a data_spec of {len(names)} leaves, and a data_format of {count}")
    if names == ("",):
        return "bare", ("0",)
    is_tuple = names == tuple(map(str, range(count))) and "dict" not in str(tree["type"]).lower()
    return "tuple" if is_tuple else "dict", names


def _paths(tree: Any, depth: int) -> Iterator[tuple[str, ...]]:
    children = tree["children_spec"]
    if tree["type"] is None:
        yield ()
        return
    if depth > MAX_DEPTH:
        raise ValueError("a data_spec that is too deep")
    names: Any = range(len(children))
    if tree["type"] in ("builtins.dict", "collections.OrderedDict"):
        names = json.loads(tree["context"])
    for name, child in zip(names, children, strict=True):
        yield from ((str(name), *path) for path in _paths(child, depth + 1))


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
    """Decode an array or a tensor: its type and number of axes, their lengths (u32, in byte `order`), its data."""
    kind, axes = struct.unpack_from(f"{order}II", data)
    if axes > MAX_AXES:
        raise ValueError(f"an array of {axes} axes")
    shape = struct.unpack_from(f"{order}{axes}I", data, 8)
    return _flat(_dtype(dtypes, kind), data[8 + 4 * axes :]).reshape(shape)
