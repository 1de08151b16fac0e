"""The display of a cache's status, once or live, and of the progress of long work.

Data goes to stdout, progress to stderr. Without a terminal, plain lines replace the live display.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cachestream.cli.facts import Activity, RateWindow, facts, messages, one_line, outdated_in_words
from cachestream.errors import WorkerTimeoutError
from cachestream.storage.status import CacheStatus, describe_skipped

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.recovery import VerifyReport
    from cachestream.worker.worker import Worker

_STYLES: Final = {"filling": "green", "complete": "cyan", "full": "yellow", "failed": "bold red"}
_BAR_WIDTH: Final = 28
_LIVE_INTERVAL_S: Final = 0.5
_LINE_INTERVAL_S: Final = 10.0


def status_view(status: CacheStatus, rates: Activity | None = None) -> RenderableType:
    """The status as a table of labelled lines; `rates` are shown instead of the worker's averages."""
    head = Text.assemble(
        (status.path, "bold"), "  ", (status.fill_state, _STYLES.get(status.fill_state, "dim"))
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    # Texts, because a plain string would be read as markup, and names may hold brackets.
    for message, colour in messages(status):
        grid.add_row("", Text(message, colour))
    for label, words, share in facts(status, rates):
        grid.add_row(label, Text(words) if share is None else _with_bar(share, words))
    return Group(head, grid)


def _with_bar(share: float, text: str) -> RenderableType:
    """`text` beside a bar that is full to `share`, or below the bar where there is no room for both."""
    colour = "cyan"  # also of a full bar, which is grey otherwise in 16 colours
    bar = ProgressBar(
        1.0, min(max(share, 0.0), 1.0), _BAR_WIDTH, complete_style=colour, finished_style=colour
    )
    return Columns([bar, Text(text)], padding=(0, 2))


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False)


def _can_draw(console: Console) -> bool:
    """Return whether the console can draw over earlier output, unlike a file or a dumb terminal."""
    return console.is_terminal and not console.is_dumb_terminal


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Report(Protocol):
    """A result that is shown as text or as JSON."""

    def to_dict(self) -> dict[str, Any]: ...


def show(report: Report, *, as_json: bool = False) -> None:
    """Show a report, or the status of a cache, once."""
    if as_json:
        _write(json.dumps(report.to_dict(), indent=2))
    elif isinstance(report, CacheStatus):
        _console().print(status_view(report))
    else:
        _write(str(report))


def watch(cache: Cache, interval_s: float, *, as_json: bool = False) -> None:
    """Show the status every `interval_s` until Ctrl-C: redrawn on a terminal, else a line of text or JSON."""
    rates, console = RateWindow(), _console()
    draws = not as_json and _can_draw(console)
    live = Live(console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), live if draws else nullcontext():
        while True:
            status = cache.status()
            now = rates.add(time.monotonic(), status)
            if draws:
                live.update(status_view(status, now), refresh=True)
            else:
                _write(json.dumps(status.to_dict()) if as_json else one_line(status, now))
            time.sleep(interval_s)


def follow(worker: Worker) -> None:
    """Show the filling on stderr until the pass or the worker has ended, also while it waits for space.

    Raises WorkerError, with the traceback from the background, if it failed.
    """
    rates, console = RateWindow(), _console(stderr=True)
    draws, ended = _can_draw(console), False
    live = Live(console=console, auto_refresh=False)
    with live if draws else nullcontext():
        while not ended:
            ended = _has_ended(worker, _LIVE_INTERVAL_S if draws else _LINE_INTERVAL_S)
            status = worker.status()
            now = rates.add(time.monotonic(), status)
            if draws:
                live.update(status_view(status, now), refresh=True)
            elif not ended:
                console.print(one_line(status, now), soft_wrap=True)


def _has_ended(worker: Worker, timeout_s: float) -> bool:
    """Wait for the end of the pass or of the worker; False at the deadline, or while a full cache waits."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while worker.wait(max(0.0, deadline_s - time.monotonic())):
            if worker.cache.fill_state() != "full" or not worker.is_alive():
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(min(_LIVE_INTERVAL_S, timeout_s))
    except WorkerTimeoutError:
        return False
    return True


def say(line: str) -> None:
    _console(stderr=True).print(line, soft_wrap=True)


def say_result(status: CacheStatus) -> None:
    """Show the result of filling, with the reason where samples are missing."""
    say(one_line(status))
    if outdated := outdated_in_words(status):
        say(outdated)
    if told := describe_skipped(status.failures):
        say(f"{told}; all reasons: cachestream status {status.path}")
    elif status.fill_state == "complete" and status.fill_message:
        say(status.fill_message)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr for the `with` block, moved by calls of `(done, total)`."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = _console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not _can_draw(console)) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def show_verification(report: VerifyReport, *, as_json: bool = False) -> None:
    """Show the result of `verify`: a line for each damaged or missing file, and a summary."""
    if as_json:
        values: dict[str, Any] = {**dataclasses.asdict(report), "ok": report.ok}
        _write(json.dumps(values, indent=2))
        return
    for line in report.corrupt:
        _write(f"corrupt: {line}")
    for shard_id in report.missing:
        _write(f"missing: shard {shard_id}")
    for path in report.orphans:
        _write(f"unknown file: {path}")
    _write(str(report))
