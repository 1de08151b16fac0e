"""One request for a part of an object, and what its answer tells of the whole: S3, and web servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from cachestream.remote.s3 import get_object
from cachestream.remote.versions import s3_target

__all__ = ["Answer", "Facts", "ask_s3", "ask_web"]

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class Facts:
    """The size of one version of a file, and what tells that version from others."""

    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes from `start` on, and what the server says of the whole file (None: nothing)."""

    start: int
    data: bytes
    facts: Facts | None


async def ask_s3(filesystem: Any, path: str, range_header: str) -> Answer:
    """The bytes of `range_header` ("bytes=0-99"; "": all) of an object. Raises the driver's errors."""
    wanted = {"Range": range_header} if range_header else {}
    answer = await get_object(filesystem, s3_target(filesystem, path), **wanted)
    body = answer["Body"]
    try:
        data = await body.read()
    finally:
        body.close()
    if len(data) < int(answer["ContentLength"]):
        raise ConnectionError(f"the body ended after {len(data)} of {answer['ContentLength']} bytes")
    return _answer(data, answer.get("ContentRange"), str(answer.get("ETag", "")))


async def ask_web(filesystem: Any, path: str, range_header: str) -> Answer:
    """The same of a file of a web server; a server without ranges sends all of it."""
    session = await filesystem.set_session()
    options = dict(filesystem.kwargs)
    wanted = {"Range": range_header} if range_header else {}
    options["headers"] = {**options.get("headers", {}), **wanted, "Accept-Encoding": "identity"}
    async with session.get(filesystem.encode_url(path), **options) as response:
        if response.status != 416:  # that one has a meaning of its own to us
            filesystem._raise_not_found_for_status(response, path)
        response.raise_for_status()
        data = await response.read()
        version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        content_range = response.headers.get("Content-Range") if response.status == 206 else None
    return _answer(data, content_range, version)


def _answer(data: bytes, content_range: str | None, version: str) -> Answer:
    match = _CONTENT_RANGE.match(content_range or "")
    if match is None:
        return Answer(0, data, Facts(len(data), version))
    return Answer(int(match[1]), data, Facts(int(match[2]), version))
