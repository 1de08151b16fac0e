"""The held-out split: the same samples on every run, never trained on, and kept while others are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache, CacheError, ConfigError, EpochLoader, NotEnoughSamplesError
from cachestream.schema import Split, is_held_out
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.storage.snapshots import count_samples
from cachestream.tools.refetching import refetch
from cachestream.worker.order import END, intersection
from tests.training.conftest import NewCache
from tests.training.sources import COUNT, Numbered, Slow
from tests.worker.support import DEADLINE_S, sampling_pids, wait_until

SHARE = 0.2


def train_until(cache: Cache, is_enough: Callable[[], bool]) -> None:
    """Train on one epoch after the other, so that samples come and go."""
    until_s = time.monotonic() + DEADLINE_S
    with EpochLoader(cache, 4, split="train") as loader:
        while not is_enough():
            assert time.monotonic() < until_s
            assert sum(1 for _ in loader)


def belongs(number: int, share: float = SHARE) -> bool:
    return is_held_out(str(number).encode(), share)


HELD = {number for number in range(COUNT) if belongs(number)}
TRAIN = set(range(COUNT)) - HELD


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        yield cache


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Caches of all samples, with shards that were made before anything was held out, or after."""
    paths = {name: tmp_path_factory.mktemp("filled") / name for name in ("mixed", "of their own")}
    for name, path in paths.items():
        with Cache(path, size_limit="20MB", min_free=0) as cache:
            fill(cache, **({"holdout": SHARE} if name == "of their own" else {}))
    return paths


@pytest.fixture(scope="module", params=["mixed", "of their own"])
def filled(templates: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Cache]:
    """Either of these caches, for readers."""
    with Cache(templates[request.param]) as cache:
        yield cache


@pytest.fixture
def held_out(templates: dict[str, Path], tmp_path: Path) -> Iterator[Cache]:
    """A cache whose shards are of one split each, which the test may change."""
    shutil.copytree(templates["of their own"], tmp_path / "held out")
    with Cache(tmp_path / "held out") as cache:
        yield cache


def fill(cache: Cache, source: Any = None, **options: Any) -> None:
    with cs.start_worker(cache, source or Numbered(), **{"num_workers": 2, **options}) as worker:
        assert worker.wait(DEADLINE_S)


def numbers(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        assert batch["x"][:, 0].tolist() == [number % 251 for number in batch["n"].tolist()]
        assert [len(text) for text in batch["t"]] == [number % 7 for number in batch["n"].tolist()]
        found += batch["n"].tolist()
    return found


def test_the_split_of_a_key_never_changes() -> None:
    held = [key for key in ("a", "b.jpg", "tar#0001", "ä/ö", "12") if is_held_out(key.encode(), 0.5)]
    assert held == ["b.jpg", "12"]
    assert 0.04 < np.mean([belongs(number, 0.05) for number in range(20_000)]) < 0.06
    assert all(belongs(number, 0.1) for number in range(2000) if belongs(number, 0.05))


@pytest.mark.e2e
def test_an_epoch_is_replayed_and_its_shards_come_back(held_out: Cache, tmp_path: Path) -> None:
    cache = held_out
    with EpochLoader(cache, 16, split="train", record=tmp_path / "run", drop_last=False) as loader:
        recorded = numbers(loader)
    with EpochLoader(cache, 16, split="train", replay=tmp_path / "run") as loader:
        assert numbers(loader) == recorded
    with (
        EpochLoader(cache, 16, replay=tmp_path / "run") as loader,
        pytest.raises(ConfigError, match="split='train'"),
    ):
        next(iter(loader))
    with Cache(tmp_path / "other", size_limit="20MB", min_free=0) as other:
        report = refetch(tmp_path / "run", other, Numbered())
        assert report.ok, report
        with EpochLoader(other, 16, split="train", holdout=SHARE, replay=tmp_path / "run") as loader:
            assert numbers(loader) == recorded


@pytest.mark.e2e
def test_what_is_held_out_stays_while_all_else_is_replaced(tmp_path: Path) -> None:
    source = Numbered(size=20_000)  # 12 MB
    with Cache(tmp_path / "cache", size_limit="6MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=2, holdout=0.1, shard_size="200kB") as worker:
            seen: set[int] = set()
            kept: set[int] = set()
            # Whole batches alone would leave out samples whose shards are evicted after the epoch.
            with EpochLoader(cache, 8, split="train", min_samples=40, drop_last=False) as train:
                until_s = time.monotonic() + DEADLINE_S
                while cache.status().pass_number < 3 and time.monotonic() < until_s:
                    seen.update(numbers(train))
                    with cache.snapshot(split="held-out") as dataset:
                        now = sorted(map(int, dataset.keys()))
                    assert kept <= set(now), "none of it has gone"
                    assert len(set(now)) == len(now), "none came twice"
                    kept = set(now)
            assert worker.is_alive()
        assert cache.status().pass_number >= 3
        assert cache.status().evicted_samples > COUNT
        assert kept == {number for number in range(COUNT) if belongs(number, 0.1)}
        assert seen == set(range(COUNT)) - kept
        cache.evict(to=3_000_000)
        with cache.snapshot(split="held-out") as dataset:
            assert set(map(int, dataset.keys())) == kept, "what was asked for takes the others first"
        cache.clear()
        assert cache.num_shards == 0


@pytest.mark.e2e
def test_more_than_half_of_the_limit_is_not_held_out(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache", size_limit="4MB", min_free=0) as cache:
        with cs.start_worker(cache, Numbered(size=20_000), num_workers=1, holdout=0.6, shard_size="200kB"):
            train_until(cache, lambda: any(one.kind == "held-out" for one in cache.status().failures))
            train_until(cache, lambda: cache.status().evicted_samples > 50)
        assert "raise it, or hold out less" in cache.status().failures[0].reason
        with cache.catalogue.reading() as tables:
            assert tables.held_out()[1] < 3_000_000


@pytest.mark.e2e
def test_of_an_endless_source_as_large_a_part_is_held_out(tmp_path: Path) -> None:
    def draw(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.integers(0, 255, 20_000, np.uint8)}

    with Cache(
        tmp_path / "cache", "4MB", min_free=0, eviction=lambda rows: sorted(rows, key=lambda row: row.id)[:10]
    ) as cache:
        with cs.start_worker(cache, draw, num_workers=1, holdout=0.2, shard_size="100kB"):
            train_until(cache, lambda: cache.status().evicted_samples > 400)
            assert cache.status().worker.totals.dropped > 20  # type: ignore[union-attr]
        assert not cache.status().failures
        with cache.catalogue.reading() as tables:
            assert 500_000 < tables.held_out()[1] < 1_500_000


@pytest.mark.e2e
def test_a_loader_that_asks_midway_and_processes_that_are_killed_lose_and_double_nothing(
    cache: Cache, tmp_path: Path
) -> None:
    gate = tmp_path / "held out"
    with cs.start_worker(cache, Slow(gate), num_workers=2, shard_size="20kB", order="sequential") as worker:
        for share in (0.1, 0.3, 0.5, 0.7):
            wait_until(lambda share=share: cache.num_samples > share * COUNT, "more samples come")  # type: ignore[misc]
            if share == 0.3:
                with EpochLoader(cache, 8, split="train", holdout=SHARE) as loader:
                    assert set(numbers(loader)) <= TRAIN
                gate.touch()
            for pid in sampling_pids(cache):
                with suppress(ProcessLookupError):  # it may have ended by itself
                    os.kill(pid, signal.SIGKILL)
        assert worker.wait(DEADLINE_S)
    for name, expected in (("held-out", HELD), ("train", TRAIN)):
        with cache.snapshot(split=name) as dataset:
            assert sorted(map(int, dataset.keys())) == sorted(expected)
            sizes, counts = dataset.snapshot.sizes, dataset.snapshot.counts
            assert sizes is not None
            assert {True, False} == set((sizes == counts).tolist()), "shards of one split, and of both"


@pytest.mark.e2e
def test_a_lost_catalogue_finds_the_splits_again(held_out: Cache) -> None:
    cache = held_out
    ids = cache.snapshot(split="held-out").snapshot.shard_ids.tolist()
    cache.close()
    os.unlink(cache.directory.catalogue)
    with Cache(cache.path) as again:
        with again.snapshot(split="held-out") as dataset:
            assert sorted(map(int, dataset.keys())) == sorted(HELD)
            assert dataset.snapshot.shard_ids.tolist() == ids
        fill(again, holdout=SHARE)
        assert again.num_samples == COUNT, "nothing is fetched again"


@pytest.mark.e2e
def test_lost_held_out_samples_are_fetched_again_and_the_others_are_not(held_out: Cache) -> None:
    cache = held_out
    with cache.snapshot(split="held-out") as dataset:
        lost = int(dataset.snapshot.shard_ids[0])
    assert MappedShard(shard_path(cache.path, lost)).fill["held_out"]
    cache.quarantine(lost, "a test")
    assert count_samples(cache, Split("held-out", SHARE)) < len(HELD)
    fill(cache, holdout=SHARE)
    with cache.snapshot() as dataset:
        assert sorted(map(int, dataset.keys())) == list(range(COUNT))


@pytest.mark.e2e
def test_a_damaged_shard_of_both_splits_is_put_aside(templates: dict[str, Path], tmp_path: Path) -> None:
    cache = Cache(shutil.copytree(templates["mixed"], tmp_path / "cache"))
    with cache.snapshot() as dataset:
        path = shard_path(cache.path, int(dataset.snapshot.shard_ids[0]))
    column = MappedShard(path).columns["__key__"]
    with open(path, "r+b") as file:
        file.seek(column.offset)
        file.write(b"!")
    with EpochLoader(cache, 16, split="train", holdout=SHARE, drop_last=False) as loader:
        found = numbers(loader)
    assert set(found) < TRAIN
    assert cache.status().quarantined == 1
    cache.close()


def test_a_count_that_is_wrong_gives_no_sample_to_the_other_split(new_cache: NewCache) -> None:
    cache = new_cache(4, 30)
    assert 0 < count_samples(cache, Split("held-out", SHARE)) < 120
    with cache.catalogue.transaction() as tables:
        tables.execute("UPDATE shards SET held_out = held_out + 1 WHERE id = 2")
    with (
        EpochLoader(cache, 4, split="train") as loader,
        pytest.raises(CacheError, match=r"the catalogue has \d+; run"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": 0.0}, "holdout=0.0 holds nothing out"),
        ({"holdout": 1}, "holdout=1: give a share"),
        ({"holdout": "a"}, "holdout='a': give a share"),
        ({"split": "test", "holdout": 0.1}, "split='test': give 'train' or 'held-out'"),
        ({"split": "held-out"}, "say which share, such as holdout=0.05"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_a_sentence(
    cache: Cache, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EpochLoader(cache, 4, **options)
    with pytest.raises(ConfigError, match=message):
        cache.snapshot(**options)
    if "split" not in options:
        with pytest.raises(ConfigError, match=message):
            cs.start_worker(cache, Numbered(), **options)


@pytest.mark.e2e
def test_a_cache_has_one_share_and_a_state_one_split(
    held_out: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = held_out
    with pytest.raises(ConfigError, match=r"holdout=0.1: .* holds out 0.2 of its samples"):
        EpochLoader(cache, 4, split="train", holdout=0.1)
    with EpochLoader(cache, 4, split="train") as train, EpochLoader(cache, 4, split="held-out") as others:
        next(iter(train))
        with pytest.raises(ConfigError, match=r"drawn with split='train'.*has split='held-out'"):
            others.load_state_dict(train.state_dict())
    with EpochLoader(cache, 4):
        assert "give split='train'" in caplog.text
    cache.clear()
    fill(cache, holdout=0.1)


@pytest.mark.e2e
def test_a_split_without_samples_says_so(cache: Cache) -> None:
    fill(cache, Numbered(1, 1))
    name = "train" if belongs(0) else "held-out"
    with pytest.raises(NotEnoughSamplesError, match=f"none is of the split '{name}'"):
        cache.snapshot(split=name, holdout=SHARE)
    with (
        EpochLoader(cache, 4, split=name, timeout_s=5.0) as loader,
        pytest.raises(NotEnoughSamplesError, match=f"holds 0 samples of the split '{name}'"),
    ):
        next(iter(loader))


@pytest.mark.e2e
def test_samples_that_come_in_columns_are_split_too(cache: Cache, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"n": np.arange(5000)})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=1000)
    fill(cache, tmp_path / "t.parquet", num_workers=1, holdout=SHARE)
    found = {}
    for name in ("train", "held-out"):
        with EpochLoader(cache, 100, split=name, drop_last=False, with_keys=True) as loader:
            batches = list(loader)
        assert all(
            is_held_out(key.encode(), SHARE) == (name == "held-out") for b in batches for key in b["__key__"]
        )
        found[name] = sorted(n for batch in batches for n in batch["n"].tolist())
    assert sorted(found["train"] + found["held-out"]) == list(range(5000))
    assert len(found["held-out"]) == cache.status().held_out_samples > 800
    with cache.catalogue.reading() as tables:
        (uncounted,) = tables.execute("SELECT count(*) FROM live WHERE held_out IS NULL").fetchone()
    assert not uncounted, "all were made as one split's"


@pytest.mark.e2e
def test_a_stream_trains_without_what_it_holds_out(tmp_path: Path) -> None:
    samples = [{"n": number} for number in range(COUNT)]
    with cs.stream(
        samples,
        tmp_path / "cache",
        "20MB",
        min_free=0,
        batch_size=8,
        holdout=SHARE,
        num_workers=1,
        drop_last=False,
    ) as loader:
        assert loader.worker.wait(DEADLINE_S)
        with EpochLoader(loader.cache, 8, split="held-out", shuffle=False, drop_last=False) as validation:
            held_out = {n for batch in validation for n in batch["n"].tolist()}
        trained = {n for _ in range(2) for batch in loader for n in batch["n"].tolist()}
        assert len(held_out) + len(trained) == COUNT
        assert not held_out & trained


def test_ranges_of_both_splits_are_those_that_each_has() -> None:
    assert list(intersection([(0, 5), (7, END)], [(3, 9)])) == [(3, 5), (7, 9)]
    assert list(intersection([(0, END)], [(0, END)])) == [(0, END)]
    assert list(intersection([], [(0, END)])) == []
