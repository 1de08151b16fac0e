"""TFRecord files of `tf.train.Example`s, read as a stream without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np

from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.patterns import TFRECORD_ENDINGS
from cachestream.sources.base import Problems, Rows, in_own_context, one_by_one
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.fields import Defaults
from cachestream.sources.sample_files import CutFiles
from cachestream.sources.tf_example import (
    Feature,
    FeatureFields,
    Kind,
    checked_kinds,
    load_example,
    parse_example,
)
from cachestream.sources.tfrecord_format import (
    HEAD_BYTES,
    Records,
    decompressed_records,
    find_record,
    load_checksum,
    read_records,
    seek_record,
)

_COMPRESSIONS: Final = ("auto", "gzip", "zlib", None)


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
    wrong checksum of a length ends its file.

    fields: a default for each optional field, `{"caption": ""}`, for samples that lack the field.

    resize, crop: the size of decoded images, see `ImageOptions`.

    Other arguments, and errors, as for `FileSource`. A truncated file gives the records before its end. Needs
    google-crc32c and protobuf: `pip install 'cachestream[tfrecord]'`.
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
        load_example()
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
        found: dict[int, dict[str, Feature]] = {}
        for place, record in zip(records.places, records, strict=True):
            try:
                found[place] = parse_example(record)
            except ValueError as error:
                problems.add(f"record at byte {place}: {error}")
        columns = self._fields.columns(list(found.values())) if len(found) > 1 else None
        if columns is not None:
            yield Rows([f"{key}#{place}" for place in found], columns)
            return
        for place, features in found.items():
            try:
                sample = self._fields.sample(features)
            except (ValueError, SampleError) as error:
                problems.add(f"record at byte {place}: {error}")
                continue
            yield f"{key}#{place}", sample

    def __repr__(self) -> str:
        parts = f" in {self._num_parts} parts each" if self._num_parts > 1 else ""
        return f"<TFRecordSource {self._files.shown}, {len(self._files):,} files{parts}>"
