"""A flipped bit in the catalogue, or in the copy of the settings, has no effect and locks no cache."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs
from cachestream.errors import CacheStreamError
from cachestream.storage.cache import Cache
from tests.storage.support import assert_sound, content, disk_bytes, new_cache, publish, use_all

LIMIT = 4_000_000
UNITS = 24


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small cache that a real worker has filled, with its data beside it."""
    folder = tmp_path_factory.mktemp("corrupt")
    (folder / "data").mkdir()
    for number in range(UNITS):
        np.save(folder / "data" / f"{number:02d}.npy", np.full(256, number, np.int64))
    fill(folder / "cache", folder)
    with Cache(folder / "cache") as cache:
        cache.snapshot().close()
        assert cache.num_samples == UNITS
    return folder


def fill(path: Path, folder: Path) -> None:
    """Fill the cache at `path` until its pass is complete."""
    with new_cache(path, LIMIT) as cache:
        source = cs.open_source(f"{folder}/data/*.npy")
        with cs.start_worker(cache, source, num_workers=1, shard_size="8KB") as worker:
            worker.wait(60)


def use(cache: Cache) -> None:
    """Do everything that a user does with a cache."""
    assert str(cache.status())
    assert repr(cache)
    assert cache.schema is not None
    with cache.snapshot() as dataset:
        assert len({int(dataset[place]["array"][0]) for place in range(len(dataset))}) == len(dataset)


def positions(path: Path, rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Positions of meaningful bits in a file: those of page headers, and of bytes that are not 0."""
    data = path.read_bytes()
    alive = [place for place, byte in enumerate(data) if byte or place % 4096 < 108]
    for _ in range(count):
        yield rng.choice(alive), rng.randrange(8)


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def only_documented_errors(action: Callable[[], object]) -> None:
    try:
        action()
    except CacheStreamError as error:
        assert "'" in str(error) or ";" in str(error), f"{error!r} says nothing of what to do"  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("catalogue.sqlite", 25),
        ("cache.json", 10),
        pytest.param("catalogue.sqlite", 400, marks=pytest.mark.slow),
    ],
)
def test_any_bit_may_flip_and_after_a_repair_all_works(
    template: Path, fast_path: Path, name: str, count: int
) -> None:
    path = fast_path / "cache"
    for byte, bit in positions(template / "cache" / name, random.Random(count), count):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template / "cache", path)
        flip(path / name, byte, bit)
        only_documented_errors(lambda: use(Cache(path)))
        with Cache(path) as cache:
            assert cache.verify(repair=True).ok
            use(cache)
            assert cache.num_samples >= UNITS - 4, "a shard whose own row is damaged may be fetched again"
            assert cache.size_limit == LIMIT
            assert len(os.listdir(cache.directory.quarantine)) <= 1
            assert_sound(cache)


TEXTS = {
    "the kind of the pass": ("passes", "plan", "shuffle", "shuffld"),
    "the seed of the pass": ("passes", "plan", '["shuffle",0', '["shuffle",4'),
    "the end of the pass": ("passes", "plan", "]", "}"),
    "a field's name": ("schemas", "json", "array", "arrax"),
    "a field's dtype": ("schemas", "json", "int64", "int65"),
    "the source": ("meta", "value", "/data/", "/dava/"),
}
MOST_TELLING = ("the seed of the pass", "the end of the pass", "a field's dtype")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, id=what, marks=() if what in MOST_TELLING else pytest.mark.slow)
        for what, damage in TEXTS.items()
    ],
)
def test_a_worker_fills_a_cache_again_after_a_repair(
    template: Path, fast_path: Path, damage: tuple[str, str, str, str]
) -> None:
    path = fast_path / "cache"
    shutil.copytree(template / "cache", path)
    with Cache(path) as cache:
        assert cache.evict(to=cache.size_bytes - 20_000)
        left = cache.num_samples
    table, column, old, new = damage
    change(path, f"UPDATE {table} SET {column} = replace({column}, '{old}', '{new}')")
    if damage is not TEXTS["the seed of the pass"]:  # another seed makes sense: only `verify` finds it
        only_documented_errors(lambda: fill(path, template))
    with Cache(path) as cache:
        assert cache.verify(repair=True).ok
        assert cache.num_samples >= left
    fill(path, template)
    with Cache(path) as cache:
        assert cache.num_samples == UNITS
        use(cache)
        assert_sound(cache)


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
    "the total": "UPDATE totals SET size_bytes = size_bytes - 1048576",
    "the total, to nothing": "UPDATE totals SET size_bytes = 0",
    "a shard's size": "UPDATE shards SET size_bytes = 8192 WHERE id = 2",
    "a shard's size, upwards": "UPDATE shards SET size_bytes = size_bytes + 1073741824 WHERE id = 2",
    "the limit": "UPDATE meta SET value = value + 8388608 WHERE key = 'size_limit'",
}


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


@pytest.mark.parametrize("statement", list(WRONG.values())[:4], ids=list(WRONG)[:4])
def test_verify_tells_of_wrong_books_and_repair_corrects_them(fast_path: Path, statement: str) -> None:
    with new_cache(fast_path / "cache") as cache:
        for first in range(0, 9, 3):
            publish(cache, content(first))
        cache.close()
        change(fast_path / "cache", statement)  # while it is open
        report = cache.verify()
        assert not report.ok
        assert "recorded with a wrong size" in str(report) or "the sums are" in str(report)
        assert cache.verify(repair=True).ok
        assert cache.verify().problems == 0
        assert_sound(cache)


@pytest.mark.parametrize("value", ["1.5", "'x'", "-0.25"])
def test_a_held_out_share_that_cannot_be_is_restored_from_the_copy(fast_path: Path, value: str) -> None:
    with new_cache(fast_path / "cache") as cache:
        publish(cache, content(0))
        cache.snapshot(split="train", holdout=0.25).close()
    change(fast_path / "cache", f"UPDATE meta SET value = {value} WHERE key = 'holdout'")
    with Cache(fast_path / "cache") as cache:
        assert cache.status().holdout == 0.25
        assert_sound(cache)
