"""`open_stream`: the bytes of one file in order, read ahead, and resumed where the connection broke.

All pieces are of one version of the file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Final

from cachestream.errors import SampleError
from cachestream.transport import bounds, metering
from cachestream.transport.answers import (
    Facts,
    Version,
    facts_of_info,
    facts_of_s3,
    is_encoded,
    open_web,
    parse_range,
    s3_target,
    web_version,
)
from cachestream.transport.local import LocalStream
from cachestream.transport.remote import CALL_S, PIECE_S, Remote, result_of
from cachestream.transport.remote_errors import backoff_delays, classify, judge, map_errors
from cachestream.transport.s3_requests import get_object
from cachestream.transport.stream import PIECE_BYTES, Stream

RANGE_BYTES: Final = 4 << 20  # in one request of a driver without streams
ENOUGH_S: Final = 0.1  # an incomplete piece is handed over after this time
# The size of the first request beyond `likely_stop`; each next one asks for as much as came beyond it before.
BEYOND_BYTES: Final = 32 << 10
# In a row, without a byte in between: about a minute, as reading the unit anew would lose all bytes so far.
RESUMES: Final = 8


class _TooSlowError(TimeoutError):
    """Bytes arrive, but far too slowly."""


class _AsyncStream(Stream):
    """A stream whose pieces come from coroutines on the filesystem's loop; transient errors are retried.

    Bytes beyond `likely_stop` are requested only when they are needed.
    """

    _piece_bytes = PIECE_BYTES  # of each piece after the first

    def __init__(self, remote: Remote, path: str, where: str, start: int, likely_stop: int | None) -> None:
        super().__init__(where, remote.secrets, start)
        self._filesystem = remote.filesystem()
        self._remote = remote
        self._path = path
        self._offset = start  # of the next piece
        self._likely_stop = likely_stop
        self._version = Version()
        self._begun = False
        self._slow_s, self._slow_bytes = 0.0, 0  # since the last whole `PIECE_BYTES`
        self._pending: concurrent.futures.Future[bytes | bytearray] | None = None

    def _fetch_piece(self) -> Coroutine[Any, Any, bytes | bytearray]:
        """Fetch the piece at `_offset`; empty at the end."""
        raise NotImplementedError

    def _deadline_s(self) -> float:
        """Return the deadline for a piece, which is below the sum of the deadlines of its steps."""
        return CALL_S + PIECE_S

    def _request_end(self, nbytes: int) -> int:
        """Return the end of a request for about `nbytes` more."""
        stop = self._offset + nbytes
        if self._likely_stop is not None:
            beyond = self._offset - self._likely_stop
            stop = min(stop, self._likely_stop if beyond < 0 else self._offset + max(BEYOND_BYTES, beyond))
        return stop if self.size_bytes is None else min(stop, self.size_bytes)

    def _request_piece(self) -> concurrent.futures.Future[bytes | bytearray]:
        """Return the pending piece; request one if there is none."""
        if self._pending is None:
            likely = self._piece_bytes if self._begun else min(self._remote.likely_bytes(), PIECE_BYTES)
            metering.asking(self._request_end(likely) - self._offset)
            self._pending = asyncio.run_coroutine_threadsafe(self._fetch_piece(), self._filesystem.loop)
        return self._pending

    def _cancel(self) -> None:
        """Cancel the request for the pending piece."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()

    def _next_piece(self) -> memoryview:
        if self._offset == self.size_bytes:
            return memoryview(b"")
        piece = self._next_with_retries()
        self._begun = self._begun or len(piece) > 0
        self._offset += len(piece)
        metering.fetched(len(piece))
        at_end = not piece or self._offset == self.size_bytes
        if at_end and self.size_bytes is not None:
            self._remote.saw_object(self.size_bytes)
        if not at_end and (self._likely_stop is None or self._offset < self._likely_stop):
            self._request_piece()
        return memoryview(piece)

    def _next_with_retries(self) -> bytes | bytearray:
        """Wait for the next piece; request it again after a transient error. Empty at the end."""
        failures, delays = 0, backoff_delays(random)
        while True:
            asked_s = time.monotonic()
            try:
                piece: bytes | bytearray = result_of(self._request_piece(), self._deadline_s())
                self._check_speed(len(piece), time.monotonic() - asked_s)
            except _TooSlowError:
                self._cancel()
                raise
            except Exception as error:
                self._cancel()
                if isinstance(error, TimeoutError):
                    self._remote.pieces.was_late()
                # A stream that never began is retried by the caller, with the back-off of the whole unit.
                if not self._begun or judge(error) != "unavailable" or failures >= RESUMES:
                    raise
                failures += 1
                metering.wait(next(delays))
            else:
                self._pending = None
                return piece

    def _check_speed(self, nbytes: int, waited_s: float) -> None:
        """Raise a TimeoutError if fewer than `PIECE_BYTES` arrived in `PIECE_S` seconds of waiting."""
        self._slow_s, self._slow_bytes = self._slow_s + waited_s, self._slow_bytes + nbytes
        if self._slow_bytes >= PIECE_BYTES:
            self._slow_s, self._slow_bytes = 0.0, 0
        elif self._slow_s > PIECE_S:
            raise _TooSlowError(f"only {self._slow_bytes} bytes came within {self._slow_s:.0f} s")

    def _jump(self, nbytes: int) -> None:
        self._cancel()
        self._offset += nbytes

    def close(self) -> None:
        self._cancel()


class RangeStream(_AsyncStream):
    """A stream with one request for each piece, by fsspec's `_cat_file`, for drivers that have no streams."""

    _piece_bytes = RANGE_BYTES

    def _deadline_s(self) -> float:
        return CALL_S

    async def _fetch_piece(self) -> bytes | bytearray:
        if self.size_bytes is None:
            facts = facts_of_info(await self._filesystem._info(self._path))
            self._version.check(facts)
            self.size_bytes = facts.size_bytes
        most = min(self._piece_bytes if self._begun else PIECE_BYTES, self._remote.pieces.nbytes)
        begin, end = self._offset, self._request_end(metering.at_most(most))
        if end <= begin:
            return b""
        data: bytes = await self._filesystem._cat_file(self._path, start=begin, end=end)
        if len(data) < end - begin:
            raise ConnectionError(f"{len(data)} bytes came instead of {end - begin}")
        if end == self.size_bytes:
            self._version.check(facts_of_info(await self._filesystem._info(self._path)))
        return bytearray(data)


class _BodyStream(_AsyncStream):
    """A stream of the body of an answer; where a body breaks or ends early, the next request continues."""

    _body: Any = None  # has a coroutine `read(nbytes)`

    async def _open(self, stop: int | None) -> Any:
        """Request the bytes from `_offset` to `stop` (None: the end); return a body that begins at `_offset`.

        Returns None if there are no bytes. Sets `size_bytes` if the server sends it.
        """
        raise NotImplementedError

    def _close_body(self, body: Any) -> None:
        raise NotImplementedError

    async def _fetch_piece(self) -> bytes | bytearray:
        data, opened = bytearray(), False
        while not data and self._offset != self.size_bytes:
            if self._body is None:
                if opened:
                    raise ConnectionError(f"nothing came after {self._offset} of {self.size_bytes} bytes")
                opened = True
                most = metering.at_most()
                open_ended = self._likely_stop is None and most == metering.NO_LIMIT_BYTES
                self._body = await self._open(None if open_ended else self._request_end(most))
            body = self._body
            if body is None:
                break
            try:
                ended = await self._read(body, data)
            except BaseException:
                self._release(body)
                if not data:
                    raise
                break  # the bytes so far are kept: the next call resumes after them
            if ended:
                self._release(body)
                if self.size_bytes is None:
                    self.size_bytes = self._offset + len(data)
        return data

    async def _read(self, body: Any, data: bytearray) -> bool:
        """Add a piece of `body` to `data`; return whether the body ended."""
        # Under a bandwidth limit the requests are small, and an incomplete piece is charged as a whole one.
        patience_s = ENOUGH_S if metering.at_most() == metering.NO_LIMIT_BYTES else PIECE_S
        enough_s = time.monotonic() + patience_s
        while len(data) < PIECE_BYTES and not (data and time.monotonic() > enough_s):
            part = await body.read(PIECE_BYTES - len(data))
            if not part:
                return True
            data += part
        if self._offset + len(data) == self.size_bytes:
            await body.read(1)  # only at its end is the connection free for the next request
            return True
        return False

    async def _skip_bytes(self, body: Any, nbytes: int) -> None:
        """Skip the bytes that a server without ranges sends again."""
        while nbytes > 0:
            part = await body.read(min(nbytes, PIECE_BYTES))
            if not part:
                raise ConnectionError("the body ended early")
            nbytes -= len(part)

    def _release(self, body: Any) -> None:
        if self._body is body:
            self._body = None
        self._close_body(body)

    def _cancel(self) -> None:
        super()._cancel()
        if self._body is not None:
            self._filesystem.loop.call_soon_threadsafe(self._release, self._body)


class S3Stream(_BodyStream):
    """A stream of an object of S3: one request, unless the connection breaks."""

    async def _open(self, stop: int | None) -> Any:
        target = s3_target(self._filesystem, self._path)
        if self._version.facts is not None and self._version.facts.version:
            target["IfMatch"] = self._version.facts.version
        begin = self._offset
        last = "" if stop is None else max(begin, stop - 1)
        try:
            answer = await get_object(self._filesystem, target, Range=f"bytes={begin}-{last}")
        except Exception as error:
            if classify(error) == "range" and self.size_bytes is None:  # the object ends at `begin` or before
                self.size_bytes = begin
                return None
            raise
        body = answer["Body"]
        try:
            start, facts = facts_of_s3(answer)
            self._version.check(facts)  # not every server honours If-Match
            self.size_bytes = facts.size_bytes
            await self._skip_bytes(body, begin - start)
        except BaseException:
            body.close()
            raise
        return body

    def _close_body(self, body: Any) -> None:
        body.close()


class WebStream(_BodyStream):
    """A stream from a web server, with or without ranges: one request, unless the connection breaks."""

    _response: Any = None
    _is_encoded = False  # compressed by the server: ranges are of no use

    async def _open(self, stop: int | None) -> Any:
        byte_range = ""
        if (self._offset or stop is not None) and not self._is_encoded:
            byte_range = f"bytes={self._offset}-{'' if stop is None else max(self._offset, stop - 1)}"
        response = await open_web(self._filesystem, self._path, byte_range)
        try:
            if response.status == 416 and self.size_bytes is None:  # the file ends at the offset or before
                self.size_bytes = self._offset
                response.close()
                return None
            self._filesystem._raise_not_found_for_status(response, self._path)
            content_range = (
                parse_range(response.headers.get("Content-Range")) if response.status == 206 else None
            )
            length = response.headers.get("Content-Length") if content_range is None else content_range[1]
            self._is_encoded = is_encoded(response)
            size_bytes = None if length is None or self._is_encoded else int(length)
            self._version.check(Facts(-1 if size_bytes is None else size_bytes, web_version(response)))
            self.size_bytes = size_bytes
            await self._skip_bytes(response.content, 0 if response.status == 206 else self._offset)
        except BaseException:
            response.close()
            raise
        self._response = response
        return response.content

    def _close_body(self, body: Any) -> None:
        if self._response is not None and self._response.content is body:
            self._response.close()


@contextlib.contextmanager
def open_stream(
    remote: Remote, path: str, where: str, start: int = 0, likely_stop: int | None = None
) -> Iterator[Stream]:
    """Open a stream of `path` from byte `start` on; `where` names the file in messages.

    Bytes beyond `likely_stop` are not fetched ahead. Raises SampleError for a file that cannot be read, and
    SourceUnavailableError for a remote that does not answer.
    """
    bounds.enter(remote.object_bytes)
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        stream: Stream
        if remote.is_local:
            stream = LocalStream(path, where, start)
        elif not remote.filesystem().async_impl:
            stream = _OpenedStream(remote, path, where, start)
        elif remote.is_web:
            stream = WebStream(remote, path, where, start, likely_stop)
        elif remote.is_s3:
            stream = S3Stream(remote, path, where, start, likely_stop)
        else:
            stream = RangeStream(remote, path, where, start, likely_stop)
    try:
        yield stream
    finally:
        stream.close()


def size_of(remote: Remote, path: str, where: str) -> int:
    """Return the size of the file `path` in bytes.

    Raises the errors of `open_stream`, and SampleError if the server does not send the size.
    """
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        if remote.is_local:
            return os.stat(path).st_size
        size = remote.info(path).get("size")
    if size is None:
        raise SampleError(f"{where}: the server does not tell its size, which reading it in parts needs")
    return int(size)


class _OpenedStream(Stream):
    """A stream of the file object of a driver that is not asynchronous."""

    def __init__(self, remote: Remote, path: str, where: str, start: int) -> None:
        super().__init__(where, remote.secrets, start)
        self._remote = remote
        self._file = remote.open(path)
        self.size_bytes = getattr(self._file, "size", None)
        if start:
            self._jump(start)

    def _next_piece(self) -> memoryview:
        return memoryview(bytearray(self._remote.read(self._file)))

    def _jump(self, nbytes: int) -> None:
        self._remote.call(lambda _: self._file.seek(nbytes, os.SEEK_CUR))

    def close(self) -> None:
        self._remote.close(self._file)
