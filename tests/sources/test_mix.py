"""Several sources as one: in exact proportion, every unit once at least, nothing under another's name."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.errors import ConfigError
from cachestream.sources.base import Rows, one_by_one
from cachestream.sources.mix import Interleaving, MixSource
from cachestream.testing.checks import check_source
from tests.worker.support import DEADLINE_S


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


def test_a_pass_holds_every_unit_of_every_source_and_the_shorter_ones_again() -> None:
    mixed = cs.mix([(numbers(30), 3), (numbers(4), 1)])
    assert mixed.num_units == 40
    keys = keys_of(mixed, range(40))
    assert len(set(keys)) == 40
    counts = Counter(key.partition("/")[0] for key in keys)
    assert counts == {"0": 30, "1": 4, "1.1": 4, "1.2": 2}
    assert {key for key in keys if key.startswith("0/")} == {f"0/{i}" for i in range(30)}


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


def test_an_endless_source_makes_the_mix_endless_and_repeats_the_others_in_new_orders() -> None:
    mixed = cs.mix([(numbers(20), 1), (lambda rng: {"x": int(rng.integers(100))}, 1)])
    assert mixed.num_units is None
    found = [mixed.locate(unit) for unit in range(80)]
    cycles = [[inner for index, inner, cycle in found if index == 0 and cycle == c] for c in range(2)]
    assert [sorted(cycle) for cycle in cycles] == [list(range(20))] * 2
    assert cycles[0] != cycles[1]
    assert [inner for index, inner, _ in found if index == 1] == list(range(40))
    assert len(set(keys_of(mixed, range(80)))) == 80


def test_paths_and_functions_are_opened_and_sources_may_be_keys(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros(3))
    mixed = cs.mix({str(tmp_path): 1, cs.CallableSource(lambda _: {"array": np.ones(3)}, 5): 2})
    assert [type(source).__name__ for source in mixed.sources] == ["FileSource", "CallableSource"]
    assert "1 of <FileSource" in repr(mixed)
    assert cs.open_source(mixed) is mixed
    assert cs.mix({mixed: 1}).num_units == mixed.num_units


def test_names_are_in_the_keys_and_in_the_fingerprint_and_change_nothing_else() -> None:
    named = cs.mix({"web": (numbers(30), 3), "code-2": (numbers(4), 1)})
    plain = cs.mix([(numbers(30), 3), (numbers(4), 1)])
    renamed = [
        key.replace("0", "web", 1) if key[0] == "0" else key.replace("1", "code-2", 1)
        for key in keys_of(plain, range(40))
    ]
    assert keys_of(named, range(40)) == renamed
    assert named.names == ("web", "code-2")
    assert plain.names == ("0", "1")
    assert named.fingerprint == plain.fingerprint.replace("mix:2:", "mix:web,code-2:")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        *[
            ({name: ([{"x": 1}], 1)}, "names are a letter and")
            for name in ("a/b", "a.1", "0", "", "é", "a,b", "x" * 33, 5)
        ],
        ({"a": ([{"x": 1}], 1), "b": 2}, "pairs"),
        ({"a": ([{"x": 1}], 0)}, "weight 0 must be"),
        ({}, "at least one"),
        (5, "pairs"),
        (None, "pairs"),
        ([1, 2], "pairs"),
        ([("a", 1, 2)], "pairs"),
        ([([{"x": 1}], 0)], "weight 0 must be"),
        ([([{"x": 1}], -1.0)], "above 0"),
        ([([{"x": 1}], float("nan"))], "above 0"),
        ([([{"x": 1}], float("inf"))], "above 0"),
        ([([{"x": 1}], "1")], "above 0"),
        ([([{"x": 1}], True)], "above 0"),
        ([(None, 1)], "cannot read NoneType"),
    ],
)
def test_what_makes_no_mix_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cs.mix(bad)


def test_the_fingerprint_tells_sources_and_proportions_apart_but_not_scales() -> None:
    def of(*pairs: tuple[int, float]) -> str:
        return cs.mix([(numbers(count), weight) for count, weight in pairs]).fingerprint

    assert of((3, 1), (4, 2)) == of((3, 0.5), (4, 1))
    assert len({of((3, 1), (4, 2)), of((3, 2), (4, 1)), of((3, 1), (5, 2)), of((4, 2), (3, 1))}) == 4


@pytest.mark.e2e
@pytest.mark.parametrize("endless", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mix_keeps_the_protocol(endless: bool) -> None:
    def made() -> cs.Source:
        second: Any = (lambda rng: {"x": int(rng.integers(9))}) if endless else numbers(2, 50)
        return cs.mix([(numbers(5), 2), (second, 1)])

    check_source(made)


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


def test_a_worker_caches_a_mix_in_its_proportion(tmp_path: Path) -> None:
    source = cs.mix([(numbers(90), 3), (numbers(10, 1000), 1)])
    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=2) as worker:
            assert worker.wait(DEADLINE_S)
        assert cache.num_samples == source.num_units == 120
        with cache.snapshot() as dataset:
            values = [int(dataset[i]["x"]) for i in range(len(dataset))]
    assert sum(value >= 1000 for value in values) == 30
    assert set(values) == {*range(90), *range(1000, 1010)}
