"""Several sources as one: their units alternate, so that any run of units has them in proportion."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

import numpy as np
import xxhash

from cachestream.errors import ConfigError
from cachestream.listing.file_list import check_unit
from cachestream.permutation import Permutation, mix_key
from cachestream.sources.base import Source, is_source
from cachestream.sources.open import open_source

_CYCLE_KEY: Final = 5
_MAX_DENOMINATOR: Final = 1_000_000  # weights are rounded to fractions with denominators up to this


class Interleaving:
    """A fixed endless sequence of turns of `len(weights)` takers, in proportion to the whole weights.

    The turns are divided recursively between the first and the second half of the takers, by rounding down
    the exact share. Among the first T turns, for any T, each taker has its share with an error below
    log2(takers) + 1, and exactly its share if that is whole at every division. O(1) memory.
    """

    def __init__(self, weights: Iterable[int]) -> None:
        sums = [0]
        for weight in weights:
            sums.append(sums[-1] + weight)
        self._sums = tuple(sums)

    def __len__(self) -> int:
        return len(self._sums) - 1

    def locate(self, turn: int) -> tuple[int, int]:
        """Return the taker of turn number `turn`, and the number of its turns before."""
        low, high = 0, len(self)
        while high - low > 1:
            middle = (low + high) // 2
            before = self._left(low, middle, high, turn)
            if self._left(low, middle, high, turn + 1) > before:
                high, turn = middle, before
            else:
                low, turn = middle, turn - before
        return low, turn

    def count(self, taker: int, turns: int) -> int:
        """Return the number of turns of `taker` among the first `turns`."""
        low, high = 0, len(self)
        while high - low > 1:
            middle = (low + high) // 2
            left = self._left(low, middle, high, turns)
            if taker < middle:
                high, turns = middle, left
            else:
                low, turns = middle, turns - left
        return turns

    def turns_for(self, taker: int, count: int) -> int:
        """Return the smallest number of first turns of which `count` are those of `taker`."""
        low, high = 0, 1
        while self.count(taker, high) < count:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.count(taker, middle) < count:
                low = middle
            else:
                high = middle
        return high

    def _left(self, low: int, middle: int, high: int, turns: int) -> int:
        sums = self._sums
        return turns * (sums[middle] - sums[low]) // (sums[high] - sums[low])


class MixSource:
    """The source that `mix` returns."""

    def __init__(self, sources: Iterable[Source], weights: Iterable[float]) -> None:
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        whole = _whole_numbers(self.weights)
        self._turns = Interleaving(whole)
        lengths = [source.num_units for source in self.sources]
        self._num_units = None
        if None not in lengths:
            self._num_units = max(
                self._turns.turns_for(i, length) for i, length in enumerate(lengths) if length is not None
            )
        parts = [f"{weight}*{source.fingerprint}" for weight, source in zip(whole, self.sources, strict=True)]
        self.fingerprint = f"mix:{len(parts)}:{_digest(parts)}"
        self.listing_digest = _digest(str(getattr(source, "listing_digest", "")) for source in self.sources)

    @property
    def num_units(self) -> int | None:
        return self._num_units

    def locate(self, unit: int) -> tuple[int, int, int]:
        """Return the index of the source of `unit`, the unit in it, and how often that came before."""
        check_unit(self, unit, self._num_units)
        index, place = self._turns.locate(unit)
        length = self.sources[index].num_units
        if length is None:
            return index, place, 0
        cycle, inner = divmod(place, length)
        if self._num_units is None:  # a worker does not shuffle an endless source
            inner = int(_permutation(length, mix_key(_CYCLE_KEY, index, cycle)).at([inner])[0])
        return index, inner, cycle

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the samples of the source's unit that `unit` stands for."""
        index, inner, cycle = self.locate(unit)
        prefix = f"{index}.{cycle}" if cycle else f"{index}"
        for key, sample in self.sources[index].read(inner, rng):
            yield f"{prefix}/{key}", sample

    def remote_of(self, unit: int) -> int:
        """Return the index of the source of `unit`: one remote may be down while the others answer."""
        return self.locate(unit)[0]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{weight:g} of {source!r}" for weight, source in zip(self.weights, self.sources, strict=True)
        )
        return f"<MixSource {parts}>"


def mix(sources: Mapping[Any, float] | Iterable[tuple[Any, float]], **options: Any) -> MixSource:
    """Mix several sources, given as `{source: weight}` or as pairs, in proportion to their weights.

    A source is a Source, or anything that `open_source` takes, which is opened with `options`. The proportion
    is that of units: a tar counts as one unit, as does a file. Units take turns, so that any number of first
    units has the sources in proportion but for a few units. In the shuffled order the proportion holds for a
    whole pass.

    A pass is so long that every unit of every source comes at least once; units of shorter sources come
    again. If one source is endless so is the mix, and the others are repeated, each time in another order.
    Keys begin with the number of the source, "0/", and from the second time on also with the number of times
    that the unit came before: "0.1/". All sources must have the same fields.

    Raises ConfigError for weights that are not above 0, and the errors of `open_source`.
    """
    pairs: list[Any] = []
    if isinstance(sources, Iterable):
        pairs = list(sources.items()) if isinstance(sources, Mapping) else list(sources)
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigError("mix() takes {source: weight}, or a list of pairs (source, weight), at least one")
    for _, weight in pairs:
        number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
        if not number or not 0 < weight < math.inf:
            raise ConfigError(
                f"mix(): the weight {weight!r} must be a number above 0; leave out what has none"
            )
    opened = [what if is_source(what) else open_source(what, **options) for what, _ in pairs]
    return MixSource(opened, [float(weight) for _, weight in pairs])


def _whole_numbers(weights: Iterable[float]) -> list[int]:
    """Return the smallest whole numbers in the proportion of `weights`."""
    given = [Fraction(weight) for weight in weights]
    shares = [weight / sum(given) for weight in given]
    simple = [share.limit_denominator(_MAX_DENOMINATOR) or share for share in shares]
    denominator = math.lcm(*(share.denominator for share in simple))
    numbers = [int(share * denominator) for share in simple]
    common = math.gcd(*numbers)
    return [number // common for number in numbers]


@functools.lru_cache(maxsize=64)
def _permutation(n: int, key: int) -> Permutation:
    return Permutation(n, key)


def _digest(parts: Iterable[str]) -> str:
    state = xxhash.xxh3_64()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(encoded)}:".encode() + encoded)
    return str(state.hexdigest())
