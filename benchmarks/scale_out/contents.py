"""The units that nodes hold: pure functions."""

from __future__ import annotations

import numpy as np

from cachestream.schema import IntArray
from cachestream.worker.order import PassPlan, UnitOrder

__all__ = ["units_between"]


def units_between(plan: PassPlan, start: int, stop: int) -> IntArray:
    """The units at the positions `start` to `stop` of passes that follow each other, `plan` the first of them."""
    length = plan.share or 0
    parts = [np.empty(0, np.int64)]
    for ordinal in range(start // max(1, length), -(-stop // max(1, length))):
        order = UnitOrder(PassPlan(plan.kind, plan.seed, ordinal, plan.num_units, "", length, plan.partition))
        first, last = max(start - ordinal * length, 0), min(stop - ordinal * length, length)
        parts.append(order.units(np.arange(first, last)))
    return np.concatenate(parts)
