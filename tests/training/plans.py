"""The positions that a plan gives to a rank."""

from __future__ import annotations

import numpy as np

from cachestream.schema import IntArray
from cachestream.training.plan import Plan

__all__ = ["batch_positions"]


def batch_positions(plan: Plan, rank: int, batch_index: int) -> IntArray:
    """The positions in the order that make up batch `batch_index` of `rank`, int64 `[batch]`."""
    starts, stops = plan.spans(rank, batch_index, batch_index + 1)
    return np.arange(starts[0], stops[0])
