"""The reuse factor of a loader: samples drawn over distinct ones, while shards come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.schema import Schema, Snapshot
from cachestream.training.stats import Reuse

DRAWS = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=1, unique=True), st.sampled_from([0.0, 0.25, 1.0, 2.0])),
    max_size=8,
)


@pytest.mark.e2e
@given(DRAWS)
def test_each_shard_is_distinct_once_however_shards_come_and_go(draws: list[tuple[list[int], float]]) -> None:
    """A shard has as many samples as its id, and each draw takes a share of what it has."""
    reuse, drawn, unseen = Reuse(), 0.0, dict.fromkeys(range(1, 13), 1.0)
    for ids, share in draws:
        shards = np.array(ids, np.int64)
        reuse.add(Snapshot("cache", "root", "lease", Schema(()), shards, shards), share)
        for one in ids:
            drawn += one * share
            unseen[one] *= 1 - min(share, 1.0)
    distinct = sum(one * (1 - share) for one, share in unseen.items())
    assert reuse.factor == pytest.approx(drawn / distinct if distinct else 1.0)
