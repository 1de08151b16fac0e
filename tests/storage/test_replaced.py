"""Shards that others have replaced: there for the epochs that hold them, and for nobody else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cachestream.errors import CacheError
from cachestream.schema import Split
from cachestream.storage.cache import Cache
from cachestream.storage.layout import move_aside
from cachestream.storage.leases import Lease
from cachestream.storage.publish import Progress, Publisher
from cachestream.storage.settings import choose_split
from cachestream.storage.view import View
from tests.storage.support import content, publish, shard_ids


def replace(cache: Cache, *ids: int) -> None:
    publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, "test")
    publisher.commit((), 0, (), Progress(), replaces=ids)


@contextmanager
def held(lease: Lease) -> Iterator[None]:
    try:
        yield
    finally:
        lease.release()


@pytest.fixture
def filled(cache: Cache) -> Cache:
    """A cache with the shards 1, 2 and 3, of three samples each."""
    for number in range(3):
        publish(cache, content(3 * number))
    return cache


def test_an_epoch_of_replaced_shards_is_restored_with_the_fields_that_it_had(filled: Cache) -> None:
    before, lease = filled.take_snapshot()
    replace(filled, 1, 2, 3)
    with held(lease):
        restored, again, gone = filled.restore_snapshot(before.shard_ids, before.counts)
        again.release()
    assert gone == []
    assert (restored.schema, restored.num_samples) == (before.schema, 9)


def odd(columns: Any) -> Any:
    return np.asarray(columns["n"]) % 2 == 1


@pytest.mark.parametrize("holdout", [None, 0.5])
@pytest.mark.parametrize("where", [None, odd])
def test_it_is_restored_also_by_a_process_that_never_looked_at_these_shards(
    filled: Cache, where: Any, holdout: float | None
) -> None:
    def split() -> Split | None:
        return choose_split(filled, "train", holdout) if holdout else None

    before, lease = filled.take_snapshot(split=split(), view=View(where))
    with filled.catalogue.transaction() as tables:
        tables.execute("UPDATE shards SET held_out = NULL")
    replace(filled, 1, 2)
    view = View(where)
    with held(lease):
        restored, again, gone = filled.restore_snapshot(before.shard_ids, before.counts, split(), view)
        again.release()
    assert gone == []
    assert restored.num_samples == before.num_samples
    if where is not None:
        assert restored.rows is not None
        assert restored.rows.tolist() == (before.rows if before.rows is not None else before.counts).tolist()


def test_a_later_epoch_holds_no_replaced_shard_between_two_others(filled: Cache) -> None:
    replace(filled, 2)
    _, lease = filled.take_snapshot()
    with held(lease):
        filled.enforce_limit()
        assert not os.path.exists(os.path.join(filled.path, "shards", "000000000002.safetensors"))


def test_what_no_epoch_holds_is_removed_and_no_lost_catalogue_brings_it_back(filled: Cache) -> None:
    _, lease = filled.take_snapshot(epoch_size=3)  # of shard 1
    replace(filled, 1, 2)
    with held(lease):
        assert filled.enforce_limit() > 0
        assert filled.status().leased_bytes > 0
    assert shard_ids(filled) == [1, 3]
    filled.enforce_limit()
    os.unlink(filled.catalogue.path)
    filled.rebuild()
    assert shard_ids(filled) == [3]


def test_a_cache_is_not_cleared_while_an_epoch_holds_replaced_shards(filled: Cache) -> None:
    _, lease = filled.take_snapshot()
    replace(filled, 1, 2, 3)
    with held(lease), pytest.raises(CacheError, match=r"3 shards .* leased"):
        filled.clear()
    filled.clear()


def test_a_damaged_one_is_no_loss_that_another_pass_is_to_fetch(filled: Cache) -> None:
    _, lease = filled.take_snapshot()
    replace(filled, 1)
    with held(lease):
        filled.quarantine(1, "x: broken")
        filled.quarantine(2, "x: broken")
    status = filled.status()
    assert (status.quarantined, status.evicted_shards) == (2, 1)


def test_the_file_of_a_damaged_shard_is_kept_although_others_clear_up_meanwhile(
    filled: Cache, make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_cache()

    def after_a_look_of_another(*args: Any) -> None:
        other.recover()
        move_aside(*args)

    monkeypatch.setattr("cachestream.storage.cache.move_aside", after_a_look_of_another)
    filled.quarantine(2, "x: broken")
    assert os.listdir(filled.directory.quarantine) == ["000000000002.safetensors"]
    assert other.status().quarantined == 1
