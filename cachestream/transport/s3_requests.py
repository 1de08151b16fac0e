"""GetObject requests to S3 at a quarter of the processor time of the client's own.

botocore spends more than a millisecond of Python on composing, signing and parsing a request, which limits a
process that reads small parts. Here the client composes the first request to a bucket. The next ones follow
its pattern, have a signature of botocore's with the client's credentials, and are sent through the client's
connections. If an answer may be due to the pattern (a redirect, a refusal), the client makes the request.
"""

from __future__ import annotations

import contextvars
import hashlib
import logging
import re
import weakref
from dataclasses import dataclass
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import quote, urlsplit

logger = logging.getLogger("cachestream")

MAX_STRIKES: Final = 3  # requests in a row that the pattern failed with and the client did not
_EVENT: Final = "before-sign.s3.GetObject"
_SIGNATURE: Final = "s3v4"
_NO_BODY: Final = hashlib.sha256(b"").hexdigest()
_REQUEST_HEADERS: Final = frozenset(  # these differ between requests, and belong to no pattern
    {"amz-sdk-invocation-id", "amz-sdk-request", "authorization", "if-match", "range", "traceparent", "tracestate",
     "x-amz-checksum-mode", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token", "x-amzn-trace-id"}
)  # fmt: skip
# After these answers the client makes the request.
_LEFT_TO_CLIENT: Final = frozenset({301, 302, 303, 307, 308, 400, 401, 403})
_CODE: Final = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,1000})</Message>")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A request for an object as the client composed it; the URL is `before`, the encoded key, and `after`.

    `signed` are the headers that the signature covers, with lower-case names; `query` is that of the URL,
    sorted.
    """

    before: str
    after: str
    headers: tuple[tuple[str, str], ...]
    signing_name: str | None  # None: requests are not signed
    region_name: str
    signed: tuple[tuple[str, str], ...]
    query: str


@dataclass(slots=True)
class _Bucket:
    """The pattern of the requests to a bucket, and how often it failed."""

    pattern: _Pattern | None = None
    strikes: int = 0


# The bucket and the key of a request that a client composes.
_composing: contextvars.ContextVar[tuple[_Bucket, str] | None] = contextvars.ContextVar(
    "_composing", default=None
)
# By client, which holds the credentials, the region and the connections.
_buckets: Final[weakref.WeakKeyDictionary[Any, dict[str, _Bucket]]] = weakref.WeakKeyDictionary()


def target_of(filesystem: Any, path: str) -> dict[str, str]:
    """Return the arguments that name an object in requests to S3."""
    bucket, key, version = filesystem.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


async def get_object(filesystem: Any, target: dict[str, str], **wanted: str) -> dict[str, Any]:
    """Return the answer of GetObject: "Body", to be read and closed, and "ResponseMetadata".

    `target` comes from `target_of`; `wanted` may hold Range. Awaited on the loop of `filesystem`.
    Raises the errors of s3fs.
    """
    found: dict[str, Any]
    if "VersionId" in target:
        found = await filesystem._call_s3("get_object", **target, **wanted)
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
            answer = await _get(client, bucket.pattern, target["Key"], wanted)
        except (AttributeError, TypeError):
            # Another release of the client: its internals that are used here are no public interface.
            logger.debug("requests to %s are left to the client", target["Bucket"], exc_info=True)
            answer, bucket.strikes = None, MAX_STRIKES
        if answer is not None:
            bucket.strikes = 0
            return answer
        failed = True
    bucket.pattern = None
    token = _composing.set((bucket, target["Key"]))
    try:
        found = await filesystem._call_s3("get_object", **target, **wanted)
    finally:
        _composing.reset(token)
    bucket.strikes += failed
    return found


# --- the first request -------------------------------------------------------------------------


def _keep_pattern(
    request: Any, signing_name: str, region_name: str, signature_version: Any, **_: Any
) -> None:
    """Keep the pattern of a request that the client is about to sign."""
    import botocore
    from botocore.auth import SigV4Auth

    composing = _composing.get()
    if composing is None:
        return
    bucket, wanted_key = composing
    signing = request.context.get("signing", {})
    before, key, after = request.url.partition("/" + _encoded(wanted_key))
    is_signed = signature_version is not botocore.UNSIGNED
    usual = signature_version == _SIGNATURE and not {"identity_cache", "request_credentials"} & signing.keys()
    if not key or (after and not after.startswith("?")) or (is_signed and not usual):
        return
    try:
        signer = SigV4Auth(None, signing_name, region_name)
        signed, query = _lasting(signer.headers_to_sign(request)), signer.canonical_query_string(request)
    except (AttributeError, TypeError):  # another release of the client
        logger.debug("requests like %s are left to the client", before, exc_info=True)
        return
    bucket.pattern = _Pattern(
        before + "/",
        after,
        _lasting(request.headers),
        (signing.get("signing_name") or signing_name) if is_signed else None,
        signing.get("region") or region_name,
        signed,
        query,
    )


def _lasting(headers: Any) -> tuple[tuple[str, str], ...]:
    """Return the headers that are the same in each request."""
    return tuple(
        (name, _text(value)) for name, value in headers.items() if name.lower() not in _REQUEST_HEADERS
    )


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _encoded(key: str) -> str:
    """Return `key` quoted for a URL as botocore does it."""
    return quote(key.encode(), safe="/~")


# --- the next requests --------------------------------------------------------------------------------


async def _get(client: Any, pattern: _Pattern, key: str, wanted: dict[str, str]) -> dict[str, Any] | None:
    """Make a request after `pattern`; return the answer, or None if the client should make the request."""
    from botocore.awsrequest import AWSPreparedRequest

    headers = {**dict(pattern.headers), **wanted}
    before = pattern.before + _encoded(key)
    if pattern.signing_name is not None:
        signer = await client._request_signer.get_auth_instance(
            pattern.signing_name, pattern.region_name, _SIGNATURE
        )
        headers.update(_signature(signer, pattern, urlsplit(before).path, wanted, datetime.now(timezone.utc)))
    request = AWSPreparedRequest("GET", before + pattern.after, headers, None, True)
    answer = await client._endpoint.http_session.send(request)
    status = answer.status_code
    if status in (200, 206):
        return {
            "Body": SimpleNamespace(read=answer.raw.content.read, close=answer.raw.close),
            "ResponseMetadata": {"HTTPStatusCode": answer.status_code, "HTTPHeaders": answer.headers},
        }
    try:
        text = (await answer.raw.read()).decode("utf-8", "replace")
    finally:
        answer.raw.close()
    if status in _LEFT_TO_CLIENT:
        return None
    raise _error(status, text)


def _signature(
    signer: Any, pattern: _Pattern, path: str, wanted: dict[str, str], now: datetime
) -> dict[str, str]:
    """Return the headers that sign a request for `path` with the headers `wanted`.

    They are those of botocore's `add_auth`, which composes the canonical request in 130 µs.
    (AWS, "Create a signed AWS API request", Signature Version 4.)
    """
    timestamp = now.strftime("%Y%m%dT%H%M%SZ")
    own = {"X-Amz-Date": timestamp, "X-Amz-Content-SHA256": _NO_BODY}
    if signer.credentials.token:
        own["X-Amz-Security-Token"] = signer.credentials.token
    covered = dict(pattern.signed)
    covered.update((name.lower(), value) for name, value in (*wanted.items(), *own.items()))
    names = sorted(covered)
    lines = (f"{name}:{' '.join(covered[name].split())}" for name in names)
    signed = ";".join(names)
    canonical = "\n".join(("GET", path, pattern.query, *lines, "", signed, _NO_BODY))
    request = SimpleNamespace(context={"timestamp": timestamp})
    signature = signer.signature(signer.string_to_sign(request, canonical), request)
    credential = f"AWS4-HMAC-SHA256 Credential={signer.scope(request)}"
    return {**own, "Authorization": f"{credential}, SignedHeaders={signed}, Signature={signature}"}


def _error(status: int, text: str) -> Exception:
    """Return the error that s3fs raises for an answer of this status and body."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    code, message = _CODE.search(text), _MESSAGE.search(text)
    details = {"Code": code[1] if code else str(status), **({"Message": message[1]} if message else {})}
    found: Exception = translate_boto_error(
        ClientError({"Error": details, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")
    )
    return found
