"""WebDataset's tars, read as a stream: files that lie together and share a name are one sample."""

from __future__ import annotations

import copy
import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from cachestream.config import check_count
from cachestream.errors import ConfigError, SampleError, SourceError, SourceUnavailableError
from cachestream.listing.file_list import FileList, Url, check_unit
from cachestream.listing.names import AnyNames, Names
from cachestream.sources.decode.compression import ENDINGS, require_unpacker, unpacked
from cachestream.sources.decode.images import AS_THEY_ARE, Buffer, ImageOptions, Size
from cachestream.sources.decode.values import decode_json_value, decode_value, decode_with
from cachestream.sources.fields import Defaults
from cachestream.sources.functions import fingerprint_of
from cachestream.sources.tar_format import BLOCK, find_header
from cachestream.sources.tar_groups import LOOK_BACK_BYTES, Group, Part, Problems, read_groups, seek_member
from cachestream.sources.user_code import decode_by_user
from cachestream.transport import bounds
from cachestream.transport.network_stream import open_stream, size_of

Decoder = Callable[[bytes], Any]

_INTEGERS: Final = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})
_JSON: Final = frozenset({"json", "jsn"})
_TEXTS: Final = {"text": ".txt", "transcript": ".txt"}


def decode_integer(data: Buffer) -> int:
    """The number that a text holds."""
    value = int(bytes(data))
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer beyond 64 bits")
    return value


def decode_gzip(data: Buffer) -> bytes:
    """The bytes that gzip has packed."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        found = file.read(bounds.most_bytes() + 1)
    bounds.check(len(found))
    return found


class Decoders:
    """What is made of a file by its extension; `own` are the user's functions of bytes, by extension.

    The longest part of an extension that has a function of the user's decides: "seg.png" before
    "png". Nothing is unpickled unless such a function does it. What gzip has packed ("json.gz") is unpacked before, and
    keeps its name, as in WebDataset. `images` says what is made of images that
    none of them decodes.
    """

    def __init__(self, own: Mapping[str, Decoder] | None, images: ImageOptions = AS_THEY_ARE) -> None:
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
        """The fields of a sample; `where` names its archive in messages. Raises SampleError."""
        sample: dict[str, Any] = {}
        for extension, data in group.files.items():
            value = self._value(extension, data, f"{where}#{group.shown_key}.{extension}")
            own = self._find(extension) or self._find(extension.removesuffix(".gz"))
            if isinstance(value, dict) and own is None:  # the arrays of an .npz
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
            return decode_by_user(f"{where}: its decoder", own, data)
        last = extension.rpartition(".")[2]
        if last in _INTEGERS:
            return decode_with(decode_integer, data, "integer", where)
        if last in _JSON:
            return decode_with(decode_json_value, data, "JSON text", where)
        return decode_value(data, _TEXTS.get(last, f".{last}"), where, self._images)


TAR_ENDINGS: Final = (
    ".tar",
    *(f".tar{ending}" for ending in ENDINGS if not ending.startswith(".t")),
    *(ending for ending in ENDINGS if ending.startswith(".t")),
)
LEAST_PART_BYTES: Final = 256 << 10  # a part costs some 16 KiB and half a sample more than its own bytes
PROBE_BYTES: Final = ((4, 256 << 10), (2, 4 << 20), (1, 64 << 20))  # enough, if so many samples begin in them


class TarSource:
    """The samples in tars, as WebDataset writes them, plain or packed by gzip, bzip2, xz or zstd.

    urls: a URL, a `{000000..001281}` range, a wildcard, a folder, or a list of these.

    Files that follow one another and have the same name up to the first dot are one sample: a dict
    with a field for each extension. Images (Pillow) are uint8 `[3, H, W]` RGB; "cls", "id", "index"
    and the like int; "json" the value, or the text of an object; "npy" the array; the arrays of an
    "npz" fields "npz.name"; "txt" and other text str; anything else bytes. The key is
    "path/of.tar#name".

    decoders: functions of bytes by extension, that come before those: `{"pkl": pickle.loads}`,
    `{"jpg": bytes}` to keep files as they are. Nothing is unpickled but by them.

    samples_per_visit: read about so many samples of a tar at a time, and then of others, so that
    early epochs hold something of many tars; the tars must not be packed, nor hold tars themselves.
    A unit is such a visit; 0: a whole tar. None: a whole tar, or as large a part of one as lets a
    small cache hold something of 64 tars (of all, where there are fewer).

    fields: a default for each optional field, `{"caption": ""}`, which samples get that lack it.

    resize and crop are for images, see `ImageOptions`: the shorter side or (height, width), and the middle.

    Tars are read from begin to end in bounded memory and never unpacked to the disk. A tar that is
    damaged gives the samples before the damage, and is then counted as a failure, with the reason.
    Other arguments, and errors, as for `FileSource`.
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
        self._defaults = Defaults(fields)
        images = ImageOptions(resize, crop)
        if samples_per_visit is not None:
            samples_per_visit = check_count("samples_per_visit", samples_per_visit, 0)
        self._decoders = Decoders(decoders, images)
        self._files = FileList(urls, storage_options, owner="TarSource", preferred=TAR_ENDINGS)
        for index in range(len(self._files)):
            require_unpacker(self._files.key(index))
        self._sizes: dict[int, int] = {}
        self._per_visit = samples_per_visit
        self._visits = self._plan(samples_per_visit) if samples_per_visit else 1
        self.first_names = self._unit_names()
        self.listing_digest = self.first_names.digest
        options = [f"decoders={self._decoders.identity}"] if decoders else []
        options += [f"samples_per_visit={samples_per_visit}"] if samples_per_visit else []
        options += [*images.identity, *self._defaults.identity]
        self.fingerprint = "tars:" + "|".join((*self._files.identity, *options))

    @property
    def num_units(self) -> int:
        return len(self._files) * self._visits

    def _unit_names(self) -> AnyNames:
        """What the units are found by again when tars have come or gone: with other visits they are others."""
        names, visits = self._files.names, self._visits
        if visits == 1:
            return names
        files = len(names)
        return Names(
            f"{names[index]}#{visit}/{visits}" for index, visit in map(self._place, range(files * visits))
        )

    def _place(self, unit: int) -> tuple[int, int]:
        """The tar of a unit, and its visit to it: one visit a round, to another place in each tar."""
        turn, index = divmod(unit, len(self._files))
        return index, (turn + index) % self._visits

    @property
    def rounds(self) -> int:
        return self._visits

    def part_limit(self) -> tuple[int, int]:
        """The bytes of the first tar, and the parts that it may be read in: see `DivisibleSource`.

        Tars are read whole where `samples_per_visit` says so, and where the first is packed, or of the old format
        whose headers cannot be told from data.
        """
        files = self._files
        packed = any(files.key(index).lower().endswith(tuple(ENDINGS)) for index in range(len(files)))
        if self._per_visit is not None or packed or len(files) < 2:
            return 0, 1
        try:
            with open_stream(files.remote, files.path(0), files.where(0), 0, BLOCK) as stream:
                size_bytes, begin = self._size(0), bytes(stream.read(BLOCK))
        except SourceError:
            return 0, 1  # the worker will say what is wrong with it
        can_divide = len(begin) == BLOCK and find_header(begin, 0) == 0
        return size_bytes, max(1, size_bytes // LEAST_PART_BYTES) if can_divide else 1

    def divided(self, parts: int) -> TarSource:
        """The same tars, each in so many parts of about the same length in bytes."""
        made = copy.copy(self)
        made._visits = parts
        made.first_names = made._unit_names()
        made.listing_digest = made.first_names.digest
        return made

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the samples of a tar, or of one visit to it, in their order. Raises as `Source.read` says."""
        check_unit(self, unit, self.num_units)
        index, visit = self._place(unit)
        where, prefix = self._files.where(index), self._files.key(index)
        problems = Problems(where)
        groups = self._whole(index, problems) if self._visits == 1 else self._part(index, visit, problems)
        for group in groups:
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

    def _whole(self, index: int, problems: Problems) -> Iterator[Group]:
        files = self._files
        with open_stream(files.remote, files.path(index), files.where(index)) as stream:
            yield from read_groups(unpacked(stream), problems)

    def _part(self, index: int, visit: int, problems: Problems) -> Iterator[Group]:
        size_bytes = self._size(index)
        begin, end = (size_bytes * i // self._visits // BLOCK * BLOCK for i in (visit, visit + 1))
        files, where = self._files, self._files.where(index)
        start = max(0, begin - LOOK_BACK_BYTES)
        with open_stream(files.remote, files.path(index), where, start, self._likely(begin, end)) as stream:
            if begin == 0 and unpacked(stream) is not stream:
                raise self._packed(where)
            if begin == 0 or seek_member(stream, begin, end):
                last = visit == self._visits - 1
                part = Part(begin, None if last else end)
                yield from read_groups(stream, problems, part)
            if stream.size_bytes not in (None, size_bytes):
                self._sizes.pop(index, None)
                raise SourceUnavailableError(f"{where}: the file was replaced while it was read in parts")

    def _likely(self, begin: int, end: int) -> int:
        """Where a visit to the bytes from `begin` to `end` most often ends: with the sample that lies at its end."""
        if not self._per_visit:
            return end + 2 * BLOCK
        return end + 3 * (end - begin) // (2 * self._per_visit) + 2 * BLOCK

    def _size(self, index: int) -> int:
        size_bytes = self._sizes.get(index)
        if size_bytes is None:
            files = self._files
            size_bytes = self._sizes[index] = size_of(files.remote, files.path(index), files.where(index))
        return size_bytes

    def _packed(self, where: str) -> ConfigError:
        return ConfigError(f"{where}: a packed tar can only be read from its begin; give samples_per_visit=0")

    def _plan(self, samples_per_visit: int) -> int:
        """Visits to each tar, from the size of the first tar's first samples."""
        files = self._files
        for index in range(len(files)):
            if files.key(index).lower().endswith(tuple(ENDINGS)):
                raise self._packed(files.where(index))
        where, size_bytes = files.where(0), self._size(0)
        with open_stream(files.remote, files.path(0), where, 0, PROBE_BYTES[0][1]) as stream:
            if unpacked(stream) is not stream:
                raise self._packed(where)
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

    def __repr__(self) -> str:
        visits = f", {self._visits} visits each" if self._visits > 1 else ""
        return f"<TarSource {self._files.shown}, {len(self._files):,} tars{visits}>"
