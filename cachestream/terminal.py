"""What the command line shows: one look at a cache, a live one, and progress where work is long.

Data goes to stdout, progress to stderr. Where these are no terminals, lines take the place of what
would be drawn over and over.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cachestream.errors import WorkerTimeoutError
from cachestream.report import RateWindow, one_line, status_view
from cachestream.sampling.worker import Worker
from cachestream.storage.cache import Cache
from cachestream.storage.status import CacheStatus, VerifyReport, describe_skipped

__all__ = ["follow", "one_line", "progress", "say", "say_what_there_is", "show", "show_verification", "watch"]

_LOOK_S: Final = 0.5
_LINE_S: Final = 10.0


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False)


def _can_draw(console: Console) -> bool:
    """Whether what was written can be drawn over; on a dumb terminal only the last state would be seen."""
    return console.is_terminal and not console.is_dumb_terminal


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(status: CacheStatus, *, as_json: bool = False) -> None:
    """One look at a cache."""
    if as_json:
        _write(json.dumps(status.to_dict(), indent=2))
    else:
        _console().print(status_view(status))


def watch(cache: Cache, interval_s: float, *, as_json: bool = False) -> None:
    """Look again every `interval_s`, until Ctrl-C: drawn on a terminal, else a line (of JSON) each time."""
    rates, console, pause = RateWindow(), _console(), threading.Event()
    try:
        if as_json or not _can_draw(console):
            while True:
                status = cache.status()
                now = rates.add(time.monotonic(), status.worker)
                _write(json.dumps(status.to_dict()) if as_json else one_line(status, now))
                pause.wait(interval_s)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                status = cache.status()
                now = rates.add(time.monotonic(), status.worker)
                live.update(status_view(status, now), refresh=True)
                pause.wait(interval_s)
    except KeyboardInterrupt:
        return


def say_what_there_is(status: CacheStatus) -> None:
    """What filling has come to, and why there is not more."""
    say(one_line(status))
    if told := describe_skipped(status.failures):
        say(f"{told}; all reasons: cachestream status {status.path}")
    elif status.fill_state == "complete" and status.fill_message:
        say(status.fill_message)


def follow(worker: Worker) -> None:
    """Show the filling on stderr until the worker has nothing left to do, or has ended; one of a full cache goes on.

    Raises WorkerError, with the traceback from the background, if it failed.
    """
    rates, console = RateWindow(), _console(stderr=True)
    if _can_draw(console):
        with Live(console=console, auto_refresh=False) as live:
            ended = False
            while not ended:
                ended = _has_ended(worker, _LOOK_S)
                status = worker.status()
                live.update(status_view(status, rates.add(time.monotonic(), status.worker)), refresh=True)
    else:
        while not _has_ended(worker, _LINE_S):
            status = worker.status()
            console.print(one_line(status, rates.add(time.monotonic(), status.worker)), soft_wrap=True)


def _has_ended(worker: Worker, timeout_s: float) -> bool:
    """Wait for the end of the pass or of the worker; False at the deadline, also while a full cache rests."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while worker.wait(max(0.0, deadline_s - time.monotonic())):
            if worker.cache.fill_state() != "full" or not worker.is_alive():
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(min(_LOOK_S, timeout_s))
    except WorkerTimeoutError:
        return False
    return True


def say(line: str) -> None:
    """One line on stderr."""
    _console(stderr=True).print(line, soft_wrap=True)


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
    """What `verify` found: a summary, and a line for each damaged or missing thing."""
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
