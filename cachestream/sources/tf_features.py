"""Features of `tf.train.Example`s as fields of samples: numbers, arrays, images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.config import check_mapping
from cachestream.errors import ConfigError, SampleError
from cachestream.sources.decode.images import AS_THEY_ARE, ImageOptions, decode_image
from cachestream.sources.decode.values import decode_with, looks_like_image
from cachestream.sources.tf_example import Feature, FeatureColumn

Kind = Literal["scalar", "array", "image", "bytes", "str", "texts"] | Sequence[int]
_KINDS: Final = ("scalar", "array", "image", "bytes", "str", "texts")


def checked_kinds(features: Mapping[Any, Any]) -> dict[str, Any]:
    """`features` with shapes as tuples; raises ConfigError for what is none of the kinds."""
    check_mapping("features", features, "{'label': 'scalar', 'image': 'image'}")
    checked = {name: tuple(kind) if isinstance(kind, list) else kind for name, kind in features.items()}
    for name, kind in checked.items():
        if not isinstance(name, str) or not (_is_shape(kind) or kind in _KINDS):
            raise ConfigError(f"features={{{name!r}: {kind!r}}}: give a shape, or one of {', '.join(_KINDS)}")
    if not checked:
        raise ConfigError("features={}: give at least one, or None for all")
    return checked


def _is_shape(kind: Any) -> bool:
    return (
        isinstance(kind, tuple)
        and all(type(length) is int and length >= -1 for length in kind)
        and kind.count(-1) <= 1
    )


def as_kind(name: str, feature: Feature, kind: Any, images: ImageOptions = AS_THEY_ARE) -> Any:
    """The value of a feature that is to be `kind`. Raises SampleError where it is not."""
    if kind == "texts":
        return as_texts(name, feature)
    if kind == "scalar":
        return _one(name, feature)
    if kind == "array" or isinstance(kind, tuple):
        if not isinstance(feature, np.ndarray):
            raise SampleError(f"feature '{name}' holds bytes, no numbers")
        return feature if kind == "array" else _reshaped(name, feature, kind)
    if isinstance(feature, np.ndarray):
        raise SampleError(f"feature '{name}' holds numbers, no bytes")
    data: bytes = _one(name, feature)
    if kind == "image":
        return _image(name, data, images)
    if kind == "str":
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise SampleError(f"feature '{name}' is no UTF-8: {error}") from error
    return data


def _image(name: str, data: bytes, images: ImageOptions) -> Any:
    return decode_with(partial(decode_image, options=images), data, "image", f"feature '{name}'")


def _one(name: str, feature: Any) -> Any:
    if len(feature) != 1:
        raise SampleError(f"feature '{name}' holds {len(feature)} values, not one")
    return feature[0]


def _reshaped(name: str, feature: Any, shape: tuple[int, ...]) -> Any:
    try:
        return feature.reshape(shape)
    except ValueError as error:
        raise SampleError(f"feature '{name}': {len(feature)} values do not make the shape {shape}") from error


def as_texts(name: str, feature: Feature) -> str:
    if isinstance(feature, np.ndarray):
        raise SampleError(f"feature '{name}' holds numbers, no texts")
    try:
        return json.dumps([one.decode() for one in feature], ensure_ascii=False)
    except UnicodeDecodeError as error:
        raise SampleError(
            f"feature '{name}' holds {len(feature)} strings of bytes, which are no texts; choose others with features="
        ) from error


def as_it_is(name: str, feature: Feature, decode_images: bool, images: ImageOptions = AS_THEY_ARE) -> Any:
    """The value of a feature of which nothing was said."""
    if isinstance(feature, np.ndarray):
        return feature[0] if len(feature) == 1 else feature
    if len(feature) != 1:
        return as_texts(name, feature)
    if decode_images and looks_like_image(feature[0]):
        return _image(name, feature[0], images)
    return feature[0]


Column = npt.NDArray[Any] | list[str] | list[bytes]


def columns_of(
    found: Mapping[str, FeatureColumn], kinds: Mapping[str, Kind] | None, *, decode_images: bool
) -> dict[str, Column] | None:
    """In each row what `as_kind` makes of the features of `kinds` in that example, or `as_it_is` of all features.

    None where they are not alike, an image is among them, or one cannot be used: then they are to be made one by one.
    """
    columns: dict[str, Column] = {}
    for name in found if kinds is None else kinds:
        feature = found.get(name)
        if feature is None:
            return None
        kind = "as it is" if kinds is None else kinds[name]
        values = feature.values
        column = _bytes(values, kind, decode_images) if isinstance(values, list) else _numbers(feature, kind)
        if column is None:
            return None
        columns[name] = column
    return columns


def _numbers(feature: FeatureColumn, kind: Any) -> Column | None:
    values, each = feature.values, feature.each
    if each is None or not isinstance(values, np.ndarray):
        return None
    if each == 1 and kind in ("as it is", "scalar"):
        return values
    if kind in ("as it is", "array"):
        return values.reshape(len(feature), each)
    if isinstance(kind, tuple):
        try:
            shape = values[:each].reshape(kind).shape
        except ValueError:
            return None
        return values.reshape(len(feature), *shape)
    return None


def _bytes(values: list[bytes], kind: Any, decode_images: bool) -> Column | None:
    if kind == "str":
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError:
            return None
    if kind == "as it is" and not (decode_images and any(map(looks_like_image, values))):
        return values
    return values if kind == "bytes" else None
