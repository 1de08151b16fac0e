"""Arguments that a cache accepts, and its errors for others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cachestream.errors import ConfigError, NotEnoughSamplesError
from cachestream.storage.cache import Cache
from tests.storage.support import content, publish


@pytest.fixture
def filled(make_cache: Callable[..., Cache]) -> Cache:
    cache = make_cache()
    publish(cache, content(0))
    return cache


@pytest.mark.parametrize("epoch_size", ["5", 2.5, True, 0, -1])
def test_an_epoch_size_that_is_no_count_is_refused(filled: Cache, epoch_size: Any) -> None:
    with pytest.raises(ConfigError, match=f"^epoch_size={epoch_size!r}: give a whole number, 1 or more$"):
        filled.snapshot(epoch_size)


@pytest.mark.parametrize("turnover", [None, "x", True, math.nan, 1, -0.1])
def test_a_turnover_that_is_no_share_is_refused(filled: Cache, turnover: Any) -> None:
    with pytest.raises(ConfigError, match=f"^turnover={turnover!r}: give a share from 0"):
        filled.snapshot(turnover=turnover)


@pytest.mark.parametrize("min_samples", ["1", None, 2.5, True, -1])
def test_samples_to_wait_for_that_are_no_count_are_refused(filled: Cache, min_samples: Any) -> None:
    with pytest.raises(ConfigError, match=f"^min_samples={min_samples!r}: give a whole number, 0 or more$"):
        filled.wait(min_samples)


@pytest.mark.parametrize("timeout_s", ["0", math.nan, False])
def test_a_deadline_that_is_no_number_is_refused_also_where_nothing_is_waited_for(
    filled: Cache, timeout_s: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^timeout_s={timeout_s!r}: give seconds$"):
        filled.wait(1, timeout_s)


def test_numpys_numbers_are_numbers_and_a_deadline_may_be_over(filled: Cache) -> None:
    assert filled.wait(np.int64(3), np.float32(0.5)) == 3  # type: ignore[arg-type]
    with filled.snapshot(np.int64(2), turnover=np.float64(0.25)) as dataset:  # type: ignore[arg-type]
        assert len(dataset) == 3  # of whole shards
    with pytest.raises(NotEnoughSamplesError, match="4 are needed"):
        filled.wait(4, -1.0)
