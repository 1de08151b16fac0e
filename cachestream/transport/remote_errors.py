"""Translation of the errors of all drivers into the three classes that a caller can react to.

Drivers (s3fs, gcsfs, aiohttp, …) are never imported here: their errors are classified by the service's error
code, the HTTP status, the errno, or the name of the class.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal, Protocol, TypeVar

from cachestream.errors import CacheStreamError, SampleError, SourceError, SourceUnavailableError
from cachestream.transport import metering
from cachestream.transport.object_limit import TooLargeError

Kind = Literal[
    "missing", "denied", "credentials", "bucket", "clock", "unavailable", "range", "changed", "other"
]

T = TypeVar("T")

ATTEMPTS: Final = 4  # of `patiently`
BACKOFF_START_S: Final = 0.5
BACKOFF_LIMIT_S: Final = 60.0

# With these codes a remote asks for fewer requests.
_THROTTLED: Final = (
    "BandwidthLimitExceeded", "RequestLimitExceeded", "RequestThrottled", "RequestThrottledException",
    "ServerBusy", "ServiceUnavailable", "SlowDown", "ThrottledException", "Throttling", "ThrottlingException",
    "TooManyRequests", "TooManyRequestsException", "429", "503",
)  # fmt: skip
# The codes of services and the statuses of HTTP, by the kind of failure. What passes by itself is asked for
# again for as long as it takes (`_TRANSIENT`); all others are final, for one object or for the whole source.
_KIND_CODES: Final[dict[Kind, tuple[str, ...]]] = {
    "missing": ("NoSuchKey", "NoSuchVersion", "404", "410"),
    "denied": (
        "AccessDenied", "AllAccessDisabled", "InvalidObjectState", "InvalidPayer", "402", "403", "407", "451",
    ),
    "credentials": (
        "AccountProblem", "AuthorizationHeaderMalformed", "CredentialsNotSupported", "ExpiredToken",
        "ExpiredTokenException", "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken",
        "MissingSecurityHeader", "NotSignedUp", "SignatureDoesNotMatch", "TokenRefreshRequired",
        "UnrecognizedClientException", "401",
    ),
    "clock": ("RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"),
    "bucket": (
        "IllegalLocationConstraintException", "InvalidBucketName", "NoSuchBucket", "PermanentRedirect", "301",
    ),
    "unavailable": (
        *_THROTTLED, "ConditionalRequestConflict", "InternalError", "InternalFailure", "OperationAborted",
        "OperationTimedOut", "PriorRequestNotComplete", "RequestTimeout", "RequestTimeoutException",
        "408", "421", "423", "425", "500", "502", "504",
    ),
    "range": ("InvalidRange", "416"),
    "changed": ("PreconditionFailed", "412"),
    "other": ("NotImplemented", "501", "505"),
}  # fmt: skip
_TRANSIENT: Final = ("clock", "unavailable", "changed")
_CODES: Final = {code: kind for kind, codes in _KIND_CODES.items() for code in codes}
_KIND_CLASSES: Final[dict[Kind, tuple[str, ...]]] = {
    "credentials": (
        "ClientAuthenticationError", "CredentialRetrievalError", "DefaultCredentialsError",
        "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError",
        "TokenRetrievalError", "UnauthorizedSSOTokenError",
    ),
    "bucket": ("InvalidRegionError", "NoRegionError", "ParamValidationError"),
    "other": (
        "CertificateError", "ClientConnectorCertificateError", "LocalProtocolError",
        "SSLCertVerificationError", "UnsupportedProtocol",
    ),
    "unavailable": (
        "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "EndpointConnectionError",
        "FSTimeoutError", "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ReadTimeout",
        "ResponseParserError", "ResponseStreamingError", "ServiceRequestError", "ServiceResponseError",
        "TimeoutError", "TransportError", "ConnectionError", "gaierror", "NoValidConnectionsError",
        "SSHException",
    ),
    "missing": ("FileNotFoundError", "NotADirectoryError", "IsADirectoryError"),
    "denied": ("PermissionError", "AuthenticationException"),
}  # fmt: skip
_CLASSES: Final = {name: kind for kind, names in _KIND_CLASSES.items() for name in names}
_UNAVAILABLE_ERRNOS: Final = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN,
     errno.EHOSTUNREACH, errno.EMFILE, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENFILE,
     errno.ENOMEM, errno.ENOTCONN, errno.EPIPE, errno.ESTALE, errno.ETIMEDOUT}
)  # fmt: skip
_NEXT_STEPS: Final[dict[Kind, str]] = {
    "missing": "not found; check the path",
    "denied": "access denied; check the file's permissions, or that these credentials may list and read it",
    "credentials": (
        "no valid credentials; give storage_options={'key': …, 'secret': …} ({'anon': True} for public data), "
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or fill ~/.aws/credentials"
    ),
    "clock": "the remote says that the clock of this machine is wrong; set it (by NTP, say), and reading goes on",
    "bucket": "no such bucket here; check its name, and region and endpoint_url in storage_options",
    "unavailable": "the remote does not answer at present; check the network and the endpoint",
    "range": "the object is shorter than expected",
    "changed": "the object was overwritten while it was read",
    "other": "cannot be read",
}


class ChangedError(OSError):
    """The object was replaced since its first bytes were read."""

    status = 412


class _Uniform(Protocol):
    def uniform(self, low: float, high: float, /) -> float: ...


def backoff_delays(rng: _Uniform) -> Iterator[float]:
    """Yield the seconds to wait before each retry, without end: full jitter, 0.5 s doubling up to 60 s.

    (Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.)
    """
    limit_s = BACKOFF_START_S
    while True:
        yield float(rng.uniform(0.0, limit_s))
        limit_s = min(2 * limit_s, BACKOFF_LIMIT_S)


def patiently(look: Callable[[], T]) -> T:
    """Call `look` and return its result; try up to `ATTEMPTS` times while the remote is unavailable."""
    delays = backoff_delays(random)
    for _ in range(ATTEMPTS - 1):
        try:
            return look()
        except Exception as error:
            if classify_and_report(error) != "unavailable":
                raise
        metering.wait(next(delays))
    return look()


_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://([^/?#]*)(.*)", re.DOTALL)
_URL_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s'\"<>]+")
_SECRET_IN_TEXT: Final = re.compile(
    r"(?i)\b([\w\-]*(?:signature|secret|token|passw(?:or)?d|credential|api[_-]?key|access[_-]?key))\b(\W{0,3}[=:]\s*)"
    r"['\"]?(?!…)[^\s'\"&,)}]+"  # not the dots of our own advice
)
# Query parameters of the signed URLs of S3, Google, Azure, CloudFront and others.
_SIGNING_PART: Final = re.compile(
    r"(?i)(x-(amz|goog|oss|cos|ms|obs)-[\w-]*|[\w-]*(signature|token|secret|passw(or)?d|credential|api[_-]?key|accesskeyid|accessid)"
    r"|s(ig|e|t|p|v|r|pr|ks|kv|ke|kt|koid|ktid)|expires?|policy|key-pair-id|auth(orization)?)="
)


def redact(url: str) -> str:
    """Return `url` without user-info and query, in each part of a chained URL; a plain path is unchanged."""
    return "::".join(map(_redact_one, url.split("::")))


def _redact_one(url: str) -> str:
    match = _URL.fullmatch(url)
    if match is None:
        return url
    scheme, authority, rest = match.groups()
    query = rest.find("?")
    # In URLs of other schemes "?" may be a wildcard, with no "=" after it.
    if query >= 0 and (scheme.lower() in ("http", "https") or "=" in rest[query:]):
        rest = rest[:query]
    if scheme.lower() in ("http", "https"):
        rest = rest.partition("#")[0]
    return f"{scheme}://{authority.rpartition('@')[2]}{rest}"


def public_name(name: str) -> str:
    """Return the name of a file on the web, a URL or the end of one, without user-info and query.

    The parameters of a query that do not belong to a signature may name the object: their digest is kept.
    """
    path, _, query = name.partition("?")
    named = "&".join(part for part in query.split("&") if part and not _SIGNING_PART.match(part))
    digest = f"?{hashlib.blake2b(named.encode('utf-8', 'surrogateescape'), digest_size=8).hexdigest()}"
    return redact(path) + (digest if named else "")


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with redacted URLs, and with `secrets` and whatever looks like a secret masked."""
    text = _URL_IN_TEXT.sub(lambda match: redact(match[0]), text)
    text = _SECRET_IN_TEXT.sub(r"\1\2***", text)
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _code(error: BaseException) -> str | None:
    """Return the service's own code of `error`, from botocore's response, or the HTTP status."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        if code in _CODES:
            return str(code)
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return str(status) if status is not None else str(code)
    places = [(error, "status"), (error, "code"), (error, "status_code")]  # aiohttp, gcsfs, azure
    for place, name in (*places, (response, "status_code")):  # httpx, requests
        value = getattr(place, name, None)
        if isinstance(value, int | str) and str(value).isdecimal():
            return str(value)
    return None


def _asks_to_come_again(error: BaseException) -> bool:
    """Return whether a refusal says when to try again: a limit on requests, as 403 of some services."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    return isinstance(headers, Mapping) and any(str(name).lower() == "retry-after" for name in headers)


def _classify_one(error: BaseException) -> Kind | None:
    code = _code(error)
    if code in ("403", "AccessDenied") and _asks_to_come_again(error):
        return "unavailable"
    if code in _CODES:
        return _CODES[code]
    if code is not None and code.isdecimal() and int(code) >= 500:
        return "unavailable"
    for base in type(error).__mro__:
        if base.__name__ in _CLASSES:
            return _CLASSES[base.__name__]
    if isinstance(error, OSError) and error.errno in _UNAVAILABLE_ERRNOS:
        return "unavailable"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that drivers chained to `error`, the nearest first."""
    cause = error.__cause__
    for _ in range(8):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def classify(error: BaseException) -> Kind:
    """Return the kind of failure of `error`; a cause that a driver chained to it takes precedence."""
    for cause in _causes(error):
        is_conclusive = _code(cause) is not None or _CLASSES.get(type(cause).__name__) == "other"
        kind = _classify_one(cause) if is_conclusive else None
        if kind is not None:
            return kind
    if "bucket does not exist" in str(error):  # s3fs drops the error code when it looks up a path
        return "bucket"
    return _classify_one(error) or "other"


def classify_and_report(error: BaseException) -> Kind:
    """Return the kind of failure of `error`; report to `metering` that a remote asks for fewer requests."""
    kind = classify(error)
    if kind == "unavailable" and any(_code(one) in _THROTTLED for one in (error, *_causes(error))):
        metering.slow_down()
    return kind


@contextlib.contextmanager
def map_errors(what: str, *, one_of_many: bool = False, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Translate any error raised inside into one of ours; its message begins with `what`, already redacted.

    Transient errors (throttling, timeouts, resets, DNS, refused connections, broken bodies) become
    SourceUnavailableError, all others SourceError. With `one_of_many`, an object that is missing, forbidden
    or unreadable by itself is a SampleError; bad credentials and a missing bucket remain SourceErrors, since
    they hold for all objects. The original error is not attached, not even as the context: its text may hold
    a signed URL.
    """
    try:
        yield
    except CacheStreamError as error:
        error.__cause__ = error.__context__ = None
        raise
    except Exception as error:  # noqa: BLE001  drivers have no narrower base class in common
        mapped = _mapped(error, what, one_of_many, secrets)
        try:
            raise mapped from None
        finally:
            mapped.__context__ = None


def _mapped(error: Exception, what: str, one_of_many: bool, secrets: Iterable[str]) -> SourceError:
    if isinstance(error, TooLargeError):
        return SampleError(f"{what}: {error}")
    kind = classify_and_report(error)
    reason = redact_text(f"{type(error).__name__}: {error}", secrets)[:500]
    message = f"{what}: {_NEXT_STEPS[kind]} ({reason})"
    if kind in _TRANSIENT:
        return SourceUnavailableError(message)
    if one_of_many and kind not in ("credentials", "bucket"):
        return SampleError(message)
    return SourceError(message)
