"""P2: an epoch is a frozen, countable set: `len()` is true, and every torch sampler works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, numbered

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "random": RandomSampler,
    "sequential": SequentialSampler,
    "distributed": lambda dataset: DistributedSampler(dataset, num_replicas=2, rank=1),
    "weighted": lambda dataset: WeightedRandomSampler(torch.ones(len(dataset)).tolist(), 40),
    "subset": lambda _: SubsetRandomSampler(range(0, NUM_SAMPLES, 7)),
    "batches": lambda dataset: BatchSampler(RandomSampler(dataset), 16, drop_last=False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_of_torch_draws_from_a_loader_what_it_draws_from_a_dataset(
    name: str, cache: cs.Cache
) -> None:
    drawn: list[list[Any]] = []

    def make(dataset: Any) -> Any:
        drawn.append(list(SAMPLERS[name](dataset)))
        return drawn[-1]

    with cs.EpochLoader(cache, 16, sampler=make, drop_last=False) as loader:
        length, batches = len(loader), list(loader)
    with cache.snapshot() as dataset:
        flat = [i for one in drawn[0] for i in (one if isinstance(one, list) else [one])]
        expected = dataset[flat]["number"].tolist()
    assert length == len(batches)
    assert [n for batch in batches for n in batch["number"].tolist()] == expected


def test_a_dataset_is_map_style_and_its_samples_are_those_of_the_source(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        assert len(dataset) == NUM_SAMPLES
        assert sorted(int(dataset[i]["number"]) for i in range(len(dataset))) == list(range(NUM_SAMPLES))
        assert torch.equal(dataset[-1]["x"], dataset[NUM_SAMPLES - 1]["x"])
        with pytest.raises(IndexError):
            dataset[NUM_SAMPLES]
        for workers in (0, 2):
            loader = DataLoader(dataset, 50, num_workers=workers, collate_fn=cs.collate)
            assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(NUM_SAMPLES))


def test_samples_that_are_changed_before_they_are_collated_stay_changed(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        for collate in (cs.collate, torch.utils.data.default_collate):
            samples: Any = dataset.__getitems__([3, 1, 2])  # as a DataLoader does
            expected = [-1, *dataset[[1, 2]]["number"].tolist()]
            samples[0]["number"] = torch.tensor(-1)
            assert collate(samples)["number"].tolist() == expected


def test_a_snapshot_stays_as_it_is_while_the_cache_changes(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        before = dataset[:]["x"]
        cache.evict(to=0)
        with cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1) as worker:
            worker.wait(timeout_s=120)
        assert len(dataset) == NUM_SAMPLES
        assert torch.equal(dataset[:]["x"], before)


@pytest.mark.parametrize(
    ("batch_size", "drop_last"), [(1, True), (7, True), (7, False), (299, False), (300, True)]
)
def test_a_loader_has_as_many_batches_as_it_says(cache: cs.Cache, batch_size: int, drop_last: bool) -> None:
    with cs.EpochLoader(cache, batch_size, drop_last=drop_last) as loader:
        for _ in range(2):
            expected = len(loader)
            assert len(list(loader)) == expected
            assert expected == (NUM_SAMPLES // batch_size if drop_last else -(-NUM_SAMPLES // batch_size))


def test_each_epoch_is_drawn_from_what_is_cached_when_it_is_prepared(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "c", "5MB", min_free=0) as cache,
        cs.start_worker(cache, [{"x": float(i)} for i in range(40)], num_workers=1) as worker,
        cs.EpochLoader(cache, 4, min_samples=4) as loader,
    ):
        sizes = [sum(len(batch["x"]) for batch in loader)]
        worker.wait(timeout_s=120)
        sizes += [sum(len(batch["x"]) for batch in loader) for _ in range(3)]
    assert sizes[-1] == 40
    assert sizes == sorted(sizes)


def test_an_epoch_has_what_a_worker_has_brought_that_came_and_went_since_the_last(cache: cs.Cache) -> None:
    cache.evict(to=cache.size_bytes // 2)
    few = cache.num_samples
    with cs.EpochLoader(cache, 1) as loader:
        assert sum(len(batch["x"]) for batch in loader) == few < NUM_SAMPLES
        with cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1) as worker:
            worker.wait(timeout_s=120)
        sizes = [sum(len(batch["x"]) for batch in loader) for _ in range(2)]  # the next one may be prepared
    assert sizes[-1] == NUM_SAMPLES
