"""Windows of HDF5 datasets: only the chunks that a window touches are fetched.

h5py runs one call at a time in a process. It is therefore asked only for the positions of chunks; contiguous
data and chunks with the usual filters (none, shuffle, gzip) are fetched and decoded without h5py, in
parallel. h5py reads datasets with other filters, and types that need a conversion.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.config import require
from cachestream.errors import CacheStreamError, SampleError, SourceError
from cachestream.sources.array_windows import BATCH_BYTES, read_window
from cachestream.sources.decode.values import ArrayLayout
from cachestream.sources.user_code import CallLock
from cachestream.transport import metering
from cachestream.transport.file_objects import SeekableFile
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import ChangedError, classify
from cachestream.transport.remote_object import RemoteObject

MAX_CHUNK_BYTES: Final = 4 << 30
_DEFLATE: Final = 1
_SHUFFLE: Final = 2
MAX_OPEN: Final = 32  # files of this process
MAX_NAMES: Final = 10_000  # datasets to list in a message
MAX_INDEX: Final = 200_000  # cached positions of chunks

_call_lock: Final = CallLock(thread_safe=False)  # HDF5 is not thread-safe, even between files
_open_arrays: Final[OrderedDict[int, weakref.ref[Hdf5Array]]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The storage of an HDF5 dataset in chunks: `filters` are (number, first parameter), in order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    filters: tuple[tuple[int, int], ...]
    fill: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def can_decode(self) -> bool:
        """True if `decode` supports all filters and the size of the chunks."""
        known = all(number in (_DEFLATE, _SHUFFLE) for number, _ in self.filters)
        return known and 0 < self.nbytes <= MAX_CHUNK_BYTES

    def decode(self, data: memoryview, filter_mask: int) -> npt.NDArray[Any] | None:
        """Decode the chunk in `data`; None if the filters cannot be undone.

        Bit i of `filter_mask` is set if filter i was not applied to this chunk.
        """
        current: memoryview | bytes = data
        for place in reversed(range(len(self.filters))):
            number, parameter = self.filters[place]
            if filter_mask >> place & 1:
                continue
            if number == _DEFLATE:
                try:
                    # With a limit: a few bytes may unpack to a thousand times as many.
                    current = zlib.decompressobj().decompress(current, self.nbytes + 1)
                except zlib.error:
                    return None
            else:
                current = unshuffle(current, parameter or self.dtype.itemsize)
        if len(current) != self.nbytes:
            return None
        return np.frombuffer(current, self.dtype).reshape(self.shape)


def unshuffle(data: memoryview | bytes, width: int) -> memoryview:
    """Undo HDF5's shuffle filter, which stores the first bytes of all elements, then the second ones."""
    count = len(data) // width
    mixed = np.frombuffer(data, np.uint8)
    plain = np.empty_like(mixed)
    elements = plain[: count * width].reshape(count, width)
    for place, values in enumerate(mixed[: count * width].reshape(width, count)):
        elements[:, place] = values  # three times as fast as assigning the transpose
    plain[count * width :] = mixed[count * width :]
    return plain.data


def touched(chunk: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the chunks (of shape `chunk`) that the window `size` at `start` touches."""
    axes = zip(chunk, start, size, strict=True)
    return itertools.product(
        *(range(one // length, -(-(one + count) // length)) for length, one, count in axes)
    )


def overlap(
    index: Sequence[int], chunk: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the intersection of the chunk `index` and a window, as slices of the chunk and of the window."""
    inside, outside = [], []
    for number, length, one, count in zip(index, chunk, start, size, strict=True):
        first = number * length
        low, high = max(one, first), min(one + count, first + length)
        inside.append(slice(low - first, high - first))
        outside.append(slice(low - one, high - one))
    return tuple(inside), tuple(outside)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector of this process off.

    HDF5 has a lock of its own, which it holds while it waits for what another thread fetches. A collection in
    that thread that frees an object of h5py would wait for this lock.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Hdf5Array:
    """The dataset `name` of an HDF5 file; None: the only one in the file.

    Thread-safe, fork-safe and picklable. Raises SampleError for malformed data, SourceError for a missing
    dataset, and the driver's errors as `RemoteObject`.
    """

    def __init__(self, remote: Remote, path: str, shown: str, name: str | None) -> None:
        self._remote, self._path, self._name = remote, path, name
        self.shown = shown if name is None else f"{shown}::/{name.lstrip('/')}"
        self._reset()
        with self._dataset() as found:
            self.shape: tuple[int, ...] = tuple(found.shape or ())
            self.dtype: np.dtype[Any] = found.dtype
            self.chunks: tuple[int, ...] | None = found.chunks

    def _reset(self) -> None:
        self._h5py = require("h5py", "hdf5", "an HDF5 file")
        self._pid = os.getpid()
        self._opened: Any = None
        self._metadata: SeekableFile | None = None
        self._index: dict[tuple[int, ...], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_h5py", "_pid", "_opened", "_metadata", "_index")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`, C-contiguous, in native byte order."""
        try:
            return self._read(start, size)
        except ChangedError:
            with _call_lock.held():  # HDF5 would take the new file for the one that is still open
                self._close()
            raise

    def _read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        file, storage = self._file, self._storage
        if isinstance(storage, ArrayLayout):
            return read_window(file, storage, start, size)
        if isinstance(storage, ChunkLayout):
            window = self._read_chunks(file, storage, start, size)
            if window is not None:
                return window
        with self._dataset() as found:
            area = tuple(slice(one, one + count) for one, count in zip(start, size, strict=True))
            window = np.ascontiguousarray(found[area], self.dtype.newbyteorder("="))
        if self._remote.is_local:
            metering.fetched(window.nbytes)  # h5py opens local files itself
        return window

    def _read_chunks(
        self, file: RemoteObject, storage: ChunkLayout, start: Sequence[int], size: Sequence[int]
    ) -> npt.NDArray[Any] | None:
        """Return the window, with chunks decoded by `ChunkLayout.decode`; None if h5py has to decode one."""
        window = np.empty(tuple(size), self.dtype.newbyteorder("="))
        chunks = list(touched(storage.shape, start, size))
        batch = max(1, BATCH_BYTES // storage.nbytes)
        for first in range(0, len(chunks), batch):
            places = self._locate_chunks(chunks[first : first + batch])
            stored = [place for place in places if place is not None]
            spans = [(place.byte_offset, place.byte_offset + place.size) for place in stored]
            found = iter(file.read_spans(spans, sparse=True))
            for index, place in zip(chunks[first : first + batch], places, strict=True):
                inside, outside = overlap(index, storage.shape, start, size)
                if place is None:
                    window[outside] = storage.fill
                    continue
                chunk = storage.decode(next(found), place.filter_mask)
                if chunk is None:
                    return None
                window[outside] = chunk[inside]
        return window

    def _locate_chunks(self, chunks: Sequence[tuple[int, ...]]) -> list[Any]:
        """Return h5py's `StoreInfo` of each chunk; None for a chunk that is not stored (fill values)."""
        index = self._index
        missing = [chunk for chunk in chunks if chunk not in index]
        if missing:
            with self._dataset() as found:
                lengths = found.chunks
                for chunk in missing:
                    first = tuple(one * length for one, length in zip(chunk, lengths, strict=True))
                    info = found.id.get_chunk_info_by_coord(first)
                    index[chunk] = None if info.byte_offset is None else info
        places = [index[chunk] for chunk in chunks]
        if len(index) > MAX_INDEX:
            self._index = {}
        return places

    # --- h5py

    @contextlib.contextmanager
    def _dataset(self) -> Iterator[Any]:
        """Hold the process-wide HDF5 lock and yield the opened dataset, which is closed on any error."""
        with _call_lock.held(), _no_collection():
            if self._pid != os.getpid():
                self._reset()
            try:
                if self._opened is None:
                    self._open()
                yield self._opened
            except Exception as error:
                metadata = self._metadata
                self._close()
                if metadata is not None:
                    metadata.raise_error()  # HDF5 replaces errors of the network by its own
                if isinstance(error, CacheStreamError) or classify(error) != "other":
                    raise
                reason = f"{type(error).__name__}: {error}"[:300]
                raise SampleError(f"{self.shown}: not a usable HDF5 dataset: {reason}") from error

    def _open(self) -> None:
        self._file = RemoteObject(self._remote, self._path, self.shown)
        if self._file.look().size_bytes == 0:
            raise SampleError(f"{self.shown}: an empty file, not HDF5")
        if self._remote.is_local:
            file = self._open_local()
        else:
            self._metadata = SeekableFile(self._file)
            file = self._h5py.File(self._metadata, "r")
        self._opened = self._choose(file)
        self._index = {}
        self._storage = self._storage_of(self._opened)
        _open_arrays[id(self)] = weakref.ref(self)
        _open_arrays.move_to_end(id(self))
        while len(_open_arrays) > MAX_OPEN:
            _, oldest = _open_arrays.popitem(last=False)
            array = oldest()
            if array is not None:
                array._close()

    def _open_local(self) -> Any:
        """Open a local file without HDF5's lock: many filesystems have no locks, and reading needs none."""
        try:
            return self._h5py.File(self._path, "r", locking=False)
        except OSError as error:
            if "locking flag" not in str(error):
                raise
            # The file is already open in this process with the lock, and HDF5 refuses to mix the two modes.
            return self._h5py.File(self._path, "r")

    def _close(self) -> None:
        opened, self._opened, self._metadata = self._opened, None, None
        _open_arrays.pop(id(self), None)
        if opened is not None:
            opened.file.close()

    def _choose(self, file: Any) -> Any:
        found = file if self._name is None else file.get(self._name)
        if isinstance(found, self._h5py.Dataset):
            # A link in a remote file could point to any file of this machine.
            if not self._remote.is_local and (found.file != file or found.is_virtual or found.external):
                raise SampleError(
                    f"{self.shown}: its data lie in other files, which is refused for remote ones"
                )
            return found
        names = _dataset_names(self._h5py, file)
        if self._name is None and len(names) == 1:
            return file[names[0]]
        what = "holds several datasets" if self._name is None else "no such dataset"
        listed = ", ".join(f"/{name}" for name in names[:20]) or "none"
        raise SourceError(
            f"{self.shown}: {what}; add '::/name' to the path or give dataset=, one of: {listed}"
        )

    def _storage_of(self, dataset: Any) -> ArrayLayout | ChunkLayout | None:
        """Return the layout for reading the dataset without h5py; None if only h5py can read it."""
        h5py = self._h5py
        plain = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True))
        if (
            not plain
            or not dataset.shape
            or dataset.is_virtual
            or dataset.external
            or dataset.file.userblock_size
        ):
            return None
        if dataset.chunks is None:
            offset = dataset.id.get_offset()
            return None if offset is None else ArrayLayout(offset, tuple(dataset.shape), dataset.dtype, False)
        properties = dataset.id.get_create_plist()
        filters = []
        for number in range(properties.get_nfilters()):
            code, _, parameters, _ = properties.get_filter(number)
            filters.append((int(code), int(parameters[0]) if parameters else 0))
        storage = ChunkLayout(tuple(dataset.chunks), dataset.dtype, tuple(filters), dataset.fillvalue)
        return storage if storage.can_decode else None


def _dataset_names(h5py: Any, file: Any) -> list[str]:
    names: list[str] = []

    def visit(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(name)
        return True if len(names) > MAX_NAMES else None

    file.visititems(visit)
    return names
