"""Errors of the remote are translated once, without their secrets."""

from __future__ import annotations

import errno
import itertools
import random
import socket
from typing import Any

import aiohttp
import botocore.exceptions as boto
import multidict
import pytest
import yarl
from fsspec.exceptions import FSTimeoutError
from hypothesis import given
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from cachestream.errors import ConfigError, SampleError, SourceError, SourceUnavailableError
from cachestream.transport.remote_errors import backoff_delays, map_errors, redact, redact_text


def client_error(code: str, status: int = 400) -> Exception:
    error: Exception = boto.ClientError(
        {"Error": {"Code": code, "Message": "as asked"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "GetObject",
    )
    return error


def http_error(status: int) -> Exception:
    url = yarl.URL("https://host/a?sig=CANARY")
    info = aiohttp.RequestInfo(url, "GET", multidict.CIMultiDictProxy(multidict.CIMultiDict()), url)
    return aiohttp.ClientResponseError(info, (), status=status, message="as asked")


UNAVAILABLE = [
    client_error("SlowDown", 503),
    client_error("InternalError", 500),
    client_error("RequestTimeout"),
    client_error("SomethingNew", 503),
    translate_boto_error(client_error("SlowDown", 503)),
    translate_boto_error(client_error("503", 503)),
    http_error(429),
    http_error(503),
    boto.EndpointConnectionError(endpoint_url="http://x"),
    boto.ConnectTimeoutError(endpoint_url="http://x"),
    boto.ReadTimeoutError(endpoint_url="http://x"),
    boto.ResponseStreamingError(error=OSError("cut")),
    boto.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    aiohttp.ClientPayloadError("cut"),
    aiohttp.ServerDisconnectedError(),
    FSTimeoutError(),
    TimeoutError(),
    ConnectionResetError(),
    ConnectionRefusedError(),
    socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution"),
    OSError(errno.ESTALE, "stale file handle"),
    OSError(errno.ENETUNREACH, "network is unreachable"),
]


@pytest.mark.parametrize("one_of_many", [False, True])
@pytest.mark.parametrize("error", UNAVAILABLE, ids=lambda e: f"{type(e).__name__}-{str(e)[:30]}")
def test_what_passes_by_itself_is_unavailable(error: Exception, one_of_many: bool) -> None:
    with (
        pytest.raises(SourceUnavailableError, match="s3://b/k"),
        map_errors("s3://b/k", one_of_many=one_of_many),
    ):
        raise error


@pytest.mark.parametrize(
    ("error", "next_step"),
    [
        (client_error("NoSuchKey", 404), "check the path"),
        (FileNotFoundError("b/k"), "check the path"),
        (http_error(404), "check the path"),
        (client_error("AccessDenied", 403), "may list and read"),
        (translate_boto_error(client_error("403", 403)), "may list and read"),
        (PermissionError(errno.EACCES, "denied"), "permissions"),
        (OSError(errno.EIO, "bad sector"), "cannot be read"),
        (ValueError("odd"), "ValueError: odd"),
    ],
    ids=str,
)
def test_what_one_object_lacks_fails_that_object_alone(error: Exception, next_step: str) -> None:
    with pytest.raises(SourceError, match=next_step) as caught, map_errors("s3://b/k"):
        raise error
    assert type(caught.value) is SourceError
    with pytest.raises(SampleError, match=next_step), map_errors("s3://b/k", one_of_many=True):
        raise error


@pytest.mark.parametrize(
    ("error", "next_step"),
    [
        (client_error("NoSuchBucket", 404), "no such bucket"),
        (FileNotFoundError("The specified bucket does not exist"), "no such bucket"),
        (client_error("PermanentRedirect", 301), "region"),
        (client_error("InvalidAccessKeyId", 403), "storage_options"),
        (client_error("SignatureDoesNotMatch", 403), "storage_options"),
        (translate_boto_error(client_error("ExpiredToken", 400)), "storage_options"),
        (boto.NoCredentialsError(), "AWS_ACCESS_KEY_ID"),
        (boto.ProfileNotFound(profile="p"), "credentials"),
    ],
    ids=str,
)
def test_what_all_objects_lack_fails_the_source(error: Exception, next_step: str) -> None:
    with pytest.raises(SourceError, match=next_step) as caught, map_errors("s3://b/k", one_of_many=True):
        raise error
    assert type(caught.value) is SourceError


def test_our_own_errors_pass_unchanged() -> None:
    mine = ConfigError("mine")
    with pytest.raises(ConfigError) as caught, map_errors("x"):
        raise mine
    assert caught.value is mine


def test_the_original_error_is_not_shown_beside_ours() -> None:
    with pytest.raises(SourceError) as caught, map_errors("x", secrets=["CANARY"]):
        raise OSError("at https://user:CANARY@host/a?sig=CANARY2 with token=CANARY3, CANARY")
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None
    assert "CANARY" not in str(caught.value)
    assert "https://host/a" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://user:pw@host:8/dir/a.npy?X-Amz-Signature=s#frag", "https://host:8/dir/a.npy"),
        ("https://host/a?token", "https://host/a"),
        ("s3://bucket/dir/a?.npy", "s3://bucket/dir/a?.npy"),
        ("s3://bucket/a.npy?versionId=7", "s3://bucket/a.npy"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("s3://bucket/photo@2x.png", "s3://bucket/photo@2x.png"),
        ("sftp://me@host/x", "sftp://host/x"),
        ("zip://*.npy::https://u:p@h/a.zip?sig=1", "zip://*.npy::https://h/a.zip"),
        ("/local/what?.npy", "/local/what?.npy"),
        ("relative/user@home", "relative/user@home"),
    ],
)
def test_redact_strips_user_info_and_query_and_leaves_the_rest(url: str, expected: Any) -> None:
    assert redact(url) == expected
    assert redact(expected) == expected


@pytest.mark.e2e
@given(st.text("abc/?=&@:", max_size=20), st.sampled_from(["https", "s3", "ftp"]))
def test_no_user_info_survives_redaction(rest: str, scheme: str) -> None:
    assert "CANARY" not in redact(f"{scheme}://user:CANARY@host/{rest}")
    assert "CANARY" not in redact_text(f"failed: '{scheme}://user:CANARY@host/' twice")


def test_back_off_is_jittered_and_its_bound_doubles_from_half_a_second_to_a_minute() -> None:
    class Highest:
        def uniform(self, low: float, high: float, /) -> float:
            assert low == 0
            return high

    bounds = list(itertools.islice(backoff_delays(Highest()), 10))
    assert bounds == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    drawn = list(itertools.islice(backoff_delays(random.Random(0)), 200))
    assert all(0 <= delay <= bound for delay, bound in zip(drawn, bounds, strict=False))
    assert 20 < sum(drawn[10:]) / 190 < 40
