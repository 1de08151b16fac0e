"""The metrics of caches in Prometheus' text format, from the same readings as the page.

Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): base units in the name,
and `_total` at the end of what only grows.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cachestream.dashboard.readings import Reading
from cachestream.storage.status import CacheStatus, WorkerStatus
from cachestream.storage.telemetry import STATE_NAMES, LoaderReport

Subject = TypeVar("Subject")
_Table = tuple[tuple[str, str, Callable[[Subject], float | None]], ...]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# Name, description, and the value; names that end in "_total" are counters. All with the label `cache`.
_OF_CACHE: Final[_Table[CacheStatus]] = (
    ("cache_bytes", "Disk usage of the whole cache.", lambda s: s.size_bytes),
    ("cache_limit_bytes", "The size limit.", lambda s: s.size_limit),
    ("cache_samples", "Samples in the cache.", lambda s: s.num_samples),
    ("cache_shards", "Shards in the cache.", lambda s: s.num_shards),
    ("cache_leased_bytes", "Bytes of shards that live epochs hold.", lambda s: s.leased_bytes),
    ("cache_held_out_samples", "Samples held out of training.", lambda s: s.held_out_samples),
    ("cache_evicted_samples_total", "Samples evicted.", lambda s: s.evicted_samples),
    (
        "cache_evicted_unused_samples_total",
        "Samples evicted before an epoch used them.",
        lambda s: s.evicted_unused_samples,
    ),
    ("cache_failed_samples_total", "Samples that could not be cached.", lambda s: s.skipped),
    ("cache_quarantined_shards_total", "Damaged shards put aside.", lambda s: s.quarantined),
    ("cache_snapshots_total", "Snapshots taken for epochs.", lambda s: s.snapshots),
    ("cache_epoch_waits_total", "Waits of a full cache for the next epoch.", lambda s: s.epoch_waits),
    ("fill_pass", "Passes over the remote, with the current one.", lambda s: s.pass_number),
    ("fill_pass_done_ratio", "Share of the current pass that is done.", lambda s: s.pass_done),
    ("worker_up", "1 while a worker runs.", lambda s: int(s.worker is not None)),
)
# These exist while a worker runs.
_OF_WORKER: Final[_Table[WorkerStatus]] = (
    ("worker_restarts_total", "Restarts of sampling processes.", lambda w: w.restarts),
    ("worker_samples_total", "Samples cached by this worker.", lambda w: w.totals.samples),
    ("worker_fetched_bytes_total", "Bytes fetched from the remote.", lambda w: w.totals.fetched_bytes),
    ("worker_written_bytes_total", "Bytes of shards written.", lambda w: w.totals.written_bytes),
    ("worker_retries_total", "Attempts to read that failed and were repeated.", lambda w: w.totals.retries),
    (
        "worker_bandwidth_limit_bytes_per_second",
        "The bandwidth limit, if there is one.",
        lambda w: w.bandwidth_bytes_per_s,
    ),
)
_STAGES: Final = {
    "fetch_wait_s": "fetch",
    "transform_s": "transform",
    "pack_s": "pack",
    "publish_s": "publish",
    "space_wait_s": "wait_for_space",
}
# With the labels `rank`, `pid` and `loader`.
_OF_LOADER: Final[_Table[LoaderReport]] = (
    ("loader_epoch", "The running epoch, from 0.", lambda one: one.epoch),
    ("loader_epoch_samples", "Samples that the epoch is drawn from.", lambda one: one.epoch_samples),
    ("loader_batches_total", "Batches delivered.", lambda one: one.batches),
    ("loader_samples_total", "Samples delivered.", lambda one: one.samples),
    ("loader_skipped_samples_total", "Samples of damaged shards, left out.", lambda one: one.skipped),
    ("loader_wait_seconds_total", "Time that the trainer waited for data.", lambda one: one.wait_s),
    ("loader_wait_ratio", "Share of the epoch's time spent waiting.", lambda one: one.epoch_wait_share),
)


class _Families(Collector):
    """Metric families by name; a name that ends in "_total" is a counter."""

    def __init__(self) -> None:
        self._found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def add(self, name: str, text: str, labels: dict[str, str], value: float | None) -> None:
        """Add a value; None adds nothing."""
        if value is None:
            return
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        full = f"cachestream_{name}"
        if full not in self._found:
            self._found[full] = family(full, text, labels=list(labels))
        self._found[full].add_metric(list(labels.values()), value)

    def collect(self) -> Iterator[Metric]:
        return iter(self._found.values())


def _add_status(families: _Families, cache: str, status: CacheStatus) -> None:
    labels = {"cache": cache}
    for name, text, value in _OF_CACHE:
        families.add(name, text, labels, value(status))
    if status.worker is None:
        return
    for name, text, of_worker in _OF_WORKER:
        families.add(name, text, labels, of_worker(status.worker))
    for state in STATE_NAMES:
        count = status.worker.states.count(state)
        text = "Sampling processes by what they do."
        families.add("worker_processes", text, labels | {"state": state}, count)
    for field, stage in _STAGES.items():
        text = "Time of the sampling processes by stage."
        spent_s = getattr(status.worker.totals, field)
        families.add("worker_stage_seconds_total", text, labels | {"stage": stage}, spent_s)


def _add_loaders(families: _Families, cache: str, loaders: Iterable[LoaderReport]) -> None:
    numbers = Counter[tuple[int, int]]()  # of loaders so far, by process
    for loader in loaders:
        process = loader.rank, loader.pid
        labels = {"cache": cache, "rank": str(loader.rank), "pid": str(loader.pid)}
        labels["loader"] = str(numbers[process])
        numbers[process] += 1
        for name, text, value in _OF_LOADER:
            families.add(name, text, labels, value(loader))


def metrics_text(readings: Iterable[Reading]) -> bytes:
    """The metrics of `readings` in Prometheus' text format."""
    families = _Families()
    for reading in readings:
        # The format is UTF-8, and a path may be any bytes.
        cache = os.fsencode(reading.path).decode(errors="backslashreplace")
        text = "1 if the cache could be read."
        families.add("cache_up", text, {"cache": cache}, int(reading.status is not None))
        if reading.status is not None:
            _add_status(families, cache, reading.status)
            _add_loaders(families, cache, reading.status.loaders)
    text_of_all: bytes = generate_latest(families)
    return text_of_all
