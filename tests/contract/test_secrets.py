"""No secret of a URL or an option is in anything that is derived from it; what is no secret masks no path."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from tests.contract.servers import Answer, answer_with, serve

PASSWORD: Final = "CANARY77"
SIGNATURE: Final = "CANARY88"
ENDINGS: Final = ("jpg", "tar", "npy", "parquet", "jsonl", "csv", "tfrecord", "arrow", "h5", "zarr")


def npy_of(number: int) -> bytes:
    packed = io.BytesIO()
    np.save(packed, np.full(10, number))
    return packed.getvalue()


def decide(path: str, wanted: str | None) -> Answer:
    """Answer as `rightly`, once a connection: none is left open for others to wait for."""
    answer = rightly(path, wanted)
    return Answer(answer.status, answer.body, {**answer.headers, "Connection": "close"})


def rightly(path: str, wanted: str | None) -> Answer:
    """Answer by the first part of the path: a status, or files that are right."""
    path = path.partition("?")[0]
    kind, _, name = path.strip("/").partition("/")
    if kind != "good":
        return Answer(int(kind), b"zzz" if kind == "200" else b"")
    if name == "list.txt":
        return answer_with("".join(f"{i}.npy\n" for i in range(5)).encode(), wanted)
    if name == "list.csv":
        text = "url,label\n" + "".join(f"{i}.npy,x\n" for i in range(5))
        return answer_with(text.encode(), wanted)
    return answer_with(npy_of(int(name.partition(".")[0])), wanted)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serve(decide) as url:
        yield url


def secret_url(server: str, path: str) -> str:
    host = server.removeprefix("http://")
    return f"http://user:{PASSWORD}@{host}/{path}?X-Amz-Signature={SIGNATURE}&X-Amz-Expires=60"


def assert_is_public(*shown: object) -> None:
    for text in map(str, shown):
        assert PASSWORD not in text
        assert SIGNATURE not in text


def assert_files_are_public(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert PASSWORD.encode() not in data, path
            assert SIGNATURE.encode() not in data, path


def openers(url: str, ending: str) -> Iterator[Callable[[], Any]]:
    """Yield all that takes a URL."""
    options = {"window": 4} if ending in ("npy", "h5", "zarr") else {}
    yield lambda: cs.open_source(url, **options)
    yield lambda: cs.open_source([url, url.replace("/a.", "/b.")], **options)
    yield lambda: cs.open_source(f"simplecache::{url}", **options)
    yield lambda: cs.open_source(url, manifest=True)
    yield lambda: cs.open_source(cs.Manifest(url, base=url))
    yield lambda: cs.Manifest(url, column=url, base=url)
    yield lambda: cs.mix({url: 1.0, f"{url}&n=1": 2.0})
    yield lambda: cs.open_source(f"pipe:curl -s {url}")
    yield lambda: cs.TarSource(f"pipe:curl -s {url}")
    yield lambda: cs.ArraySource(f"{url}::/img", window=4)
    yield lambda: cs.CacheSource(url)
    yield lambda: cs.CacheSource([url])  # type: ignore[arg-type]
    yield lambda: cs.MDSSource(url)
    yield lambda: cs.LitDataSource(url)
    yield lambda: cs.Cache(url)
    yield lambda: cs.stream(url, cache=url, batch_size=1)


@pytest.mark.parametrize("status", ["200", "403", "404"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_that_takes_a_url_shows_its_secrets(
    server: str, status: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cachestream")
    for make in openers(secret_url(server, f"{status}/a.{ending}"), ending):
        try:
            made = make()
            assert_is_public(repr(made), getattr(made, "fingerprint", ""), getattr(made, "identity", ""))
            if hasattr(made, "read"):
                for key, _ in made.read(0, np.random.default_rng(0)):
                    assert_is_public(key)
        except cs.CacheStreamError as error:
            assert_is_public(error, repr(error), "".join(traceback.format_exception(error)))
    assert_is_public(caplog.text)


@pytest.mark.parametrize(
    "options",
    [
        {"key": PASSWORD},
        {"secret": PASSWORD},
        {"token": PASSWORD},
        {"password": PASSWORD},
        {"client_kwargs": {"headers": {"Authorization": PASSWORD}}},
        {"unknown": [PASSWORD]},
    ],
)
@pytest.mark.parametrize(
    "url", ["s3://b/x.npy", "memory://b/a.npy", "/none/a.npy", "ftp://127.0.0.1:1/a.npy"]
)
def test_no_option_of_a_driver_is_shown(url: str, options: dict[str, Any]) -> None:
    given = {**options, "endpoint_url": "http://127.0.0.1:9"} if url.startswith("s3") else options
    try:
        source = cs.open_source(url, storage_options=given)
        assert_is_public(repr(source), source.fingerprint)
    except cs.CacheStreamError as error:
        assert_is_public(error, repr(error), "".join(traceback.format_exception(error)))


@pytest.mark.parametrize("kind", ["text", "table", "list", "chained"])
def test_a_cache_and_its_reports_hold_no_secret_of_what_filled_it(
    tmp_path: Path, server: str, kind: str
) -> None:
    url = secret_url(server, "good/{}")
    sources: dict[str, Callable[[], Any]] = {
        "text": lambda: cs.open_source(cs.Manifest(url.format("list.txt"))),
        "table": lambda: cs.open_source(cs.Manifest(url.format("list.csv"), label="label")),
        "list": lambda: cs.mix({url.format("0.npy"): 1.0, url.format("1.npy"): 1.0}),
        "chained": lambda: cs.open_source(f"simplecache::{url.format('0.npy')}"),
    }
    source = sources[kind]()
    folder = tmp_path / "cache"
    with cs.Cache(folder, "10MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=1) as worker:
            worker.wait(60)
            assert_is_public(repr(worker), worker.status(), cache.status())
        assert cache.num_samples
        assert_is_public(source.fingerprint, repr(source), json.dumps(cache.status().to_dict()))
        with cache.snapshot() as dataset:
            assert_is_public(repr(dataset))
    assert_files_are_public(folder)


@pytest.mark.e2e
def test_the_command_line_shows_and_stores_no_secret(tmp_path: Path, server: str) -> None:
    cache = tmp_path / "cache"
    url = secret_url(server, "good/0.npy")
    for arguments in (
        ("worker", url, str(cache), "--size-limit", "10MB", "--storage-option", f"unknown={PASSWORD}"),
        ("worker", url, str(cache), "--size-limit", "10MB"),
        ("status", str(cache), "--json"),
        ("worker", str(cache), url),
        ("status", url),
    ):
        told = subprocess.run(
            [sys.executable, "-m", "cachestream", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ,
        )
        assert_is_public(told.stdout, told.stderr)
    assert cache.exists()
    assert_files_are_public(cache)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("memory://main/train-main/a.npy", {"revision": "main"}),
        ("memory://imagenet/train/a.npy", {"account_name": "imagenet", "container": "train"}),
        ("memory://imagenet/train/a.npy", {"password": "train"}),
    ],
)
def test_what_the_url_shows_is_masked_in_no_path(url: str, options: dict[str, str]) -> None:
    with pytest.raises(cs.SourceError) as caught:
        cs.open_source(url, storage_options=options)
    assert "***" not in str(caught.value)
    assert url in str(caught.value)
