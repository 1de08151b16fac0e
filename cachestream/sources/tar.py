"""WebDataset's tar files, read as a stream: adjacent files that share a name are one sample."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from cachestream.config import check_count
from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.patterns import TAR_ENDINGS
from cachestream.sources.base import Problems, in_own_context
from cachestream.sources.decode.compression import decompressed, require_decompressor
from cachestream.sources.decode.images import Buffer, ImageOptions, Size
from cachestream.sources.decode.values import decode_integer, decode_json_value, decode_value, decode_with
from cachestream.sources.fields import Defaults
from cachestream.sources.sample_files import CutFiles
from cachestream.sources.tar_format import (
    BLOCK,
    LOOK_BACK_BYTES,
    Group,
    Part,
    find_header,
    read_groups,
    seek_member,
)
from cachestream.sources.user_code import call_decoder, fingerprint_of
from cachestream.transport import object_limit
from cachestream.transport.metering import PIECE_BYTES

Decoder = Callable[[bytes], Any]

_INTEGERS: Final = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})
_JSON: Final = frozenset({"json", "jsn"})
_TEXTS: Final = {"text": ".txt", "transcript": ".txt"}
# To estimate the size of samples, the first tar is read until one of these is reached: (samples, bytes).
PROBE_BYTES: Final = ((4, 256 << 10), (2, 4 << 20), (1, 64 << 20))


def decode_gzip(data: Buffer) -> bytes:
    """Unpack gzip. Raises TooLargeError above the bound for one object."""
    found = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        # In pieces: a single read up to the bound would have a buffer of that size.
        while piece := file.read(PIECE_BYTES):
            found += piece
            object_limit.check(len(found))
    return bytes(found)


class Decoders:
    """Decodes a file by its extension; `own` are the user's functions of bytes, by extension.

    The longest suffix of an extension that has a function of the user takes precedence: "seg.png" before
    "png". Nothing is unpickled unless such a function does it. Files packed by gzip ("json.gz") are unpacked
    first and keep their name, as in WebDataset. `images` applies to images that no function of the user
    decodes.
    """

    def __init__(self, own: Mapping[str, Decoder] | None, images: ImageOptions) -> None:
        self._images = images
        given = dict(own or {})
        for extension, decoder in given.items():
            if not str(extension).strip(".") or not callable(decoder):
                raise ConfigError(
                    f"decoders={{{extension!r}: {decoder!r}}}: give functions of bytes by extension, such as "
                    "{'pkl': pickle.loads}"
                )
        self._own = {str(extension).strip(".").lower(): decoder for extension, decoder in given.items()}
        self.identity = ",".join(
            f"{extension}:{fingerprint_of(decoder)}" for extension, decoder in sorted(self._own.items())
        )

    def sample(self, group: Group, where: str) -> dict[str, Any]:
        """Return the fields of a sample; `where` names its archive in messages. Raises SampleError."""
        sample: dict[str, Any] = {}
        for extension, data in group.files.items():
            value = self._value(extension, data, f"{where}#{group.shown_key}.{extension}")
            if isinstance(value, dict) and not (
                self._find(extension) or self._find(extension.removesuffix(".gz"))
            ):
                # The arrays of an .npz.
                sample.update({f"{extension}.{name}": array for name, array in value.items()})
            else:
                sample[extension] = value
        return sample

    def _find(self, extension: str) -> Decoder | None:
        while extension not in self._own:
            _, dot, extension = extension.partition(".")
            if not dot:
                return None
        return self._own[extension]

    def _value(self, extension: str, data: memoryview, where: str) -> Any:
        own = self._find(extension)
        if own is None and f".{extension}".endswith(".gz"):
            data = memoryview(decode_with(decode_gzip, data, ".gz file", where))
            extension = extension[:-3]
            own = self._find(extension)
        if own is not None:
            return call_decoder(f"{where}: its decoder", own, data)
        last = extension.rpartition(".")[2]
        if last in _INTEGERS:
            return decode_with(decode_integer, data, "integer", where)
        if last in _JSON:
            return decode_with(decode_json_value, data, "JSON text", where)
        return decode_value(data, _TEXTS.get(last, f".{last}"), where, self._images)


class TarSource(CutFiles):
    """The samples in tars, as WebDataset writes them, plain or packed by gzip, bzip2, xz or zstd.

    urls: a URL, a `{000000..001281}` range, a wildcard, a folder, or a list of these.

    Adjacent files with the same name up to the first dot are one sample: a dict with a field for each
    extension. Images (Pillow) are uint8 `[3, H, W]` RGB; "cls", "id", "index" and the like int; "json"
    the value, or the text of an object; "npy" the array; the arrays of an "npz" fields "npz.name"; "txt"
    and other text str; anything else bytes. The key is "path/of.tar#name".

    decoders: functions of bytes by extension, which take precedence: `{"pkl": pickle.loads}`, or
    `{"jpg": bytes}` to keep files as they are. Nothing is unpickled except by these functions.

    samples_per_visit: the approximate number of samples to read of a tar before the next tar is read, so
    that early epochs hold samples of many tars. The tars must not be packed, nor hold tars themselves. A
    unit is one such visit; 0: a whole tar. None: a whole tar, or the largest part of one that lets a small
    cache hold parts of 64 tars (of all, where there are fewer).

    fields: a default for each optional field, `{"caption": ""}`, for samples that lack the field.

    resize, crop: the size of decoded images, see `ImageOptions`.

    Tars are read from begin to end in bounded memory and never unpacked to the disk. A damaged tar gives
    the samples before the damage, and is then counted as a failure, with the reason. Other arguments, and
    errors, as for `FileSource`.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        storage_options: Mapping[str, Any] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        samples_per_visit: int | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        defaults, images = Defaults(fields), ImageOptions(resize, crop)
        if samples_per_visit is not None:
            samples_per_visit = check_count("samples_per_visit", samples_per_visit, 0)
        self._decoders, self._per_visit = Decoders(decoders, images), samples_per_visit
        files = FileList(urls, storage_options, owner="TarSource", preferred=TAR_ENDINGS)
        options = [f"decoders={self._decoders.identity}"] if decoders else []
        options += [f"samples_per_visit={samples_per_visit}"] if samples_per_visit else []
        super().__init__("tars", files, options, defaults, images)
        for index in range(len(files)):
            require_decompressor(files.key(index))
        if samples_per_visit:
            self._cut_into(self._plan_visits(samples_per_visit))

    def parts_for(self, limit_bytes: int) -> int:
        """Return the number of parts to read each tar in: see `DivisibleSource`.

        Tars are read whole if `samples_per_visit` is given, if any is packed, and if the first is of the old
        format, whose headers cannot be told from data.
        """
        if self._per_visit is not None or any(map(self._is_compressed, range(len(self._files)))):
            return 1
        return super().parts_for(limit_bytes)

    def _can_cut(self, head: bytes) -> bool:
        return len(head) >= BLOCK and find_header(head, 0) == 0

    @in_own_context
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the samples of a tar, or of one visit to it, in order. Raises as `Source.read`."""
        index, visit = self._locate(unit)
        where, prefix = self._files.where(index), self._files.key(index)
        problems = Problems(where)
        for group in self._read_groups(index, visit, problems):
            if group.problem:
                problems.add(f"{where}#{group.shown_key}: {group.problem}")
                continue
            try:
                sample = self._decoders.sample(group, where)
            except SampleError as error:
                problems.add(str(error))
                continue
            yield f"{prefix}#{group.shown_key}", self._defaults.fill(sample)
        problems.raise_any()

    def _read_groups(self, index: int, visit: int, problems: Problems) -> Iterator[Group]:
        if self._num_parts == 1:
            with self._open(index) as stream:
                yield from read_groups(decompressed(stream), problems)
            return
        begin, end, size_bytes = self._cut(index, visit, BLOCK)
        start = max(0, begin - LOOK_BACK_BYTES)
        with self._open(index, start, self._likely_end(begin, end)) as stream:
            if begin == 0 and decompressed(stream) is not stream:
                raise self._compressed_error(index)
            if begin == 0 or seek_member(stream, begin, end):
                is_last = visit == self._num_parts - 1
                yield from read_groups(stream, problems, Part(begin, None if is_last else end))
            self._check_size(index, stream, size_bytes)

    def _likely_end(self, begin: int, end: int) -> int:
        """Estimate where a visit to `begin:end` stops reading: at the end of its last sample."""
        if not self._per_visit:
            return end + 2 * BLOCK
        return end + 3 * (end - begin) // (2 * self._per_visit) + 2 * BLOCK

    def _compressed_error(self, index: int) -> ConfigError:
        return ConfigError(
            f"{self._files.where(index)}: a packed tar can only be read from its begin; give samples_per_visit=0"
        )

    def _plan_visits(self, samples_per_visit: int) -> int:
        """Return the number of visits to each tar, estimated from the first samples of the first tar."""
        for index in filter(self._is_compressed, range(len(self._files))):
            raise self._compressed_error(index)
        where, size_bytes = self._files.where(0), self._cut_size(0)
        with self._open(0, 0, PROBE_BYTES[0][1]) as stream:
            if decompressed(stream) is not stream:
                raise self._compressed_error(0)
            problems = Problems(where)
            count, used_bytes = 0, 1
            for _ in read_groups(stream, problems):
                count, used_bytes = count + 1, stream.position
                if any(count >= least and used_bytes >= enough for least, enough in PROBE_BYTES):
                    break
            else:
                used_bytes = size_bytes
        if not count:
            problems.raise_any()
            raise SampleError(
                f"{where}: it holds no samples; check that it is a tar as WebDataset writes them"
            )
        samples = count * size_bytes / used_bytes
        return max(1, min(round(samples / samples_per_visit), size_bytes // BLOCK))
