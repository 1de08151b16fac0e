"""ArraySource over a real S3 server, a network that fails on command, and web servers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cachestream.errors import CacheStreamError, SampleError, SourceError, SourceUnavailableError
from cachestream.formats.parquet import ParquetSource
from cachestream.sources.arrays import ArraySource
from cachestream.testing.checks import check_source
from cachestream.transport import metering, remote_object
from cachestream.transport.remote_object import merge_spans
from tests.support.ftp import run_sftp_server
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

h5py: Any = pytest.importorskip("h5py")
zarr: Any = pytest.importorskip("zarr")
web: Any = pytest.importorskip("aiohttp.web")

VALUES: Final = np.random.default_rng(0).normal(size=(600, 500)).astype(np.float32)
CHUNK: Final = (60, 50)


def write_all(folder: Path) -> None:
    np.save(folder / "a.npy", VALUES)
    zarr.create_array(str(folder / "a.zarr"), shape=VALUES.shape, chunks=CHUNK, dtype="f4")[...] = VALUES
    sharded = zarr.create_array(
        str(folder / "s.zarr"), shape=VALUES.shape, chunks=CHUNK, shards=(300, 250), dtype="f4"
    )
    sharded[...] = VALUES
    with h5py.File(folder / "a.h5", "w") as file:
        file["plain"] = VALUES
        file.create_dataset("gzip", data=VALUES, chunks=CHUNK, compression="gzip", shuffle=True)
        file.create_dataset("lzf", data=VALUES, chunks=CHUNK, compression="lzf")


ARRAYS: Final = ("a.npy", "a.zarr", "s.zarr", "a.h5::/plain", "a.h5::/gzip", "a.h5::/lzf")


@pytest.fixture(scope="module", autouse=True)
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All arrays; zarr keeps threads from its first write on, which is before tests look for leaked threads."""
    folder = tmp_path_factory.mktemp("arrays")
    write_all(folder)
    return folder


@pytest.fixture
def bucket(s3_bucket: Path, arrays: Path) -> Path:
    """A copy of the arrays, which the test may change."""
    shutil.copytree(arrays, s3_bucket, dirs_exist_ok=True)
    return s3_bucket


def open_through(
    proxy: FaultyProxy, server: S3Server, bucket: Path, name: str, window: Any = (40, 30)
) -> ArraySource:
    source = ArraySource(
        f"s3://{bucket.name}/{name}", window=window, storage_options=server.options_through(proxy.port)
    )
    read(source)  # HDF5 reads the index of chunks when it first needs it
    proxy.requests = 0
    return source


def read(source: ArraySource, unit: int = 0) -> dict[str, Any]:
    ((_, sample),) = source.read(unit, np.random.default_rng(unit))
    return sample


def check(sample: dict[str, Any], values: Any = VALUES) -> None:
    area = tuple(
        slice(int(start), int(start) + length)
        for start, length in zip(sample["start"], sample["array"].shape, strict=False)
    )
    np.testing.assert_array_equal(sample["array"], values[area])


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("name", ARRAYS)
def test_windows_of_objects_are_read_from_sixteen_threads(
    s3_server: S3Server, bucket: Path, name: str
) -> None:
    source = ArraySource(
        f"s3://{bucket.name}/{name}", window=(40, 30), storage_options=s3_server.storage_options
    )
    with ThreadPoolExecutor(16) as pool:
        for sample in pool.map(functools.partial(read, source), range(32)):
            check(sample)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "requests", "nbytes"),
    [("a.npy", 1, 0), ("a.zarr", 4, 0), ("s.zarr", 12, 5000), ("a.h5::/gzip", 8, 140_000)],
)
def test_a_window_costs_few_requests_and_little_beside_its_chunks(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    bucket: Path,
    fetched: list[int],
    name: str,
    requests: int,
    nbytes: int,
) -> None:
    source = open_through(s3_proxy, s3_server, bucket, name)
    fetched.clear()
    read(source, 1)
    band_bytes = 40 * 500 * 4 if name == "a.npy" else 0  # rows with small gaps are fetched in one request
    assert s3_proxy.requests <= requests
    assert sum(fetched) <= max(band_bytes, 4 * 60 * 50 * 4) + nbytes


class Busy(MemoryFileSystem):  # type: ignore[misc]
    """A server that has no time at the first request of each kind."""

    protocol = "busy"
    asked: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("busy://", "memory://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._wait("ls")
        return super().ls(path, detail, **options)

    def glob(self, path: str, **options: Any) -> Any:
        self._wait("glob")
        return super().glob(path, **options)

    def _wait(self, name: str) -> None:
        if name not in self.asked:
            self.asked.add(name)
            raise TimeoutError("no time at present")


def test_a_remote_that_has_no_time_is_asked_for_arrays_again() -> None:
    fsspec.register_implementation("busy", Busy, clobber=True)
    for name in ("b.npy", "a.npy"):
        with fsspec.open(f"memory://arrays/{name}", "wb") as file:
            np.save(file, np.arange(4))
    for name in (".zgroup", "inside/.zgroup"):
        with fsspec.open(f"memory://arrays/g.zarr/{name}", "w") as file:
            file.write('{"zarr_format": 2}')
    assert ArraySource("busy://arrays/*.npy", window=2, windows="grid").num_units == 4
    Busy.asked.clear()
    with pytest.raises(SourceError, match=r"a Zarr group, not an array.*one of: inside"):
        ArraySource("busy://arrays/g.zarr", window=2)


@pytest.mark.e2e
def test_wildcards_find_arrays_that_are_folders(s3_server: S3Server, bucket: Path) -> None:
    source = ArraySource(
        f"s3://{bucket.name}/*.zarr", window=10, storage_options=s3_server.storage_options, windows="grid"
    )
    assert repr(source) == "<ArraySource a.zarr and 1 more, 120 windows>"
    check(read(source, 119))


@pytest.mark.e2e
def test_latency_overlaps_within_a_window_of_many_chunks(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = open_through(s3_proxy, s3_server, bucket, "a.zarr", window=(240, 250))
    s3_proxy.in_flight_peak, s3_proxy.together = 0, 4
    check(read(source, 2))
    assert s3_proxy.requests >= 20
    assert s3_proxy.in_flight_peak >= 4


@pytest.mark.e2e
def test_large_windows_come_in_parts_at_once(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_object, "PART_BYTES", 100_000)
    source = open_through(s3_proxy, s3_server, bucket, "a.npy", window=400)
    s3_proxy.in_flight_peak = 0
    s3_proxy.latency_s = 0.05
    check(read(source, 3))
    assert s3_proxy.requests == 8
    assert s3_proxy.in_flight_peak == remote_object.PARALLEL


def test_near_spans_become_one_request() -> None:
    assert merge_spans([(50, 60), (0, 10), (15, 20), (200, 210)], 40) == [
        ((0, 60), [1, 2, 0]),
        ((200, 210), [3]),
    ]
    assert merge_spans([(0, 100), (10, 20), (30, 40)], 0) == [((0, 100), [0, 1, 2])]
    assert merge_spans([]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.zarr"])
def test_remote_array_sources_keep_the_protocol(s3_server: S3Server, bucket: Path, name: str) -> None:
    check_source(
        lambda: ArraySource(
            f"s3://{bucket.name}/{name}", window=(40, 30), storage_options=s3_server.storage_options
        ),
        secrets=[s3_server.key, s3_server.secret],
        max_units=2,
    )


# --- a network that fails ----------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["a.npy", "a.zarr", "a.h5::/gzip"])
def test_a_remote_that_does_not_answer_is_unavailable_and_well_again_once_it_does(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, name: str
) -> None:
    source = open_through(s3_proxy, s3_server, bucket, name)
    faults: list[Callable[[], None]] = [
        lambda: s3_proxy.answer_busy(50),
        s3_proxy.refuse,
        lambda: s3_proxy.truncate(50, 100),
    ]
    for fault in faults:
        fault()
        with pytest.raises(SourceUnavailableError, match="does not answer at present"):
            list(map(functools.partial(read, source), range(1, 40)))
        s3_proxy.heal()
        check(read(source, 5))


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_part_that_breaks_is_asked_for_again_by_itself(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    bucket: Path,
    fetched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_object, "PART_BYTES", 100_000)
    monkeypatch.setattr(remote_object, "PARALLEL", 1)
    source = open_through(s3_proxy, s3_server, bucket, "a.npy", window=400)
    fetched.clear()
    broken: list[int] = []

    def break_next(nbytes: int) -> None:
        if nbytes and len(broken) < 3:
            broken.append(nbytes)
            s3_proxy.reset(1, after_bytes=1000)

    metering.install(break_next)
    check(read(source, 3))
    assert len(broken) == 3
    assert s3_proxy.requests == 8 + 3


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_503_while_looking_is_tried_again(s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path) -> None:
    for name in ("a.npy", "a.zarr"):
        s3_proxy.answer_busy(2)
        check(read(open_through(s3_proxy, s3_server, bucket, name)))


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["a.npy", "a.h5::/plain", "a.h5::/gzip"])
def test_an_object_that_is_replaced_is_noticed(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, name: str
) -> None:
    source = open_through(s3_proxy, s3_server, bucket, name)
    np.save(bucket / "a.npy", VALUES + 1)
    with h5py.File(bucket / "a.h5", "w") as file:
        file["first"] = np.arange(1000)
        file["plain"] = VALUES + 1
        file.create_dataset("gzip", data=VALUES + 1, chunks=CHUNK, compression="gzip", shuffle=True)
    check(read(source, 7), VALUES + 1)
    np.save(bucket / "a.npy", VALUES[:10])
    with h5py.File(bucket / "a.h5", "w") as file:
        file["plain"] = file["gzip"] = VALUES[:10]
    with pytest.raises(SampleError, match="replaced by another array"):
        read(source, 7)


@pytest.mark.e2e
def test_what_is_missing_or_forbidden_is_an_error_that_names_it(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    for name in ("none.npy", "none.zarr", "none.h5", "none*.npy"):
        with pytest.raises(SourceError, match=rf"s3://{bucket.name}/none.*(not found|no Zarr|nothing found)"):
            ArraySource(f"s3://{bucket.name}/{name}", window=1, storage_options=s3_server.storage_options)
    wrong = s3_server.storage_options | {"secret": "CANARYWRONG"}
    for name in ("a.npy", "a.zarr", "a.h5::/plain"):
        with pytest.raises(SourceError, match="no valid credentials") as caught:
            ArraySource(f"s3://{bucket.name}/{name}", window=1, storage_options=wrong)
        assert not isinstance(caught.value, SourceUnavailableError)


@pytest.mark.e2e
def test_secrets_show_in_no_text(s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path) -> None:
    shown: list[str] = []
    for name in ("a.npy", "a.zarr", "a.h5::/lzf"):
        source = open_through(s3_proxy, s3_server, bucket, name)
        shown += [repr(source), source.fingerprint, source.listing_digest]
        faults: list[Callable[[], None]] = [lambda: s3_proxy.answer_busy(9), s3_proxy.refuse]
        for fault in faults:
            fault()
            try:
                for unit in range(9):
                    shown.append(next(source.read(unit, np.random.default_rng(unit)))[0])
            except CacheStreamError as error:
                shown += [str(error), repr(error), repr(error.__cause__)]
            s3_proxy.heal()
    assert len(shown) > 15
    assert not [text for text in shown if "CANARY" in text]


# --- the web -----------------------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Start a server without range requests, which always sends the whole file."""

    def log_message(self, *args: Any) -> None:
        pass


class _Collecting(_Quiet):
    """Leave one of `files` to the garbage collector before each answer, and have it run in this thread."""

    files: Final[list[Any]] = []

    def do_GET(self) -> None:
        if self.files:
            cycle: list[Any] = [self.files.pop()]
            cycle.append(cycle)
            del cycle
        _ = [[] for _ in range(10_000)]
        super().do_GET()


@pytest.fixture(scope="module")
def plain_server(arrays: Path) -> Iterator[str]:
    with serving(functools.partial(_Quiet, directory=str(arrays))) as url:
        yield url


@contextlib.contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def ranging_server(arrays: Path) -> Iterator[str]:
    """Start aiohttp's file server, which has range requests and ETags."""
    loop = asyncio.new_event_loop()
    application = web.Application()
    application.router.add_static("/", arrays)
    runner = web.AppRunner(application)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("name", ARRAYS)
def test_a_web_server_with_ranges_sends_only_them(ranging_server: str, fetched: list[int], name: str) -> None:
    url = f"{ranging_server}/{name}"
    source = ArraySource(url, window=(10, 500), windows="grid")
    check(read(source))
    fetched.clear()
    check(read(source, 30))
    assert sum(fetched) < VALUES.nbytes // 2


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["a.npy", "a.zarr", "s.zarr", "a.h5::/gzip"])
def test_a_web_server_without_ranges_serves_too(plain_server: str, name: str) -> None:
    source = ArraySource(f"{plain_server}/{name}", window=(10, 500), windows="grid")
    for unit in (0, 30):
        check(read(source, unit))


@pytest.mark.e2e
def test_an_hdf5_file_that_is_garbage_does_not_hold_up_one_that_is_fetched(arrays: Path) -> None:
    _Collecting.files[:] = [h5py.File(f"{n}", "w", driver="core", backing_store=False) for n in range(100)]
    with serving(functools.partial(_Collecting, directory=str(arrays))) as url:
        check(read(ArraySource(f"{url}/a.h5::/gzip", window=(10, 500), windows="grid")))


def test_a_signed_url_shows_nowhere(ranging_server: str) -> None:
    url = f"{ranging_server}/a.npy?signature=CANARY"
    source = ArraySource(url, window=(10, 10))
    ((key, sample),) = source.read(0, np.random.default_rng(0))
    check(sample)
    with pytest.raises(SourceError) as caught:
        ArraySource(f"{ranging_server}/b.npy?signature=CANARY", window=1)
    assert "CANARY" not in f"{key} {source!r} {source.fingerprint} {source.listing_digest} {caught.value}"


def test_a_zarr_array_of_version_2_is_read_from_a_web_server(plain_server: str, arrays: Path) -> None:
    array = zarr.create_array(
        str(arrays / "other" / "old.zarr"), shape=(20,), chunks=(5,), dtype="i4", zarr_format=2
    )
    array[:] = np.arange(20)
    window = read(ArraySource(f"{plain_server}/other/old.zarr", window=20, windows="grid"))["array"]
    np.testing.assert_array_equal(window, np.arange(20))
    with pytest.raises(SourceError, match="no Zarr array here"):
        ArraySource(f"{plain_server}/none.zarr", window=20)


@pytest.mark.e2e
def test_parts_of_files_are_read_by_sftp(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "a.npy", VALUES)
    parquet.write_table(pyarrow.table({"x": np.arange(100_000)}), data / "t.parquet", row_group_size=10_000)
    with run_sftp_server(data) as options:
        arrays = ArraySource("sftp://127.0.0.1/a.npy", window=(4, 500), storage_options=options)
        local = ArraySource(data / "a.npy", window=(4, 500))
        (_, found), (_, expected) = (
            next(iter(one.read(3, np.random.default_rng(0)))) for one in (arrays, local)
        )
        assert np.array_equal(found["array"], expected["array"])
        table = ParquetSource("sftp://127.0.0.1/t.parquet", storage_options=options)
        samples = list(table.read(2, np.random.default_rng(0)))
        assert [sample["x"] for _, sample in samples[:3]] == [20_000, 20_001, 20_002]
