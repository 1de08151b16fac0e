"""Windows of HDF5 datasets: only the chunks that a window touches are fetched.

h5py runs one call at a time in a process. It is asked for the positions of chunks, which are then fetched
together and without its lock, and decodes them out of memory, whatever their filters. Contiguous data are
read without h5py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.sources.api import (
    ArrayFile,
    ArrayLayout,
    CacheStreamError,
    CallLock,
    ChangedError,
    Remote,
    RemoteObject,
    SampleError,
    SeekableFile,
    SourceError,
    Span,
    classify,
    fetched,
    read_window,
    require,
)

PREFETCH_BYTES: Final = 64 << 20  # of the chunks of one window; h5py fetches the rest one by one
MAX_OPEN: Final = 32  # files of this process
MAX_NAMES: Final = 10_000  # datasets to list in a message
MAX_INDEX: Final = 200_000  # cached positions of chunks

_call_lock: Final = CallLock(thread_safe=False)  # HDF5 is not thread-safe, even between files
_open_arrays: Final[OrderedDict[int, weakref.ref[Hdf5Array]]] = OrderedDict()


class _Fetched(SeekableFile):
    """A remote file for HDF5; the bytes of the spans that it holds were fetched before, without HDF5's
    lock.
    """

    def hold(self, spans: Sequence[Span], data: Sequence[memoryview]) -> None:
        self._held = list(zip(spans, data, strict=True))


def touched(chunk: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the chunks (of shape `chunk`) that the window `size` at `start` touches."""
    axes = zip(chunk, start, size, strict=True)
    return itertools.product(
        *(range(one // length, -(-(one + count) // length)) for length, one, count in axes)
    )


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


class Hdf5Array(ArrayFile):
    """The dataset `dataset` of an HDF5 file; None: the only one in the file.

    Thread-safe, fork-safe and picklable. Raises SampleError for malformed data, SourceError for a missing
    dataset, and the driver's errors as `RemoteObject`.
    """

    array_endings = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
    holds_datasets = True

    def __init__(self, remote: Remote, path: str, shown: str, dataset: str | None) -> None:
        self._remote, self._path, self._name = remote, path, dataset
        self.shown = shown if dataset is None else f"{shown}::/{dataset.lstrip('/')}"
        self._reset()
        with self._dataset() as found:
            self.shape: tuple[int, ...] = tuple(found.shape or ())
            self.dtype: np.dtype[Any] = found.dtype
            self.chunks: tuple[int, ...] | None = found.chunks

    def _reset(self) -> None:
        self._h5py = require("h5py", "hdf5", "an HDF5 file")
        self._pid = os.getpid()
        self._opened: Any = None
        self._metadata: _Fetched | None = None
        self._index: dict[tuple[int, ...], Span] = {}

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
        if self._contiguous is not None:
            return read_window(self._file, self._contiguous, start, size)
        # h5py opens local files itself: one that was replaced is noticed by a read of our own.
        spans = [(0, 1)] if self._remote.is_local else self._spans(start, size)
        data = self._file.read_spans(spans)
        area = tuple(slice(one, one + count) for one, count in zip(start, size, strict=True))
        with self._dataset() as found:
            if self._metadata is not None:
                self._metadata.hold(spans, data)
            try:
                window = np.ascontiguousarray(found[area], self.dtype.newbyteorder("="))
            finally:
                if self._metadata is not None:
                    self._metadata.hold((), ())
        if self._remote.is_local:
            fetched(window.nbytes)
        return window

    def _spans(self, start: Sequence[int], size: Sequence[int]) -> list[Span]:
        """Return the places of the stored chunks that a window touches, up to PREFETCH_BYTES."""
        chunks = [] if self.chunks is None else list(touched(self.chunks, start, size))
        missing = [chunk for chunk in chunks if chunk not in self._index]
        if missing:
            with self._dataset() as found:
                for chunk in missing:
                    self._index[chunk] = _place(found, chunk)
        spans, left = list[Span](), PREFETCH_BYTES
        for chunk in chunks:
            first, stop = self._index[chunk]
            left -= stop - first
            if stop > first and left >= 0:
                spans.append((first, stop))
        if len(self._index) > MAX_INDEX:
            self._index = {}
        return spans

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
            self._metadata = _Fetched(self._file)
            file = self._h5py.File(self._metadata, "r")
        self._opened = self._choose(file)
        self._index = {}
        self._contiguous = self._layout_of(self._opened)
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

    def _layout_of(self, dataset: Any) -> ArrayLayout | None:
        """Return the layout of contiguous data, which are read without h5py and its lock; None for others."""
        h5py = self._h5py
        plain = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True))
        is_elsewhere = dataset.is_virtual or dataset.external or dataset.file.userblock_size
        if not plain or not dataset.shape or is_elsewhere or dataset.chunks is not None:
            return None
        offset = dataset.id.get_offset()
        return None if offset is None else ArrayLayout(offset, tuple(dataset.shape), dataset.dtype, False)


def _place(dataset: Any, chunk: tuple[int, ...]) -> Span:
    """Return where a chunk is stored; an empty span for one of fill values, and for data in other files."""
    if dataset.is_virtual or dataset.external or dataset.file.userblock_size:
        return 0, 0
    first = tuple(one * length for one, length in zip(chunk, dataset.chunks, strict=True))
    info = dataset.id.get_chunk_info_by_coord(first)
    return (0, 0) if info.byte_offset is None else (info.byte_offset, info.byte_offset + info.size)


def _dataset_names(h5py: Any, file: Any) -> list[str]:
    names: list[str] = []

    def visit(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(name)
        return True if len(names) > MAX_NAMES else None

    file.visititems(visit)
    return names
