"""TFRecord files of `tf.train.Example`s, read as a stream, checksums checked, without TensorFlow.

(tensorflow/core/lib/io/record_writer.h: length, its checksum, the record, its checksum.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.config import require
from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url, check_unit
from cachestream.sources.base import Rows, one_by_one
from cachestream.sources.decode.compression import UnpackedStream
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.fields import Defaults
from cachestream.sources.tar_groups import Problems
from cachestream.sources.tf_example import Feature, parse_example, parse_examples, rows_of
from cachestream.sources.tf_features import Kind, as_it_is, as_kind, checked_kinds, columns_of
from cachestream.transport import bounds
from cachestream.transport.network_stream import open_stream
from cachestream.transport.stream import Stream

MAX_RECORD_BYTES: Final = 2 << 30  # as protobuf has it
TOGETHER_BYTES: Final = 512 << 10
SMALL_BYTES: Final = 32 << 10  # records that are on the average no larger come together
_HEAD: Final = struct.Struct("<QI")
HEAD_BYTES: Final = _HEAD.size
_TAIL_BYTES: Final = 4
Checksum = Callable[[bytes], int]


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records that follow one another: `data` from starts[i] to stops[i] holds record `number` + i of its file."""

    number: int
    data: bytes
    starts: list[int]
    stops: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[start:stop] for start, stop in zip(self.starts, self.stops, strict=True))


def unpacked_records(stream: Stream, kind: str | None, checksum: Checksum | None) -> Stream:
    """`stream`, or what is packed in it by `kind`: "gzip", "zlib", None, or "auto": as it begins."""
    if kind == "auto":
        head = stream.read(HEAD_BYTES)
        stream.push_back(head)
        kind = _compression_of(bytes(head), checksum)
    return stream if kind is None else UnpackedStream(stream, kind)


def read_records(stream: Stream, checksum: Checksum | None, problems: Problems) -> Iterator[Records]:
    """The records that are whole, in their order: small ones as many together as have come, others one by one."""
    number = 0
    while True:
        piece = stream.take()
        ends = _ends(piece)
        together = len(ends) > 1 and ends[-1] <= SMALL_BYTES * len(ends)
        if together:
            whole = yield from _together(number, piece, ends, checksum, problems)
            number += whole
            piece = piece[ends[whole - 1] if whole else 0 :]
        stream.push_back(piece)
        # With the record that the piece ends in, or whose length is damaged.
        for _ in range(1 if together else len(ends) + 1):
            record = _next(stream, number, checksum, problems)
            if record is None:
                return
            if len(record):
                yield record
            number += 1


def _ends(piece: memoryview) -> list[int]:
    """Where each record ends that lies in `piece` as a whole."""
    ends: list[int] = []
    at, most = 0, min(len(piece), TOGETHER_BYTES)
    while at + HEAD_BYTES <= most:
        length, _ = _HEAD.unpack_from(piece, at)
        at += HEAD_BYTES + length + _TAIL_BYTES
        if at > most:
            break
        ends.append(at)
    return ends


def _together(
    number: int, piece: memoryview, ends: list[int], checksum: Checksum | None, problems: Problems
) -> Generator[Records, None, int]:
    """The records that end at `ends` of `piece`, but for damaged ones; returns how many precede a damaged length."""
    data = bytes(piece[: ends[-1]])
    heads = [0, *ends[:-1]]
    starts, stops = [head + HEAD_BYTES for head in heads], [end - _TAIL_BYTES for end in ends]
    whole, damaged = len(ends), []
    if checksum is not None:
        lengths = _fit(
            data, [checksum(data[head : head + 8]) for head in heads], [head + 8 for head in heads]
        )
        whole = whole if lengths.all() else int(lengths.argmin())
        contents = [checksum(data[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        damaged = np.flatnonzero(~_fit(data, contents, stops)[:whole]).tolist()
    first = 0
    for bad in [*damaged, whole]:
        if bad > first:
            yield Records(number + first, data, starts[first:bad], stops[first:bad])
        if bad < whole:
            problems.add(f"record {number + bad}: its checksum does not fit")
        first = bad + 1
    return whole


def _fit(data: bytes, crcs: list[int], places: list[int]) -> npt.NDArray[np.bool_]:
    """Whether the checksums stored at `places` are those of `crcs`."""
    every = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), 4)
    stored = every[places].view("<u4").reshape(-1)
    fits: npt.NDArray[np.bool_] = _masked(np.array(crcs, np.uint32)) == stored
    return fits


def _next(stream: Stream, number: int, checksum: Checksum | None, problems: Problems) -> Records | None:
    """The next record; none where it is damaged, None at the end of what can be read."""
    head = bytes(stream.read(HEAD_BYTES))
    if not head:
        if isinstance(stream, UnpackedStream) and not stream.is_whole:
            problems.add(f"record {number}: the compressed file ends early")
        return None
    if len(head) < HEAD_BYTES:
        problems.add(f"record {number}: the file ends in the middle of its length")
        return None
    length, length_crc = _HEAD.unpack(head)
    if checksum is not None and _masked(checksum(head[:8])) != length_crc:
        problems.add(f"record {number}: the checksum of its length does not fit: this is no TFRecord, or damaged from here on")  # fmt: skip
        return None
    if length > MAX_RECORD_BYTES:
        problems.add(f"record {number}: a length of {length} bytes: this is no TFRecord, or damaged from here on")  # fmt: skip
        return None
    try:
        bounds.check(length)
    except bounds.TooLargeError as error:
        problems.add(f"record {number}: {error}")
        whole = length + _TAIL_BYTES
        return Records(number, b"", [], []) if stream.skip(whole) == whole else None
    record = bytes(stream.read(length))
    tail = bytes(stream.read(_TAIL_BYTES))
    if len(tail) < _TAIL_BYTES:
        problems.add(f"record {number}: the file ends in the middle of it")
        return None
    if checksum is not None and _masked(checksum(record)) != int.from_bytes(tail, "little"):
        problems.add(f"record {number}: its checksum does not fit")
        return Records(number, b"", [], [])
    return Records(number, record, [0], [length])


def _masked(crc: Any) -> Any:
    """`crc`, or uint32 of many, as TFRecords store it (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _compression_of(head: bytes, checksum: Checksum | None) -> str | None:
    """How a file that begins with `head` is packed. A length may look like any magic number: it has a checksum."""
    if len(head) == HEAD_BYTES and checksum is not None:
        _, crc = _HEAD.unpack(head)
        if _masked(checksum(head[:8])) == crc:
            return None
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    # A first record of fewer than 16 MB has zeros where zlib has data.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 and any(head[3:8])
    return "zlib" if is_zlib else None


TFRECORD_ENDINGS: Final = tuple(
    ending + packed for ending in (".tfrecord", ".tfrecords", ".tfrec") for packed in ("", ".gz")
)
_COMPRESSIONS: Final = ("auto", "gzip", "zlib", None)


class TFRecordSource:
    """The `tf.train.Example`s in TFRecord files; a unit is a file.

    urls: a URL, a folder, a `{000..127}` range, a wildcard, or a list of these.

    A sample is a dict of the features: one number is an int64 or float32 scalar, any other count of
    numbers an array `[count]`, one string of bytes is bytes, several are a JSON text. Images among the
    bytes, told by how they begin, are decoded to uint8 `[3, H, W]` RGB unless `decode_images=False`.
    The key is "file#record".

    features: those to read, and what each is to be, so that all samples are alike whatever a record
    holds: "scalar", "array", a shape such as (28, 28) or (-1, 2), "bytes", "str", "image", or "texts" (a
    JSON text of all strings). A record without one of them is skipped and counted. None: all there are.

    compression: "gzip", "zlib", None, or "auto": as the files begin.

    check_crc: check the CRC-32C of every record. One that does not fit is skipped and counted, one of a
    length ends its file. Needs google-crc32c: `pip install 'cachestream[tfrecord]'`.

    fields: a default for each optional field, `{"caption": ""}`, which samples get that lack it.

    resize and crop are for images, see `ImageOptions`: the shorter side or (height, width), and the middle.

    Other arguments, and errors, as for `FileSource`. A file that ends early gives the records before.
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
        self.first_names = self._files.names  # by these units are found again when files have come or gone
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
        return len(self._files)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the records of a file, in their order. Raises as `Source.read` says."""
        return one_by_one(self.read_rows(unit, rng))

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """The same, in columns where small records that follow one another have the same shapes."""
        check_unit(self, unit, self.num_units)
        files, where, key = self._files, self._files.where(unit), self._files.key(unit)
        problems = Problems(where)
        with open_stream(files.remote, files.path(unit), where) as stream:
            checksum = _checksum() if self._check_crc else None
            unpacked = unpacked_records(stream, self._compression, checksum)
            for records in read_records(unpacked, checksum, problems):
                yield from self._defaults.fill_all(self._samples(records, key, problems))
        problems.raise_any()

    # --- samples

    def _samples(
        self, records: Records, key: str, problems: Problems
    ) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """What `records` hold, in columns where all of them are alike."""
        numbers = range(records.number, records.number + len(records))
        found = None
        if len(records) > 1:
            found = parse_examples(records.data, records.starts, records.stops)
        if found is not None:
            columns = columns_of(found, self._features, decode_images=self._decode_images)
            if columns is not None:
                yield Rows([f"{key}#{number}" for number in numbers], columns)
                return
        examples = map(parse_example, records) if found is None else rows_of(found)
        for number in numbers:
            try:
                sample = self._sample(next(examples))
            except (ValueError, IndexError, SampleError) as error:
                reason = "malformed: it ends early" if isinstance(error, IndexError) else error
                problems.add(f"record {number}: {reason}")
                continue
            yield f"{key}#{number}", sample

    def _sample(self, found: dict[str, Feature]) -> dict[str, Any]:
        """The sample of an example with the features `found`."""
        if self._features is None:
            if not found and not self._defaults.values:
                raise ValueError("it has no features")
            return {
                name: as_it_is(name, feature, self._decode_images, self._images)
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
        return f"<TFRecordSource {self._files.shown}, {len(self._files):,} files>"


def _checksum() -> Checksum:
    """CRC-32C of bytes."""
    module = require("google_crc32c", "tfrecord", "checking TFRecords (leave it out with check_crc=False)")
    found: Checksum = module.value
    return found
