"""The protocol of formats: files, their parts, and the samples in a part.

    FileList ──▶ File ──▶ Format.parts ──▶ a unit for each part ──▶ Format.read ──▶ samples, Rows, Skipped
    (listing)                (names)         (numbered in rounds)     (one part)     (keys, folders, defaults)

A format knows files, parts and bytes. All that formats share is in `FilesSource`.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, overload

import numpy as np

from cachestream.errors import CacheStreamError, ConfigError, SampleError, SourceUnavailableError
from cachestream.listing.file_list import FileList
from cachestream.listing.names import Names
from cachestream.listing.patterns import COMPRESSED_ENDINGS
from cachestream.sources.base import Item
from cachestream.sources.decode.images import UNCHANGED, ImageOptions
from cachestream.transport.file_objects import SeekableFile, open_file
from cachestream.transport.object_limit import TooLargeError
from cachestream.transport.remote_errors import ChangedError, classify, map_errors, patiently
from cachestream.transport.remote_object import RemoteObject, fetch, open_stream, size_of

if TYPE_CHECKING:
    from cachestream.transport.stream import Stream

T = TypeVar("T")
KEPT_BYTES: Final = 32 << 20  # of what formats keep of files


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of the `count` parts of a file; `name` is its name in `Format.parts`, "" for others."""

    number: int
    count: int
    name: str = ""


class File:
    """One file of a source, as its format sees it. Cheap: made anew for each read.

    `key` is its path below the common root, `where` its path in messages. All that is read is counted,
    limited, resumed, and of one version of the file. Errors are SampleError for a file that cannot be read,
    and SourceUnavailableError for a remote that does not answer.
    """

    __slots__ = ("_files", "_kept", "index", "key")

    def __init__(self, files: FileList, index: int, kept: Kept) -> None:
        self._files, self._kept, self.index = files, kept, index
        self.key = files.key(index)

    @property
    def name(self) -> str:
        """The path below the common root as it was listed: of a web file, with its query."""
        return self._files.names[self.index]

    @property
    def where(self) -> str:
        """The path as shown in messages, without secrets."""
        return self._files.shown_root + self.key

    @property
    def is_compressed(self) -> bool:
        """True if the file has the ending of a compressed one."""
        return self.key.lower().endswith(tuple(COMPRESSED_ENDINGS))

    @property
    def is_local(self) -> bool:
        """True for a file of this machine."""
        return self._files.remote.is_local

    @property
    def is_web(self) -> bool:
        """True for a file that is read by HTTP."""
        return self._files.remote.is_web

    def beside(self, name: str) -> File:
        """Return the file called `name` below the common root."""
        return File(self._files.over(Names([name])), 0, Kept())

    def whole(self) -> memoryview:
        """Return all bytes, writable."""
        with self.errors_mapped():
            return fetch(self._files.remote, self._files.path(self.index))

    def size(self) -> int:
        """Return the size in bytes, as it is now."""
        return size_of(self._files.remote, self._files.path(self.index), self.where)

    def whole_or_none(self) -> memoryview | None:
        """Return all bytes, writable; None if the file is missing, or may not be read."""
        with self.errors_mapped():
            try:
                return fetch(self._files.remote, self._files.path(self.index))
            except Exception as error:
                if classify(error) not in ("missing", "denied"):
                    raise
        return None

    def stream(self, start: int = 0, likely_stop: int | None = None) -> AbstractContextManager[Stream]:
        """Open a stream from byte `start` on; bytes beyond `likely_stop` are not fetched ahead."""
        return open_stream(self._files.remote, self._files.path(self.index), self.where, start, likely_stop)

    def opened(self, buffer_bytes: int = 1 << 20) -> AbstractContextManager[io.BufferedReader]:
        """Open a seekable file object for a library; a request fetches `buffer_bytes`."""
        return open_file(self._files.remote, self._files.path(self.index), self.where, buffer_bytes)

    def ranges(self) -> RemoteObject:
        """Return the file for reads of ranges, in one version; reads raise the driver's errors."""
        return RemoteObject(self._files.remote, self._files.path(self.index), self.where)

    # --- a file that is cut into parts

    def cut(self, part: Part, grain: int = 1) -> tuple[int, int]:
        """Return the first byte of a part, and that of the next one, multiples of `grain`.

        The size of a file is asked for once, so that all of its parts are cut alike.
        """
        size_bytes, count = self._kept.size(self.index, self.size), part.count
        first, last = (size_bytes * i // count // grain * grain for i in (part.number, part.number + 1))
        return first, last

    @contextmanager
    def stream_cut(self, start: int, likely_stop: int) -> Iterator[Stream]:
        """Open a stream as `stream` does; at its end the file must have the size by which it was `cut`."""
        size_bytes = self._kept.size(self.index, self.size)
        with self.stream(start, likely_stop) as stream:
            yield stream
            if stream.size_bytes not in (None, size_bytes):
                self._kept.drop(self.index)
                raise SourceUnavailableError(
                    f"{self.where}: the file was replaced while it was read in parts"
                )

    # --- what a format knows of a file

    def keep(self, read: Callable[[], tuple[T, int]]) -> T:
        """Return what `read` returns, kept for the next calls: a value, and its size in bytes.

        It is forgotten when a read of the file fails, as the file may have been replaced, and in other
        processes.
        """
        with self.errors_mapped():
            return self._kept.value(self.index, read)

    def replaced(self, what: str = "another table") -> SampleError:
        """Return the error for a file that is not the one that was opened."""
        return SampleError(f"{self.where}: was replaced by {what}; start again with a new source")

    def errors_mapped(self) -> AbstractContextManager[None]:
        """Map the errors of drivers in the block."""
        return map_errors(self.where, one_of_many=True, secrets=self._files.remote.secrets)

    @contextmanager
    def parsed(self, file: SeekableFile | None = None) -> Iterator[None]:
        """Map the errors of drivers and of a library in the block that parses the file, through `file`
        perhaps.

        What a library raises becomes a SampleError: the file is malformed. So does a ConfigError: the file
        suited the options when the source was made.
        """
        with self.errors_mapped():
            try:
                yield
            except ConfigError as error:
                raise SampleError(str(error)) from error
            except Exception as error:
                if file is not None:
                    file.raise_error()  # libraries replace it by one of their own
                if isinstance(error, CacheStreamError | ChangedError | TooLargeError):
                    raise
                if classify(error) != "other":
                    raise
                raise malformed(self.where, error) from error


def malformed(where: str, error: Exception) -> SampleError:
    """Return the SampleError for a file that a library refused with `error`."""
    return SampleError(f"{where}: malformed: {type(error).__name__}: {error}"[:500])


class Files(Sequence[File]):
    """The files of a source, in order; each is made when it is asked for."""

    def __init__(self, files: FileList, kept: Kept) -> None:
        self._files, self._kept = files, kept

    @property
    def shown(self) -> str:
        """The files in messages."""
        return self._files.shown

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> File: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[File]: ...
    def __getitem__(self, index: int | slice) -> File | Sequence[File]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return File(self._files, index, self._kept)


class Format:
    """A format of files; `cachestream.sources.api` has all that it may use. Picklable, thread-safe.

    `name` begins fingerprints, `endings` are those of its files, and the ones kept of folders and wildcards.
    `nouns` are the words for a file and a part. An instance has the options that a user chose: `identity`
    names those in the fingerprint, but for `images`, the size of decoded images.
    """

    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    nouns: ClassVar[tuple[str, str]] = ("file", "unit")
    # A file holds many samples: a folder that also holds other files is refused, and not read as files.
    holds_many: ClassVar[bool] = True
    # A folder of this format is opened as such by itself; False: `format=` must be given.
    is_found: ClassVar[bool] = True
    identity: Sequence[str] = ()
    images: ImageOptions = UNCHANGED

    @classmethod
    def begins(cls, head: bytes) -> bool:  # noqa: ARG003
        """Return whether files without an ending that begin with `head`, 512 bytes, are of this format."""
        return False

    @classmethod
    def claims(cls, names: Sequence[str]) -> bool:  # noqa: ARG003
        """Return whether a folder is of this format that has files of these names, in their order.

        Asked of every folder and list: it looks at the first ones and the last, as there may be millions.
        """
        return False

    @classmethod
    def needs_last(cls, first: str) -> bool:  # noqa: ARG003
        """Return whether `claims` needs the last of all names, in a folder whose first file is called
        `first`.
        """
        return False

    @classmethod
    def check_list(cls, files: FileList) -> None:
        """Raise ConfigError for files that must not be read as this format, whatever is asked."""

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        """Return the files of `urls`; `owner` is the source's name in messages."""
        return FileList(urls, storage_options, owner=owner, preferred=self.endings)

    def check(self, files: Files, folders: Sequence[str]) -> None:
        """Look at the files before their parts are asked for, as far as the options need it.

        `folders` are the fields that folders name. Raises ConfigError for options that do not suit the files.
        """

    def folder_columns(self) -> tuple[Sequence[str] | None, Mapping[str, Any]] | None:
        """Return the columns to take from names of folders, None for all, and values for what lacks them.

        None: folders such as "label=cat/" name no fields in this format.
        """
        return None

    # A subclass that does not override `parts` reads files whole, or cut.
    def parts(self, file: File) -> Sequence[str]:
        """Return the names of the parts of a file that are read on their own, unique in it; "" for a whole
        file.

        A name stays that of its part when other files come or go. No names: the file holds no samples.
        """
        return ("",)

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the samples of a part in order, and as Skipped those that cannot be used.

        A SampleError ends the part: what came before it is kept, the rest is counted as lost.
        """
        raise NotImplementedError

    def prefix(self, file: File, part: Part) -> str:
        """Return what the keys of the samples in a part begin with, before their names."""
        return f"{file.key}#"

    # --- parts that are made smaller for small caches

    def part_bytes(self, file: File) -> int:
        """Return the bytes of the first part of a file when unpacked; 0: parts are better read in turn."""
        return 0

    def can_cut(self, head: bytes) -> bool:
        """Return whether samples are found after a cut at any byte of a file that begins with `head`."""
        return False

    def num_cuts(self, files: Files) -> int:
        """Return the number of parts into which each file is cut at first."""
        return 1


class Kept:
    """The knowledge that a process has of files, by number: their sizes, and values in an LRU cache.
    Thread-safe, picklable.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}
        self._values: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._nbytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def size(self, index: int, ask: Callable[[], int]) -> int:
        if index not in self._sizes:
            self._sizes[index] = ask()
        return self._sizes[index]

    def value(self, index: int, read: Callable[[], tuple[T, int]]) -> T:
        with self._lock:
            if index in self._values:
                self._values.move_to_end(index)
                known: T = self._values[index][0]
                return known
        value, nbytes = patiently(read)
        with self._lock:
            self._forget(index)
            self._values[index] = value, nbytes
            self._nbytes += nbytes
            while self._nbytes > KEPT_BYTES and len(self._values) > 1:
                self._forget(next(iter(self._values)))
        return value

    def drop(self, index: int) -> None:
        """Forget all of a file: it may have been replaced."""
        with self._lock:
            self._sizes.pop(index, None)
            self._forget(index)

    def _forget(self, index: int) -> None:
        self._nbytes -= self._values.pop(index, (None, 0))[1]
