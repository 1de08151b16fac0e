"""Filling within the limit: evicting, waiting, stopping, limits that change, data larger than the cache."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.storage.filling import RESTS, WAITS
from cachestream.transport.metering import Throttle
from tests.storage.support import disk_bytes
from tests.worker.sources import Numbers, TwoLarge
from tests.worker.support import DEADLINE_S, failures_of, fill, in_use, keys_of, only_once, wait_until

MB = 1_000_000


def within(cache: Cache, limit_bytes: int, condition: Callable[[], object], what: str) -> None:
    """Wait for `condition`; at every look the directory must be within the limit."""

    def look() -> object:
        size = disk_bytes(cache.path)
        assert size <= limit_bytes, f"{size} bytes of {limit_bytes}"
        return condition()

    wait_until(look, what)


def evicted(cache: Cache) -> int:
    return cache.status().evicted_samples


def test_data_larger_than_the_cache_turns_over_within_the_limit_and_no_key_comes_twice(
    tmp_path: Path, cache: Cache
) -> None:
    cache.size_limit = 2 * MB
    journal = tmp_path / "journal"
    source = Numbers(200, nbytes=20_000, journal=str(journal))  # 4 MB
    with cs.start_worker(cache, source, num_workers=2), in_use(cache):
        within(cache, 2 * MB, lambda: cache.status().pass_number >= 3, "a third pass")
        for _ in range(8):
            only_once(cache)
    assert failures_of(cache) == {}
    assert set(map(int, journal.read_text().split())) == set(range(200))
    assert cache.status().evicted_unused_samples == 0


@pytest.mark.e2e
def test_a_full_cache_rests_until_an_epoch_uses_it_and_reads_nothing_meanwhile(
    tmp_path: Path, cache: Cache
) -> None:
    cache.size_limit = 2 * MB
    journal = tmp_path / "journal"
    with cs.start_worker(cache, Numbers(None, nbytes=10_000, journal=str(journal)), num_workers=2) as worker:
        assert worker.wait(DEADLINE_S), "nothing more comes by itself"
        assert (cache.fill_state(), cache.status().fill_message) == ("full", RESTS)
        with pytest.raises(cs.NotEnoughSamplesError, match="no more fit into its size_limit of 2 MB"):
            cache.wait(10_000, DEADLINE_S)
        time.sleep(0.5)  # what was in flight has come
        read, have = journal.read_text(), cache.num_samples
        time.sleep(1.0)
        assert (journal.read_text(), cache.num_samples, evicted(cache)) == (read, have, 0)
        _, first = cache.take_snapshot(turnover=0.25)
        wait_until(
            lambda: cache.status().fill_message == WAITS, "an epoch uses it all: the next one is waited for"
        )
        assert cache.fill_state() == "filling"
        assert evicted(cache) == 0
        snapshot, second = cache.take_snapshot(turnover=0.25)
        assert 0.5 * have < snapshot.num_samples < 0.8 * have
        first.release()
        wait_until(lambda: evicted(cache) >= 0.2 * have, "what the second one left is replaced")
        wait_until(lambda: cache.status().epoch_waits >= 2, "and then the third one is waited for")
        second.release()
    status = cache.status()
    assert status.evicted_unused_samples == 0
    assert (status.fill_state, status.fill_message) == ("stopped", "")


@pytest.mark.e2e
def test_a_complete_cache_rests_and_the_next_starts_fetch_only_what_is_not_cached(
    tmp_path: Path, cache: Cache
) -> None:
    journal = tmp_path / "journal"
    source = Numbers(100, 2, nbytes=5_000, journal=str(journal))
    for _ in range(2):
        with cs.start_worker(cache, source, num_workers=2, shard_size="100KB") as worker:
            assert worker.wait(DEADLINE_S)
            assert worker.is_alive(), "it rests"
            assert cache.fill_state() == "complete"
        assert len(journal.read_text().split()) == 100
    cache.evict(to=cache.size_bytes - 500_000)
    lost, kept = source.keys() - only_once(cache), cache.num_shards
    assert lost
    fill(cache, source, num_workers=2, shard_size="100KB")
    assert only_once(cache) == source.keys()
    fetched = set(journal.read_text().split()[100:])
    missing = {key.partition("/")[0] for key in lost}
    assert missing <= fetched
    # A shard may be published before its last unit has said that there is no more: then that is asked again.
    assert len(fetched - missing) <= kept


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
@pytest.mark.parametrize("when_full", ["wait", "stop"])
def test_a_full_cache_is_left_as_it_is_and_filled_on_when_the_limit_is_raised(
    cache: Cache, when_full: str
) -> None:
    cache.size_limit = 2 * MB
    source = Numbers(200, nbytes=20_000)  # 4 MB
    worker = cs.start_worker(cache, source, num_workers=2, when_full=when_full)
    within(cache, 2 * MB, lambda: cache.fill_state() == "full", "it is full")
    if when_full == "stop":
        wait_until(lambda: not worker.is_alive(), "it has stopped")
        assert worker.wait(0.0)
        assert cache.fill_state() == "full"
    assert evicted(cache) == 0
    kept = only_once(cache)
    cache.size_limit = 20 * MB
    if when_full == "stop":
        worker.close()
        worker = cs.start_worker(cache, source, num_workers=2)
    assert worker.wait(DEADLINE_S)
    worker.close()
    assert only_once(cache) == source.keys() > kept
    assert evicted(cache) == 0


def test_eviction_none_fills_once(tmp_path: Path, cache: Cache) -> None:
    with (
        Cache(cache.path, 2 * MB, eviction="none") as same,
        cs.start_worker(same, Numbers(400, nbytes=10_000), num_workers=1),
    ):
        within(cache, 2 * MB, lambda: cache.fill_state() == "full", "it is full")
    assert evicted(cache) == 0
    assert only_once(cache)


@pytest.mark.e2e
def test_an_eviction_function_of_main_decides_in_the_background(cache: Cache) -> None:
    source = Numbers(600, nbytes=10_000)
    newest_first = Cache(cache.path, 3 * MB, eviction=lambda rows: sorted(rows, key=lambda row: -row.id))
    with (
        newest_first,
        cs.start_worker(newest_first, source, num_workers=1, shard_size="200KB"),
        in_use(newest_first),
    ):
        within(cache, 3 * MB, lambda: evicted(cache) > 50, "something was evicted")
        with cache.catalogue.reading() as tables:
            assert 1 in tables.shard_ids(), "the oldest stays"


@pytest.mark.e2e
def test_the_limit_may_be_lowered_and_raised_while_the_worker_runs(cache: Cache) -> None:
    cache.size_limit = 8 * MB
    source = Numbers(None, nbytes=20_000)
    with cs.start_worker(cache, source, num_workers=2, shard_size="1MB"), in_use(cache):
        within(cache, 8 * MB, lambda: evicted(cache) > 0, "it is full")
        cache.size_limit = 2 * MB
        assert disk_bytes(cache.path) <= 2 * MB, "lowered means evicted, also what was being written"
        before = evicted(cache)
        within(cache, 2 * MB, lambda: evicted(cache) > before + 300, "it goes on in smaller shards")
        cache.size_limit = 8 * MB
        within(cache, 8 * MB, lambda: cache.size_bytes > 5 * MB, "it grows again")
    assert failures_of(cache) == {}


def test_leased_shards_are_waited_for_and_filling_goes_on_when_they_are_free(cache: Cache) -> None:
    cache.size_limit = 2 * MB
    leases = []
    try:
        with cs.start_worker(cache, Numbers(None, nbytes=10_000), num_workers=1) as worker:
            within(cache, 2 * MB, lambda: cache.fill_state() == "full", "it is full")

            def waits() -> bool:
                leases.append(cache.take_snapshot()[1])  # until what comes in is leased, too
                status = worker.status().worker
                return status is not None and "waiting for space" in status.states

            within(cache, 2 * MB, waits, "nothing can go")
            snapshot, lease = cache.take_snapshot()
            leases.append(lease)
            with cache.catalogue.reading() as tables:
                assert set(snapshot.shard_ids.tolist()) <= tables.shard_ids()
            before = evicted(cache)
            for lease in leases:
                lease.release()
            within(cache, 2 * MB, lambda: evicted(cache) > before, "it goes on")
    finally:
        for lease in leases:
            lease.release()


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


def test_an_endless_source_fills_and_turns_over(cache: Cache) -> None:
    cache.size_limit = 2 * MB

    def draw(rng: np.random.Generator) -> dict[str, object]:
        return {"window": rng.random(500)}

    with cs.start_worker(cache, cs.CallableSource(draw), num_workers=2) as worker, in_use(cache):
        within(cache, 2 * MB, lambda: evicted(cache) > 100, "it turns over")
        assert worker.status().pass_done is None
    keys = keys_of(cache)
    assert max(keys.values()) == 1


def test_a_wait_that_is_too_short_says_how_far_the_filling_is(cache: Cache) -> None:
    with (
        cs.start_worker(cache, Numbers(None, pause_s=0.5), num_workers=1) as worker,
        pytest.raises(TimeoutError, match=r"not complete within 0\.2 s; wait longer") as caught,
    ):
        worker.wait(0.2)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), cs.WorkerTimeoutError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


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
