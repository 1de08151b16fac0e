"""The order that the user asks for: its kind and weights, checked, and the units that a sampler draws."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.permutation import keyed_generator, mix_key
from cachestream.schema import IntArray
from cachestream.worker.job import Job, unpack
from cachestream.worker.order import Partition, all_units, share_of

Curriculum = Callable[[float], Any]
Weights = npt.NDArray[np.float64]

NAMED: Final = ("shuffle", "sequential")  # they can begin before all units are known
_OTHERS: Final = "weights, a function of progress, or a torch Sampler over units"
_CURRICULUM_KEY: Final = 4
_MIXTURE_KEY: Final = 6
_NO_SHARE: Final = 1e-9
_LEAST_BOUND, _MOST_REPEATS = 1 << 20, 16  # of the numbers that a sampler draws for one pass
STEPS: Final = 100
_LAST: Final = 1e6  # above the logarithm of any number: units without weight come last


def kind_of(order: Any) -> str:
    """The kind of `order`: "shuffle", "sequential", "weighted", "sampler" or "curriculum".

    Raises ConfigError.
    """
    if isinstance(order, str):
        if order not in NAMED:
            raise ConfigError(f"order={order!r}: choose 'shuffle' or 'sequential', or give {_OTHERS}")
        return order
    if isinstance(order, Sequence) or hasattr(order, "__array__"):
        return "weighted"
    if isinstance(order, type):
        raise ConfigError(f"order={order!r} is a class: make one of it first")
    if hasattr(order, "__iter__"):
        return "sampler"
    if callable(order):
        return "curriculum"
    raise ConfigError(f"order={order!r}: give 'shuffle', 'sequential', {_OTHERS}")


def check_order(
    order: Any, num_units: int | None, partition: Partition | None
) -> tuple[str, Weights | None, Any]:
    """The kind of an order, its weights if any, and its sampler or curriculum if any.

    Raises ConfigError for an order that the units cannot have.
    """
    kind = kind_of(order)
    if kind == "weighted":
        return kind, check_weights(order, num_units, partition), None
    if kind == "curriculum":
        check_curriculum(order, 0.0, num_units)
    return kind, None, None if isinstance(order, str) else order


def check_weights(
    weights: Iterable[Any], num_units: int | None, partition: Partition | None = None
) -> Weights:
    """The weights, float64 `[num_units]`.

    Raises ConfigError unless there is one for each unit, none is negative, and one in the share is above 0.
    """
    if num_units is None:
        raise ConfigError("order: an endless source has no units of which each could have a weight")
    try:
        values = np.array([float(weight) for weight in weights])
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"order: weights must be numbers, one for each of the {num_units} units ({error})"
        ) from None
    if len(values) != num_units:
        raise ConfigError(f"order has {len(values)} weights for {num_units} units; give one for each unit")
    _check_values("order", values)
    if not share_of(values, partition).any():
        raise ConfigError(f"order: all weights{f' of the share {partition}' if partition else ''} are 0")
    return values


def check_curriculum(curriculum: Curriculum, progress: float, num_units: int | None) -> Weights:
    """The weights at `progress`, float64 `[num_units]`; raises ConfigError if they are invalid."""
    if num_units is None:
        raise ConfigError("order: an endless source has no passes for a curriculum to order")
    try:
        values = np.asarray(curriculum(progress), np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"order({progress:g}) gives no weights: {type(error).__name__}: {error}") from error
    if values.shape != (num_units,):
        raise ConfigError(
            f"order({progress:g}) gives an array of shape {values.shape}; give one weight for each of "
            f"the {num_units} units"
        )
    _check_values(f"order({progress:g})", values)
    return values


def _check_values(what: str, weights: Weights) -> None:
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(weights.sum())
    if not is_finite or (weights < 0).any():
        raise ConfigError(f"{what}: weights must be finite and 0 or more, and their sum finite")


class UserOrder:
    """The user's sampler or curriculum, which draws the units of a pass."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sampler: Any = None

    def draw(self, ordinal: int) -> IntArray:
        """The units of pass `ordinal` in their order."""
        if self._sampler is None and self._job.sampler is not None:
            self._sampler = unpack(self._job.sampler, "order")  # kept: its generator continues
        job, sampler = self._job, self._sampler
        if job.kind == "curriculum" and job.num_units is not None:
            share = all_units(job.num_units, job.partition)
            return draw_curriculum(sampler, share, job.num_units, seed=job.seed, ordinal=ordinal)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(ordinal)
        return check_drawn(sampler, job.num_units, job.partition)


def draw_curriculum(
    curriculum: Curriculum, units: IntArray, num_units: int, *, seed: int, ordinal: int
) -> IntArray:
    """All of `units` in the order of pass `ordinal`; calls the curriculum up to 100 times.

    At each point the next unit is drawn among those left with probabilities in proportion to their
    weights; units of weight 0 come last, in uniform order. Drawing without replacement takes the smallest of
    exponential variables divided by the weights: Efraimidis and Spirakis, "Weighted random sampling with a
    reservoir" (Information Processing Letters 97, 2006).
    """
    rng = keyed_generator(mix_key(_CURRICULUM_KEY, seed, ordinal))
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


def draw_mixture(units: IntArray, sources: IntArray, shares: Sequence[float], *, seed: int) -> IntArray:
    """Order `units` so that any run of them has the `sources` in their `shares`, until a source is exhausted.

    The units of a source come in random order, and those of a source without a share come last.
    """
    rng = keyed_generator(mix_key(_MIXTURE_KEY, seed))
    due = rng.permutation(len(units)) / max(1, len(units))
    for number, share in enumerate(shares):
        members = np.flatnonzero(sources == number)
        turns = np.argsort(np.argsort(due[members])) + 0.5
        due[members] = (turns + due[members] / 2) / max(share, _NO_SHARE)
    return units[np.argsort(due)]


def _unit_numbers(drawn: Iterable[Any]) -> Iterator[int]:
    for unit in drawn:
        try:
            number = operator.index(unit)
        except TypeError:
            raise ConfigError(
                f"order: the sampler gave {reprlib.repr(unit)}; it must give unit numbers, one by one and "
                "not in batches"
            ) from None
        yield number


def check_drawn(drawn: Iterable[Any], num_units: int | None, partition: Partition | None = None) -> IntArray:
    """The units of this share that a sampler draws.

    Raises ConfigError if it draws none, numbers that are no units, or no end of them.
    """
    if num_units is None:
        raise ConfigError("order: an endless source has no units that a sampler could draw")
    most = max(_LEAST_BOUND, _MOST_REPEATS * num_units)
    units: IntArray = np.fromiter(islice(_unit_numbers(drawn), most + 1), np.int64)
    if len(units) > most:
        raise ConfigError(
            f"order: the sampler has given {most:,} units and goes on; it must end after one pass over the "
            "units"
        )
    if not len(units) or units.min() < 0 or units.max() >= num_units:
        raise ConfigError(
            f"order: the sampler must give unit numbers from 0 to {num_units - 1}, at least one"
        )
    if partition is not None:
        units = units[partition.places(units) >= 0]
        if not len(units):
            raise ConfigError(f"order: the sampler gave no unit of the share {partition}")
    return units
