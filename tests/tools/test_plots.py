"""The picture of a cache's growth: drawn from any history, into any usual format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from cachestream.errors import ConfigError
from cachestream.storage.telemetry import ROW
from cachestream.tools.plots import plot_growth


def history(count: int, step_s: float = 1.0, scale: int = 10**6) -> npt.NDArray[Any]:
    """A cache that fills up to its limit, evicts, and is trained on now and then."""
    rows = np.zeros(count, ROW)
    ticks = np.arange(count)
    rows["time_s"] = 1.7e9 + ticks * step_s
    rows["size_bytes"] = np.minimum(ticks, count // 2) * scale
    rows["limit_bytes"] = (count // 2 + 1) * scale
    rows["samples"] = np.minimum(ticks, count // 2) * 10
    rows["evicted_samples"] = np.maximum(0, ticks - count // 2) * 10
    rows["snapshots"] = ticks // 10
    return rows


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}  # type: ignore[misc,union-attr]


@pytest.mark.e2e
def test_all_lines_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "growth.png"
    plot_growth(history(60), path, "cache")
    blue, orange, green, grey = (0, 0x72, 0xB2), (0xD5, 0x5E, 0), (0, 0x9E, 0x73), (0x88, 0x88, 0x88)
    assert {blue, orange, green, grey} <= colours(path)


@pytest.mark.e2e
@pytest.mark.parametrize("epochs", [0, 3])
def test_marks_are_drawn_where_epochs_began_and_only_there(tmp_path: Path, epochs: int) -> None:
    rows = history(60)
    rows["snapshots"] = np.arange(60) // 15 if epochs else 7
    plot_growth(rows, tmp_path / "growth.svg", "cache")
    assert ("epochs begin" in (tmp_path / "growth.svg").read_text(encoding="utf-8")) == bool(epochs)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("step_s", "unit"), [(0.1, "seconds"), (60.0, "minutes"), (3600.0, "hours"), (86_400.0, "days")]
)
def test_the_time_axis_has_the_unit_that_fits_the_run(tmp_path: Path, step_s: float, unit: str) -> None:
    path = tmp_path / "growth.svg"
    plot_growth(history(12, step_s), path, "cache")
    assert f"first worker ({unit})" in path.read_text(encoding="utf-8")


@pytest.mark.e2e
@pytest.mark.parametrize(("scale", "unit"), [(1, "B"), (10**6, "MB"), (10**11, "TB")])
def test_the_size_axis_has_the_unit_that_fits_the_cache(tmp_path: Path, scale: int, unit: str) -> None:
    path = tmp_path / "growth.svg"
    plot_growth(history(40, scale=scale), path, "cache")
    assert f"cache ({unit})" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("count", [0, 1])
def test_a_history_too_short_to_draw_says_when_there_will_be_one(tmp_path: Path, count: int) -> None:
    with pytest.raises(ConfigError, match="while a worker runs"):
        plot_growth(history(count), tmp_path / "growth.png", "cache")


@pytest.mark.e2e
def test_an_empty_cache_is_drawn_without_a_warning(tmp_path: Path) -> None:
    rows = np.zeros(2, ROW)
    rows["time_s"] = [1.7e9, 1.7e9]  # not even a moment apart
    plot_growth(rows, tmp_path / "growth.png", "cache")
    assert (tmp_path / "growth.png").stat().st_size > 0
