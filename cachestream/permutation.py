"""A keyed pseudo-random permutation of range(n), computed on demand, in O(1) memory for any n.

A resume needs only a position in the permuted order, and any block of it is computed alone.

The algorithm is the generalised Feistel cipher with cycle walking of Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002): a value is split into two digits of bases a and b with a*b just above
n, the digits are altered in turns by adding a keyed hash of the other one, and the few results of n and more
are sent through again. Up to 1024 values the permutation is the argsort of keyed hashes instead, because
Feistel networks over tiny domains reach few of the n! permutations.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.random import SeedSequence
from numpy.random.bit_generator import ISpawnableSeedSequence

IntArray = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MULTIPLY_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2: Final = np.uint64(0x94D049BB133111EB)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 6
_BLOCK: Final = 16_384  # numbers at a time: the intermediate arrays stay in the processor's cache
_TABLE_UP_TO: Final = 1024
_MOST_DIGITS: Final = 4096  # of one base, whose hashes are looked up: 32 KiB a round


def mix_key(*parts: int) -> int:
    """A 64-bit key from integers such as (seed, epoch, purpose): other parts or another order, another key.

    Starting from 0, `state = f(state ^ f(part mod 2**64))` for each part, f being splitmix64 (Steele, Lea and
    Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): the same on every machine.
    """
    state = 0
    for part in parts:
        state = _splitmix(state ^ _splitmix(part & _MASK))
    return state


class _KeySeed(ISpawnableSeedSequence):
    """A seed of which Philox makes the key `key`; its children are those of `SeedSequence(key)`."""

    def __init__(self, key: int) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        return np.array([self._key, *[0] * (n_words - 1)], dtype)

    @cached_property
    def _sequence(self) -> SeedSequence:
        return SeedSequence(self._key)

    def spawn(self, n_children: int) -> list[Any]:
        return self._sequence.spawn(n_children)


def keyed_generator(key: int) -> np.random.Generator:
    """A generator for a 64-bit key: it draws the numbers of `np.random.Philox(key=key)`.

    That constructor also takes a seed from the system, which costs more than everything else, and releases
    the interpreter's lock.
    """
    seed: Any = _KeySeed(key)  # documented as an argument of Philox, but not in its annotations
    return np.random.Generator(np.random.Philox(seed))


class Permutation:
    """A bijection of range(n), chosen by `key` (any integer; see `mix_key`); immutable and thread-safe."""

    __slots__ = ("_a", "_b", "_digit_hashes", "_inverse_table", "_round_keys", "_table", "key", "n")

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n < 1 << 62:
            raise ValueError(f"a permutation needs 1 <= n < 2**62, not n={n}")
        self.n = n
        self.key = key
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        state = mix_key(key, n)
        self._round_keys = tuple(_splitmix(state + i) for i in range(_ROUNDS))
        self._digit_hashes: tuple[_U64, ...] = ()
        self._table: IntArray | None = None
        self._inverse_table: IntArray | None = None
        if n <= _TABLE_UP_TO:
            hashes = _hash(np.arange(n, dtype=np.uint64), self._round_keys[0])
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)
            self._inverse_table = np.argsort(self._table, kind="stable").astype(np.int64)

    def at(self, positions: npt.ArrayLike) -> IntArray:
        """The values at `positions` (int64 array of any shape, each in range(n)), int64 of the same shape."""
        return self._walk(positions, forward=True)

    def inverse(self, values: npt.ArrayLike) -> IntArray:
        """The positions at which `values` stand: `inverse(at(p)) == p`."""
        return self._walk(values, forward=False)

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, key={self.key})"

    def _walk(self, numbers: npt.ArrayLike, *, forward: bool) -> IntArray:
        given = np.ascontiguousarray(numbers, dtype=np.int64)
        flat = given.reshape(-1).view(np.uint64)  # a negative number becomes a huge one
        if flat.size and int(flat.max()) >= self.n:
            raise IndexError(f"a position outside range({self.n})")
        table = self._table if forward else self._inverse_table
        if table is not None:
            return table[given]
        result = np.empty(given.shape, np.int64)
        out = result.reshape(-1).view(np.uint64)
        for start in range(0, len(flat), _BLOCK):
            out[start : start + _BLOCK] = self._walk_block(flat[start : start + _BLOCK], forward)
        return result

    def _walk_block(self, numbers: _U64, forward: bool) -> _U64:
        result = self._cipher(numbers, forward)
        limit = np.uint64(self.n)
        outside = np.flatnonzero(result >= limit)
        while outside.size:
            walked = self._cipher(result[outside], forward)
            result[outside] = walked
            outside = outside[walked >= limit]
        return result

    def _cipher(self, numbers: _U64, forward: bool) -> _U64:
        left, right = self._digits(numbers)
        alter = _add if forward else _subtract
        for i in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
            if i % 2 == 0:
                left = alter(left, self._hashed(i, right), self._a)
            else:
                right = alter(right, self._hashed(i, left), self._b)
        left *= np.uint64(self._b)
        left += right
        return left

    def _hashed(self, i: int, digits: _U64) -> _U64:
        """The summands of round `i` for the other digits; for many digits, looked up in a table of hashes."""
        if not self._digit_hashes:
            if self._a > min(_MOST_DIGITS, len(digits)):
                return self._hash_of_round(i, digits)
            every = np.arange(self._a, dtype=np.uint64)  # a is the larger base
            self._digit_hashes = tuple(self._hash_of_round(number, every) for number in range(_ROUNDS))
        return np.take(self._digit_hashes[i], digits.view(np.int64), mode="clip")

    def _hash_of_round(self, i: int, digits: _U64) -> _U64:
        return _scaled_hash(digits, self._round_keys[i], self._b if i % 2 else self._a)

    def _digits(self, numbers: _U64) -> tuple[_U64, _U64]:
        base = np.uint64(self._b)
        left = numbers // base
        return left, numbers - left * base


def _splitmix(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * int(_MULTIPLY_1)) & _MASK
    z = ((z ^ (z >> 27)) * int(_MULTIPLY_2)) & _MASK
    return z ^ (z >> 31)


def _hash(numbers: _U64, key: int) -> _U64:
    """Keyed 64-bit hashes of `numbers`, element by element, good in their upper halves."""
    z = numbers + np.uint64(key)
    z *= _MULTIPLY_1
    z ^= z >> np.uint64(29)
    z *= _MULTIPLY_2
    return z


def _scaled_hash(numbers: _U64, key: int, base: int) -> _U64:
    """Keyed hashes of `numbers` below `base` (< 2**32): by multiplication, without division (Lemire 2019)."""
    z = _hash(numbers, key)
    z >>= _HALF
    z *= np.uint64(base)
    z >>= _HALF
    return z


def _add(digit: _U64, hashes: _U64, base: int) -> _U64:
    hashes += digit
    wrapped = hashes - np.uint64(base)  # a huge number where the sum is below base
    smaller: _U64 = np.minimum(hashes, wrapped, out=wrapped)
    return smaller


def _subtract(digit: _U64, hashes: _U64, base: int) -> _U64:
    difference = digit - hashes
    wrapped = difference + np.uint64(base)
    smaller: _U64 = np.minimum(difference, wrapped, out=wrapped)
    return smaller
