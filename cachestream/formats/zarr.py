"""Windows of Zarr arrays, v2 and v3: only the chunks that a window touches are fetched.

zarr-python parses the format and decodes chunks; cachestream's transport fetches the bytes. All of this
runs in the thread that reads the window: threads do not queue for zarr's single event loop, and the bytes are
accounted to the unit that asked for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from fsspec.asyn import AsyncFileSystem

from cachestream.sources.api import (
    ArrayFile,
    CacheStreamError,
    ConfigError,
    Remote,
    RemoteObject,
    SampleError,
    SourceError,
    classify,
    fetch,
    map_errors,
    patiently,
    require,
)

logger = logging.getLogger("cachestream")

T = TypeVar("T")
MAX_CHUNK_BYTES: Final = 4 << 30
MAX_METADATA_BYTES: Final = 16 << 20


def zarr_library() -> Any:
    """Return the module zarr, version 3. Raises ConfigError with the way to install it."""
    zarr = require("zarr", "zarr", "a Zarr array (from Python 3.11 on)")
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ConfigError(f"zarr {zarr.__version__} is too old: zarr 3 is needed (for Python 3.11 or newer)")
    return zarr


# --- the store ---------------------------------------------------------------------------------


class _Loop(asyncio.SelectorEventLoop):
    """The event loop of one thread in one process, for the coroutines of zarr. It waits for nothing.

    Decoding, which zarr gives to other threads, is done in place: many threads read units already.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.num_fetched = 0  # objects, for the current coroutine
        self.denied: Exception | None = None  # the first error of access to an object, for the same

    def run(self, coroutine: Coroutine[Any, Any, T]) -> tuple[T, int, Exception | None]:
        """Run `coroutine` to its end; return its result, how many objects it fetched, and `denied`.

        After an error, what it has left behind is cancelled.
        """
        self.num_fetched, self.denied = 0, None
        try:
            return self.run_until_complete(coroutine), self.num_fetched, self.denied
        except BaseException:
            left = asyncio.all_tasks(self)
            for task in left:
                task.cancel()
            if left:
                self.run_until_complete(asyncio.wait(left))
            raise

    def run_in_executor(  # type: ignore[override]  # typeshed's has TypeVarTuples
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  the future raises it
            future.set_exception(error)
        return future

    def __del__(self) -> None:
        if self.pid == os.getpid():  # a forked child shares the parent's selector
            self.close()


_per_thread = threading.local()


def _loop() -> _Loop:
    loop: _Loop | None = getattr(_per_thread, "loop", None)
    if loop is None or loop.pid != os.getpid():
        loop = _per_thread.loop = _Loop()
    return loop


def _run(coroutine: Coroutine[Any, Any, T]) -> tuple[T, int, Exception | None]:
    """Run `coroutine` in this thread; in another one if this one runs an event loop, as in a notebook."""
    if asyncio._get_running_loop() is None:
        return _loop().run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: _loop().run(coroutine)).result()


class _Files(AsyncFileSystem):  # type: ignore[misc]
    """The filesystem for zarr's FsspecStore: reads by cachestream's transport, with its accounting."""

    cachable = False
    async_impl = True

    def __init__(self, remote: Remote, shown: str, max_bytes: int) -> None:
        super().__init__(asynchronous=True)
        self._remote, self._shown, self._max_bytes = remote, shown, max_bytes

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> memoryview:
        """Return the bytes of one object. FileNotFoundError tells zarr of a chunk of fill values.

        An object to which access is denied may be absent, too: whoever runs the loop finds out.
        """
        try:
            file = RemoteObject(self._remote, path, self._shown)
            if not self._remote.is_local:
                data = await file.read_on_loop(start or 0, end)
            elif start is None and end is None:
                data = fetch(self._remote, path)
            else:
                first, last, _ = slice(start, end).indices(file.look().size_bytes)
                data = file.read(first, last)
        except CacheStreamError:
            raise
        except Exception as error:
            if (kind := classify(error)) == "denied":
                _loop().denied = _loop().denied or error
            if kind in ("missing", "denied"):
                raise FileNotFoundError(path) from None
            with map_errors(self._shown, one_of_many=True, secrets=self._remote.secrets):
                raise
        if len(data) > self._max_bytes:
            raise SampleError(f"{self._shown}: a chunk of {len(data)} bytes, {self._max_bytes} at most")
        _loop().num_fetched += 1
        return data


# --- the array ---------------------------------------------------------------------------------


class ZarrArray(ArrayFile):
    """A Zarr array, of which the metadata and then the chunks (or parts of shards) of each window are read.

    Thread-safe, fork-safe and picklable. A missing chunk holds the fill value, as the format defines; so does
    one to which access is denied, if absent objects are denied there and the metadata can still be read.
    Raises SampleError for malformed data, and otherwise as `map_errors`.
    """

    array_endings = (".zarr",)
    is_folder = True

    def __init__(self, remote: Remote, path: str, shown: str, dataset: str | None) -> None:
        zarr_library()
        self._remote, self._path, self.shown = remote, path.rstrip("/"), shown
        self._metadata = self._read_metadata()
        self._denies_absent: bool | None = None
        with self._malformed("its metadata make no array"):
            self._max_bytes = 2 * _chunk_bytes(self._metadata) + MAX_METADATA_BYTES
            self._array = self._open()
            self.shape: tuple[int, ...] = tuple(self._array.metadata.shape)
            self.dtype: np.dtype[Any] = np.dtype(self._array.dtype)
            self.chunks: tuple[int, ...] | None = tuple(self._array.chunks)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_array"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._array = self._open()

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`, C-contiguous, in native byte order."""
        window = tuple(slice(one, one + count) for one, count in zip(start, size, strict=True))
        with self._malformed("a chunk cannot be decoded"):
            values, num_fetched, denied = _run(self._array.getitem(window))
            found = np.asarray(values)
        if found.shape != tuple(size):
            raise SampleError(f"{self.shown}: a window of {found.shape} came, not {tuple(size)}")
        if denied is not None or not num_fetched:
            # After the chunks, not before: raise if the array is gone, or access has ended in the meantime.
            self._read_metadata()
        if denied is not None and not self._is_denied_if_absent():
            with map_errors(self.shown, one_of_many=True, secrets=self._remote.secrets):
                raise denied
        return np.ascontiguousarray(found, self.dtype.newbyteorder("="))

    def _open(self) -> Any:
        zarr = zarr_library()
        files = _Files(self._remote, self.shown, self._max_bytes)
        store = zarr.storage.FsspecStore(files, read_only=True, path=self._path)
        return zarr.AsyncArray(self._metadata, zarr.storage.StorePath(store))

    def _is_denied_if_absent(self) -> bool:
        """Return whether access to absent objects is denied here, as on S3 unless the keys may be listed."""
        if self._denies_absent is None:
            other = (
                "zarr.json" if self._metadata.get("zarr_format") == 2 else ".zarray"
            )  # of the other version
            try:
                patiently(lambda: RemoteObject(self._remote, f"{self._path}/{other}", self.shown).head(1))
                self._denies_absent = False
            except Exception as error:  # noqa: BLE001  of any driver
                self._denies_absent = classify(error) == "denied"
            if self._denies_absent:
                logger.warning(
                    "%s: chunks to which access is denied are taken for absent and hold the fill value, as "
                    "absent objects are denied here; let these credentials list the bucket to tell them "
                    "apart",
                    self.shown,
                )
        return self._denies_absent

    @contextlib.contextmanager
    def _malformed(self, what: str) -> Iterator[None]:
        try:
            yield
        except CacheStreamError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            raise SampleError(f"{self.shown}: {what}: {reason}") from error

    def _read_metadata(self) -> dict[str, Any]:
        """Read the metadata document of the array. Raises SourceError if there is none."""
        denied: list[Exception] = []
        for name in ("zarr.json", ".zarray"):
            document = self._document(name, denied)
            if document is not None and document.get("node_type") != "group":
                return document
        group = self._document("zarr.json", denied) or self._document(".zgroup", denied)
        if group is None and denied:
            with map_errors(self.shown, secrets=self._remote.secrets):
                raise denied[0]
        raise SourceError(f"{self.shown}: {self._describe_group(group)}")

    def _document(self, name: str, denied: list[Exception]) -> dict[str, Any] | None:
        """Read a document; None if it is absent, or `denied`, to which the error is added."""
        file = RemoteObject(self._remote, f"{self._path}/{name}", self.shown)
        try:
            data = patiently(lambda: file.head(MAX_METADATA_BYTES + 1))
        except Exception as error:
            if (kind := classify(error)) in ("missing", "denied"):
                denied += [error] if kind == "denied" else []
                return None
            with map_errors(self.shown, secrets=self._remote.secrets):
                raise
        with self._malformed(f"{name} is no metadata document"):
            found = json.loads(bytes(data))
            if not isinstance(found, dict):
                raise TypeError(f"a {type(found).__name__}")
        return found

    def _describe_group(self, group: dict[str, Any] | None) -> str:
        """Describe a path that holds no array: nothing, or a `group` with the names of its arrays."""
        if group is None:
            return "no Zarr array here (neither zarr.json nor .zarray); check the path"
        consolidated = group.get("consolidated_metadata") or self._document(".zmetadata", []) or {}
        names = {
            str(key).removesuffix("/.zarray")
            for key, item in consolidated.get("metadata", {}).items()
            if str(key).endswith("/.zarray") or (isinstance(item, dict) and item.get("node_type") == "array")
        }
        if not names:
            with map_errors(self.shown, secrets=self._remote.secrets):
                listed = self._remote.ask("ls", self._path, detail=False)
            names = {path.rstrip("/").rpartition("/")[2] for path in listed} - {"zarr.json"}
        named = sorted(name for name in names if not name.startswith("."))
        hint = f", one of: {', '.join(named[:20])}" if named else ""
        return f"a Zarr group, not an array; add the array's name to the path{hint}"


def _chunk_bytes(metadata: dict[str, Any]) -> int:
    """Return an upper bound of a decoded chunk's bytes: 16 for each element."""
    shape = metadata.get("chunks") or metadata["chunk_grid"]["configuration"]["chunk_shape"]
    nbytes = math.prod(int(length) for length in shape) * 16
    if nbytes > 16 * MAX_CHUNK_BYTES:
        raise ValueError(f"chunks of {shape} are more than can be decoded")
    return nbytes
