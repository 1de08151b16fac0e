"""The live page: for each cache a sentence, a table and six plots, which the server keeps up to date."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import ColumnDataSource
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from jinja2 import Template

from cachestream.cli.facts import facts, messages
from cachestream.dashboard.readings import INTERVAL_S, USES, CacheWatch, Reading, verdict
from cachestream.storage.status import CacheStatus

# Okabe and Ito's palette, for people with colour blindness, too; light enough for a dark page.
_BLUE, _ORANGE, _GREEN, _PINK = "#3D8FCC", "#E0711F", "#0FA67E", "#CC79A7"
_GREY: Final = "#8A8F98"  # readable on white and on black
_POINTS: Final = 900
_TEMPLATE: Final = """{% extends base %}
{% block postamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  :root { color-scheme: light dark; }
  body { box-sizing: border-box; margin: 0 auto; max-width: 1500px; padding: 12px; overflow-x: hidden;
         font: 15px/1.45 system-ui, sans-serif;
         background: #ffffff; color: #1d2129; }
  @media (prefers-color-scheme: dark) { body { background: #14171c; color: #e4e7ec; } }
</style>
{% endblock %}"""
# Text, as a stylesheet object would belong to one page.
_GRID: Final = (
    ":host { display: grid; gap: 10px; width: 100%;"
    " grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }"
)
_TEXT: Final = """
:host { width: 100%; }
.bk-clearfix { display: block !important; }  /* Bokeh's inline block is as wide as its table */
h1 { font-size: 20px; margin: 4px 0; overflow-wrap: anywhere; }
p { margin: 2px 0 8px; font-size: 16px; }
.bar { height: 8px; width: min(640px, 90vw); border-radius: 4px; background: rgba(138,143,152,.3);
  overflow: hidden; margin: 4px 0 10px; }
.bar div { height: 100%; background: #3D8FCC; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0 0 10px; }
dt { color: #8A8F98; } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-line; }
.ranks { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 8px; }
th, td { text-align: right; padding: 1px 14px 1px 0; white-space: nowrap; }
th { color: #8A8F98; font-weight: normal; }
"""


def build_page(document: Document, watches: Sequence[CacheWatch]) -> None:
    """Fill `document`, one browser's page, and have it follow `watches` for as long as it is open."""
    document.title = "cachestream"
    document.template = Template(_TEMPLATE)
    panels = [_Panel(watch) for watch in watches]
    for panel in panels:
        document.add_root(panel.layout)

    def update() -> None:
        for panel in panels:
            panel.update(panel.watch.look())

    update()
    document.add_periodic_callback(update, int(1000 * INTERVAL_S))


class _Panel:
    """The part of the page about one cache."""

    def __init__(self, watch: CacheWatch) -> None:
        self.watch = watch
        first = watch.look()
        limits = [one.status.size_limit for one in watch.readings if one.status is not None]
        limit = limits[-1] if limits else 1  # the cache may be gone by now
        self._unit, self._factor = next(
            (unit, size)
            for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("B", 1.0))
            if limit >= size
        )
        self._head = Div(stylesheets=[_TEXT], sizing_mode="stretch_width")
        self._live = ColumnDataSource({name: [] for name in _live(first, self._factor)})
        self._epochs = ColumnDataSource({"epoch": [], "samples": []})
        self._uses = ColumnDataSource({"uses": [], "samples": []})
        self._restore()
        self.layout = column(
            self._head,
            column(*self._plots(), stylesheets=[_GRID], sizing_mode="stretch_width"),
            sizing_mode="stretch_width",
        )

    def _restore(self) -> None:
        """Begin with the recorded sizes, and with what was seen before this page was opened."""
        past, seen = self.watch.history(), list(self.watch.readings)[:-1]
        began_s = seen[0].at_s if seen else float("inf")
        rows: dict[str, list[float]] = {name: [] for name in self._live.data}
        for row in past[past["time_s"] < began_s][-_POINTS:]:
            rows["time"].append(_axis_time(float(row["time_s"])))
            rows["size"].append(float(row["size_bytes"]) / self._factor)
            rows["limit"].append(float(row["limit_bytes"]) / self._factor)
            for name in rows.keys() - {"time", "size", "limit"}:
                rows[name].append(float("nan"))
        for reading in seen:
            for name, value in _live(reading, self._factor).items():
                rows[name].append(value)
        self._live.data = rows

    def _plots(self) -> Iterable[Any]:
        live, times = self._live, {"x_axis_type": "datetime"}
        size = _figure(f"Cache ({self._unit})", **times)
        size.varea("time", 0, "size", source=live, color=_BLUE, alpha=0.25)
        _line(size, live, "size", _BLUE, "on disk")
        _line(size, live, "limit", _ORANGE, "limit", dash="dashed")
        rates = _figure("Samples a second", **times)
        for name, color, label in (
            ("cached", _BLUE, "arriving"),
            ("trained", _GREEN, "trained on"),
            ("evicted", _PINK, "evicted"),
        ):
            _line(rates, live, name, color, label)
        network = _figure("Fetched (MB a second)", **times)
        _line(network, live, "fetched", _BLUE, "fetched")
        _line(network, live, "bandwidth", _ORANGE, "limit", dash="dashed")
        waits = _figure("Trainer: waiting for data (% of the epoch)", **times)
        _line(waits, live, "waits", _ORANGE, "the rank that waits most")
        epochs = _figure("Epochs: samples each")
        epochs.vbar("epoch", top="samples", width=0.8, source=self._epochs, color=_GREEN)
        uses = _figure("Freshness: samples by times used", x_range=_use_names())
        uses.vbar("uses", top="samples", width=0.8, source=self._uses, color=_BLUE)
        return size, rates, network, waits, epochs, uses

    def update(self, reading: Reading) -> None:
        self._head.text = head_html(reading)
        self._live.stream(
            {name: [value] for name, value in _live(reading, self._factor).items()}, rollover=2 * _POINTS
        )
        status, freshness = reading.status, reading.freshness
        if status is not None and status.loaders:
            training = max(status.loaders, key=lambda one: one.samples)  # others may measure, on a split
            lengths = training.epochs
            self._epochs.data = {"epoch": [one[0] for one in lengths], "samples": [one[1] for one in lengths]}
        if freshness is not None:
            self._uses.data = {"uses": _use_names(), "samples": list(freshness)}


def _use_names() -> list[str]:
    """The names of the classes of `USES`: "0", "1", "2", "3-4", …, "17+"."""
    ends = [following - 1 for following in USES[1:]]
    spans = [
        str(first) if first == last else f"{first}-{last}" for first, last in zip(USES, ends, strict=False)
    ]
    return [*spans, f"{USES[-1]}+"]


def _live(reading: Reading, factor: float) -> dict[str, float]:
    """The points of all lines over time at one reading; NaN leaves a gap."""
    status, rates, gap = reading.status, reading.rates, float("nan")
    limit = None if status is None or status.worker is None else status.worker.bandwidth_bytes_per_s
    loaders = () if status is None else status.loaders
    return {
        "time": _axis_time(reading.at_s),
        "size": gap if status is None else status.size_bytes / factor,
        "limit": gap if status is None else status.size_limit / factor,
        "cached": gap if rates is None else rates.cached,
        "trained": gap if rates is None else rates.trained,
        "evicted": gap if rates is None else rates.evicted,
        "fetched": gap if rates is None else rates.fetched_bytes / 1e6,
        "bandwidth": gap if limit is None else limit / 1e6,
        "waits": max((100 * one.epoch_wait_share for one in loaders), default=gap),
    }


def _axis_time(at_s: float) -> float:
    """The time for an axis, in milliseconds: Bokeh shows UTC, and people look at their clocks."""
    return 1000 * (at_s + time.localtime(at_s).tm_gmtoff)


def _figure(title: str, **options: Any) -> Any:
    """A plot that is as wide as its place, and readable on a light and on a dark page."""
    plot: Any = figure(
        title=title, height=210, sizing_mode="stretch_width", toolbar_location=None, tools="", **options
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0.0
    plot.outline_line_color = None
    plot.title.text_color = plot.axis.major_label_text_color = plot.axis.axis_line_color = _GREY
    plot.axis.major_tick_line_color = _GREY
    plot.axis.minor_tick_line_color = None
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = _GREY, 0.2
    plot.y_range.start = 0
    if "x_axis_type" in options:
        plot.xaxis.ticker.desired_num_ticks = 4  # of times, which are long
    plot.yaxis.formatter.use_scientific = False
    return plot


def _line(
    plot: Any, source: ColumnDataSource, name: str, color: str, label: str, dash: str = "solid"
) -> None:
    plot.line("time", name, source=source, color=color, line_width=2, line_dash=dash, legend_label=label)
    legend = plot.legend[0]
    legend.location, legend.orientation = "top_left", "horizontal"
    legend.background_fill_alpha = legend.border_line_alpha = 0.0
    legend.margin = legend.padding = 0
    legend.glyph_height = legend.label_height = 14
    legend.label_text_color, legend.label_text_font_size = _GREY, "12px"
    if legend not in plot.above:
        plot.add_layout(legend, "above")


def head_html(reading: Reading) -> str:
    """The sentence and the table about a cache, as escaped HTML."""
    head = f"<h1>{html.escape(reading.path)}</h1><p>{html.escape(verdict(reading))}</p>"
    status = reading.status
    if status is None:
        return head
    rows = [("filling", status.fill_state), *(("", message) for message, _ in messages(status))]
    rows += [(name, words) for name, words, _ in facts(status, reading.rates)]
    body = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(words)}</dd>" for name, words in rows)
    share = min(1.0, status.size_bytes / max(1, status.size_limit))
    bar = f'<div class="bar"><div style="width: {share:.1%}"></div></div>'
    return f"{head}{bar}<dl>{body}</dl>{_ranks(status)}"


def _ranks(status: CacheStatus) -> str:
    if not status.loaders:
        return ""
    names = ("rank", "pid", "epoch", "samples in it", "batches", "samples/s", "waiting")
    rows = [
        (
            f"{one.rank} of {one.ranks}",
            one.pid,
            one.epoch,
            f"{one.epoch_samples:,}",
            f"{one.batches:,}",
            f"{one.samples_per_s:,.0f}",
            f"{one.epoch_wait_share:.1%}",
        )
        for one in status.loaders
    ]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="ranks"><table><tr>{head}</tr>{body}</table></div>'
