"""Selection of the shards of an epoch: pure functions and their guarantees."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.schema import IntArray
from cachestream.storage.eviction import Room, bytes_to_retire, choose_retiring
from cachestream.storage.leases import merge_ranges, ranges_of
from cachestream.storage.snapshots import select_shards


def ints(values: list[int]) -> IntArray:
    return np.array(values, np.int64)


def members(ranges: IntArray) -> set[int]:
    return {i for first, last in ranges.tolist() for i in range(first, last + 1)}


@pytest.mark.e2e
def test_an_epoch_takes_the_least_used_shards_first_older_before_newer() -> None:
    """Exhaustive: four shards of any sizes up to 2 and uses up to 1, any left out, any epoch size."""
    ids = ints([3, 4, 7, 9])
    for counts, uses in itertools.product(
        itertools.product((1, 2), repeat=4), itertools.product((0, 1), repeat=4)
    ):
        for left in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(4)):
            there = [i for i in range(4) if i not in left]
            for epoch_size in (None, 1, 2, 3, 7, 8, 99):
                chosen = select_shards(
                    ids, ints(list(counts)), ints(list(uses)), ids[list(left)], epoch_size
                ).tolist()
                assert chosen == sorted(chosen)
                assert set(chosen) <= set(there)
                if epoch_size is None or sum(counts[i] for i in there) <= epoch_size:
                    assert chosen == there
                    continue
                have = sum(counts[i] for i in chosen)
                by_use = sorted(there, key=lambda i: (uses[i], i))
                assert chosen == sorted(by_use[: len(chosen)])
                assert have >= epoch_size > have - counts[by_use[len(chosen) - 1]], (
                    "one shard fewer is too few"
                )


shelf = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 2), st.integers(0, 20)), min_size=1, max_size=12
)


@pytest.mark.e2e
@given(rows=shelf, leave_bytes=st.integers(-3, 300), least=st.integers(0, 250))
def test_what_is_left_out_was_used_is_enough_and_never_all_nor_more_than_can_be_spared(
    rows: list[tuple[int, int, int]], leave_bytes: int, least: int
) -> None:
    ids = np.arange(10, 10 + len(rows))
    sizes, uses, counts = (ints(list(column)) for column in zip(*rows, strict=True))
    left = choose_retiring(ids, sizes, uses, counts, leave_bytes, least).tolist()
    usable = [i for i, use in zip(ids.tolist(), uses.tolist(), strict=True) if use]
    assert left == usable[: len(left)], "first to go first, and nothing that no epoch has seen"
    spare = int(counts.sum()) - max(least, 1)
    size_of, count_of = (dict(zip(ids.tolist(), column.tolist(), strict=True)) for column in (sizes, counts))
    if left:
        assert sum(size_of[i] for i in left[:-1]) < leave_bytes, "no shard more than needed"
        assert sum(count_of[i] for i in left) <= spare
    if sum(size_of[i] for i in left) < leave_bytes:
        more = usable[: len(left) + 1]
        assert left == more or sum(count_of[i] for i in more) > spare, "all that could be"


@pytest.mark.parametrize(
    ("free", "turnover", "remaining", "retire"),
    [
        (500, 0.25, math.inf, 0),  # a quarter is free already
        (100, 0.25, math.inf, 150),
        (0, 0.25, math.inf, 250),
        (-50, 0.25, math.inf, 300),  # over the limit: the surplus and the share
        (100, 0.25, 99, 0),  # what is to come fits
        (100, 0.25, 100, 150),
        (0, 0.25, 0, 0),  # nothing is to come
        (100, 0.0, math.inf, 0),
    ],
)
def test_a_share_retires_only_where_the_filling_needs_it(
    free: int, turnover: float, remaining: float, retire: int
) -> None:
    assert bytes_to_retire(Room(1000, 1000 - free), turnover, remaining) == retire


@pytest.mark.parametrize(("free", "largest", "retire"), [(100, 120, 250), (100, 100, 150), (0, 400, 400)])
def test_the_share_has_room_for_a_shard_and_what_is_free_counts_only_where_one_fits(
    free: int, largest: int, retire: int
) -> None:
    assert bytes_to_retire(Room(1000, 1000 - free), 0.25, math.inf, largest) == retire


@given(ids=st.sets(st.integers(1, 60), min_size=1, max_size=30).map(sorted), data=st.data())
def test_the_ranges_of_a_lease_hold_the_chosen_and_no_other_shard_that_is_there(
    ids: list[int], data: st.DataObject
) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1))))
    ranges = ranges_of(ints(ids), ints(chosen))
    assert members(ranges) & set(ids) == {ids[i] for i in chosen}
    assert (np.diff(ranges.reshape(-1)) >= 0).all()


def test_a_lease_of_a_whole_cache_is_one_range_however_many_shards_have_gone() -> None:
    ids = ints([1, 5, 6, 90, 1000])
    assert ranges_of(ids, np.arange(5)).tolist() == [[1, 1000]]
    assert ranges_of(ids, ints([0, 1, 3, 4])).tolist() == [[1, 5], [90, 1000]]
    assert ranges_of(ids, ints([])).shape == (0, 2)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12))
def test_merged_ranges_hold_the_same_ids_disjoint_and_in_order(pairs: list[tuple[int, int]]) -> None:
    ranges = np.array([(first, first + length) for first, length in pairs], np.int64).reshape(-1, 2)
    merged = merge_ranges(ranges)
    assert members(merged) == members(ranges)
    assert (merged[1:, 0] > merged[:-1, 1] + 1).all()
