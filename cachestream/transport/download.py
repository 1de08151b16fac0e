"""Reading one file forward, over as many requests as it takes.

`RangeRequest` is one request and its body; `Download` is the one loop that waits for pieces, resumes and
gives up.
"""

from __future__ import annotations

import concurrent.futures
import math
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachestream.transport import metering
from cachestream.transport.backends import (
    PART_BYTES,
    Backend,
    Body,
    Version,
    WrongAnswerError,
    body_of,
)
from cachestream.transport.driver import PIECE_S, result_of
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote_errors import ChangedError, backoff_delays, classify, classify_and_report

if TYPE_CHECKING:
    from cachestream.transport.remote_object import RemoteObject

# Returns the memory for the bytes from an offset on, of a file of a size (-1: unknown).
Room = Callable[[int, int], memoryview]

RESUMES: Final = 6  # in a row, without a whole piece in between: about a quarter of a minute


class _TooSlowError(TimeoutError):
    """Bytes arrive, but far too slowly."""


class RangeRequest:
    """One request for the bytes of a file from `start` on, sent with the first read.

    Its methods run where the driver's calls do, one at a time. `position` is the offset of the next byte. If
    an error ends the request after bytes came, `read` returns these bytes and keeps the `error`.
    """

    def __init__(self, file: RemoteObject, backend: Backend, start: int, stop: int | None) -> None:
        self._file, self._stop = file, stop
        self._is_suffix = start < 0
        self._body: Body | None = None
        self.backend = backend
        self.position = start
        self.error: Exception | None = None
        self.is_done = False

    async def read(self, at: int, room: Room, most: int, patience_s: float) -> memoryview:
        """Return at most `most` bytes from `at` on, in memory from `room`: fewer after `patience_s`, none at
        the end.
        """
        body = self._body
        if body is None:
            self.position = at
            body = self._body = await self._open()
        elif at != self.position:
            assert body.seek is not None
            await body.seek(at)
            self.position = at
        out, ended, enough_s = memoryview(b""), False, time.monotonic() + patience_s
        try:
            out = room(at := self.position, self._file.version.size_bytes)[:most]
            if self._stop is not None:
                out = out[: self._stop - at]
            while not ended and self.position < at + len(out):
                part = await body.read(at + len(out) - self.position)
                out[self.position - at : self.position - at + len(part)] = part
                self.position += len(part)
                ended = not part
                if time.monotonic() > enough_s:
                    break
            await self._check_end(body, ended=ended)
        except Exception as error:
            self.close()
            if self.position == at or isinstance(error, WrongAnswerError):
                raise
            self.error = error.with_traceback(None)  # it would keep the memory
        return out[: self.position - at]

    async def _open(self) -> Body:
        """Request the bytes from `position` on; return a body that stands there."""
        file = self._file
        try:
            body = await self.backend.open_range(file.path, self.position, self._stop, file.version)
        except Exception as error:
            if classify(error) != "range":
                raise
            if file.version.size_bytes >= 0:
                raise ChangedError("the file is shorter now") from None
            if self._is_suffix and self.position < 0:
                # Some servers refuse a suffix longer than the file: its first bytes are the file then.
                self.position, self._stop = 0, -self.position
                return await self._open()
            body = body_of(b"", self.position, Version(self.position))  # it ends there
        try:
            file.check(body.version)
            if self.position < 0:
                self.position = max(body.start, self.position + file.version.size_bytes)
            left = self.position - body.start
            while left > 0:  # a server without ranges sends the file from its begin
                part = await body.read(min(left, PIECE_BYTES))
                if not part:
                    raise ConnectionError("the body ended early")
                left -= len(part)
        except BaseException:
            body.close()
            raise
        return body

    async def _check_end(self, body: Body, *, ended: bool) -> None:
        """Close the request at its end.

        Raises ConnectionError if the body `ended` before, and WrongAnswerError if it goes on after the
        file's.
        """
        size, stop, position = self._file.version.size_bytes, self._stop, self.position
        end = size if stop is None or 0 <= size < stop else stop
        if ended and position != end and not self._is_suffix:
            if size >= 0:
                raise ConnectionError(f"the body ended after {position} of {size} bytes")
            self._file.check(Version(position))
        if not ended and position == end:
            # Only at its end is the connection free for the next request.
            goes_on = len(await body.read(1)) > 0
            if goes_on and position == size:
                if not self.backend.streams:  # it may have been replaced by a longer one
                    self._file.check(await self.backend.stat(self._file.path))
                raise WrongAnswerError(f"it goes on after the {size} bytes that it is said to have")
        if ended or position == end:
            self.is_done = True
            self.close()

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


class Download:
    """The bytes of a file from `offset` on, in order, of one version: requests that continue one another.

        IDLE ──ask──▶ PENDING ──bytes──▶ IDLE
         ▲               │
         │             error
         │               ▼
         └──pause── resumable?  ──no──▶ raised

    An error is resumed after a pause, by a request for the bytes that are missing, if the remote is
    unavailable and has sent bytes before (`num_bytes`): at most `RESUMES` times without a whole `PIECE_BYTES`
    in between. A read that never began is retried by the caller, with the back-off of the whole unit. So is
    one that brings less than `PIECE_BYTES` in `PIECE_S` seconds. A wrong answer is asked for again as often,
    whether bytes came before or not, and is final then.

    Bytes from `stop` on are not requested. A piece has at most `step_bytes`; after `patience_s` an incomplete
    one is handed over. A negative offset counts from the end.
    """

    def __init__(
        self,
        file: RemoteObject,
        start: int,
        room: Room,
        stop: int | None = None,
        *,
        step_bytes: int = PART_BYTES,
        patience_s: float = math.inf,
    ) -> None:
        self.offset, self.stop, self.room, self.num_bytes = start, stop, room, 0
        self._file, self._patience_s = file, patience_s
        self._step_bytes = metering.at_most(step_bytes)
        self._request: RangeRequest | None = None
        self._pending: concurrent.futures.Future[memoryview] | None = None
        self._asked_s = self._deadline_s = 0.0
        self._begin_piece()

    def _begin_piece(self) -> None:
        """Count bytes, waits and failures since the last whole `PIECE_BYTES`."""
        self._piece_bytes, self._waited_s, self._failures = 0, 0.0, 0
        self._delays = backoff_delays(random)

    @property
    def is_at_end(self) -> bool:
        """True at the end of the file, if that is known."""
        return 0 <= self.offset == self._file.version.size_bytes

    @property
    def is_done(self) -> bool:
        """True at `stop`, and at the end of the file."""
        return self.offset == self.stop or self.is_at_end

    def ask(self) -> None:
        """Request the next piece unless one is pending."""
        request = self._request
        if self._pending is not None or (request is not None and request.error is not None):
            return
        if request is None:
            backend = self._file.remote.driver()
            most = math.inf if self.stop is None else self.stop
            is_limited = backend.request_bytes < metering.NO_LIMIT_BYTES
            if self.offset >= 0 and is_limited and not self._file.version.is_unsized:
                most = min(most, self.offset + backend.request_bytes)
            stop = None if most == math.inf else int(most)
            request = self._request = RangeRequest(self._file, backend, self.offset, stop)
        nbytes = self._likely_bytes()
        metering.asking(nbytes)
        self._asked_s = time.monotonic()
        self._deadline_s = request.backend.deadline_s(nbytes)
        # A read of a blocking driver is one call.
        patience_s = self._patience_s if request.backend.is_async else 0.0
        self._pending = request.backend.submit(
            request.read, self.offset, self.room, self._step_bytes, patience_s
        )

    def _likely_bytes(self) -> int:
        """Return how many bytes the next piece is likely to have."""
        if self.offset < 0:
            return -self.offset
        size_bytes = self._file.version.size_bytes
        ends = [end for end in (self.stop, size_bytes) if end is not None and end >= 0]
        nbytes = min((self._step_bytes, *(end - self.offset for end in ends)))
        is_known = size_bytes >= 0 or self.num_bytes
        return nbytes if is_known else min(nbytes, self._file.remote.likely_bytes())

    def take(self) -> memoryview:
        """Wait for the pending piece, or the next one; none at the end of the file."""
        while not self.is_at_end:
            try:
                if self._request is not None and self._request.error is not None:
                    raise self._request.error
                self.ask()
                return self._arrived()
            except Exception as error:
                if not self._may_resume(error):
                    raise
            self._failures += 1
            metering.wait(next(self._delays))
        return memoryview(b"")

    def seek(self, offset: int) -> None:
        """Go on at `offset`; a blocking driver keeps its file."""
        if self._request is not None and self._request.backend.is_async:
            self.close()
        self._cancel()
        self.offset = offset

    def close(self) -> None:
        """Cancel what is pending, and close the connection."""
        self._cancel()
        request, self._request = self._request, None
        if request is not None and not request.is_done:
            request.backend.loop.call_soon_threadsafe(request.close)

    def _cancel(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()

    def _arrived(self) -> memoryview:
        """Wait for the pending piece; report and return it."""
        request, begun_s = self._request, time.monotonic()
        assert request is not None
        assert self._pending is not None
        piece: memoryview = result_of(self._pending, self._deadline_s, self._asked_s)
        self._pending, self.offset = None, request.position
        if request.is_done:
            self._request = None
        metering.fetched(len(piece))
        self.num_bytes += len(piece)
        self._piece_bytes += len(piece)
        self._waited_s += time.monotonic() - begun_s
        if self._piece_bytes >= PIECE_BYTES:
            self._begin_piece()
        elif self._waited_s > PIECE_S and request.backend.streams and not self.is_done:
            raise _TooSlowError(f"only {self._piece_bytes} bytes came within {self._waited_s:.0f} s")
        return piece

    def _may_resume(self, error: Exception) -> bool:
        """End the request that failed; return whether another one may continue."""
        request = self._request
        self.close()
        if request is not None:
            self._file.remote.note_failure(request.backend, error)
        is_wrong = isinstance(error, WrongAnswerError)
        if isinstance(error, _TooSlowError) or not (is_wrong or classify_and_report(error) == "unavailable"):
            return False
        return (is_wrong or self.num_bytes > 0) and self._failures < RESUMES
