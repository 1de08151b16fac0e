"""Orders: every unit comes once a pass, weights hold, and units lead back to their positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import ConfigError
from cachestream.worker.order import Partition, PassPlan, UnitOrder
from cachestream.worker.user_order import check_drawn, check_weights


def plan(kind: str, num_units: int | None, *, seed: int = 0, ordinal: int = 0) -> PassPlan:
    return PassPlan(kind, seed, ordinal, num_units, "listing", num_units)


def all_units(order: UnitOrder, length: int) -> list[int]:
    return [int(unit) for unit in order.units(np.arange(length))]


@pytest.mark.parametrize("num_units", [1, 2, 3, 7, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_a_pass_holds_every_unit_exactly_once(kind: str, num_units: int) -> None:
    units = all_units(UnitOrder(plan(kind, num_units)), num_units)
    assert sorted(units) == list(range(num_units))


@given(st.integers(1, 10**12), st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000), st.data())
def test_positions_is_the_inverse_of_units_anywhere_in_a_pass_of_any_length(
    num_units: int, seed: int, ordinal: int, data: st.DataObject
) -> None:
    order = UnitOrder(plan("shuffle", num_units, seed=seed, ordinal=ordinal))
    start = data.draw(st.integers(0, num_units - 1))
    positions = np.arange(start, min(num_units, start + 50))
    units = order.units(positions)
    assert units.min() >= 0
    assert units.max() < num_units
    assert order.positions(units).tolist() == positions.tolist()


def test_the_sequential_order_is_the_order_of_the_units() -> None:
    order = UnitOrder(plan("sequential", 10))
    assert all_units(order, 10) == list(range(10))
    assert order.positions(np.arange(10)).tolist() == list(range(10))


def test_an_endless_source_is_read_from_unit_0_on() -> None:
    assert all_units(UnitOrder(plan("shuffle", None)), 5) == [0, 1, 2, 3, 4]


def test_each_pass_and_each_seed_has_a_permutation_of_its_own() -> None:
    orders = {
        tuple(all_units(UnitOrder(plan("shuffle", 100, seed=seed, ordinal=ordinal)), 100))
        for seed in range(3)
        for ordinal in range(3)
    }
    assert len(orders) == 9


def test_the_same_plan_gives_the_same_order_in_every_process() -> None:
    first = all_units(UnitOrder(plan("shuffle", 2000, seed=7, ordinal=3)), 2000)
    again = all_units(UnitOrder(PassPlan.from_json(plan("shuffle", 2000, seed=7, ordinal=3).to_json())), 2000)
    assert first == again


@pytest.mark.e2e
@given(
    st.sampled_from(["shuffle", "sequential", "weighted", "sampler"]),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
    st.one_of(st.none(), st.integers(1, 2**40)),
    st.text(),
)
def test_a_plan_survives_the_catalogue(
    kind: str, seed: int, ordinal: int, num_units: int | None, listing: str
) -> None:
    made = PassPlan(kind, seed, ordinal, num_units, listing, num_units)
    assert PassPlan.from_json(made.to_json()) == made


def test_units_are_drawn_as_often_as_their_weights_say() -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 5.0]
    draws = 40_000
    made = PassPlan("weighted", 0, 0, 5, "", draws)
    counts = np.bincount(UnitOrder(made, weights).units(np.arange(draws)), minlength=5)
    expected = np.array(weights) / sum(weights) * draws
    assert counts[0] == counts[3] == 0
    # Five standard deviations of a binomial count.
    assert np.abs(counts - expected).max() < 5 * np.sqrt(draws / 4)


def test_a_weighted_position_draws_the_same_unit_whoever_asks_for_it() -> None:
    made = PassPlan("weighted", 3, 1, 3, "", 1000)
    order = UnitOrder(made, [1, 2, 3])
    whole = order.units(np.arange(1000))
    assert np.array_equal(order.units(np.arange(990, 1000)), whole[990:])


def test_the_last_weight_is_reached_and_never_passed() -> None:
    made = PassPlan("weighted", 0, 0, 2, "", 10_000)
    units = UnitOrder(made, [1e-300, 1e-300]).units(np.arange(10_000))
    assert set(units.tolist()) == {0, 1}


def test_a_sampler_gives_its_units_in_its_order_with_repeats() -> None:
    order = UnitOrder(PassPlan("sampler", 0, 0, 5, "", 4), listed=[3, 3, 0, 4])
    assert all_units(order, 4) == [3, 3, 0, 4]


@pytest.mark.parametrize(
    ("weights", "num_units"),
    [
        ([1.0, 2.0], 3),
        ([1.0], None),
        ([1.0, -0.1], 2),
        ([0.0, 0.0], 2),
        ([1.0, float("nan")], 2),
        ([1.0, float("inf")], 2),
        ([1e308, 1e308], 2),
        (["a", "b"], 2),
        ([None, 1.0], 2),
        ([10**400, 1.0], 2),
        (list(np.ones((2, 5))), 2),
        (np.array(1.0), 2),
    ],
)
def test_weights_that_make_no_order_are_refused(weights: Any, num_units: int | None) -> None:
    with pytest.raises(ConfigError, match="order"):
        check_weights(weights, num_units)


@pytest.mark.parametrize(
    ("drawn", "num_units"),
    [([], 3), ([3], 3), ([-1], 3), ([0], None), ([0, 1, 99], 99), ([[0, 1]], 3), (["a"], 3), ([0.5], 3)],
)
def test_units_that_are_not_there_are_refused(drawn: list[Any], num_units: int | None) -> None:
    with pytest.raises(ConfigError, match="sampler"):
        check_drawn(drawn, num_units)


@pytest.mark.parametrize("check", [check_weights, check_drawn])
def test_an_endless_source_is_refused_by_its_name(check: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="order: an endless source has no units"):
        check([1.0], None)


@pytest.mark.e2e
def test_a_sampler_without_end_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has given 1,048,576 units and goes on; it must end after one pass"
    ):
        check_drawn(itertools.cycle(range(3)), 3)


ENDS = (7, 8, 300, 1301)


def grown(kind: str, ends: tuple[int, ...], partition: Partition | None) -> list[PassPlan]:
    """A pass as it grows to `ends`."""
    plan = PassPlan(kind, 3, 2, 0, "", 0, partition, growing=True)
    plans = []
    for end in ends:
        plan = plan.grown(end, f"digest of {end}", is_complete=end == ends[-1])
        plans.append(plan)
    return plans


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
@pytest.mark.parametrize("partition", [None, Partition(0, 3), Partition(2, 3)], ids=str)
def test_a_pass_that_grows_holds_every_unit_once_and_changes_no_position_that_there_was(
    kind: str, partition: Partition | None
) -> None:
    before = np.array([], np.int64)
    for plan in grown(kind, ENDS, partition):
        order = UnitOrder(plan)
        units = order.units(np.arange(plan.length or 0))
        every = np.arange(plan.num_units or 0)
        mine = every if partition is None else every[partition.places(every) >= 0]
        assert sorted(units.tolist()) == mine.tolist()
        assert units[: len(before)].tolist() == before.tolist()
        assert order.positions(units).tolist() == list(range(len(units)))
        before = units


def test_each_segment_is_shuffled_and_units_that_are_not_listed_yet_have_no_position() -> None:
    short, long = (UnitOrder(plan) for plan in grown("shuffle", (500, 1000), None))
    units = long.units(np.arange(1000))
    assert units[:500].max() == 499
    assert units[:500].tolist() != list(range(500))
    assert units[500:].tolist() != list(range(500, 1000))
    assert (units[500:] - 500).tolist() != units[:500].tolist()
    assert short.positions(np.array([500, 999])).tolist() == [-1, -1]


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
@pytest.mark.parametrize("partition", [None, Partition(1, 3)], ids=str)
def test_units_that_a_pass_knows_nothing_of_have_no_position_in_it(
    kind: str, partition: Partition | None
) -> None:
    plan = PassPlan(kind, 3, 0, 90, "", None, partition)
    positions = UnitOrder(plan).positions(np.arange(-1, 120))
    assert positions[0] == -1
    assert (positions[91:] == -1).all()
    assert sorted(positions[positions >= 0].tolist()) == list(range(plan.share or 0))


def test_the_nodes_shares_of_a_growing_pass_are_disjoint_and_complete() -> None:
    found: list[int] = []
    for node in range(3):
        plan = grown("shuffle", ENDS, Partition(node, 3))[-1]
        found += UnitOrder(plan).units(np.arange(plan.length or 0)).tolist()
    assert sorted(found) == list(range(ENDS[-1]))


def test_plans_are_read_back_from_what_they_are_written_as_and_those_of_old_from_what_they_were() -> None:
    for plan in [*grown("shuffle", ENDS, None), *grown("sequential", ENDS, Partition(1, 3))]:
        assert PassPlan.from_json(plan.to_json()) == plan
    old = '["shuffle",0,1,90,"abc",90]'
    assert PassPlan.from_json(old) == PassPlan("shuffle", 0, 1, 90, "abc", 90)
    assert PassPlan.from_json(old).to_json() == old
    shared = '["curriculum",0,1,90,"",45,[1,2],"rule"]'
    assert PassPlan.from_json(shared).to_json() == shared


def test_a_pass_takes_up_what_is_an_eighth_more_or_the_end() -> None:
    plan = grown("shuffle", (800, 900), None)[0]
    assert not plan.should_grow(900, is_complete=False)
    assert plan.should_grow(901, is_complete=False)
    assert plan.should_grow(800, is_complete=True)
    ended = plan.grown(800, plan.listing, is_complete=True)
    assert (ended.segments, ended.length, ended.growing) == ((800,), 800, False)
    assert not ended.should_grow(2000, is_complete=True)


@pytest.mark.parametrize("kind", ["shuffle", "sequential", "curriculum"])
@pytest.mark.parametrize("partition", [None, Partition(1, 3)], ids=str)
def test_units_that_are_read_again_come_first_and_are_known_at_their_first_place(
    kind: str, partition: Partition | None
) -> None:
    made = PassPlan(kind, 3, 1, 90, "", None, partition, again=4).with_length()
    share = np.arange(90) if partition is None else partition.units(np.arange(partition.length(90)))
    again = share[[7, 2, 9, 0]]
    order = UnitOrder(made, listed=np.concatenate([again, share]) if made.is_drawn else again)
    positions = np.arange(made.length or 0)
    units = order.units(positions)
    assert units[:4].tolist() == again.tolist()
    assert sorted(units[4:].tolist()) == share.tolist()
    comes_again = order.come_again(positions, units)
    assert sorted(units[comes_again].tolist()) == sorted(again.tolist())
    assert not comes_again[:4].any()
    assert order.positions(units[~comes_again]).tolist() == positions[~comes_again].tolist()
    assert order.positions(units[comes_again]).max() < 4
    assert PassPlan.from_json(made.to_json()) == made
