"""Fetching a whole file; each piece is reported to `metering` as it arrives.

| | |
|-|-|
| local files | read straight into place |
| S3 | one stream, resumed where it broke, of one version; after `STREAM_BYTES`, parts, several at once |
| web servers | one stream |
| other drivers | fsspec's `_cat_file` if the driver is asynchronous, a file object if not |

An object above the bound is not read further.
"""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any, Final

import numpy as np

from cachestream.transport import bounds, metering
from cachestream.transport.answers import Version, facts_of_info, facts_of_s3, s3_target
from cachestream.transport.local import fetch_local
from cachestream.transport.network_stream import WebStream
from cachestream.transport.ranges import RangedFile
from cachestream.transport.remote import PIECE_S, Remote, run
from cachestream.transport.remote_errors import backoff_delays, classify, judge, redact
from cachestream.transport.s3_requests import get_object
from cachestream.transport.stream import PIECE_BYTES

STREAM_BYTES: Final = 32 << 20  # an object of S3 is one stream up to here; the rest comes in parts
RESUMES: Final = 4  # in a row, without a whole piece in between


def fetch(remote: Remote, path: str) -> memoryview:
    """Return all bytes of `path`, writable.

    Raises the driver's errors (see `remote_errors.map_errors`), or for a web server those of `open_stream`.
    """
    bounds.enter(remote.object_bytes)
    if remote.is_local:
        return fetch_local(path)
    if remote.is_s3:
        return _fetch_s3(remote, path)
    if remote.is_web:
        with closing(WebStream(remote, path, redact(path), 0, None)) as stream:
            return stream.read_whole()
    if remote.filesystem().async_impl:
        return _fetch_ranges(remote, path)
    return _fetch_opened(remote, path)


def _fetch_s3(remote: Remote, path: str) -> memoryview:
    metering.asking(min(remote.likely_bytes(), PIECE_BYTES))
    tries = 0
    while True:
        stream = _S3Download(remote, path)
        buffer = stream.read()
        if stream.have < len(buffer):
            rest = RangedFile(remote, path, redact(path))
            rest.facts = stream.version.facts
            try:
                rest.read_into(stream.have, buffer[stream.have :])
            except Exception as error:
                tries += 1
                if classify(error) != "changed" or tries > RESUMES:
                    raise
                continue
        remote.saw_object(len(buffer))
        return buffer


class _S3Download:
    """The download of the first `STREAM_BYTES` of an object of S3: one request, unless the stream breaks.

    `read` returns a buffer of the size of the object. Its first `have` bytes are filled, from one `version`.
    """

    def __init__(self, remote: Remote, path: str) -> None:
        self._filesystem = remote.filesystem()
        self._most_bytes = remote.most_bytes
        self._target = s3_target(self._filesystem, path)
        self._body: Any = None
        self._arrived = 0  # in this step; `have` is smaller if the server begins anew
        self._restart()

    def _restart(self) -> None:
        self.version = Version()
        self.have = self._end = 0
        self._buffer: memoryview | None = None

    def read(self) -> memoryview:
        failures, delays = 0, backoff_delays(random)
        while self._buffer is None or self.have < self._end:
            self._arrived = 0
            if self._buffer is not None:
                metering.asking(min(PIECE_BYTES, self._end - self.have))
            try:
                run(self._filesystem.loop, self._read_piece(), PIECE_S)
            except Exception as error:
                kind = judge(error)
                self._close_body()
                if kind == "range" and self._buffer is None:
                    return memoryview(bytearray())
                # A stream that never began is retried by the caller, with the back-off of the whole unit.
                if self._buffer is None or kind not in ("unavailable", "changed") or failures >= RESUMES:
                    raise
                failures += 1
                if kind == "changed":
                    self._restart()
                metering.fetched(self._arrived)
                metering.wait(next(delays))
            else:
                failures = 0
                metering.fetched(self._arrived)
        return self._buffer

    async def _read_piece(self) -> None:
        """Read one more piece; open the stream first if there is none."""
        if self._body is None:
            await self._open()
        buffer = self._buffer
        assert buffer is not None
        goal = min(self._end, self.have + PIECE_BYTES)
        while self.have < goal:
            data = await self._body.read(goal - self.have)
            if not data:
                raise ConnectionError(f"the body ended after {self.have} of {len(buffer)} bytes")
            buffer[self.have : self.have + len(data)] = data
            self.have += len(data)
            self._arrived += len(data)
        if self.have == self._end:
            await self._body.read()  # only at its end is the connection free for the next request
            self._body.close()
            self._body = None

    async def _open(self) -> None:
        most = max(self._end, metering.at_most(STREAM_BYTES))
        wanted = {"Range": f"bytes={self.have}-{most - 1}"}
        if self.version.facts is not None and self.version.facts.version:
            wanted["IfMatch"] = self.version.facts.version
        answer = await get_object(self._filesystem, self._target, **wanted)
        self._body = answer["Body"]
        start, facts = facts_of_s3(answer)
        self.have = min(self.have, start)  # a server without ranges sends the object from its begin
        self._end = start + int(answer["ContentLength"])
        bounds.check(facts.size_bytes, self._most_bytes)
        self.version.check(facts)
        if self._buffer is None:
            self._buffer = np.empty(facts.size_bytes, np.uint8).data

    def _close_body(self) -> None:
        if self._body is not None:
            body, self._body = self._body, None
            self._filesystem.loop.call_soon_threadsafe(body.close)


def _fetch_opened(remote: Remote, path: str) -> memoryview:
    file = remote.open(path)
    data = bytearray()
    try:
        bounds.check(getattr(file, "size", None) or 0)
        while piece := remote.read(file):
            data += piece
            bounds.check(len(data))
    finally:
        remote.close(file)
    return memoryview(data)


def _fetch_ranges(remote: Remote, path: str) -> memoryview:
    filesystem = remote.filesystem()
    most = metering.at_most(remote.pieces.nbytes)
    metering.asking(min(remote.likely_bytes(), most))
    try:
        head: bytes = remote.run(filesystem._cat_file(path, start=0, end=most), most)
    except Exception as error:
        if classify(error) != "range":
            raise
        head = b""  # the object is empty
    metering.fetched(len(head))
    bounds.check(len(head))
    if len(head) < most:
        remote.saw_object(len(head))
        return memoryview(bytearray(head))
    facts = facts_of_info(remote.info(path))
    bounds.check(facts.size_bytes)
    buffer = np.empty(facts.size_bytes, np.uint8).data
    buffer[:most] = head
    rest = RangedFile(remote, path, redact(path))
    rest.facts = facts
    rest.read_into(most, buffer[most:])
    Version(facts).check(facts_of_info(remote.info(path)))
    remote.saw_object(len(buffer))
    return buffer
