"""FileSource over a real S3 server, and over a network that fails on command."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cachestream.errors import ConfigError, SampleError, SourceError, SourceUnavailableError
from cachestream.formats.files import FileSource
from cachestream.transport import backends, download, driver, metering, remote_object
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

RNG = np.random.default_rng(0)
LARGE_BYTES = 20 << 20


def read_one(source: FileSource, unit: int = 0) -> tuple[str, dict[str, Any]]:
    return next(source.read(unit, RNG))


@pytest.fixture
def bucket(s3_bucket: Path) -> Path:
    """A bucket with 40 arrays in two folders."""
    for number in range(40):
        folder = s3_bucket / ("odd" if number % 2 else "even")
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{number:03d}.npy", np.full(2500, number, np.float32))
    return s3_bucket


@pytest.fixture
def large(s3_bucket: Path) -> np.ndarray[Any, Any]:
    """The bytes of the only object of a bucket."""
    content = np.random.default_rng(1).integers(0, 256, LARGE_BYTES, dtype=np.uint8)
    (s3_bucket / "large.bin").write_bytes(content.tobytes())
    return content


def source_through(
    proxy: FaultyProxy, server: S3Server, bucket: Path, path: str = "", **options: Any
) -> FileSource:
    source = FileSource(
        f"s3://{bucket.name}{path}", storage_options=server.options_through(proxy.port) | options
    )
    proxy.requests = 0
    return source


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_bucket_is_read_from_sixteen_threads(s3_server: S3Server, bucket: Path) -> None:
    source = FileSource(f"s3://{bucket.name}", storage_options=s3_server.storage_options)
    with ThreadPoolExecutor(16) as pool:
        found = dict(pool.map(lambda unit: read_one(source, unit), range(40)))
    assert sorted(found) == sorted(f"{'odd' if n % 2 else 'even'}/{n:03d}.npy" for n in range(40))
    assert all((sample["array"] == int(key[-7:-4])).all() for key, sample in found.items())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("path", "count"),
    [("/odd", 20), ("/odd/", 20), ("/odd/00*.npy", 5), ("/*/*.npy", 40), ("/**/01?.npy", 10), ("/odd/001.npy", 1),
     ("/odd/{001..039..2}.npy", 20)],
)  # fmt: skip
def test_folders_wildcards_ranges_and_single_objects_are_found(
    s3_server: S3Server, bucket: Path, path: str, count: int
) -> None:
    source = FileSource(f"s3://{bucket.name}{path}", storage_options=s3_server.storage_options)
    assert source.num_units == count
    assert read_one(source)[1]["array"].shape == (2500,)


@pytest.mark.e2e
def test_one_small_object_costs_one_request_on_a_connection_that_is_used_again(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    s3_proxy.connections = 0
    for unit in range(source.num_units or 0):
        read_one(source, unit)
    assert s3_proxy.requests == 40
    assert s3_proxy.connections == 0, "that of the listing"


@pytest.mark.e2e
def test_latency_overlaps_between_threads(s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    read_one(source)
    s3_proxy.in_flight_peak, s3_proxy.together = 0, 12
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda unit: read_one(source, unit % 40), range(80)))
    assert s3_proxy.in_flight_peak >= 12


@pytest.mark.e2e
def test_an_empty_object_is_empty_data(s3_server: S3Server, s3_bucket: Path) -> None:
    (s3_bucket / "empty.bin").write_bytes(b"")
    source = FileSource(f"s3://{s3_bucket.name}", storage_options=s3_server.storage_options)
    assert read_one(source) == ("empty.bin", {"data": b""})


@pytest.mark.e2e
def test_a_large_object_is_reported_piece_by_piece(
    s3_server: S3Server, s3_bucket: Path, large: npt.NDArray[np.uint8], fetched: list[int]
) -> None:
    source = FileSource(f"s3://{s3_bucket.name}", storage_options=s3_server.storage_options)
    _, sample = read_one(source)
    assert sample["data"] == large.tobytes()
    assert sum(fetched) == LARGE_BYTES
    assert max(fetched) <= backends.PART_BYTES


def read_in_child(source: FileSource, results: Any) -> None:
    results.put([read_one(source, unit)[0] for unit in range(4)])


@pytest.mark.e2e
@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_children_open_connections_of_their_own(s3_server: S3Server, bucket: Path, method: str) -> None:
    source = FileSource(f"s3://{bucket.name}", storage_options=s3_server.storage_options)
    read_one(source)  # the parent's connection is open
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    count = 2 if method == "fork" else 1
    children = [context.Process(target=read_in_child, args=(source, results)) for _ in range(count)]
    for child in children:
        child.start()
    expected = [read_one(source, unit)[0] for unit in range(4)]
    assert [results.get(timeout=180) for _ in children] == [expected] * count
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    results.close()
    results.join_thread()


# --- credentials -------------------------------------------------------------------------------


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.e2e
@pytest.mark.usefixtures("no_credentials")
def test_credentials_come_from_the_environment(
    s3_server: S3Server, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert read_one(FileSource(f"s3://{bucket.name}"))[0] == "even/000.npy"


@pytest.mark.e2e
@pytest.mark.usefixtures("no_credentials")
def test_credentials_come_from_the_usual_aws_files(s3_server: S3Server, bucket: Path, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {s3_server.key}\naws_secret_access_key = {s3_server.secret}\n"
    )
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint_url}\n"
    )
    source = FileSource(f"s3://{bucket.name}", storage_options={"profile": "lab"})
    assert read_one(source)[0] == "even/000.npy"


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize(
    "wrong",
    [{"secret": "CANARYWRONG"}, {"key": "CANARYWRONG"}, {"key": None, "secret": None}, {"profile": "none"}],
    ids=["secret", "key", "none", "profile"],
)
def test_wrong_credentials_are_an_error_that_says_where_to_put_right_ones(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(
        SourceError, match=r"no valid credentials; give storage_options.*AWS_ACCESS"
    ) as caught:
        source_through(s3_proxy, s3_server, bucket, **wrong)
    assert not isinstance(caught.value, SourceUnavailableError)
    assert "CANARY" not in str(caught.value)
    assert s3_proxy.requests <= 2  # no retry storm


@pytest.mark.e2e
def test_credentials_that_become_invalid_fail_the_source_not_the_sample(
    s3_server: S3Server, bucket: Path
) -> None:
    source = FileSource(f"s3://{bucket.name}", storage_options=s3_server.storage_options)
    source._files.remote._options["secret"] = "CANARYEXPIRED"
    source = pickle.loads(pickle.dumps(source))  # its filesystem is not open yet
    with pytest.raises(SourceError, match="no valid credentials") as caught:
        read_one(source)
    assert type(caught.value) is SourceError


@pytest.mark.e2e
def test_options_of_the_user_win_over_ours(s3_server: S3Server, bucket: Path) -> None:
    options = s3_server.storage_options | {"config_kwargs": {"read_timeout": 3}, "use_listings_cache": True}
    source = FileSource(f"s3://{bucket.name}", storage_options=options)
    read_one(source)
    config = source._files.remote.driver().filesystem._s3.meta.config
    assert (config.read_timeout, config.connect_timeout) == (3, driver.CONNECT_S)
    assert options["config_kwargs"] == {"read_timeout": 3}


def test_an_option_that_the_driver_does_not_know_is_a_config_error(s3_server: S3Server, bucket: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage_options do not suit 's3'.*bananas"):
        FileSource(f"s3://{bucket.name}", storage_options=s3_server.storage_options | {"bananas": 1})


# --- what is not there -------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://no-such-bucket", "no such bucket"),
        ("s3://no-such-bucket/a.npy", "no such bucket"),
        ("s3://no-such-bucket/*.npy", "no such bucket"),
        ("s3://no-such-bucket/{0..9}.npy", "no such bucket"),
        ("s3://{bucket}/no-such-folder", "not found; check the path"),
        ("s3://{bucket}/no-such-file.npy", "not found; check the path"),
        ("s3://{bucket}/*.jpg", "no files found"),
        ("s3://*/a.npy", "names one bucket"),
    ],
)
def test_what_is_missing_is_an_error_at_once_that_names_it(
    s3_server: S3Server, bucket: Path, url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachestream.transport.remote_errors.BACKOFF_START_S", 1000.0)
    monkeypatch.setattr("cachestream.transport.remote_errors.BACKOFF_LIMIT_S", 1000.0)
    start = time.monotonic()
    with pytest.raises(SourceError, match=message) as caught:
        FileSource(url.replace("{bucket}", bucket.name), storage_options=s3_server.storage_options)
    assert not isinstance(caught.value, SourceUnavailableError)
    assert time.monotonic() - start < 60, "it was tried again"


@pytest.mark.e2e
def test_an_empty_bucket_is_an_error(s3_server: S3Server, s3_bucket: Path) -> None:
    with pytest.raises(SourceError, match="no files found"):
        FileSource(f"s3://{s3_bucket.name}", storage_options=s3_server.storage_options)


@pytest.mark.e2e
def test_an_object_that_vanished_fails_as_one_sample_with_one_request(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    (bucket / "even" / "000.npy").unlink()
    with pytest.raises(SampleError, match=rf"s3://{bucket.name}/even/000\.npy: not found"):
        read_one(source)
    assert s3_proxy.requests == 1
    assert read_one(source, 1)[0] == "even/002.npy"


# --- a network that fails ----------------------------------------------------------------------


@pytest.mark.e2e
def test_a_503_while_listing_is_tried_again(s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path) -> None:
    s3_proxy.answer_busy(2)
    assert source_through(s3_proxy, s3_server, bucket).num_units == 40


@pytest.mark.e2e
@pytest.mark.parametrize("fault", ["busy", "refuse"])
def test_a_remote_that_does_not_answer_is_unavailable_and_well_again_once_it_does(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    bucket: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    read_one(source)
    monkeypatch.setattr("cachestream.transport.remote_errors.BACKOFF_START_S", 1000.0)
    monkeypatch.setattr("cachestream.transport.remote_errors.BACKOFF_LIMIT_S", 1000.0)
    start = time.monotonic()
    if fault == "busy":
        s3_proxy.answer_busy(3)
    else:
        s3_proxy.refuse()
    for _ in range(3):
        with pytest.raises(SourceUnavailableError, match="does not answer at present"):
            read_one(source)
    assert time.monotonic() - start < 60  # the caller's back-off is the only one
    assert s3_proxy.requests == (4 if fault == "busy" else 1)
    s3_proxy.heal()
    assert read_one(source)[0] == "even/000.npy"


@pytest.mark.e2e
def test_an_endpoint_that_does_not_exist_is_unavailable_at_open(
    s3_server: S3Server, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachestream.transport.remote_errors.ATTEMPTS", 2)
    options = s3_server.storage_options | {"endpoint_url": "http://no-such-host.invalid:9"}
    with pytest.raises(SourceUnavailableError, match=r"s3://bucket.*check the network and the endpoint"):
        FileSource(f"s3://{bucket.name}", storage_options=options)


@pytest.mark.e2e
def test_a_hanging_request_ends_at_the_read_timeout_and_shows_life_until_then(
    s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path
) -> None:
    source = source_through(s3_proxy, s3_server, bucket, config_kwargs={"read_timeout": 2})
    read_one(source)
    s3_proxy.hang()
    beats: list[float] = []
    metering.install(lambda _: beats.append(time.monotonic()))
    start = time.monotonic()
    try:
        with pytest.raises(SourceUnavailableError):
            read_one(source)
    finally:
        metering.install(None)
    assert 1.5 < time.monotonic() - start < 18  # the read timeout is 20 s unless another one is given
    assert len(beats) >= 2


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_trickling_body_is_given_up(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    large: npt.NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    s3_proxy.bytes_per_s = 200_000
    with monkeypatch.context() as patch:
        patch.setattr(download, "PIECE_S", 0.5)
        patch.setattr(download, "RESUMES", 1)
        with pytest.raises(SourceUnavailableError, match="bytes came within"):
            read_one(source)
    s3_proxy.bytes_per_s = None
    assert read_one(source)[1]["data"] == large.tobytes()


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("fault", ["reset", "truncate"])
def test_a_broken_body_is_resumed_where_it_broke(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    large: npt.NDArray[np.uint8],
    fetched: list[int],
    fault: str,
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    getattr(s3_proxy, fault)(times=3, after_bytes=5 << 20)
    _, sample = read_one(source)
    assert sample["data"] == large.tobytes()
    assert s3_proxy.requests == 4
    assert sum(fetched) == LARGE_BYTES  # nothing was fetched twice


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_body_that_breaks_for_ever_is_unavailable_after_few_tries(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, large: npt.NDArray[np.uint8]
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    s3_proxy.truncate(times=1000, after_bytes=1000)
    with pytest.raises(SourceUnavailableError, match=r"large\.bin"):
        read_one(source)
    assert s3_proxy.requests == download.RESUMES + 1
    s3_proxy.heal()
    assert read_one(source)[1]["data"] == large.tobytes()


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_an_object_overwritten_while_it_is_read_comes_whole_from_one_version(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, large: npt.NDArray[np.uint8]
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    s3_proxy.truncate(times=1, after_bytes=5 << 20)
    other = np.roll(large, 1).tobytes()
    pending = [s3_bucket / "large.bin"]

    def overwrite(_: int) -> None:
        if pending:
            pending.pop().write_bytes(other)

    metering.install(overwrite)
    try:
        _, sample = read_one(source)
    finally:
        metering.install(None)
    assert sample["data"] == other


@pytest.fixture
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_object, "STREAM_BYTES", 4 << 20)


@pytest.mark.e2e
@pytest.mark.usefixtures("short_streams", "short_waits")
@pytest.mark.parametrize("fault", [None, "reset", "truncate"])
def test_the_rest_of_a_large_object_comes_in_parts_of_which_several_are_on_their_way(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    large: npt.NDArray[np.uint8],
    fetched: list[int],
    fault: str | None,
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    s3_proxy.in_flight_peak, s3_proxy.together, s3_proxy.alone = 0, 4, 3 if fault else 1
    if fault:
        getattr(s3_proxy, fault)(times=2, after_bytes=1 << 20)
    _, sample = read_one(source)
    assert sample["data"] == large.tobytes()
    assert s3_proxy.in_flight_peak == 4
    assert sum(fetched) == LARGE_BYTES
    assert s3_proxy.requests == 5 + (2 if fault else 0)


@pytest.mark.e2e
@pytest.mark.usefixtures("short_streams", "short_waits")
def test_a_large_object_overwritten_between_its_parts_comes_whole_from_one_version(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, large: npt.NDArray[np.uint8]
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    other = np.roll(large, 1)[:-5].tobytes()  # and shorter
    seen: list[int] = []

    def overwrite(nbytes: int) -> None:
        if sum(seen) < 8 << 20 <= sum(seen) + nbytes:
            (s3_bucket / "large.bin").write_bytes(other)
        seen.append(nbytes)

    metering.install(overwrite)
    try:
        _, sample = read_one(source)
    finally:
        metering.install(None)
    assert sample["data"] in (other, large.tobytes())  # the old one where all parts were on their way
    assert read_one(source)[1]["data"] == other


@pytest.mark.e2e
def test_a_limit_of_the_bytes_a_request_may_ask_for_holds_for_every_request(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, large: npt.NDArray[np.uint8]
) -> None:
    source = source_through(s3_proxy, s3_server, s3_bucket)
    asked: list[int] = []
    metering.install(lambda _: None, asked.append, request_bytes=1 << 20)
    try:
        _, sample = read_one(source)
    finally:
        metering.install(None)
    assert sample["data"] == large.tobytes()
    assert s3_proxy.requests == 20
    assert max(asked) <= 1 << 20
    assert LARGE_BYTES <= sum(asked) < LARGE_BYTES + (2 << 20)


# --- secrets -----------------------------------------------------------------------------------


@pytest.mark.e2e
def test_secrets_show_in_no_text(s3_server: S3Server, s3_proxy: FaultyProxy, bucket: Path) -> None:
    source = source_through(s3_proxy, s3_server, bucket)
    shown = [repr(source), str(source), repr(source._files.remote), source.fingerprint, source.listing_digest]
    shown.append(source.key(0))
    (bucket / "even" / "000.npy").write_bytes(b"broken")
    for fault in (None, "answer_busy", "reset", "refuse"):
        if fault:
            getattr(s3_proxy, fault)(*([9] if fault == "answer_busy" else []))
        try:
            read_one(source)
        except SourceError as error:
            shown += [str(error), repr(error), repr(error.__cause__)]
        if fault:
            s3_proxy.heal()
    for wrong in ({"secret": "CANARYWRONG"}, {"bananas": "CANARYOPTION"}):
        try:
            FileSource(f"s3://{bucket.name}", storage_options=s3_server.storage_options | wrong)
        except (SourceError, ConfigError) as error:
            shown += [str(error), repr(error)]
    assert len(shown) > 12
    assert not [text for text in shown if "CANARY" in text]
