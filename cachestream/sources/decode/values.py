"""Decoding of a file's bytes, by its extension, to the fields of a sample.

The data are untrusted: only the listed image formats are opened, nothing is unpickled, sizes are bounded, and
malformed data raise SampleError with the path and the reason.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError, SampleError
from cachestream.listing.patterns import kind_of
from cachestream.schema import holds_integers_of
from cachestream.sources.decode.images import (
    MALFORMED,
    UNCHANGED,
    Buffer,
    ImageOptions,
    decode_image,
    decode_index,
)
from cachestream.sources.registry import plugin_decoder
from cachestream.sources.user_code import call_decoder
from cachestream.transport import object_limit

MAX_HEADER_BYTES: Final = 1 << 16  # of a .npy file
_to_dtype: Final[Callable[[Any], np.dtype[Any]]] = np.lib.format.descr_to_dtype  # has no types in numpy 2.2
_MALFORMED: Final = (*MALFORMED, zipfile.BadZipFile)
_Data = TypeVar("_Data")
# Object addresses are removed from reasons, so that equal reasons are counted together.
_ADDRESS: Final = re.compile(r"\s*<[^<>]* at 0x[0-9a-fA-F]+>")


# --- arrays ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of an array in a file: its elements begin at byte `offset`, in C or Fortran order."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


def parse_npy_header(head: memoryview) -> ArrayLayout | int:
    """Return the layout in a `.npy` header, or the size of the header in bytes if `head` is shorter.

    Reads versions 1 to 3 of numpy.lib.format. Raises ValueError for anything else.
    """
    if len(head) < 12 or bytes(head[:6]) != np.lib.format.MAGIC_PREFIX:
        raise ValueError("does not begin as a .npy file")
    wide = head[6] >= 2
    (header_bytes,) = struct.unpack_from("<I" if wide else "<H", head, 8)
    first = 12 if wide else 10
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"a .npy header of {header_bytes} bytes")
    if first + header_bytes > len(head):
        return int(first + header_bytes)
    shape, fortran_order, dtype = _parse_fields(bytes(head[first : first + header_bytes]))
    return ArrayLayout(first + header_bytes, shape, dtype, fortran_order)


@lru_cache(maxsize=256)  # files of one data set mostly share one header, and parsing it is slow
def _parse_fields(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order (True for Fortran) and dtype."""
    fields = ast.literal_eval(header.decode("latin1"))
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("the .npy header does not hold descr, fortran_order and shape")
    shape = fields["shape"]
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise ValueError(f"the .npy header holds shape {shape!r}")
    return shape, bool(fields["fortran_order"]), _to_dtype(fields["descr"])


def decode_npy(data: Buffer) -> npt.NDArray[Any]:
    """Decode a .npy file to an array: writable, C-contiguous, native byte order, without a copy if possible.

    Reads versions 1 to 3 of numpy.lib.format. Object arrays are refused.
    """
    view = memoryview(data)
    layout = parse_npy_header(view)
    if isinstance(layout, int):
        raise ValueError(f"a .npy header of {layout} bytes")  # noqa: TRY004  not of an argument
    dtype, start = layout.dtype, layout.offset
    if dtype.hasobject:
        raise ValueError("object arrays need pickle, which is refused")
    count = math.prod(layout.shape)
    have, want = len(view) - start, count * dtype.itemsize
    if have < want:
        raise ValueError(f"truncated: {have} of {want} bytes")
    array = np.frombuffer(view, dtype, count, start) if count else np.empty(0, dtype)
    array = array.reshape(layout.shape, order="F" if layout.fortran_order else "C")
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    if not array.flags.c_contiguous or not array.flags.writeable:
        array = array.copy(order="C")
    return array


def decode_npz(data: Buffer) -> dict[str, Any]:
    """Decode a .npz file to its arrays by name; a 0-d text array becomes a str."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        object_limit.check(sum(member.file_size for member in members))
        fields: dict[str, Any] = {}
        for member in members:
            # zipfile unpacks other methods without a bound.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("a member that is compressed otherwise than numpy does it")
            # A member may unpack to more than its declared size.
            with archive.open(member) as stream:
                content = stream.read(member.file_size)
            array = decode_npy(content)
            is_text = array.ndim == 0 and array.dtype.kind == "U"
            fields[member.filename.removesuffix(".npy")] = str(array) if is_text else array
    return fields


# --- JSON and text -----------------------------------------------------------------------------


def _numbers(value: list[Any]) -> npt.NDArray[Any] | None:
    """Return a rectangular list of numbers or bools as an int64, float64 or bool array; None for others."""
    kinds: set[type] = set()
    pending: list[Any] = [value]
    while pending:
        items = pending.pop()
        kinds.update(map(type, items))
        if list in kinds:
            kinds.remove(list)
            pending.extend(item for item in items if isinstance(item, list))
    if not kinds <= {int, float} and kinds != {bool}:
        return None
    try:
        dtype = bool if kinds == {bool} else np.int64 if kinds == {int} else np.float64
        array = np.array(value, dtype)
    except (ValueError, OverflowError):  # not rectangular, or an integer beyond 64 bits
        return None
    return array if holds_integers_of(value, array) else None


def decode_json_value(data: Buffer) -> Any:
    """Decode a JSON text to a single value as `json_field` does: an object remains JSON text."""
    return json_field(json.loads(bytes(data)))


def json_field(value: Any) -> Any:
    """Return a number, bool, str or None unchanged, a rectangular list of numbers as an array, else JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    array = _numbers(value) if isinstance(value, list) else None
    return json.dumps(value, ensure_ascii=False) if array is None else array


def to_json(value: Any) -> str:
    """Return the JSON text of nested values, in which numbers of numpy are numbers.

    Raises TypeError or ValueError for what JSON cannot hold, such as arrays, bytes, dates, and keys that are
    no texts.
    """
    if isinstance(value, dict | list | tuple):
        _check_keys(value)
    return json.dumps(value, ensure_ascii=False, default=_json_number)


def _check_keys(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys must be str, not {key!r}")
    for item in value.values() if isinstance(value, dict) else value:
        # Most are texts, and isinstance is slow.
        if type(item) is not str and isinstance(item, dict | list | tuple):
            _check_keys(item)


def _json_number(value: Any) -> Any:
    if isinstance(value, np.bool_ | np.integer | np.floating) and value.itemsize <= 8:
        return value.item()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def decode_json(data: Buffer, encoding: str = "utf-8-sig") -> Any:
    """Decode a JSON object to a dict of its fields, or another value, as `json_field` does.

    An array of objects is a list of such dicts, and so is an empty one.
    """
    # The default leaves it to json.loads to tell UTF-8, UTF-16 and UTF-32 apart.
    try:
        value = json.loads(bytes(data) if encoding == "utf-8-sig" else decode_text(data, encoding))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        raise ValueError(f"{error}; JSON Lines are read by open_source(…, format='lines')") from error
    if isinstance(value, dict):
        return {name: json_field(item) for name, item in value.items()}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [{name: json_field(item) for name, item in record.items()} for record in value]
    return json_field(value)


def decode_text(data: Buffer, encoding: str = "utf-8-sig") -> str:
    return bytes(data).decode(encoding)


def decode_integer(data: Buffer) -> int:
    """Return the integer in a text. Raises ValueError if it has more than 64 bits."""
    value = int(bytes(data))
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer beyond 64 bits")
    return value


# --- chosen by name ----------------------------------------------------------------------------


def named_decoder(field: str, name: Any, images: ImageOptions) -> Callable[[Buffer], Any]:
    """Return the decoder that `decoders={field: name}` asks for: "index" for an image's values as they are
    stored (`decode_index`), "raw" for the bytes.

    Raises ConfigError for another name.
    """
    if name == "index":
        return partial(decode_index, options=images)
    if name == "raw":
        return bytes
    raise ConfigError(
        f"decoders={{{field!r}: {name!r}}}: give 'index', for the values of a mask or of depth as they are "
        "stored, or 'raw', for the bytes"
    )


# --- by extension ------------------------------------------------------------------------------

_DECODERS: Final[dict[str, Callable[[Buffer], Any]]] = {
    "image": decode_image,
    "text": decode_text,
    "array": decode_npy,
    "arrays": decode_npz,
    "json": decode_json,
    "data": bytes,
}


def decode_value(
    data: Buffer, extension: str, path: str, images: ImageOptions = UNCHANGED, encoding: str = "utf-8-sig"
) -> Any:
    """Decode `data` by `extension` (".jpg", …) to an array, str or bytes, or a dict of such fields.

    `images` resizes and crops images; `encoding` is that of text and JSON. Extensions that are not built in
    may have the decoder of a plug-in. Raises SampleError with `path` (already redacted) and the reason if the
    data are malformed.
    """
    name = kind_of(extension)
    if name == "data" and extension and (plugin := plugin_decoder(extension)) is not None:
        return call_decoder(f"{path}: the plug-in for {extension}", plugin, memoryview(data))
    options: dict[str, Any] = {}
    if name == "image":
        options["options"] = images
    elif name in ("text", "json"):
        options["encoding"] = encoding
    decoder = partial(_DECODERS[name], **options)
    return decode_with(decoder, data, f"{extension} file ({name})", path)


def decode_with(decoder: Callable[[_Data], Any], data: _Data, kind: str, path: str) -> Any:
    """Return `decoder(data)`. Raises SampleError with `path` and the reason if the data are malformed."""
    try:
        return decoder(data)
    except _MALFORMED as error:
        text = _ADDRESS.sub("", str(error))
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise SampleError(f"{path}: not a usable {kind}: {reason[:300]}") from error


def decode_fields(
    data: Buffer, extension: str, path: str, images: ImageOptions = UNCHANGED, encoding: str = "utf-8-sig"
) -> dict[str, Any] | list[dict[str, Any]]:
    """Decode the file `path` to its fields: "image", "array", "text", "data" (bytes), or the file's own.

    A JSON array of objects gives those of each.
    """
    value, kind = decode_value(data, extension, path, images, encoding), kind_of(extension)
    is_whole = isinstance(value, dict) or (kind == "json" and isinstance(value, list))
    return value if is_whole else {kind: value}


_IMAGE_MAGIC: Final = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\x00",  # TIFF, little-endian and big-endian
    b"MM\x00*",
    b"\x00\x00\x00\x0cjP  \r\n",  # JPEG 2000
)


def looks_like_image(data: Buffer) -> bool:
    """Return whether `data` begin like an image; not for BMP and PNM, which texts may begin like."""
    head = bytes(data[:16])
    return (
        head.startswith(_IMAGE_MAGIC)
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        or (head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"))
    )
