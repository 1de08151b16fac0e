"""TFRecord files of `tf.train.Example`s, read as a stream without TensorFlow.

A record is stored as its length, the length's checksum, the data, and the data's checksum
(tensorflow/core/lib/io/record_writer.h).
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.config import check_mapping, require
from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.patterns import TFRECORD_ENDINGS
from cachestream.sources.base import Problems, Rows, check_unit, one_by_one
from cachestream.sources.decode.compression import UnpackedStream
from cachestream.sources.decode.images import AS_THEY_ARE, ImageOptions, Size, decode_image
from cachestream.sources.decode.values import decode_with, looks_like_image
from cachestream.sources.fields import Defaults
from cachestream.sources.parts import LEAST_PART_BYTES, Parts, parts_for_diversity
from cachestream.sources.tf_example import Feature, FeatureColumn, parse_example, parse_examples, rows_of
from cachestream.transport import bounds
from cachestream.transport.object import open_stream
from cachestream.transport.stream import Stream

MAX_RECORD_BYTES: Final = 2 << 30  # protobuf's own limit
TOGETHER_BYTES: Final = 512 << 10
SCAN_BYTES: Final = 64 << 10  # looked through at a time for the first record of a part
SMALL_BYTES: Final = 32 << 10  # records up to this average size are read many at once
_HEAD: Final = struct.Struct("<QI")
HEAD_BYTES: Final = _HEAD.size
_TAIL_BYTES: Final = 4
Checksum = Callable[[bytes], int]
Kind = Literal["scalar", "array", "image", "bytes", "str", "texts"] | Sequence[int]
_KINDS: Final = ("scalar", "array", "image", "bytes", "str", "texts")
Column = npt.NDArray[Any] | list[str] | list[bytes]
_COMPRESSIONS: Final = ("auto", "gzip", "zlib", None)


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Some records of a file: `data[starts[i]:stops[i]]` is record i, `data` begins at byte `offset`."""

    offset: int
    data: bytes
    starts: list[int]
    stops: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def places(self) -> list[int]:
        """The byte of the file at which each record begins, with its length."""
        return [self.offset + start - HEAD_BYTES for start in self.starts]

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[start:stop] for start, stop in zip(self.starts, self.stops, strict=True))


def unpacked_records(stream: Stream, kind: str | None, checksum: Checksum | None) -> Stream:
    """Return `stream`, unpacked as `kind` says: "gzip", "zlib", None, or "auto" (by the first bytes)."""
    if kind == "auto":
        head = stream.read(HEAD_BYTES)
        stream.push_back(head)
        kind = _compression_of(bytes(head), checksum)
    return stream if kind is None else UnpackedStream(stream, kind)


def find_record(data: bytes, checksum: Checksum) -> int | None:
    """Return the offset of the first record in `data`, or None.

    A record is told by the checksum of its length, 32 bits, and by the length, whose upper 32 bits are zero.
    """
    heads = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), HEAD_BYTES)
    possible = np.flatnonzero(~heads[:, 4:8].any(axis=1))
    # In long runs of zeros most heads are the same, so that each is checked once.
    different, first = np.unique(heads[possible], axis=0, return_index=True)
    found = [
        int(possible[place])
        for head, place in zip(different, first.tolist(), strict=True)
        if _masked(checksum(head[:8].tobytes())) == int.from_bytes(head[8:].tobytes(), "little")
    ]
    return min(found, default=None)


def seek_record(stream: Stream, end: int, checksum: Checksum) -> bool:
    """Advance `stream` to the first record that begins at its position or after it, and before `end`.

    Returns False if there is none.
    """
    window, origin = b"", stream.position
    while origin < end:
        more = bytes(stream.read(min(SCAN_BYTES, end - origin + HEAD_BYTES)))
        window += more
        found = find_record(window, checksum) if len(window) >= HEAD_BYTES else None
        if found is not None:
            stream.push_back(memoryview(bytearray(window[found:])))
            return origin + found < end
        if not more:
            return False
        keep = window[1 - HEAD_BYTES :]
        window, origin = keep, origin + len(window) - len(keep)
    return False


def read_records(
    stream: Stream, checksum: Checksum | None, problems: Problems, end: int | None = None
) -> Iterator[Records]:
    """Yield the undamaged records in order: small ones as they arrive together, others one by one.

    The last one is the last that begins before byte `end`, if that is given.
    """
    while end is None or stream.position < end:
        offset, piece = stream.position, stream.take()
        ends = _record_ends(piece, len(piece) if end is None else end - offset)
        together = len(ends) > 1 and ends[-1] <= SMALL_BYTES * len(ends)
        if together:
            whole = yield from _read_together(offset, piece, ends, checksum, problems)
            piece = piece[ends[whole - 1] if whole else 0 :]
        stream.push_back(piece)
        # Also read the record that the piece ends in, or whose length is damaged.
        for _ in range(1 if together else len(ends) + 1):
            if end is not None and stream.position >= end:
                return
            record = _read_record(stream, checksum, problems)
            if record is None:
                return
            if len(record):
                yield record


def _record_ends(piece: memoryview, stop: int) -> list[int]:
    """Return the end of each record that begins before `stop` and is complete in `piece`."""
    ends: list[int] = []
    at, most = 0, min(len(piece), TOGETHER_BYTES)
    while at < stop and at + HEAD_BYTES <= most:
        length, _ = _HEAD.unpack_from(piece, at)
        at += HEAD_BYTES + length + _TAIL_BYTES
        if at > most:
            break
        ends.append(at)
    return ends


def _read_together(
    offset: int, piece: memoryview, ends: list[int], checksum: Checksum | None, problems: Problems
) -> Generator[Records, None, int]:
    """Yield the undamaged records of `piece`, which end at `ends`.

    Returns the number of records before the first damaged length.
    """
    data = bytes(piece[: ends[-1]])
    heads = [0, *ends[:-1]]
    starts, stops = [head + HEAD_BYTES for head in heads], [end - _TAIL_BYTES for end in ends]
    whole, damaged = len(ends), []
    if checksum is not None:
        lengths = _crcs_match(
            data, [checksum(data[head : head + 8]) for head in heads], [head + 8 for head in heads]
        )
        whole = whole if lengths.all() else int(lengths.argmin())
        contents = [checksum(data[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        damaged = np.flatnonzero(~_crcs_match(data, contents, stops)[:whole]).tolist()
    first = 0
    for bad in [*damaged, whole]:
        if bad > first:
            yield Records(offset, data, starts[first:bad], stops[first:bad])
        if bad < whole:
            problems.add(f"record at byte {offset + heads[bad]}: its checksum does not fit")
        first = bad + 1
    return whole


def _crcs_match(data: bytes, crcs: list[int], places: list[int]) -> npt.NDArray[np.bool_]:
    """Return for each of `crcs` whether it matches the masked checksum stored at its place in `data`."""
    every = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), 4)
    stored = every[places].view("<u4").reshape(-1)
    fits: npt.NDArray[np.bool_] = _masked(np.array(crcs, np.uint32)) == stored
    return fits


def _read_record(stream: Stream, checksum: Checksum | None, problems: Problems) -> Records | None:
    """Read the next record; empty Records if it is damaged, None at the end of the readable data."""
    offset = stream.position
    name = f"record at byte {offset}"
    head = bytes(stream.read(HEAD_BYTES))
    if not head:
        if isinstance(stream, UnpackedStream) and not stream.is_whole:
            problems.add(f"{name}: the compressed file ends early")
        return None
    if len(head) < HEAD_BYTES:
        problems.add(f"{name}: the file ends in the middle of its length")
        return None
    length, length_crc = _HEAD.unpack(head)
    if checksum is not None and _masked(checksum(head[:8])) != length_crc:
        problems.add(
            f"{name}: the checksum of its length does not fit: this is no TFRecord, or damaged from here on"
        )
        return None
    if length > MAX_RECORD_BYTES:
        problems.add(f"{name}: a length of {length} bytes: this is no TFRecord, or damaged from here on")
        return None
    try:
        bounds.check(length)
    except bounds.TooLargeError as error:
        problems.add(f"{name}: {error}")
        whole = length + _TAIL_BYTES
        return Records(offset, b"", [], []) if stream.skip(whole) == whole else None
    record = bytes(stream.read(length))
    tail = bytes(stream.read(_TAIL_BYTES))
    if len(tail) < _TAIL_BYTES:
        problems.add(f"{name}: the file ends in the middle of it")
        return None
    if checksum is not None and _masked(checksum(record)) != int.from_bytes(tail, "little"):
        problems.add(f"{name}: its checksum does not fit")
        return Records(offset, b"", [], [])
    return Records(offset + HEAD_BYTES, record, [0], [length])


def _masked(crc: Any) -> Any:
    """Mask a CRC, or an array of uint32 CRCs, as TFRecords store it (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _compression_of(head: bytes, checksum: Checksum | None) -> str | None:
    """Return the compression of a file that begins with `head`.

    A record's length may look like any magic number, so its checksum is tried first.
    """
    if len(head) == HEAD_BYTES and checksum is not None:
        _, crc = _HEAD.unpack(head)
        if _masked(checksum(head[:8])) == crc:
            return None
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    # If the file is not packed and its first record is below 16 MB, bytes 3 to 7 are zeros.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 and any(head[3:8])
    return "zlib" if is_zlib else None


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


def as_kind(name: str, feature: Feature, kind: Any, images: ImageOptions = AS_THEY_ARE) -> Any:
    """Convert a feature to `kind`. Raises SampleError if it holds something else."""
    if kind == "texts":
        return as_texts(name, feature)
    if kind == "scalar":
        return _single(name, feature)
    if kind == "array" or isinstance(kind, tuple):
        if not isinstance(feature, np.ndarray):
            raise SampleError(f"feature '{name}' holds bytes, no numbers")
        return feature if kind == "array" else _reshaped(name, feature, kind)
    if isinstance(feature, np.ndarray):
        raise SampleError(f"feature '{name}' holds numbers, no bytes")
    data: bytes = _single(name, feature)
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


def _single(name: str, feature: Any) -> Any:
    if len(feature) != 1:
        raise SampleError(f"feature '{name}' holds {len(feature)} values, not one")
    return feature[0]


def _reshaped(name: str, feature: Any, shape: tuple[int, ...]) -> Any:
    try:
        return feature.reshape(shape)
    except ValueError as error:
        raise SampleError(f"feature '{name}': {len(feature)} values do not make the shape {shape}") from error


def as_texts(name: str, feature: Feature) -> str:
    """Return the strings of a feature as a JSON list. Raises SampleError if they are not UTF-8."""
    if isinstance(feature, np.ndarray):
        raise SampleError(f"feature '{name}' holds numbers, no texts")
    try:
        return json.dumps([one.decode() for one in feature], ensure_ascii=False)
    except UnicodeDecodeError as error:
        raise SampleError(
            f"feature '{name}' holds {len(feature)} strings of bytes, which are no texts; "
            "choose others with features="
        ) from error


def as_inferred(name: str, feature: Feature, decode_images: bool, images: ImageOptions = AS_THEY_ARE) -> Any:
    """Convert a feature that the user gave no kind for."""
    if isinstance(feature, np.ndarray):
        return feature[0] if len(feature) == 1 else feature
    if len(feature) != 1:
        return as_texts(name, feature)
    if decode_images and looks_like_image(feature[0]):
        return _image(name, feature[0], images)
    return feature[0]


def columns_of(
    found: Mapping[str, FeatureColumn], kinds: Mapping[str, Kind] | None, *, decode_images: bool
) -> dict[str, Column] | None:
    """Convert the features of many examples as `as_kind` does, or `as_inferred` if `kinds` is None.

    None if the examples differ in shape, hold images, or cannot all be used: the caller then converts them
    one by one.
    """
    columns: dict[str, Column] = {}
    for name in found if kinds is None else kinds:
        feature = found.get(name)
        if feature is None:
            return None
        kind = "inferred" if kinds is None else kinds[name]
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
    if each == 1 and kind in ("inferred", "scalar"):
        return values
    if kind in ("inferred", "array"):
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
    if kind == "inferred" and not (decode_images and any(map(looks_like_image, values))):
        return values
    return values if kind == "bytes" else None


# --- the source --------------------------------------------------------------------------------


class TFRecordSource:
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
        self._defaults = Defaults(fields)
        self._images = ImageOptions(resize, crop)
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"compression={compression!r}: give 'auto', 'gzip', 'zlib' or None")
        self._features = None if features is None else checked_kinds(features)
        self._decode_images, self._compression, self._check_crc = decode_images, compression, check_crc
        if check_crc:
            _checksum()
        self._files = FileList(urls, storage_options, owner="TFRecordSource", preferred=TFRECORD_ENDINGS)
        self._parts = Parts(self._files)
        self.first_names = self._parts.names  # these identify units when files come or go
        self.listing_digest = self._files.digest
        options = {
            "features": self._features,
            "decode_images": decode_images,
            "compression": None if compression == "auto" else str(compression),
            "check_crc": check_crc,
        }
        shown = [f"{name}={value}" for name, value in options.items() if value not in (None, True)]
        shown += [*self._images.identity, *self._defaults.identity]
        self.fingerprint = "tfrecords:" + "|".join((*self._files.identity, *shown))

    @property
    def num_units(self) -> int:
        return len(self._parts)

    @property
    def round_ends(self) -> tuple[int, ...]:
        return self._parts.round_ends

    def parts_for(self, limit_bytes: int) -> int:
        """Return the number of parts to read each file in: see `DivisibleSource`."""
        files = self._files
        if not self._check_crc or self._compression not in ("auto", None) or len(files) < 2:
            return 1
        try:
            with open_stream(files.remote, files.path(0), files.where(0), 0, HEAD_BYTES) as stream:
                head = bytes(stream.read(HEAD_BYTES))
            size_bytes = self._parts.size(0)
        except SourceError:
            return 1  # reading the unit will report the error
        if len(head) < HEAD_BYTES or find_record(head, _checksum()) != 0:
            return 1
        most = size_bytes // LEAST_PART_BYTES
        return parts_for_diversity(limit_bytes, len(files), size_bytes, most)

    def divided(self, parts: int) -> TFRecordSource:
        """Return a source of the same files, each divided in `parts` of about equal length in bytes."""
        made = copy.copy(self)
        made._parts = Parts(self._files, parts)
        made.first_names = made._parts.names
        made.listing_digest = made.first_names.digest
        return made

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the records of a file in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the same records, as `Rows` where small consecutive ones have the same shapes."""
        check_unit(self, unit, self.num_units)
        index, part = self._parts.locate(unit)
        where, key = self._files.where(index), self._files.key(index)
        problems = Problems(where)
        for records in self._read(index, part, problems):
            yield from self._defaults.fill_all(self._samples(records, key, problems))
        problems.raise_any()

    def _read(self, index: int, part: int, problems: Problems) -> Iterator[Records]:
        """Yield the records of a part of file `index`."""
        files, where = self._files, self._files.where(index)
        checksum = _checksum() if self._check_crc else None
        if self._parts.count == 1:
            with open_stream(files.remote, files.path(index), where) as stream:
                yield from read_records(
                    unpacked_records(stream, self._compression, checksum), checksum, problems
                )
            return
        if checksum is None:
            raise ConfigError(f"{where}: with check_crc=False a file can only be read whole")
        begin, end = self._parts.cut(index, part)
        with open_stream(files.remote, files.path(index), where, begin, end + HEAD_BYTES) as stream:
            if begin == 0 or seek_record(stream, end, checksum):
                yield from read_records(stream, checksum, problems, end)
            self._parts.check(index, stream)

    def _samples(
        self, records: Records, key: str, problems: Problems
    ) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the samples in `records`, as one `Rows` where all of them are alike."""
        found = None
        if len(records) > 1:
            found = parse_examples(records.data, records.starts, records.stops)
        if found is not None:
            columns = columns_of(found, self._features, decode_images=self._decode_images)
            if columns is not None:
                yield Rows([f"{key}#{place}" for place in records.places], columns)
                return
        examples = map(parse_example, records) if found is None else rows_of(found)
        for place in records.places:
            try:
                sample = self._sample(next(examples))
            except (ValueError, IndexError, SampleError) as error:
                reason = "malformed: it ends early" if isinstance(error, IndexError) else error
                problems.add(f"record at byte {place}: {reason}")
                continue
            yield f"{key}#{place}", sample

    def _sample(self, found: dict[str, Feature]) -> dict[str, Any]:
        """Convert the features of one example. Raises ValueError and SampleError if it cannot be used."""
        if self._features is None:
            if not found and not self._defaults.values:
                raise ValueError("it has no features")
            return {
                name: as_inferred(name, feature, self._decode_images, self._images)
                for name, feature in found.items()
            }
        sample = {}
        for name, kind in self._features.items():
            feature = found.get(name)
            if feature is None:
                if name in self._defaults.values:
                    continue
                raise ValueError(f"no feature '{name}'; there are {', '.join(sorted(found)[:20])}")
            sample[name] = as_kind(name, feature, kind, self._images)
        return sample

    def __repr__(self) -> str:
        parts = f" in {self._parts.count} parts each" if self._parts.count > 1 else ""
        return f"<TFRecordSource {self._files.shown}, {len(self._files):,} files{parts}>"


def _checksum() -> Checksum:
    """Return the function that computes CRC-32C."""
    module = require("google_crc32c", "tfrecord", "checking TFRecords (leave it out with check_crc=False)")
    found: Checksum = module.value
    return found
