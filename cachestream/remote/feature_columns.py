"""Features of many examples as columns of samples, where all of them are alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cachestream.remote.example_batches import FeatureColumn
from cachestream.remote.features import Kind
from cachestream.remote.magic import looks_like_image

__all__ = ["Column", "columns_of"]

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
