"""Several sources as one: in exact proportion, every unit once at least, nothing under another's name."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.sources.base import Rows, one_by_one
from cachestream.sources.mix import Interleaving, MixSource


def numbers(count: int, offset: int = 0) -> cs.DatasetSource:
    return cs.DatasetSource([{"x": offset + i} for i in range(count)])


def keys_of(source: cs.Source, units: range) -> list[str]:
    return [key for unit in units for key, _ in source.read(unit, np.random.default_rng(unit))]


WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=9)


@given(WEIGHTS, st.integers(0, 10**9))
def test_among_the_first_turns_each_taker_has_its_share_but_for_a_few(weights: list[int], turns: int) -> None:
    made = Interleaving(weights)
    counts = [made.count(taker, turns) for taker in range(len(weights))]
    assert sum(counts) == turns
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - turns * weight / sum(weights)) < math.log2(len(weights)) + 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_whole_rounds_are_exact_and_every_turn_is_told_apart(weights: list[int]) -> None:
    made = Interleaving(weights)
    turns = 3 * sum(weights)
    found = [made.locate(turn) for turn in range(turns)]
    assert len(set(found)) == turns
    for taker, weight in enumerate(weights):
        assert [place for other, place in found if other == taker] == list(range(3 * weight))


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=9), st.lists(st.integers(0, 10**12)))
def test_the_takers_of_many_turns_are_those_of_each(weights: list[int], turns: list[int]) -> None:
    made = Interleaving(weights)
    assert made.takers(np.array(turns, np.int64)).tolist() == [made.locate(turn)[0] for turn in turns]


@given(WEIGHTS, st.integers(0, 10**12), st.data())
def test_whose_turn_it_is_agrees_with_how_many_they_had(
    weights: list[int], turn: int, data: st.DataObject
) -> None:
    made = Interleaving(weights)
    taker, place = made.locate(turn)
    assert made.count(taker, turn) == place
    assert made.count(taker, turn + 1) == place + 1
    other = data.draw(st.integers(0, len(weights) - 1))
    turns = made.turns_for(other, place + 1)
    assert made.count(other, turns) == place + 1
    assert made.locate(turns - 1) == (other, place)


@pytest.mark.parametrize(
    ("weights", "first_ten"), [((0.7, 0.3), [7, 3]), ((70, 30), [7, 3]), ((0.1, 0.2, 0.2), [2, 4, 4])]
)
def test_weights_of_any_scale_make_the_same_exact_rounds(
    weights: tuple[float, ...], first_ten: list[int]
) -> None:
    mixed = cs.mix([(numbers(1000), weight) for weight in weights])
    for start in range(0, 100, 10):
        drawn = Counter(mixed.locate(unit)[0] for unit in range(start, start + 10))
        assert [drawn[i] for i in range(len(weights))] == first_ten


def test_weights_far_apart_are_both_served() -> None:
    mixed = cs.mix([(numbers(1), 1e-9), (numbers(5), 1.0)])
    assert mixed.num_units is not None
    assert mixed.num_units >= 10**9
    assert mixed.locate(mixed.num_units - 1)[0] in (0, 1)


def test_tables_in_a_mix_are_read_in_columns_and_give_the_same_samples(tmp_path: Path) -> None:
    table = pa.table({"x": range(7), "name": list("abcdefg")})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    mixed = cs.mix({"table": (cs.ParquetSource(tmp_path), 1), "list": ([{"x": 7, "name": "h"}] * 2, 1)})
    found = {unit: list(mixed.read_rows(unit, np.random.default_rng(0))) for unit in range(4)}
    in_columns = {unit for unit, items in found.items() if any(isinstance(item, Rows) for item in items)}
    assert in_columns == {unit for unit in found if mixed.locate(unit)[0] == 0}
    samples = {unit: list(mixed.read(unit, np.random.default_rng(0))) for unit in found}
    assert {unit: list(one_by_one(items)) for unit, items in found.items()} == samples
    names = {key.split("/")[0] for items in samples.values() for key, _ in items}
    assert names == {"table", "list"}


def test_a_copy_by_pickle_is_small_and_the_same() -> None:
    mixed = MixSource([numbers(5)], [1.0])
    copy = pickle.loads(pickle.dumps(mixed))
    assert keys_of(copy, range(5)) == keys_of(mixed, range(5))
