"""Workers before a real S3 server, through a network that is limited, busy, or gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server, run_s3_server
from tests.worker.sources import FetchedElsewhere
from tests.worker.support import DEADLINE_S, failures_of, fill, only_once, wait_until

RATE = 20_000_000


def put_objects(bucket: Path, count: int, nbytes: int) -> set[str]:
    """Objects of random bytes, all different; their keys."""
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    names = [f"{number:05d}.bin" for number in range(count)]
    for number, name in enumerate(names):
        (bucket / name).write_bytes(number.to_bytes(4, "little") + data[4:])
    return set(names)


def excess_s(sent: Sequence[tuple[float, int]], rate: float) -> float:
    """By how much the bytes of any stretch of time were over `rate`, at most, in seconds of it."""
    times, sizes = (np.array(column, np.float64) for column in zip(*sorted(sent), strict=True))
    after = np.cumsum(sizes) - rate * times
    before = np.minimum.accumulate(after - sizes)
    return float((after - before).max() / rate)


def best_rate(sent: Sequence[tuple[float, int]], stretch_s: float) -> float:
    """The most bytes a second over any stretch of so many seconds."""
    times, sizes = (np.array(column, np.float64) for column in zip(*sorted(sent), strict=True))
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    until = np.searchsorted(times, times + stretch_s)
    return float((before[until] - before[:-1]).max() / stretch_s)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("count", "nbytes"),
    [
        pytest.param(200, 300_000, id="small", marks=pytest.mark.slow),
        pytest.param(12, 5_000_000, id="large"),
    ],
)
def test_the_processes_of_a_worker_hold_the_bandwidth_within_5_percent_over_any_10_s_from_the_first_on(
    cache: Cache, s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, count: int, nbytes: int
) -> None:
    keys = put_objects(s3_bucket, count, nbytes)
    options = s3_server.options_through(s3_proxy.port)
    source = cs.open_source(f"s3://{s3_bucket.name}", storage_options=options)
    s3_proxy.sent.clear()
    cache.size_limit = 200_000_000
    fill(cache, source, num_workers=3, bandwidth_limit=RATE)
    assert only_once(cache) == keys
    sent = s3_proxy.sent
    assert excess_s(sent, RATE) < 0.05 * 10  # which is what 5 % of 10 s are
    assert best_rate(sent, 1.0) > 0.6 * RATE  # in a second in which the machine was not busy


@pytest.mark.e2e
def test_bytes_fetched_in_an_event_loop_or_a_thread_pool_are_those_of_the_unit(
    cache: Cache, tmp_path: Path
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(3_000_000))
    with cs.start_worker(cache, FetchedElsewhere(path), num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status().worker
    assert status is not None
    assert status.totals.fetched_bytes == 4 * 3_000_000


@pytest.mark.e2e
def test_reads_become_fewer_when_the_remote_says_503_until_it_does_no_more(
    cache: Cache, s3_proxy: FaultyProxy, tmp_path: Path
) -> None:
    with run_s3_server(tmp_path / "s3", fresh=False) as server:
        bucket = server.bucket("busy")
        keys = put_objects(bucket, 600, 1000)
        s3_proxy.target_port, s3_proxy.latency_s = server.port, 0.02
        source = cs.open_source("s3://busy", storage_options=server.options_through(s3_proxy.port))
        s3_proxy.busy_above = 3
        # In small shards: so many are counted soon after they came, and there are others left.
        with cs.start_worker(cache, source, num_workers=2, concurrency=32, shard_size="16KB") as worker:
            cache.wait(150, DEADLINE_S)  # how many are too many is known by now
            s3_proxy.requests = s3_proxy.refused = 0
            assert worker.wait(DEADLINE_S)
    assert only_once(cache) == keys
    assert failures_of(cache) == {}
    assert s3_proxy.requests > 100
    assert s3_proxy.refused < 0.1 * s3_proxy.requests


@pytest.mark.e2e
@pytest.mark.parametrize("fault", [pytest.param("refuse", marks=pytest.mark.slow), "answer_busy"])
def test_what_is_cached_is_there_during_an_outage_and_all_comes_once_after_it(
    cache: Cache, s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, fault: str
) -> None:
    keys = put_objects(s3_bucket, 150, 20_000)
    options = s3_server.options_through(s3_proxy.port)
    source = cs.open_source(f"s3://{s3_bucket.name}", storage_options=options)
    s3_proxy.latency_s = 0.02
    with cs.start_worker(cache, source, num_workers=2, concurrency=4) as worker:
        cache.wait(8, DEADLINE_S)
        getattr(s3_proxy, fault)(*([] if fault == "refuse" else [1 << 30]))
        wait_until(lambda: cache.status().worker.totals.retries > 2, "the remote is tried again")  # type: ignore[union-attr]
        with cache.snapshot() as dataset:
            assert len(dataset[len(dataset) - 1]["data"]) == 20_000
        s3_proxy.heal()
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == keys
    assert failures_of(cache) == {}
