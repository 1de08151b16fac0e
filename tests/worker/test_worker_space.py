"""Filling within the limit: evicting, waiting, stopping, limits that change, data larger than the cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.transport.metering import Throttle
from tests.storage.support import disk_bytes
from tests.worker.sources import Numbers, TwoLarge
from tests.worker.support import DEADLINE_S, failures_of, fill, only_once, wait_until

MB = 1_000_000


def within(cache: Cache, limit_bytes: int, condition: Callable[[], object], what: str) -> None:
    """Wait for `condition`; at every look the directory must be within the limit."""

    def look() -> object:
        size = disk_bytes(cache.path)
        assert size <= limit_bytes, f"{size} bytes of {limit_bytes}"
        return condition()

    wait_until(look, what)


@pytest.mark.e2e
def test_a_unit_whose_first_half_was_evicted_gets_it_back(cache: Cache) -> None:
    """Shards end in the middle of units, and the older one goes first."""
    source = Numbers(6, 40, nbytes=20_000)
    with cs.start_worker(cache, source, num_workers=1, shard_size="300KB", order="sequential") as worker:
        assert worker.wait(DEADLINE_S)
        for _ in range(3):
            before = cache.status().pass_number
            cache.evict(to=cache.size_bytes - 400_000)
            wait_until(
                lambda: cache.status().pass_number > before and cache.fill_state() == "complete",  # noqa: B023
                "what was evicted is fetched again",
            )
            assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_what_was_fetched_under_an_earlier_bandwidth_limit_holds_nothing_up(cache: Cache) -> None:
    mistyped = Throttle(cache.directory.worker_file("budget"), 1.0)
    assert mistyped.reserve(10_000_000) > 1_000_000, "seconds"
    mistyped.close()
    fill(cache, Numbers(20), bandwidth_limit="100MB/s")


@pytest.mark.slow
def test_the_bandwidth_limit_holds_for_all_processes_together(cache: Cache) -> None:
    source = Numbers(None, nbytes=20_000)
    with cs.start_worker(cache, source, num_workers=3, bandwidth_limit="1MB/s") as worker:
        cache.wait(1, DEADLINE_S)

        def fetched() -> int:
            status = worker.status().worker
            return 0 if status is None else status.totals.fetched_bytes

        looks: list[tuple[float, int, float]] = []  # seconds before, bytes, seconds after

        def has_come() -> bool:
            looks.append((time.monotonic(), fetched(), time.monotonic()))
            return looks[-1][1] - looks[0][1] > 4 * MB

        wait_until(has_come, "4 MB have come")
    assert looks[-1][1] - looks[0][1] < 1.3 * MB * (looks[-1][2] - looks[0][0])
    # The machine may be busy for a while: some stretch of a second or more is as fast as it may be.
    stretches = [
        (other[1] - one[1]) / (other[2] - one[0])
        for one in looks[::10]
        for other in looks[::10]
        if other[0] > one[2] + 1
    ]
    assert max(stretches) > 0.5 * MB


@pytest.mark.e2e
@pytest.mark.parametrize("in_rows", [False, True])
def test_a_sample_that_the_limit_never_holds_is_skipped_and_the_others_are_read_once(
    tmp_path: Path, cache: Cache, in_rows: bool
) -> None:
    cache.size_limit = 6 * MB
    journal = tmp_path / "journal"
    source = TwoLarge(60, 2, 20_000, journal=str(journal))
    options: dict[str, Any] = {} if in_rows else {"transform": lambda sample: sample}
    with cs.start_worker(cache, source, num_workers=2, **options):
        within(cache, 6 * MB, lambda: cache.fill_state() in ("complete", "full"), "nothing more comes")
    reads = Counter(journal.read_text().split())
    assert max(reads.values()) <= 2
    assert only_once(cache) == source.keys() - {"30/0"}
    assert failures_of(cache) == {"sample": 1}
    (failure,) = cache.status().failures
    assert "one sample of 8 MB is larger than the limit of 6 MB allows" in failure.reason
