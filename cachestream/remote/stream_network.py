"""Streams over a network: what comes next is on its way while this is used, what breaks is resumed.

All pieces are of one version of the file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import re
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from cachestream.remote import pulse
from cachestream.remote.fetch import s3_target, version_of
from cachestream.remote.filesystem import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from cachestream.remote.retry import ChangedError, backoff_delays, classify
from cachestream.remote.stream import PIECE_BYTES, Stream
from cachestream.remote.waiting import result_of

__all__ = ["RangeStream", "S3Stream", "WebStream"]

RANGE_BYTES: Final = 4 << 20  # in one request, once the first piece has come
AHEAD: Final = 2  # ranges asked for before they are needed
PIECE_TIMEOUT_S: Final = 120.0
RESUMES: Final = 8  # without a byte in between; about a minute, as to begin anew costs all that came
HELD_BACK_S: Final = 0.05
SLOW_S: Final = 2.0
_TOTAL: Final = re.compile(r"bytes \d+-\d+/(\d+)")
_EMPTY: Final = memoryview(b"")


class _AsyncStream(Stream):
    """What comes by coroutines on the filesystem's loop, which are tried again after what passes by itself."""

    def __init__(self, filesystem: Any, path: str, where: str, secrets: Iterable[str], start: int) -> None:
        super().__init__(where, secrets, start)
        self._filesystem = filesystem
        self._path = path
        self._offset = start  # of the first byte that was not taken yet
        self._begun = False
        self._narrow = False  # one piece at a time, and small ones
        self._pending: deque[tuple[int, concurrent.futures.Future[Any]]] = (
            deque()
        )  # how much is asked for, what comes

    def _ask(self, needed: bool) -> None:
        """Ask for what comes next, unless it is on its way: at least one piece if it is `needed` now."""
        raise NotImplementedError

    def _submit(self, nbytes: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._pending.append((nbytes, asyncio.run_coroutine_threadsafe(coroutine, self._filesystem.loop)))

    def _drop(self) -> None:
        """Give up what is on its way."""
        while self._pending:
            self._pending.pop()[1].cancel()

    def _next_piece(self) -> memoryview:
        piece = memoryview(self._patiently())
        self._begun = self._begun or len(piece) > 0
        self._offset += len(piece)
        begun_s = time.monotonic()
        pulse.fetched(len(piece))
        # Where the budget or the line holds us back, to ask ahead would only overdraw it.
        self._narrow = self._narrow or time.monotonic() - begun_s > HELD_BACK_S
        self._ask(needed=False)
        return piece

    def _patiently(self) -> bytes | bytearray:
        """What is next on its way; asked for again where it broke. Empty at the end."""
        failures, delays = 0, backoff_delays(random)
        while True:
            self._ask(needed=True)
            if not self._pending:
                return b""
            begun_s = time.monotonic()
            try:
                piece: bytes | bytearray = result_of(self._pending[0][1], PIECE_TIMEOUT_S)
            except Exception as error:
                self._drop()
                # What never began is retried from outside, with the whole unit's back-off.
                if not self._begun or classify(error) != "unavailable" or failures >= RESUMES:
                    raise
                failures += 1
                pulse.wait(next(delays))
            else:
                self._narrow = time.monotonic() - begun_s > SLOW_S
                self._pending.popleft()
                return piece

    def close(self) -> None:
        self._drop()


class RangeStream(_AsyncStream):
    """Ranges of an object, the next ones asked for while this one is used."""

    def __init__(
        self,
        filesystem: Any,
        path: str,
        where: str,
        secrets: Iterable[str],
        start: int,
        likely_stop: int | None,
    ) -> None:
        super().__init__(filesystem, path, where, secrets, start)
        self._likely_stop = likely_stop
        self._version: Any = None

    def _ask(self, needed: bool) -> None:
        begin = self._offset + sum(nbytes for nbytes, _ in self._pending)
        while len(self._pending) < (1 if self._narrow or not self._begun else AHEAD):
            beyond = self._likely_stop is not None and begin >= self._likely_stop
            if beyond and (self._pending or not needed):
                return
            small = beyond or self._narrow or not self._begun
            end = begin + (PIECE_BYTES if small else RANGE_BYTES)
            if self.size_bytes is not None:
                end = min(end, self.size_bytes)
            if self._likely_stop is not None and not beyond:
                end = min(end, self._likely_stop)
            if end <= begin:
                return
            self._submit(end - begin, self._get(begin, end))
            begin = end

    async def _get(self, begin: int, end: int) -> bytes | bytearray:
        if self.size_bytes is None:
            info = await self._filesystem._info(self._path)
            self.size_bytes, self._version = int(info["size"]), version_of(info)
        end = min(end, self.size_bytes)
        if end <= begin:
            return b""
        data: bytes = await self._filesystem._cat_file(self._path, start=begin, end=end)
        if len(data) < end - begin:
            raise ConnectionError(f"{len(data)} bytes came instead of {end - begin}")
        if end == self.size_bytes:
            now = version_of(await self._filesystem._info(self._path))
            if now != self._version:
                raise ChangedError(f"{self._version} became {now}")
        return bytearray(data)

    def _jump(self, nbytes: int) -> None:
        self._drop()
        self._offset += nbytes


class S3Stream(RangeStream):
    """Ranges of one version of an object of S3: one request each, nothing beside."""

    async def _get(self, begin: int, end: int) -> bytes | bytearray:
        target = s3_target(self._filesystem, self._path)
        if self._version is not None and self._version[1]:
            target["IfMatch"] = self._version[1]
        try:
            answer = await self._filesystem._call_s3("get_object", **target, Range=f"bytes={begin}-{end - 1}")
        except Exception as error:
            if classify(error) == "range" and self.size_bytes is None:  # there is nothing at or after `begin`
                self.size_bytes = begin
                return b""
            raise
        body = answer["Body"]
        try:
            total = _TOTAL.match(answer.get("ContentRange") or "")
            if total is None:
                raise OSError("the server sends no ranges of objects")
            data = bytearray(await body.read())
        finally:
            body.close()
        version = (int(total[1]), answer.get("ETag"))
        if self._version not in (None, version):  # not every server heeds If-Match
            raise ChangedError(f"{self._version} became {version}")
        self.size_bytes, self._version = version[0], version
        if len(data) < min(end, self.size_bytes) - begin:
            raise ConnectionError(f"{len(data)} bytes came instead of {end - begin}")
        return data


class WebStream(_AsyncStream):
    """One answer of a web server, resumed where it broke; a server may have no ranges."""

    def __init__(self, filesystem: Any, path: str, where: str, secrets: Iterable[str], start: int) -> None:
        super().__init__(filesystem, path, where, secrets, start)
        self._response: Any = None
        self._version: str | None = None
        self._done = False

    def _ask(self, needed: bool) -> None:
        if not self._pending and not self._done:
            self._submit(0, self._advance())

    async def _advance(self) -> bytes | bytearray:
        response = self._response or await self._open()
        self._response = response
        data = bytearray()
        try:
            while len(data) < PIECE_BYTES:
                part = await response.content.read(PIECE_BYTES - len(data))
                if not part:
                    break
                data += part
        except BaseException:
            self._hang_up(response)
            if not data:
                raise  # else what came is not lost: the next call resumes after it
        else:
            self._done = not data
        return data

    async def _open(self) -> Any:
        import aiohttp

        session = await self._filesystem.set_session()
        options = dict(self._filesystem.kwargs)
        # Compressed on the way, the bytes of a range would be others.
        options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
        if self._offset:
            options["headers"]["Range"] = f"bytes={self._offset}-"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        url = self._filesystem.encode_url(self._path)
        response = await session.get(url, **{"timeout": limits, **options})
        try:
            await self._check(response)
        except BaseException:
            response.close()
            raise
        return response

    async def _check(self, response: Any) -> None:
        self._filesystem._raise_not_found_for_status(response, self._path)
        version = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if self._begun and version != self._version:
            raise ChangedError(f"{self._version} became {version}")
        self._version = version
        length, leave_out = response.headers.get("Content-Length"), 0
        if response.status == 206:
            total = _TOTAL.match(response.headers.get("Content-Range", ""))
            self.size_bytes = int(total[1]) if total else None
        else:
            self.size_bytes = None if length is None else int(length)
            leave_out = self._offset  # it sends all of it again
        while leave_out:
            part = await response.content.read(min(leave_out, PIECE_BYTES))
            if not part:
                raise ConnectionError("the body ended early")
            leave_out -= len(part)

    def _jump(self, nbytes: int) -> None:
        self._drop()
        self._offset += nbytes

    def _hang_up(self, response: Any) -> None:
        if self._response is response:
            self._response = None
        response.close()

    def _drop(self) -> None:
        super()._drop()
        response = self._response
        if response is not None:
            self._filesystem.loop.call_soon_threadsafe(self._hang_up, response)
