"""The backends of remotes: S3, web servers, and the other drivers of fsspec, asynchronous or blocking.

A backend makes two requests: for the version of a file (`stat`), and for a part of it (`open_range`).
Resuming, deadlines, versions and accounting exist once, above the backends, in `download`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from fsspec.asyn import get_loop

from cachestream.transport import metering, object_limit
from cachestream.transport.driver import (
    CALL_MIB_S,
    CALL_S,
    CONNECT_S,
    FIRST_BYTE_S,
    PIECE_S,
    STALL_S,
    Caller,
    in_time,
)
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote_errors import ChangedError
from cachestream.transport.s3_requests import get_object, target_of

T = TypeVar("T")

PART_BYTES: Final = 4 << 20  # of a part that is requested by itself, and of a call

Span = tuple[int, int]  # a part of a file: its first byte, and the byte after its last one

# The entries of a driver's `info` that tell versions of an object apart.
_VERSION_NAMES: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "size", "mtime", "LastModified",
)  # fmt: skip
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_SIZE_OF_416: Final = re.compile(r"bytes \*/(\d+)")
_NOT_ENCODED: Final = (None, "", "identity")


class WrongAnswerError(OSError):
    """A server, or a proxy before it, answered with other bytes than were asked for."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a file, as far as it is known: its size, and a tag that other versions do not have."""

    size_bytes: int = -1
    tag: str = ""

    @property
    def is_unsized(self) -> bool:
        """True if the size is not told though the version is: it is packed on the way, and has no ranges."""
        return self.size_bytes < 0 and bool(self.tag)

    def merged(self, other: Version) -> Version:
        """Return what both tell of the version. Raises ChangedError if they are two."""
        resized = self.size_bytes != other.size_bytes and min(self.size_bytes, other.size_bytes) >= 0
        if resized or (self.tag != other.tag and self.tag and other.tag):
            raise ChangedError(f"version {self.tag} became {other.tag}")
        return Version(max(self.size_bytes, other.size_bytes), self.tag or other.tag)


@dataclass(frozen=True, slots=True)
class Body:
    """The answer to one request: the bytes of the file from `start` on.

    `start` lies before what was asked for where the server ignores ranges. `read(nbytes)` returns at most
    `nbytes` bytes, and none at the end. `version` holds what the answer tells of the file.
    """

    start: int
    version: Version
    read: Callable[[int], Awaitable[Any]]
    close: Callable[[], object]
    seek: Callable[[int], Awaitable[object]] | None = None  # only of a blocking driver


class Backend:
    """An open filesystem of fsspec, where its calls run, and the requests of its kind of remote.

    An asynchronous filesystem serves all threads. `streams`: every answer tells the version, and its bytes
    can be read as they arrive; otherwise a call returns none before all are there. `takes_parts`: the parts
    of a large file are best requested by themselves, several at once.
    """

    is_async = streams = takes_parts = True

    def __init__(self, filesystem: Any, path: str, max_object_bytes: int) -> None:
        self.filesystem, self.path = filesystem, path  # of the URL that it was opened with
        self._max_object_bytes = max_object_bytes

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which all is awaited."""
        found: asyncio.AbstractEventLoop = self.filesystem.loop
        return found

    def submit(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> Future[T]:
        """Run the coroutine `work(*arguments)` on the loop."""
        return asyncio.run_coroutine_threadsafe(work(*arguments), self.loop)

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the filesystem's method `name`."""
        return await getattr(self.filesystem, f"_{name}")(*arguments, **options)

    @property
    def request_bytes(self) -> int:
        """The most that one request should ask for."""
        return metering.at_most()

    def deadline_s(self, nbytes: int) -> float:
        """Return the deadline for a step that reads `nbytes`."""
        return CALL_S + (PIECE_S if self.streams else CALL_MIB_S) * -(-nbytes // PIECE_BYTES)

    async def stat(self, path: str) -> Version:
        """Return the current version of a file."""
        raise NotImplementedError

    async def open_range(self, path: str, start: int, stop: int | None, version: Version) -> Body:
        """Request the bytes from `start` (negative: from the end) to `stop` (None: the end) of a file.

        `version` is what is known of the file. The server may ignore it, and the range.
        """
        raise NotImplementedError


class _StreamingBackend(Backend):
    """A server that sends the size and the version with each answer, and the bytes as they are read."""

    async def stat(self, path: str) -> Version:
        # Not by HEAD: its errors have no body, whose code tells bad credentials and a missing bucket from an
        # object that is denied or missing; a signed URL may allow GET alone; and S3's client takes twice as
        # long for it.
        body = await self.open_range(path, 0, 1, Version())
        try:
            await body.read(1)
            await body.read(1)  # only at its end is the connection free for the next request
        finally:
            body.close()
        return body.version


class S3Backend(_StreamingBackend):
    """Objects of S3."""

    async def open_range(self, path: str, start: int, stop: int | None, version: Version) -> Body:
        filesystem = self.filesystem
        read_s = float(filesystem.config_kwargs.get("read_timeout", STALL_S))
        asking = get_object(filesystem, target_of(filesystem, path), Range=_range_header(start, stop))
        # The user's own read timeout wins.
        answer = await in_time(asking, FIRST_BYTE_S if read_s == STALL_S else read_s)
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        # Some servers send a part with status 200.
        status = 206 if "content-range" in headers else answer["ResponseMetadata"]["HTTPStatusCode"]
        try:
            begin, told = _told(start, stop, status, headers, int(headers.get("content-length", -1)))
        except BaseException:
            answer["Body"].close()
            raise
        return Body(begin, told, answer["Body"].read, answer["Body"].close)


class WebBackend(_StreamingBackend):
    """Files of a web server, with or without ranges."""

    takes_parts = False

    async def open_range(self, path: str, start: int, stop: int | None, version: Version) -> Body:
        import aiohttp

        filesystem = self.filesystem
        session = await filesystem.set_session()
        options = dict(filesystem.kwargs)
        # In a compressed body, a range would mean other bytes.
        headers = {**options.get("headers", {}), "Accept-Encoding": "identity"}
        # Where the server compressed the file or does not know its size, ranges are of no use.
        if (start or stop is not None) and not version.is_unsized:
            headers["Range"] = _range_header(start, stop)
        options["headers"] = headers
        first_byte_s: float | None = None
        if "timeout" not in options and "timeout" not in filesystem.client_kwargs:  # the user's own wins
            options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALL_S)
            first_byte_s = FIRST_BYTE_S
        response = await in_time(session.get(filesystem.encode_url(path), **options), first_byte_s)
        try:
            told_range = response.headers.get("Content-Range")
            if response.status != 416:  # `classify` takes it for a range beyond the end
                filesystem._raise_not_found_for_status(response, path)
            elif (size_told := _SIZE_OF_416.fullmatch(told_range or "")) and 0 <= start < int(size_told[1]):
                raise WrongAnswerError(f"the bytes from {start} on are refused (416, {told_range})")
            response.raise_for_status()
            length = -1 if _is_encoded(response) else int(response.headers.get("Content-Length", -1))
            begin, told = _told(start, stop, response.status, response.headers, length)
        except BaseException:
            response.close()
            raise
        return Body(begin, told, response.content.read, response.close)


def _range_header(start: int, stop: int | None) -> str:
    if start < 0:
        return f"bytes={start}"
    return f"bytes={start}-{'' if stop is None else max(start, stop - 1)}"


def _told(
    start: int, stop: int | None, status: int, headers: Mapping[str, str], length: int
) -> tuple[int, Version]:
    """Return the offset of an answer's first byte, and the version of the whole file as far as it is told.

    Raises WrongAnswerError unless it answers a request for the bytes from `start` to `stop`: all numbers that
    it tells must fit. It may be the whole file, or end early.
    """
    # A weak ETag, as a proxy makes it, is of the same bytes.
    tag = headers.get("etag", "").removeprefix("W/") or headers.get("last-modified", "")
    if status in (200, 203):
        return 0, Version(length, tag)
    content_range = headers.get("content-range")
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if status != 206 or match is None:
        raise WrongAnswerError(f"status {status} with Content-Range {content_range!r} is no answer to a read")
    first, last = int(match[1]), int(match[2])
    size = -1 if match[3] == "*" else int(match[3])
    asked = start if start >= 0 else first if size < 0 else max(0, size + start)
    fits = first == asked and first <= last and (stop is None or last < max(stop, start + 1))
    if not fits or 0 <= size <= last or length not in (-1, last + 1 - first):
        raise WrongAnswerError(
            f"asked for {_range_header(start, stop)}, a server or a proxy sent {content_range!r} "
            f"({length} bytes)"
        )
    return first, Version(size, tag)


def _is_encoded(response: Any) -> bool:
    """Return whether a web server compressed a file unasked; aiohttp decompresses it, to another length.

    Raises ValueError for a compressed range, whose bytes are not those of the file.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding in _NOT_ENCODED:
        return False
    if response.status == 206:
        raise ValueError(
            f"a part of it came with Content-Encoding: {encoding[:40]}, which cannot be unpacked by itself; "
            "have the server send the file without this header"
        )
    return True


class CallBackend(Backend):
    """An asynchronous driver of fsspec, by `_cat_file`."""

    streams = False

    @property
    def request_bytes(self) -> int:
        return metering.at_most(PART_BYTES)

    async def stat(self, path: str) -> Version:
        info = await self.call("info", path)
        told = _version_of_info(info)
        # The client unpacks what Google's storage keeps packed, to another size than the one told.
        if info.get("contentEncoding") in _NOT_ENCODED:
            return told
        most = object_limit.limit_bytes(self._max_object_bytes)
        object_limit.check(told.size_bytes, most)  # as one call brings all of it
        return Version(-1, told.tag)

    async def open_range(self, path: str, start: int, stop: int | None, version: Version) -> Body:
        if start < 0:  # the answer would not tell where its bytes lie
            version = version if version.size_bytes >= 0 else await self.stat(path)
            start = max(0, version.size_bytes + start)
        if version.is_unsized:
            return body_of(await self.filesystem._cat_file(path), 0, version)
        span = {} if start == 0 and stop is None else {"start": start, "end": stop}
        data: bytes = await self.filesystem._cat_file(path, **span)
        if stop is not None and len(data) > stop - start:
            raise WrongAnswerError(
                f"{len(data)} bytes came for the {stop - start} asked for; is it packed by Content-Encoding?"
            )
        if version.size_bytes < 0 and (stop is None or len(data) < stop - start):
            version = Version(start + len(data))  # less than was asked for is the rest of the file
        return body_of(data, start, version)


def body_of(data: bytes, start: int, version: Version) -> Body:
    """Return a body of bytes that have arrived."""
    left = memoryview(data)

    async def read(nbytes: int) -> memoryview:
        nonlocal left
        part, left = left[:nbytes], left[nbytes:]
        return part

    return Body(start, version, read, lambda: None)


class BlockingBackend(Backend):
    """A synchronous driver of fsspec: an open file is a request, and each of its reads a call.

    It serves one thread, as these filesystems are not thread-safe; its `caller` makes the calls. It reads
    ahead as much as the driver does by default; for parts, not at all.
    """

    is_async = streams = takes_parts = False
    request_bytes = metering.NO_LIMIT_BYTES

    def __init__(self, filesystem: Any, path: str, max_object_bytes: int, caller: Caller) -> None:
        super().__init__(filesystem, path, max_object_bytes)
        self.caller = caller

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        found: asyncio.AbstractEventLoop = get_loop()
        return found

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return await self._run(getattr(self.filesystem, name), *arguments, **options)

    async def _run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        try:
            return await asyncio.wrap_future(self.caller.submit(partial(function, *arguments, **options)))
        except EOFError as error:  # raised by ftplib when the server hangs up
            raise ConnectionError(f"the connection was closed {error}") from error

    async def stat(self, path: str) -> Version:
        return _version_of_info(await self.call("info", path))

    async def open_range(self, path: str, start: int, stop: int | None, version: Version) -> Body:
        options = {} if stop is None else {"cache_type": "none"}
        file = await self.call("open", path, "rb", **options)
        if start < 0:
            await self._run(file.seek, 0, os.SEEK_END)  # of SFTP, this returns nothing
            start = max(0, await self._run(file.tell) + start)
        if start or file.tell():
            await self._run(file.seek, start)
        info = getattr(file, "details", None)  # which files of SFTP and HDFS have not
        told = _version_of_info(info if isinstance(info, dict) else await self.call("info", path))
        return Body(
            start,
            told,
            partial(self._run, file.read),
            lambda: self.caller.submit(file.close),
            partial(self._run, file.seek),
        )


def _version_of_info(info: dict[str, Any]) -> Version:
    size = info.get("size")
    tag = "|".join(str(info[name]) for name in _VERSION_NAMES if info.get(name) is not None)
    return Version(-1 if size is None else int(size), tag)
