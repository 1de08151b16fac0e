"""The keyed permutation: exact for every n, the same everywhere, and well mixed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.permutation import Permutation, keyed_generator, mix_key

KEYS = st.integers(min_value=0, max_value=2**64 - 1)


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_every_small_n_is_permuted_exactly_and_inverted(key: int) -> None:
    sizes = [*range(1, 200), *range(1000, 1100), 2**12 - 1, 2**12, 2**12 + 1, 99_991]
    for n in sizes:
        permutation = Permutation(n, key)
        values = permutation.at(np.arange(n))
        assert np.array_equal(np.sort(values), np.arange(n)), n
        assert np.array_equal(permutation.inverse(values), np.arange(n)), n


@pytest.mark.e2e
@given(n=st.integers(1, 2**62 - 1), key=KEYS, data=st.data())
def test_any_position_of_any_n_is_found_again_by_the_inverse(n: int, key: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    permutation = Permutation(n, key)
    values = permutation.at(positions)
    assert values.dtype == np.int64
    assert ((values >= 0) & (values < n)).all()
    assert np.array_equal(permutation.inverse(values), positions)


@given(n=st.integers(1, 5000), key=KEYS, start=st.integers(0, 5000), size=st.integers(0, 500))
def test_a_block_computed_alone_equals_its_place_in_the_whole(
    n: int, key: int, start: int, size: int
) -> None:
    start, stop = min(start, n), min(start + size, n)
    whole = Permutation(n, key).at(np.arange(n))
    assert np.array_equal(Permutation(n, key).at(np.arange(start, stop)), whole[start:stop])


def test_the_order_is_pinned_so_that_old_checkpoints_resume() -> None:
    assert mix_key(0, 0) == 0xA7F72697A2731486
    assert Permutation(10, 7).at(np.arange(10)).tolist() == [7, 2, 0, 3, 1, 9, 8, 6, 5, 4]
    whole = np.arange(60_000)
    assert Permutation(60_000, 7).at([0, 1, 2, 59_999]).tolist() == [36687, 21277, 59108, 9335]
    assert int((Permutation(60_000, 7).at(whole) * whole).sum()) == 53_955_717_865_497
    assert Permutation(10**9, 7).at([0, 1, 2, 10**9 - 1]).tolist() == [
        465366731,
        869999481,
        224397433,
        114621256,
    ]


def test_keys_differ_when_a_part_or_the_order_of_parts_differs() -> None:
    keys = {
        mix_key(*parts) for parts in [(0,), (0, 0), (0, 1), (1, 0), (1, 1), (-1,), (5,), (0, 0, 0), (2**63,)]
    }
    assert len(keys) == 9


@pytest.mark.e2e
@pytest.mark.parametrize("n", [6, 50, 1024, 1025, 5000, 10**6])
def test_values_are_spread_evenly_over_positions_and_independent_of_neighbours(n: int) -> None:
    """Chi-square over 64 cells (position block × value block), and the correlation of neighbours."""
    side = min(8, n)
    table = np.zeros((side, side))
    neighbours = []
    num_keys = 200
    for key in range(num_keys):
        permutation = Permutation(n, mix_key(1, key))
        positions = np.arange(n) if n <= 5000 else np.linspace(0, n - 2, 2000).astype(np.int64)
        values = permutation.at(positions)
        np.add.at(table, (positions * side // n, values * side // n), 1)
        after = permutation.at(np.minimum(positions + 1, n - 1))
        neighbours.append(np.corrcoef(values[:-1], after[:-1])[0, 1])
    rows, columns = table.sum(1, keepdims=True), table.sum(0, keepdims=True)
    expected = rows * columns / table.sum()
    chi_square = float(((table - expected) ** 2 / expected).sum())
    assert chi_square < 49 + 6 * (2 * 49) ** 0.5
    if n >= 50:
        assert abs(float(np.mean(neighbours))) < 0.05


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_a_size_that_cannot_be_permuted_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="1 <= n"):
        Permutation(n, 0)


def test_a_position_outside_the_range_is_refused() -> None:
    for wrong in ([10], [-1]):
        with pytest.raises(IndexError, match=r"range\(10\)"):
            Permutation(10, 0).at(wrong)


@given(st.integers(0, 2**64 - 1))
def test_a_keyed_generator_draws_what_numpy_draws_with_the_key(key: int) -> None:
    found, expected = keyed_generator(key), np.random.Generator(np.random.Philox(key=key))
    assert found.integers(0, 2**63, 20).tolist() == expected.integers(0, 2**63, 20).tolist()
    copied = pickle.loads(pickle.dumps(found))
    assert copied.random() == found.random() == expected.random()
    children = [[one.integers(2**63) for one in keyed_generator(key).spawn(2)] for _ in range(2)]
    assert children[0] == children[1]
    assert children[0][0] != children[0][1]
