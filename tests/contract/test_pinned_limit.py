"""`EpochLoader(pinned_limit=)`: a size as bytes or text, which is checked also where nothing is pinned."""

from __future__ import annotations

from typing import Any

import pytest

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES


@pytest.mark.parametrize("limit", [0, 1, 3.0, "64MB", "1GiB", None])
def test_a_limit_of_pinned_memory_changes_no_batch(limit: Any, cache: cs.Cache) -> None:
    with (
        cs.EpochLoader(cache, 10, shuffle=False) as one,
        cs.EpochLoader(cache, 10, shuffle=False, pinned_limit=limit) as other,
    ):
        expected = [batch["number"].tolist() for batch in one]
        assert [batch["number"].tolist() for batch in other] == expected
    assert len(expected) == NUM_SAMPLES // 10


@pytest.mark.parametrize("wrong", [-1, "much", "5 apples", float("nan"), [1]])
def test_a_limit_that_is_no_size_is_refused_by_name(wrong: Any, cache: cs.Cache) -> None:
    with pytest.raises(cs.ConfigError, match="pinned_limit="):
        cs.EpochLoader(cache, 10, pinned_limit=wrong)
