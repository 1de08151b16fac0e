"""One request for a part of an object, and the version and size that its answer tells: S3, and web servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from cachestream.transport import bounds, metering
from cachestream.transport.remote import CONNECT_S, FIRST_BYTE_S, STALL_S, in_time
from cachestream.transport.remote_errors import ChangedError
from cachestream.transport.s3_requests import get_object


def s3_target(filesystem: Any, path: str) -> dict[str, str]:
    """The arguments that name an object in requests to S3."""
    bucket, key, version = filesystem.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


Span = tuple[int, int]  # the first byte of a part, and the one after its last

_PIECE_BYTES: Final = 1 << 20
# The names under which drivers tell what names one version of an object.
_VERSION_NAMES: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "size", "mtime", "LastModified",
)  # fmt: skip
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class Facts:
    """The size of one version of a file (-1: not told), and what tells that version from others."""

    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes from `start` on, and what the server says of the whole file (None: nothing)."""

    start: int
    data: bytes | memoryview
    facts: Facts | None


@dataclass(slots=True)
class Version:
    """Which version of a file is read: as the first answer tells. Answers of another one raise ChangedError."""

    facts: Facts | None = None

    def check(self, facts: Facts) -> None:
        """Take this version from `facts`, if it is not known yet; raise ChangedError if they are of another one."""
        if self.facts is None:
            self.facts = facts
        elif facts != self.facts:
            raise ChangedError(f"version {self.facts.version} became {facts.version}")

    def note(self, answer: Answer) -> None:
        """Report `answer`, and see that it is of this version."""
        metering.fetched(len(answer.data))
        if answer.facts is not None:
            self.check(answer.facts)


def facts_of_info(info: dict[str, Any]) -> Facts:
    """The facts in what a driver's `info` says of a file."""
    return Facts(int(info["size"]), "|".join(str(info[name]) for name in _VERSION_NAMES if name in info))


def facts_of_s3(answer: dict[str, Any]) -> tuple[int, Facts]:
    """The place of the first byte of an answer of S3, and the facts of the whole object."""
    length = int(answer["ContentLength"])
    start, size_bytes = parse_range(answer.get("ContentRange")) or (0, length)
    return start, Facts(size_bytes, str(answer.get("ETag") or ""))


async def ask_s3(
    filesystem: Any, path: str, range_header: str, most: int, out: memoryview | None = None
) -> Answer:
    """The bytes of `range_header` ("bytes=0-99"; "": all) of an object. Raises the driver's errors, and TooLargeError
    for an answer of more than `most` bytes.

    `out` has room for just the range: they are put there where that is what the server sends.
    """
    wanted = {"Range": range_header} if range_header else {}
    answer = await get_object(filesystem, s3_target(filesystem, path), **wanted)
    body = answer["Body"]
    told, length = answer.get("ContentRange"), int(answer["ContentLength"])
    try:
        bounds.check(length, most)
        if told and out is not None and length == len(out):
            data = await _read_into(body.read, out)
        else:
            data = await body.read()
    finally:
        body.close()
    if len(data) < length:
        raise ConnectionError(f"the body ended after {len(data)} of {length} bytes")
    start, facts = facts_of_s3(answer)
    return Answer(start, data, facts)


async def open_web(filesystem: Any, path: str, range_header: str) -> Any:
    """The answer of a web server to a request for `range_header` ("": all), with its body to be read."""
    import aiohttp

    session = await filesystem.set_session()
    options = dict(filesystem.kwargs)
    wanted = {"Range": range_header} if range_header else {}
    # Compressed on the way, the bytes of a range would be others.
    options["headers"] = {**options.get("headers", {}), **wanted, "Accept-Encoding": "identity"}
    first_byte_s: float | None = None
    if "timeout" not in options and "timeout" not in filesystem.client_kwargs:  # the user's win
        options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALL_S)
        first_byte_s = FIRST_BYTE_S
    return await in_time(_get(session, filesystem.encode_url(path), options), first_byte_s)


async def _get(session: Any, url: Any, options: dict[str, Any]) -> Any:
    return await session.get(url, **options)


async def ask_web(
    filesystem: Any, path: str, range_header: str, most: int, out: memoryview | None = None
) -> Answer:
    """The same as `ask_s3` of a file of a web server; a server without ranges sends all of it."""
    async with await open_web(filesystem, path, range_header) as response:
        if response.status != 416:  # that one has a meaning of its own to us
            filesystem._raise_not_found_for_status(response, path)
        response.raise_for_status()
        is_encoded(response)
        told = response.headers.get("Content-Range") if response.status == 206 else None
        length = response.content_length
        bounds.check(length or 0, most)
        if told and out is not None and length == len(out):
            data = await _read_into(response.content.read, out)
            if len(data) < len(out):
                raise ConnectionError(f"the body ended after {len(data)} of {len(out)} bytes")
        else:
            data = await _read_all(response.content.read, most)
        start, size_bytes = parse_range(told) or (0, len(data))
        return Answer(start, data, Facts(size_bytes, web_version(response)))


async def _read_all(read: Callable[[int], Coroutine[Any, Any, bytes]], most: int) -> memoryview:
    """Read to the end; raises TooLargeError for more than `most` bytes."""
    data = bytearray()
    while part := await read(_PIECE_BYTES):
        data += part
        bounds.check(len(data), most)
    return memoryview(data)


async def _read_into(read: Callable[[int], Coroutine[Any, Any, bytes]], out: memoryview) -> memoryview:
    """Read until `out` is full, and past the end; what was read of it, `out` itself where that is all."""
    have = 0
    while part := await read(max(1, len(out) - have)):
        if have + len(part) > len(out):
            raise ConnectionError(f"more than the {len(out)} bytes that were announced came")
        out[have : have + len(part)] = part
        have += len(part)
    return out if have == len(out) else out[:have]


def web_version(response: Any) -> str:
    """What a web server says that tells this version of a file from others."""
    return str(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


def parse_range(content_range: str | None) -> tuple[int, int] | None:
    """The first byte of an answer and the size of the whole file; None where the server sends all of it."""
    match = _CONTENT_RANGE.match(content_range or "")
    return None if match is None else (int(match[1]), int(match[2]))


def is_encoded(response: Any) -> bool:
    """Whether a web server packed all of a file on its way, unasked: it is unpacked as it is read, to another length.

    Raises ValueError for a part of one: its bytes are not those of the file.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return False
    if response.status == 206:
        raise ValueError(
            f"a part of it came with Content-Encoding: {encoding[:40]}, which cannot be unpacked by itself; "
            "have the server send the file without this header"
        )
    return True
