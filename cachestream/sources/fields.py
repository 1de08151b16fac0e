"""The fields of samples: choices of columns, defaults, and nested values as fields of their own.

Nested values of Python objects become the same fields as columns of Parquet:

| value | field |
|-|-|
| dict | a field for each member, "name.member" |
| list of numbers, nested too | an array |
| list that holds texts or dicts | JSON text; refused if it holds what JSON has not, as arrays and bytes |
| image in Hugging Face's layout, {"bytes": …, "path": …} | uint8 `[3, H, W]` |
| list of such images, or of their bytes, of one size | uint8 `[N, 3, H, W]` |
| anything else, also None | unchanged |
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cachestream.config import check_mapping
from cachestream.errors import ConfigError, SampleError
from cachestream.sources.base import Rows
from cachestream.sources.decode.images import decode_image, stack_images
from cachestream.sources.decode.values import decode_with, looks_like_image, to_json


def check_columns(columns: Sequence[str] | None) -> None:
    """Raise ConfigError unless `columns` is a list of names, or None for all."""
    if isinstance(columns, str) or (columns is not None and not columns):
        raise ConfigError(f"columns={columns!r}: give a list of names, or None for all")


def check_encoding(encoding: str) -> str:
    """Return the name of the codec for `encoding`; for UTF-8, the one that skips a byte order mark.

    Raises ConfigError for an unknown encoding.
    """
    try:
        name = codecs.lookup(encoding).name
        "".encode(encoding)  # refuses codecs of other things than text, such as "hex"
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f"encoding={encoding!r}: give the name of a codec of Python's, such as 'latin-1'"
        ) from error
    return "utf-8-sig" if name == "utf-8" else name


class Defaults:
    """The default values, by name, of fields that are missing or None: `{"caption": "", "score": 0.0}`.

    If the default is a float, integers become floats. Samples that are not dicts are not changed.
    """

    def __init__(self, fields: Mapping[str, Any] | None) -> None:
        check_mapping("fields", fields, "{'caption': ''}")
        self.values = dict(fields or {})
        self.identity = [f"fields={self.values}"] if self.values else []

    def fill(self, sample: Any) -> Any:
        """Return `sample` with the defaults of the fields that it lacks."""
        if not self.values or not isinstance(sample, Mapping):
            return sample
        filled = dict(sample)
        for name, default in self.values.items():
            value = filled.get(name)
            filled[name] = default if value is None else as_float_if(default, value)
        return filled

    def fill_rows(self, rows: Rows) -> Rows:
        """Return samples in columns with the columns that they lack."""
        if not self.values:
            return rows
        fields = dict(rows.fields)
        for name, default in self.values.items():
            column = fields.get(name)
            fields[name] = (
                repeated(default, len(rows.keys)) if column is None else as_float_if(default, column)
            )
        return Rows(rows.keys, fields)


def repeated(value: Any, count: int) -> Any:
    """Return a column of Rows that has `value` in each of `count` rows."""
    return [value] * count if isinstance(value, str | bytes) else np.array([value] * count)


def as_float_if(default: Any, value: Any) -> Any:
    """Return `value`, an integer or a column of integers, as floats if the field's `default` is a float."""
    if type(default) is not float:
        return value
    if isinstance(value, np.ndarray) and value.ndim:
        return value.astype(np.float64) if value.dtype.kind in "iu" else value
    return float(value) if isinstance(value, int | np.integer) else value


def plain_fields(sample: Any, empty: Mapping[str, Any]) -> Any:
    """Convert the fields of a dict by the table above; other samples are returned unchanged.

    `empty` has the values for empty lists, by field. None in place of a dict is left out where it has a value
    for a member of the dict. Raises SampleError for two values of one field: "a.b" beside "a" with a "b".
    """
    if not isinstance(sample, Mapping) or not any(
        value is None or isinstance(value, Mapping | list) for value in sample.values()
    ):
        return sample
    fields: dict[Any, Any] = {}
    for name, value in _flatten(sample, "", empty):
        if name in fields:
            raise SampleError(
                f"field '{name}' comes twice, by its own name and as a member of a dict: rename one of them"
            )
        fields[name] = value
    return fields


def _flatten(members: Mapping[Any, Any], prefix: str, empty: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in members.items():
        name = f"{prefix}{key}" if prefix else key
        if isinstance(value, Mapping) and (data := _image_in(value)) is not None:
            yield name, decode_with(decode_image, data, "image", f"field '{name}'")
        elif isinstance(value, Mapping) and all(isinstance(member, str) for member in value):
            yield from _flatten(value, f"{name}.", empty)
        elif value is None and any(field.startswith(f"{name}.") for field in empty):
            continue
        elif isinstance(value, list):
            yield name, _list(name, value, empty.get(name))
        else:
            yield name, value


def _image_in(value: Any) -> bytes | None:
    """Return the bytes of an image: `value`, or those in Hugging Face's layout; None for anything else."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        value = value["bytes"]
    return value if isinstance(value, bytes) and looks_like_image(value) else None


def _list(name: Any, value: list[Any], if_empty: Any) -> Any:
    if not value and if_empty is not None:
        return if_empty
    images = [data for data in map(_image_in, value) if data is not None]
    if images and len(images) == len(value):
        return decode_with(_decode_all, images, "list of images", f"field '{name}'")
    try:
        return to_json(value) if _holds_text(value) else value
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(
            f"field '{name}' has no form as JSON: {error}; return such values as fields of their own"
        ) from error


def _decode_all(images: Sequence[bytes]) -> Any:
    return stack_images(list(map(decode_image, images)))


def _holds_text(value: list[Any]) -> bool:
    return any(
        _holds_text(item) if isinstance(item, list) else isinstance(item, str | Mapping) for item in value
    )


def empty_lists(features: Any) -> dict[str, Any]:
    """Return the values for empty lists, by field, from the features of a Hugging Face dataset, else {}."""
    found: dict[str, Any] = {}
    if isinstance(features, Mapping):
        for name, feature in features.items():
            found.update(_empty_of(str(name), feature))
    return found


def _empty_of(name: str, feature: Any) -> Iterator[tuple[str, Any]]:
    """Yield the value for an empty list of `feature`, or those of the members of a dict."""
    if isinstance(feature, Mapping):
        for member, inner in feature.items():
            yield from _empty_of(f"{name}.{member}", inner)
        return
    depth = 0
    while (inner := _item_feature(feature)) is not None:
        feature, depth = inner, depth + 1
    if depth:
        dtype = str(getattr(feature, "dtype", ""))
        if isinstance(feature, Mapping) or dtype in ("string", "large_string"):
            yield name, "[]"
        elif dtype.startswith(("int", "uint", "float", "bool")):
            kind = np.int64 if "int" in dtype else np.float64 if dtype.startswith("float") else np.bool_
            yield name, np.empty((0,) * depth, kind)


def _item_feature(feature: Any) -> Any:
    """Return the feature of a list's items; None if `feature` is not that of a list."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    return (
        getattr(feature, "feature", None)
        if type(feature).__name__ in ("List", "LargeList", "Sequence")
        else None
    )
