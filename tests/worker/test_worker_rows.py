"""Samples that come in columns: each once, whole, whatever cuts their units off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from tests.worker.sources import InRows
from tests.worker.support import DEADLINE_S, fill, only_once

NBYTES = 1000


@pytest.mark.e2e
def test_rows_come_once_although_the_remote_goes_away_in_the_middle_of_each_unit(
    cache: Cache, tmp_path: Path
) -> None:
    source = InRows(6, 95, NBYTES, folder=str(tmp_path))
    fill(cache, source, num_workers=2, shard_size="20KB")
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_worker_that_is_stopped_in_the_middle_of_rows_goes_on_there(cache: Cache, tmp_path: Path) -> None:
    source = InRows(4, 101, NBYTES, pause_s=0.1, folder=str(tmp_path))
    options: dict[str, Any] = {"num_workers": 1, "shard_size": "16KB"}
    with cs.start_worker(cache, source, **options) as worker:
        cache.wait(30, timeout_s=DEADLINE_S)
        worker.stop(DEADLINE_S)
    assert 0 < len(only_once(cache)) < 4 * 101
    fill(cache, source, **options)
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_transform_sees_each_sample(cache: Cache, tmp_path: Path) -> None:
    source = InRows(2, 41, NBYTES, folder=str(tmp_path))
    fill(cache, source, transform=lambda sample: {"sum": int(sample["x"].sum())})
    assert only_once(cache) == source.keys()
    assert cache.schema is not None
    assert cache.schema.names == ("sum",)
