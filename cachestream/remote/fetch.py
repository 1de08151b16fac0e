"""The bytes of one remote file, each piece reported to `pulse` as it arrives.

Local files are read straight into place. S3 objects come as one stream that is resumed where it
broke, of one version of the object. Everything else goes by fsspec's `cat_file` or `open`.
"""

from __future__ import annotations

import os
import random
import stat
from typing import Any, Final

import numpy as np

from cachestream.errors import SampleError
from cachestream.remote import pulse
from cachestream.remote.filesystem import Remote
from cachestream.remote.retry import ChangedError, backoff_delays, classify
from cachestream.remote.waiting import run

__all__ = ["fetch", "s3_target", "version_of"]

PIECE_BYTES: Final = 1 << 20  # of a stream, between two reports
RANGE_BYTES: Final = 8 << 20  # of an object, in one request
PIECE_TIMEOUT_S: Final = 60.0  # below 17 kB/s a stream counts as broken
WHOLE_TIMEOUT_S: Final = 600.0
RESUMES: Final = 4  # without a piece in between


def fetch(remote: Remote, path: str) -> memoryview:
    """All bytes of `path`, writable. Raises the driver's errors: see `retry.map_errors`."""
    if remote.is_local:
        return _fetch_local(path)
    filesystem = remote.filesystem()
    if remote.is_s3:
        return _S3Stream(filesystem, path).read()
    if not filesystem.async_impl:
        return _fetch_opened(filesystem, path)
    if remote.is_web:
        return _fetch_whole(filesystem, path)
    return _fetch_ranges(filesystem, path)


def _fetch_local(path: str) -> memoryview:
    # O_NONBLOCK: to open a named pipe would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SampleError(f"{path}: not a regular file")
        size = status.st_size
        buffer = np.empty(size, np.uint8).data
        have = 0
        while have < size:
            got = os.readv(fd, [buffer[have : have + RANGE_BYTES]])
            if got == 0:
                raise SampleError(f"{path}: truncated to {have} of {size} bytes while it was read")
            have += got
            pulse.fetched(got)
    finally:
        os.close(fd)
    return buffer


def s3_target(filesystem: Any, path: str) -> dict[str, str]:
    """The arguments that name an object in requests to S3."""
    bucket, key, version = filesystem.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


class _S3Stream:
    """One object of S3 read through s3fs's client: one request, unless the stream breaks."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._target = s3_target(filesystem, path)
        self._body: Any = None
        self._arrived = 0  # in this step; less than `_have` where a server begins anew
        self._restart()

    def _restart(self) -> None:
        self._etag: str | None = None
        self._buffer: memoryview | None = None
        self._have = 0

    def read(self) -> memoryview:
        failures, delays = 0, backoff_delays(random)
        while self._buffer is None or self._have < len(self._buffer):
            self._arrived = 0
            try:
                run(self._filesystem.loop, self._advance(), PIECE_TIMEOUT_S)
            except Exception as error:
                kind = classify(error)
                self._drop_body()
                # What never began is retried from outside, with the whole unit's back-off.
                if self._buffer is None or kind not in ("unavailable", "changed") or failures >= RESUMES:
                    raise
                failures += 1
                if kind == "changed":
                    self._restart()
                pulse.fetched(self._arrived)
                pulse.wait(next(delays))
            else:
                failures = 0
                pulse.fetched(self._arrived)
        return self._buffer

    async def _advance(self) -> None:
        """Read one piece more; open the stream if there is none."""
        if self._body is None:
            await self._open()
        buffer = self._buffer
        assert buffer is not None
        goal = min(len(buffer), self._have + PIECE_BYTES)
        while self._have < goal:
            data = await self._body.read(goal - self._have)
            if not data:
                raise ConnectionError(f"the body ended after {self._have} of {len(buffer)} bytes")
            buffer[self._have : self._have + len(data)] = data
            self._have += len(data)
            self._arrived += len(data)
        if self._have == len(buffer):
            await self._body.read()  # its end: only then is the connection free for the next request
            self._body.close()
            self._body = None

    async def _open(self) -> None:
        resume: dict[str, str] = {}
        if self._have:
            resume["Range"] = f"bytes={self._have}-"
            if self._etag:
                resume["IfMatch"] = self._etag
        answer = await self._filesystem._call_s3("get_object", **self._target, **resume)
        self._body = answer["Body"]
        if resume and "ContentRange" not in answer:  # a server without ranges: all over again
            self._have = 0
        size = self._have + int(answer["ContentLength"])
        etag = answer.get("ETag")
        if self._buffer is None:
            self._etag = etag
            self._buffer = np.empty(size, np.uint8).data
        elif etag != self._etag or size != len(self._buffer):
            raise ChangedError(f"{self._etag} became {etag}")

    def _drop_body(self) -> None:
        if self._body is not None:
            body, self._body = self._body, None
            self._filesystem.loop.call_soon_threadsafe(body.close)


def _fetch_opened(filesystem: Any, path: str) -> memoryview:
    data = bytearray()
    with filesystem.open(path, "rb") as file:
        while piece := file.read(RANGE_BYTES):
            data += piece
            pulse.fetched(len(piece))
    return memoryview(data)


def _fetch_whole(filesystem: Any, path: str) -> memoryview:
    # Not by ranges: a web server may ignore them and send all of it each time.
    data = run(filesystem.loop, filesystem._cat_file(path), WHOLE_TIMEOUT_S)
    pulse.fetched(len(data))
    return memoryview(bytearray(data))


def _fetch_ranges(filesystem: Any, path: str) -> memoryview:
    data = bytearray()
    version = None
    while True:
        start = len(data)
        request = filesystem._cat_file(path, start=start, end=start + RANGE_BYTES)
        try:
            piece = run(filesystem.loop, request, WHOLE_TIMEOUT_S)
        except Exception as error:
            if classify(error) != "range":
                raise
            piece = b""  # the object ends here
        data += piece
        pulse.fetched(len(piece))
        if len(piece) < RANGE_BYTES and start == 0:
            break
        now = version_of(run(filesystem.loop, filesystem._info(path), PIECE_TIMEOUT_S))
        if version is not None and now != version:
            raise ChangedError(f"{version} became {now}")
        version = now
        if len(piece) < RANGE_BYTES:
            break
    return memoryview(data)


def version_of(info: dict[str, Any]) -> tuple[str, ...]:
    """What names one version of an object, under the names that the drivers have for it."""
    names = ("ETag", "etag", "generation", "md5Hash", "content_md5", "size", "mtime", "LastModified")
    return tuple(str(info[name]) for name in names if name in info)
