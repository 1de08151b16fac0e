"""The shares of nodes, and the orders of a curriculum: disjoint, complete, and shaped as they were asked to be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import ConfigError
from cachestream.worker.order import (
    Partition,
    PassPlan,
    UnitOrder,
    all_units,
    parse_partition,
)
from cachestream.worker.user_order import check_curriculum, check_drawn, check_weights, draw_curriculum


def plan(
    kind: str, num_units: int | None, partition: Partition | None, *, seed: int = 0, ordinal: int = 0
) -> PassPlan:
    length = num_units if partition is None or num_units is None else partition.length(num_units)
    return PassPlan(kind, seed, ordinal, num_units, "listing", length, partition)


def pass_of(kind: str, num_units: int, partition: Partition, *, seed: int, ordinal: int) -> list[int]:
    made = plan(kind, num_units, partition, seed=seed, ordinal=ordinal)
    return [int(unit) for unit in UnitOrder(made).units(np.arange(made.length or 0))]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_the_passes_of_all_nodes_together_hold_every_unit_once_whatever_their_seeds_and_passes(
    kind: str,
) -> None:
    for num_units in range(1, 40):
        for nodes in range(1, 8):
            together: Counter[int] = Counter()
            for node in range(nodes):
                share = Partition(node, nodes)
                units = pass_of(kind, num_units, share, seed=node, ordinal=3 * node)
                assert len(units) == share.length(num_units)
                together.update(units)
            assert together == Counter(range(num_units))


@given(st.integers(1, 10**12), st.integers(1, 1000), st.data())
def test_units_and_places_of_a_share_are_inverse_anywhere(
    num_units: int, nodes: int, data: st.DataObject
) -> None:
    share = Partition(data.draw(st.integers(0, nodes - 1)), nodes)
    length = share.length(num_units)
    assert num_units // nodes <= length <= num_units // nodes + 1
    first = data.draw(st.integers(0, max(0, length - 1)))
    places = np.arange(first, min(length, first + 50))
    units = share.units(places)
    assert share.places(units).tolist() == places.tolist()
    assert len(units) == 0 or (units.min() >= 0 and units.max() < num_units)
    assert (np.diff(units) > 0).all()


@given(st.integers(1, 10**9), st.integers(1, 16), st.integers(0, 2**62), st.data())
def test_positions_are_those_of_the_share_and_minus_one_for_units_of_other_nodes(
    num_units: int, nodes: int, seed: int, data: st.DataObject
) -> None:
    share = Partition(data.draw(st.integers(0, nodes - 1)), nodes)
    first = data.draw(st.integers(0, num_units - 1))
    units = np.arange(first, min(num_units, first + 64))
    order = UnitOrder(plan("shuffle", num_units, share, seed=seed)) if share.length(num_units) else None
    if order is None:
        assert (share.places(units) < 0).all()
        return
    positions = order.positions(units)
    mine = positions >= 0
    assert mine.tolist() == (share.places(units) >= 0).tolist()
    assert order.units(positions[mine]).tolist() == units[mine].tolist()


@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_no_node_gets_one_phase_of_what_lies_periodically(period: int) -> None:
    for node in range(period):
        units = all_units(8000, Partition(node, period))
        counts = np.bincount(units % period, minlength=period)
        assert counts.min() > 0.8 * len(units) / period


def test_an_endless_source_is_shared_without_an_end() -> None:
    shares = [
        UnitOrder(plan("shuffle", None, Partition(node, 3))).units(np.arange(1000)).tolist()
        for node in range(3)
    ]
    assert sorted(unit for share in shares for unit in share) == list(range(3000))


def test_weights_are_those_of_the_share_alone() -> None:
    share = Partition(1, 3)
    weights = np.arange(30) % 2 + 0.0
    order = UnitOrder(PassPlan("weighted", 0, 0, 30, "", 5000, share), list(weights))
    units = order.units(np.arange(5000))
    assert set(units.tolist()) == {unit for unit in all_units(30, share).tolist() if unit % 2}
    mine = all_units(30, share)
    nothing = [0.0 if unit in set(mine.tolist()) else 1.0 for unit in range(30)]
    with pytest.raises(ConfigError, match="share 1/3 are 0"):
        check_weights(nothing, 30, share)


def test_what_a_sampler_gives_is_shared_among_the_nodes_with_its_repeats() -> None:
    drawn = [5, 3, 3, 9, 0, 1, 2]
    shares = [check_drawn(drawn, 10, Partition(node, 2)).tolist() for node in range(2)]
    assert Counter(shares[0] + shares[1]) == Counter(drawn)
    others = Partition(int(Partition(0, 2).places(np.array([5]))[0] >= 0), 2)
    with pytest.raises(ConfigError, match="no unit of the share"):
        check_drawn([5, 5], 10, others)


@pytest.mark.parametrize(
    "bad", [(4, 4), (-1, 4), (0, 0), (1,), (1, 2, 3), "1", "1/1", "a/b", 3, (0.0, 2), (True, 2), {"i": 0}]
)
def test_a_partition_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="partition="):
        parse_partition(bad)


def test_a_partition_is_a_pair_or_a_text_of_the_command_line() -> None:
    assert parse_partition("3/8") == parse_partition((3, 8)) == parse_partition([3, 8]) == Partition(3, 8)
    assert parse_partition((np.int64(3), 8)) == Partition(3, 8)
    assert parse_partition(None) is None


@given(st.text(), st.integers(1, 100), st.data())
def test_a_plan_with_a_share_survives_the_catalogue(rule: str, nodes: int, data: st.DataObject) -> None:
    share = data.draw(st.none() | st.integers(0, nodes - 1).map(lambda node: Partition(node, nodes)))
    made = PassPlan("curriculum", 1, 2, 50, "listing", 7, share, rule)
    assert PassPlan.from_json(made.to_json()) == made


# --- curricula


@pytest.mark.parametrize("num_units", [1, 2, 99, 100, 101, 1000])
def test_a_curriculum_holds_every_unit_of_the_share_once(num_units: int) -> None:
    for share in (None, Partition(0, 3)):
        units = all_units(num_units, share)
        if len(units):
            drawn = draw_curriculum(lambda _: np.arange(num_units) % 3, units, num_units, seed=1, ordinal=0)
            assert sorted(drawn.tolist()) == units.tolist()


def test_units_without_weight_wait_until_no_others_are_left() -> None:
    difficulty = np.arange(1000) / 1000
    drawn = draw_curriculum(
        lambda progress: difficulty <= progress + 0.1, np.arange(1000), 1000, seed=0, ordinal=0
    )
    position = np.arange(1000)
    assert (difficulty[drawn] <= position / 1000 + 0.1 + 1e-9).all()
    assert not np.array_equal(drawn, np.sort(drawn))


def test_progress_goes_on_over_passes_in_a_hundred_steps() -> None:
    asked: list[float] = []

    def curriculum(progress: float) -> list[float]:
        asked.append(progress)
        return [1.0] * 500

    first, second = (
        draw_curriculum(curriculum, np.arange(500), 500, seed=0, ordinal=ordinal) for ordinal in range(2)
    )
    assert asked == pytest.approx([step / 100 for step in range(200)])
    assert first.tolist() != second.tolist()


@pytest.mark.e2e
def test_units_are_drawn_in_proportion_to_their_weights_and_without_replacement() -> None:
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    runs = 4000
    firsts = np.zeros(4)
    seconds_after_3 = np.zeros(4)
    for seed in range(runs):
        first, second, *_ = draw_curriculum(lambda _: weights, np.arange(4), 4, seed=seed, ordinal=0)
        firsts[first] += 1
        if first == 3:
            seconds_after_3[second] += 1
    assert np.abs(firsts / runs - weights / 10).max() < 0.04
    assert np.abs(seconds_after_3 / seconds_after_3.sum() - np.array([1, 2, 3, 0]) / 6).max() < 0.06


def test_where_a_unit_lies_in_a_drawn_pass_is_found_again() -> None:
    drawn = [7, 1, 5, 3]
    order = UnitOrder(PassPlan("curriculum", 0, 0, 9, "", 4), listed=drawn)
    assert order.positions(np.arange(9)).tolist() == [-1, 1, -1, 3, -1, 2, -1, 0, -1]


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (lambda _: [1.0] * 3, r"shape \(3,\); give one weight for each of the 4"),
        (lambda _: 1.0, r"shape \(\)"),
        (lambda _: [1, 2, -1, 0], "finite and 0 or more"),
        (lambda _: [1, 2, float("nan"), 0], "finite and 0 or more"),
        (lambda _: ["a"] * 4, "gives no weights"),
        (lambda: [1] * 4, "gives no weights"),
    ],
)
def test_a_curriculum_that_gives_no_weights_is_refused(curriculum: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_curriculum(curriculum, 0.0, 4)


def test_an_endless_source_has_no_curriculum() -> None:
    with pytest.raises(ConfigError, match="endless"):
        check_curriculum(lambda _: [1.0], 0.0, None)
