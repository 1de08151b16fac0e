"""An order shuffled within a window: all samples once, from few places at a time, and equal after any resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream import ConfigError, EpochLoader
from cachestream.training.plan import LocalOrder, OrderRecord, rebuild, run_length
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache, NewJob

SAMPLES = st.integers(1, 3000)
WINDOW = st.integers(1, 4000)
RUN = st.integers(1, 300)
KEY = st.integers(0, 2**64 - 1)


def listed(order: LocalOrder) -> np.ndarray[Any, Any]:
    return order.at(np.arange(order.size, dtype=np.int64))


@pytest.mark.e2e
@given(SAMPLES, WINDOW, RUN, KEY)
def test_the_order_is_a_permutation_whatever_its_window_and_runs(
    samples: int, window: int, run: int, key: int
) -> None:
    assert np.array_equal(np.sort(listed(LocalOrder(samples, samples, window, run, key))), np.arange(samples))


@pytest.mark.e2e
@given(SAMPLES, WINDOW, RUN, KEY, st.data())
def test_any_position_is_computed_alone_and_a_shorter_order_is_the_beginning_of_a_longer_one(
    samples: int, window: int, run: int, key: int, data: st.DataObject
) -> None:
    whole = listed(LocalOrder(samples, samples, window, run, key))
    asked = data.draw(st.lists(st.integers(0, samples - 1), max_size=20))
    order = LocalOrder(data.draw(st.integers(1, samples)), samples, window, run, key)
    assert np.array_equal(listed(order), whole[: order.size])
    asked = [position for position in asked if position < order.size]
    assert np.array_equal(order.at(np.array(asked, np.int64)), whole[asked])


@pytest.mark.e2e
@given(SAMPLES, WINDOW, RUN, KEY)
def test_a_window_is_made_of_whole_runs_but_for_those_at_its_ends(
    samples: int, window: int, run: int, key: int
) -> None:
    """Consecutive samples stay together, which makes the reads of a window long."""
    order = listed(LocalOrder(samples, samples, window, run, key))
    for start in range(0, samples, window):
        drawn = np.sort(order[start : start + window])
        breaks = int(np.count_nonzero(np.diff(drawn) != 1))
        # Runs in the window, two of them cut by its ends, one by the end of the data, one being the short
        # last one.
        assert breaks <= len(drawn) // run + 3


@pytest.mark.e2e
@given(SAMPLES, WINDOW, RUN, KEY, st.data())
def test_what_is_asked_to_be_read_before_a_position_holds_the_sample_and_is_asked_for_once(
    samples: int, window: int, run: int, key: int, data: st.DataObject
) -> None:
    order = LocalOrder(data.draw(st.integers(1, samples)), samples, window, run, key)
    drawn, asked = listed(order), np.zeros(samples, np.int64)
    begun = data.draw(st.integers(0, order.size - 1))
    read_to = order.needs(begun)[0]
    steps = sorted({begun, *data.draw(st.lists(st.integers(begun, order.size - 1), max_size=5))})
    for position, following in itertools.pairwise([*steps, order.size]):
        first, last = order.needs(position)
        starts, stops = order.stretches(max(read_to, first), last)
        read_to = max(read_to, last)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            assert 0 <= start < stop <= samples
            asked[start:stop] += 1
        end = min(position - position % window + window, following)
        assert asked[drawn[position:end]].all()
    assert asked.max(initial=0) <= 1


@pytest.mark.e2e
@given(st.integers(200, 3000), KEY)
def test_windows_that_hold_everything_mix_everything(samples: int, key: int) -> None:
    order = listed(LocalOrder(samples, samples, samples, 64, key))
    distance = np.abs(np.diff(order)).mean() / samples
    assert 0.2 < distance < 0.5  # a third for a full shuffle


def test_every_epoch_has_its_own_order_and_borders_and_the_same_seed_gives_the_same() -> None:
    orders = [listed(LocalOrder(5000, 5000, 500, 50, key)) for key in (1, 2, 1)]
    assert np.array_equal(orders[0], orders[2])
    assert not np.array_equal(orders[0], orders[1])
    windows = [{frozenset(part.tolist()) for part in order.reshape(-1, 500)} for order in orders]
    assert not windows[0] & windows[1]


def test_a_billion_samples_need_no_memory_and_any_position_is_reached_at_once() -> None:
    order = LocalOrder(10**9, 10**9, 1_000_000, 4096, 7)
    positions = np.array([0, 999_999_999, 123_456_789], np.int64)
    found = order.at(positions)
    assert len(set(found.tolist())) == 3
    starts, stops = order.stretches(*order.needs(123_456_789))
    assert int((stops - starts).sum()) <= 2_000_000


def test_a_run_is_a_sixteenth_of_the_largest_shard() -> None:
    assert run_length(np.array([3, 800, 512])) == 50
    assert run_length(np.array([3])) == 1
    assert run_length(np.array([], np.int64)) == 1


def test_a_record_of_it_makes_the_same_order_again() -> None:
    record = OrderRecord(np.array([1, 2]), np.array([30, 50]), "local", 70, 9, local=(20, 4)).cut(13)
    again = OrderRecord.from_state(record.to_state())
    orders = [rebuild(r)[0] for r in (record, again)]
    assert orders[0].size == 57
    assert np.array_equal(orders[0].at(np.arange(57)), orders[1].at(np.arange(57)))
    with pytest.raises(ValueError, match="a window of 0 samples"):
        OrderRecord.from_state(record.to_state() | {"local": [0, 4]})


# --- through the loader


def numbers(loader: EpochLoader) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


def test_an_epoch_gives_all_samples_once_and_no_two_epochs_are_alike(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(5, 16), 8, locality=20) as loader:
        first, second = numbers(loader), numbers(loader)
    assert sorted(n for batch in first for n in batch) == list(range(80))
    assert sorted(n for batch in second for n in batch) == list(range(80))
    assert first != second


@pytest.mark.e2e
def test_it_resumes_on_another_number_of_ranks(new_cache: NewCache, new_job: NewJob) -> None:
    cache = new_cache(6, 16)

    def begin(_: int, make: Callable[..., EpochLoader]) -> tuple[list[int], dict[str, Any]]:
        batches = iter(loader := make(cache, 4, locality=24))
        seen = [n for _ in range(3) for n in next(batches)["number"].tolist()]
        return seen, loader.state_dict()

    begun = new_job(2).run(begin)

    def go_on(_: int, make: Callable[..., EpochLoader]) -> list[list[int]]:
        loader = make(cache, 4, locality=24)
        loader.load_state_dict(begun[0][1])
        return numbers(loader)

    for size in (1, 3):
        rest = new_job(size).run(go_on)
        seen = [n for part, _ in begun for n in part] + [n for part in rest for b in part for n in b]
        assert sorted(seen) == list(range(96))
        assert len({len(part) for part in rest}) == 1


@pytest.mark.e2e
def test_a_recorded_epoch_is_replayed(new_cache: NewCache, tmp_path: Path) -> None:
    cache = new_cache(4, 16)
    with EpochLoader(cache, 8, locality=20, record=tmp_path / "run") as loader:
        trained = numbers(loader)
        loader.state_dict()
    add_shard(cache, numbered(64, 16))
    with EpochLoader(cache, 8, replay=tmp_path / "run") as loader:
        assert numbers(loader) == trained
    with EpochLoader(cache, 4, replay=tmp_path / "run") as loader:
        halves = numbers(loader)
    assert [n for batch in halves for n in batch] == [n for batch in trained for n in batch]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"locality": 0}, "locality=0"),
        ({"locality": 2.5}, "locality=2.5"),
        ({"locality": 8, "shuffle": False}, "shuffle=True"),
        ({"locality": 8, "weights": True}, "weights="),
        ({"locality": 8, "sampler": [1, 2]}, "sampler="),
        ({"locality": 8, "replay": "."}, "replay="),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], message: str, new_cache: NewCache
) -> None:
    with pytest.raises(ConfigError, match=message):
        EpochLoader(new_cache(1, 16), 4, **options)
