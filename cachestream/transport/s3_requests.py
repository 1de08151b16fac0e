"""Requests for objects of S3 that cost a third of what the client takes for one.

botocore composes, signs and parses for more than a millisecond of the interpreter a request, which is what binds
a process that reads small parts. So the client composes the first request to a bucket; the next ones are made after
its pattern, signed by botocore with the client's credentials, and sent through the client's connections. Whatever the
server answers with that may be due to the pattern (a redirect, a refusal), the client is asked for in its own way.
"""

from __future__ import annotations

import contextvars
import logging
import re
import weakref
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from cachestream.transport.remote import FIRST_BYTE_S, STALL_S, in_time

logger = logging.getLogger("cachestream")

MAX_STRIKES: Final = 3  # in a row: answers that only the client got
_EVENT: Final = "before-sign.s3.GetObject"
_SIGNATURE: Final = "s3v4"
_REQUEST_HEADERS: Final = frozenset(  # of each request
    {"amz-sdk-invocation-id", "amz-sdk-request", "authorization", "if-match", "range", "traceparent", "tracestate",
     "x-amz-checksum-mode", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token", "x-amzn-trace-id"}
)  # fmt: skip
_LEFT_TO_CLIENT: Final = frozenset({301, 302, 303, 307, 308, 400, 401, 403})
_CODE: Final = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,1000})</Message>")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A request for an object as the client composed it: its URL is the key between `before` and `after`."""

    before: str
    after: str
    headers: tuple[tuple[str, str], ...]
    signing_name: str | None  # None: requests are not signed
    region_name: str

    def url(self, key: str) -> str:
        return f"{self.before}{_encoded(key)}{self.after}"


@dataclass(slots=True)
class _Bucket:
    """What is known of the requests to a bucket."""

    pattern: _Pattern | None = None
    strikes: int = 0


@dataclass(slots=True)
class _ComposedRequest:
    """The request that is being composed by a client; `pattern` is what it became."""

    key: str
    pattern: _Pattern | None = field(default=None)


_composed: contextvars.ContextVar[_ComposedRequest | None] = contextvars.ContextVar("_composed", default=None)
# By client: it holds the credentials, the region and the connections.
_buckets: Final[weakref.WeakKeyDictionary[Any, dict[str, _Bucket]]] = weakref.WeakKeyDictionary()


async def get_object(filesystem: Any, target: dict[str, str], **wanted: str) -> dict[str, Any]:
    """The answer of S3's GetObject: "Body", to be read and closed, "ContentLength", "ContentRange", "ETag".

    `target` as of `s3_target`; `wanted` may hold Range and IfMatch. Awaited on the loop of `filesystem`.
    Raises the errors of s3fs.
    """
    if "VersionId" in target or not wanted.keys() <= {"Range", "IfMatch"}:
        found: dict[str, Any] = await in_time(
            filesystem._call_s3("get_object", **target, **wanted), _first_byte_s(filesystem)
        )
        return found
    await filesystem.set_session()
    client = await filesystem.get_s3(target["Bucket"])
    if client not in _buckets:
        _buckets[client] = {}
        client.meta.events.register_last(_EVENT, _keep_pattern)
    bucket = _buckets[client].setdefault(target["Bucket"], _Bucket())
    failed = False
    if bucket.pattern is not None and bucket.strikes < MAX_STRIKES:
        try:
            asking = _get(client, bucket.pattern, target["Key"], wanted)
            answer = await in_time(asking, _first_byte_s(filesystem))
        except (
            AttributeError,
            TypeError,
        ):  # another release of the client: what is used of it is not promised
            logger.debug("requests to %s are left to the client", target["Bucket"], exc_info=True)
            answer, bucket.strikes = None, MAX_STRIKES
        if answer is not None:
            bucket.strikes = 0
            return answer
        failed = True
    composed = _ComposedRequest(target["Key"])
    token = _composed.set(composed)
    try:
        asking = filesystem._call_s3("get_object", **target, **wanted)
        found = await in_time(asking, _first_byte_s(filesystem))
    finally:
        _composed.reset(token)
    bucket.pattern = composed.pattern
    bucket.strikes += failed
    return found


def _first_byte_s(filesystem: Any) -> float:
    """The deadline for the first byte: the user's own, where one was given for reads."""
    read_s = float(filesystem.config_kwargs.get("read_timeout", STALL_S))
    return FIRST_BYTE_S if read_s == STALL_S else read_s


# --- the first request -------------------------------------------------------------------------


def _keep_pattern(
    request: Any, signing_name: str, region_name: str, signature_version: Any, **_: Any
) -> None:
    """Keep the pattern of a request that the client is about to sign."""
    import botocore

    composed = _composed.get()
    if composed is None:
        return
    signing = request.context.get("signing", {})
    before, key, after = request.url.partition("/" + _encoded(composed.key))
    is_signed = signature_version is not botocore.UNSIGNED
    usual = signature_version == _SIGNATURE and not {"identity_cache", "request_credentials"} & signing.keys()
    if not key or (after and not after.startswith("?")) or (is_signed and not usual):
        return
    headers = [(name, _text(value)) for name, value in request.headers.items()]
    composed.pattern = _Pattern(
        before + "/",
        after,
        tuple((name, value) for name, value in headers if name.lower() not in _REQUEST_HEADERS),
        (signing.get("signing_name") or signing_name) if is_signed else None,
        signing.get("region") or region_name,
    )


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _encoded(key: str) -> str:
    """`key` in a URL, as botocore has it."""
    return quote(key.encode(), safe="/~")


# --- the others --------------------------------------------------------------------------------


class _Body:
    """The bytes of an answer, with the interface of the client's bodies."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._content = response.content

    async def read(self, nbytes: int = -1) -> bytes:
        data: bytes = await self._content.read(nbytes)
        return data

    def close(self) -> None:
        self._response.close()


async def _get(client: Any, pattern: _Pattern, key: str, wanted: dict[str, str]) -> dict[str, Any] | None:
    """The answer to a request made after `pattern`; None where the client may have a better one."""
    from botocore.awsrequest import AWSRequest

    headers = dict(pattern.headers)
    if "Range" in wanted:
        headers["Range"] = wanted["Range"]
    if "IfMatch" in wanted:
        headers["If-Match"] = wanted["IfMatch"]
    request = AWSRequest("GET", pattern.url(key), headers, stream_output=True)
    if pattern.signing_name is not None:
        signer = await client._request_signer.get_auth_instance(
            pattern.signing_name, pattern.region_name, _SIGNATURE
        )
        signer.add_auth(request)
    answer = await client._endpoint.http_session.send(request.prepare())
    status, told = answer.status_code, answer.headers
    if status in (200, 206):
        return {
            "Body": _Body(answer.raw),
            "ContentLength": int(told["content-length"]),
            "ContentRange": told.get("content-range"),
            "ETag": told.get("etag"),
        }
    try:
        text = (await answer.raw.read()).decode("utf-8", "replace")
    finally:
        answer.raw.close()
    if status in _LEFT_TO_CLIENT:
        return None
    raise _error(status, text)


def _error(status: int, text: str) -> Exception:
    """What s3fs raises for an answer with this status and this body."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    code, message = _CODE.search(text), _MESSAGE.search(text)
    told = {"Code": code[1] if code else str(status), **({"Message": message[1]} if message else {})}
    found: Exception = translate_boto_error(
        ClientError({"Error": told, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")
    )
    return found
