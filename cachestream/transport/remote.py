"""One remote filesystem: its credentials, its driver, and the deadlines that every backend keeps.

| | connect | first byte | stalled body | whole object |
|-|-|-|-|-|
| S3, HTTP | `CONNECT_S` | `FIRST_BYTE_S` | `STALL_S` | `PIECE_S` for each MiB |
| other drivers, which only return whole calls | `CALL_S` a call; after a late one, calls are smaller | | | |
| local files | the kernel's; the sampling process is replaced after `hang_timeout_s` | | | |

fsspec's filesystems hold event loops, sockets and locks: they are neither pickled nor used across a fork. A
`Remote` carries only what it takes to open one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from cachestream.config import check_mapping, parse_size
from cachestream.errors import ConfigError
from cachestream.transport import bounds, metering
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote_errors import classify, map_errors, redact, redact_text

T = TypeVar("T")

CONNECT_S: Final = 5.0
FIRST_BYTE_S: Final = 15.0
STALL_S: Final = 20.0
CALL_S: Final = CONNECT_S + FIRST_BYTE_S
# A connection that brings less than a MiB, or than the rest of the object, in this time counts as broken.
PIECE_S: Final = 60.0
MOST_LATE: Final = 64  # abandoned calls in a process
_QUICK_SHARE: Final = 0.25  # of `CALL_S`: after a call this quick, the next one asks for more
_LEAST_CALL_BYTES: Final = 64 << 10
CALL_BYTES: Final = 8 << 20  # the most that one call asks of a driver without streams
OPEN_TIMEOUT_S: Final = 60.0  # to load a driver and connect, unless the driver has a shorter timeout
# At least as many as there can be requests: a wait for a free connection would count as a late answer.
MAX_CONNECTIONS: Final = 256
LIST_ATTEMPTS: Final = 4

# Values under these names may be shown; all others in storage_options may be secrets.
_PUBLIC_OPTIONS: Final = frozenset(
    {"addressing_style", "endpoint_url", "mode", "profile", "project", "region_name", "signature_version"}
)
_MEAN_GAIN: Final = 0.1
_MIN_SECRET_CHARS: Final = 4  # masking a shorter one would destroy messages


_late_lock = threading.Lock()
_late_calls = 0


def for_bytes_s(nbytes: int) -> float:
    """Return the deadline for a request of `nbytes` and its answer."""
    return CALL_S + PIECE_S * -(-nbytes // PIECE_BYTES)


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Run `coroutine` on `loop` and return its result; report signs of life meanwhile.

    Raises TimeoutError after `timeout_s`.
    """
    return result_of(asyncio.run_coroutine_threadsafe(coroutine, loop), timeout_s)


async def in_time(answer: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """Await the `answer` of a server. Raises TimeoutError after `timeout_s` (None: without limit)."""
    try:
        if sys.version_info < (3, 11):
            return await asyncio.wait_for(answer, timeout_s)
        # Not in a task of its own: if the server hangs up early, aiohttp would lose the begin of the body.
        async with asyncio.timeout(timeout_s):
            return await answer
    except asyncio.TimeoutError as error:  # in Python 3.10 not the built-in class
        if timeout_s is None or error.args:  # the driver's own error, which says what was late
            raise
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None


def result_of(future: concurrent.futures.Future[Any], timeout_s: float, since_s: float | None = None) -> Any:
    """Wait for `future` and return its result; report signs of life meanwhile.

    `timeout_s` after `since_s` (None: now) the future is cancelled, and TimeoutError raised.
    """
    deadline_s = timeout_s + (time.monotonic() if since_s is None else since_s)
    while not future.done():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            future.cancel()
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        try:
            future.exception(min(left_s, metering.TICK_S))
        except concurrent.futures.TimeoutError:
            metering.fetched(0)
    return future.result()


class CallPieces:
    """The size of a call to a driver that returns nothing before all bytes have arrived. Thread-safe.

    It starts at `CALL_BYTES`, is divided by four after a late call, and doubled after a quick one.
    """

    def __init__(self) -> None:
        self.nbytes = CALL_BYTES

    def took(self, nbytes: int, took_s: float) -> None:
        """Adapt to a call that returned `nbytes` after `took_s`."""
        if nbytes >= self.nbytes and took_s < _QUICK_SHARE * CALL_S:
            self.nbytes = min(2 * self.nbytes, CALL_BYTES)

    def was_late(self) -> None:
        """Adapt to a call that did not return in time."""
        self.nbytes = max(self.nbytes // 4, _LEAST_CALL_BYTES)


class Caller:
    """A thread that makes blocking calls for another thread, which waits for them with a deadline.

    A Caller with a late call is abandoned: its thread ends when the call returns, and keeps no process alive.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]
        self._todo = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._todo,), name="driver", daemon=True).start()

    def __del__(self) -> None:
        self._todo.put(None)

    def submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have `call` made after those that were submitted before."""
        future = concurrent.futures.Future[T]()
        if _late_calls >= MOST_LATE:
            _make(call, future)  # calls do not return any more: let the process hang, so that it is replaced
        else:
            self._todo.put((call, future))
        return future

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Make `call` and return its result; report signs of life meanwhile.

        Raises TimeoutError after `timeout_s`; this Caller must not be used again then.
        """
        future = self.submit(call)
        try:
            found: T = result_of(future, timeout_s)
        except TimeoutError:
            if future.cancelled():
                self.abandon()
            raise
        return found

    def abandon(self) -> None:
        """Count a late call until it returns."""
        global _late_calls
        with _late_lock:
            _late_calls += 1
        self._todo.put((_count_return, concurrent.futures.Future()))


def _count_return() -> None:
    global _late_calls
    with _late_lock:
        _late_calls -= 1


def _serve(todo: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]) -> None:
    while (wanted := todo.get()) is not None:
        call, future = wanted
        if not future.cancelled():
            _make(call, future)
        del wanted, call, future


def _make(call: Callable[[], Any], future: concurrent.futures.Future[Any]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Driver:
    """An open filesystem of fsspec, and where its calls run.

    Those of an asynchronous one run on its event loop, for all threads. A blocking one serves one thread, as
    fsspec's synchronous filesystems are not thread-safe; its `caller` makes the calls.
    """

    filesystem: Any
    caller: Caller | None

    @property
    def is_async(self) -> bool:
        return self.caller is None

    def submit(
        self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any
    ) -> concurrent.futures.Future[T]:
        """Run the coroutine `work(*arguments)`. Where the filesystem blocks, so may the coroutine."""
        if self.caller is None:
            return asyncio.run_coroutine_threadsafe(work(*arguments), self.filesystem.loop)
        return self.caller.submit(lambda: run_blocking(work(*arguments)))

    def later(self, call: Callable[[], Any]) -> None:
        """Make `call` after what was submitted before, without waiting for it."""
        if self.caller is None:
            self.filesystem.loop.call_soon_threadsafe(call)
        else:
            self.caller.submit(call)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for an event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    coroutine.close()
    raise RuntimeError("a coroutine that must not wait does")


def _secret_values(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_values(value)
        elif isinstance(value, str | bytes) and name not in _PUBLIC_OPTIONS:
            yield os.fsdecode(value)


def _secrets(url: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that messages must not show, the longest first."""
    found = set(_secret_values(options))
    for part in url.split("::"):
        found.update(urlsplit(part).netloc.rpartition("@")[0].split(":"))
    return tuple(sorted((one for one in found if len(one) >= _MIN_SECRET_CHARS), key=len, reverse=True))


def _with_s3_limits(options: Mapping[str, Any], attempts: int) -> dict[str, Any]:
    """Return `options` for s3fs, with our deadlines, pool size and retries unless the user gave others.

    The retries of botocore and s3fs multiply to several minutes without a sign of life. Reads are retried by
    the caller of the source instead.
    """
    config = {
        "connect_timeout": CONNECT_S,
        "read_timeout": STALL_S,
        "max_pool_connections": MAX_CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": attempts},
    }
    return {
        "use_listings_cache": False,
        **options,
        "config_kwargs": {**config, **options.get("config_kwargs", {})},
    }


def _set_timeouts(filesystem: Any) -> None:
    """Set timeouts in a driver that uses `requests`, which has none by default."""
    session: Any = getattr(filesystem, "session", None)
    if type(session).__module__.partition(".")[0] == "requests":
        session.request = functools.partial(session.request, timeout=(CONNECT_S, FIRST_BYTE_S))


class Remote:
    """The filesystem of `url`, and the options to open it with. Picklable, thread-safe, fork-safe.

    The option "max_object_size" (see `bounds`) is ours, all others are the driver's. The URL and the options
    may hold secrets: no repr, error or log shows them.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        if url.startswith("pipe:"):
            raise ConfigError(
                "'pipe:' URLs name a command, and none is run: give the URL that the command reads, which "
                "fsspec opens, such as 's3://bucket/train-000000.tar'"
            )
        self._url = url
        check_mapping("storage_options", storage_options, "{'anon': True}")
        self._options = dict(storage_options or {})
        most = self._options.pop("max_object_size", None)
        self.object_bytes = bounds.DEFAULT_BYTES if most is None else parse_size(most, "max_object_size")
        self.protocol = get_protocol(url)
        self._check_driver()
        self._reset()

    def _reset(self) -> None:
        self.secrets = _secrets(self._url, self._options)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._shared: Driver | None = None
        self._mean_object_bytes = 0.0  # of the objects that are read whole; a running mean
        self.pieces = CallPieces()
        self._per_thread = threading.local()

    def __getstate__(self) -> tuple[str, dict[str, Any], int]:
        return self._url, self._options, self.object_bytes

    def __setstate__(self, state: tuple[str, dict[str, Any], int]) -> None:
        self._url, self._options, self.object_bytes = state
        self.protocol = get_protocol(self._url)
        self._reset()

    def __repr__(self) -> str:
        return f"<Remote {redact(self._url)}>"

    @property
    def is_local(self) -> bool:
        return self.protocol in ("file", "local")

    @property
    def is_web(self) -> bool:
        return self.protocol in ("http", "https")

    @property
    def is_s3(self) -> bool:
        return self.protocol in ("s3", "s3a") and "::" not in self._url

    @property
    def has_versions(self) -> bool:
        """True if paths name a version of an object."""
        return bool(self._options.get("version_aware"))

    def _check_driver(self) -> None:
        """Raise ConfigError for an unknown scheme, or one whose driver is not installed."""
        where = redact(self._url)
        try:
            fsspec.get_filesystem_class(self.protocol)
        except ValueError:
            raise ConfigError(
                f"{where}: unknown scheme '{self.protocol}://'; give a path, or a URL that fsspec knows, "
                "such as s3://, gs://, az://, https://, hf://"
            ) from None
        except ImportError as error:
            known = known_implementations.get(self.protocol, {})
            package = str(known.get("class", "")).partition(".")[0]
            how = f"pip install {package}" if package not in ("", "fsspec") else str(error)
            raise ConfigError(
                f"{where}: the driver of '{self.protocol}://' is not installed: {how}"
            ) from None

    def _open(self, attempts: int) -> tuple[Any, str]:
        """Open a new filesystem; return it and the path of this Remote's URL in it."""
        options: dict[str, Any] = dict(self._options)
        if self.is_s3:
            options = _with_s3_limits(options, attempts)
        elif "s3" in options:
            options["s3"] = _with_s3_limits(options["s3"], attempts)
        if self.protocol == "ftp":
            options.setdefault("timeout", FIRST_BYTE_S)
        where = redact(self._url)
        with map_errors(where, secrets=self.secrets):
            try:
                filesystem, path = url_to_fs(self._url, skip_instance_cache=True, **options)
                _set_timeouts(filesystem)
                if self.is_s3:
                    filesystem.retries = attempts
                    filesystem.connect()
            except (TypeError, KeyError) as error:
                reason = redact_text(str(error), self.secrets)
                raise ConfigError(
                    f"{where}: storage_options do not suit '{self.protocol}': {reason}"
                ) from None
        return filesystem, str(path)

    def likely_bytes(self) -> int:
        """Return how many bytes a request for a whole object is likely to bring."""
        return metering.at_most(int(self._mean_object_bytes or metering.NO_LIMIT_BYTES))

    def saw_object(self, nbytes: int) -> None:
        """Add an object that was read whole to the mean size."""
        usual = self._mean_object_bytes
        self._mean_object_bytes = usual + _MEAN_GAIN * (nbytes - usual) if usual else float(nbytes)

    def open_for_listing(self) -> tuple[Any, str]:
        """Open a separate filesystem, which retries requests itself; return it and this URL's path in it."""
        return self._open(LIST_ATTEMPTS)

    @property
    def most_bytes(self) -> int:
        """The bound for the bytes of one object."""
        return bounds.smaller(self.object_bytes)

    def driver(self) -> Driver:
        """Return the driver that this thread reads with; open it at the first call."""
        if self._pid != os.getpid():
            self._reset()
        known = self._opened_driver()
        if known is None:
            shared = "::" in self._url or fsspec.get_filesystem_class(self.protocol).async_impl
            # A thread with a filesystem of its own need not wait for a silent server of another thread.
            with self._lock if shared else contextlib.nullcontext():
                known = self._opened_driver()  # another thread was first
                if known is None:
                    caller = Caller()
                    filesystem, _ = caller.run(lambda: self._open(attempts=1), OPEN_TIMEOUT_S)
                    if filesystem.async_impl:
                        known = self._shared = Driver(filesystem, None)
                    else:
                        known = self._per_thread.driver = Driver(filesystem, caller)
        return known

    def note_failure(self, driver: Driver, error: Exception) -> None:
        """Adapt to a call of `driver` that failed.

        After a late call, calls are smaller. An error may leave the connection of a blocking driver unusable,
        and some keep one for ever: the next call opens another filesystem then.
        """
        is_late = isinstance(error, TimeoutError)
        if is_late:
            self.pieces.was_late()
        if driver.caller is not None and classify(error) not in ("missing", "denied"):
            if is_late:
                driver.caller.abandon()
            if self._opened_driver() is driver:
                self._per_thread.driver = None

    def _opened_driver(self) -> Driver | None:
        return self._shared if self._shared is not None else getattr(self._per_thread, "driver", None)
