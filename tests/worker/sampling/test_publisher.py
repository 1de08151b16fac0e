"""Publishing: shards of the right sizes, each with its progress, none forced where it does not fit."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream import Cache
from cachestream.errors import SampleError
from cachestream.schema import Span
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import Board
from cachestream.worker.job import Job, Packed
from cachestream.worker.order import END, PassPlan, gaps, is_covered
from cachestream.worker.passes import next_claim
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer
from cachestream.worker.sampling.publisher import (
    BackgroundPublisher,
    OpenShard,
    PendingProgress,
    StartAgainError,
)
from cachestream.worker.sampling.shard_writer import FIRST_AGE_S, FIRST_BYTES, max_age_s, target_bytes
from tests.worker.support import keys_of, wait_until

LIMIT_BYTES = 3_000_000
UNITS = 100


class Process:
    """One sampling process's publisher on `cache`, without the process."""

    def __init__(self, cache: Cache, name: str, when_full: str = "evict") -> None:
        self.cache = cache
        self.stop = threading.Event()
        self.owner = Owner(cache.directory, name)
        self.slot = Board(cache.directory.worker_file("board")).slot(0)
        job = Job(
            root=cache.path, sys_path=(), fingerprint="test", kind="sequential", seed=0, num_units=UNITS, listing="",
            num_workers=1, concurrency=1, shard_bytes=10**6, bandwidth_bytes_per_s=None, when_full=when_full,
            hang_timeout_s=30.0, custom_eviction=False, payload=Packed(b""), sampler=None,
        )  # fmt: skip
        self.publisher = BackgroundPublisher(job, cache, self.slot, owner=name, stop=self.stop)
        assignment = next_claim(cache.filling, name, 1)
        assert assignment is not None
        self.assignment = assignment
        self.open = OpenShard(Packer(), Packer())

    def add(self, position: int, sample: Any) -> None:
        self.open.row, self.open.since_s = self.assignment.row, 0.0
        self.open.packer.add(to_record(sample, f"{position}/0"), self.publisher.schema)
        self.open.progress.add_samples(self.assignment.claim.id, position, 0, 1)
        self.open.progress.finish_unit(self.assignment.claim.id, position, [(1, END)])

    def send(self) -> None:
        self.open = self.publisher.send(self.open)

    def waits(self) -> bool:
        """True if the process has waited for space."""
        return bool(self.slot["space_wait_s"] > 0)

    def is_done_or_waits(self, count: int) -> bool:
        return self.publisher.published >= count or self.waits()

    def close(self) -> None:
        self.stop.set()
        self.publisher._thread.shutdown()
        self.owner.release()


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    cache = Cache(tmp_path / "cache", size_limit=LIMIT_BYTES, min_free=0)
    plan = PassPlan("sequential", 0, 0, UNITS, "", UNITS)
    with cache.catalogue.transaction() as tables:
        tables.insert_pass(plan.to_json(), UNITS, 0)
    yield cache
    assert cache.verify().ok
    cache.close()


def progress_of(cache: Cache) -> list[tuple[int, int]]:
    with cache.catalogue.reading() as tables:
        return [(claim.position, claim.offset) for claim, _ in tables.claims(1)]


def floats(nbytes: int, dtype: str = "f4") -> dict[str, Any]:
    return {"y": np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)}


def test_a_shard_and_its_progress_appear_together(cache: Cache) -> None:
    process = Process(cache, "a")
    first = process.assignment.claim.position
    process.add(first, floats(1000))
    process.add(first + 1, floats(1000))
    process.send()
    process.publisher.wait()
    assert set(keys_of(cache)) == {f"{first}/0", f"{first + 1}/0"}
    assert progress_of(cache) == [(first + 2, 0)]
    with cache.catalogue.reading() as tables:
        spans = {pass_id: spans.tolist() for pass_id, spans in tables.spans().items()}
    assert spans == {1: [[first, 0, first + 2, 0]]}
    process.close()


@pytest.mark.e2e
def test_only_what_is_committed_counts_as_progress_of_a_process(cache: Cache) -> None:
    """Or one that dies of what it would commit would be started again for ever."""
    one, other = Process(cache, "a"), Process(cache, "b")
    one.add(one.assignment.claim.position, floats(1000))
    other.add(other.assignment.claim.position, floats(1000, "f8"))
    other.open.progress.count_skipped("transform", ValueError("bad"), "1/0")
    other.send()
    other.publisher.wait()
    assert other.slot["committed"] == 1
    one.send()
    with pytest.raises(StartAgainError):
        one.publisher.wait()
    assert one.slot["committed"] == 1, "both are in slot 0"
    one.close()
    other.close()


@pytest.mark.e2e
def test_what_follows_a_shard_that_was_given_up_is_given_up_too(cache: Cache) -> None:
    """Else its progress would count the samples of the first as done."""
    process = Process(cache, "a", when_full="wait")
    before = progress_of(cache)
    for count in range(20):
        process.add(0, floats(200_000))
        before = progress_of(cache)
        process.send()
        wait_until(partial(process.is_done_or_waits, count + 1), "published, or waiting for space")
        if process.waits():
            break
    assert process.waits()
    published = process.publisher.published
    assert published > 0
    process.add(1, floats(100))
    process.stop.set()
    process.send()
    process.publisher.wait()
    assert process.publisher.published == published
    assert progress_of(cache) == before
    process.close()


@pytest.mark.e2e
def test_a_shard_that_began_with_the_odd_one_is_read_again_instead_of_skipped(cache: Cache) -> None:
    one, other = Process(cache, "a"), Process(cache, "b")
    one.add(one.assignment.claim.position, floats(1000))
    other.add(other.assignment.claim.position, floats(1000, "f8"))
    one.send()
    one.publisher.wait()
    before = progress_of(cache)
    other.send()
    with pytest.raises(StartAgainError):
        other.publisher.wait()
    assert progress_of(cache) == before
    assert cache.status().failures == ()
    one.close()
    other.close()


@pytest.mark.e2e
def test_a_shard_over_half_of_a_lowered_limit_is_read_again_in_smaller_ones(cache: Cache) -> None:
    process = Process(cache, "a")
    for position in range(2):
        process.add(position, floats(900_000))
    cache.size_limit = 1_500_000
    process.send()
    with pytest.raises(StartAgainError):
        process.publisher.wait()
    assert keys_of(cache) == {}
    process.close()


def test_a_sample_larger_than_the_limit_is_skipped_and_counted(cache: Cache) -> None:
    process = Process(cache, "a")
    process.add(0, floats(4_000_000))
    process.send()
    process.publisher.wait()
    (failure,) = cache.status().failures
    assert (failure.kind, failure.count) == (SampleError.__name__.removesuffix("Error").lower(), 1)
    assert "larger than the limit" in failure.reason
    assert progress_of(cache) == [(1, 0)]
    process.close()


def test_progress_without_samples_is_committed_by_itself(cache: Cache) -> None:
    process = Process(cache, "a")
    process.open.row, process.open.since_s = process.assignment.row, 0.0
    process.open.progress.finish_unit(process.assignment.claim.id, 0, [])
    process.open.progress.count_skipped("transform", ValueError("bad"), "0/0")
    process.send()
    process.publisher.wait()
    assert progress_of(cache) == [(1, 0)]
    assert [row.count for row in cache.status().failures] == [1]
    process.close()


def test_samples_in_a_row_make_one_span_and_the_last_of_them_is_the_progress() -> None:
    progress = PendingProgress()
    for offset in range(3):
        progress.add_samples(7, 10, offset, offset + 1)
    assert progress.spans == [Span((10, 0), (10, 3))]
    assert progress.for_pass(1).claims == ((7, 10, 3),)


def test_units_in_a_row_make_one_span() -> None:
    progress = PendingProgress()
    for position in (10, 11, 12):
        progress.add_samples(7, position, 0, 1)
        progress.finish_unit(7, position, [(1, END)])
    assert progress.spans == [Span((10, 0), (13, 0))]
    assert progress.for_pass(1).claims == ((7, 13, 0),)


def test_two_claims_keep_their_progress_apart() -> None:
    progress = PendingProgress()
    progress.finish_unit(1, 4, [(0, END)])
    progress.add_samples(2, 90, 0, 1)
    assert set(progress.for_pass(0).claims) == {(1, 5, 0), (2, 90, 1)}
    assert progress.spans == [Span((4, 0), (5, 0)), Span((90, 0), (90, 1))]


def test_a_unit_that_is_cached_elsewhere_moves_the_claim_and_adds_no_span() -> None:
    progress = PendingProgress()
    progress.finish_unit(1, 4, [])
    assert progress.for_pass(0).claims == ((1, 5, 0),)
    assert progress.spans == []
    assert not progress.is_empty


def test_a_shard_does_not_answer_for_what_an_earlier_shard_of_the_same_unit_holds() -> None:
    """The earlier shard may be evicted first: then its samples must be missed."""
    progress = PendingProgress()
    progress.add_samples(1, 4, 0, 1)
    progress.add_samples(1, 4, 1, 2)
    progress = PendingProgress()  # published in the middle of the unit
    progress.add_samples(1, 4, 2, 3)
    progress.finish_unit(1, 4, [(3, END)])
    assert progress.spans == [Span((4, 2), (5, 0))]


@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.integers(0, 8), st.sets(st.integers(0, 7)))
def test_the_spans_of_a_unit_are_exactly_the_samples_that_lie_in_no_other_shard(
    count: int, cached: set[int], first: int, published_after: set[int]
) -> None:
    """As the filler does it, for a unit of `count` samples: some cached, the claim begun at `first`."""
    ranges = [(offset, offset + 1) for offset in sorted(cached)]
    progress, shards, done = PendingProgress(), [], first
    for offset in range(count):
        if offset < first or offset in cached:
            continue
        progress.add_samples(1, 4, offset, offset + 1)
        done = offset + 1
        if offset in published_after:
            shards.append(list(progress.spans))
            progress = PendingProgress()
    progress.finish_unit(1, 4, gaps(ranges, done))
    shards.append(list(progress.spans))
    held = [
        {offset for offset in range(12) if any(s.start <= (4, offset) < s.stop for s in spans)}
        for spans in shards
    ]
    assert sum(map(len, held)) == len(set().union(*held)), "a sample in two shards"
    assert set().union(*held) == {offset for offset in range(12) if offset >= first and offset not in cached}
    assert not any(is_covered(ranges, offset) for offset in set().union(*held))


def test_failures_are_counted_by_reason_with_their_first_example() -> None:
    progress = PendingProgress()
    progress.count_skipped("transform", ValueError("bad"), "a")
    progress.count_skipped("transform", ValueError("bad"), "b")
    progress.count_skipped("sample", SampleError("torn"), "c", 5)
    progress.count_skipped("transform", KeyError(), "d")
    found = {(row.kind, row.reason): (row.count, row.example) for row in progress.for_pass(0).failures}
    assert found == {
        ("transform", "ValueError: bad"): (2, "a"),
        ("sample", "torn"): (5, "c"),
        ("transform", "KeyError: no message"): (1, "d"),
    }


@pytest.mark.e2e
def test_a_reason_is_cut_before_it_fills_the_catalogue() -> None:
    progress = PendingProgress()
    progress.count_skipped("transform", ValueError("x" * 10_000), "a")
    (row,) = progress.for_pass(0).failures
    assert len(row.reason) == 300


def test_samples_that_are_packed_dropped_or_skipped_are_done_until_the_commit() -> None:
    progress = PendingProgress()
    progress.add_samples(1, 4, 0, 3)
    progress.finish_unit(1, 4, [(3, END)])
    assert progress.done == 3


def test_shards_double_up_to_the_full_size() -> None:
    sizes = [target_bytes(published, 64 * 2**20, 10**12) for published in range(12)]
    assert sizes[:3] == [FIRST_BYTES, 2 * FIRST_BYTES, 4 * FIRST_BYTES]
    assert sizes[8:] == [64 * 2**20] * 4


@given(st.integers(0, 10**6), st.integers(1, 10**12), st.integers(1, 10**15))
def test_a_shard_is_never_empty_nor_larger_than_asked_nor_than_an_eighth_of_the_limit(
    published: int, shard_bytes: int, limit_bytes: int
) -> None:
    target = target_bytes(published, shard_bytes, limit_bytes)
    assert 1 <= target <= max(1, min(shard_bytes, limit_bytes // 8))


@given(st.floats(0, 10**7), st.floats(0, 10**7))
def test_samples_wait_longer_as_the_worker_grows_older_but_never_over_a_minute(
    one_s: float, other_s: float
) -> None:
    early_s, late_s = sorted((one_s, other_s))
    assert FIRST_AGE_S <= max_age_s(early_s) <= max_age_s(late_s) <= 60.0
