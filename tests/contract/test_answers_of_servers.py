"""Every number that a server tells is checked; what passes by itself is asked for again, and nothing else."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
from fsspec.asyn import AsyncFileSystem

import cachestream as cs
from tests.contract.servers import Answer, answer_with, ranged, serve

RNG = np.random.default_rng(0)
DEADLINE_S = 60.0


def npy_of(array: npt.NDArray[np.int64]) -> bytes:
    packed = io.BytesIO()
    np.save(packed, array)
    return packed.getvalue()


ROWS = np.arange(200_000, dtype=np.int64).reshape(200, 1000)
ARRAY = npy_of(ROWS)


def rows_of(source: Any) -> tuple[list[Any], cs.SourceError | None]:
    """Return the samples of a source up to its first error, and the error."""
    samples = list[Any]()
    try:
        for unit in range(source.num_units):
            for _, sample in source.read(unit, RNG):
                samples.append(sample)
    except cs.SourceError as error:
        return samples, error
    return samples, None


def wrong(first: int, last: int, size: int | str, length: int) -> Answer:
    told = {"Content-Range": f"bytes {first}-{last}/{size}", "Content-Length": str(length), "ETag": '"a"'}
    return Answer(206, ARRAY[first : first + length], told)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda a, z: wrong(a + 64, z + 64, len(ARRAY), z + 1 - a), id="another place"),
        pytest.param(lambda a, z: wrong(0, z - a, len(ARRAY), z + 1 - a), id="the begin"),
        pytest.param(lambda a, z: wrong(a, z + 64, len(ARRAY), z + 65 - a), id="more than asked for"),
        pytest.param(lambda a, z: wrong(a, z, len(ARRAY), z - a), id="another length"),
        pytest.param(lambda a, z: wrong(a, z, z, z + 1 - a), id="beyond its own end"),
        pytest.param(lambda a, z: Answer(206, ARRAY[: z + 1 - a], {"ETag": '"a"'}), id="no place at all"),
        pytest.param(lambda *_: Answer(204), id="no content"),
    ],
)
@pytest.mark.usefixtures("short_waits")
def test_a_part_that_is_not_the_one_asked_for_is_an_error_and_no_sample(
    make: Callable[[int, int], Answer],
) -> None:
    def decide(_: str, wanted: str | None) -> Answer:
        first, last = ranged(ARRAY, wanted)
        return make(first, last) if first > 4096 else answer_with(ARRAY, wanted)

    with serve(decide) as url:
        samples, error = rows_of(cs.ArraySource(f"{url}/x.npy", window=1, windows="grid"))
    assert "cannot be read" in str(error)
    for sample in samples:
        values = np.asarray(next(iter(sample.values())) if isinstance(sample, dict) else sample)
        assert values.ravel()[0] % 1000 == 0


@pytest.mark.usefixtures("short_waits")
def test_a_wrong_answer_now_and_then_costs_no_sample_and_no_opening() -> None:
    turns = itertools.count()

    def decide(_: str, wanted: str | None) -> Answer:
        first, last = ranged(ARRAY, wanted)
        is_wrong = next(turns) % 2 == 0
        return (
            wrong(first + 64, last + 64, len(ARRAY), last + 1 - first)
            if is_wrong
            else answer_with(ARRAY, wanted)
        )

    with serve(decide) as url:
        samples, error = rows_of(cs.ArraySource(f"{url}/x.npy", window=100, windows="grid"))
    assert error is None
    assert len(samples) == 2
    assert next(turns) > 4


@pytest.mark.usefixtures("short_waits")
def test_an_answer_without_content_is_no_empty_file() -> None:
    answers = {
        "/204.txt": Answer(204),
        "/416.txt": Answer(416, b"", {"Content-Range": "bytes */1000"}),
    }
    with serve(lambda path, _: answers[path]) as url:
        for path in answers:
            with pytest.raises(cs.SampleError):
                list(cs.open_source([f"{url}{path}"]).read(0, RNG))


def test_a_server_without_ranges_serves_the_same_bytes() -> None:
    with serve(lambda _path, _wanted: answer_with(ARRAY, None)) as url:
        source = cs.ArraySource(f"{url}/x.npy", window=1, windows="grid")
        found = [sample for unit in range(3) for _, sample in source.read(unit, RNG)]
    assert len(found) == 3


def test_a_weak_etag_names_the_same_version_as_the_strong_one() -> None:
    turns = itertools.cycle(['"a"', 'W/"a"'])
    with serve(lambda _, wanted: answer_with(ARRAY, wanted, next(turns))) as url:
        source = cs.ArraySource(f"{url}/x.npy", window=1, windows="grid")
        assert sum(1 for unit in range(20) for _ in source.read(unit, RNG)) == 20


def test_parts_of_two_versions_are_not_mixed() -> None:
    turns = itertools.count()

    def decide(_: str, wanted: str | None) -> Answer:
        return answer_with(ARRAY, wanted, f'"{next(turns)}"')

    with serve(decide) as url:
        _, error = rows_of(cs.ArraySource(f"{url}/x.npy", window=1, windows="grid"))
    assert isinstance(error, cs.SourceUnavailableError)
    assert "overwritten while it was read" in str(error)


S3_ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>no</Message></Error>"
SKIPPED, REFUSED, RETRIED = cs.SampleError, cs.SourceError, cs.SourceUnavailableError


@pytest.mark.parametrize(
    ("status", "code", "reaction"),
    [
        (403, "RequestTimeTooSkewed", RETRIED),
        (403, "RequestExpired", RETRIED),
        (503, "SlowDown", RETRIED),
        (500, "InternalError", RETRIED),
        (400, "RequestTimeout", RETRIED),
        (403, "AccessDenied", SKIPPED),
        (404, "NoSuchKey", SKIPPED),
        (501, "NotImplemented", SKIPPED),
        (403, "InvalidAccessKeyId", REFUSED),
        (400, "ExpiredToken", REFUSED),
        (403, "SignatureDoesNotMatch", REFUSED),
        (404, "NoSuchBucket", REFUSED),
    ],
)
def test_answers_of_s3_are_retried_skipped_or_final(
    tmp_path: Path, status: int, code: str, reaction: type[cs.SourceError]
) -> None:
    (tmp_path / "list.txt").write_text("s3://b/a.bin\n")
    body = S3_ERROR.format(code).encode()
    with serve(lambda _path, _wanted: Answer(status, body)) as url:
        options = {"key": "K", "secret": "S", "endpoint_url": url}
        _, error = rows_of(cs.open_source(cs.Manifest(tmp_path / "list.txt"), storage_options=options))
    assert type(error) is reaction
    if code == "RequestTimeTooSkewed":
        assert "the clock of this machine is wrong" in str(error)


@pytest.mark.parametrize(
    ("status", "headers", "reaction"),
    [
        (403, {}, SKIPPED),
        (403, {"Retry-After": "1"}, RETRIED),
        (404, {}, SKIPPED),
        (410, {}, SKIPPED),
        (451, {}, SKIPPED),
        (501, {}, SKIPPED),
        (401, {}, REFUSED),
        (408, {}, RETRIED),
        (421, {}, RETRIED),
        (425, {}, RETRIED),
        (429, {}, RETRIED),
        (500, {}, RETRIED),
        (503, {}, RETRIED),
        (520, {}, RETRIED),
    ],
)
def test_answers_of_web_servers_are_retried_skipped_or_final(
    status: int, headers: dict[str, str], reaction: type[cs.SourceError]
) -> None:
    with (
        serve(lambda _path, _wanted: Answer(status, b"", headers)) as url,
        pytest.raises(cs.SourceError) as caught,
    ):
        list(cs.open_source([f"{url}/a.bin"]).read(0, RNG))
    assert type(caught.value) is reaction


@pytest.mark.e2e
def test_what_was_refused_once_is_asked_for_again_when_a_worker_goes_on_with_the_pass(tmp_path: Path) -> None:
    asked: list[str] = []
    is_refused = [True]

    def decide(path: str, wanted: str | None) -> Answer:
        asked.append(path)
        if is_refused[0]:
            time.sleep(0.02)
            if path == "/01.npy":
                return Answer(403)
        return answer_with(npy_of(np.full(10, int(path[1:3]))), wanted)

    with serve(decide) as url, cs.Cache(tmp_path / "cache", "50MB", min_free=0) as cache:
        urls = [f"{url}/{i:02d}.npy" for i in range(60)]
        with cs.start_worker(
            cache, cs.open_source(urls), num_workers=1, order="sequential", concurrency=1, shard_size="1kB"
        ) as worker:
            deadline_s = time.monotonic() + DEADLINE_S
            while not cache.status().skipped and time.monotonic() < deadline_s:
                time.sleep(0.02)
            worker.stop()
        assert (cache.status().skipped, cache.num_samples < 59) == (1, True)
        is_refused[0] = False
        asked.clear()
        with cs.start_worker(cache, cs.open_source(urls), num_workers=1, order="sequential") as worker:
            assert worker.wait(DEADLINE_S)
        assert (cache.num_samples, cache.status().skipped) == (60, 0)
        assert asked.count("/01.npy") == 1
        assert len(asked) < 60


class PackedFiles(AsyncFileSystem):  # type: ignore[misc]
    """An asynchronous driver that unpacks what its storage keeps packed, as Google's does."""

    protocol = "packedfiles"
    cachable = False
    unpacked: Final[list[str]] = []

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": 3_000_000, "etag": "a", "contentEncoding": "gzip"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.unpacked.append(path)
        return b"id\n1\n"


def test_an_object_that_is_above_the_limit_while_packed_is_not_fetched() -> None:
    fsspec.register_implementation("packedfiles", PackedFiles, clobber=True)
    url = "packedfiles://a.csv"
    with pytest.raises(cs.SourceError, match="more than 2 MB in one object; raise max_object_size="):
        list(cs.open_source([url], max_object_size="2MB").read(0, RNG))
    assert PackedFiles.unpacked == []
    assert rows_of(cs.open_source([url], max_object_size="4MB")) == ([{"id": 1}], None)


class SilentFiles(AsyncFileSystem):  # type: ignore[misc]
    """A driver whose calls return after a minute and a half."""

    protocol = "silentfiles"

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": 5, "etag": "a"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        await asyncio.sleep(90)
        return b"id\n1\n"


@pytest.mark.e2e
def test_a_call_that_does_not_return_is_given_up_as_a_remote_that_is_away() -> None:
    fsspec.register_implementation("silentfiles", SilentFiles, clobber=True)
    with pytest.raises(cs.SourceUnavailableError, match=r"silentfiles://a\.txt: .*no answer within \d+ s"):
        list(cs.open_source(["silentfiles://a.txt"]).read(0, RNG))
