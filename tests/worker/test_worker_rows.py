"""Samples that come in columns: each once, whole, whatever cuts their units off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import cachestream as cs
from cachestream import Cache
from cachestream.storage.shard import MappedShard, shard_path
from tests.worker.sources import InRows, content
from tests.worker.support import DEADLINE_S, only_once

NBYTES = 1000


def check_values(cache: Cache) -> None:
    with cache.catalogue.reading() as tables:
        ids = tables.shard_ids()
    for shard_id in ids:
        shard = MappedShard(shard_path(cache.path, shard_id))
        for key, value in zip(shard.keys(), shard.array("x"), strict=True):
            assert np.array_equal(value, content(key, NBYTES))
        shard.close()


def test_rows_come_once_although_the_remote_goes_away_in_the_middle_of_each_unit(
    cache: Cache, tmp_path: Path
) -> None:
    source = InRows(6, 95, NBYTES, folder=str(tmp_path))
    with cs.start_worker(cache, source, num_workers=2, shard_size="20KB") as worker:
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    check_values(cache)


def test_a_worker_that_is_stopped_in_the_middle_of_rows_goes_on_there(cache: Cache, tmp_path: Path) -> None:
    source = InRows(4, 201, NBYTES, pause_s=0.05, folder=str(tmp_path))
    options: dict[str, Any] = {"num_workers": 1, "shard_size": "16KB"}
    with cs.start_worker(cache, source, **options) as worker:
        cache.wait(30, timeout_s=DEADLINE_S)
        worker.stop(DEADLINE_S)
    assert 0 < len(only_once(cache)) < 4 * 201
    with cs.start_worker(cache, source, **options) as worker:
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    check_values(cache)


def test_a_transform_sees_each_sample(cache: Cache, tmp_path: Path) -> None:
    source = InRows(2, 41, NBYTES, folder=str(tmp_path))
    with cs.start_worker(cache, source, transform=lambda sample: {"sum": int(sample["x"].sum())}) as worker:
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert cache.schema is not None
    assert cache.schema.names == ("sum",)
