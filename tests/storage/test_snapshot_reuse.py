"""The snapshots of one reader: each is leased as long as it is held, and the last one stands in for a new one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cachestream.errors import CacheFullError, EpochError, NotEnoughSamplesError
from cachestream.storage.cache import Cache
from cachestream.storage.leases import join_lease
from cachestream.storage.snapshots import ReusableSnapshots
from tests.storage.support import Line, content, fork, publish, shard_ids


@pytest.fixture
def filled(cache: Cache) -> Cache:
    for first in range(0, 12, 3):
        publish(cache, content(first))
    return cache


def test_each_is_counted_and_holds_its_shards_until_it_is_released(filled: Cache) -> None:
    reader = ReusableSnapshots(filled)
    leases = [reader.take(None, 0.25)[1] for _ in range(3)]
    for lease in leases:
        lease.release()
    assert filled.status().leases == 1, "the last one is kept"
    with filled.catalogue.reading() as tables:
        assert {row.id: row.uses for row in tables.shards()} == dict.fromkeys(shard_ids(filled), 3)
    reader.close()
    assert filled.status().leases == 0


def test_a_lease_that_somebody_removed_is_not_given_out(filled: Cache) -> None:
    reader = ReusableSnapshots(filled)
    first = reader.take(None, 0.25)[0]
    Path(first.lease).unlink()
    with pytest.raises(EpochError):
        join_lease(first.lease)
    second = reader.take(None, 0.25)[0]
    join_lease(second.lease).release()
    reader.close()


def test_an_empty_cache_is_an_error_and_nothing_is_kept_of_it(cache: Cache) -> None:
    reader = ReusableSnapshots(cache)
    with pytest.raises(NotEnoughSamplesError, match="is empty"):
        reader.take(None, 0.25)
    publish(cache, content(0))
    assert reader.take(None, 0.25)[0].num_samples == 3
    reader.close()


def test_the_last_one_is_taken_again_while_no_new_one_can_be(
    filled: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ReusableSnapshots(filled)

    def fail(*_: Any) -> None:
        raise CacheFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(filled, "take_snapshot", fail)
        with pytest.raises(CacheFullError):
            reader.take(None, 0.25)
    first, lease = reader.take(None, 0.25)
    lease.release()
    with monkeypatch.context() as patch:
        patch.setattr(filled, "take_snapshot", fail)
        for _ in range(2):
            snapshot, lease = reader.take(None, 0.25)
            assert snapshot is first
            assert lease.held
            lease.release()
    assert [one for one in caplog.messages if "the disk is full" in one] == [
        f"{filled.path}: no new snapshot can be taken (the disk is full); until one can, epochs are drawn from the last one"
    ]
    snapshot, lease = reader.take(None, 0.25)
    assert snapshot is not first
    lease.release()
    reader.close()
    assert filled.status().leases == 0


def test_a_cache_that_was_removed_is_not_made_again(filled: Cache) -> None:
    reader = ReusableSnapshots(filled)
    reader.take(None, 0.25)
    shutil.rmtree(filled.path)
    reader.close()
    assert not Path(filled.path).exists()


def test_a_fork_holds_nothing(filled: Cache) -> None:
    reader = ReusableSnapshots(filled)
    lease = reader.take(None, 0.25)[1]

    def outlive(line: Line) -> None:
        line.say(str(lease.held))
        line.wait_for_word()

    child = fork(outlive)
    assert child.hear() == "False"
    lease.release()
    reader.close()
    filled.evict(to=0)
    assert filled.num_shards == 0
    child.kill()
