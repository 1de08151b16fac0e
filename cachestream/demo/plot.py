"""The demo as a picture: how the cache grew and turned over, and what that did for accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.demo.messages import EpochDone
from cachestream.errors import ConfigError

# Okabe and Ito's palette, which also people with colour blindness tell apart.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#888888"
_MEGABYTE: Final = 1e6


def draw(rows: npt.NDArray[Any], epochs: Sequence[EpochDone], remote_samples: int, path: Path) -> None:
    """Draw the cache's history `rows` (see storage/telemetry.py) and the `epochs` over time into `path`.

    Raises ConfigError where matplotlib is missing, or for an ending that it cannot write.
    """
    try:
        from matplotlib.figure import Figure  # slow to load, and an extra
    except ImportError as error:
        raise ConfigError("the plot needs matplotlib; run: pip install 'cachestream[demo]'") from error
    start_s = float(rows["time_s"][0])
    seconds = rows["time_s"] - start_s
    figure = Figure(figsize=(9, 8.5), layout="constrained")
    figure.suptitle("cachestream demo: two ranks train on a growing, limited cache of a slow remote")
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.3, 1))
    _draw_size(panels[0], seconds, rows)
    _draw_samples(panels[1], seconds, rows, remote_samples)
    _draw_accuracy(panels[2], epochs, start_s)
    for axes in panels:
        for event in epochs:
            axes.axvline(event.time_s - start_s, color=_GREY, alpha=0.25, linewidth=0.8)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[2].set_xlabel("seconds since the worker started (grey lines: an epoch ends)")
    panels[2].set_xlim(0, max([float(seconds[-1]), *(event.time_s - start_s for event in epochs)]) * 1.02)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _draw_size(axes: Any, seconds: npt.NDArray[np.float64], rows: npt.NDArray[Any]) -> None:
    size, limit = rows["size_bytes"] / _MEGABYTE, rows["limit_bytes"] / _MEGABYTE
    axes.fill_between(seconds, size, color=_BLUE, alpha=0.25, linewidth=0)
    axes.plot(seconds, size, color=_BLUE, label="cache on disk")
    axes.plot(seconds, limit, color=_ORANGE, linestyle="--", label="limit")
    axes.set_ylabel("MB")
    axes.set_ylim(0, float(limit.max()) * 1.25)
    axes.legend(loc="lower right", framealpha=0.9)


def _draw_samples(
    axes: Any, seconds: npt.NDArray[np.float64], rows: npt.NDArray[Any], remote_samples: int
) -> None:
    arrived = rows["samples"] + rows["evicted_samples"]
    axes.plot(seconds, arrived, color=_GREEN, label="cached so far, evicted ones too")
    axes.plot(seconds, rows["samples"], color=_BLUE, label="cached now")
    axes.plot(seconds, rows["evicted_samples"], color=_PURPLE, label="evicted so far")
    axes.axhline(remote_samples, color=_GREY, linestyle=":", label="in the remote")
    axes.set_ylabel("samples")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", framealpha=0.9)


def _draw_accuracy(axes: Any, epochs: Sequence[EpochDone], start_s: float) -> None:
    at = [event.time_s - start_s for event in epochs]
    percent = [100 * event.accuracy for event in epochs]
    axes.plot(at, percent, "o-", color=_ORANGE, label="on held-out views")
    for event, x, y in zip(epochs, at, percent, strict=True):
        axes.annotate(
            f"{event.cached:,}", (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(0, 110)
    axes.legend(title="numbers: samples to draw from", loc="lower right", framealpha=0.9)
