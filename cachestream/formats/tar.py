"""WebDataset's tar files, read as a stream: adjacent files that share a name are one sample."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from cachestream.formats.tar_archive import (
    BLOCK,
    LOOK_BACK_BYTES,
    Cut,
    Group,
    find_header,
    read_groups,
    seek_member,
)
from cachestream.sources.api import (
    COMPRESSED_ENDINGS,
    PIECE_BYTES,
    Buffer,
    ConfigError,
    File,
    Files,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Part,
    SampleError,
    Size,
    Skipped,
    Url,
    call_decoder,
    check_count,
    check_object,
    decode_integer,
    decode_json_value,
    decode_value,
    decode_with,
    decompressed,
    fingerprint_of,
    named_decoder,
    require_decompressor,
)

Decoder = Callable[[bytes], Any] | str  # or the name of one

_INTEGERS: Final = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})
_JSON: Final = frozenset({"json", "jsn"})
_ENDINGS: Final = (
    ".tar",
    *(f".tar{ending}" for ending in COMPRESSED_ENDINGS if not ending.startswith(".t")),
    *(ending for ending in COMPRESSED_ENDINGS if ending.startswith(".t")),
)
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
            check_object(len(found))
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
            if not str(extension).strip(".") or not (callable(decoder) or decoder in ("index", "raw")):
                raise ConfigError(
                    f"decoders={{{extension!r}: {decoder!r}}}: give functions of bytes by extension, such as "
                    "{'pkl': pickle.loads}, or 'index', for the values of a mask or of depth as they are stored, "
                    "or 'raw', for the bytes"
                )
        self._own = {str(extension).strip(".").lower(): decoder for extension, decoder in given.items()}
        self.identity = ",".join(
            f"{extension}:{decoder if isinstance(decoder, str) else fingerprint_of(decoder)}"
            for extension, decoder in sorted(self._own.items())
        )

    def sample(self, group: Group, where: str) -> dict[str, Any]:
        """Return the fields of a sample, called `where` in messages. Raises SampleError."""
        sample: dict[str, Any] = {}
        for extension, data in group.files.items():
            value = self._value(extension, data, f"{where}.{extension}")
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
        if isinstance(own, str):
            return decode_with(named_decoder(extension, own, self._images), data, f".{extension} file", where)
        if own is not None:
            return call_decoder(f"{where}: its decoder", own, data)
        last = extension.rpartition(".")[2]
        if last in _INTEGERS:
            return decode_with(decode_integer, data, "integer", where)
        if last in _JSON:
            return decode_with(decode_json_value, data, "JSON text", where)
        return decode_value(data, _TEXTS.get(last, f".{last}"), where, self._images)


class TarFormat(Format):
    """Tars of samples: see `TarSource` for the options."""

    name = "tars"
    endings = _ENDINGS

    def __init__(
        self,
        decoders: Mapping[str, Decoder] | None = None,
        samples_per_visit: int | None = None,
        images: ImageOptions = ImageOptions(),  # noqa: B008  frozen
    ) -> None:
        if samples_per_visit is not None:
            samples_per_visit = check_count("samples_per_visit", samples_per_visit, 0)
        self.images, self._per_visit = images, samples_per_visit
        self._decoders = Decoders(decoders, images)
        self.identity = [f"decoders={self._decoders.identity}"] if decoders else []
        self.identity += [f"samples_per_visit={samples_per_visit}"] if samples_per_visit else []

    @classmethod
    def begins(cls, head: bytes) -> bool:
        return head[257:262] == b"ustar"

    def check(self, files: Files, folders: object) -> None:
        for file in files:
            require_decompressor(file.key)

    def can_cut(self, head: bytes) -> bool:
        # The headers of the old format cannot be told from data.
        return self._per_visit is None and len(head) >= BLOCK and find_header(head, 0) == 0

    def num_cuts(self, files: Files) -> int:
        """Return the number of visits to each tar, estimated from the first samples of the first tar."""
        if not self._per_visit:
            return 1
        for file in files:
            if file.is_compressed:
                raise _compressed_error(file)
        first = files[0]
        size_bytes, count, used_bytes, problem = first.size(), 0, 1, ""
        with first.stream(0, PROBE_BYTES[0][1]) as stream:
            if decompressed(stream) is not stream:
                raise _compressed_error(first)
            try:
                for group in read_groups(stream):
                    if isinstance(group, Skipped):
                        continue
                    count, used_bytes = count + 1, stream.position
                    if any(count >= least and used_bytes >= enough for least, enough in PROBE_BYTES):
                        break
                else:
                    used_bytes = size_bytes
            except SampleError as error:
                used_bytes, problem = size_bytes, str(error)
        if not count:
            problem = problem or "it holds no samples; check that it is a tar as WebDataset writes them"
            raise SampleError(f"{first.where}: {problem}")
        samples = count * size_bytes / used_bytes
        return max(1, min(round(samples / self._per_visit), size_bytes // BLOCK))

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the samples of a tar, or of one visit to it, in order."""
        for group in self._read_groups(file, part):
            if isinstance(group, Skipped):
                yield group
                continue
            key, where = group.shown_key, f"{file.where}#{group.shown_key}"
            if group.problem:
                yield Skipped(f"{where}: {group.problem}")
                continue
            try:
                sample = self._decoders.sample(group, where)
            except SampleError as error:
                yield Skipped(str(error))
                continue
            yield key, sample

    def _read_groups(self, file: File, part: Part) -> Iterator[Group | Skipped]:
        if part.count == 1:
            with file.stream() as stream:
                yield from read_groups(decompressed(stream))
            return
        begin, end = file.cut(part, BLOCK)
        with file.stream_cut(max(0, begin - LOOK_BACK_BYTES), self._likely_end(begin, end)) as stream:
            if begin == 0 and decompressed(stream) is not stream:
                raise _compressed_error(file)
            if begin == 0 or seek_member(stream, begin, end):
                yield from read_groups(stream, Cut(begin, None if part.number == part.count - 1 else end))

    def _likely_end(self, begin: int, end: int) -> int:
        """Estimate where a visit to `begin:end` stops reading: at the end of its last sample."""
        if not self._per_visit:
            return end + 2 * BLOCK
        return end + 3 * (end - begin) // (2 * self._per_visit) + 2 * BLOCK


def _compressed_error(file: File) -> ConfigError:
    return ConfigError(
        f"{file.where}: a packed tar can only be read from its begin; give samples_per_visit=0"
    )


class TarSource(FilesSource):
    """The samples in tars, as WebDataset writes them, plain or packed by gzip, bzip2, xz or zstd.

    urls: a URL, a `{000000..001281}` range, a wildcard, a folder, or a list of these.

    Adjacent files with the same name up to the first dot are one sample: a dict with a field for each
    extension. Images (Pillow) are uint8 `[3, H, W]` RGB; "cls", "id", "index" and the like int; "json"
    the value, or the text of an object; "npy" the array; the arrays of an "npz" fields "npz.name"; "txt"
    and other text str; anything else bytes. The key is "path/of.tar#name".

    decoders: functions of bytes by extension, which take precedence: `{"pkl": pickle.loads}`, or `{"jpg":
    bytes}` to keep files as they are. Nothing is unpickled except by these functions. Or a name:
    `{"mask.png": "index"}` keeps the values of an image as they are stored, `[H, W]` (the numbers of a mask
    with a palette, depth of 16 bits), "raw" the bytes.

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

    reads = TarFormat

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        storage_options: Mapping[str, Any] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any] | str] | None = None,
        samples_per_visit: int | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            TarFormat(decoders, samples_per_visit, ImageOptions(resize, crop)), urls, storage_options, fields
        )
