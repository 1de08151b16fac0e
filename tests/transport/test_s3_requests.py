"""Requests after the client's pattern, compared with its own on an S3 server that checks signatures."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Coroutine
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import botocore.auth
import numpy as np
import pytest
from aiobotocore.session import AioSession
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from cachestream.transport import s3_requests
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import classify
from cachestream.transport.s3_requests import get_object, target_of
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

T = TypeVar("T")
TIMEOUT_S: Final = 60.0
DATA: Final = np.random.default_rng(0).bytes(200_000)


class Bucket:
    """A bucket, read through its own filesystem; `composed` counts the requests that the client composed."""

    def __init__(self, url: str, **options: Any) -> None:
        self.name = url.removeprefix("s3://")
        # A busy machine may answer later than the deadline for a server.
        patient = {"connect_timeout": TIMEOUT_S, "read_timeout": TIMEOUT_S}
        self.filesystem = Remote(url, {**options, "config_kwargs": patient}).driver().filesystem
        self.composed = 0
        self.client.meta.events.register_last("before-sign.s3.GetObject", self._count)

    def _count(self, **_: Any) -> None:
        self.composed += 1

    @property
    def client(self) -> Any:
        return self.filesystem.s3

    @property
    def known(self) -> Any:
        """The state of the requests to this bucket."""
        return s3_requests._buckets[self.client][self.name]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.filesystem.loop).result(TIMEOUT_S)

    def get(self, key: str, **wanted: str) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes of an object, and the headers of the answer."""

        async def get() -> tuple[bytes, dict[str, Any]]:
            target = target_of(self.filesystem, f"{self.name}/{key}")
            answer = await get_object(self.filesystem, target, **wanted)
            data = bytearray()
            try:
                while part := await answer["Body"].read(70_000):
                    data += part
            finally:
                answer["Body"].close()
            return bytes(data), answer["ResponseMetadata"]["HTTPHeaders"]

        return self.run(get())


@pytest.fixture
def bucket(s3_server: S3Server, s3_bucket: Path) -> Bucket:
    (s3_bucket / "first").write_bytes(b"first")
    opened = Bucket(f"s3://{s3_bucket.name}", **s3_server.storage_options)
    assert opened.get("first")[0] == b"first"
    assert opened.composed == 1
    return opened


@pytest.mark.e2e
@pytest.mark.parametrize(
    "key",
    [
        "plain",
        "a/b/c.npy",
        "with space",
        "plus+and%20percent",
        "ünï/çödé",
        "q?x=1&y=2",
        "hash#tag",
        "~tilde'()*!",
        "a=b;c,d@e:$",
    ],
)
def test_objects_are_read_after_the_pattern_whatever_their_names(
    bucket: Bucket, s3_bucket: Path, key: str
) -> None:
    path = s3_bucket / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(DATA)
    data, told = bucket.get(key)
    assert data == DATA
    assert int(told["content-length"]) == len(DATA)
    etag = str(told["etag"])
    data, told = bucket.get(key, Range="bytes=1000-99999")
    assert data == DATA[1000:100_000]
    assert told["content-range"] == f"bytes 1000-99999/{len(DATA)}"
    assert told["etag"] == etag
    assert bucket.composed == 1


@pytest.mark.parametrize(
    ("key", "wanted", "kind"),
    [
        ("nothing", {}, "missing"),
        ("first", {"Range": "bytes=100-200"}, "range"),
    ],
)
def test_errors_are_those_of_the_client(bucket: Bucket, key: str, wanted: dict[str, str], kind: str) -> None:
    with pytest.raises(Exception) as ours:  # noqa: PT011
        bucket.get(key, **wanted)
    assert bucket.composed == 1
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        bucket.run(bucket.filesystem._call_s3("get_object", Bucket=bucket.name, Key=key, **wanted))
    assert classify(ours.value) == classify(theirs.value) == kind
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value).partition(" (")[0] == str(theirs.value).partition(" (")[0] != ""


@pytest.mark.e2e
def test_a_busy_server_is_one_for_either(s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path) -> None:
    (s3_bucket / "first").write_bytes(DATA)
    bucket = Bucket(f"s3://{s3_bucket.name}", **s3_server.options_through(s3_proxy.port))
    assert bucket.get("first")[0] == DATA
    s3_proxy.answer_busy(times=1)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        bucket.get("first")
    assert classify(caught.value) == "unavailable"
    assert bucket.get("first")[0] == DATA  # the fault was for one request
    s3_proxy.refuse()
    with pytest.raises(Exception) as refused:  # noqa: PT011
        bucket.get("first")
    assert classify(refused.value) == "unavailable"
    assert bucket.composed == 1


@pytest.mark.e2e
def test_a_body_that_breaks_is_an_error(s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path) -> None:
    (s3_bucket / "first").write_bytes(DATA)
    bucket = Bucket(f"s3://{s3_bucket.name}", **s3_server.options_through(s3_proxy.port))
    bucket.get("first")
    s3_proxy.truncate(times=1, after_bytes=50_000)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        bucket.get("first")
    assert classify(caught.value) == "unavailable"
    assert bucket.get("first")[0] == DATA


def test_where_the_pattern_does_not_do_the_client_is_asked_and_in_the_end_only_the_client(
    bucket: Bucket,
) -> None:
    for strike in range(1, 4):
        bucket.known.pattern = dataclasses.replace(bucket.known.pattern, signing_name=None)
        assert bucket.get("first")[0] == b"first"
        assert (bucket.composed, bucket.known.strikes) == (1 + strike, strike)
    assert bucket.known.pattern.signing_name is not None
    assert bucket.get("first")[0] == b"first"
    assert bucket.composed == 5


@pytest.mark.parametrize("missing", [AttributeError, TypeError])
def test_a_client_of_another_release_is_asked_in_its_own_way(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, missing: type[Exception]
) -> None:
    """The internals of the client that are used may have other names in its next release."""

    async def not_there(*_: Any) -> None:
        raise missing("http_session")

    monkeypatch.setattr(s3_requests, "_get", not_there)
    for asked in (2, 3):
        assert bucket.get("first")[0] == b"first"
        assert bucket.composed == asked
    assert bucket.known.strikes >= s3_requests.MAX_STRIKES


@pytest.mark.e2e
def test_a_release_that_signs_in_another_way_makes_all_requests(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.known.pattern = None
    monkeypatch.setattr(botocore.auth, "SigV4Auth", lambda *_: object())
    for asked in (2, 3):
        assert bucket.get("first")[0] == b"first"
        assert bucket.composed == asked


def test_a_pattern_that_does_again_has_no_strikes(bucket: Bucket) -> None:
    bucket.known.pattern = dataclasses.replace(bucket.known.pattern, signing_name=None)
    bucket.get("first")
    assert bucket.known.strikes == 1
    bucket.get("first")
    assert (bucket.composed, bucket.known.strikes) == (2, 0)


@pytest.mark.e2e
def test_what_is_denied_is_denied_by_the_client(s3_server: S3Server, bucket: Bucket) -> None:
    pattern = bucket.known.pattern
    denied = Bucket(f"s3://{bucket.name}", **{**s3_server.storage_options, "secret": "not the secret"})
    for tries in (1, 2):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            denied.get("first")
        assert classify(caught.value) in ("denied", "credentials")
        assert denied.composed == tries
        denied.known.pattern = pattern


def test_options_of_the_user_hold_for_every_request(s3_server: S3Server, s3_bucket: Path) -> None:
    (s3_bucket / "first").write_bytes(b"first")
    options = {**s3_server.storage_options, "s3_additional_kwargs": {"RequestPayer": "requester"}}
    bucket = Bucket(f"s3://{s3_bucket.name}", **options)
    bucket.get("first")
    assert dict(bucket.known.pattern.headers)["x-amz-request-payer"] == "requester"
    assert bucket.get("first")[0] == b"first"
    assert bucket.composed == 1


def test_a_version_of_an_object_is_asked_for_by_the_client(bucket: Bucket) -> None:
    calls: list[dict[str, Any]] = []

    async def call(name: str, **arguments: Any) -> dict[str, Any]:
        calls.append({"name": name, **arguments})
        return {"Body": None}

    bucket.filesystem._call_s3 = call
    target = {"Bucket": bucket.name, "Key": "first", "VersionId": "v1"}
    bucket.run(get_object(bucket.filesystem, target, Range="bytes=0-0"))
    assert calls == [{"name": "get_object", **target, "Range": "bytes=0-0"}]


def test_no_secret_is_in_what_is_known_of_a_bucket(bucket: Bucket, s3_server: S3Server) -> None:
    bucket.get("first")
    shown = repr(bucket.known)
    assert s3_server.secret not in shown
    assert "Signature" not in shown
    assert not {name.lower() for name, _ in bucket.known.pattern.headers} & {
        "authorization",
        "range",
        "if-match",
    }


@pytest.mark.e2e
def test_filesystems_share_the_descriptions_of_the_api_and_nothing_else(s3_server: S3Server) -> None:
    one, other = (Remote("s3://a", s3_server.storage_options).driver().filesystem for _ in range(2))
    assert one.session is not other.session
    assert one.session.get_component("data_loader") is other.session.get_component("data_loader")
    mine = AioSession()
    options = {**s3_server.storage_options, "session": mine}
    assert Remote("s3://a", options).driver().filesystem.session is mine


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_keys_are_encoded_as_botocore_does(key: str) -> None:
    from botocore.utils import percent_encode

    assert s3_requests._encoded(key) == percent_encode(key, safe="/~")


@pytest.mark.parametrize("token", [None, "a  token"])
@pytest.mark.parametrize("after", ["", "?x-id=GetObject&acl"])
@given(key=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_the_signature_is_the_one_that_botocore_composes(key: str, after: str, token: str | None) -> None:
    headers = {"User-Agent": "one", "x-amz-request-payer": " requester  ", "Range": "bytes=0-9"}
    request = AWSRequest("GET", f"https://b.example:9000/a/{s3_requests._encoded(key)}{after}", headers)
    signer = S3SigV4Auth(Credentials("id", "secret", token), "s3", "eu-west-1")
    pattern = s3_requests._Pattern(
        "https://b.example:9000/a/",
        after,
        (),
        "s3",
        "eu-west-1",
        s3_requests._lasting(signer.headers_to_sign(request)),
        signer.canonical_query_string(request),
    )
    path = urlsplit(request.url).path
    while True:  # botocore reads the clock itself
        signer.add_auth(request)
        wanted = {"Range": "bytes=0-9"}
        found = s3_requests._signature(signer, pattern, path, wanted, datetime.now(timezone.utc))
        if found["X-Amz-Date"] == request.headers["X-Amz-Date"]:
            break
    assert found == {name: request.headers[name] for name in found}
    assert ("X-Amz-Security-Token" in found) == (token is not None)


@pytest.mark.e2e
def test_a_filesystem_that_is_collected_beside_a_running_event_loop_is_closed_on_its_own(
    s3_server: S3Server, s3_bucket: Path
) -> None:
    remote = Remote(f"s3://{s3_bucket.name}/", s3_server.storage_options)
    told: list[dict[str, Any]] = []

    async def notebook() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
        filesystem, path = remote.driver().filesystem, remote.path_of(f"s3://{s3_bucket.name}/")
        filesystem.ls(path)
        del filesystem
        gc.collect()
        await asyncio.sleep(0.2)

    asyncio.run(notebook())
    gc.collect()
    assert not told
