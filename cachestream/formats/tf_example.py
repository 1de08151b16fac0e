"""`tf.train.Example` messages: parsed with protobuf, and their features as the fields of samples."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.sources.api import (
    ConfigError,
    ImageOptions,
    SampleError,
    check_mapping,
    decode_image,
    decode_with,
    looks_like_image,
    require,
)

# The values of a bytes_list, a float_list or an int64_list, in order.
Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]
Kind = Literal["scalar", "array", "image", "bytes", "str", "texts"] | Sequence[int]
Column = npt.NDArray[Any] | list[str] | list[bytes]
_KINDS: Final = ("scalar", "array", "image", "bytes", "str", "texts")
_INFERRED: Final = "inferred"  # the kind of a feature that the user gave none for
# The messages of tensorflow/core/example/{example,feature}.proto, as (field, number, type). A packed list of
# floats has the wire type of bytes, and is declared as bytes: numpy reads them without a copy of each float.
_MESSAGES: Final = {
    "BytesList": (("value", 1, "repeated bytes"),),
    "FloatList": (("value", 1, "repeated bytes"),),
    "Int64List": (("value", 1, "repeated int64"),),
    "Feature": (
        ("bytes_list", 1, "BytesList"),
        ("float_list", 2, "FloatList"),
        ("int64_list", 3, "Int64List"),
    ),
    "Entry": (("key", 1, "string"), ("value", 2, "Feature")),
    "Features": (("feature", 1, "repeated Entry"),),
    "Example": (("features", 1, "Features"), ("feature_lists", 2, "Features")),  # 2: of a SequenceExample
}

_FEW: Final = 64  # integers that numpy takes faster one by one than as an array


@functools.cache
def load_messages() -> dict[str, Any]:
    """Return the classes of the messages, by name."""
    descriptors = require("google.protobuf.descriptor_pb2", "tfrecord", "reading TFRecords")
    pools = require("google.protobuf.descriptor_pool", "tfrecord", "reading TFRecords")
    factory = require("google.protobuf.message_factory", "tfrecord", "reading TFRecords")
    kinds = descriptors.FieldDescriptorProto
    types = {"bytes": kinds.TYPE_BYTES, "int64": kinds.TYPE_INT64, "string": kinds.TYPE_STRING}
    file = descriptors.FileDescriptorProto(name="example.proto", package="cachestream", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, words in fields:
            label, _, kind = words.rpartition(" ")
            added = message.field.add(name=field, number=number, type=types.get(kind, kinds.TYPE_MESSAGE))
            added.label = kinds.LABEL_REPEATED if label else kinds.LABEL_OPTIONAL
            if kind not in types:
                added.type_name = f".cachestream.{kind}"
    pool = pools.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: factory.GetMessageClass(pool.FindMessageTypeByName(f"cachestream.{name}")) for name in _MESSAGES
    }


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return the features of a serialized Example by name; features without a list are left out.

    Raises ValueError for anything else, such as a SequenceExample.
    """
    try:
        example = load_messages()["Example"].FromString(data)
    except Exception as error:  # DecodeError, of an optional library
        raise ValueError(f"no tf.train.Example: {error}") from error
    if example.HasField("feature_lists"):
        raise ValueError("a SequenceExample; only tf.train.Example is read")
    found: dict[str, Feature] = {}
    for entry in example.features.feature:
        name, feature = entry.key, entry.value
        if feature.HasField("bytes_list"):
            found[name] = list(feature.bytes_list.value)
        elif feature.HasField("float_list"):
            packed = feature.float_list.value
            if not packed and feature.float_list.ByteSize():
                raise ValueError("floats that are not packed, as all writers of TFRecords pack them")
            found[name] = np.frombuffer(packed[0] if len(packed) == 1 else b"".join(packed), "<f4")
        elif feature.HasField("int64_list"):
            integers = feature.int64_list.value
            count = len(integers)
            few = count < _FEW
            found[name] = np.fromiter(integers, np.int64, count) if few else np.array(integers, np.int64)
    return found


def checked_kinds(features: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `features` with shapes as tuples. Raises ConfigError for an unknown kind."""
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


class FeatureFields:
    """Converts the features of examples to the fields of samples.

    `kinds` are the features to convert, and the kind of each; None: all features, by the values that each
    holds. A feature that is missing and `optional` is left out.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind] | None,
        optional: Collection[str],
        images: ImageOptions,
        *,
        decode_images: bool,
    ) -> None:
        self.kinds, self._optional = kinds, optional
        self._decode_image = partial(decode_image, options=images)
        self.decode_images = decode_images

    def sample(self, found: Mapping[str, Feature]) -> dict[str, Any]:
        """Return the fields of one example. Raises ValueError and SampleError if it cannot be used."""
        if self.kinds is None:
            if not found and not self._optional:
                raise ValueError("it has no features")
            return {name: self._field(name, feature, _INFERRED) for name, feature in found.items()}
        sample = {}
        for name, kind in self.kinds.items():
            if name in found:
                sample[name] = self._field(name, found[name], kind)
            elif name not in self._optional:
                raise ValueError(f"no feature '{name}'; there are {', '.join(sorted(found)[:20])}")
        return sample

    def _field(self, name: str, feature: Feature, kind: Any) -> Any:
        """Convert a feature to `kind`. Raises SampleError if it holds something else."""
        if isinstance(feature, np.ndarray):
            return _from_numbers(name, feature, kind)
        if kind == "array" or isinstance(kind, tuple):
            raise SampleError(f"feature '{name}' holds bytes, no numbers")
        if kind == "texts" or (kind == _INFERRED and len(feature) != 1):
            return _as_texts(name, feature)
        data: bytes = _single(name, feature)
        if kind == "image" or (kind == _INFERRED and self._is_image(data)):
            return decode_with(self._decode_image, data, "image", f"feature '{name}'")
        return decode_with(bytes.decode, data, "UTF-8 text", f"feature '{name}'") if kind == "str" else data

    def _is_image(self, data: bytes) -> bool:
        return self.decode_images and looks_like_image(data)

    def columns(self, examples: Sequence[Mapping[str, Feature]]) -> dict[str, Column] | None:
        """Return the fields of several examples in columns, with the values that `sample` gives.

        None if the examples differ in their features or in shape, hold images, or cannot all be used.
        """
        columns: dict[str, Column] = {}
        kinds: Mapping[str, Any] = self.kinds or dict.fromkeys(examples[0], _INFERRED)
        if self.kinds is None and any(example.keys() != kinds.keys() for example in examples):
            return None
        for name, kind in kinds.items():
            every = all(name in example for example in examples)
            column = self._column([example[name] for example in examples], kind) if every else None
            if column is None:
                return None
            columns[name] = column
        return columns or None

    def _column(self, features: list[Any], kind: Any) -> Column | None:
        if len({*map(type, features)}) > 1 or len({*map(len, features)}) > 1:
            return None
        if isinstance(features[0], np.ndarray):
            alike = len({feature.dtype for feature in features}) == 1
            return (
                _number_column(np.concatenate(features).reshape(len(features), -1), kind) if alike else None
            )
        if len(features[0]) != 1:
            return None
        values = [feature[0] for feature in features]
        if kind == "str":
            try:
                return [value.decode() for value in values]
            except UnicodeDecodeError:
                return None
        is_plain = kind == "bytes" or (kind == _INFERRED and not any(map(self._is_image, values)))
        return values if is_plain else None


def _from_numbers(name: str, feature: npt.NDArray[Any], kind: Any) -> Any:
    if kind == "scalar":
        return _single(name, feature)
    if kind == _INFERRED:
        return feature[0] if len(feature) == 1 else feature
    if kind == "array":
        return feature
    if not isinstance(kind, tuple):
        raise SampleError(f"feature '{name}' holds numbers, no {'texts' if kind == 'texts' else 'bytes'}")
    try:
        return feature.reshape(kind)
    except ValueError as error:
        raise SampleError(f"feature '{name}': {len(feature)} values do not make the shape {kind}") from error


def _number_column(features: npt.NDArray[Any], kind: Any) -> Column | None:
    """Return the features of all examples, a row each, as a column of `kind`."""
    try:
        first = _from_numbers("", features[0], kind)
    except SampleError:
        return None
    return features.reshape(len(features), *np.shape(first))


def _single(name: str, feature: Any) -> Any:
    if len(feature) != 1:
        raise SampleError(f"feature '{name}' holds {len(feature)} values, not one")
    return feature[0]


def _as_texts(name: str, feature: list[bytes]) -> str:
    """Return the strings of a feature as a JSON list. Raises SampleError if they are not UTF-8."""
    try:
        return json.dumps([one.decode() for one in feature], ensure_ascii=False)
    except UnicodeDecodeError as error:
        raise SampleError(
            f"feature '{name}' holds {len(feature)} strings of bytes, which are no texts; "
            "choose others with features="
        ) from error
