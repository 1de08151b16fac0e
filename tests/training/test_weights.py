"""Weights by key: drawn in proportion, across epochs, arrivals, evictions, checkpoints and ranks."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestream import ConfigError, EpochLoader
from cachestream.storage import shard as shard_module
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.training.ranks import Ranks
from cachestream.training.weights import KeyWeights, draw
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache, NewJob


def keys(loader: EpochLoader) -> Counter[str]:
    return Counter(key for batch in loader for key in batch["__key__"])


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=50),
    st.integers(0, 200),
    st.integers(0, 2**64 - 1),
)
def test_each_sample_is_drawn_as_often_as_its_share_of_the_weights_says_rounded(
    weights: list[float], count: int, key: int
) -> None:
    array = np.array(weights, np.float64)
    drawn = draw(array, count, key)
    assert len(drawn) == count
    share = array / array.sum() if array.sum() else np.full(len(array), 1 / len(array))
    times = np.bincount(drawn, minlength=len(array))
    assert (np.abs(times - count * share) < 1 + 1e-6).all()
    if array.sum():
        assert not times[array == 0].any()


@pytest.mark.e2e
def test_the_draw_is_unbiased_and_in_random_order() -> None:
    weights = np.array([1.0, 2.0, 0.5, 4.0])
    times = sum(np.bincount(draw(weights, 3, key), minlength=4) for key in range(4000))
    assert np.allclose(times / 4000, 3 * weights / weights.sum(), atol=0.04)
    assert draw(np.ones(100), 100, 5).tolist() != sorted(draw(np.ones(100), 100, 5).tolist())


def test_equal_weights_draw_every_sample_once(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(3, 8), 4, weights=True) as loader:
        assert keys(loader) == keys(loader) == Counter(f"k{n}" for n in range(24))


def test_weights_survive_while_the_cache_grows_and_loses_shards(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4, weights={"k3": 0.0, "k10": 0.0}) as loader:
        first = keys(loader)  # and then epochs that nobody has prepared yet
        assert not first["k3"] + first["k10"]
        loader.update_weights([f"k{n}" for n in range(8)], torch.zeros(8))
        loader.update_weights(["k10"], [5.0])
        loader.set_epoch(30)
        assert not keys(loader).keys() & {f"k{n}" for n in range(8)}
        add_shard(cache, numbered(16, 8))
        loader.set_epoch(40)
        counts = keys(loader)
        assert counts.keys() <= {f"k{n}" for n in range(8, 24)}
        assert 8 <= counts["k10"] <= 10  # 5 of 13.3: the 15 without a weight have the mean of the 9 others
        loader.update_weights([f"k{n}" for n in range(16, 24)], np.full(8, 5.0))
        cache.quarantine(2, "a test")
        loader.set_epoch(50)
        assert keys(loader) == Counter({f"k{n}": 2 for n in range(16, 24)})
        add_shard(cache, numbered(8, 8))  # the same samples come again
        loader.set_epoch(60)
        assert 1 <= keys(loader)["k10"] <= 2  # 5 of 63.5, in 24 draws


def test_a_sample_without_a_weight_has_the_mean_of_those_that_have_one() -> None:
    weights = KeyWeights()
    weights.update(["a", "b", "a"], [9.0, 1.0, 3.0])
    weights.exchange(Ranks(), "")
    known = KeyWeights({"a": 1, "b": 1, "c": 1})
    known.exchange(Ranks(), "")
    hashes = known._known[0]
    assert sorted(weights.of(hashes).tolist()) == [1.0, 2.0, 3.0]
    assert len(weights._known[0]) == 2


@pytest.mark.e2e
def test_the_keys_of_a_shard_are_checked_before_they_are_read(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    for name in ("a", "b"):
        add_shard(cache, [(f"{name}{n}", torch.full((20_000,), n)) for n in range(2)])
    snapshot, lease = cache.take_snapshot()
    weights = KeyWeights({"a0": 3.0, "a1": 5.0, "b0": 7.0, "b1": 9.0})
    weights.exchange(Ranks(), "")
    path = Path(shard_path(cache.path, int(snapshot.shard_ids[1])))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[MappedShard(str(path)).columns["__key__"].offset] ^= 3  # b0 has become a0
    path.write_bytes(damaged)
    assert weights.of_snapshot(snapshot).tolist() == [3, 5, 4, 4]  # the mean, as of keys without a weight
    path.write_bytes(whole)

    class Cut(MappedShard):
        """One whose keys the disk cannot read any more."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            os.truncate(path, 4096)

    monkeypatch.setattr(shard_module, "MappedShard", Cut)
    child = os.fork()  # which a read of the map would end by SIGBUS
    if not child:
        try:
            fresh = KeyWeights({"a0": 3.0})
            fresh.exchange(Ranks(), "")
            os._exit(fresh.of_snapshot(snapshot).tolist() != [1, 1, 1, 1])
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.release()


@pytest.mark.e2e
@pytest.mark.parametrize("own_caches", [False, True])
def test_ranks_draw_by_the_weights_that_all_of_them_gave(
    own_caches: bool, new_cache: NewCache, new_job: NewJob
) -> None:
    caches = [new_cache(3, 8), new_cache(3, 8)] if own_caches else [new_cache(3, 8)] * 2

    def work(rank: int, make: Any) -> list[list[str]]:
        loader = make(caches[rank], 2, weights=True)
        keys(loader)
        even_or_odd = [f"k{n}" for n in range(rank, 24, 2)]
        loader.update_weights(even_or_odd, [float(key in {"k4", "k7"}) for key in even_or_odd])
        loader.set_epoch(5)
        return [batch["__key__"] for batch in loader]

    first, second = new_job(2).run(work)
    assert len(first) == len(second)
    drawn = Counter(key for batch in first + second for key in batch)
    assert drawn.keys() == {"k4", "k7"}
    assert abs(drawn["k4"] - drawn["k7"]) <= 2


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.* samples of epoch 0 are not cached any more")
@pytest.mark.parametrize("lost", ["the node", "its shards"])
def test_ranks_resume_where_one_of_their_caches_has_nothing_left_of_the_epoch(
    lost: str, new_cache: NewCache, new_job: NewJob
) -> None:
    caches = [new_cache(2, 8), new_cache(2, 8, 100)]

    def head(rank: int, make: Any) -> tuple[Any, list[Any]]:
        batches = iter(loader := make(caches[rank], 2, weights=True))
        for _ in range(3):
            next(batches)
        return loader.state_dict(), [batch["__key__"] for batch in batches]

    (state, rest), _ = new_job(2).run(head)
    if lost == "the node":
        caches[1] = new_cache(2, 8, 200)
    else:
        caches[1].clear()
        add_shard(caches[1], numbered(200, 16))

    def tail(rank: int, make: Any) -> tuple[list[Any], Counter[str]]:
        loader = make(caches[rank], 2, weights=True)
        loader.load_state_dict(state)
        loader.update_weights([["k1", "k201"][rank]], [0.0])
        return [batch["__key__"] for batch in loader], keys(loader)

    (old, old_next), (new, new_next) = new_job(2).run(tail)
    assert old == rest
    assert len(new) == len(rest)
    drawn = Counter(key for batch in new for key in batch)
    assert drawn.keys() <= {f"k{n}" for n in range(200, 216)} - {"k201"}
    assert old_next.total() == new_next.total() == 16
    assert not old_next["k1"] + new_next["k201"]


@pytest.mark.e2e
def test_a_resumed_epoch_of_fixed_length_ends_where_too_little_is_left_for_all_ranks(
    new_cache: NewCache, new_job: NewJob
) -> None:
    caches = [new_cache(1, 20, 100 * rank) for rank in range(3)]
    options: dict[str, Any] = {"weights": True, "epoch_size": 16, "drop_last": False}

    def head(rank: int, make: Any) -> Any:
        batches = iter(loader := make(caches[rank], 1, **options))
        for _ in range(7):
            next(batches)
        return loader.state_dict()

    state = new_job(2).run(head)[0]

    def tail(rank: int, make: Any) -> list[int]:
        loader = make(caches[rank], 1, **options)
        loader.load_state_dict(state)
        return [keys(loader).total() for _ in range(2)]

    assert new_job(3).run(tail) == [[0, 5]] * 3


def test_what_cannot_be_a_weight_is_refused(new_cache: NewCache) -> None:
    cache = new_cache(1, 8)
    with EpochLoader(cache, 4, weights=True) as loader:
        wrong: list[Any] = [
            (["a"], [1, 2]),
            (["a"], [float("nan")]),
            (["a"], [-1.0]),
            ("a", [1.0]),
            (5, [1.0]),
        ]
        for keys_, values in wrong:
            with pytest.raises(ConfigError, match="update_weights"):
                loader.update_weights(keys_, values)
        with pytest.raises(ConfigError, match="the keys of weights are str, not 1: take them from a batch"):
            loader.update_weights([1], [2.0])  # type: ignore[list-item]
        for value in ("b", None):
            with pytest.raises(ConfigError, match="give numbers"):
                loader.update_weights(["a"], [value])
        with pytest.raises(ConfigError, match="no weights"):
            loader.load_state_dict({**loader.state_dict(), "weights": {"keys": "AA=="}})
    with EpochLoader(cache, 4) as loader, pytest.raises(ConfigError, match="weights=True"):
        loader.update_weights(["a"], [1.0])
    with pytest.raises(ConfigError, match="do not go together"):
        EpochLoader(cache, 4, weights=True, sampler=torch.utils.data.RandomSampler)
