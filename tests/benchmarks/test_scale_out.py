"""The model of many nodes: what it must conserve, what must grow with what, and the formulas of the guide."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scale_out
from benchmarks.record import Record, load
from benchmarks.scale_out import (
    GUIDE,
    TABLE,
    Arrangement,
    Job,
    Outcome,
    check,
    figures_of,
    measured_job,
    outcome_of,
    table,
)
from cachestream.tools.forecast import Setup

ALONE, PARTITION, SHARE = Arrangement
SAMPLES = 8_000
# 1 GB as cached, all of which a cache holds; 4 nodes use the whole of the remote. An epoch lasts a minute or more.
WHOLE = Job(
    nodes=4,
    node=Setup(
        num_samples=SAMPLES,
        fetched_bytes=100_000,
        cached_bytes=125_000,
        fill_per_s=1000.0,
        size_limit=2_000_000_000,
        batch_size=32,
        step_s=0.25,
        duration_s=1500.0,
        min_samples=128,
        shard_bytes=4_000_000,
    ),
    remote_bytes_per_s=3e8,
    copy_bytes_per_s=2e8,
    replace_s=20.0,
)
PART = replace(WHOLE, node=replace(WHOLE.node, size_limit=250_000_000))  # a quarter
node_counts = st.integers(2, 40)


def of_node(job: Job, **changes: Any) -> Job:
    return replace(job, node=replace(job.node, **changes))


@given(node_counts)
def test_sharing_reads_the_data_set_once_and_filling_alone_once_for_each_node(nodes: int) -> None:
    job = replace(WHOLE, nodes=nodes)
    alone, partition, share = (outcome_of(job, arrangement) for arrangement in Arrangement)
    assert share.egress_bytes == pytest.approx(SAMPLES * 100_000)
    assert partition.egress_bytes == pytest.approx(SAMPLES * 100_000, rel=0.01), "parts of whole samples"
    assert alone.egress_bytes == pytest.approx(nodes * share.egress_bytes)
    assert (alone.copied_bytes, partition.copied_bytes) == (0, 0)
    assert share.copied_bytes == pytest.approx((nodes - 1) * SAMPLES * 125_000)
    assert (alone.seen_share, share.seen_share) == (1.0, 1.0)
    assert partition.seen_share == pytest.approx(1 / nodes, rel=0.01)
    assert {alone.drawn_from, share.drawn_from} == {SAMPLES}
    assert partition.drawn_from == pytest.approx(SAMPLES, rel=0.01)


@given(node_counts, st.sampled_from(Arrangement), st.floats(1.0, 10.0))
def test_no_arrangement_is_slower_with_more_bandwidth(
    nodes: int, arrangement: Arrangement, faster: float
) -> None:
    slow = replace(WHOLE, nodes=nodes)
    fast = of_node(
        replace(slow, remote_bytes_per_s=faster * 3e8, copy_bytes_per_s=faster * 2e8),
        fill_per_s=faster * 1000.0,
    )
    before, after = outcome_of(slow, arrangement), outcome_of(fast, arrangement)
    # Shards are whole: the last one of a pass, of up to 32 samples, may come later.
    last_s = 32 * slow.node.num_workers / slow.setup(arrangement).fill_per_s
    assert after.full_s <= before.full_s + last_s
    assert after.first_s <= before.first_s + last_s
    assert after.warm_s <= before.warm_s


@pytest.mark.parametrize("nodes", [4, 16, 40])
def test_the_formulas_of_the_guide_give_the_times_of_the_model(nodes: int) -> None:
    job = of_node(replace(WHOLE, nodes=nodes), num_samples=80_000, first_s=0.0)
    data, limit, remote, node = 80_000 * 1e5, 16_000 * 1e5, 3e8, 1e8
    assert outcome_of(job, ALONE).full_s == pytest.approx(limit / min(node, remote / nodes), rel=0.01)
    assert outcome_of(job, PARTITION).full_s == pytest.approx(
        min(data, nodes * limit) / min(remote, nodes * node), rel=0.05
    )
    copied_s = (nodes - 1) / nodes * 2_000_000_000 / 2e8
    expected_s = max(min(data, limit) / min(remote, nodes * node), copied_s)
    assert outcome_of(job, SHARE).full_s == pytest.approx(expected_s, rel=0.1)


def test_a_failed_node_reads_again_what_it_held_unless_others_hold_it_too() -> None:
    job = replace(WHOLE, nodes=10)
    alone, partition, share = (outcome_of(job, arrangement) for arrangement in Arrangement)
    assert alone.reread_bytes == SAMPLES * 100_000
    assert partition.reread_bytes == SAMPLES // 10 * 100_000
    assert share.reread_bytes == 0
    # All caches hold what they need: the remote is free.
    assert alone.warm_s == pytest.approx(20 + 8)
    assert partition.warm_s == pytest.approx(20 + 0.8)
    assert share.warm_s == pytest.approx(20 + SAMPLES * 125_000 / 2e8)


@pytest.mark.parametrize("nodes", [4, 1000])
def test_a_replacement_fills_as_at_first_while_the_turnover_of_others_goes_on(nodes: int) -> None:
    outcome = outcome_of(replace(PART, nodes=nodes), ALONE)
    assert outcome.warm_s - 20 == pytest.approx(outcome.full_s - 1, rel=0.05)


def test_caches_that_hold_a_part_draw_from_as_much_as_they_hold_together() -> None:
    job = of_node(PART, turnover=0.0)
    alone, partition, share = (outcome_of(job, arrangement).drawn_from for arrangement in Arrangement)
    assert share == pytest.approx(SAMPLES / 4, rel=0.02)
    assert partition == pytest.approx(SAMPLES, rel=0.02)
    assert share < alone < partition


@pytest.mark.parametrize("arrangement", [ALONE, SHARE])
def test_turnover_shows_a_node_more_for_more_egress(arrangement: Arrangement) -> None:
    before, after = (outcome_of(of_node(PART, turnover=turnover), arrangement) for turnover in (0.0, 0.25))
    assert after.seen_share > before.seen_share
    assert after.egress_bytes > before.egress_bytes


# --- measured runs, and figures


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
MEDIANS = {name: statistics.median(values) for name, values in MEASURED.items()}


def test_a_node_is_as_fast_as_the_slowest_of_what_was_measured() -> None:
    assert measured_job(MEDIANS, 4).node.fill_per_s == pytest.approx(64 * 1e8 / 6e6)
    assert measured_job({**MEDIANS, "decode_s": 0.1}, 4).node.fill_per_s == pytest.approx(64 / 1.61)
    assert measured_job(MEDIANS, 4).copy_bytes_per_s == pytest.approx(8e6 / 0.05)


def test_the_model_is_compared_with_what_was_measured() -> None:
    same = outcome_of(measured_job(MEDIANS, 4), SHARE)
    measured = {
        **MEDIANS,
        "4 nodes, share / full_s": same.full_s,
        "4 nodes, share / egress_bytes": same.egress_bytes / 2,
        "4 nodes, share / other": 1.0,
        "actors / 4": 1.0,
    }
    assert check(measured) == {
        "4 nodes, share / full_s, model to measured": pytest.approx(1.0),
        "4 nodes, share / egress_bytes, model to measured": pytest.approx(2.0),
    }


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_run_emits_the_figures_of_every_arrangement_and_says_when_it_is_not_compared(
    is_measured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {**MEASURED, "3 nodes, share / full_s": [1.0]}
    record = Record("", "", "", "", measured) if is_measured else None
    monkeypatch.setattr(scale_out, "load", lambda _name: record)
    monkeypatch.setattr(scale_out, "SIZES", (3,))
    monkeypatch.setattr(scale_out, "ASSUMED", WHOLE)
    scale_out.main()
    told = capsys.readouterr()
    figures = json.loads(told.out.splitlines()[-1])
    assert ("worst_ratio" in figures) == is_measured
    assert ("3 nodes, share / full_s, model to measured" in figures) == is_measured
    assert ("the model is not compared" in told.err) != is_measured
    assert {f"3 nodes, {one.value} / egress in a day (TB)" for one in Arrangement} <= set(figures)


def test_the_table_of_the_guide_is_what_the_record_makes() -> None:
    record = load("scale_out")
    assert record is not None
    made = table({name: statistics.median(values) for name, values in record.figures.items()})
    assert TABLE.findall(GUIDE.read_text(encoding="utf-8")) == [made], "run: make results"


def test_the_guide_says_how_far_the_model_is_off() -> None:
    record = load("scale_out")
    assert record is not None
    percent = math.ceil(100 * (statistics.median(record.figures["worst_ratio"]) - 1))
    assert f"comes within {percent} % of the times" in GUIDE.read_text(encoding="utf-8")


def test_what_does_not_come_has_no_figure() -> None:
    late = outcome_of(of_node(WHOLE, first_s=2000.0), ALONE)
    assert (late.full_s, late.first_s, late.drawn_from) == (math.inf, math.inf, 0)
    outcome = Outcome(math.inf, math.inf, 10, 0.5, 1e12, 0.0, 2.0, 2.0)
    found = dict(figures_of(8, ALONE, outcome))
    assert "8 nodes, alone / the caches are full after (s)" not in found
    assert found["8 nodes, alone / egress in a day (TB)"] == 1.0
    assert all(map(math.isfinite, found.values()))
    shown = table({**found, "8 nodes, share / the caches are full after (s)": 41_900.0}, nodes=8)
    assert "| the caches are full after | not in a day | not in a day | 11.6 h |" in shown
    assert "| egress in a day | 1 TB |" in shown
