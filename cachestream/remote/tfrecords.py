"""TFRecord files of `tf.train.Example`s, read as a stream, checksums checked, without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np

from cachestream.errors import ConfigError, SampleError
from cachestream.remote.examples import parse_example
from cachestream.remote.extras import require
from cachestream.remote.features import Kind, as_it_is, as_kind, checked_kinds
from cachestream.remote.filelist import FileList, Url, check_unit
from cachestream.remote.grouping import Problems
from cachestream.remote.images import ImageOptions, Size
from cachestream.remote.stream import Stream
from cachestream.remote.stream_open import open_stream
from cachestream.remote.unpack import UnpackedStream

__all__ = ["TFRECORD_ENDINGS", "TFRecordSource"]

TFRECORD_ENDINGS: Final = tuple(
    ending + packed for ending in (".tfrecord", ".tfrecords", ".tfrec") for packed in ("", ".gz")
)
MAX_RECORD_BYTES: Final = 2 << 30  # as protobuf has it
_HEAD: Final = struct.Struct("<QI")
_COMPRESSIONS: Final = ("auto", "gzip", "zlib", None)
Checksum = Callable[[bytes], int]


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
    ) -> None:
        self._images = ImageOptions(resize, crop)
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"compression={compression!r}: give 'auto', 'gzip', 'zlib' or None")
        self._features = None if features is None else checked_kinds(features)
        self._decode_images, self._compression, self._check_crc = decode_images, compression, check_crc
        if check_crc:
            _checksum()
        self._files = FileList(urls, storage_options, owner="TFRecordSource", preferred=TFRECORD_ENDINGS)
        self.listing_digest = self._files.digest
        options = {
            "features": self._features,
            "decode_images": decode_images,
            "compression": None if compression == "auto" else str(compression),
            "check_crc": check_crc,
        }
        shown = [f"{name}={value}" for name, value in options.items() if value not in (None, True)]
        shown += self._images.identity
        self.fingerprint = "tfrecords:" + "|".join((*self._files.identity, *shown))

    @property
    def num_units(self) -> int:
        return len(self._files)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the records of a file, in their order. Raises as `Source.read` says."""
        check_unit(self, unit, self.num_units)
        files, where, key = self._files, self._files.where(unit), self._files.key(unit)
        problems = Problems(where)
        with open_stream(files.remote, files.path(unit), where) as stream:
            for number, record in self._records(self._unpacked(stream), problems):
                try:
                    sample = self._sample(record)
                except (ValueError, IndexError, SampleError) as error:
                    reason = "malformed: it ends early" if isinstance(error, IndexError) else error
                    problems.add(f"record {number}: {reason}")
                    continue
                yield f"{key}#{number}", sample
        problems.raise_any()

    # --- records

    def _unpacked(self, stream: Stream) -> Stream:
        kind: str | None = self._compression
        if kind == "auto":
            head = stream.read(_HEAD.size)
            stream.push_back(head)
            kind = _compression_of(bytes(head), _checksum() if self._check_crc else None)
        return stream if kind is None else UnpackedStream(stream, kind)

    def _records(self, stream: Stream, problems: Problems) -> Iterator[tuple[int, bytes]]:
        """The number and the bytes of each record that is whole."""
        checksum = _checksum() if self._check_crc else None
        number = 0
        while head := bytes(stream.read(_HEAD.size)):
            if len(head) < _HEAD.size:
                problems.add(f"record {number}: the file ends in the middle of its length")
                return
            length, length_crc = _HEAD.unpack(head)
            if checksum is not None and _masked(checksum(head[:8])) != length_crc:
                problems.add(f"record {number}: the checksum of its length does not fit: this is no TFRecord, or damaged from here on")  # fmt: skip
                return
            if length > MAX_RECORD_BYTES:
                problems.add(f"record {number}: a length of {length} bytes: this is no TFRecord, or damaged from here on")  # fmt: skip
                return
            record = bytes(stream.read(length))
            tail = bytes(stream.read(4))
            if len(tail) < 4:
                problems.add(f"record {number}: the file ends in the middle of it")
                return
            if checksum is not None and _masked(checksum(record)) != int.from_bytes(tail, "little"):
                problems.add(f"record {number}: its checksum does not fit")
            else:
                yield number, record
            number += 1
        if isinstance(stream, UnpackedStream) and not stream.is_whole:
            problems.add(f"record {number}: the compressed file ends early")

    # --- samples

    def _sample(self, record: bytes) -> dict[str, Any]:
        found = parse_example(record)
        if self._features is None:
            if not found:
                raise ValueError("it has no features")
            return {
                name: as_it_is(name, feature, self._decode_images, self._images)
                for name, feature in found.items()
            }
        sample = {}
        for name, kind in self._features.items():
            feature = found.get(name)
            if feature is None:
                raise ValueError(f"no feature '{name}'; there are {', '.join(sorted(found)[:20])}")
            sample[name] = as_kind(name, feature, kind, self._images)
        return sample

    def __repr__(self) -> str:
        return f"<TFRecordSource {self._files.shown}, {len(self._files):,} files>"


# --- the format --------------------------------------------------------------------------------


def _checksum() -> Checksum:
    """CRC-32C of bytes."""
    module = require("google_crc32c", "tfrecord", "checking TFRecords (leave it out with check_crc=False)")
    found: Checksum = module.value
    return found


def _masked(crc: int) -> int:
    """`crc` as TFRecords store it (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _compression_of(head: bytes, checksum: Checksum | None) -> str | None:
    """How a file that begins with `head` is packed. A length may look like any magic number: it has a checksum."""
    if len(head) == _HEAD.size and checksum is not None:
        _, crc = _HEAD.unpack(head)
        if _masked(checksum(head[:8])) == crc:
            return None
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    # A first record of fewer than 16 MB has zeros where zlib has data.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 and any(head[3:8])
    return "zlib" if is_zlib else None
