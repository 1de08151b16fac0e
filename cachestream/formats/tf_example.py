"""`tf.train.Example` messages: parsed with protobuf, and their features as the fields of samples."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
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

in_c: ModuleType | None
try:
    from cachestream.formats import _varints as in_c
except ImportError:  # no compiler at the installation
    in_c = None

# The values of a bytes_list, a float_list or an int64_list, in order.
Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]
# A feature of many records: the values of each, or None; the rows of an array where each has as many numbers.
ByRecord = list[Feature | None] | npt.NDArray[Any]
Kind = Literal["scalar", "array", "image", "bytes", "str", "texts"] | Sequence[int]
Column = npt.NDArray[Any] | list[str] | list[bytes]
_KINDS: Final = ("scalar", "array", "image", "bytes", "str", "texts")
_INFERRED: Final = "inferred"  # the kind of a feature that the user gave none for
# The messages of tensorflow/core/example/{example,feature}.proto, as (field, number, type). A packed list of
# floats has the wire type of bytes, and is declared as bytes: numpy reads them without a copy of each float.
# "Many…" are the same messages in another declaration. Messages one after the other are one message, whose
# repeated fields hold the values of all of them in order; a message in it has the wire type of bytes, too.
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
    "ManyExamples": (("features", 1, "repeated bytes"),),
    "ManyFeatures": (("feature", 1, "repeated bytes"),),
    "ManyEntries": (("key", 1, "repeated bytes"), ("value", 2, "repeated bytes")),
    "ManyValues": (
        ("bytes_list", 1, "repeated bytes"),
        ("float_list", 2, "repeated bytes"),
        ("int64_list", 3, "repeated bytes"),
    ),
}

_FEW: Final = 64  # integers that numpy takes faster one by one than as an array
_KEY, _VALUE = 1 << 3 | 2, 2 << 3 | 2  # the tags of an entry: the number of the field, and the wire type


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


def _parse(name: str, *serialized: bytes) -> Any:
    """Return the message that `serialized` make together."""
    try:
        return load_messages()[name].FromString(b"".join(serialized))
    except Exception as error:  # DecodeError, of an optional library
        raise ValueError(f"no tf.train.Example: {error}") from error


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return the features of a serialized Example by name; features without a list are left out.

    Raises ValueError for anything else, such as a SequenceExample.
    """
    example = _parse("Example", data)
    if example.HasField("feature_lists"):
        raise ValueError("a SequenceExample; only tf.train.Example is read")
    found = {entry.key: _feature(entry.value) for entry in example.features.feature}
    return {name: feature for name, feature in found.items() if feature is not None}


def _feature(feature: Any) -> Feature | None:
    """Return the values of a Feature, or None if it holds no list."""
    if feature.HasField("bytes_list"):
        return list(feature.bytes_list.value)
    if feature.HasField("float_list"):
        packed = list(feature.float_list.value)
        fields_bytes = sum([2 + len(one) + (max(1, len(one)).bit_length() - 1) // 7 for one in packed])
        if feature.float_list.ByteSize() != fields_bytes:
            raise ValueError("floats that are not packed, as all writers of TFRecords pack them")
        return np.frombuffer(b"".join(packed), "<f4")
    if feature.HasField("int64_list"):
        integers = feature.int64_list.value
        few = len(integers) < _FEW
        return np.fromiter(integers, np.int64, len(integers)) if few else np.array(integers, np.int64)
    return None


def parse_examples(records: Iterable[bytes]) -> dict[str, ByRecord]:
    """Return what `parse_example` returns for each of `records`, by feature, in a few calls for all of them.

    Raises ValueError if a record is no Example, or is written in an unusual way.
    """
    # Each level of all messages is parsed as one message; the sizes of the parts tell that none lies in two of them.
    records = list(records)
    per_record = list(_parse("ManyExamples", *records).features)
    entries = list(_parse("ManyFeatures", *per_record).feature)
    many = _parse("ManyEntries", *entries)
    keys, values = list(many.key), list(many.value)
    key_bytes = _field_bytes(keys)
    ends, entry_ends = np.cumsum(_lengths(per_record)), np.cumsum(_field_bytes(entries))
    found: defaultdict[bytes, dict[int, bytes]] = defaultdict(dict)
    for number, key, value in zip(np.searchsorted(ends, entry_ends).tolist(), keys, values, strict=False):
        found[key][number] = value
    if not (
        _are_in_turn(per_record, _lengths(records))
        and np.isin(ends, [0, *entry_ends]).all()
        and len(keys) == len(entries) == sum(map(len, found.values()))  # no name comes twice in a record
        and _are_in_turn(values, _lengths(entries) - key_bytes)
        and all(
            one[0] == _KEY and one[at] == _VALUE for one, at in zip(entries, key_bytes.tolist(), strict=True)
        )
    ):
        raise ValueError("a tf.train.Example that is written in an unusual way")
    features: dict[str, ByRecord] = {}
    for key, by_record in found.items():
        column = _features(list(by_record.values()))
        if len(by_record) < len(records):
            of_record = dict(zip(by_record, column, strict=True))
            column = [of_record.get(number) for number in range(len(records))]
        features[key.decode()] = column
    return features


def _features(serialized: list[bytes]) -> ByRecord:
    """Return the values of each serialized Feature: together, if all hold one string or one packed list."""
    many = _parse("ManyValues", *serialized)
    for kind in ("bytes_list", "float_list", "int64_list"):
        lists = list(getattr(many, kind))
        values = list(_parse("BytesList", *lists).value)
        if not (_are_in_turn(lists, _lengths(serialized)) and _are_in_turn(values, _lengths(lists))):
            continue
        if kind == "bytes_list":
            return [[value] for value in values]
        if kind == "float_list":
            if (_lengths(values) % 4).any():
                raise ValueError("a float is cut off")
            return _rows(np.frombuffer(bytearray().join(values), "<f4"), _lengths(values) // 4)
        if in_c is not None:
            numbers, counts = in_c.decode_varints(tuple(values))
            return _rows(np.frombuffer(numbers, np.int64), np.frombuffer(counts, np.int64))
    return [_feature(_parse("Feature", one)) for one in serialized]


def _rows(values: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> ByRecord:
    """Cut `values` into parts of `counts` values: the rows of an array, if these are equal."""
    if (counts == counts[0]).all():
        return values.reshape(len(counts), -1)
    return [values[stop - count : stop] for stop, count in zip(np.cumsum(counts), counts, strict=True)]


def _are_in_turn(values: Sequence[bytes], lengths: npt.NDArray[np.int64]) -> bool:
    """Return whether messages of these lengths hold one of `values` each, in order, and nothing else.

    The messages together hold `values`, each in a field of its own.
    """
    return len(values) == len(lengths) and np.array_equal(_field_bytes(values), lengths)


def _field_bytes(values: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the size of each value as a field: a tag of one byte, the length in bytes of 7 bits, the
    value.
    """
    lengths = _lengths(values)
    return 2 + lengths + sum(lengths >= 1 << bits for bits in (7, 14, 21, 28))


def _lengths(values: Sequence[bytes]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, values), np.int64, len(values))


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

    def columns(self, features: Mapping[str, ByRecord]) -> dict[str, Column] | None:
        """Return the fields of many examples in columns, with the values that `sample` gives.

        None if the examples differ in shape, hold images, or cannot all be used.
        """
        columns: dict[str, Column] = {}
        kinds: Mapping[str, Any] = dict.fromkeys(features, _INFERRED) if self.kinds is None else self.kinds
        for name, kind in kinds.items():
            column = self._column(features[name], kind) if name in features else None
            if column is None:
                return None
            columns[name] = column
        return columns or None

    def _column(self, features: list[Any] | npt.NDArray[Any], kind: Any) -> Column | None:
        if isinstance(features, np.ndarray):
            return _number_column(features, kind)
        if any(one is None for one in features) or len({(type(one), len(one)) for one in features}) > 1:
            return None
        if isinstance(features[0], np.ndarray):
            alike = len({feature.dtype for feature in features}) == 1
            return _number_column(np.stack(features), kind) if alike else None
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
