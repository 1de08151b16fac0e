"""A curriculum: every unit once a pass, in an order that a function of progress shapes.

Drawing one after the other without replacement, with probabilities in proportion to weights, is
taking the smallest of exponential variables divided by the weights: Efraimidis and Spirakis,
"Weighted random sampling with a reservoir" (Information Processing Letters 97, 2006).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.model import IntArray
from cachestream.permutation import mix_key

__all__ = ["check_curriculum", "draw_curriculum"]

Curriculum = Callable[[float], Any]

STEPS: Final = 100
_CURRICULUM_KEY: Final = 4
_LAST: Final = 1e6  # above the logarithm of any number: what has no weight comes after all that has


def check_curriculum(
    curriculum: Curriculum, progress: float, num_units: int | None
) -> npt.NDArray[np.float64]:
    """The weights at `progress`, float64 `[num_units]`; raises ConfigError unless they can be drawn by."""
    if num_units is None:
        raise ConfigError("order: an endless source has no passes for a curriculum to order")
    try:
        weights = np.asarray(curriculum(progress), np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"order({progress:g}) gives no weights: {type(error).__name__}: {error}") from error
    if weights.shape != (num_units,):
        raise ConfigError(
            f"order({progress:g}) gives an array of shape {weights.shape}; give one weight for each of "
            f"the {num_units} units"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ConfigError(f"order({progress:g}): weights must be finite and 0 or more")
    return weights


def draw_curriculum(
    curriculum: Curriculum, units: IntArray, num_units: int, *, seed: int, ordinal: int
) -> IntArray:
    """All of `units` in the order of pass `ordinal`; the curriculum is asked up to 100 times.

    At each point the next unit is drawn among those left with probabilities in proportion to their
    weights; those of weight 0 wait until no others are left, and then all are alike.
    """
    rng = np.random.Generator(np.random.Philox(key=mix_key(_CURRICULUM_KEY, seed, ordinal)))
    bounds = np.linspace(0, len(units), min(STEPS, len(units)) + 1).astype(np.int64).tolist()
    left = units.copy()
    drawn = np.empty_like(units)
    for start, stop in pairwise(bounds):
        weights = check_curriculum(curriculum, ordinal + start / len(units), num_units)[left]
        with np.errstate(divide="ignore"):
            keys = np.log(rng.standard_exponential(len(left)))
            keys -= np.where(weights > 0, np.log(weights), -_LAST)
        first = np.argpartition(keys, stop - start - 1)
        taken, rest = first[: stop - start], first[stop - start :]
        drawn[start:stop] = left[taken[np.argsort(keys[taken])]]
        left = left[np.sort(rest)]
    return drawn
