"""Invariant 6: the catalogue can be lost. Shards describe themselves, and the settings are not in it.

`test_catalogue_faults.py` damages it beside a worker and a trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES
from tests.contract.readers import DEADLINE_S, FOUR, Told, numbers_in


def lose_catalogue(path: Path) -> None:
    (path / "catalogue.sqlite").unlink()
    (path / "catalogue.sqlite-journal").unlink(missing_ok=True)


def lose_settings(path: Path) -> None:
    (path / "cache.json").unlink()


def alter_settings(path: Path) -> None:
    """Flip a digit of the limit in the copy."""
    text = (path / "cache.json").read_text()
    assert json.loads(text)
    (path / "cache.json").write_text(text.replace("3000000", "9000000"))


@pytest.mark.parametrize("lose", [lose_catalogue, lose_settings, alter_settings])
def test_a_cache_that_lost_its_catalogue_or_its_settings_has_its_samples_and_its_settings(
    new_path: Callable[[], Path], lose: Callable[[Path], None]
) -> None:
    path = new_path()
    with cs.Cache(path, "3MB", min_free="1MB", eviction="fifo") as cache:
        before = (cache.num_samples, cache.num_shards, str(cache.schema), cache.status().cache_id)
    lose(path)
    with cs.Cache(path) as cache:
        assert (cache.num_samples, cache.num_shards, str(cache.schema), cache.status().cache_id) == before
        assert (cache.size_limit, cache.min_free, cache.eviction) == (3_000_000, 1_000_000, "fifo")
        assert numbers_in(cache) == list(range(NUM_SAMPLES))
        assert cache.verify().ok
        cache.evict(to=900_000)
        assert 0 < cache.num_samples < NUM_SAMPLES


def test_a_pass_that_lost_the_catalogue_half_way_goes_on_where_it_was(tmp_path: Path) -> None:
    source = Told(str(tmp_path), units=30, samples=3)
    source.allow(12)
    with cs.Cache(tmp_path / "cache", "4MB", min_free=0) as cache:
        worker = cs.start_worker(cache, source, num_workers=1, concurrency=2, shard_size=FOUR)
        cache.wait(20, DEADLINE_S)
        worker.stop(DEADLINE_S)
        before, reads = numbers_in(cache), len(source.reads)
    lose_catalogue(tmp_path / "cache")
    source.allow(None)
    with cs.Cache(tmp_path / "cache") as cache:
        assert numbers_in(cache) == before
        with cs.start_worker(cache, source, num_workers=2, shard_size=FOUR) as worker:
            assert worker.wait(DEADLINE_S)
        assert numbers_in(cache) == source.numbers
    whole = {
        number // 3
        for number in before
        if {number, number + 1, number + 2} <= set(before) and number % 3 == 0
    }
    assert len(whole & set(source.units_read[reads:])) <= 1


@pytest.mark.parametrize(
    "text", ["", "[]", "5", '{"cache_id": 1, "size_limit": "x", "min_free": -1}', "{" * 9999]
)
def test_settings_that_were_lost_with_their_copy_are_those_of_a_new_cache_and_it_is_said(
    new_path: Callable[[], Path], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = new_path()
    for name in ("cache.json", "cache.spare.json"):
        (path / name).write_text(text)
    with cs.Cache(path) as cache:
        assert numbers_in(cache) == list(range(NUM_SAMPLES))
        assert cache.eviction == "lru"
        assert "its limit is" in caplog.text
        cache.size_limit = "3MB"
    with cs.Cache(path) as cache:
        assert cache.size_limit == 3_000_000
