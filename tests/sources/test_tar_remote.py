"""TarSource over S3 and web servers, with a failing network, and in a worker that is killed."""

from __future__ import annotations

import functools
import gzip
import http.server
import os
import pickle
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from cachestream.errors import SampleError, SourceError, SourceUnavailableError
from cachestream.formats.tar import TarSource
from cachestream.testing.checks import cached_keys
from cachestream.transport import metering, remote_object
from cachestream.transport.remote import Remote
from cachestream.transport.remote_object import RemoteObject, open_stream
from tests.sources.tars import RNG, make, numbered, read_all, read_unit
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server
from tests.worker.support import sampling_pids, wait_until

SAMPLES: Final = 300
FILES: Final = numbered(SAMPLES, 50_000)  # 15 MB


@pytest.fixture
def bucket(s3_bucket: Path) -> Path:
    make(s3_bucket / "a.tar", FILES)
    return s3_bucket


def source_through(proxy: FaultyProxy, server: S3Server, bucket: Path, **options: Any) -> TarSource:
    source = TarSource(
        f"s3://{bucket.name}/a.tar", storage_options=server.options_through(proxy.port), **options
    )
    proxy.requests = 0
    return source


def fetched_while(read: Any) -> tuple[Any, int]:
    """Return the result of `read()`, and the number of bytes reported during the call."""
    seen: list[int] = []
    metering.install(seen.append)
    try:
        return read(), sum(seen)
    finally:
        metering.install(None)


# --- S3 ----------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_tar_is_read_in_one_request_each_byte_once(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    found, fetched_bytes = fetched_while(lambda: read_all(source))
    assert [sample["cls"] for sample in found.values()] == list(range(SAMPLES))
    assert fetched_bytes == (bucket / "a.tar").stat().st_size
    assert s3_proxy.requests == 1


@pytest.mark.e2e
def test_small_tars_cost_one_request_each_on_a_connection_that_is_used_again(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path
) -> None:
    make(s3_bucket / "a.tar", numbered(10))
    source = source_through(s3_proxy, s3_server, s3_bucket)
    s3_proxy.connections = 0
    for _ in range(5):
        assert len(read_all(source)) == 10
    assert s3_proxy.requests == 5
    assert s3_proxy.connections == 0, "that of the listing"


@pytest.mark.e2e
def test_an_empty_object_is_a_truncated_tar(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path
) -> None:
    (s3_bucket / "a.tar").write_bytes(b"")
    found, problem = read_unit(source_through(s3_proxy, s3_server, s3_bucket))
    assert (found, "truncated: it ends after 0 bytes" in problem) == ({}, True)


@pytest.mark.e2e
def test_visits_over_s3_give_every_sample_once_and_fetch_their_share(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket, samples_per_visit=100)
    assert source.num_units == 3
    found, fetched_bytes = fetched_while(lambda: read_all(source))
    assert list(found) == list(read_all(TarSource(bucket / "a.tar")))
    assert fetched_bytes < 1.5 * (bucket / "a.tar").stat().st_size


@pytest.mark.e2e
def test_small_visits_fetch_little_that_belongs_to_others(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path
) -> None:
    make(s3_bucket / "a.tar", numbered(SAMPLES, 10_000))
    source = source_through(s3_proxy, s3_server, s3_bucket, samples_per_visit=20)
    assert source.num_units == 15
    before = sum(nbytes for _, nbytes in list(s3_proxy.sent))
    assert len(read_all(source)) == SAMPLES
    sent = sum(nbytes for _, nbytes in list(s3_proxy.sent)) - before
    assert sent < 1.25 * (s3_bucket / "a.tar").stat().st_size
    assert s3_proxy.requests < 2 * source.num_units


@pytest.mark.e2e
def test_the_first_samples_of_a_tar_come_while_the_rest_is_on_its_way(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_object, "ENOUGH_S", 0.0)  # the network is slow
    source = source_through(s3_proxy, s3_server, bucket)
    s3_proxy.bytes_allowed = 400_000
    samples = source.read(0, RNG)
    assert [sample["cls"] for _, sample in islice(samples, 5)] == list(range(5))
    s3_proxy.bytes_allowed = None
    assert [sample["cls"] for _, sample in samples] == list(range(5, SAMPLES))


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("fault", ["reset", "truncate"])
def test_a_tar_that_breaks_is_resumed_and_no_sample_comes_twice(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, fault: str
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    found = []
    for key, sample in source.read(0, RNG):
        found.append((key, sample["cls"]))
        if len(found) in (15, 120):
            getattr(s3_proxy, fault)(times=3, after_bytes=100_000)
    assert found == [(f"a.tar#{n:05d}", n) for n in range(SAMPLES)]


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_remote_that_goes_away_in_the_middle_is_unavailable(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    samples = source.read(0, RNG)
    next(samples)
    s3_proxy.refuse()
    with pytest.raises(SourceUnavailableError, match=r"a\.tar"):
        list(samples)
    s3_proxy.heal()
    assert len(read_all(source)) == SAMPLES


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_tar_that_is_overwritten_is_not_mixed_from_two(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    s3_proxy.truncate(times=1, after_bytes=5 << 20)
    samples = source.read(0, RNG)
    next(samples)
    (bucket / "a.tar").unlink()  # the server keeps the file open
    make(bucket / "a.tar", numbered(SAMPLES, 50_001))
    found: list[int] = []
    with pytest.raises(SourceUnavailableError, match="overwritten"):
        found.extend(len(sample["bin"]) for _, sample in samples)
    assert set(found) == {50_000}


@pytest.mark.e2e
def test_wrong_credentials_fail_the_source_without_a_storm(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    source._files.remote._options["secret"] = "CANARYEXPIRED"
    source = pickle.loads(pickle.dumps(source))  # its filesystem is not open yet
    with pytest.raises(SourceError, match="no valid credentials") as caught:
        read_all(source)
    assert type(caught.value) is SourceError
    assert "CANARY" not in str(caught.value)
    assert s3_proxy.requests == 1


@pytest.mark.e2e
def test_reads_that_are_given_up_leave_no_request_behind(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    for _ in range(20):
        samples = source.read(0, RNG)
        next(samples)
        samples.close()  # type: ignore[attr-defined]
    assert s3_proxy.requests == 20
    assert len(read_all(source)) == SAMPLES


# --- the web -----------------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    """A handler with range requests unless `without_ranges`.

    Answers break off after the numbers of bytes in `breaks`, the last one first.
    """

    without_ranges = False
    breaks: Final[list[int]] = []
    requests: Final[list[str]] = []

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path.partition("?")[0])).read_bytes()
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and not self.without_ranges else 0
        self.requests.append(self.headers.get("Range", ""))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{len(data)}"')
        if self.path.partition("?")[0].endswith(".gz"):  # stored packed, as in some object stores
            self.send_header("Content-Encoding", "gzip")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        stop = start + self.breaks.pop() if self.breaks else len(data)
        try:
            self.wfile.write(data[start:stop])
        except OSError:
            pass  # the reader has closed the connection
        self.close_connection = stop < len(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """Start a web server over a folder with a tar."""
    make(tmp_path / "a.tar", FILES)
    Handler.requests.clear()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.e2e
def test_a_web_server_is_asked_once(web: str) -> None:
    source = TarSource(f"{web}/a.tar?sig=CANARY")
    assert "CANARY" not in source.fingerprint + repr(source)
    found, fetched_bytes = fetched_while(lambda: read_all(source))
    assert list(found) == [f"a.tar#{n:05d}" for n in range(SAMPLES)]
    assert Handler.requests == [""]
    assert fetched_bytes > 15_000_000


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("without_ranges", [False, True])
def test_a_web_answer_that_breaks_is_resumed_with_ranges_and_without(
    web: str, without_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "without_ranges", without_ranges)
    Handler.breaks[:] = [9_000_000, 4_000_000, 2_500_000]
    found = read_all(TarSource(f"{web}/a.tar"))
    assert [sample["cls"] for sample in found.values()] == list(range(SAMPLES))
    assert len(Handler.requests) > 1
    assert Handler.breaks == []


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("breaks", [[], [20_000, 3_000]])
def test_a_web_file_that_was_packed_on_its_way_is_unpacked_to_its_end(
    web: str, tmp_path: Path, breaks: list[int]
) -> None:
    Handler.breaks[:] = breaks
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes(), 1))
    found = read_all(TarSource(f"{web}/a.tar.gz"))
    assert [sample["cls"] for sample in found.values()] == list(range(SAMPLES))


@pytest.mark.e2e
def test_a_part_of_a_web_file_that_was_packed_on_its_way_is_refused(web: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy.gz").write_bytes(gzip.compress(bytes(100_000)))
    url = f"{web}/a.npy.gz?sig=CANARY"
    remote = Remote(url)
    with pytest.raises(ValueError, match="Content-Encoding: gzip"):
        RemoteObject(remote, url, "a.npy.gz").read(50, 61)
    message = r"a\.npy\.gz: .*have the server send the file without"
    with (
        open_stream(remote, url, "a.npy.gz", 50) as stream,
        pytest.raises(SampleError, match=message) as caught,
    ):
        stream.read(10)
    assert "CANARY" not in str(caught.value)


@pytest.mark.e2e
def test_a_tar_that_is_not_there_is_a_sample_error(web: str, tmp_path: Path) -> None:
    source = TarSource(f"{web}/a.tar")
    (tmp_path / "a.tar").unlink()
    (tmp_path / "a.tar").mkdir()  # the server's thread fails: the connection ends without an answer
    with pytest.raises(SourceUnavailableError):
        read_all(source)


# --- through a worker --------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("samples_per_visit", [pytest.param(None, marks=pytest.mark.slow), 40])
def test_killed_processes_go_on_inside_their_tars_with_no_sample_twice_and_none_lost(
    tmp_path: Path, samples_per_visit: int | None
) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(4):
        make(folder / f"{number}.tar", numbered(150, 15_000))
    source = TarSource(folder, samples_per_visit=samples_per_visit)
    with closing(cs.Cache(tmp_path / "cache", "1GB", min_free=0)) as cache:
        # Slow enough that tars are under way when their processes are killed.
        with cs.start_worker(cache, source, num_workers=2, bandwidth_limit="4MB/s", concurrency=2) as worker:
            killed = set()
            for goal in (30, 200):
                cache.wait(goal, timeout_s=180)
                for pid in sampling_pids(cache):
                    if pid not in killed:
                        with suppress(ProcessLookupError):  # it has already ended
                            os.kill(pid, signal.SIGKILL)
                            killed.add(pid)
            assert worker.wait(timeout_s=180)
            assert cache.status().worker is not None
        keys = Counter(cached_keys(cache))
        assert len(killed) >= 2
    assert keys == Counter(f"{number}.tar#{n:05d}" for number in range(4) for n in range(150))


@pytest.mark.e2e
def test_the_evicted_beginning_of_a_tar_comes_again_without_the_rest(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, tmp_path: Path
) -> None:
    def fetched_bytes() -> int:
        status = worker.status().worker
        assert status is not None
        return status.totals.fetched_bytes

    source = source_through(s3_proxy, s3_server, bucket)
    with (
        cs.Cache(tmp_path / "cache", size_limit="100MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, shard_size="1MB") as worker,
    ):
        assert worker.wait(120)
        before_bytes = fetched_bytes()
        cache.evict(cache.size_bytes - 2_000_000)  # the oldest shards, which hold the beginning
        lost_bytes = 50_000 * (SAMPLES - cache.num_samples)
        wait_until(lambda: cache.num_samples == SAMPLES, "what was evicted comes again")
        assert len(set(cached_keys(cache))) == SAMPLES
        assert lost_bytes <= fetched_bytes() - before_bytes <= lost_bytes + 4_000_000  # of 15 MB


@pytest.mark.e2e
def test_a_damaged_tar_costs_a_worker_what_lies_behind_the_damage_and_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(3):
        make(folder / f"{number}.tar", numbered(20))
    with (folder / "1.tar").open("r+b") as file:
        file.truncate(20 * 1024 + 100)
    with closing(cs.Cache(tmp_path / "cache", "100MB", min_free=0)) as cache:
        with cs.start_worker(cache, cs.open_source(folder / "*.tar"), num_workers=1) as worker:
            assert worker.wait(timeout_s=180)
        (failure,) = cache.status().failures
        counts = Counter(key.partition("#")[0] for key in cached_keys(cache))
    assert counts == {"0.tar": 20, "1.tar": 7, "2.tar": 20}
    assert failure.kind == "sample"
    assert failure.example.endswith("1.tar")
    assert "truncated: it ends after 20,580 bytes" in failure.reason


@pytest.mark.e2e
def test_arrays_of_tars_train(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", numbered(40))
    loader = cs.stream(
        str(tmp_path / "1.tar"), cache=tmp_path / "cache", size_limit="50MB", batch_size=8, min_samples=40
    )
    with closing(loader):
        batch = next(iter(loader))
        assert batch["cls"].shape == (8,)
        assert {type(data) for data in batch["bin"]} == {bytes}
        assert np.all([len(data) == 1000 for data in batch["bin"]])
