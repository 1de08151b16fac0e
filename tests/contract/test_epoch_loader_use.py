"""Attributes and methods of `EpochLoader`: an iteration is the next epoch, `len`, `epoch` and `dataset` tell of the running
one or else of the next, and `close` ends all.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.utils.data import DataLoader

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES

STEPS: Final = 30  # of an epoch, in batches of ten


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


def places(loader: cs.EpochLoader) -> tuple[int, int, int]:
    return loader.epoch, len(loader), loader.batches_done


@pytest.fixture
def orders(cache: cs.Cache) -> list[list[int]]:
    """The first five epochs."""
    with cs.EpochLoader(cache, 10) as loader:
        return [numbers(loader) for _ in range(5)]


# --- epochs


def test_each_iteration_is_the_next_epoch_and_the_loader_says_where_it_is(
    cache: cs.Cache, orders: list[list[int]]
) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        assert loader.cache is cache
        assert loader.batch_size == 10
        assert places(loader) == (0, STEPS, 0)
        batches = iter(loader)
        assert numbers([next(batches), next(batches)]) == orders[0][:20]
        assert places(loader) == (0, STEPS, 2)
        assert "epoch 0 after 2 batches" in repr(loader)
        assert numbers(batches) == orders[0][20:]
        assert places(loader) == (1, STEPS, 0)
        assert next(batches, None) is None, "it stays at its end"
        assert numbers(loader) == orders[1]
        assert loader.epoch == 2


def test_an_iteration_of_which_nothing_was_taken_is_no_epoch_and_one_that_is_left_is(
    cache: cs.Cache, orders: list[list[int]]
) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        iter(loader)
        first, second = iter(loader), iter(loader)
        assert numbers([next(second)]) == orders[0][:10]
        with pytest.raises(cs.EpochError):
            next(first)
        for _ in loader:
            break
        assert places(loader) == (1, STEPS, 1)
        assert numbers(loader) == orders[2]


def test_set_epoch_makes_an_epoch_the_next_one(cache: cs.Cache, orders: list[list[int]]) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        loader.set_epoch(3)
        assert places(loader) == (3, STEPS, 0)
        assert numbers(loader) == orders[3]
        assert numbers(loader) == orders[4]
        loader.set_epoch(1)
        batches = iter(loader)
        assert numbers([next(batches)]) == orders[1][:10]
        loader.set_epoch(0)
        assert numbers(loader) == orders[0]
        for wrong in (-1, 1.5, "1", None):
            with pytest.raises(cs.ConfigError, match="set_epoch"):
                loader.set_epoch(wrong)  # type: ignore[arg-type]


def test_a_dataset_of_an_epoch_has_its_samples_and_nothing_else(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 10, where=lambda columns: columns["number"] < 50) as loader:
        assert sorted(loader.dataset[:]["number"].tolist()) == list(range(50))
        batch = next(iter(loader))
        index = loader.dataset[:]["number"].tolist().index(int(batch["number"][0]))
        assert torch.equal(loader.dataset[index]["x"], batch["x"][0])


def test_a_peek_is_a_copy_of_the_next_batch_and_moves_nothing(
    cache: cs.Cache, orders: list[list[int]]
) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        state = loader.state_dict()
        for _ in range(2):
            peeked = loader.peek()
            assert peeked["number"].tolist() == orders[0][:10]
            peeked["number"].fill_(-1)
        assert (loader.state_dict(), loader.stats.batches) == (state, 0)
        batches = iter(loader)
        assert numbers([next(batches)]) == orders[0][:10]
        with pytest.raises(cs.EpochError, match="epoch 0 is being iterated"):
            loader.peek()
        del batches
        assert numbers([loader.peek()]) == orders[1][:10]
        assert numbers(loader) == orders[1]


def test_two_loaders_of_one_cache_are_independent(cache: cs.Cache, orders: list[list[int]]) -> None:
    with cs.EpochLoader(cache, 10) as one, cs.EpochLoader(cache, 10) as other:
        mixed = [numbers(pair) for pair in zip(one, other, strict=True)]
        assert [n for pair in mixed for n in pair[:10]] == orders[0]
        assert [n for pair in mixed for n in pair[10:]] == orders[0]
        assert cache.status().leases >= 1


# --- statistics


def test_stats_and_metrics_count_what_was_delivered(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        assert (loader.stats.batches, loader.stats.samples) == (0, 0)
        for _ in range(2):
            numbers(loader)
        stats = loader.stats
        assert (stats.epoch, stats.batches, stats.samples, stats.skipped) == (1, 60, 600, 0)
        assert (stats.epoch_samples, stats.shards) == (NUM_SAMPLES, cache.num_shards)
        assert stats.reuse_factor == pytest.approx(2.0)
        assert 0 <= stats.epoch_wait_share <= 1
        assert min(stats.samples_per_s, stats.wait_s, stats.prepare_s) > 0
        found = cs.metrics(loader, prefix="a/")
        assert (found["a/batches"], found["a/samples"], found["a/epoch"]) == (60, 600, 1)
        assert (found["a/cache_samples"], found["a/cache_shards"]) == (NUM_SAMPLES, cache.num_shards)
        assert all(isinstance(value, int | float) for value in found.values())
        (report,) = cache.status().loaders
        assert (report.pid, report.rank, report.ranks) == (os.getpid(), 0, 1)
    assert cache.status().loaders == ()


# --- the end


def test_a_closed_loader_says_so_and_holds_no_shard_and_no_thread(cache: cs.Cache) -> None:
    threads = threading.active_count()
    with cs.EpochLoader(cache, 10) as loader:
        batches = iter(loader)
        kept = next(batches)
        assert cache.evict(to=0) == 0
    loader.close()
    assert threading.active_count() == threads
    with pytest.raises(cs.EpochError, match="closed"):
        next(batches)
    for use in (lambda: next(iter(loader)), lambda: len(loader), lambda: loader.dataset, loader.peek):
        with pytest.raises(cs.EpochError, match="closed"):
            use()
    assert cache.evict(to=0) > 0
    assert torch.equal(kept["x"], kept["number"][:, None].float().expand(-1, 1024))
    assert loader.stats.batches == 1


def test_a_loader_that_is_forgotten_ends_and_lets_its_shards_go(cache: cs.Cache) -> None:
    threads = threading.active_count()
    loader = cs.EpochLoader(cache, 10)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()
    deadline = threading.Event()
    for _ in range(3000):
        if threading.active_count() <= threads and not cache.status().leases:
            break
        deadline.wait(0.02)
    assert threading.active_count() <= threads
    assert cache.status().leases == 0


def test_a_loader_is_neither_copied_nor_indexed_nor_put_into_a_data_loader(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        for make in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="state_dict"):
                make(loader)
        with pytest.raises(TypeError, match=r"for batch in loader.*cache\.snapshot\(\)"):
            loader[0]
        wrong: Any = DataLoader(loader, batch_size=None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"for batch in loader"):
            next(iter(wrong))
        with pytest.raises(AttributeError, match="state_dict"):
            _ = loader.sampler


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_a_loader_of_its_own(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 10) as loader:
        batches = iter(loader)
        seen = numbers([next(batches)])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                iter(loader)
            except cs.EpochError as error:
                code = 0 if "make one in each process" in str(error) else 2
            finally:
                loader.close()
                os.execv("/bin/sh", ["sh", "-c", f"exit {code}"])  # nothing of pytest's runs here
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        seen += numbers(batches)
    assert sorted(seen) == list(range(NUM_SAMPLES))


def test_a_damaged_shard_is_left_out_and_put_aside(new_path: Callable[[], Path]) -> None:
    path = new_path()
    victim = sorted((path / "shards").rglob("*.safetensors"))[3]
    with victim.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 10, drop_last=False) as loader:
        first, second = numbers(loader), numbers(loader)
        assert sorted(first) == sorted(second)
        assert len(set(first)) == len(first) == cache.num_samples
        assert 0 < NUM_SAMPLES - len(first) <= 16
        assert cache.status().quarantined == 1
