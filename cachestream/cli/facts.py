"""The status of a cache in words and rates, for the terminal, for logs and for the dashboard."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cachestream.config import format_duration, format_size
from cachestream.storage.status import CacheStatus, WorkerStatus, describe_outdated

_REASONS_SHOWN: Final = 5
_RATES_S: Final = 10.0  # rates are means over so long


@dataclass(frozen=True, slots=True)
class Activity:
    """Samples cached, trained on (by all ranks) and evicted, and bytes fetched, in a second."""

    cached: float
    trained: float
    evicted: float
    fetched_bytes: float

    def __str__(self) -> str:
        shown = f"{self.cached:,.0f} samples/s, {format_size(self.fetched_bytes)}/s fetched"
        others = (("trained on", self.trained), ("evicted", self.evicted))
        return shown + "".join(f", {rate:,.0f} samples/s {what}" for what, rate in others if rate >= 0.5)


class RateWindow:
    """Rates over the last ten seconds, from statuses as they come."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, CacheStatus]] = deque()

    def add(self, now_s: float, status: CacheStatus | None) -> Activity | None:
        """The rates up to now; None without a status, and for the first one."""
        if status is None:
            self._seen.clear()
            return None
        self._seen.append((now_s, status))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > _RATES_S:
            self._seen.popleft()
        return rates_between(*self._seen[0], *self._seen[-1])


def rates_between(then_s: float, then: CacheStatus, now_s: float, now: CacheStatus) -> Activity | None:
    """The rates between two looks at a cache. A worker or loader that came or went counts nothing."""
    if now_s <= then_s:
        return None
    cached = fetched = 0
    if then.worker is not None and now.worker is not None and then.worker.pid == now.worker.pid:
        cached = now.worker.totals.samples - then.worker.totals.samples
        fetched = now.worker.totals.fetched_bytes - then.worker.totals.fetched_bytes
    known = _trained(then)
    trained = sum(
        max(0, sum(samples) - sum(known[process]))
        for process, samples in _trained(now).items()
        if len(known[process]) == len(samples)
    )
    evicted = now.evicted_samples - then.evicted_samples
    return Activity(*(max(0, number) / (now_s - then_s) for number in (cached, trained, evicted, fetched)))


def _trained(status: CacheStatus) -> defaultdict[tuple[int, int], list[int]]:
    """Samples delivered by each loader, by process and rank. One process may have a loader for each split."""
    found = defaultdict[tuple[int, int], list[int]](list)
    for loader in status.loaders:
        found[loader.pid, loader.rank].append(loader.samples)
    return found


def remaining_s(status: CacheStatus) -> float | None:
    """Seconds to the end of the pass at the average speed so far; None if they cannot be told."""
    worker, done = status.worker, status.pass_done
    if worker is None or done is None or status.num_units is None or not worker.totals.units or done >= 1:
        return None
    return status.num_units * (1 - done) * worker.uptime_s / worker.totals.units


def one_line(status: CacheStatus, rates: Activity | None = None) -> str:
    """The status as one line of a log."""
    skipped = f", {status.skipped} skipped" if status.skipped else ""
    why = status.fill_message if status.fill_state in ("filling", "full") else ""
    told = "".join(f"; {message}" for message in (why, status.disk_message, status.remote_message) if message)
    return f"{status}{skipped}{f', {rates}' if rates and status.worker else ''}{told}"


def outdated_in_words(status: CacheStatus) -> str:
    """A sentence on the samples that another transform has made; "" if there are none."""
    return describe_outdated(status.outdated_samples, status.num_samples, is_replaced=status.is_replacing)


def messages(status: CacheStatus) -> Iterator[tuple[str, str]]:
    """The sentences that a reader should see first, each with the colour of its urgency."""
    found = (
        (status.fill_message, "red" if status.fill_state == "failed" else ""),
        (status.disk_message, "red"),
        (status.remote_message, "yellow"),
        (outdated_in_words(status), "yellow"),
    )
    yield from ((message, colour) for message, colour in found if message)


def facts(status: CacheStatus, rates: Activity | None) -> Iterator[tuple[str, str, float | None]]:
    """The lines of a status: a label, words, and the share that a bar beside them shows, if any.

    `rates` are shown instead of the worker's averages.
    """
    size = f"{format_size(status.size_bytes)} of {format_size(status.size_limit)}"
    writing = f", {format_size(status.reserved_bytes)} being written" if status.reserved_bytes else ""
    yield "cache", size + writing, status.size_bytes / max(status.size_limit, 1)
    held_out = "" if status.holdout is None else f", {status.held_out_samples:,} of them held out"
    unused = f", {status.evicted_unused_samples:,} of them unused" if status.evicted_unused_samples else ""
    evicted = f", {status.evicted_samples:,} evicted so far{unused}" if status.evicted_samples else ""
    yield (
        "samples",
        f"{status.num_samples:,} in {_count(status.num_shards, 'shard')}{held_out}{evicted}",
        None,
    )
    if status.pass_number:
        yield f"pass {status.pass_number}", _progress(status), status.pass_done
    in_use = f"{status.leases} in use, which hold {format_size(status.leased_bytes)}"
    in_use = in_use if status.leases else "none in use"
    yield "epochs", f"{_count(status.snapshots, 'snapshot')} taken, {in_use}", None
    if (worker := status.worker) is not None:
        yield "worker", _worker(worker), None
        if worker.states and rates is None:
            rates = Activity(worker.samples_per_s, 0.0, 0.0, worker.fetched_bytes_per_s)
    if rates is not None:
        yield "speed", str(rates), None
    if worker is not None and (shares := worker.totals.shares):
        shown = (f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        yield "time goes to", ", ".join(shown), None
    if status.quarantined:
        yield "quarantined", f"{_count(status.quarantined, 'damaged shard')}, put aside", None
    if status.skipped:
        yield "skipped", _skipped(status), None
    yield "eviction", f"{status.eviction}, {format_size(status.min_free)} of the disk stay free", None
    if status.schema:
        yield "schema", status.schema, None
    if status.source:
        yield "source", status.source, None


def _progress(status: CacheStatus) -> str:
    if status.pass_done is None:
        return f"{status.num_units:,} units, and the listing goes on" if status.is_listing else "endless"
    units = f" of {status.num_units:,} units" if status.num_units is not None else ""
    left_s = remaining_s(status)
    left = f", about {format_duration(left_s)} left" if left_s is not None else ""
    return f"{status.pass_done:.1%}{units}{left}"


def _worker(worker: WorkerStatus) -> str:
    doing = ", ".join(f"{count} {state}" for state, count in Counter(worker.states).items())
    doing = doing or "unknown, of another version of cachestream"
    restarts = f", {_count(worker.restarts, 'restart')}" if worker.restarts else ""
    return f"pid {worker.pid}, up {format_duration(worker.uptime_s)}; processes: {doing}{restarts}"


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
