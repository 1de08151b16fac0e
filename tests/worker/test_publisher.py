"""Publishing: progress never passes over a shard that was not published, and no shard is forced where it fits not."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestream import Cache
from cachestream.errors import SampleError
from cachestream.schema import Span
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import Board
from cachestream.worker.encode import to_record
from cachestream.worker.job import Job, Packed
from cachestream.worker.order import END, PassPlan
from cachestream.worker.packer import Packer
from cachestream.worker.passes import next_claim
from cachestream.worker.publisher import OpenShard, Outbox, StartAgainError
from tests.worker.support import keys_of, wait_until

LIMIT_BYTES = 3_000_000
UNITS = 100


class Process:
    """One sampling process's outbox on `cache`, without the process."""

    def __init__(self, cache: Cache, name: str, when_full: str = "evict") -> None:
        self.cache = cache
        self.stop = threading.Event()
        self.owner = Owner(cache.directory, name)
        self.slot = Board(cache.directory.worker_file("board")).slot(0)
        job = Job(
            root=cache.path, sys_path=(), fingerprint="test", kind="sequential", seed=0, num_units=UNITS, listing="",
            num_workers=1, concurrency=1, shard_bytes=10**6, bandwidth_bytes_per_s=None, when_full=when_full,
            hang_timeout_s=30.0, custom_eviction=False, payload=Packed(b""), sampler=b"",
        )  # fmt: skip
        self.outbox = Outbox(job, cache, self.slot, owner=name, stop=self.stop)
        assignment = next_claim(cache.filling, name, 1)
        assert assignment is not None
        self.assignment = assignment
        self.open = OpenShard(Packer(), Packer())

    def add(self, position: int, sample: Any) -> None:
        self.open.row, self.open.since_s = self.assignment.row, 0.0
        self.open.packer.add(f"{position}/0", to_record(sample), self.outbox.schema)
        self.open.tally.passed(self.assignment.claim.id, position, 0, 1)
        self.open.tally.finished(self.assignment.claim.id, position, [(1, END)])

    def send(self) -> None:
        self.open = self.outbox.send(self.open)

    def waits(self) -> bool:
        """True if the process has waited for space."""
        return bool(self.slot["space_wait_s"] > 0)

    def is_done_or_waits(self, count: int) -> bool:
        return self.outbox.published >= count or self.waits()

    def close(self) -> None:
        self.stop.set()
        self.outbox._thread.shutdown()
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
    process.outbox.settle()
    assert set(keys_of(cache)) == {f"{first}/0", f"{first + 1}/0"}
    assert progress_of(cache) == [(first + 2, 0)]
    with cache.catalogue.reading() as tables:
        assert tables.spans() == {1: [Span((first, 0), (first + 2, 0))]}
    process.close()


def test_only_what_is_committed_counts_as_progress_of_a_process(cache: Cache) -> None:
    """Or one that dies of what it would commit would be started again for ever."""
    one, other = Process(cache, "a"), Process(cache, "b")
    one.add(one.assignment.claim.position, floats(1000))
    other.add(other.assignment.claim.position, floats(1000, "f8"))
    other.open.tally.skipped("transform", ValueError("bad"), "1/0")
    other.send()
    other.outbox.settle()
    assert other.slot["committed"] == 1
    one.send()
    with pytest.raises(StartAgainError):
        one.outbox.settle()
    assert one.slot["committed"] == 1, "both are in slot 0"
    one.close()
    other.close()


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
    published = process.outbox.published
    assert published > 0
    process.add(1, floats(100))
    process.stop.set()
    process.send()
    process.outbox.settle()
    assert process.outbox.published == published
    assert progress_of(cache) == before
    process.close()


def test_a_shard_that_began_with_the_odd_one_is_read_again_instead_of_skipped(cache: Cache) -> None:
    one, other = Process(cache, "a"), Process(cache, "b")
    one.add(one.assignment.claim.position, floats(1000))
    other.add(other.assignment.claim.position, floats(1000, "f8"))
    one.send()
    one.outbox.settle()
    before = progress_of(cache)
    other.send()
    with pytest.raises(StartAgainError):
        other.outbox.settle()
    assert progress_of(cache) == before
    assert cache.status().failures == ()
    one.close()
    other.close()


def test_a_shard_over_half_of_a_lowered_limit_is_read_again_in_smaller_ones(cache: Cache) -> None:
    process = Process(cache, "a")
    for position in range(2):
        process.add(position, floats(900_000))
    cache.size_limit = 1_500_000
    process.send()
    with pytest.raises(StartAgainError):
        process.outbox.settle()
    assert keys_of(cache) == {}
    process.close()


def test_a_sample_larger_than_the_limit_is_skipped_and_counted(cache: Cache) -> None:
    process = Process(cache, "a")
    process.add(0, floats(4_000_000))
    process.send()
    process.outbox.settle()
    (failure,) = cache.status().failures
    assert (failure.kind, failure.count) == (SampleError.__name__.removesuffix("Error").lower(), 1)
    assert "larger than the limit" in failure.reason
    assert progress_of(cache) == [(1, 0)]
    process.close()


def test_progress_without_samples_is_committed_by_itself(cache: Cache) -> None:
    process = Process(cache, "a")
    process.open.row, process.open.since_s = process.assignment.row, 0.0
    process.open.tally.finished(process.assignment.claim.id, 0, [])
    process.open.tally.skipped("transform", ValueError("bad"), "0/0")
    process.send()
    process.outbox.settle()
    assert progress_of(cache) == [(1, 0)]
    assert [row.count for row in cache.status().failures] == [1]
    process.close()
