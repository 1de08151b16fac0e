"""One request for a part of an object of S3 or of a web server; the version and the size in its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from cachestream.transport import bounds, metering
from cachestream.transport.remote import CONNECT_S, FIRST_BYTE_S, STALL_S, in_time
from cachestream.transport.remote_errors import ChangedError
from cachestream.transport.s3_requests import get_object
from cachestream.transport.stream import PIECE_BYTES

Span = tuple[int, int]  # a part of a file: its first byte, and the byte after its last one

# The entries of a driver's `info` that tell versions of an object apart.
_VERSION_NAMES: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "size", "mtime", "LastModified",
)  # fmt: skip
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+)")


def s3_target(filesystem: Any, path: str) -> dict[str, str]:
    """Return the arguments that name an object in requests to S3."""
    bucket, key, version = filesystem.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


@dataclass(frozen=True, slots=True)
class Facts:
    """The size of one version of a file (-1: unknown), and a text that differs for other versions."""

    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes from `start` on, and the facts of the whole file (None: the server did not send them)."""

    start: int
    data: bytes | memoryview
    facts: Facts | None


@dataclass(slots=True)
class Version:
    """The version of a file that is read, as in the first answer."""

    facts: Facts | None = None

    def check(self, facts: Facts) -> None:
        """Take the version from `facts` if it is not known yet. Raises ChangedError if it is another one."""
        if self.facts is None:
            self.facts = facts
        elif facts != self.facts:
            raise ChangedError(f"version {self.facts.version} became {facts.version}")

    def note(self, answer: Answer) -> None:
        """Report the bytes of `answer`, and check that it is of this version. Raises ChangedError."""
        metering.fetched(len(answer.data))
        if answer.facts is not None:
            self.check(answer.facts)


def facts_of_info(info: dict[str, Any]) -> Facts:
    """Return the facts in the `info` of a driver."""
    return Facts(int(info["size"]), "|".join(str(info[name]) for name in _VERSION_NAMES if name in info))


def facts_of_s3(answer: dict[str, Any]) -> tuple[int, Facts]:
    """Return the offset of the first byte in an answer of S3, and the facts of the whole object."""
    length = int(answer["ContentLength"])
    start, size_bytes = parse_range(answer.get("ContentRange")) or (0, length)
    return start, Facts(size_bytes, str(answer.get("ETag") or ""))


async def ask_s3(
    filesystem: Any, path: str, range_header: str, most: int, out: memoryview | None = None
) -> Answer:
    """Request the range `range_header` ("bytes=0-99"; "": all) of an object.

    If the server sends just the range, the bytes are read into `out`, which is of its size. Raises the
    driver's errors, and TooLargeError for an answer of more than `most` bytes.
    """
    wanted = {"Range": range_header} if range_header else {}
    answer = await get_object(filesystem, s3_target(filesystem, path), **wanted)
    body = answer["Body"]
    content_range, length = answer.get("ContentRange"), int(answer["ContentLength"])
    try:
        bounds.check(length, most)
        if content_range and out is not None and length == len(out):
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
    """Request the range `range_header` ("": all) of a web server; return the answer with its body unread."""
    import aiohttp

    session = await filesystem.set_session()
    options = dict(filesystem.kwargs)
    wanted = {"Range": range_header} if range_header else {}
    # In a compressed body, a range would mean other bytes.
    options["headers"] = {**options.get("headers", {}), **wanted, "Accept-Encoding": "identity"}
    first_byte_s: float | None = None
    if "timeout" not in options and "timeout" not in filesystem.client_kwargs:  # the user's own timeout wins
        options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALL_S)
        first_byte_s = FIRST_BYTE_S
    return await in_time(_get(session, filesystem.encode_url(path), options), first_byte_s)


async def _get(session: Any, url: Any, options: dict[str, Any]) -> Any:
    return await session.get(url, **options)


async def ask_web(
    filesystem: Any, path: str, range_header: str, most: int, out: memoryview | None = None
) -> Answer:
    """Request a range of a web server, as `ask_s3` does; a server without ranges sends the whole file."""
    async with await open_web(filesystem, path, range_header) as response:
        if response.status != 416:  # `classify` takes it for a range beyond the end
            filesystem._raise_not_found_for_status(response, path)
        response.raise_for_status()
        is_encoded(response)  # raises for a compressed range; aiohttp decompresses a whole file
        content_range = response.headers.get("Content-Range") if response.status == 206 else None
        length = response.content_length
        bounds.check(length or 0, most)
        if content_range and out is not None and length == len(out):
            data = await _read_into(response.content.read, out)
            if len(data) < len(out):
                raise ConnectionError(f"the body ended after {len(data)} of {len(out)} bytes")
        else:
            data = await _read_all(response.content.read, most)
        start, size_bytes = parse_range(content_range) or (0, len(data))
        return Answer(start, data, Facts(size_bytes, web_version(response)))


async def _read_all(read: Callable[[int], Coroutine[Any, Any, bytes]], most: int) -> memoryview:
    """Read to the end. Raises TooLargeError for more than `most` bytes."""
    data = bytearray()
    while part := await read(PIECE_BYTES):
        data += part
        bounds.check(len(data), most)
    return memoryview(data)


async def _read_into(read: Callable[[int], Coroutine[Any, Any, bytes]], out: memoryview) -> memoryview:
    """Read a body to its end into `out`; return `out` itself if it is full, else the part that was filled."""
    have = 0
    while part := await read(max(1, len(out) - have)):
        if have + len(part) > len(out):
            raise ConnectionError(f"more than the {len(out)} bytes that were announced came")
        out[have : have + len(part)] = part
        have += len(part)
    return out if have == len(out) else out[:have]


def web_version(response: Any) -> str:
    """Return the header that names the version of a file: the ETag, or the time of the last change."""
    return str(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


def parse_range(content_range: str | None) -> tuple[int, int] | None:
    """Return the offset of an answer's first byte and the size of the whole file; None without a range."""
    match = _CONTENT_RANGE.match(content_range or "")
    return None if match is None else (int(match[1]), int(match[2]))


def is_encoded(response: Any) -> bool:
    """Return whether a web server compressed a file unasked; aiohttp decompresses it, to another length.

    Raises ValueError for a compressed range, whose bytes are not those of the file.
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
