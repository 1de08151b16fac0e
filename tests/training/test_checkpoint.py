"""A checkpoint at any step: another loader goes on at the exact next sample."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestream import ConfigError, EpochLoader
from cachestream.schema import Schema, Snapshot
from cachestream.training.plan import OrderKind, OrderRecord, rebuild, translate
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache

VARIANTS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "with a rest": {"drop_last": False},
    "fewer than cached": {"epoch_size": 20},
    "more than cached": {"epoch_size": 61, "drop_last": False},
    "a sampler": {"sampler": torch.utils.data.RandomSampler},
    "a batch sampler": {
        "sampler": lambda dataset: torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(dataset), 5, drop_last=False
        )
    },
}


def stream(loader: EpochLoader) -> Iterator[list[int]]:
    """The batches of one epoch, as numbers."""
    return (batch["number"].tolist() for batch in loader)


@pytest.mark.parametrize("variant", VARIANTS)
def test_from_any_step_of_an_epoch_the_rest_is_the_same_in_a_new_loader(
    variant: str, new_cache: NewCache
) -> None:
    cache, options = new_cache(3, 9), VARIANTS[variant]
    states, epoch = [], []
    with EpochLoader(cache, 4, **options) as loader:
        next(stream(loader))  # the second epoch is the one recorded
        total = None
        batches = stream(loader)
        for batch in batches:
            total = len(loader)
            epoch.append(batch)
            states.append(loader.state_dict())
        assert total == len(epoch)
        following = list(stream(loader))
    for step, state in enumerate(states, start=1):
        with EpochLoader(cache, 4, **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            batches = stream(loader)
            assert loader.state_dict() == state
            rest = list(batches)
            if step == len(epoch):  # the epoch was over: this is the next one
                assert rest == following or "more" in variant
                continue
            if "more" not in variant:
                assert rest == epoch[step:], step
                assert loader.epoch == 2
                assert list(stream(loader)) == following
            else:  # passes after the recorded one are drawn from snapshots of their own
                assert len(rest) == len(epoch) - step
                assert len(rest[-1]) == len(epoch[-1]) == 1


def test_a_chain_of_checkpoints_loses_and_repeats_nothing(new_cache: NewCache) -> None:
    cache = new_cache(4, 10)
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for _ in range(10):
        with EpochLoader(cache, 4, prefetch=3) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen += next(stream(loader))
            state = loader.state_dict()
    assert sorted(seen) == list(range(40))
    assert state is not None
    assert (state["epoch"], state["batch"]) == (1, 0)


def test_a_state_is_plain_values_that_checkpoints_can_hold(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 8), 4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save({"loader": state}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["loader"] == state


def test_a_loader_is_saved_and_loaded_by_a_distributed_checkpoint(
    new_cache: NewCache, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint flattens states, and expects the keys that a new loader's state has."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
    from torch.distributed.checkpoint.stateful import Stateful

    cache, folder = new_cache(3, 8), str(tmp_path / "checkpoint")
    with EpochLoader(cache, 4, weights=True) as loader:
        assert isinstance(loader, Stateful)
        batches = stream(loader)
        next(batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            save_distributed({"loader": loader}, checkpoint_id=folder)
        rest = list(batches)
    with EpochLoader(cache, 4, weights=True) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed({"loader": loader}, checkpoint_id=folder)
        assert list(stream(loader)) == rest


def test_the_cache_may_grow_in_between(new_cache: NewCache) -> None:
    cache = new_cache(3, 8)
    with EpochLoader(cache, 4) as loader:
        epoch = stream(loader)
        head = [next(epoch), next(epoch)]
        state = loader.state_dict()
        tail = list(epoch)
    add_shard(cache, numbered(24, 8))
    with EpochLoader(cache, 4) as loader:
        loader.load_state_dict(state)
        assert len(loader) == 6
        assert list(stream(loader)) == tail
        assert sorted(n for batch in head + tail for n in batch) == list(range(24))
        assert sorted(n for batch in stream(loader) for n in batch) == list(range(32))


def test_samples_evicted_in_between_are_skipped_with_a_warning_and_all_others_come_once(
    new_cache: NewCache,
) -> None:
    cache = new_cache(4, 8)
    with EpochLoader(cache, 4) as loader:
        epoch = stream(loader)
        head = [next(epoch), next(epoch)]
        state = loader.state_dict()
    cache.quarantine(int(json.loads(state["segment"])["caches"][cache.cache_id]["shards"][1]), "a test")
    left = set(range(32)) - set(range(8, 16)) - {n for batch in head for n in batch}
    lost = 24 - len(left)
    for _ in range(2):  # the second time from a state that was itself saved after the loss
        with EpochLoader(cache, 4, drop_last=False) as loader:
            loader.load_state_dict(state)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                epoch = stream(loader)
                first = next(epoch)
                state = loader.state_dict()
                rest = [n for batch in epoch for n in batch]
            assert sorted(first + rest) == sorted(left)
            assert [f"{lost} samples" in str(warning.message) for warning in caught] == (
                [True] if lost else []
            )
            left, lost = left - set(first), 0


def test_when_all_of_it_was_evicted_the_epoch_goes_on_with_what_is_cached(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4, epoch_size=16) as loader:
        next(stream(loader))
        state = loader.state_dict()
    cache.evict(0)
    add_shard(cache, numbered(100, 20))
    with EpochLoader(cache, 4, epoch_size=16) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="12 samples"):
            rest = [n for batch in stream(loader) for n in batch]
    assert len(rest) == 12
    assert min(rest) >= 100


def test_another_batch_size_goes_on_at_the_same_sample(new_cache: NewCache) -> None:
    cache = new_cache(3, 8)
    with EpochLoader(cache, 4) as loader:
        epoch = stream(loader)
        next(epoch)
        state = loader.state_dict()
        rest = [n for batch in epoch for n in batch]
    with EpochLoader(cache, 5) as loader:
        loader.load_state_dict(state)
        assert [n for batch in stream(loader) for n in batch] == rest


def test_set_epoch_to_the_resumed_epoch_keeps_the_place_in_it(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        epoch = stream(loader)
        next(epoch)
        state = loader.state_dict()
        rest = list(epoch)
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert list(stream(loader)) == rest
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert len(list(stream(loader))) == 4


def test_loading_a_state_ends_a_running_iteration(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 8), 4) as loader:
        state = loader.state_dict()
        assert (state["epoch"], state["batch"], state["segment"]) == (0, 0, None)
        epoch = stream(loader)
        first = next(epoch)
        loader.load_state_dict(state)
        assert next(stream(loader)) == first


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"version": 3},
        {"version": 99, "epoch": 0},
        {"version": 3, "epoch": "x"},
        {"version": 3, "epoch": -1, "batch": 0, "segment": None},
        {"version": 3, "epoch": 0, "batch": -1, "segment": None},
        {"version": 3, "epoch": 1, "batch": 3, "segment": None},
        {"version": 3, "epoch": 1, "batch": 3, "segment": "{"},
        {"version": 3, "epoch": 1, "batch": 3, "segment": "{}"},
    ],
)
def test_a_state_of_something_else_is_refused(wrong: dict[str, Any], new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 4) as loader, pytest.raises(ConfigError, match="state"):
        loader.load_state_dict(wrong)


def snapshot_of(record: OrderRecord, gone: set[int]) -> Snapshot:
    keep = [i for i, shard_id in enumerate(record.shard_ids.tolist()) if shard_id not in gone]
    return Snapshot("id", "/", "/", Schema(()), record.shard_ids[keep], record.counts[keep])


@given(st.data())
def test_any_sequence_of_cuts_leaves_exactly_the_samples_not_drawn_and_not_gone(data: st.DataObject) -> None:
    """Against a model: lists of (shard, row), cut and filtered by hand."""
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)), np.int64)
    ids = np.array([3 * i + 1 for i in range(len(counts))], np.int64)
    total = int(counts.sum())
    kinds: list[OrderKind] = ["shuffled", "sequential"]
    kind = data.draw(st.sampled_from(kinds))
    record = OrderRecord(
        ids, counts, kind, data.draw(st.integers(1, total)), key=data.draw(st.integers(0, 2**64 - 1))
    )
    places = [(int(i), row) for i, count in zip(ids, counts, strict=True) for row in range(count)]
    order, _ = rebuild(record)
    model = [places[sample] for sample in order.at(np.arange(order.size)).tolist()]
    gone: set[int] = set()
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(model)))
        new = data.draw(st.sets(st.sampled_from(ids.tolist()), max_size=2)) - gone
        gone |= new
        record = record.cut(position, tuple(new))
        model = [place for place in model[position:] if place[0] not in gone]
        record = OrderRecord.from_state(json.loads(json.dumps(record.to_state())))
    snapshot = snapshot_of(record, gone)
    order = translate(rebuild(record)[0], record, snapshot)
    left = [
        (int(i), row) for i, n in zip(snapshot.shard_ids, snapshot.counts, strict=True) for row in range(n)
    ]
    assert [left[sample] for sample in order.at(np.arange(order.size)).tolist()] == model


def test_the_state_of_a_cache_that_is_not_this_one_starts_the_epoch_anew(new_cache: NewCache) -> None:
    first, other = new_cache(2, 8), new_cache(2, 8, 50)
    with EpochLoader(first, 4) as loader:
        next(stream(loader))
        state = loader.state_dict()
    with EpochLoader(other, 4) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="12 samples"):
            assert min(n for batch in stream(loader) for n in batch) >= 50
