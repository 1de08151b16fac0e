"""TFRecord files of `tf.train.Example`s, read as a stream without TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.config import check_mapping
from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.patterns import TFRECORD_ENDINGS
from cachestream.sources.base import Problems, Rows, in_own_context, one_by_one
from cachestream.sources.decode.images import ImageOptions, Size, decode_image
from cachestream.sources.decode.values import decode_with, looks_like_image
from cachestream.sources.fields import Defaults
from cachestream.sources.sample_files import CutFiles
from cachestream.sources.tf_example import Feature, FeatureColumn, parse_example, parse_examples, rows_of
from cachestream.sources.tfrecord_format import (
    HEAD_BYTES,
    Records,
    decompressed_records,
    find_record,
    load_checksum,
    read_records,
    seek_record,
)

Kind = Literal["scalar", "array", "image", "bytes", "str", "texts"] | Sequence[int]
_KINDS: Final = ("scalar", "array", "image", "bytes", "str", "texts")
_INFERRED: Final = "inferred"  # the kind of a feature that the user gave none for
_COMPRESSIONS: Final = ("auto", "gzip", "zlib", None)
Column = npt.NDArray[Any] | list[str] | list[bytes]


class TFRecordSource(CutFiles):
    """The `tf.train.Example`s in TFRecord files; a unit is a file, or a part of one.

    urls: a URL, a folder, a `{000..127}` range, a wildcard, or a list of these.

    A sample is a dict of the features: one number is an int64 or float32 scalar, any other count of
    numbers an array `[count]`, one string of bytes is bytes, several are a JSON text. Bytes that begin
    like an image are decoded to uint8 `[3, H, W]` RGB unless `decode_images=False`. The key is
    "file#byte", the byte of the unpacked file at which the record begins.

    Files are read in parts where a cache is too small for 64 whole ones (for all, where there are fewer),
    unless they are compressed or read without checksums, by which the first record of a part is found.

    features: the features to read, with the kind of each, so that all samples are alike: "scalar", "array",
    a shape such as (28, 28) or (-1, 2), "bytes", "str", "image", or "texts" (a JSON text of all strings). A
    record that lacks one of them is skipped and counted. None: all features of each record.

    compression: "gzip", "zlib", None, or "auto": by the first bytes of each file.

    check_crc: check the CRC-32C of every record. A record with a wrong checksum is skipped and counted; a
    wrong checksum of a length ends its file. Needs google-crc32c: `pip install 'cachestream[tfrecord]'`.

    fields: a default for each optional field, `{"caption": ""}`, for samples that lack the field.

    resize, crop: the size of decoded images, see `ImageOptions`.

    Other arguments, and errors, as for `FileSource`. A truncated file gives the records before its end.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        features: Mapping[str, Kind] | None = None,
        decode_images: bool = True,
        compression: Literal["auto", "gzip", "zlib"] | None = "auto",
        check_crc: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        defaults, images = Defaults(fields), ImageOptions(resize, crop)
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"compression={compression!r}: give 'auto', 'gzip', 'zlib' or None")
        kinds = None if features is None else checked_kinds(features)
        self._fields = FeatureFields(kinds, defaults.values, images, decode_images=decode_images)
        self._compression, self._check_crc = compression, check_crc
        if check_crc:
            load_checksum()
        options = {
            "features": kinds,
            "decode_images": decode_images,
            "compression": None if compression == "auto" else str(compression),
            "check_crc": check_crc,
        }
        shown = [f"{name}={value}" for name, value in options.items() if value not in (None, True)]
        files = FileList(urls, storage_options, owner="TFRecordSource", preferred=TFRECORD_ENDINGS)
        super().__init__("tfrecords", files, shown, defaults, images)

    def parts_for(self, limit_bytes: int) -> int:
        """Return the number of parts to read each file in: see `DivisibleSource`."""
        if not self._check_crc or self._compression not in ("auto", None):
            return 1
        return super().parts_for(limit_bytes)

    def _can_cut(self, head: bytes) -> bool:
        return len(head) >= HEAD_BYTES and find_record(head[:HEAD_BYTES], load_checksum()) == 0

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the records of a file in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    @in_own_context
    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the same records, as `Rows` where small consecutive ones have the same shapes."""
        index, part = self._locate(unit)
        key, problems = self._files.key(index), Problems(self._files.where(index))
        for records in self._read(index, part, problems):
            yield from self._defaults.fill_all(self._samples(records, key, problems))
        problems.raise_any()

    def _read(self, index: int, part: int, problems: Problems) -> Iterator[Records]:
        """Yield the records of a part of file `index`."""
        checksum = load_checksum() if self._check_crc else None
        if self._num_parts == 1:
            with self._open(index) as stream:
                whole = decompressed_records(stream, self._compression, checksum)
                yield from read_records(whole, checksum, problems)
            return
        if checksum is None:
            where = self._files.where(index)
            raise ConfigError(f"{where}: with check_crc=False a file can only be read whole")
        begin, end = self._cut(index, part)
        with self._open(index, begin, end + HEAD_BYTES) as stream:
            if begin == 0 or seek_record(stream, end, checksum):
                yield from read_records(stream, checksum, problems, end)
            self._check_size(index, stream)

    def _samples(
        self, records: Records, key: str, problems: Problems
    ) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the samples in `records`, as one `Rows` where all of them are alike."""
        found = None
        if len(records) > 1:
            found = parse_examples(records.data, records.starts, records.stops)
        if found is not None and (columns := self._fields.columns(found)) is not None:
            yield Rows([f"{key}#{place}" for place in records.places], columns)
            return
        examples = map(parse_example, records) if found is None else rows_of(found)
        for place in records.places:
            try:
                sample = self._fields.sample(next(examples))
            except (ValueError, IndexError, SampleError) as error:
                reason = "malformed: it ends early" if isinstance(error, IndexError) else error
                problems.add(f"record at byte {place}: {reason}")
                continue
            yield f"{key}#{place}", sample

    def __repr__(self) -> str:
        parts = f" in {self._num_parts} parts each" if self._num_parts > 1 else ""
        return f"<TFRecordSource {self._files.shown}, {len(self._files):,} files{parts}>"


# --- features as fields ------------------------------------------------------------------------


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
        self._kinds, self._optional = kinds, optional
        self._decode_image = partial(decode_image, options=images)
        self._decode_images = decode_images

    def sample(self, found: Mapping[str, Feature]) -> dict[str, Any]:
        """Return the fields of one example. Raises ValueError and SampleError if it cannot be used."""
        if self._kinds is None:
            if not found and not self._optional:
                raise ValueError("it has no features")
            return {name: self._field(name, feature, _INFERRED) for name, feature in found.items()}
        sample = {}
        for name, kind in self._kinds.items():
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
        if kind == "str":
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                raise SampleError(f"feature '{name}' is no UTF-8: {error}") from error
        return data

    def _is_image(self, data: bytes) -> bool:
        return self._decode_images and looks_like_image(data)

    def columns(self, found: Mapping[str, FeatureColumn]) -> dict[str, Column] | None:
        """Return the fields of many examples in columns, with the values that `sample` gives.

        None if the examples differ in shape, hold images, or cannot all be used.
        """
        columns: dict[str, Column] = {}
        for name, kind in (dict.fromkeys(found, _INFERRED) if self._kinds is None else self._kinds).items():
            column = self._column(found[name], kind) if name in found else None
            if column is None:
                return None
            columns[name] = column
        return columns

    def _column(self, feature: FeatureColumn, kind: Any) -> Column | None:
        values = feature.values
        if not isinstance(values, list):
            return _number_column(values, len(feature), feature.each, kind)
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


def _number_column(values: npt.NDArray[Any], count: int, each: int | None, kind: Any) -> Column | None:
    """Return the `values` of `count` examples, `each` (None: differing) of one, as a column of `kind`."""
    if each is None:
        return None
    if each == 1 and kind in (_INFERRED, "scalar"):
        return values
    if kind in (_INFERRED, "array"):
        return values.reshape(count, each)
    if isinstance(kind, tuple):
        try:
            return values.reshape(count, *values[:each].reshape(kind).shape)
        except ValueError:
            return None
    return None


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
