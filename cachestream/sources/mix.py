"""Several sources as one: their units alternate, so that any run of units has them in proportion."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.permutation import Permutation, mix_key
from cachestream.schema import IntArray
from cachestream.sources.base import ColumnarSource, Rows, Source, check_unit, listing_digest_of, units_of
from cachestream.sources.user_code import digest_of

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

    def takers(self, turns: IntArray) -> IntArray:
        """Return the taker of each turn: int64 `[n]`, as `turns`."""
        fits = self._sums[-1] * (int(turns.max(initial=0)) + 1) < 1 << 63
        return self._takers(turns if fits else turns.astype(object), 0, len(self))

    def _takers(self, turns: npt.NDArray[Any], low: int, high: int) -> IntArray:
        if high - low <= 1:
            return np.full(len(turns), low)
        middle = (low + high) // 2
        before = self._left(low, middle, high, turns)
        is_left = (self._left(low, middle, high, turns + 1) > before).astype(bool)
        found = np.empty(len(turns), np.int64)
        found[is_left] = self._takers(before[is_left], low, middle)
        found[~is_left] = self._takers((turns - before)[~is_left], middle, high)
        return found

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

    def _left(self, low: int, middle: int, high: int, turns: Any) -> Any:
        sums = self._sums
        return turns * (sums[middle] - sums[low]) // (sums[high] - sums[low])


class MixSource:
    """The source that `mix` returns."""

    def __init__(
        self, sources: Iterable[Source], weights: Iterable[float], names: Iterable[str] = ()
    ) -> None:
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        given = ",".join(names)  # the loader reads them in the fingerprint
        self.names = tuple(given.split(",") if given else map(str, range(len(self.sources))))
        whole = self.whole_weights = _whole_numbers(self.weights)
        self._turns = Interleaving(whole)
        lengths = [units_of(source) for source in self.sources]
        self.num_units: int | None = None
        if None not in lengths:
            self.num_units = max(
                self._turns.turns_for(i, length) for i, length in enumerate(lengths) if length is not None
            )
        parts = [f"{weight}*{source.fingerprint}" for weight, source in zip(whole, self.sources, strict=True)]
        self.fingerprint = f"mix:{given or len(parts)}:{digest_of(parts)}"
        self.listing_digest = digest_of(map(listing_digest_of, self.sources))

    def locate(self, unit: int) -> tuple[int, int, int]:
        """Return the index of the source of `unit`, the unit in it, and how often that came before."""
        check_unit(self, unit, self.num_units)
        index, place = self._turns.locate(unit)
        length = self.sources[index].num_units
        if length is None:
            return index, place, 0
        cycle, inner = divmod(place, length)
        if self.num_units is None:  # a worker does not shuffle an endless source
            inner = int(_permutation(length, mix_key(_CYCLE_KEY, index, cycle)).at([inner])[0])
        return index, inner, cycle

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the samples of the source's unit that `unit` stands for."""
        source, inner, prefix = self._unit_of(unit)
        for key, sample in source.read(inner, rng):
            yield f"{prefix}/{key}", sample

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield the samples of `read`, in columns if the source of `unit` has them in columns."""
        source, inner, prefix = self._unit_of(unit)
        if not isinstance(source, ColumnarSource):
            yield from self.read(unit, rng)
            return
        for item in source.read_rows(inner, rng):
            if isinstance(item, Rows):
                yield Rows([f"{prefix}/{key}" for key in item.keys], item.fields)
            else:
                yield f"{prefix}/{item[0]}", item[1]

    def _unit_of(self, unit: int) -> tuple[Source, int, str]:
        """Return the source of `unit`, the unit in it, and what its keys begin with."""
        index, inner, cycle = self.locate(unit)
        name = self.names[index]
        return self.sources[index], inner, f"{name}.{cycle}" if cycle else name

    def remote_of(self, unit: int) -> int:
        """Return the index of the source of `unit`: one remote may be down while the others answer."""
        return self.locate(unit)[0]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{weight:g} of {source!r}" for weight, source in zip(self.weights, self.sources, strict=True)
        )
        return f"<MixSource {parts}>"


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
