"""A reused snapshot holds the same shards as a new one would, and each of its uses is counted."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import CacheFullError, EpochError, NotEnoughSamplesError
from cachestream.schema import Snapshot
from cachestream.storage.cache import Cache
from cachestream.storage.leases import Lease, join_lease
from cachestream.storage.snapshots import ReusableSnapshots
from tests.storage.support import (
    Line,
    assert_sound,
    content,
    fork,
    new_cache,
    publish,
    shard_ids,
    worker_runs,
)


@pytest.fixture
def filled(cache: Cache) -> Cache:
    for first in range(0, 12, 3):
        publish(cache, content(first))
    return cache


class Reader:
    """Takes snapshots, holds some of them, and counts each shard's uses."""

    def __init__(self, cache: Cache) -> None:
        self.now_s = 0.0
        self.cache = cache
        self.reusable = ReusableSnapshots(cache, lambda: self.now_s)
        self.held: list[Lease] = []
        self.uses: Counter[int] = Counter()
        self.taken = 0

    def take(self) -> Snapshot:
        snapshot, lease = self.reusable.take(None, 0.25)
        assert lease.held
        self.held.append(lease)
        self.uses.update(snapshot.shard_ids.tolist())
        self.taken += 1
        return snapshot

    def release(self) -> None:
        if self.held:
            self.held.pop(0).release()

    def end(self) -> None:
        while self.held:
            self.release()
        self.reusable.settle()


def uses(cache: Cache) -> dict[int, int]:
    with cache.catalogue.reading() as tables:
        return {row.id: row.uses for row in tables.shards()}


def in_another_process(act: Callable[[Cache], object]) -> Callable[[Cache], None]:
    def do(cache: Cache) -> None:
        def run(line: Line) -> None:
            act(Cache(cache.path))
            line.say("done")

        child = fork(run)
        assert child.hear() == "done"
        assert child.wait() == 0

    return do


def test_a_cache_that_nobody_changes_is_leased_once(filled: Cache) -> None:
    reader = Reader(filled)
    first, *more = (reader.take() for _ in range(5))
    assert all(snapshot is first for snapshot in more)
    assert filled.status().leases == 1
    reader.end()
    assert filled.status().leases == 0
    assert filled.status().snapshots == 5
    assert uses(filled) == dict.fromkeys(shard_ids(filled), 5)
    filled.evict(to=0)
    assert_sound(filled)


def test_the_shards_stay_until_the_last_who_was_given_them_lets_go(filled: Cache) -> None:
    reader = Reader(filled)
    reader.take()
    reader.take()
    reader.reusable.settle()
    reader.release()
    reader.held[0].release()
    reader.held.clear()
    reader.take()
    reader.take()
    last = reader.held.pop()
    reader.end()
    filled.evict(to=0)
    assert filled.num_shards == 4
    last.release()
    last.release()
    filled.evict(to=0)
    assert filled.num_shards == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: publish(cache, content(100)),
        lambda cache: cache.quarantine(2),
        in_another_process(lambda cache: publish(cache, content(100))),
        in_another_process(lambda cache: cache.quarantine(2)),
    ],
    ids=["one-more", "one-less", "one-more-by-another", "one-less-by-another"],
)
def test_a_change_by_whomever_makes_a_new_one(filled: Cache, change: Callable[[Cache], object]) -> None:
    reader = Reader(filled)
    reader.take()
    before = reader.take().shard_ids.tolist()
    change(filled)
    after = reader.take().shard_ids.tolist()
    assert after == shard_ids(filled) != before
    reader.end()
    assert {shard: reader.uses[shard] for shard in shard_ids(filled)} == uses(filled)


def test_a_change_just_after_it_was_taken_makes_a_new_one(
    filled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, take = Reader(filled), filled.take_snapshot

    def take_and_publish(*arguments: Any) -> tuple[Snapshot, Lease]:
        taken = take(*arguments)
        publish(filled, content(100))
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(filled, "take_snapshot", take_and_publish)
        before = reader.take().shard_ids.tolist()
    after = reader.take().shard_ids.tolist()
    assert after == shard_ids(filled) != before
    reader.end()


def test_a_catalogue_that_was_lost_makes_a_new_one(filled: Cache) -> None:
    reader = Reader(filled)
    first = reader.take()
    Path(filled.catalogue.path).unlink()
    filled.rebuild()
    assert reader.take() is not first
    reader.end()
    assert_sound(filled)


def test_a_lease_that_somebody_removed_is_not_given_out(filled: Cache) -> None:
    reader = Reader(filled)
    first = reader.take()
    Path(first.lease).unlink()
    with pytest.raises(EpochError):
        join_lease(first.lease)
    second = reader.take()
    join_lease(second.lease).release()
    reader.end()


def test_it_stands_for_ten_seconds(filled: Cache) -> None:
    """A process that is killed loses no more uses than those."""
    reader = Reader(filled)
    first = reader.take()
    reader.now_s = 9.99
    assert reader.take() is first
    reader.now_s = 10.01
    assert reader.take() is not first
    assert set(uses(filled).values()) == {3}
    reader.end()


def test_what_depends_on_the_uses_or_on_a_worker_is_always_new(filled: Cache) -> None:
    reusable = ReusableSnapshots(filled)
    chosen = [reusable.take(3, 0.25)[0].shard_ids.tolist() for _ in range(4)]
    assert chosen == [[1], [2], [3], [4]]
    with worker_runs(filled):
        taken = [reusable.take(None, 0.25) for _ in range(3)]
        assert len({snapshot.lease for snapshot, _ in taken}) == 3
    assert len({reusable.take(None, 0.25)[0].lease for _ in range(3)}) == 1


def test_an_empty_cache_is_an_error_and_nothing_is_kept_of_it(cache: Cache) -> None:
    reusable = ReusableSnapshots(cache)
    with pytest.raises(NotEnoughSamplesError, match="is empty"):
        reusable.take(None, 0.25)
    publish(cache, content(0))
    assert reusable.take(None, 0.25)[0].num_samples == 3


def test_the_last_one_is_taken_again_while_no_new_one_can_be(
    filled: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(filled)

    def fail(*_: Any) -> None:
        raise CacheFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(filled, "take_snapshot", fail)
        with pytest.raises(CacheFullError):
            reader.take()
    first = reader.take()
    reader.release()
    publish(filled, content(100))
    with monkeypatch.context() as patch:
        patch.setattr(filled, "take_snapshot", fail)
        for _ in range(2):
            snapshot, lease = reader.reusable.take(None, 0.25)
            assert snapshot is first
            assert lease.held
            lease.release()
    assert [one for one in caplog.messages if "the disk is full" in one] == [
        f"{filled.path}: no new snapshot can be taken (the disk is full); until one can, epochs are drawn from the last one"
    ]
    assert reader.take() is not first
    reader.end()
    assert filled.status().leases == 0


def test_uses_that_a_full_disk_refuses_are_counted_once_it_takes_them(
    filled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(filled)
    for _ in range(3):
        reader.take()
    publish(filled, content(100))

    def fail(*_: Any) -> None:
        raise CacheFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("cachestream.storage.tables.Tables.mark_used", fail)
        reader.reusable.take(None, 0.25)[1].release()  # the last one
    reader.take()
    assert uses(filled) == reader.uses
    reader.end()


def test_a_cache_that_was_removed_is_not_made_again(filled: Cache) -> None:
    reader = Reader(filled)
    for _ in range(3):
        reader.take()
    shutil.rmtree(filled.path)
    reader.end()
    assert not Path(filled.path).exists()


def test_a_fork_between_two_uses_holds_nothing(filled: Cache) -> None:
    reader = Reader(filled)
    reader.take()
    reader.take()

    def outlive(line: Line) -> None:
        line.say(str([lease.held for lease in reader.held]))
        line.wait_for_word()

    child = fork(outlive)
    assert child.hear() == "[False, False]"
    reader.end()
    filled.evict(to=0)
    assert filled.num_shards == 0
    child.kill()


STEPS: dict[str, Callable[[Reader], object]] = {
    "take": Reader.take,
    "release": Reader.release,
    "settle": lambda reader: reader.reusable.settle(),
    "wait": lambda reader: setattr(reader, "now_s", reader.now_s + 6.0),
    "publish": lambda reader: publish(reader.cache, content(100)),
    "lose": lambda reader: reader.cache.quarantine(max(shard_ids(reader.cache)[1:], default=-1)),
    "evict": lambda reader: reader.cache.evict(to=reader.cache.size_bytes - 1),
    "other": lambda reader: reader.uses.update(_take_and_release(reader)),
}


def _take_and_release(reader: Reader) -> list[int]:
    snapshot, lease = reader.cache.take_snapshot()
    lease.release()
    reader.taken += 1
    return list(snapshot.shard_ids.tolist())


@pytest.mark.e2e
@given(st.lists(st.sampled_from(["take", "take", *STEPS]), max_size=25))
def test_whatever_happens_in_between_it_holds_what_is_there_and_counts_every_use(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    with new_cache(tmp_path_factory.mktemp("reused") / "cache") as cache:
        for first in range(0, 9, 3):
            publish(cache, content(first))
        reader = Reader(cache)
        for step in steps:
            if not cache.num_shards:
                publish(cache, content(200))
            if step == "take":
                assert reader.take().shard_ids.tolist() == shard_ids(cache)
            else:
                STEPS[step](reader)
        reader.end()
        assert cache.status().leases == 0
        assert cache.status().snapshots == reader.taken
        assert uses(cache) == {shard: reader.uses[shard] for shard in shard_ids(cache)}
