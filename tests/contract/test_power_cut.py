"""A power cut, or any restart of the machine: the cache tells the truth afterwards.

Its directory is copied at a random moment while a worker fills it. What a disk may not have written yet is taken out of
the copy, and the copy is told that the machine has started again since.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, SHARD_SIZE, bytes_on_disk, numbered

BLOCK: Final = 4096
SEED: Final = os.environ.get("CRASH_SEED", time.strftime("%Y%m%d"))
LIMIT: Final = 4_000_000


def restart_the_machine(path: Path) -> None:
    """Have the cache believe that the machine has started again since it was used."""
    noted = json.loads((path / "cache.json").read_text())
    noted["boot"] = "an earlier one"
    (path / "cache.json").write_text(json.dumps(noted))


def copy_now(path: Path, to: Path) -> None:
    """Copy the files at `path` one after the other, while they change; those that vanish meanwhile are left out."""
    for folder, _, names in os.walk(path):
        inner = to / Path(folder).relative_to(path)
        inner.mkdir(mode=0o700)
        for name in names:
            try:
                data = Path(folder, name).read_bytes()
            except FileNotFoundError:
                continue
            (inner / name).write_bytes(data)
            (inner / name).chmod(0o600)


def lose_what_is_unwritten(path: Path, before: Path, draw: random.Random) -> None:
    """Take blocks, tails and whole files out of the cache at `path`, as if they had not reached the disk.

    The catalogue and its journal get blocks of an earlier copy, `before`; the settings are synced and stay.
    """
    for file in sorted((path / "shards").iterdir()):
        way = draw.choice(["stays"] * 3 + ["zeros", "tail", "empty", "gone"])
        data = bytearray(file.read_bytes())
        if way == "zeros" and data:
            for start in draw.sample(range(0, len(data), BLOCK), min(3, -(-len(data) // BLOCK))):
                data[start : start + BLOCK] = bytes(len(data[start : start + BLOCK]))
        if way == "gone":
            file.unlink()
            continue
        file.write_bytes(bytes({"tail": data[: draw.randrange(len(data) + 1)], "empty": b""}.get(way, data)))
    for name in ("catalogue.sqlite", "catalogue.sqlite-journal"):
        new, old = (folder / name for folder in (path, before))
        if not (new.exists() and old.exists()):
            continue
        data, earlier = bytearray(new.read_bytes()), old.read_bytes()
        for start in range(0, len(data), BLOCK):
            part = earlier[start : start + BLOCK]
            if draw.random() < 0.3 and part:
                data[start : start + len(part)] = part
            elif draw.random() < 0.05:
                data[start : start + BLOCK] = bytes(len(data[start : start + BLOCK]))
        new.write_bytes(data[: len(data) if draw.random() < 0.8 else draw.randrange(len(data) + 1)])


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return sample


def check(path: Path) -> None:
    """The cache at `path` delivers whole samples, each once, and is filled to the end within its limit."""
    with cs.Cache(path) as cache:
        assert cache.size_limit == LIMIT
        assert bytes_on_disk(path) <= LIMIT
        if cache.num_samples:
            with cs.EpochLoader(cache, 8, drop_last=False) as loader:
                seen = deliver(loader)
            assert len(seen) == len(set(seen))
        with cs.start_worker(
            cache, numbered(NUM_SAMPLES), transform=slow, num_workers=2, shard_size=SHARD_SIZE
        ) as worker:
            assert worker.wait(120)
        with cs.EpochLoader(cache, 8, drop_last=False) as loader:
            deliver(loader)  # what is damaged is found
        with cs.start_worker(
            cache, numbered(NUM_SAMPLES), transform=slow, num_workers=2, shard_size=SHARD_SIZE
        ) as worker:
            assert worker.wait(120)
        with cs.EpochLoader(cache, 8, drop_last=False) as loader:
            assert sorted(deliver(loader)) == list(range(NUM_SAMPLES))
        assert cache.verify().ok
        assert bytes_on_disk(path) <= LIMIT


def deliver(loader: cs.EpochLoader) -> list[int]:
    numbers: list[int] = []
    for batch in loader:
        assert (batch["x"] == batch["number"][:, None]).all(), "a torn sample is delivered"
        numbers += batch["number"].tolist()
    return numbers


def cut_the_power(folder: Path, seed: str) -> Path:
    """Fill a cache, cut the power at a random moment, and return what is left of it."""
    draw = random.Random(seed)
    path, before, after = folder / "cache", folder / "before", folder / "after"
    for one in (path, before, after):
        shutil.rmtree(one, ignore_errors=True)
    with (
        cs.Cache(path, LIMIT, min_free=0) as cache,
        cs.start_worker(cache, numbered(NUM_SAMPLES), transform=slow, num_workers=2, shard_size=SHARD_SIZE),
    ):
        cache.wait(draw.randrange(1, NUM_SAMPLES), 60)
        copy_now(path, before)
        time.sleep(draw.random() * 0.5)
        copy_now(path, after)
    lose_what_is_unwritten(after, before, draw)
    restart_the_machine(after)
    return after


def test_after_a_power_cut_nothing_torn_is_delivered_the_limit_holds_and_every_sample_comes_once(
    tmp_path: Path,
) -> None:
    check(cut_the_power(tmp_path, f"{SEED} 0"))


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(1, 11))
def test_after_any_power_cut_nothing_torn_is_delivered_and_every_sample_comes_once(
    tmp_path: Path, number: int
) -> None:
    check(cut_the_power(tmp_path, f"{SEED} {number}"))


def test_a_catalogue_that_lost_a_part_of_its_changes_is_not_believed(new_path: Callable[[], Path]) -> None:
    """Its pages are sound, and of different times: SQLite finds nothing wrong with them."""
    path = new_path()
    before = (path / "catalogue.sqlite").read_bytes()
    with cs.Cache(path) as cache:
        cache.evict(to=1_000_000)
        left = cache.num_samples
        assert 0 < left < NUM_SAMPLES
    (path / "catalogue.sqlite").write_bytes(before)
    restart_the_machine(path)
    with cs.Cache(path) as cache:
        assert cache.num_samples == left
        assert cache.verify().ok
        with cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1, shard_size=SHARD_SIZE) as worker:
            worker.wait(120)
        with cache.snapshot() as dataset:
            assert sorted(dataset[:]["number"].tolist()) == list(range(NUM_SAMPLES))


def test_an_orderly_restart_loses_neither_the_place_in_the_pass_nor_what_was_counted(
    new_path: Callable[[], Path],
) -> None:
    path = new_path()
    with cs.Cache(path) as cache:
        cache.snapshot().close()
        cache.evict(to=1_000_000)
        before = cache.status()
        assert 0 < before.num_samples < NUM_SAMPLES
    restart_the_machine(path)
    with cs.Cache(path) as cache:
        assert cache.status() == before
