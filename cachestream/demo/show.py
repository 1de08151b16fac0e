"""The demo's display: a line an epoch, and on a terminal bars below them that move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cachestream.config import format_size
from cachestream.demo.messages import EpochDone, EpochProgress
from cachestream.storage.status import CacheStatus

if TYPE_CHECKING:
    from typing_extensions import Self


_BAR_WIDTH: Final = 26
# Heading and width of each column.
_COLUMNS: Final = (
    ("epoch", 5), ("samples", 7), ("cached", 6), ("remote seen", 11), ("reuse", 5),
    ("samples/s", 9), ("wait", 5), ("gap", 6), ("accuracy", 8),
)  # fmt: skip


class Screen:
    """Lines on stdout; on a terminal also the cache, the remote and the epoch as bars. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._what = ""
        self._done, self._total = 0, 0
        self._status: CacheStatus | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """A line that stays."""
        self._console.print(Text(line, style), soft_wrap=not self._console.is_terminal)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """What goes on now, and how far it is."""
        self._what, self._done, self._total = what, done, total
        self._refresh()

    def progress(self, event: EpochProgress) -> None:
        self.doing(f"epoch {event.epoch}", event.done, event.total)

    def status(self, status: CacheStatus) -> None:
        """How the cache is now."""
        self._status = status
        self._refresh()

    def heading(self) -> None:
        self.say("  ".join(f"{name:>{width}}" for name, width in _COLUMNS), "bold")

    def epoch(self, event: EpochDone) -> None:
        values = (
            f"{event.epoch}", f"{event.samples:,}", f"{event.cached:,}", f"{event.seen:.0%}",
            f"{event.reuse:.1f}×", f"{event.samples_per_s:,.0f}", f"{event.wait:.1%}",
            f"{event.gap_s * 1000:,.0f} ms", f"{event.accuracy:.1%}",
        )  # fmt: skip
        self.say("  ".join(f"{value:>{width}}" for value, (_, width) in zip(values, _COLUMNS, strict=True)))

    def _refresh(self) -> None:
        if self._live.is_started:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(width=16)
        rows.add_column(width=_BAR_WIDTH)
        rows.add_column()
        status = self._status
        if status is not None:
            size = f"{format_size(status.size_bytes)} of {format_size(status.size_limit)}"
            held = Text(f"{size}, {status.num_samples:,} samples")
            rows.add_row("cache", _bar(status.size_bytes, status.size_limit), held)
            done = status.pass_done or 0.0
            come = Text(f"{done:.0%} fetched, {status.evicted_samples:,} evicted")
            rows.add_row(f"remote, pass {max(1, status.pass_number)}", _bar(done, 1), come)
        if self._what:
            share = f"{self._done / self._total:.0%}" if self._total else ""
            rows.add_row(Text(self._what), _bar(self._done, self._total), Text(share))
        return rows


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1e-9), completed=min(done, total), width=_BAR_WIDTH)
