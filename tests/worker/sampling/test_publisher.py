"""Publishing: shards of the right sizes, each with its progress, none forced where it does not fit."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
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
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.progress import OpenRange, PassRow
from cachestream.storage.publish import write_shard
from cachestream.storage.telemetry import Board
from cachestream.worker.channel import Channel, SupervisorLink
from cachestream.worker.job import Job, Packed
from cachestream.worker.order import END, PassPlan, gaps, is_covered
from cachestream.worker.planner import Planner
from cachestream.worker.requests import Requests
from cachestream.worker.sampling import publisher as publisher_module
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.messages import News, Publication
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
    """One sampling process's publisher on `cache`, and what a supervisor answers it, without the processes."""

    def __init__(self, cache: Cache, number: int = 0, when_full: str = "evict") -> None:
        self.cache, self.number = cache, number
        self.stop, self.end = threading.Event(), threading.Event()
        job = Job(
            root=cache.path, sys_path=(), fingerprint="test", kind="sequential", seed=0, num_units=UNITS, listing="",
            num_workers=1, concurrency=1, shard_bytes=10**6, bandwidth_bytes_per_s=None, when_full=when_full,
            hang_timeout_s=30.0, custom_eviction=False, payload=Packed(b""), sampler=None,
        )  # fmt: skip
        board = Board(cache.directory.worker_file("board"))
        self.slot = board.slot(number)
        self.planner = Planner(job, cache, is_shared=False)
        self.requests = Requests(job, cache, self.planner, board, lambda: False)
        self.news = News(self.requests.status, self.requests.schema)
        ours, self.theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.requests.has_started(number, self.channel)
        link = SupervisorLink(self.theirs, lambda *_: None, lambda: None)
        self.publisher = BackgroundPublisher(job, link, self.slot, self.news, self.stop)
        taken = self.planner.take(number, 10)
        assert taken is not None
        self.row, self.units = taken.row, taken.units
        self.open = OpenShard(Packer(), Packer())
        self.supervisor = threading.Thread(target=self.supervise, daemon=True)
        self.supervisor.start()

    def supervise(self) -> None:
        """Answer as a supervisor does."""
        try:
            while not self.end.wait(0.002):
                for message in self.channel.receive() or ():
                    self.requests.handle(self.number, self.channel, message)
                self.requests.serve(time.monotonic())
                self.channel.flush()
        finally:
            self.cache.close()  # the connection of this thread

    def add(self, position: int, sample: Any) -> None:
        self.open.row, self.open.since_s = self.row, 0.0
        self.open.packer.add(to_record(sample, f"{position}/0"), self.news.schema)
        self.open.progress.add_samples(position, 0, 1)
        self.open.progress.finish_unit(position, [(1, END)])

    def send(self) -> None:
        self.open = self.publisher.send(self.open)

    def waits(self) -> bool:
        """True if the process has waited for space."""
        return bool(self.slot["space_wait_s"] > 0)

    def is_done_or_waits(self, count: int) -> bool:
        return self.publisher.published >= count or self.waits()

    def close(self) -> None:
        self.stop.set()
        self.end.set()
        self.supervisor.join()
        self.channel.close()  # whoever waits for an answer gets an error
        self.publisher._thread.shutdown()
        self.requests.has_ended(self.number)
        self.requests.release()
        self.theirs.close()
        vars(self).clear()  # the board is mapped for as long as somebody has its slot


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    cache = Cache(tmp_path / "cache", size_limit=LIMIT_BYTES, min_free=0)
    plan = PassPlan("sequential", 0, 0, UNITS, "", UNITS)
    with cache.catalogue.transaction() as tables:
        tables.insert_pass(plan.to_json(), UNITS, 0)
    yield cache
    with cache.catalogue.reading() as tables:
        assert tables.unfinished() == []
    assert cache.verify().ok
    cache.close()


@pytest.fixture
def process(cache: Cache, request: pytest.FixtureRequest) -> Any:
    process = Process(cache, when_full=getattr(request, "param", "evict"))
    yield process
    process.close()


def open_in(cache: Cache) -> tuple[OpenRange, ...]:
    """What is recorded as handed out and not done."""
    row = cache.filling.state().last_pass
    assert row is not None
    return row.open


def publication(progress: PendingProgress) -> Publication:
    return progress.publication(PassRow(1, "{}", UNITS, 0, 0), ())


def floats(nbytes: int, dtype: str = "f4") -> dict[str, Any]:
    return {"y": np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)}


def test_a_shard_and_its_progress_appear_together(cache: Cache, process: Process) -> None:
    assert [unit.position for unit in process.units] == list(range(10))
    process.add(0, floats(1000))
    process.add(1, floats(1000))
    process.send()
    process.publisher.wait()
    assert set(keys_of(cache)) == {"0/0", "1/0"}
    assert open_in(cache) == ((2, 0, 10),)
    with cache.catalogue.reading() as tables:
        spans = {pass_id: spans.tolist() for pass_id, spans in tables.spans().items()}
    assert spans == {1: [[0, 0, 2, 0]]}


def test_only_what_is_committed_counts_as_progress_of_a_process(cache: Cache, process: Process) -> None:
    """Or one that dies of what it would commit would be started again for ever."""
    process.add(0, floats(1000))
    process.open.progress.count_skipped("transform", ValueError("bad"), "1/0")
    process.send()
    process.publisher.wait()
    assert process.slot["committed"] == 1
    process.add(1, floats(1000, "f8"))
    process.send()
    with pytest.raises(StartAgainError):
        process.publisher.wait()
    assert process.slot["committed"] == 1


@pytest.mark.parametrize("process", ["wait"], indirect=True)
def test_what_follows_a_shard_that_was_given_up_is_given_up_too(cache: Cache, process: Process) -> None:
    """Else its progress would count the samples of the first as done."""
    before = open_in(cache)
    for count in range(20):
        process.add(0, floats(200_000))
        before = open_in(cache)
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
    assert open_in(cache) == before


def test_a_shard_that_began_with_the_odd_one_is_read_again_instead_of_skipped(
    cache: Cache, process: Process
) -> None:
    process.add(0, floats(1000))
    process.send()
    process.publisher.wait()
    before = open_in(cache)
    process.add(1, floats(1000, "f8"))  # it has not heard yet what the fields are
    process.send()
    with pytest.raises(StartAgainError):
        process.publisher.wait()
    assert open_in(cache) == before
    assert cache.status().failures == ()


def test_a_shard_over_half_of_a_lowered_limit_is_read_again_in_smaller_ones(
    cache: Cache, process: Process
) -> None:
    for position in range(2):
        process.add(position, floats(900_000))
    cache.size_limit = 1_500_000
    process.news.status = replace(process.news.status, limit_bytes=1_500_000)
    process.send()
    with pytest.raises(StartAgainError):
        process.publisher.wait()
    assert keys_of(cache) == {}


def test_a_sample_larger_than_the_limit_is_skipped_and_counted(cache: Cache, process: Process) -> None:
    process.add(0, floats(4_000_000))
    process.send()
    process.publisher.wait()
    (failure,) = cache.status().failures
    assert (failure.kind, failure.count) == (SampleError.__name__.removesuffix("Error").lower(), 1)
    assert "larger than the limit" in failure.reason
    assert open_in(cache) == ((1, 0, 10),)


def test_progress_without_samples_is_committed_by_itself(cache: Cache, process: Process) -> None:
    process.open.row, process.open.since_s = process.row, 0.0
    process.open.progress.finish_unit(0, [])
    process.open.progress.add_samples(2, 0, 3)
    process.open.progress.count_skipped("transform", ValueError("bad"), "0/0")
    process.send()
    process.publisher.wait()
    assert open_in(cache) == ((1, 0, 2), (2, 3, 10))
    assert [row.count for row in cache.status().failures] == [1]


def test_a_disk_that_fails_is_tried_again_and_what_was_reserved_is_given_back(
    cache: Cache, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = write_shard, list[Any]()

    def write(*arguments: Any) -> Any:
        if len(failed) < 3:
            failed.append(arguments)
            open(cache.directory.temporary_shard(arguments[1].id), "x").close()
            raise DiskFailedError("the disk fails")
        return real(*arguments)

    monkeypatch.setattr(publisher_module, "write_shard", write)
    process.add(0, floats(1000))
    process.send()
    process.publisher.wait()
    assert len(failed) == 3
    assert process.slot["refusal"] == b""
    assert set(keys_of(cache)) == {"0/0"}


def test_a_process_that_ends_leaves_none_of_what_it_was_writing(
    cache: Cache, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_written = write_shard, threading.Event()

    def write(*arguments: Any) -> Any:
        real(*arguments)
        is_written.set()
        process.end.wait()
        raise SystemExit

    monkeypatch.setattr(publisher_module, "write_shard", write)
    process.add(0, floats(1000))
    process.send()
    assert is_written.wait(60)
    assert len(os.listdir(cache.directory.shards)) == 1
    process.end.set()
    process.supervisor.join()
    process.requests.has_ended(0)
    assert os.listdir(cache.directory.shards) == []
    assert process.planner.queue.waiting == [(0, 0, 10)], "another process is to read it again"


def test_samples_in_a_row_make_one_span_and_the_last_of_them_is_the_progress() -> None:
    progress = PendingProgress()
    for offset in range(3):
        progress.add_samples(10, offset, offset + 1)
    assert progress.spans == (Span((10, 0), (10, 3)),)
    assert publication(progress).advanced == ((10, 3),)


def test_units_in_a_row_make_one_span() -> None:
    progress = PendingProgress()
    for position in (10, 11, 12):
        progress.add_samples(position, 0, 1)
        progress.finish_unit(position, [(1, END)])
    assert progress.spans == (Span((10, 0), (13, 0)),)
    assert (publication(progress).finished, publication(progress).advanced) == ((10, 11, 12), ())


def test_units_far_from_one_another_keep_their_progress_apart() -> None:
    progress = PendingProgress()
    progress.finish_unit(4, [(0, END)])
    progress.add_samples(90, 0, 1)
    assert (publication(progress).finished, publication(progress).advanced) == ((4,), ((90, 1),))
    assert progress.spans == (Span((4, 0), (5, 0)), Span((90, 0), (90, 1)))


def test_a_unit_that_is_cached_elsewhere_is_done_and_adds_no_span() -> None:
    progress = PendingProgress()
    progress.finish_unit(4, [])
    assert publication(progress).finished == (4,)
    assert progress.spans == ()
    assert not progress.is_empty


def test_a_shard_does_not_answer_for_what_an_earlier_shard_of_the_same_unit_holds() -> None:
    """The earlier shard may be evicted first: then its samples must be missed."""
    progress = PendingProgress()
    progress.add_samples(4, 0, 1)
    progress.add_samples(4, 1, 2)
    progress = PendingProgress()  # published in the middle of the unit
    progress.add_samples(4, 2, 3)
    progress.finish_unit(4, [(3, END)])
    assert progress.spans == (Span((4, 2), (5, 0)),)


@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.integers(0, 8), st.sets(st.integers(0, 7)))
def test_the_spans_of_a_unit_are_exactly_the_samples_that_lie_in_no_other_shard(
    count: int, cached: set[int], first: int, published_after: set[int]
) -> None:
    """As the filler does it, for a unit of `count` samples: some cached, the unit begun at `first`."""
    ranges = [(offset, offset + 1) for offset in sorted(cached)]
    progress, shards, done = PendingProgress(), [], first
    for offset in range(count):
        if offset < first or offset in cached:
            continue
        progress.add_samples(4, offset, offset + 1)
        done = offset + 1
        if offset in published_after:
            shards.append(progress.spans)
            progress = PendingProgress()
    progress.finish_unit(4, gaps(ranges, done))
    shards.append(progress.spans)
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
    found = {(row.kind, row.reason): (row.count, row.example) for row in publication(progress).failures}
    assert found == {
        ("transform", "ValueError: bad"): (2, "a"),
        ("sample", "torn"): (5, "c"),
        ("transform", "KeyError: no message"): (1, "d"),
    }


@pytest.mark.e2e
def test_a_reason_is_cut_before_it_fills_the_catalogue() -> None:
    progress = PendingProgress()
    progress.count_skipped("transform", ValueError("x" * 10_000), "a")
    (row,) = publication(progress).failures
    assert len(row.reason) == 300


def test_samples_that_are_packed_dropped_or_skipped_are_done_until_the_commit() -> None:
    progress = PendingProgress()
    progress.add_samples(4, 0, 3)
    progress.finish_unit(4, [(3, END)])
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
