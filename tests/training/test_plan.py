"""The plan: equal numbers of batches on all ranks, no sample twice, none left out unless stated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.permutation import Permutation
from cachestream.training.plan import (
    ListedOrder,
    Plan,
    SequentialOrder,
    ShuffledOrder,
    TailOrder,
    count_batches,
)
from tests.training.plans import batch_positions

SAMPLES = st.integers(0, 400)
BATCH = st.integers(1, 20)
RANKS = st.integers(1, 9)


def whole_plan(samples: int, batch: int, ranks: int, drop_last: bool) -> Plan:
    return Plan(samples, batch, ranks, count_batches(samples, batch, ranks, drop_last))


def all_batches(plan: Plan) -> list[list[list[int]]]:
    """batches[i][rank] is a list of positions."""
    return [
        [batch_positions(plan, r, i).tolist() for r in range(plan.ranks)] for i in range(plan.num_batches)
    ]


@given(SAMPLES, BATCH, RANKS)
def test_with_drop_last_every_batch_is_whole_and_less_than_one_global_batch_is_dropped(
    samples: int, batch: int, ranks: int
) -> None:
    batches = all_batches(whole_plan(samples, batch, ranks, drop_last=True))
    drawn = [position for ranked in batches for one in ranked for position in one]
    assert all(len(one) == batch for ranked in batches for one in ranked)
    assert sorted(drawn) == list(range(len(drawn)))
    assert 0 <= samples - len(drawn) < batch * ranks


@given(SAMPLES, BATCH, RANKS)
def test_without_drop_last_fewer_samples_than_ranks_are_dropped_and_shares_differ_by_one_at_most(
    samples: int, batch: int, ranks: int
) -> None:
    batches = all_batches(whole_plan(samples, batch, ranks, drop_last=False))
    drawn = [position for ranked in batches for one in ranked for position in one]
    assert sorted(drawn) == list(range(len(drawn)))
    assert samples - len(drawn) == (samples % (batch * ranks) if samples % (batch * ranks) < ranks else 0)
    for ranked in batches:
        sizes = [len(one) for one in ranked]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.e2e
@given(SAMPLES, BATCH, RANKS, st.data())
def test_the_position_of_a_batch_is_where_the_batches_before_it_end(
    samples: int, batch: int, ranks: int, data: st.DataObject
) -> None:
    plan = whole_plan(samples, batch, ranks, drop_last=False)
    before = data.draw(st.integers(0, plan.num_batches))
    drawn = sum(len(one) for ranked in all_batches(plan)[:before] for one in ranked)
    assert plan.position(before) == drawn


@given(SAMPLES, BATCH, RANKS, st.booleans(), st.booleans(), st.data())
def test_the_spans_are_equal_shares_of_the_runs_that_all_ranks_take_together(
    samples: int, batch: int, ranks: int, drop_last: bool, cut: bool, data: st.DataObject
) -> None:
    plan = whole_plan(samples, batch, ranks, drop_last)
    if cut:
        ends = sorted(data.draw(st.lists(st.integers(0, samples), min_size=1, max_size=30)))
        plan = Plan(samples, batch, ranks, (len(ends) - 1) // ranks, np.array(ends, np.int64))
    rank = data.draw(st.integers(0, ranks - 1))
    first = data.draw(st.integers(0, plan.num_batches))
    stop = data.draw(st.integers(first, plan.num_batches))
    starts, stops = plan.spans(rank, first, stop)
    assert starts.dtype == stops.dtype == np.int64
    for number, span in zip(
        range(first, stop), zip(starts.tolist(), stops.tolist(), strict=True), strict=True
    ):
        if plan.bounds is not None:
            assert span == tuple(plan.bounds[number * ranks + rank :][:2].tolist())
            continue
        together = np.arange(plan.position(number), plan.position(number + 1))
        assert list(range(*span)) == np.array_split(together, ranks)[rank].tolist()


def test_one_rank_drops_nothing_without_drop_last() -> None:
    assert [len(ranked[0]) for ranked in all_batches(whole_plan(10, 4, 1, drop_last=False))] == [4, 4, 2]


def test_a_plan_of_a_billion_samples_reaches_any_batch_without_the_others() -> None:
    order = ShuffledOrder(10**9, Permutation(10**9, 5))
    plan = Plan(order.size, 256, 8, count_batches(10**9, 256, 8, drop_last=True))
    positions = batch_positions(plan, 7, plan.num_batches - 1)
    samples = order.at(positions)
    assert len(set(samples.tolist())) == 256
    assert np.array_equal(order.permutation.inverse(samples), positions)


def test_batches_that_a_sampler_cut_go_to_the_ranks_in_turns() -> None:
    plan = Plan(12, 4, 2, 2, bounds=np.array([0, 3, 4, 9, 12]))
    assert all_batches(plan) == [[[0, 1, 2], [3]], [[4, 5, 6, 7, 8], [9, 10, 11]]]
    assert [plan.position(i) for i in range(3)] == [0, 4, 12]


def test_the_tail_of_an_order_is_the_order_without_its_head() -> None:
    listed = ListedOrder(np.array([5, 3, 9, 1]))
    tail = TailOrder(TailOrder(listed, 1), 1)
    assert tail.size == 2
    assert tail.at(np.arange(2)).tolist() == [9, 1]
    assert TailOrder(SequentialOrder(3), 7).size == 0
