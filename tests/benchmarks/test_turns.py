"""The gate of speed: which figures are compared, in which direction, and what fails."""

from __future__ import annotations

import pytest

from benchmarks.record import load
from benchmarks.turns import BESIDE, NAMES, compare, gain, told_by_one


@pytest.mark.parametrize(
    ("figure", "there", "here", "factor"),
    [
        ("loader_gb_per_s", 10.0, 11.0, 1.1),
        ("loader_samples_per_s", 10.0, 5.0, 0.5),
        ("first_batch_s", 2.0, 1.0, 2.0),
        ("first_batch_s_at_100000", 1.0, 2.0, 0.5),
        ("gap_ms", 1.0, 2.0, 0.5),
        ("gap_ms", 0.1, 0.15, 1.0),  # within what a clock can tell
        ("memory_mb", 10.0, 20.0, 0.5),
        ("mb_per_s", 10.0, 20.0, 2.0),
        ("npy files, 128 KiB / S3, MB/s", 10.0, 20.0, 2.0),
        ("waiting_percent", 4.0, 8.0, 0.5),
        ("bandwidth_used_percent", 40.0, 80.0, 2.0),
    ],
)
def test_a_gain_is_above_one_for_what_is_better(
    figure: str, there: float, here: float, factor: float
) -> None:
    assert gain(figure, there, here) == pytest.approx(factor)


def test_every_figure_of_both_sides_is_compared_by_its_median_and_a_twentieth_less_is_worse() -> None:
    there = [{"loader_gb_per_s": 10.0, "memcpy_gb_per_s": 10.0, "gone": 1.0}] * 3
    here = [{"loader_gb_per_s": value, "memcpy_gb_per_s": 1.0, "new": 1.0} for value in (9.0, 9.4, 99.0)]
    loader, memcpy = compare("warm", there, here)
    assert (loader.there, loader.here, loader.rounds, loader.is_worse) == (10.0, 9.4, 3, True)
    assert (memcpy.figure, memcpy.is_worse) == ("memcpy_gb_per_s", False)
    assert str(loader).endswith("0.94  WORSE")
    assert str(memcpy).endswith("beside")
    assert told_by_one(there, here) == ["gone", "new"]
    (just,) = compare("warm", [{"loader_gb_per_s": 10.0}], [{"loader_gb_per_s": 9.5}])
    assert not just.is_worse


def test_what_is_measured_beside_the_library_is_measured() -> None:
    recorded = {figure for name in NAMES if (record := load(name)) for figure in record.figures}
    assert recorded >= BESIDE
