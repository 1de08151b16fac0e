"""Real workers read a shared source: their shares, curricula, and passes after the first."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError
from cachestream.worker.order import Partition
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, keys_of, only_once, wait_until
from tests.worker.test_worker_orders import fill, units_in_order

# The last samples of a fill may be published before their unit has said that it has no more: it is asked again.
ASKED_AGAIN = 1


@pytest.mark.parametrize("order", ["shuffle", "sampler", pytest.param("curriculum", marks=pytest.mark.slow)])
def test_the_caches_of_all_nodes_hold_every_sample_once(order: str, tmp_path: Path) -> None:
    source = Numbers(100, 2)
    orders: dict[str, Any] = {
        "sampler": SequentialSampler(range(100)),
        "curriculum": lambda _: np.arange(100),
    }
    together: Counter[str] = Counter()
    with ExitStack() as stack:
        caches = [
            stack.enter_context(Cache(tmp_path / str(node), size_limit="20MB", min_free=0))
            for node in range(3)
        ]
        workers = [
            stack.enter_context(
                cs.start_worker(
                    cache,
                    source,
                    num_workers=1,
                    order=orders.get(order, order),
                    seed=node,
                    partition=(node, 3),
                )
            )
            for node, cache in enumerate(caches)
        ]
        for worker, cache in zip(workers, caches, strict=True):
            assert worker.wait(DEADLINE_S)
            assert 60 <= cache.num_samples <= 68
            assert worker.status().num_units == cache.num_samples // 2
            together.update(keys_of(cache))
    assert together == Counter(source.keys())


def test_another_share_keeps_what_is_cached_and_fetches_the_rest(cache: Cache, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    source = Numbers(120, journal=str(journal))
    fill(cache, source, partition=(0, 2))
    assert len(only_once(cache)) == 60
    fill(cache, source, partition=(1, 3))
    fill(cache, source)
    assert only_once(cache) == source.keys()
    read = [int(unit) for unit in journal.read_text().split()]
    assert set(read) == set(range(120))
    assert len(read) <= 120 + 2 * ASKED_AGAIN


def test_a_process_with_another_partition_cannot_attach(cache: Cache) -> None:
    source = Numbers(1000, pause_s=0.01)
    with cs.start_worker(cache, source, num_workers=1, partition=(0, 2)):
        with pytest.raises(ConfigError, match="with the share 0/2, not 1/2; give all processes"):
            cs.start_worker(cache, source, num_workers=1, partition=(1, 2))
        with pytest.raises(ConfigError, match="not all units"):
            cs.start_worker(cache, source, num_workers=1)
        with cs.start_worker(cache, source, num_workers=1, partition="0/2") as second:
            assert second.attached


def test_a_node_without_a_unit_is_refused(cache: Cache) -> None:
    without = [node for node in range(8) if not Partition(node, 8).length(3)]
    assert len(without) == 5
    for node in without:
        with pytest.raises(ConfigError, match=f"partition={node}/8: the source has 3 units, too few"):
            cs.start_worker(cache, Numbers(3), num_workers=1, partition=(node, 8))


def test_a_curriculum_brings_the_easy_units_first_and_all_of_them_once(cache: Cache) -> None:
    difficulty = np.arange(200) % 10
    fill(cache, Numbers(200), order=lambda progress: difficulty <= 10 * progress + 1)
    units = units_in_order(cache)
    assert sorted(units) == list(range(200))
    assert (difficulty[units] <= np.arange(200) / 20 + 1).all()
    assert units != sorted(units, key=lambda unit: int(difficulty[unit]))


def test_a_curriculum_goes_on_after_a_stop_and_anew_with_another_function(
    cache: Cache, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    source = Numbers(200, pause_s=0.01, journal=str(journal))

    def rising(_: float) -> Any:
        return np.arange(200)

    def falling(_: float) -> Any:
        return 200 - np.arange(200)

    for _ in range(2):
        worker = cs.start_worker(cache, source, num_workers=1, concurrency=2, order=rising)
        cache.wait(cache.num_samples + 20, DEADLINE_S)
        assert worker.status().pass_number == 1
        worker.stop(DEADLINE_S)
    with cs.start_worker(cache, source, num_workers=1, concurrency=2, order=falling) as worker:
        assert worker.status().pass_number == 2
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert len(journal.read_text().split()) < 260
    _forget_orders(cache)


@pytest.mark.parametrize("order", ["shuffle", pytest.param("curriculum", marks=pytest.mark.slow)])
def test_a_new_pass_does_not_fetch_again_what_is_still_cached(
    order: str, cache: Cache, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    source = Numbers(100, nbytes=10_000, journal=str(journal))
    chosen: Any = "shuffle" if order == "shuffle" else (lambda _: np.arange(100))
    fill(cache, source, order=chosen, shard_size=50_000)
    cache.evict(to=cache.size_bytes - 400_000)
    kept = {int(key.partition("/")[0]) for key in only_once(cache)}
    assert 20 < len(kept) < 80
    before = len(journal.read_text().split())
    with cs.start_worker(cache, source, num_workers=1, order=chosen, shard_size=50_000) as worker:
        wait_until(lambda: cache.num_samples == 100, "all samples again")
        assert worker.wait(DEADLINE_S)
    again = [int(unit) for unit in journal.read_text().split()][before:]
    missing = set(range(100)) - kept
    assert missing <= set(again)
    assert len(again) <= len(missing) + ASKED_AGAIN
    _forget_orders(cache)


def _forget_orders(cache: Cache) -> None:
    """Orders of passes whose units are cached stay for as long as these do, and are no rubbish."""
    for path in Path(cache.directory.worker).glob("order-*"):
        path.unlink()
