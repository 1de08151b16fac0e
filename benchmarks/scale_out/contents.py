"""The units that nodes hold: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cachestream.permutation import Permutation, mix_key
from cachestream.schema import IntArray
from cachestream.worker.order import PassPlan, UnitOrder

__all__ = ["trade", "units_between"]


def units_between(plan: PassPlan, start: int, stop: int) -> IntArray:
    """The units at the positions `start` to `stop` of passes that follow each other, `plan` the first of them."""
    length = plan.share or 0
    parts = [np.empty(0, np.int64)]
    for ordinal in range(start // max(1, length), -(-stop // max(1, length))):
        order = UnitOrder(PassPlan(plan.kind, plan.seed, ordinal, plan.num_units, "", length, plan.partition))
        first, last = max(start - ordinal * length, 0), min(stop - ordinal * length, length)
        parts.append(order.units(np.arange(first, last)))
    return np.concatenate(parts)


def trade(contents: Sequence[IntArray], share: float, seed: int, epoch: int) -> list[IntArray]:
    """The units of each node after an exchange: each gives `share` of its own to one other node, and gets as many of another.

    Nodes form a ring whose step is drawn anew in each epoch. Nothing is lost and nothing is held twice.
    """
    count, nodes = math.ceil(share * min(map(len, contents))), len(contents)
    if nodes == 1 or not count:
        return list(contents)
    step = 1 + mix_key(seed, epoch) % (nodes - 1)
    given = np.arange(count)
    places = [Permutation(len(held), mix_key(seed, epoch, i)).at(given) for i, held in enumerate(contents)]
    traded = [held.copy() for held in contents]
    for node, held in enumerate(traded):
        other = (node + step) % nodes
        held[places[node]] = contents[other][places[other]]
    return traded
