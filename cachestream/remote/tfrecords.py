"""TFRecord files of `tf.train.Example`s, read as a stream, checksums checked, without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np

from cachestream.errors import ConfigError, SampleError
from cachestream.remote.defaults import Defaults
from cachestream.remote.example_batches import parse_examples, rows_of
from cachestream.remote.examples import Feature, parse_example
from cachestream.remote.extras import require
from cachestream.remote.feature_columns import columns_of
from cachestream.remote.features import Kind, as_it_is, as_kind, checked_kinds
from cachestream.remote.filelist import FileList, Url, check_unit
from cachestream.remote.framing import Checksum, Records, read_records, unpacked_records
from cachestream.remote.grouping import Problems
from cachestream.remote.images import ImageOptions, Size
from cachestream.remote.source import Rows, one_by_one
from cachestream.remote.stream_open import open_stream

__all__ = ["TFRECORD_ENDINGS", "TFRecordSource"]

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
