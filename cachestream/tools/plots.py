"""The growth of a cache as a picture (needs matplotlib: the extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cachestream.config import require
from cachestream.errors import ConfigError

if TYPE_CHECKING:
    from cachestream.tools.forecast import Forecast

# Okabe and Ito's palette, for people with colour blindness, too.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#888888"
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86_400.0


def plot_growth(
    rows: npt.NDArray[Any],
    path: str | os.PathLike[str],
    title: str,
    accuracy: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw the history `rows` (see storage/telemetry.py) into the file at `path`, in the format of its
    ending.

    Above: the size on disk and its limit, with marks at the epochs' snapshots. Below: the samples it holds,
    and all that were ever cached. `accuracy`: pairs of seconds since 1970 and a share, for a panel of their
    own. Raises ConfigError where matplotlib is missing, for an unknown ending, and for a history too short to
    draw.
    """
    if len(rows) < 2:
        raise ConfigError("nothing to plot yet: the history is written while a worker runs")
    figure, panels = _panels(title, 3 if accuracy else 2, height=9 if accuracy else 6)
    seconds, unit, unit_s = _time_axis(rows["time_s"] - rows["time_s"][0])
    _draw_sizes(panels[0], seconds, rows)
    _draw_samples(panels[1], seconds, rows)
    if accuracy:
        times_s, shares = np.transpose(accuracy)
        ended = (times_s - rows["time_s"][0]) / unit_s
        label = "on held-out samples, after each epoch"
        panels[2].plot(ended, 100 * shares, "o-", color=_ORANGE, clip_on=False, label=label)
        panels[2].set_ylabel("accuracy (%)")
    panels[-1].set_xlabel(f"time since the first worker ({unit})")
    for axes in panels:
        axes.set_xlim(0, max(float(seconds.max()), 1e-3))
        # Above the panel, where it covers no line.
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, borderaxespad=0.2)
    _save(figure, panels, path)


def plot_forecast(forecast: Forecast, path: str | os.PathLike[str], title: str) -> None:
    """Draw a forecast of `cachestream plan` into the file at `path`: the samples of each epoch, and those of
    the remote that have been seen. Raises ConfigError as `plot_growth`.
    """
    if not forecast.epochs:
        raise ConfigError("nothing to draw: no epoch begins in the time that is planned")
    figure, (axes,) = _panels(title, 1, height=5)
    seconds, unit, _ = _time_axis(np.array([epoch.at_s for epoch in forecast.epochs]))
    whole = forecast.setup.num_samples
    most = whole or max(max(epoch.samples, epoch.seen) for epoch in forecast.epochs)
    factor, thousands = _scale(float(most), ("", "thousand", "million", "billion"))
    for label, color, values in (
        ("in the epoch that begins", _BLUE, [epoch.samples for epoch in forecast.epochs]),
        ("of the remote, trained on by its end", _GREEN, [epoch.seen for epoch in forecast.epochs]),
    ):
        axes.step(seconds, np.array(values) / factor, where="post", color=color, label=label)
    if whole is not None:
        axes.axhline(whole / factor, color=_GREY, linestyle="--", label="on the remote")
    axes.set(xlabel=f"time ({unit})", ylabel=f"samples ({thousands})" if thousands else "samples")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    _save(figure, [axes], path)


def _panels(title: str, count: int, *, height: float) -> tuple[Any, Any]:
    """A figure of so many panels, one above the other."""
    figure = figure_class()(figsize=(9, height), layout="constrained")
    # A path may hold undecodable bytes, and "$" is not a formula.
    figure.suptitle(title.encode("utf-8", "replace").decode(), parse_math=False)
    return figure, figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]


def _save(figure: Any, panels: Iterable[Any], path: str | os.PathLike[str]) -> None:
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{os.fspath(path)} cannot be written: {error}") from error


def figure_class() -> Any:
    """Matplotlib's Figure; raises ConfigError where matplotlib is missing."""
    return require("matplotlib.figure", "plot", "a plot").Figure


def _time_axis(since_s: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], str, float]:
    """The times in a unit that keeps them short, its name, and its seconds."""
    for unit_s, unit in ((_DAY_S, "days"), (_HOUR_S, "hours"), (_MINUTE_S, "minutes")):
        if since_s[-1] > 3 * unit_s:
            return since_s / unit_s, unit, unit_s
    return since_s, "seconds", 1.0


def _scale(largest: float, units: tuple[str, ...]) -> tuple[float, str]:
    """The power of 1000 that keeps `largest` short, and its unit."""
    power = 0
    while largest >= 1000 ** (power + 1) and power < len(units) - 1:
        power += 1
    return float(1000**power), units[power]


def _draw_sizes(axes: Any, seconds: npt.NDArray[np.float64], rows: npt.NDArray[Any]) -> None:
    largest = max(rows["size_bytes"].max(), rows["limit_bytes"].max())
    factor, unit = _scale(float(largest), ("B", "kB", "MB", "GB", "TB", "PB"))
    axes.fill_between(seconds, rows["size_bytes"] / factor, color=_BLUE, alpha=0.25, linewidth=0)
    axes.plot(seconds, rows["size_bytes"] / factor, color=_BLUE, label="on disk")
    axes.plot(
        seconds,
        rows["limit_bytes"] / factor,
        color=_ORANGE,
        linestyle="--",
        drawstyle="steps-post",
        label="limit",
    )
    axes.set_ylabel(f"cache ({unit})")
    taken = np.flatnonzero(np.diff(rows["snapshots"], prepend=rows["snapshots"][0]) > 0)
    if len(taken):
        top = np.full(len(taken), largest / factor * 1.04)
        axes.plot(seconds[taken], top, "v", color=_GREY, markersize=5, linestyle="none", label="epochs begin")


def _draw_samples(axes: Any, seconds: npt.NDArray[np.float64], rows: npt.NDArray[Any]) -> None:
    arrived = rows["samples"] + rows["evicted_samples"]
    factor, unit = _scale(float(arrived.max()), ("", "thousand", "million", "billion"))
    axes.plot(seconds, rows["samples"] / factor, color=_BLUE, label="cached now")
    axes.plot(seconds, arrived / factor, color=_GREEN, label="cached so far, evicted ones too")
    axes.set_ylabel(f"samples ({unit})" if unit else "samples")
