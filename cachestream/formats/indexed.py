"""Data sets of files that an `index.json` names; each file begins with an offset table of its items.

A file is `[count: u32] [begin of each item, and end of the last: u32 × (count + 1)] … [items]`; all numbers
are little-endian.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from cachestream.sources.api import (
    ConfigError,
    File,
    FileList,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Names,
    Part,
    SampleError,
    Skipped,
    Stream,
    TooLargeError,
    call_decoder,
    check_count,
    check_object,
    decode_with,
    decoded,
    fingerprint_of,
    format_size,
    open_stream,
)

INDEX_NAME: Final = "index.json"
MAX_INDEX_BYTES: Final = 256 << 20
MAX_ITEMS: Final = 1 << 24  # in one file; its table of 4 bytes an item is held in memory
_WORD: Final = 4
Items = Iterator[tuple[int, memoryview] | Skipped]
Reader = Callable[[memoryview], Any]


def read_table(stream: Stream, count: int, first: int, stop: int) -> npt.NDArray[np.int64]:
    """Return the offsets of the items from `first` up to `stop`, and the end of the last one.

    Raises SampleError if the table of the file is not that of `count` items.
    """
    head = stream.read(_WORD)
    found = int.from_bytes(head, "little")
    if len(head) < _WORD or found != count:
        what = "is empty" if len(head) < _WORD else f"holds {found:,} samples"
        raise SampleError(f"{stream.where}: it {what}, and the index says {count:,}: replaced, or damaged")
    stream.skip(_WORD * first)
    table = stream.read(_WORD * (stop - first + 1))
    if len(table) < _WORD * (stop - first + 1):
        raise SampleError(f"{stream.where}: it ends in the middle of its table")
    return np.frombuffer(table, "<u4").astype(np.int64)


def cut_items(stream: Stream, table: npt.NDArray[np.int64], first: int) -> Items:
    """Yield the items of `stream` at the offsets in `table`, numbered from `first`.

    Raises SampleError where no more can be read.
    """
    for number, (begin, end) in enumerate(zip(table[:-1].tolist(), table[1:].tolist(), strict=True), first):
        if begin < stream.position or end < begin:
            raise SampleError(
                f"sample {number}: the table says that it lies at {begin} to {end}: it is damaged"
            )
        try:
            check_object(end - begin)
        except TooLargeError as error:
            yield Skipped(f"sample {number}: {error}")
            continue
        stream.skip(begin - stream.position)
        data = stream.read(end - begin)
        if len(data) < end - begin:
            raise SampleError(f"sample {number}: the file ends in the middle of it, or before")
        yield number, data


def open_index(url: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
    """Return the list of one file: the index of the folder `url`.

    Raises ConfigError for a URL or options that cannot work, SourceError if the index is missing or
    forbidden, and SourceUnavailableError if the remote does not answer.
    """
    if not isinstance(url, str | os.PathLike) or not os.fspath(url):
        raise ConfigError(f"{owner} takes the path or URL of one folder that holds an {INDEX_NAME}")
    folder = os.fspath(url).removesuffix(INDEX_NAME).rstrip("/") or "/"
    index = FileList(f"{folder}/{INDEX_NAME}", storage_options, owner=owner)
    if len(index) > 1:
        raise ConfigError(f"{index.shown}: {owner} takes one folder; for several, mix a source of each")
    return index


@contextmanager
def read_index(index: FileList) -> Iterator[Mapping[str, Any]]:
    """Read the index, an object of JSON. An error in the block becomes a ConfigError that names it."""
    where = index.where(0)
    with open_stream(index.remote, index.path(0), where) as stream:
        data = stream.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise ConfigError(f"{where}: an index of more than {format_size(MAX_INDEX_BYTES)}")
    try:
        content = as_mapping(json.loads(bytes(data)), "it")
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: not an index: {error}") from error
    try:
        yield content
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where}: {reason}") from error


def check_file_name(name: Any) -> str:
    """Return the name of a file in an index. Raises ValueError for one that leads out of the index's
    folder.
    """
    parts = str(name).replace("\\", "/").split("/")
    if not isinstance(name, str) or {"..", ""} & {*parts} or "::" in name or not name.isprintable():
        raise ValueError(f"a file name leads out of the folder: {json.dumps(str(name)[:100])}")
    return name


def files_beside(index: FileList, names: Sequence[Any]) -> FileList:
    """Return the files that an index names. Raises ValueError for no names, and a name outside its folder."""
    for name in names:
        check_file_name(name)
    if not names:
        raise ValueError("it names no files")
    files = index.over(Names(names))
    files.shown = index.where(0).removesuffix(INDEX_NAME)
    files.identity = tuple(part.removesuffix(f"/{INDEX_NAME}") for part in index.identity)
    return files


@dataclass(frozen=True, slots=True)
class FieldChoice:
    """The fields to read of each sample (None: all), and the functions of the user that decode some."""

    columns: Sequence[str] | None
    decoders: Mapping[str, Callable[[bytes], Any]]
    images: ImageOptions

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the user gave."""
        return (*(self.columns or ()), *self.decoders)

    @property
    def identity(self) -> list[str]:
        """The parts of a fingerprint that name the fields; none for all fields as they are."""
        columns = [] if self.columns is None else [f"columns={','.join(self.columns)}"]
        return columns + [
            f"decoder {name}:{fingerprint_of(one)}" for name, one in sorted(self.decoders.items())
        ]

    def readers(
        self, names: Sequence[str], formats: Sequence[str], reader_of: Callable[[str, str], Reader]
    ) -> tuple[Reader | None, ...]:
        """Return each field's decoder: the user's, or `reader_of(name, format)`; None to leave it out."""
        return tuple(
            None
            if self.columns is not None and name not in self.columns
            else partial(call_decoder, f"the decoder of '{name}'", self.decoders[name])
            if name in self.decoders
            else reader_of(name, form)
            for name, form in zip(names, formats, strict=True)
        )


def pickled_error(noun: str, name: str) -> ConfigError:
    """Return the error for a field, called `noun` in its library, that would have to be unpickled."""
    return ConfigError(
        f"{noun} '{name}' is pickled, and to unpickle it runs whatever its writer put there: if you trust "
        f"them, give decoders={{{name!r}: pickle.loads}}; or leave it out with columns=[…]"
    )


def unknown_error(noun: str, name: str, form: str) -> ConfigError:
    """Return the error for a field that is stored in an unknown form, such as "the encoding 'x'"."""
    return ConfigError(
        f"{noun} '{name}' has {form}, which is not known: give a function of bytes in "
        f"decoders={{{name!r}: …}}, or leave it out with columns=[…]"
    )


class ItemLayout:
    """The layout of an item: the sizes of its values of variable size, then all values.

    `sizes` holds the bytes of each value of fixed size, and 0 for the others; `readers` None for values that
    are left out. `nouns` are for messages: a field, a value, several values.
    """

    def __init__(
        self,
        names: Sequence[str],
        formats: Sequence[str],
        sizes: Sequence[int],
        readers: Sequence[Reader | None],
        nouns: tuple[str, str, str],
    ) -> None:
        self.names, self._sizes, self._several = tuple(names), tuple(sizes), nouns[2]
        self._variable = tuple(index for index, size in enumerate(sizes) if not size)
        self._head = f"<{len(self._variable)}I"
        self._values = tuple(
            (name, reader, f"{form} {nouns[1]}", f"{nouns[0]} '{name}'")
            for name, form, reader in zip(names, formats, readers, strict=True)
        )

    def fields(self, data: memoryview) -> dict[str, Any]:
        """Decode the fields of a sample. Raises SampleError if it is malformed."""
        place = _WORD * len(self._variable)
        if len(data) < place:
            raise SampleError(f"{len(data)} bytes are too few for {len(self.names)} {self._several}")
        sizes: Sequence[int] = struct.unpack_from(self._head, data)
        if len(sizes) < len(self._sizes):
            given, sizes = sizes, list(self._sizes)
            for index, size in zip(self._variable, given, strict=True):
                sizes[index] = size
        if place + sum(sizes) != len(data):
            raise SampleError(f"its {self._several} take {place + sum(sizes)} of {len(data)} bytes")
        return self._decoded(data, place, sizes)

    def only_field(self, data: memoryview) -> dict[str, Any]:
        """Decode an item that is a single value, without a size before it. Raises SampleError likewise."""
        return self._decoded(data, 0, (len(data),))

    def _decoded(self, data: memoryview, place: int, sizes: Sequence[int]) -> dict[str, Any]:
        found = {}
        for size, (name, reader, kind, where) in zip(sizes, self._values, strict=True):
            if reader is not None:
                found[name] = decode_with(reader, data[place : place + size], kind, where)
            place += size
        return found


class IndexedFormat(Format):
    """The base of MDS and LitData: files that an index names, read whole or in visits to about so many
    samples.

    A subclass reads the index in `files_of`, which sets `counts`, the numbers of items in the files.
    `file_names` are the names of such files.
    """

    file_names: ClassVar[re.Pattern[str]]
    is_found = False  # its index is not read to find out: give format=

    counts: npt.NDArray[np.int64]
    is_compressed: bool

    def __init__(self, choice: FieldChoice, samples_per_visit: int | None) -> None:
        self._choice, self._per_visit, self.images = choice, samples_per_visit, choice.images
        self.identity = [*choice.identity]
        self.identity += [f"samples_per_visit={samples_per_visit}"] if samples_per_visit else []

    @classmethod
    def claims(cls, names: Sequence[str]) -> bool:
        bases = [posixpath.basename(name) for name in (*names[:2], names[-1])]
        return INDEX_NAME in bases and any(map(cls.file_names.fullmatch, bases))

    @classmethod
    def needs_last(cls, first: str) -> bool:
        return cls.file_names.fullmatch(posixpath.basename(first)) is not None

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        index = open_index(urls, storage_options, owner)
        with read_index(index) as content:
            files = self.files_of(index, content)
        if self._per_visit is not None:
            if self.is_compressed:
                raise ConfigError(
                    f"{files.shown}: a compressed {self.nouns[0]} can only be read from its begin; "
                    "leave out samples_per_visit"
                )
            check_count("samples_per_visit", self._per_visit)
        return files

    def files_of(self, index: FileList, content: Mapping[str, Any]) -> FileList:
        """Return the files that an index names. Raises ValueError, LookupError or TypeError if it is
        malformed.
        """
        raise NotImplementedError

    def parts(self, file: File) -> Sequence[str]:
        if self._per_visit is None:
            return ("",)
        visits = -(-int(self.counts[file.index]) // self._per_visit)
        return [f"{number}/{visits}" for number in range(visits)] if visits > 1 else ("",)

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the samples of a file, or of a visit to it, in order."""
        count = int(self.counts[file.index])
        if part.count == 1:
            with file.stream() as stream:
                yield from self._read_whole(stream, file, count)
            return
        first, stop = (count * number // part.count for number in (part.number, part.number + 1))
        # Only the table and the samples are fetched.
        with file.stream(0, _WORD * (stop + 2)) as stream:
            table = read_table(stream, count, first, stop)
        begin, end = int(table[0]), int(table[-1])
        with file.stream(begin, max(begin, end)) as stream:
            yield from self._decoded(cut_items(stream, table, first), file)

    def _decoded(self, items: Items, file: File) -> Iterator[Item]:
        return decoded(items, partial(self._decode, file), "sample")

    def _read_whole(self, stream: Stream, file: File, count: int) -> Iterator[Item]:
        """Yield the samples in the `stream` of a file of `count` items."""
        raise NotImplementedError

    def _decode(self, file: File, data: memoryview) -> Any:
        """Return the sample in an item of a file. Raises SampleError if it is malformed."""
        raise NotImplementedError


class IndexedSource(FilesSource):
    """The base of `MDSSource` and `LitDataSource`."""

    format: IndexedFormat

    @property
    def num_samples(self) -> int:
        """The number of samples according to the index."""
        return int(self.format.counts.sum())

    def _size(self) -> str:
        return f", {self.num_samples:,} samples"


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Return `value`, found in an index. Raises TypeError if it is not an object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} is {str(value)[:60]!r}, not an object")
    return value


def as_count(value: Any, what: str) -> int:
    """Return `value`, found in an index. Raises ValueError unless a file may hold so many items."""
    if type(value) is not int or not 0 <= value <= MAX_ITEMS:
        raise ValueError(f"{what} is {str(value)[:60]!r}, not a number from 0 to {MAX_ITEMS:,}")
    return value
