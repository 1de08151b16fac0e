"""Invariant 7: readers touch no SQL. A snapshot is frozen values, which forked and spawned DataLoader workers read, each
with a lease of its own, while the catalogue is locked and after it is gone.
"""

from __future__ import annotations

import pickle
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES

fork_warns = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on


def numbers(loader: Any) -> list[int]:
    """The numbers of all batches, each of which holds what its numbers say."""
    found: list[int] = []
    for batch in loader:
        assert torch.equal(batch["x"], batch["number"][:, None].float().expand(-1, 1024))
        found += batch["number"].tolist()
    return found


@fork_warns
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.e2e)])
def test_workers_of_a_dataloader_read_a_snapshot_while_the_catalogue_is_locked_and_without_it(
    method: str, cache: cs.Cache
) -> None:
    catalogue = Path(cache.path) / "catalogue.sqlite"
    with cache.snapshot() as dataset:
        dataset[0]  # what is made at the first use is there
        locker = sqlite3.connect(catalogue, isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        catalogue.rename(catalogue.with_name("gone"))
        try:
            for collate in (cs.collate, default_collate):
                loader: Any = DataLoader(
                    dataset,
                    40,
                    num_workers=2,
                    multiprocessing_context=method,
                    collate_fn=collate,
                    timeout=120,
                )
                assert sorted(numbers(loader)) == list(range(NUM_SAMPLES))
                if method == "spawn":
                    break
        finally:
            catalogue.with_name("gone").rename(catalogue)
            locker.close()


@fork_warns
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.e2e)])
def test_a_worker_of_a_dataloader_holds_the_shards_after_the_trainer_has_closed_its_snapshot(
    method: str, cache: cs.Cache
) -> None:
    dataset = cache.snapshot()
    loader: Any = DataLoader(
        dataset, 10, num_workers=1, multiprocessing_context=method, prefetch_factor=1, timeout=120
    )
    batches = iter(loader)
    seen = next(batches)["number"].tolist()
    dataset.close()
    assert cache.evict(to=0) == 0
    seen += numbers(batches)
    assert sorted(seen) == list(range(NUM_SAMPLES))
    del batches, loader  # and with them the worker
    assert cache.evict(to=0) > 0
    assert cache.num_samples == 0


def test_a_dataset_is_pickled_with_the_rows_of_its_condition_and_without_the_function(
    cache: cs.Cache,
) -> None:
    with cache.snapshot(where=lambda columns: columns["number"] % 3 == 0, columns=["number"]) as dataset:
        copy = pickle.loads(pickle.dumps(dataset))
    with copy:
        assert sorted(copy[:]["number"].tolist()) == list(range(0, NUM_SAMPLES, 3))
        assert list(copy[0]) == ["number"]
        assert cache.evict(to=0) == 0, "the copy holds a lease of its own"
    assert cache.evict(to=0) > 0
