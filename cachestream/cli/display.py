"""The display of a cache's status, once or live, and of the progress of long work.

Data goes to stdout, progress to stderr. Without a terminal, plain lines replace the live display.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cachestream.config import format_size
from cachestream.errors import WorkerTimeoutError
from cachestream.storage.status import CacheStatus, WorkerStatus, describe_outdated, describe_skipped

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.recovery import VerifyReport
    from cachestream.storage.telemetry import Totals
    from cachestream.worker.worker import Worker

_STYLES: Final = {"filling": "green", "complete": "cyan", "full": "yellow", "failed": "bold red"}
_REASONS_SHOWN: Final = 5
_BAR_WIDTH: Final = 28
_GAP: Final = 2
_RATES_S: Final = 10.0  # rates are means over so long
_LIVE_INTERVAL_S: Final = 0.5
_LINE_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of the worker: samples cached and bytes fetched, a second."""

    samples_per_s: float
    fetched_bytes_per_s: float

    def __str__(self) -> str:
        return f"{self.samples_per_s:,.0f} samples/s, {format_size(self.fetched_bytes_per_s)}/s fetched"


class RateWindow:
    """Rates over the last ten seconds, from statuses as they come."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, Totals]] = deque()

    def add(self, now_s: float, worker: WorkerStatus | None) -> Rates | None:
        """The rates up to now; None while there is no worker, or only one look at it."""
        if worker is None or (self._seen and self._seen[-1][1] != worker.pid):
            self._seen.clear()
        if worker is None:
            return None
        self._seen.append((now_s, worker.pid, worker.totals))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > _RATES_S:
            self._seen.popleft()
        then_s, _, then = self._seen[0]
        if now_s <= then_s:
            return None
        span_s = now_s - then_s
        return Rates(
            (worker.totals.samples - then.samples) / span_s,
            (worker.totals.fetched_bytes - then.fetched_bytes) / span_s,
        )


def describe_duration(seconds: float) -> str:
    """A time for a person: "42 s", "12 min", "3 h 5 min", "2 d 4 h"."""
    whole = int(seconds)
    for unit_s, unit, below_s, below in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min")):
        if whole >= unit_s:
            rest = whole % unit_s // below_s
            return f"{whole // unit_s} {unit} {rest} {below}" if rest else f"{whole // unit_s} {unit}"
    return f"{whole // 60} min" if whole >= 60 else f"{whole} s"


def remaining_s(status: CacheStatus) -> float | None:
    """Seconds to the end of the pass at the average speed so far; None if they cannot be told."""
    worker, done = status.worker, status.pass_done
    if worker is None or done is None or status.num_units is None or not worker.totals.units or done >= 1:
        return None
    return status.num_units * (1 - done) * worker.uptime_s / worker.totals.units


def bottleneck(totals: Totals) -> list[tuple[str, float]]:
    """Shares of the sampling processes' time by stage, the largest first; empty before any work."""
    stages = {
        "remote": totals.fetch_wait_s,
        "transform": totals.transform_s,
        "packing": totals.pack_s,
        "disk": totals.publish_s,
        "waiting for space": totals.space_wait_s,
    }
    whole_s = sum(stages.values())
    ordered = sorted(stages.items(), key=lambda item: -item[1])
    return [(stage, spent_s / whole_s) for stage, spent_s in ordered] if whole_s > 0 else []


def one_line(status: CacheStatus, rates: Rates | None = None) -> str:
    """The status as one line of a log."""
    skipped = f", {status.skipped} skipped" if status.skipped else ""
    why = status.fill_message if status.fill_state in ("filling", "full") else ""
    told = "".join(f"; {message}" for message in (why, status.disk_message, status.remote_message) if message)
    return f"{status}{skipped}{f', {rates}' if rates else ''}{told}"


def status_view(status: CacheStatus, rates: Rates | None = None) -> RenderableType:
    """The status as a table of labelled lines; `rates` are shown instead of the worker's averages."""
    head = Text.assemble(
        (status.path, "bold"), "  ", (status.fill_state, _STYLES.get(status.fill_state, "dim"))
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, line in _lines(status, rates):
        # A plain string would be read as markup, and names may hold brackets.
        grid.add_row(label, Text(line) if isinstance(line, str) else line)
    return Group(head, grid)


def _describe_outdated(status: CacheStatus) -> str:
    return describe_outdated(status.outdated_samples, status.num_samples, is_replaced=status.is_replacing)


def _lines(status: CacheStatus, rates: Rates | None) -> Iterable[tuple[str, RenderableType]]:
    messages = (
        (status.fill_message, "red" if status.fill_state == "failed" else ""),
        (status.disk_message, "red"),
        (status.remote_message, "yellow"),
        (_describe_outdated(status), "yellow"),
    )
    yield from (("", Text(message, style)) for message, style in messages if message)
    yield "cache", _with_bar(status.size_bytes / max(status.size_limit, 1), _sizes(status))
    held_out = "" if status.holdout is None else f", {status.held_out_samples:,} of them held out"
    yield (
        "samples",
        f"{status.num_samples:,} in {_count(status.num_shards, 'shard')}{held_out}{_evicted(status)}",
    )
    if status.pass_number:
        yield f"pass {status.pass_number}", _progress(status)
    yield "epochs", _epochs(status)
    if status.worker is not None:
        yield from _lines_of_worker(status.worker, rates)
    if status.quarantined:
        yield "quarantined", f"{_count(status.quarantined, 'damaged shard')}, put aside"
    if status.skipped:
        yield "skipped", _skipped(status)
    yield "eviction", f"{status.eviction}, {format_size(status.min_free)} of the disk stay free"
    if status.schema:
        yield "schema", status.schema
    if status.source:
        yield "source", status.source


def _with_bar(share: float, text: str) -> RenderableType:
    """`text` beside a bar that is full to `share`, or below the bar where there is no room for both."""
    bar = ProgressBar(total=1.0, completed=min(max(share, 0.0), 1.0), width=_BAR_WIDTH)
    return Columns([bar, Text(text)], padding=(0, _GAP))


def _sizes(status: CacheStatus) -> str:
    text = f"{format_size(status.size_bytes)} of {format_size(status.size_limit)}"
    return f"{text}, {format_size(status.reserved_bytes)} being written" if status.reserved_bytes else text


def _evicted(status: CacheStatus) -> str:
    unused = f", {status.evicted_unused_samples:,} of them unused" if status.evicted_unused_samples else ""
    return f", {status.evicted_samples:,} evicted so far{unused}" if status.evicted_samples else ""


def _progress(status: CacheStatus) -> RenderableType:
    if status.pass_done is None:
        return f"{status.num_units:,} units, and the listing goes on" if status.is_listing else "endless"
    units = f" of {status.num_units:,} units" if status.num_units is not None else ""
    left_s = remaining_s(status)
    left = f", about {describe_duration(left_s)} left" if left_s is not None else ""
    return _with_bar(status.pass_done, f"{status.pass_done:.1%}{units}{left}")


def _epochs(status: CacheStatus) -> str:
    taken = f"{_count(status.snapshots, 'snapshot')} taken"
    if not status.leases:
        return f"{taken}, none in use"
    return f"{taken}, {status.leases} in use, which hold {format_size(status.leased_bytes)}"


def _lines_of_worker(worker: WorkerStatus, rates: Rates | None) -> Iterable[tuple[str, RenderableType]]:
    yield "worker", _worker(worker)
    if not worker.states:
        return
    yield "speed", f"{rates or Rates(worker.samples_per_s, worker.fetched_bytes_per_s)}"
    stages = bottleneck(worker.totals)
    if stages:
        yield "time goes to", ", ".join(f"{name} {share:.0%}" for name, share in stages if share >= 0.005)


def _worker(worker: WorkerStatus) -> str:
    states = {state: worker.states.count(state) for state in worker.states}
    doing = (
        ", ".join(f"{count} {state}" for state, count in states.items())
        or "unknown, of another version of cachestream"
    )
    restarts = f", {_count(worker.restarts, 'restart')}" if worker.restarts else ""
    return f"pid {worker.pid}, up {describe_duration(worker.uptime_s)}; processes: {doing}{restarts}"


def _skipped(status: CacheStatus) -> str:
    lines = [_count(status.skipped, "sample")]
    for failure in status.failures[:_REASONS_SHOWN]:
        example = f" (first: {failure.example})" if failure.example else ""
        lines.append(f"{failure.count:,} × {failure.kind}: {failure.reason}{example}")
    more = len(status.failures) - _REASONS_SHOWN
    if more > 0:
        lines.append(f"{_count(more, 'more reason')}; all of them with --json")
    return "\n".join(lines)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


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
            now = rates.add(time.monotonic(), status.worker)
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
            now = rates.add(time.monotonic(), status.worker)
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
    if outdated := _describe_outdated(status):
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
