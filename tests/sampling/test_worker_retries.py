"""What failed is tried again: at the next start, and in the next pass; what did not fail is not read again."""

from __future__ import annotations

from pathlib import Path

import cachestream as cs
from cachestream import Cache
from tests.sampling.sources import Faulty, Numbers, Switched
from tests.sampling.support import DEADLINE_S, failures_of, only_once, wait_until


def units_read(journal: Path) -> list[int]:
    return sorted(map(int, journal.read_text().split()))


def test_units_that_failed_are_read_again_at_the_next_start_and_their_samples_come_once(
    tmp_path: Path, cache: Cache
) -> None:
    switch = tmp_path / "switch"
    switch.write_text("no sample", encoding="utf-8")
    source = Switched(20, 4, switch=str(switch))
    with cs.start_worker(cache, source, num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
    assert len(only_once(cache)) == 40
    assert sum(failures_of(cache).values()) == 20
    switch.write_text("ok", encoding="utf-8")
    with cs.start_worker(cache, source, num_workers=2) as worker:
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


def test_a_start_after_failures_reads_no_unit_that_did_not_fail_and_counts_none_twice(
    tmp_path: Path, cache: Cache
) -> None:
    journal = tmp_path / "journal"
    source = Faulty(30, journal=str(journal), faults=((3, "raise"), (17, "segfault")))
    for start in range(3):
        journal.write_text("")
        with cs.start_worker(cache, source, num_workers=2) as worker:
            assert worker.wait(DEADLINE_S)
        assert failures_of(cache) == {"source": 1, "quarantined": 1}
        if start:
            # What a process published last may have come before it was known that its unit has no more.
            assert len(set(units_read(journal)) - {3, 17}) <= 4
    assert only_once(cache) == Numbers(30).keys() - {"3/0", "17/0"}


def test_units_that_failed_are_read_again_in_the_next_pass(tmp_path: Path, cache: Cache) -> None:
    switch = tmp_path / "switch"
    switch.write_text("no sample", encoding="utf-8")
    source = Switched(20, 4, switch=str(switch))
    with cs.start_worker(cache, source, num_workers=1, shard_size="20kB") as worker:
        assert worker.wait(DEADLINE_S)
        switch.write_text("ok", encoding="utf-8")
        cache.evict(cache.size_bytes - 30_000)
        wait_until(lambda: cache.num_samples == 80, "all is there, what was evicted and what had failed")
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


def evict_and_refill(cache: Cache) -> None:
    """Have another pass begin, over what is evicted, and wait until it is complete."""
    before = cache.status().pass_number
    cache.evict(cache.size_bytes - 30_000)
    wait_until(lambda: cache.status().pass_number > before, "another pass begins")
    wait_until(lambda: cache.fill_state() == "complete", "and is complete")


def test_a_unit_that_fails_in_every_pass_counts_once(cache: Cache) -> None:
    source = Faulty(20, 4, faults=((3, "raise"),))
    with cs.start_worker(cache, source, num_workers=1, shard_size="20kB") as worker:
        assert worker.wait(DEADLINE_S)
        for _ in range(2):
            evict_and_refill(cache)
            assert failures_of(cache) == {"source": 1}
