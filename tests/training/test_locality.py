"""An order shuffled within a window: all samples once, from few places at a time, and equal after any resume."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.training.plan import LocalOrder, OrderRecord, rebuild, run_length

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
