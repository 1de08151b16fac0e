"""Conversion of Arrow columns to the fields of samples.

| column | field |
|-|-|
| bool, int, float | a number of the same type |
| decimal | float64 |
| date, time, timestamp, duration | int64, in the column's own unit (days for date32), since 1970 in UTC |
| string; binary | str; bytes |
| (nested) list, fixed-size list, tensor of numbers, decimals or times | an array |
| struct | one field for each member, "column.member" |
| struct of "bytes" and "path" (Hugging Face's images) | the decoded image, uint8 `[3, H, W]` |
| list of such structs, list of binary | images of one size, uint8 `[N, 3, H, W]`; nulls are left out |
| list of structs that hold binary | a list for each member, "column.member" |
| other lists, map | JSON text, with the numbers above in place of decimals and times |
| other lists and maps that hold binary | refused |
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.config import require
from cachestream.errors import ConfigError, SampleError
from cachestream.sources.decode.images import decode_image, stack_images
from cachestream.sources.decode.values import decode_with, looks_like_image, named_decoder
from cachestream.transport import object_limit

if TYPE_CHECKING:
    from cachestream.sources.decode.table_columns import ColumnOptions

_IMAGE_MEMBERS: Final = ("bytes", "path")


@dataclass(frozen=True, slots=True)
class Unusable:
    """Stands in for the value of a row that cannot be used, with the reason."""

    reason: str


Values = list[Any] | npt.NDArray[Any]
Batch = tuple[int, dict[str, Values], dict[int, Unusable]]  # number of rows, fields, unusable rows


def load_arrow() -> Any:
    """Return the module pyarrow, with its module compute. Raises ConfigError without it."""
    require("pyarrow.compute", "parquet", "a table of Arrow or Parquet")
    return require("pyarrow", "parquet", "a table of Arrow or Parquet")


class Columns:
    """Converts the columns of one Arrow schema to fields. Raises ConfigError for a type that has no field.

    A null that has no replacement makes its row unusable.
    """

    def __init__(self, arrow: Any, schema: Any, options: ColumnOptions) -> None:
        self._decode = partial(decode_image, options=options.images)
        self._decoders = {
            name: named_decoder(name, wanted, options.images)
            for name, wanted in (options.decoders or {}).items()
        }
        self._arrow = arrow
        self._nulls = {**options.defaults, **(options.nulls or {})}
        self._decode_images, named = bool(options.decode_images), options.decode_images
        self._image_columns = () if isinstance(named, bool) else tuple(named)
        self._features = _features(schema)
        for column in schema:
            try:
                self._fields(column.name, arrow.nulls(0, column.type))
            except SampleError as error:
                raise ConfigError(str(error)) from error

    def fields(self, batch: Any) -> tuple[dict[str, Values], dict[int, Unusable]]:
        """Return the fields of a record batch, and its unusable rows by number."""
        fields: dict[str, Values] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            fields.update(self._fields(name, column))
        bad = {
            row: value
            for values in reversed(fields.values())  # the first column's reason wins
            if isinstance(values, list)
            for row, value in enumerate(values)
            if type(value) is Unusable
        }
        return fields, bad

    def _fields(self, name: str, array: Any) -> dict[str, Values]:
        """Return the fields of one column: one for each member of a struct, else a single one."""
        types = self._arrow.types
        if isinstance(array, self._arrow.ExtensionArray):
            shape, order = getattr(array.type, "shape", None), getattr(array.type, "permutation", None)
            found = self._fields(name, array.storage)
            if shape is not None:  # a tensor, which Arrow stores flat
                found[name] = _tensors(found[name], tuple(shape), order)
            return found
        if types.is_dictionary(array.type):
            array = _without_views(self._arrow, array).dictionary_decode()
        kind = array.type
        if types.is_null(kind) and name not in self._nulls:
            raise SampleError(f"column '{name}' holds nothing but nulls: leave it out with columns=[…]")
        if is_image_struct(types, kind):
            return {name: self._checked(name, array, self._decode_files(name, array))}
        if types.is_struct(kind):
            members = zip(kind, array.flatten(), strict=True)  # a null struct has null members
            return {
                key: values
                for member, part in members
                for key, values in self._fields(f"{name}.{member.name}", part).items()
            }
        if is_split(types, kind):
            flat, lists = array.flatten(), _list_offsets(self._arrow, array)
            parts = zip(kind.value_type, flat.flatten(), strict=True)
            return {
                key: values
                for member, part in parts
                for key, values in self._fields(
                    f"{name}.{member.name}", self._arrow.LargeListArray.from_arrays(lists, part)
                ).items()
            }
        is_decoded = self._decoders.get(name) is not bytes if name in self._decoders else self._decode_images
        if is_decoded and _holds_files(types, kind):
            return {name: self._checked(name, array, self._image_lists(name, array))}
        return {name: self._checked(name, array, self._plain(name, array))}

    def _checked(self, name: str, array: Any, values: Values) -> Values:
        """Return the `values` of `array`, with nulls replaced or made Unusable.

        If the replacement is a float, integers become floats.
        """
        instead: Any = self._nulls.get(name, Unusable(f"column '{name}' is null"))
        if name in self._nulls and isinstance(values, np.ndarray):  # keep the type of the column
            if values.dtype.kind in "iu" and isinstance(instead, float):
                values = values.astype(np.float64)
            try:
                instead = values.dtype.type(instead)
            except (TypeError, ValueError, OverflowError) as error:
                raise SampleError(
                    f"column '{name}' holds {values.dtype}: {instead!r} cannot stand for its nulls "
                    f"({error}); give another value in fields= or nulls="
                ) from error
        most, large = object_limit.limit_bytes(), list[int]()
        if array.nbytes > most:
            large = [row for row in range(len(array)) if array.slice(row, 1).nbytes > most]
        if not (array.null_count or large):
            return values
        found = list(values)
        for row in _null_positions(array):
            found[row] = instead
        for row in large:
            try:
                object_limit.check(array.slice(row, 1).nbytes)
            except object_limit.TooLargeError as error:
                found[row] = Unusable(f"column '{name}' holds {error}")
        return found

    def _plain(self, name: str, array: Any) -> Values:
        """Return the values of a column that is neither a struct nor an image."""
        arrow, types = self._arrow, self._arrow.types
        kind = array.type
        if types.is_null(kind):
            return [None] * len(array)
        if _is_numeric(types, kind):
            return _numbers(_as_numbers(arrow, array))
        if _is_text(types, kind):
            return list(array.to_pylist())
        if _is_binary(types, kind):
            if name in self._image_columns or name in self._decoders:
                return [self._image(name, one) for one in _buffers(array)]
            return list(array.to_pylist())
        if _is_list(types, kind) and _is_numeric(types, _innermost(types, kind)):
            return nested(arrow, array, name)
        leaves = list(_leaves(types, kind))
        if (types.is_map(kind) or _is_list(types, kind)) and all(_has_json(types, leaf) for leaf in leaves):
            is_plain = not any(types.is_decimal(leaf) or _is_time(types, leaf) for leaf in leaves)
            values = array.to_pylist() if is_plain else [_json_value(types, one) for one in array]
            return [_as_json(name, one) for one in values]
        raise SampleError(f"column '{name}' ({kind}) has no form as a field: leave it out with columns=[…]")

    def _decode_files(self, name: str, array: Any) -> Values:
        """Return the files of a column in Hugging Face's layout: decoded images, bytes of other files."""
        member = array.field("bytes")
        feature = self._features.get(name)
        found: list[Any] = []
        for row, data in enumerate(_buffers(member)):
            if data is None:
                path = array.field("path")[row].as_py()
                found.append(
                    Unusable(f"column '{name}' has no bytes, only the path {path!r}, which is not followed")
                )
            elif name in self._decoders or (
                self._decode_images and (feature == "Image" or (feature is None and looks_like_image(data)))
            ):
                found.append(self._image(name, data))
            else:
                found.append(bytes(data))
        return found

    def _image_lists(self, name: str, array: Any) -> Values:
        """Return the decoded images in the lists of a column: an array for each row."""
        files = array.flatten()
        if is_image_struct(self._arrow.types, files.type):
            files = files.field("bytes")
        images = [self._image(name, data) for data in _buffers(files)]
        ends = np.cumsum(_numbers(self._arrow.compute.list_value_length(array))).tolist()
        none = np.empty((0, 0, 0) if name in self._decoders else (0, 3, 0, 0), np.uint8)
        return [_stacked(name, images[first:last], none) for first, last in itertools.pairwise([0, *ends])]

    def _image(self, name: str, data: memoryview | None) -> Any:
        if data is None:
            return None
        try:
            return decode_with(self._decoders.get(name, self._decode), data, "image", f"column '{name}'")
        except SampleError as error:
            return Unusable(str(error))


def _stacked(name: str, images: list[Any], none: npt.NDArray[Any]) -> Any:
    """Return the images of a row as one array, `none` if there are none; Unusable for the first that is."""
    try:
        found = [image for image in images if image is not None]
        return next((one for one in found if isinstance(one, Unusable)), None) or (
            stack_images(found) if found else none
        )
    except ValueError as error:
        return Unusable(f"column '{name}' holds {error}")


def _list_offsets(arrow: Any, array: Any) -> Any:
    """Return where each list of a column begins in its flat values, null for a null list, and the end."""
    ends = np.cumsum(_numbers(arrow.compute.list_value_length(array)), dtype=np.int64)
    is_null = np.append(~np.asarray(array.is_valid()), False)
    return arrow.array(np.concatenate([[0], ends]), arrow.int64(), mask=is_null)


# --- types -------------------------------------------------------------------------------------


def _features(schema: Any) -> dict[str, str]:
    """Return the feature types in Hugging Face's metadata ("Image", "Audio", …) by column."""
    raw = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(raw)["info"]["features"] if raw else {}
        return {
            name: str(one["_type"])
            for name, one in features.items()
            if isinstance(one, dict) and "_type" in one
        }
    except (ValueError, KeyError, TypeError, AttributeError):  # not written by Hugging Face
        return {}


def is_image_struct(types: Any, kind: Any) -> bool:
    """Return whether `kind` is a struct of bytes and path: Hugging Face's images, audio and video."""
    return (
        types.is_struct(kind)
        and kind.num_fields == 2
        and sorted(member.name for member in kind) == list(_IMAGE_MEMBERS)
        and _is_binary(types, kind.field("bytes").type)
        and (_is_text(types, kind.field("path").type) or types.is_null(kind.field("path").type))
    )


def _holds_files(types: Any, kind: Any) -> bool:
    """Return whether `kind` is that of lists of binary, or of Hugging Face's images."""
    is_list = _is_list(types, kind)
    return is_list and (_is_binary(types, kind.value_type) or is_image_struct(types, kind.value_type))


def is_split(types: Any, kind: Any) -> bool:
    """Return whether `kind` is that of lists of structs that hold binary: a list for each member."""
    if not _is_list(types, kind) or not types.is_struct(kind.value_type) or _holds_files(types, kind):
        return False
    return any(_is_binary(types, leaf) for leaf in _leaves(types, kind))


def _is_text(types: Any, kind: Any) -> bool:
    return _is_one_of(types, kind, "is_string", "is_large_string", "is_string_view")


def _is_binary(types: Any, kind: Any) -> bool:
    return _is_one_of(types, kind, "is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view")


def _is_one_of(types: Any, kind: Any, *names: str) -> bool:
    """Return whether one of pyarrow's checks is true; its older versions have not all of them."""
    return any(hasattr(types, name) and getattr(types, name)(kind) for name in names)


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _innermost(types: Any, kind: Any) -> Any:
    while _is_list(types, kind):
        kind = kind.value_type
    return kind


def _is_numeric(types: Any, kind: Any) -> bool:
    return (
        bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))
        or types.is_decimal(kind)
        or _is_time(types, kind)
    )


def _is_time(types: Any, kind: Any) -> bool:
    return bool(types.is_temporal(kind)) and not _is_one_of(types, kind, "is_interval")


def _leaves(types: Any, kind: Any) -> Iterator[Any]:
    """Yield the types of the values in lists, maps and structs; a struct of two members of one name
    itself.
    """
    if _is_list(types, kind) or types.is_dictionary(kind):
        yield from _leaves(types, kind.value_type)
    elif types.is_map(kind):
        yield from _leaves(types, kind.key_type)
        yield from _leaves(types, kind.item_type)
    elif types.is_struct(kind) and len({member.name for member in kind}) == kind.num_fields:
        for member in kind:
            yield from _leaves(types, member.type)
    else:
        yield kind


def _has_json(types: Any, leaf: Any) -> bool:
    return types.is_null(leaf) or _is_text(types, leaf) or _is_numeric(types, leaf)


# --- values ------------------------------------------------------------------------------------


def _as_numbers(arrow: Any, array: Any) -> Any:
    """Return decimals as float64, and times as int64 in their own unit; other numbers unchanged."""
    kind = array.type
    if arrow.types.is_temporal(kind):
        # pyarrow does not cast 32-bit dates and times to int64 directly.
        wide = arrow.int32() if kind.bit_width == 32 else arrow.int64()
        return array.cast(wide).cast(arrow.int64())
    return array.cast(arrow.float64()) if arrow.types.is_decimal(kind) else array


def expanded_bytes(arrow: Any, batch: Any) -> int:
    """Return the most bytes that a record batch takes when the values of its dictionaries are written out."""
    nbytes = int(batch.nbytes)
    for column in batch.columns:
        if arrow.types.is_dictionary(column.type):
            values = _without_views(arrow, column).dictionary
            if _is_text(arrow.types, values.type) or _is_binary(arrow.types, values.type):
                lengths = arrow.compute.binary_length(values)
                nbytes += len(column) * (arrow.compute.max(lengths).as_py() or 0)
    return nbytes


def _without_views(arrow: Any, array: Any) -> Any:
    """Return a dictionary array without views of texts or bytes: pyarrow (26) cannot measure or repeat
    them.
    """
    wide = {"string_view": arrow.large_string(), "binary_view": arrow.large_binary()}
    kind = wide.get(str(array.type.value_type))
    return (
        array
        if kind is None
        else arrow.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(kind))
    )


def _numbers(array: Any) -> npt.NDArray[Any]:
    """Return the numbers of an array; nulls become 0 or False."""
    if array.null_count:
        array = array.fill_null(False if str(array.type) == "bool" else 0)
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


def _buffers(array: Any) -> Iterator[memoryview | None]:
    """Yield the bytes of each row without a copy; None for a null."""
    for one in array:
        buffer = one.as_buffer()
        yield None if buffer is None else memoryview(buffer)


def _as_json(name: str, value: Any) -> Any:
    try:
        return json.dumps(value, ensure_ascii=False)  # its keys are texts
    except (TypeError, ValueError, RecursionError) as error:
        return Unusable(f"column '{name}' has no form as JSON: {error}")


def _json_value(types: Any, value: Any) -> Any:
    """Return an Arrow scalar as values of JSON; a map as a list of pairs."""
    kind = value.type
    if not value.is_valid:
        return None
    if types.is_dictionary(kind):
        return _json_value(types, value.value)
    if types.is_map(kind):
        return [[_json_value(types, one) for one in pair.values()] for pair in value.values]
    if _is_list(types, kind):
        return [_json_value(types, one) for one in value.values]
    if types.is_struct(kind):
        return {name: _json_value(types, one) for name, one in value.items()}
    if types.is_decimal(kind):
        return float(value.as_py())
    return value.value if types.is_temporal(kind) else value.as_py()


def nested(arrow: Any, array: Any, name: str) -> Values:
    """Return an array for each row of a column of lists of numbers, nested to any depth.

    A row is unusable if its lists are of unequal lengths at one depth, or if they hold a null.
    """
    if (shape := _shape_of_all(arrow, array)) is not None:
        return _flat_numbers(arrow, array).reshape(len(array), *shape)
    inner = array.type.value_type
    if not _is_list(arrow.types, inner) and not array.flatten().null_count:
        ends = np.cumsum(_numbers(arrow.compute.list_value_length(array))).tolist()
        values = _flat_numbers(arrow, array)
        return [values[first:last] for first, last in itertools.pairwise([0, *ends])]
    return [_row_array(arrow, array.slice(row, 1), name) for row in range(len(array))]


def _shape_of_all(arrow: Any, array: Any) -> tuple[int, ...] | None:
    """Return the lengths of the lists at each depth; None if they differ, or if the lists hold a null."""
    shape = list[int]()
    while _is_list(arrow.types, array.type):
        lengths = _numbers(arrow.compute.list_value_length(array))
        if len(lengths) and (lengths != lengths[0]).any():
            return None
        shape.append(int(lengths[0]) if len(lengths) else 0)
        array = array.flatten()
        if array.null_count:
            return None
    return tuple(shape)


def _flat_numbers(arrow: Any, array: Any) -> npt.NDArray[Any]:
    while _is_list(arrow.types, array.type):
        array = array.flatten()
    return _numbers(_as_numbers(arrow, array))


def _row_array(arrow: Any, row: Any, name: str) -> Any:
    """Return the array of a column of one row."""
    if (shape := _shape_of_all(arrow, row)) is not None:
        return _flat_numbers(arrow, row).reshape(shape)
    while not row.flatten().null_count:
        row = row.flatten()
        lengths = _numbers(arrow.compute.list_value_length(row))
        if (lengths != lengths[0]).any():
            return Unusable(
                f"column '{name}' holds lists of {lengths.min()} to {lengths.max()} values, which make no "
                "array: choose others with columns=[…]"
            )
    return Unusable(f"column '{name}' holds a null")


def _tensors(flat: Values, shape: tuple[int, ...], order: Sequence[int] | None) -> Values:
    if isinstance(flat, np.ndarray) and order is None:
        return flat.reshape(len(flat), *shape)
    order = range(len(shape)) if order is None else order
    return [
        one if isinstance(one, Unusable) else np.asarray(one).reshape(shape).transpose(tuple(order))
        for one in flat
    ]


def _null_positions(array: Any) -> npt.NDArray[np.int64]:
    if not array.null_count:
        return np.empty(0, np.int64)
    return np.flatnonzero(~np.asarray(array.is_valid()))
