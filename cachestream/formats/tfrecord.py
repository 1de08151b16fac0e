"""TFRecord files of `tf.train.Example`s, read in one pass and in bounded memory, without TensorFlow.

A record is stored as its length, the length's checksum, the data, and the data's checksum
(tensorflow/core/lib/io/record_writer.h).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.formats.tf_example import (
    Feature,
    FeatureFields,
    Kind,
    checked_kinds,
    load_messages,
    parse_example,
)
from cachestream.sources.api import (
    ConfigError,
    DecompressedStream,
    Defaults,
    File,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Part,
    Rows,
    SampleError,
    Size,
    Skipped,
    Stream,
    TooLargeError,
    Url,
    check_object,
    decompressed,
    require,
)

MAX_RECORD_BYTES: Final = 2 << 30  # protobuf's own limit
TOGETHER_BYTES: Final = 512 << 10
SCAN_BYTES: Final = 64 << 10  # looked through at a time for the first record of a part
SMALL_BYTES: Final = 32 << 10  # records up to this average size are read many at once
_HEAD: Final = struct.Struct("<QI")
HEAD_BYTES: Final = _HEAD.size
_TAIL_BYTES: Final = 4
Checksum = Callable[[bytes], int]
_COMPRESSIONS: Final = ("auto", "gzip", "zlib", None)


class TFRecordFormat(Format):
    """TFRecords of Examples: see `TFRecordSource` for the options."""

    name = "tfrecords"
    endings = tuple(
        ending + packed for ending in (".tfrecord", ".tfrecords", ".tfrec") for packed in ("", ".gz")
    )

    def __init__(
        self,
        fields: FeatureFields,
        compression: Literal["auto", "gzip", "zlib"] | None,
        *,
        check_crc: bool,
        images: ImageOptions,
        raw: bool = False,
    ) -> None:
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"compression={compression!r}: give 'auto', 'gzip', 'zlib' or None")
        self._fields, self.images = fields, images
        self._compression, self._check_crc, self._raw = compression, check_crc, raw
        if not raw:
            load_messages()
        if check_crc:
            load_checksum()
        options = {
            "features": fields.kinds,
            "decode_images": fields.decode_images,
            "compression": None if compression == "auto" else str(compression),
            "check_crc": check_crc,
        }
        self.identity = [f"{name}={value}" for name, value in options.items() if value not in (None, True)]
        self.identity += ["raw"] if raw else []

    @classmethod
    def begins(cls, head: bytes) -> bool:
        # A record's length in 8 bytes, its checksum in 4, and a message that begins with its field 1.
        return head[4:8] == bytes(4) and head[12:13] == b"\n"

    def can_cut(self, head: bytes) -> bool:
        """Return whether the first record of a part is found: by its checksum, unless files are
        compressed.
        """
        if not self._check_crc or self._compression not in ("auto", None):
            return False
        return len(head) >= HEAD_BYTES and find_record(head[:HEAD_BYTES], load_checksum()) == 0

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the records of a part in order, as `Rows` where small consecutive ones have the same
        shapes.
        """
        for records in self._records(file, part):
            if isinstance(records, Skipped):
                yield records
            elif self._raw:
                places: Any = records.places
                yield Rows(places, {"data": list(records)})
            else:
                yield from self._samples(records)

    def _records(self, file: File, part: Part) -> Iterator[Records | Skipped]:
        checksum = load_checksum() if self._check_crc else None
        if part.count == 1:
            with file.stream() as stream:
                yield from read_records(decompressed_records(stream, self._compression), checksum)
            return
        if checksum is None:
            raise ConfigError(f"{file.where}: with check_crc=False a file can only be read whole")
        begin, end = file.cut(part)
        with file.stream_cut(begin, end + HEAD_BYTES) as stream:
            if begin == 0 or seek_record(stream, end, checksum):
                yield from read_records(stream, checksum, end)

    def _samples(self, records: Records) -> Iterator[Item]:
        """Yield the samples in `records`, as one `Rows` where all of them are alike."""
        examples: dict[int, dict[str, Feature]] = {}
        for place, record in zip(records.places, records, strict=True):
            try:
                examples[place] = parse_example(record)
            except ValueError as error:
                yield Skipped(f"record at byte {place}: {error}")
        columns = self._fields.columns(list(examples.values())) if len(examples) > 1 else None
        if columns is not None:
            yield Rows(list(examples), columns)  # type: ignore[arg-type]  # their places become keys
            return
        for place, example in examples.items():
            try:
                sample = self._fields.sample(example)
            except (ValueError, SampleError) as error:
                yield Skipped(f"record at byte {place}: {error}")
                continue
            yield place, sample


class TFRecordSource(FilesSource):
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

    compression: "gzip", "zlib", None, or "auto": by the first bytes of each file, which may be packed by bzip2,
    xz or zstd, too.

    check_crc: check the CRC-32C of every record. A record with a wrong checksum is skipped and counted; a
    wrong checksum of a length ends its file.

    fields: a default for each optional field, `{"caption": ""}`, for samples that lack the field.

    raw: a sample is one field "data", the bytes of a record, whatever they hold: a SequenceExample, another
    message, or text, for a transform to read. The options for features and images do not go together with it.

    resize, crop: the size of decoded images, see `ImageOptions`.

    Other arguments, and errors, as for `FileSource`. A truncated file gives the records before its end. Needs
    google-crc32c and protobuf: `pip install 'cachestream[tfrecord]'`.
    """

    reads = TFRecordFormat

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
        raw: bool = False,
    ) -> None:
        given = {"features": features, "resize": resize, "crop": crop, "fields": fields}
        if raw and (others := [name for name, value in given.items() if value is not None]):
            raise ConfigError(f"raw=True and {others[0]}= do not go together: the records are not parsed")
        images, kinds = ImageOptions(resize, crop), None if features is None else checked_kinds(features)
        converter = FeatureFields(kinds, Defaults(fields).values, images, decode_images=decode_images)
        super().__init__(
            TFRecordFormat(converter, compression, check_crc=check_crc, images=images, raw=raw),
            urls,
            storage_options,
            fields,
        )


# --- the format --------------------------------------------------------------------------------


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


def decompressed_records(stream: Stream, kind: str | None) -> Stream:
    """Return `stream`, unpacked as `kind` says: "gzip", "zlib", None, or "auto" (by the first bytes)."""
    if kind == "auto":
        head = stream.read(HEAD_BYTES)
        stream.push_back(head)
        # If the file is not packed and its first record is below 16 MB, bytes 3 to 7 are zeros.
        is_zlib = bytes(head[:1]) == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 and any(head[3:8])
        if not is_zlib:
            return decompressed(stream)
        kind = "zlib"
    return stream if kind is None else DecompressedStream(stream, kind)


def find_record(data: bytes, checksum: Checksum) -> int | None:
    """Return the offset of the first record in `data`, or None.

    A record is recognised by the checksum of its length, 32 bits, and by the length, whose upper 32 bits are
    zero.
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
    stream: Stream, checksum: Checksum | None, end: int | None = None
) -> Iterator[Records | Skipped]:
    """Yield the undamaged records in order, small ones as they arrive together, others one by one; others as
    Skipped.

    The last one is the last that begins before byte `end`, if that is given.
    """
    while end is None or stream.position < end:
        offset, piece = stream.position, stream.take()
        ends = _record_ends(piece, len(piece) if end is None else end - offset)
        together = len(ends) > 1 and ends[-1] <= SMALL_BYTES * len(ends)
        if together:
            whole = yield from _read_together(offset, piece, ends, checksum)
            piece = piece[ends[whole - 1] if whole else 0 :]
        stream.push_back(piece)
        # Also read the record that the piece ends in, or whose length is damaged.
        for _ in range(1 if together else len(ends) + 1):
            if end is not None and stream.position >= end:
                return
            record = _read_record(stream, checksum)
            if record is None:
                return
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
    offset: int, piece: memoryview, ends: list[int], checksum: Checksum | None
) -> Generator[Records | Skipped, None, int]:
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
            yield Skipped(f"record at byte {offset + heads[bad]}: its checksum does not fit")
        first = bad + 1
    return whole


def _crcs_match(data: bytes, crcs: list[int], places: list[int]) -> npt.NDArray[np.bool_]:
    """Return for each of `crcs` whether it matches the masked checksum stored at its place in `data`."""
    every = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), 4)
    stored = every[places].view("<u4").reshape(-1)
    fits: npt.NDArray[np.bool_] = _masked(np.array(crcs, np.uint32)) == stored
    return fits


def _read_record(stream: Stream, checksum: Checksum | None) -> Records | Skipped | None:
    """Read the next record; None at the end. Raises SampleError if nothing can be read from here on."""
    offset = stream.position
    name = f"record at byte {offset}"
    head = bytes(stream.read(HEAD_BYTES))
    if not head:
        return None
    if len(head) < HEAD_BYTES:
        raise SampleError(f"{name}: the file ends in the middle of its length")
    length, length_crc = _HEAD.unpack(head)
    if checksum is not None and _masked(checksum(head[:8])) != length_crc:
        raise SampleError(
            f"{name}: the checksum of its length does not fit: this is no TFRecord, or damaged from here on"
        )
    if length > MAX_RECORD_BYTES:
        raise SampleError(f"{name}: a length of {length} bytes: this is no TFRecord, or damaged from here on")
    try:
        check_object(length)
    except TooLargeError as error:
        if stream.skip(length + _TAIL_BYTES) < length + _TAIL_BYTES:
            raise SampleError(f"{name}: {error}") from error
        return Skipped(f"{name}: {error}")
    record = bytes(stream.read(length))
    tail = bytes(stream.read(_TAIL_BYTES))
    if len(tail) < _TAIL_BYTES:
        raise SampleError(f"{name}: the file ends in the middle of it")
    if checksum is not None and _masked(checksum(record)) != int.from_bytes(tail, "little"):
        return Skipped(f"{name}: its checksum does not fit")
    return Records(offset + HEAD_BYTES, record, [0], [length])


def _masked(crc: Any) -> Any:
    """Mask a CRC, or an array of uint32 CRCs, as TFRecords store it (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def load_checksum() -> Checksum:
    """Return the function that computes CRC-32C."""
    module = require("google_crc32c", "tfrecord", "checking TFRecords (leave it out with check_crc=False)")
    found: Checksum = module.value
    return found
