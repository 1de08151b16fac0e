"""The limit does not rest on one number of the catalogue: sizes are compared with the files, settings with a copy."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cachestream.storage.cache import Cache
from tests.storage.support import assert_sound, content, disk_bytes, new_cache, publish, use_all


def change(path: Path, statement: str) -> None:
    """Change a catalogue in a way that no cachestream does."""
    connection = sqlite3.connect(path / "catalogue.sqlite")
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    assert connection.execute(statement).rowcount
    for _, text in triggers:
        connection.execute(text)
    connection.commit()
    connection.close()


WRONG = {
    "a shard's size": "UPDATE shards SET size_bytes = 8192 WHERE id = 2",
    "a shard's size, upwards": "UPDATE shards SET size_bytes = size_bytes + 1073741824 WHERE id = 2",
}


@pytest.mark.e2e
@pytest.mark.parametrize("statement", WRONG.values(), ids=WRONG.keys())
def test_the_limit_does_not_rest_on_one_number(fast_path: Path, statement: str) -> None:
    path = fast_path / "cache"
    with new_cache(path, "2MB") as cache:
        first = 0
        while publish(cache, content(first, size_bytes=100_000)) is not None:
            first += 3
        full = cache.num_shards
    change(path, statement)
    with Cache(path) as cache:
        for more in range(first, first + 90, 3):
            use_all(cache)
            publish(cache, content(more, size_bytes=100_000))
            assert disk_bytes(str(path)) <= 2_000_000
        assert cache.num_shards >= full - 1
        assert_sound(cache)


@pytest.mark.parametrize("statement", WRONG.values(), ids=WRONG.keys())
def test_verify_tells_of_wrong_books_and_repair_corrects_them(fast_path: Path, statement: str) -> None:
    with new_cache(fast_path / "cache") as cache:
        for first in range(0, 9, 3):
            publish(cache, content(first))
        cache.close()
        change(fast_path / "cache", statement)  # while it is open
        report = cache.verify()
        assert not report.ok
        assert "the recorded size of" in str(report)
        assert cache.verify(repair=True).ok
        assert cache.verify().problems == 0
        assert_sound(cache)


def recorded(cache: Cache) -> dict[int, int]:
    with cache.catalogue.reading() as tables:
        return dict(tables.execute("SELECT id, size_bytes FROM live").fetchall())


@pytest.fixture
def sizes(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The recorded sizes of a cache of three shards, of which opening looks at the newest."""
    monkeypatch.setattr("cachestream.storage.cache._CHECKED_SHARDS", 1)
    with new_cache(fast_path / "cache") as cache:
        for first in range(0, 9, 3):
            publish(cache, content(first))
        return recorded(cache)


def test_all_sizes_are_corrected_at_opening_if_the_newest_are_wrong(
    fast_path: Path, sizes: dict[int, int]
) -> None:
    # As on another disk, to which the cache was copied.
    change(fast_path / "cache", "UPDATE shards SET size_bytes = size_bytes + 4096")
    with Cache(fast_path / "cache") as cache:
        assert recorded(cache) == sizes
        assert_sound(cache)


def test_a_wrong_size_of_an_old_shard_is_found_by_the_whole_check(
    fast_path: Path, sizes: dict[int, int]
) -> None:
    change(fast_path / "cache", f"UPDATE shards SET size_bytes = size_bytes + 4096 WHERE id = {min(sizes)}")
    with Cache(fast_path / "cache") as cache:
        assert recorded(cache) != sizes
        assert not cache.verify().ok
        cache.check_sizes()  # as a worker does each minute
        assert recorded(cache) == sizes
        assert_sound(cache)
