"""Which unit comes next: pure functions from a plan and positions to units.

A pass goes over the positions 0, 1, …; the plan says which unit lies at each. For permutations the
inverse is known too, so that what is still cached from an earlier pass is found without a list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.model import IntArray
from cachestream.permutation import Permutation, mix_key

__all__ = ["KINDS", "Order", "PassPlan"]

KINDS: Final = ("shuffle", "sequential", "weighted", "sampler")
_PASS_KEY: Final = 1
_WEIGHT_KEY: Final = 2


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass over a remote of `num_units` units (None: endless), as the catalogue and the shards record it.

    `listing` is the digest of the units' names: positions of another listing mean other units.
    `length` is the number of positions (as many as units, or as a sampler draws).
    """

    kind: str
    seed: int
    ordinal: int
    num_units: int | None
    listing: str
    length: int | None

    def to_json(self) -> str:
        values = (self.kind, self.seed, self.ordinal, self.num_units, self.listing, self.length)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PassPlan:
        return cls(*json.loads(text))

    @property
    def is_permutation(self) -> bool:
        return self.kind in ("shuffle", "sequential")


class Order:
    """The units of one pass, by position; O(1) memory for the named orders.

    `weights` (float `[num_units]`, any scale) belong to the kind "weighted": units are drawn with
    replacement. `drawn` (int `[length]`) belongs to "sampler": what the sampler gave.
    """

    def __init__(
        self, plan: PassPlan, weights: Sequence[float] | None = None, drawn: npt.ArrayLike | None = None
    ) -> None:
        self.plan = plan
        self._permutation: Permutation | None = None
        if plan.kind == "shuffle" and plan.num_units:
            self._permutation = Permutation(plan.num_units, mix_key(_PASS_KEY, plan.seed, plan.ordinal))
        self._cumulative = None if weights is None else np.cumsum(np.asarray(weights, np.float64))
        self._drawn = None if drawn is None else np.asarray(drawn, np.int64)

    def units(self, positions: IntArray) -> IntArray:
        """The units at `positions`."""
        if self._drawn is not None:
            drawn: IntArray = self._drawn[positions].astype(np.int64)
            return drawn
        if self._cumulative is not None:
            return self._weighted(positions)
        return positions if self._permutation is None else self._permutation.at(positions)

    def positions(self, units: IntArray) -> IntArray:
        """Where `units` lie in the pass; only for permutations."""
        return units if self._permutation is None else self._permutation.inverse(units)

    def _weighted(self, positions: IntArray) -> IntArray:
        assert self._cumulative is not None
        # A position's number in [0, 1) comes from a permutation of 2⁵³: no generator state to resume.
        key = mix_key(_WEIGHT_KEY, self.plan.seed, self.plan.ordinal)
        uniform = Permutation(1 << 53, key).at(positions) / float(1 << 53)
        found = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
        units: IntArray = np.minimum(found, len(self._cumulative) - 1).astype(np.int64)
        return units


def check_weights(weights: Sequence[float], num_units: int | None) -> list[float]:
    """`weights` as floats; raises ConfigError unless there is one a unit, none negative, not all 0."""
    values = [float(weight) for weight in weights]
    if num_units is None or len(values) != num_units:
        raise ConfigError(f"order has {len(values)} weights for {num_units} units; give one for each unit")
    if not all(0 <= value < float("inf") for value in values) or not any(values):
        raise ConfigError("order: weights must be finite and 0 or more, and not all 0")
    return values


def check_drawn(drawn: Any, num_units: int | None) -> IntArray:
    """The units that a sampler gave; raises ConfigError for none, or for units that are not there."""
    units = np.asarray(drawn, np.int64).reshape(-1)
    if num_units is None or not len(units) or units.min() < 0 or units.max() >= num_units:
        raise ConfigError(
            f"order: the sampler must give unit numbers from 0 to {(num_units or 0) - 1}, at least one"
        )
    return units
