"""Samples and fields are selected without rewriting shards: exact lengths, evaluated once a shard, everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import cachestream as cs
from cachestream import Cache, ConfigError, EpochLoader, NotEnoughSamplesError, RankMismatchError
from cachestream.storage.shard import MappedShard, ShardColumns, shard_path
from cachestream.storage.status import wait_for_samples
from cachestream.storage.view import View
from tests.support.caches import add_shard, numbered, numbers
from tests.training.conftest import NewCache, NewJob

CacheOf = Callable[[list[Any], list[int]], Cache]


def thirds(columns: ShardColumns) -> Any:
    return columns["number"] % 3 == 0


# --- what is selected


def test_a_condition_may_ask_for_a_field_that_only_some_caches_have(new_cache: NewCache) -> None:
    def condition(columns: ShardColumns) -> Any:
        assert "number" in columns
        return columns["label"] > 0 if "label" in columns else thirds(columns)

    with new_cache(2, 12).snapshot(where=condition) as dataset:
        assert dataset[:]["number"].tolist() == list(range(0, 24, 3))


def test_a_shard_that_was_evicted_is_forgotten(new_cache: NewCache) -> None:
    cache = new_cache(4, 12)
    with EpochLoader(cache, 2, where=thirds) as loader:
        list(loader)
        (first, *_) = loader.dataset.snapshot.shard_ids.tolist()
        cache.quarantine(first)
        found = [sorted(numbers(loader)) for _ in range(3)]
        view = loader._options.view
    assert found[-1] == list(range(12, 48, 3))
    assert view is not None
    assert view.counts(np.array([first])).tolist() == [-1]


def test_shards_without_a_selected_sample_are_no_part_of_an_epoch_and_can_be_evicted(
    new_cache: NewCache,
) -> None:
    cache = new_cache(3, 10)
    with cache.snapshot(where=lambda columns: columns["number"] >= 20) as dataset:
        assert dataset.snapshot.num_shards == 1
    with cache.catalogue.reading() as tables:
        assert [row.uses for row in tables.shards()] == [1, 1, 1]


@pytest.mark.e2e
def test_a_condition_goes_together_with_a_split(new_cache: NewCache) -> None:
    cache = new_cache(6, 50)
    found: dict[str, set[int]] = {}
    for split in ("train", "held-out"):
        with EpochLoader(cache, 4, where=thirds, split=split, holdout=0.3, drop_last=False) as loader:
            found[split] = set(numbers(loader))
            assert len(loader.dataset) == len(found[split])
    assert found["train"] | found["held-out"] == set(range(0, 300, 3))
    assert not found["train"] & found["held-out"]
    assert found["held-out"]


@pytest.mark.e2e
def test_an_epoch_size_and_min_samples_count_what_is_selected(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(4, 12), 2, where=thirds, epoch_size=10) as loader:
        assert len(loader) == 5
        assert len(numbers(loader)) == 10
    with EpochLoader(new_cache(4, 12), 2, where=thirds, epoch_size=40) as loader:
        assert sorted(set(numbers(loader))) == list(range(0, 48, 3))
        assert len(loader) == 20


@pytest.mark.e2e
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_dataloader_workers_have_the_selected_samples(new_cache: NewCache, start: str) -> None:
    cache = new_cache(3, 12)
    # A lambda cannot be pickled: the workers get the rows.
    with cache.snapshot(where=lambda columns: columns["number"] % 3 == 0, columns=["number"]) as dataset:
        batches = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=start)
        assert numbers(batches) == list(range(0, 36, 3))


# --- resume, replay, ranks


def test_it_resumes_without_the_shards_that_are_gone(new_cache: NewCache) -> None:
    cache = new_cache(4, 12)
    with EpochLoader(cache, 2, where=thirds) as loader:
        begun = iter(loader)
        had = numbers([next(begun)])
        state = loader.state_dict()
    cache.quarantine(1)
    with EpochLoader(cache, 2, where=thirds, drop_last=False) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="samples"):
            rest = numbers(loader)
    assert sorted({*had, *rest} | set(range(0, 12, 3))) == list(range(0, 48, 3))
    assert not set(had) & set(rest)


def _go_on(loader: EpochLoader, state: dict[str, Any]) -> None:
    loader.load_state_dict(state)
    list(loader)


@pytest.mark.parametrize("other", [None, lambda columns: columns["number"] % 3 == 1])
def test_another_condition_cannot_go_on_with_an_epoch(new_cache: NewCache, other: Any) -> None:
    cache = new_cache(4, 12)
    with EpochLoader(cache, 2, where=thirds) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        EpochLoader(cache, 2, where=other) as loader,
        pytest.raises(ConfigError, match=r"where=.* the same cond"),
    ):
        _go_on(loader, state)


def test_a_recorded_epoch_is_replayed(new_cache: NewCache, tmp_path: Any) -> None:
    cache = new_cache(4, 12)
    with EpochLoader(cache, 2, where=thirds, record=tmp_path / "run") as loader:
        before = [numbers([batch]) for batch in loader]
    add_shard(cache, numbered(48, 12))
    with EpochLoader(cache, 2, where=thirds, replay=tmp_path / "run") as loader:
        assert [numbers([batch]) for batch in loader] == before


def test_ranks_with_different_conditions_are_told(new_cache: NewCache, new_job: NewJob) -> None:
    cache = new_cache(4, 12)

    def work(rank: int, make: Callable[..., EpochLoader]) -> list[int]:
        return numbers(make(cache, 2, where=lambda columns: columns["number"] % 3 == rank))

    for error in new_job(2).run(work):
        assert isinstance(error, RankMismatchError)
        assert "give all ranks the same condition" in str(error)


# --- fields


def test_of_tuples_the_asked_elements_are_delivered(cache_of: CacheOf) -> None:
    cache = cache_of([(torch.full((3,), n), f"text {n}", n) for n in range(4)], [4])
    with EpochLoader(cache, 4, columns=["2", "1"], shuffle=False) as loader:
        numbers_, texts = next(iter(loader))
    assert numbers_.tolist() == [0, 1, 2, 3]
    assert texts == ["text 0", "text 1", "text 2", "text 3"]


def test_columns_that_are_not_asked_for_are_not_even_read(new_cache: NewCache) -> None:
    cache = new_cache(1, 8)
    shard = MappedShard(path := shard_path(cache.path, 1))
    column = shard.columns["x"]
    with open(path, "r+b") as file:
        file.seek(column.offset)
        file.write(b"\xff" * column.nbytes)
    with EpochLoader(cache, 4, columns=["number"]) as loader:
        assert sorted(numbers(loader)) == list(range(8))


# --- lengths


def test_lengths_of_numbers_and_unknown_fields_are_refused(new_cache: NewCache) -> None:
    with new_cache(1, 4).snapshot() as dataset:
        with pytest.raises(ConfigError, match="one number in each sample"):
            dataset.lengths("number")
        with pytest.raises(ConfigError, match=r"no field 'tokens': they have \['__key__', 'number', 'x'\]"):
            dataset.lengths("tokens")


# --- conditions over all kinds of columns


def test_a_condition_sees_keys_texts_vectors_and_bfloat16(cache_of: CacheOf) -> None:
    samples = [
        {
            "lang": "en" if n % 2 else "dé",
            "v": torch.tensor([n, 1.0]),
            "h": torch.tensor(n / 2, dtype=torch.bfloat16),
        }
        for n in range(10)
    ]
    cache = cache_of(samples, [4, 6])
    for where, expected in (
        (lambda c: c["lang"] == "en", [1, 3, 5, 7, 9]),
        (lambda c: np.isin(c["__key__"], ["key 3", "key 8"]), [3, 8]),
        (lambda c: c["v"].sum(axis=1) > 7, [7, 8, 9]),
        (lambda c: c["h"] < 1.5, [0, 1, 2]),
        (lambda c: torch.from_numpy(c["v"][:, 0].copy()) > 8, [9]),
        (lambda c: np.arange(c.num_samples) == 0, [0, 4]),
    ):
        with cache.snapshot(where=where) as dataset:
            assert dataset[:]["v"][:, 0].tolist() == expected


def test_a_damaged_column_of_a_condition_is_quarantined(new_cache: NewCache) -> None:
    cache = new_cache(3, 12)
    shard = MappedShard(path := shard_path(cache.path, 2))
    with open(path, "r+b") as file:
        file.seek(shard.columns["number"].offset)
        file.write(b"\xff" * 8)
    with EpochLoader(cache, 2, where=thirds) as loader:
        assert sorted(numbers(loader)) == [*range(0, 12, 3), *range(24, 36, 3)]
    assert cache.num_shards == 2


# --- wrong uses


def failing(columns: ShardColumns) -> Any:
    return columns["number"].oops  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"where": "number > 3"}, "give a function of a shard's columns that returns a mask"),
        (
            {"where": failing},
            r"where= failed on the 4 samples of .*\.safetensors: AttributeError.*columns\['label'\] == 3",
        ),
        ({"where": lambda c: c["numbr"] == 1}, r"no field 'numbr': they have \['__key__', 'number', 'x'\]"),
        (
            {"where": lambda c: np.flatnonzero(c["number"])},
            r"returned int64 \[3\] for a shard of 4 samples: return a mask",
        ),
        (
            {"where": lambda _: True},
            r"returned bool \[\] for a shard of 4 samples: return a mask, bool \[4\]",
        ),
        ({"columns": "number"}, "give a list of fields"),
        ({"columns": []}, "give a list of fields"),
        ({"columns": ["x", "x"]}, "each once"),
        ({"columns": ["y"]}, r"columns= names 'y', and the samples have \['number', 'x'\]"),
        ({"columns": ["__key__"]}, "with_keys=True"),
    ],
)
def test_a_wrong_use_says_what_to_give(new_cache: NewCache, options: dict[str, Any], says: str) -> None:
    cache = new_cache(1, 4)
    with pytest.raises(ConfigError, match=says):
        cache.snapshot(**options)
    with pytest.raises(ConfigError, match=says), EpochLoader(cache, 2, **options) as loader:
        list(loader)


def test_texts_and_tensors_that_vary_are_named(cache_of: CacheOf) -> None:
    cache = cache_of([{"t": torch.zeros(n)} for n in range(4)], [4])
    with pytest.raises(ConfigError, match=r"varies between samples.*columns.lengths\('t'\)"):
        cache.snapshot(where=lambda columns: columns["t"] > 1)


@pytest.mark.e2e
def test_a_condition_that_selects_nothing_says_how_many_there_are(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with pytest.raises(NotEnoughSamplesError, match="where= selects 0 of the 16 samples"):
        cache.snapshot(where=lambda columns: columns["number"] < 0)
    says = r"holds 3 samples that where= selects \(of 16 in all\), 4 are"
    few = EpochLoader(cache, 4, where=lambda columns: columns["number"] < 3, timeout_s=2)
    with few as loader, pytest.raises(NotEnoughSamplesError, match=says):
        list(loader)


@pytest.mark.e2e
def test_the_processor_time_of_a_slow_condition_counts_as_waiting(new_cache: NewCache) -> None:
    cache, evaluated = new_cache(1, 8), 0

    def slow(columns: ShardColumns) -> Any:
        nonlocal evaluated
        evaluated += 1
        end_s = time.thread_time() + 0.7
        while time.thread_time() < end_s:
            pass
        add_shard(cache, numbered(8 * evaluated, 8))  # the next poll has one to evaluate, too
        return columns["number"] < 0

    with pytest.raises(NotEnoughSamplesError, match=r"after 1\.3 s"):
        wait_for_samples(cache, 1, 1.3, view=View(slow))
    assert evaluated == 4, "two polls of 0.7 s and more, the one that finds the wait over, and the last look"


@pytest.mark.e2e
def test_samples_come_while_a_worker_fills(tmp_path: Any) -> None:
    with Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        source = [{"number": n} for n in range(3000)]
        with (
            cs.start_worker(cache, source, num_workers=1),
            EpochLoader(cache, 4, where=thirds, min_samples=8) as loader,
        ):
            until, rounds = threading.Event(), 0
            while not until.wait(0.05) and rounds < 600:
                rounds += 1
                found = numbers(loader)
                assert all(n % 3 == 0 for n in found)
                if len(found) == 1000:
                    until.set()
            assert until.is_set()
