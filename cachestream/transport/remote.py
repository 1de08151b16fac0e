"""One remote filesystem: its credentials, and the driver that every thread reads it with.

fsspec's filesystems hold event loops, sockets and locks: they are neither pickled nor used across a fork. A
`Remote` carries only what it takes to open one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from cachestream.config import check_mapping, collection_paused, parse_size
from cachestream.errors import ConfigError
from cachestream.transport import metering, object_limit
from cachestream.transport.backends import Backend, BlockingBackend, CallBackend, S3Backend, WebBackend
from cachestream.transport.driver import (
    CONNECT_S,
    FIRST_BYTE_S,
    STALL_S,
    Caller,
    result_of,
)
from cachestream.transport.remote_errors import classify, map_errors, patiently, redact, redact_text

T = TypeVar("T")

_MEAN_GAIN: Final = 0.1
OPEN_TIMEOUT_S: Final = 60.0  # to load a driver and connect, unless the driver has a shorter timeout
PAGE_TIMEOUT_S: Final = 60.0  # to list a page of a folder, or to look a file up
FOLDER_TIMEOUT_S: Final = 300.0  # to list a folder whose pages a driver keeps until it has all
_LISTING: Final = ("ls", "glob")
# At least as many as there can be requests: a wait for a free connection would count as a late answer.
MAX_CONNECTIONS: Final = 256
_S3: Final = ("s3", "s3a")

# Values under these names may be shown; all others in storage_options may be secrets.
_PUBLIC_OPTIONS: Final = frozenset(
    {"account_host", "account_name", "addressing_style", "bucket", "cache_storage", "container", "encoding",
     "endpoint", "endpoint_url", "host", "location", "mode", "org", "profile", "project", "protocol", "ref",
     "region", "region_name", "repo", "repo_type", "revision", "sha", "signature_version", "version_id"}
)  # fmt: skip
_MIN_SECRET_CHARS: Final = 4  # masking a shorter one would destroy messages


def _secret_values(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _secret_values(str(key), one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _secret_values(name, one)
    elif isinstance(value, str | bytes) and name not in _PUBLIC_OPTIONS:
        yield os.fsdecode(value)


def _secrets(url: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that messages must not show, the longest first.

    Messages name the path of `url`: a value that is a part of it is no secret, and would mask the path.
    """
    found = set(_secret_values("", options))
    for part in url.split("::"):
        authority = re.split("[/?#]", part.partition("://")[2], maxsplit=1)[0]
        found.update(authority.rpartition("@")[0].split(":"))
    shown = redact(url)
    secrets = (one for one in found if len(one) >= _MIN_SECRET_CHARS and one not in shown)
    return tuple(sorted(secrets, key=len, reverse=True))


def _with_s3_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` for s3fs, with our deadlines and pool size unless the user gave others, and no
    retries.

    The retries of botocore and s3fs multiply to several minutes without a sign of life. `ask` retries, and
    the caller of a source.
    """
    config = {
        "connect_timeout": CONNECT_S,
        "read_timeout": STALL_S,
        "max_pool_connections": MAX_CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
    }
    return {
        "use_listings_cache": False,
        **options,
        "config_kwargs": {**config, **(options.get("config_kwargs") or {})},
    }


def load_driver(protocol: str) -> None:
    """Load the driver of `protocol`, and what its filesystems share, for this process and its forks."""
    fsspec.get_filesystem_class(protocol)
    if protocol in _S3:
        _s3_descriptions()


@functools.cache
def _s3_descriptions() -> Any:
    """Return botocore's loader of the descriptions of S3's API, which keeps what it has parsed.

    Each session has its own loader, which parses them in 70 ms of a processor for its first client.
    """
    from aiobotocore.session import AioSession

    loader = AioSession().get_component("data_loader")
    for kind in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", kind)
    loader.load_data("endpoints")
    return loader


def _share_descriptions(filesystem: Any) -> None:
    """Give a filesystem of s3fs a session with the descriptions of the others, unless the user gave one."""
    from aiobotocore.session import AioSession

    if filesystem.session is None:
        filesystem.session = AioSession(**filesystem.kwargs)
        filesystem.session.register_component("data_loader", _s3_descriptions())


def _close_session(loop: asyncio.AbstractEventLoop, session: Any) -> None:
    """Close a session of s3fs on its own event loop.

    s3fs would close it on the running loop of the thread that collects the filesystem, such as Jupyter's.
    """
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(session.__aexit__(None, None, None), loop)


def _set_timeouts(filesystem: Any) -> None:
    """Set timeouts in a driver that uses `requests`, which has none by default."""
    session: Any = getattr(filesystem, "session", None)
    if type(session).__module__.partition(".")[0] == "requests":
        # No reference to itself: it would keep its connections until the garbage is collected.
        request = functools.partial(type(session).request, weakref.proxy(session))
        session.request = functools.partial(request, timeout=(CONNECT_S, FIRST_BYTE_S))


class Remote:
    """The filesystem of `url`, and the options to open it with. Picklable, thread-safe, fork-safe.

    The option "max_object_size" (see `object_limit`) is ours, all others are the driver's. The URL and the
    options may hold secrets: no repr, error or log shows them.
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
        default = object_limit.DEFAULT_BYTES
        self.max_object_bytes = default if most is None else parse_size(most, "max_object_size")
        self.protocol = get_protocol(url)
        self._check_driver()
        self._reset()

    def _reset(self) -> None:
        self.secrets = _secrets(self._url, self._options)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._shared: Backend | None = None
        self._mean_object_bytes = 0.0  # of the objects that are read whole; a running mean
        self._per_thread = threading.local()

    def __getstate__(self) -> tuple[str, dict[str, Any], int]:
        return self._url, self._options, self.max_object_bytes

    def __setstate__(self, state: tuple[str, dict[str, Any], int]) -> None:
        self._url, self._options, self.max_object_bytes = state
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
    def has_queries(self) -> bool:
        """True if the names of its files may end in a query, as on the web, through chained drivers too."""
        return self.is_web or any(part.startswith(("http://", "https://")) for part in self._url.split("::"))

    @property
    def is_s3(self) -> bool:
        return self.protocol in _S3 and "::" not in self._url

    @collection_paused()
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

    @collection_paused()
    def _open(self) -> tuple[Any, str]:
        """Open a new filesystem; return it and the path of this Remote's URL in it."""
        options: dict[str, Any] = dict(self._options)
        if self.is_s3:
            options = _with_s3_limits(options)
        elif "s3" in options:
            options["s3"] = _with_s3_limits(options["s3"])
        if self.protocol == "ftp":
            options.setdefault("timeout", FIRST_BYTE_S)
        where = redact(self._url)
        with map_errors(where, secrets=self.secrets):
            try:
                filesystem, path = url_to_fs(self._url, skip_instance_cache=True, **options)
                _set_timeouts(filesystem)
                if self.is_s3:
                    filesystem.retries = 1  # one attempt, as in `_with_s3_limits`
                    filesystem.close_session = _close_session
                    _share_descriptions(filesystem)
                    filesystem.connect()
            except (TypeError, KeyError) as error:
                reason = redact_text(str(error), self.secrets)
                raise ConfigError(
                    f"{where}: storage_options do not suit '{self.protocol}': {reason}"
                ) from None
        return filesystem, str(path)

    def shown(self, path: str) -> str:
        """Return a path for the driver as messages show it: with its scheme, without secrets."""
        is_whole = self.is_local or "://" in path
        return redact(path if is_whole else f"{self.protocol}://{path}")

    def path_of(self, url: str) -> str:
        """Return the path for the driver of `url`, of the same scheme; of a chained one, only of this
        Remote's.
        """
        if "::" in url:
            return self.driver().path
        return str(fsspec.get_filesystem_class(self.protocol)._strip_protocol(url))

    def ask(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Return the answer of the filesystem's method `name`.

        Asks again while the remote is unavailable, as `patiently` does, and reports signs of life.
        """
        self.driver()  # not again and again

        def once() -> Any:
            driver = self.driver()
            asked = driver.submit(partial(driver.call, name, *arguments, **options))
            return self.answer_of(driver, asked, self.listing_s if name in _LISTING else PAGE_TIMEOUT_S)

        return patiently(once)

    @property
    def listing_s(self) -> float:
        """The deadline for a folder: drivers list it in one call; on the web it is one page."""
        return PAGE_TIMEOUT_S if self.is_web else FOLDER_TIMEOUT_S

    def answer_of(self, driver: Backend, asked: Future[T], timeout_s: float) -> T:
        """Wait up to `timeout_s` for what was submitted to `driver`."""
        try:
            found: T = result_of(asked, timeout_s)
        except Exception as error:
            self.note_failure(driver, error)
            raise
        finally:
            del asked  # its error refers to this frame
        return found

    def likely_bytes(self) -> int:
        """Return how many bytes a request for a whole object is likely to bring: they are paid for before."""
        return metering.at_most(int(self._mean_object_bytes or metering.NO_LIMIT_BYTES))

    def saw_object(self, nbytes: int) -> None:
        """Add an object that was read whole to the mean size."""
        usual = self._mean_object_bytes
        self._mean_object_bytes = usual + _MEAN_GAIN * (nbytes - usual) if usual else float(nbytes)

    @property
    def most_bytes(self) -> int:
        """The limit for one object: the most bytes that are read of it."""
        return object_limit.limit_bytes(self.max_object_bytes)

    def driver(self) -> Backend:
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
                    known = self._open_driver()
        return known

    def _open_driver(self) -> Backend:
        caller = Caller()
        opening = caller.submit(self._open)
        try:
            filesystem, path = result_of(opening, OPEN_TIMEOUT_S)
        except TimeoutError:
            if opening.cancelled():
                caller.abandon()
            raise
        finally:
            del opening  # as in `answer_of`
        if not filesystem.async_impl:
            own = self._per_thread.driver = BlockingBackend(filesystem, path, self.max_object_bytes, caller)
            return own
        kind = S3Backend if self.is_s3 else WebBackend if self.is_web else CallBackend
        self._shared = kind(filesystem, path, self.max_object_bytes)
        return self._shared

    def note_failure(self, driver: Backend, error: Exception) -> None:
        """Have the next call open another filesystem if a call of a blocking `driver` failed.

        The error may have left its connection unusable, and some keep one for ever.
        """
        if isinstance(driver, BlockingBackend) and classify(error) not in ("missing", "denied"):
            if isinstance(error, TimeoutError):
                driver.caller.abandon()
            if self._opened_driver() is driver:
                self._per_thread.driver = None

    def _opened_driver(self) -> Backend | None:
        return self._shared if self._shared is not None else getattr(self._per_thread, "driver", None)
