"""Samples of Python objects, field by field, as columns of Parquet become fields.

| value | field |
|-|-|
| dict | a field for each member, "name.member" |
| list of numbers, nested too | an array |
| list that holds texts or dicts | JSON text |
| image as Hugging Face keeps it, {"bytes": …, "path": …} | uint8 `[3, H, W]` |
| anything else, None too | as it is |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cachestream.sources.decode.images import decode_image
from cachestream.sources.decode.values import decode_with, looks_like_image


def plain_fields(sample: Any, empty: Mapping[str, Any]) -> Any:
    """`sample`, if it is a dict with names: its fields by the table above. `empty` has the values for empty lists, by field."""
    if not isinstance(sample, Mapping) or not any(
        isinstance(value, Mapping | list) for value in sample.values()
    ):
        return sample
    return dict(_flat(sample, "", empty))


def _flat(members: Mapping[Any, Any], prefix: str, empty: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in members.items():
        name = f"{prefix}{key}" if prefix else key
        if isinstance(value, Mapping) and value.keys() == {"bytes", "path"} and _is_image(value["bytes"]):
            yield name, decode_with(decode_image, value["bytes"], "image", f"field '{name}'")
        elif isinstance(value, Mapping) and value and all(isinstance(member, str) for member in value):
            yield from _flat(value, f"{name}.", empty)
        elif isinstance(value, list):
            yield name, _list(value, empty.get(name))
        else:
            yield name, value


def _is_image(value: Any) -> bool:
    return isinstance(value, bytes) and looks_like_image(value)


def _list(value: list[Any], if_empty: Any) -> Any:
    if not value and if_empty is not None:
        return if_empty
    return _text(value) if _holds_text(value) else value


def _holds_text(value: list[Any]) -> bool:
    return any(
        _holds_text(item) if isinstance(item, list) else isinstance(item, str | Mapping) for item in value
    )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def empty_lists(features: Any) -> dict[str, Any]:
    """The values of empty lists, by field, as the features of a Hugging Face dataset tell them; {} for others."""
    found: dict[str, Any] = {}
    if isinstance(features, Mapping):
        for name, feature in features.items():
            found.update(_empty_of(str(name), feature))
    return found


def _empty_of(name: str, feature: Any) -> Iterator[tuple[str, Any]]:
    """The value of an empty list for `feature`, and those of the members of a dict."""
    if isinstance(feature, Mapping):
        for member, inner in feature.items():
            yield from _empty_of(f"{name}.{member}", inner)
        return
    depth = 0
    while (inner := _items(feature)) is not None:
        feature, depth = inner, depth + 1
    if depth:
        dtype = str(getattr(feature, "dtype", ""))
        if isinstance(feature, Mapping) or dtype in ("string", "large_string"):
            yield name, "[]"
        elif dtype.startswith(("int", "uint", "float", "bool")):
            kind = np.int64 if "int" in dtype else np.float64 if dtype.startswith("float") else np.bool_
            yield name, np.empty((0,) * depth, kind)


def _items(feature: Any) -> Any:
    """The feature of a list's items; None for what is no list."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    return (
        getattr(feature, "feature", None)
        if type(feature).__name__ in ("List", "LargeList", "Sequence")
        else None
    )
