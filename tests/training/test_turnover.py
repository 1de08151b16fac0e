"""A remote larger than the cache is trained on as a whole, in as few epochs as `turnover` allows."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

import cachestream as cs
from tests.support.forked import fork_process
from tests.training.scripts import turning
from tests.training.scripts.ports import free_port
from tests.training.sources import Single
from tests.worker.support import DEADLINE_S, wait_until

REMOTE: Final = 1200
SAMPLE_BYTES: Final = 4000
LIMIT_BYTES: Final = 3_000_000
BATCH: Final = 32
TURNOVER: Final = 0.25
SOURCE: Final = Single(REMOTE, SAMPLE_BYTES)


def oldest_first(rows: Sequence[Any]) -> list[int]:
    return [row.id for row in sorted(rows, key=lambda row: row.id)]


def train(cache: cs.Cache, loader: cs.EpochLoader, seen: set[int]) -> None:
    """One epoch that lasts until filling has taken the room that it leaves, or has had a second for it."""
    waits, until_s = cache.status().epoch_waits, time.monotonic() + 1.0
    for batch in loader:
        seen.update(batch["n"].tolist())
        while cache.status().epoch_waits == waits and time.monotonic() < until_s:
            time.sleep(0.05)


def train_until_killed(path: str) -> None:
    with cs.Cache(path) as cache, cs.EpochLoader(cache, BATCH, min_samples=BATCH) as loader:
        for _ in loader:
            for _ in loader:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", LIMIT_BYTES, min_free=0) as opened:
        yield opened


def epochs_until_all_is_seen(cache: cs.Cache, trainers: int = 1) -> tuple[int, int]:
    """The epochs after which all of the remote was in one, and the most that turnover should take."""
    seen: set[int] = set()
    with cs.start_worker(cache, SOURCE, num_workers=2):
        wait_until(lambda: cache.fill_state() == "full", "the cache is full")
        most = math.ceil(REMOTE / (TURNOVER * cache.num_samples)) + 2
        options: dict[str, Any] = {"turnover": TURNOVER, "min_samples": BATCH, "drop_last": False}
        loaders = [cs.EpochLoader(cache, BATCH, seed=seed, **options) for seed in range(trainers)]
        try:
            for epoch in range(1, 3 * most):
                for loader in loaders:
                    train(cache, loader, seen)
                if len(seen) == REMOTE:
                    return epoch, most
        finally:
            for loader in loaders:
                loader.close()
    raise AssertionError(f"{len(seen)} of {REMOTE} samples in {3 * most} epochs")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("lru", id="lru"),
        pytest.param("fifo", id="fifo", marks=pytest.mark.slow),
        pytest.param("least-fresh", id="least-fresh", marks=pytest.mark.slow),
        pytest.param(oldest_first, id="a function", marks=pytest.mark.slow),
    ],
)
def test_every_policy_shows_all_of_the_remote_and_fetches_nothing_for_nothing(
    tmp_path: Path, policy: str | Callable[..., Any]
) -> None:
    with cs.Cache(tmp_path / "cache", LIMIT_BYTES, min_free=0, eviction=policy) as cache:
        epochs, most = epochs_until_all_is_seen(cache)
        assert epochs <= most
        assert cache.status().evicted_unused_samples == 0


@pytest.mark.e2e
def test_two_trainers_of_one_cache_see_all_of_the_remote_together(cache: cs.Cache) -> None:
    epochs, most = epochs_until_all_is_seen(cache, trainers=2)
    assert epochs <= most
    assert cache.status().evicted_unused_samples == 0


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_a_trainer_that_was_killed_holds_up_nobody(cache: cs.Cache) -> None:
    with cs.start_worker(cache, SOURCE, num_workers=1):
        cache.wait(10 * BATCH, DEADLINE_S)
        trainer = multiprocessing.get_context("forkserver").Process(
            target=train_until_killed, args=(cache.path,)
        )
        trainer.start()
        trainer.join(DEADLINE_S)
        assert trainer.exitcode == -signal.SIGKILL
    epochs, most = epochs_until_all_is_seen(cache)
    # The killed trainer's epoch counts: what it used may be gone.
    assert epochs <= most + 1
    assert cache.status().evicted_unused_samples == 0


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_see_all_of_the_remote_together_from_one_cache_or_one_each(
    tmp_path: Path, nodes: int
) -> None:
    with ExitStack() as stack:
        caches = [
            stack.enter_context(cs.Cache(tmp_path / f"cache{node}", LIMIT_BYTES, min_free=0))
            for node in range(nodes)
        ]
        for node, cache in enumerate(caches):
            partition = f"{node}/{nodes}" if nodes > 1 else None
            stack.enter_context(cs.start_worker(cache, SOURCE, num_workers=1, partition=partition))
        wait_until(lambda: all(cache.fill_state() == "full" for cache in caches), "the caches are full")
        held = min(cache.num_samples for cache in caches)
        most = math.ceil(REMOTE / nodes / (TURNOVER * held)) + 2
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        arguments = (tmp_path, most, *(cache.path for cache in caches))
        ranks = [
            fork_process(
                turning.main,
                arguments,
                environment={**job, "RANK": str(rank)},
                output=tmp_path / f"rank {rank}",
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.join(2 * DEADLINE_S)
            rank.kill()
        assert [rank.exitcode for rank in ranks] == [0, 0], (tmp_path / "rank 0.stderr").read_text()
        assert [cache.status().evicted_unused_samples for cache in caches] == [0] * nodes
    first, second = (set(chain(*json.loads((tmp_path / f"{rank}.json").read_text()))) for rank in range(2))
    # Ranks have equally many batches: an epoch leaves out what one cache holds beyond another.
    left_out = REMOTE // 50 if nodes > 1 else 0
    assert len(first | second) >= REMOTE - left_out
