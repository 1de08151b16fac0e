"""The model of many nodes: what it must conserve, what must grow with what, and a schedule that it is held against."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.record import Record, load
from benchmarks.scale_out import __main__ as main
from benchmarks.scale_out import cluster
from benchmarks.scale_out.cluster import simulate
from benchmarks.scale_out.contents import units_between
from benchmarks.scale_out.link import Link
from benchmarks.scale_out.report import GUIDE, TABLE, calibration_of, check, figures_of, table
from benchmarks.scale_out.values import Arrangement, Calibration, Outcome, Setup
from cachestream.worker.order import Partition, PassPlan

ALONE, PARTITION, SHARE = Arrangement
SPEEDS = Calibration(1e8, 2e8, 0.01, 0.001, "assumed")
SHARDS = 120
# 120 shards of 8 MB, all of which a cache holds; 4 nodes use the whole of the link.
WHOLE = Setup(
    nodes=4,
    num_shards=SHARDS,
    shard_bytes=8_000_000,
    fetched_bytes=6_000_000,
    samples_per_shard=64,
    limit_bytes=1_000_000_000,
    processors=4,
    job_bytes_per_s=3e8,
    calibration=SPEEDS,
    epoch_s=100.0,
    duration_s=1500.0,
    min_samples=128,
    replace_s=20.0,
    mtbf_s=math.inf,
)
PART = replace(WHOLE, limit_bytes=160_400_000)  # 20 of the 120 shards
node_counts = st.integers(1, 40)


def sized(setup: Setup, **changes: Any) -> Setup:
    return replace(setup, **changes)


# --- a link


flows = st.lists(st.tuples(st.floats(0, 50), st.floats(1e3, 1e6)), min_size=1, max_size=12)


def ends_of(begun: list[tuple[float, float]], total: float, each: float) -> tuple[list[float], Link]:
    env = simpy.Environment()
    link, ends = Link(env, total, each), [math.inf] * len(begun)

    def one(number: int, at_s: float, size: float) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(at_s)
        yield link.transfer(size)
        ends[number] = env.now

    for number, (at_s, size) in enumerate(begun):
        env.process(one(number, at_s, size))
    env.run()
    return ends, link


@given(flows, st.floats(1e4, 1e6), st.floats(1e4, 1e6))
def test_a_link_moves_every_byte_and_is_never_faster_than_its_bounds(
    begun: list[tuple[float, float]], total: float, each: float
) -> None:
    ends, link = ends_of(begun, total, each)
    size = sum(size for _, size in begun)
    assert link.moved_bytes == pytest.approx(size, abs=10 + 1e-6 * size)
    for end_s, (at_s, flow) in zip(ends, begun, strict=True):
        assert end_s >= at_s + flow / min(total, each) * (1 - 1e-6) - 1 / min(total, each)
    assert max(ends) >= size / total * (1 - 1e-6) - len(begun) / total
    faster, _ = ends_of(begun, 2 * total, 2 * each)
    assert all(new <= old + 1e-3 for new, old in zip(faster, ends, strict=True))


def test_flows_share_a_link_equally_and_a_cancelled_one_leaves_its_part_to_the_others() -> None:
    env = simpy.Environment()
    link = Link(env, 100.0, 80.0)
    first, second = link.transfer(1000.0), link.transfer(1000.0)
    env.run(until=10.0)
    assert link.moved_bytes == pytest.approx(1000.0)
    assert link.cancel(second) == pytest.approx(500.0)
    env.run(until=first)
    assert env.now == pytest.approx(10.0 + 500.0 / 80.0, abs=0.1)
    assert link.cancel(first) == 0.0
    assert link.moved_bytes == pytest.approx(1500.0, abs=1.0)


# --- what nodes hold


@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 3))
def test_the_positions_of_a_pass_are_all_units_of_a_share_and_those_after_them_begin_a_new_pass(
    num_units: int, count: int, seed: int
) -> None:
    plans = [
        PassPlan("shuffle", seed, 0, num_units, "", num_units, Partition(i, count)) for i in range(count)
    ]
    passes = [units_between(plan, 0, plan.share or 0) for plan in plans]
    assert sorted(np.concatenate(passes).tolist()) == list(range(num_units))
    length = len(passes[0])
    again = units_between(plans[0], length // 2, length + length // 2)
    assert again[: length - length // 2].tolist() == passes[0][length // 2 :].tolist()
    assert len(again) == length


# --- runs


@pytest.mark.e2e
@given(node_counts)
def test_sharing_reads_the_data_set_once_and_filling_alone_once_for_each_node(
    nodes: int,
) -> None:
    setup = sized(WHOLE, nodes=nodes)
    whole_bytes = SHARDS * setup.fetched_bytes
    for arrangement, copies in ((SHARE, nodes), (PARTITION, 1)):
        outcome = simulate(setup, arrangement)
        assert outcome.egress_bytes == pytest.approx(whole_bytes, rel=1e-6)
        assert outcome.distinct_samples == SHARDS * setup.samples_per_shard
        assert outcome.copied_bytes == SHARDS * (copies - 1) * setup.shard_bytes
        assert outcome.seen_share == pytest.approx(copies / nodes)
    alone = simulate(setup, ALONE)
    assert alone.egress_bytes == pytest.approx(nodes * whole_bytes, rel=1e-6)
    assert alone.seen_share == 1.0


@pytest.mark.e2e
@given(node_counts, st.sampled_from(Arrangement), st.floats(1.0, 10.0))
def test_no_arrangement_is_slower_with_more_bandwidth(
    nodes: int, arrangement: Arrangement, faster: float
) -> None:
    slow = sized(WHOLE, nodes=nodes, unevenness=0.0)
    speeds = replace(SPEEDS, remote_bytes_per_s=faster * 1e8, copy_bytes_per_s=faster * 2e8)
    fast = sized(slow, job_bytes_per_s=faster * 3e8, calibration=speeds)
    before, after = simulate(slow, arrangement), simulate(fast, arrangement)
    # A node that claims sooner may claim one shard more than its neighbour: a copy's time.
    assert after.full_s <= before.full_s * (1 + 1e-6) + slow.copy_s
    assert after.full_p99_s <= before.full_p99_s * (1 + 1e-6) + slow.copy_s
    assert after.first_s <= before.first_s * (1 + 1e-6) + slow.copy_s


@pytest.mark.e2e
@given(st.integers(2, 40), st.sampled_from(Arrangement), st.floats(5e2, 1e5))
def test_failures_only_add(nodes: int, arrangement: Arrangement, mtbf_s: float) -> None:
    calm = simulate(sized(WHOLE, nodes=nodes), arrangement)
    failing = simulate(sized(WHOLE, nodes=nodes, mtbf_s=mtbf_s), arrangement)
    assert calm.failures == 0
    assert failing.failures > 0
    assert failing.egress_bytes >= calm.egress_bytes * (1 - 1e-6)
    assert failing.copied_bytes >= calm.copied_bytes
    assert failing.waiting_s >= calm.waiting_s - 1e-6


def test_a_shard_that_another_node_keeps_is_never_read_again() -> None:
    setup = sized(WHOLE, nodes=10, mtbf_s=10 * WHOLE.duration_s)  # one failure, long after all are full
    assert simulate(setup, SHARE).reread_bytes == 0
    lost = simulate(setup, PARTITION)
    assert lost.reread_bytes == SHARDS // 10 * setup.fetched_bytes
    assert simulate(setup, ALONE).reread_bytes == SHARDS * setup.fetched_bytes
    assert lost.warm_s >= setup.replace_s + SHARDS // 10 * setup.fetched_bytes / 1e8


def test_caches_that_hold_a_part_draw_from_as_much_as_they_hold_together() -> None:
    setup = sized(PART, nodes=4, turnover=0.0)
    samples = setup.samples_per_shard
    assert setup.shards_in_cache == 20
    assert simulate(setup, SHARE).distinct_samples == 20 * samples
    assert simulate(setup, PARTITION).distinct_samples == 80 * samples
    assert 20 * samples < simulate(setup, ALONE).distinct_samples < 80 * samples


@pytest.mark.e2e
@given(st.integers(1, 30), st.floats(5e2, 1e5))
def test_no_cache_of_a_group_is_over_its_limit_or_holds_a_shard_twice_though_nodes_fail(
    nodes: int, mtbf_s: float
) -> None:
    setup = sized(PART, nodes=nodes, mtbf_s=mtbf_s)
    group = cluster._Group(setup)
    for until_s in np.linspace(5.0, setup.duration_s, 12).tolist():
        group.env.run(until=until_s)
        assert group.kept.shape == (nodes, setup.shards_in_cache)
        for kept in group.kept:
            positions = kept[kept >= 0]
            assert len(np.unique(positions)) == len(positions)


def test_turnover_shows_a_node_more_for_more_egress() -> None:
    frozen, turning = sized(PART, turnover=0.0), sized(PART, turnover=0.25)
    for arrangement in Arrangement:
        before, after = simulate(frozen, arrangement), simulate(turning, arrangement)
        assert after.seen_share > before.seen_share
        assert after.egress_bytes > before.egress_bytes


def random_neighbours(nodes: int, shards: int, copy_s: float, seed: int) -> float:
    """The time until all nodes hold all shards, of which each has its share at first: an idle node asks an idle one at random."""
    env, rng = simpy.Environment(), random.Random(seed)
    holders = [{shard % nodes} for shard in range(shards)]
    sending = [False] * nodes
    changed = [env.event()]

    def node(number: int) -> Generator[simpy.Event, Any, None]:
        missing = [shard for shard in range(shards) if number not in holders[shard]]
        while missing:
            choices = [(shard, other) for shard in missing for other in holders[shard] if not sending[other]]
            if not choices:
                yield changed[0]
                continue
            shard, other = rng.choice(choices)
            missing.remove(shard)
            sending[other] = True
            yield env.timeout(copy_s)
            sending[other] = False
            holders[shard].add(number)
            changed[0].succeed()
            changed[0] = env.event()

    for number in range(nodes):
        env.process(node(number))
    env.run()
    return env.now


@pytest.mark.parametrize("nodes", [4, 16])
def test_nodes_that_ask_idle_neighbours_at_random_take_as_long_as_the_model_says(nodes: int) -> None:
    speeds = replace(SPEEDS, remote_bytes_per_s=1e12, decode_s=1e-9, shard_overhead_s=1e-6)
    setup = sized(WHOLE, nodes=nodes, job_bytes_per_s=1e12, unevenness=0.0, calibration=speeds)
    setup = sized(setup, requests_per_s=1e9)
    modelled_s = simulate(setup, SHARE).full_p99_s
    assert modelled_s >= setup.copy_s * SHARDS * (nodes - 1) / nodes * (1 - 1e-3)
    asked_s = random_neighbours(nodes, SHARDS, setup.copy_s, seed=1)
    assert asked_s == pytest.approx(modelled_s, rel=0.05)


@pytest.mark.e2e
@pytest.mark.parametrize("nodes", [4, 16, 40])
def test_the_formulas_of_the_guide_give_the_times_of_the_model(nodes: int) -> None:
    setup = sized(WHOLE, nodes=nodes, num_shards=1200, limit_bytes=8_000_000 * 240 + 300_000, unevenness=0.0)
    job, data = setup.job_bytes_per_s, 1200 * setup.fetched_bytes
    node = min(SPEEDS.remote_bytes_per_s, setup.fetched_bytes / setup.own_s)
    limit = 240 * setup.fetched_bytes
    alone_s = limit / min(node, job / nodes)
    assert simulate(setup, ALONE).full_s == pytest.approx(alone_s, rel=0.01)
    assert simulate(setup, PARTITION).full_s == pytest.approx(
        min(data, nodes * limit) / min(job, nodes * node), rel=0.05
    )
    group = min(data, limit)
    copied = group * (nodes - 1) / nodes / setup.fetched_bytes
    expected_s = max(group / min(job, nodes * node), copied * setup.copy_s)
    assert simulate(setup, SHARE).full_s == pytest.approx(expected_s, rel=0.1)


# --- calibration and figures


MEASURED: dict[str, list[float]] = {
    "remote_bytes_per_s": [1e8, 1e8, 3e8],
    "copy_bytes_per_s": [2e8],
    "shard_overhead_s": [0.01],
    "decode_s": [0.001],
    "num_shards": [120.0],
    "shard_bytes": [8e6],
    "fetched_bytes": [6e6],
    "samples_per_shard": [64.0],
    "limit_bytes": [1e9],
    "processors": [4.0],
    "job_bytes_per_s": [3e8],
}


def test_the_model_is_calibrated_by_and_compared_with_what_was_measured() -> None:
    assert calibration_of(MEASURED) == replace(SPEEDS, source="measured")
    same = simulate(sized(WHOLE, nodes=4, unevenness=0.0, turnover=0.0), SHARE)
    measured = {
        **MEASURED,
        "4 nodes, share / full_s": [same.full_s],
        "4 nodes, share / egress_bytes": [same.egress_bytes / 2],
        "4 nodes, share / other": [1.0],
        "actors / 4": [1.0],
    }
    assert check(measured) == {
        "4 nodes, share / full_s": pytest.approx(1.0),
        "4 nodes, share / egress_bytes": pytest.approx(2.0),
    }


def test_a_figure_that_was_not_measured_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"cluster\.json: no figure 'decode_s'; run 'python -m benchmarks cluster"
    ):
        calibration_of({name: values for name, values in MEASURED.items() if name != "decode_s"})


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_run_emits_the_figures_of_every_arrangement_and_says_when_it_is_not_compared(
    is_measured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {**MEASURED, "3 nodes, share / full_s": [1.0]}
    record = Record("", "", "", "", measured) if is_measured else None
    monkeypatch.setattr(main, "load", lambda _name: record)
    monkeypatch.setattr(main, "SIZES", (3,))
    monkeypatch.setattr(main, "SETUP", WHOLE)
    main.main()
    told = capsys.readouterr()
    figures = json.loads(told.out.splitlines()[-1])
    assert ("worst_ratio" in figures) == is_measured
    assert ("3 nodes, share / full_s, model to measured" in figures) == is_measured
    assert ("the model is not compared" in told.err) != is_measured
    assert {f"3 nodes, {one.value} / egress (TB)" for one in Arrangement} <= set(figures)


def test_the_table_of_the_guide_is_what_the_record_makes() -> None:
    record = load("scale_out")
    assert record is not None
    made = table({name: statistics.median(values) for name, values in record.figures.items()})
    assert TABLE.findall(GUIDE.read_text(encoding="utf-8")) == [made], "run: make results"


def test_what_did_not_come_has_no_figure() -> None:
    outcome = Outcome(math.inf, math.inf, 10, 0.5, 1e12, 0.0, 2.0, 2.0, 0, 0.0, math.inf)
    found = dict(figures_of(8, "alone", outcome))
    assert "8 nodes, alone / full, median (s)" not in found
    assert found["8 nodes, alone / egress (TB)"] == 1.0
    assert all(map(math.isfinite, found.values()))
    shown = table({**found, "8 nodes, share / full, median (s)": 41_900.0}, nodes=8)
    assert "| the caches are full after | not in a day |" in shown
    assert "| 11.6 h |" in shown
    assert "| egress in a day | 1 TB |" in shown
