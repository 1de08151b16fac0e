"""The places of the samples of batches, worked out ahead: the plan's, block by block, in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.permutation import Permutation
from cachestream.schema import Schema, Snapshot
from cachestream.training.batches.mapped_shards import EpochMaps, find_locations
from cachestream.training.plan import Plan, SampleOrder, ShuffledOrder, count_batches
from tests.training.plans import batch_positions


def maps_of(counts: list[int]) -> EpochMaps:
    ids = np.arange(1, len(counts) + 1, dtype=np.int64)
    return EpochMaps(Snapshot("id", "/", "/", Schema(()), ids, np.array(counts, np.int64)))


def plan_of(samples: int, batch_size: int, ranks: int) -> tuple[SampleOrder, Plan]:
    order = ShuffledOrder(samples, Permutation(samples, 1))
    return order, Plan(samples, batch_size, ranks, count_batches(samples, batch_size, ranks, drop_last=False))


@pytest.mark.e2e
@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    batch_size=st.integers(1, 40),
    ranks=st.integers(1, 3),
    data=st.data(),
)
def test_places_are_those_of_the_samples_that_the_plan_gives_each_batch(
    counts: list[int], batch_size: int, ranks: int, data: st.DataObject
) -> None:
    maps = maps_of(counts)
    order, plan = plan_of(sum(counts), batch_size, ranks)
    if not plan.num_batches:
        return
    rank = data.draw(st.integers(0, ranks - 1))
    first = data.draw(st.integers(0, plan.num_batches - 1))
    stop = data.draw(st.integers(first + 1, plan.num_batches))
    places = find_locations(order, plan, rank, maps, first, stop)
    assert len(places) == stop - first
    for number in range(first, stop):
        part = places.part(number - first, number - first + 1)
        assert part.first == number
        assert part.bounds.tolist() == [0, len(part.rows)]
        samples = maps.starts[part.shards] + part.rows
        assert samples.tolist() == order.at(batch_positions(plan, rank, number)).tolist()
        assert (part.rows >= 0).all()
        assert (part.rows < np.array(counts)[part.shards]).all()
