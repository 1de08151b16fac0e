"""Readings of caches, for the page and the metrics; the rates between two of them, and the verdict."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cachestream.cli.facts import Activity, RateWindow
from cachestream.errors import CacheStreamError
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from cachestream.storage.locks import file_identity
from cachestream.storage.snapshots import shard_uses
from cachestream.storage.status import CacheStatus
from cachestream.storage.telemetry import read_history

INTERVAL_S: Final = 2.0  # between two looks
_KEPT: Final = 900  # looks: half an hour
_FRESHNESS_S: Final = 20.0  # between two looks at all shards
_WAITS: Final = 0.02  # a trainer that waits for less of its time is not held up
USES: Final = (0, 1, 2, 3, 5, 9, 17)  # the first number of uses of each class of samples


@dataclass(frozen=True, slots=True)
class Reading:
    """A cache at one moment: its status, or the `problem` that kept it from being read, in one sentence.

    `at_s`: seconds since 1970. `rates` are None at the first look; `freshness`: see
    `read_freshness`.
    """

    path: str
    at_s: float
    status: CacheStatus | None
    problem: str = ""
    rates: Activity | None = None
    freshness: tuple[int, ...] | None = None


def verdict(reading: Reading) -> str:
    """The bottleneck of the training over a cache, or the problem of its filling, in one sentence."""
    status = reading.status
    if status is None:
        return reading.problem
    for message in (status.disk_message, status.remote_message):
        if message:
            return f"The filling is held up: {message}."
    if status.fill_state == "failed":
        return f"The filling has failed: {status.fill_message}."
    waits = max((loader.epoch_wait_share for loader in status.loaders), default=None)
    shares = [] if status.worker is None else status.worker.totals.shares
    stage = f"the {shares[0][0]} takes {shares[0][1]:.0%} of its processes' time" if shares else ""
    if waits is None:
        if status.worker is None:
            return "Nobody fills the cache, and nobody trains on it."
        return f"Nobody trains on the cache yet; in its filling, {stage}." if stage else "The filling begins."
    if waits < _WAITS:
        return f"The model is the bottleneck: the trainer waits for data {waits:.1%} of its time."
    waiting = f"The trainer waits for data {waits:.0%} of its time"
    why = "so reading it, or the batch_transform, is the bottleneck"
    if status.fill_state in ("complete", "full"):
        return f"{waiting}: the cache is {status.fill_state}, {why}."
    if status.worker is None:
        return f"{waiting}: nobody fills the cache, {why}."
    return f"{waiting}, while the cache fills: {stage or 'the filling begins'}."


class CacheWatch:
    """Readings of the cache at `path`, which is opened once it exists. Used by one thread."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._directory = Directory(os.path.realpath(os.path.expanduser(path)))
        self.path = self._directory.root
        self.readings: deque[Reading] = deque(maxlen=_KEPT)
        self._clock, self._rates = clock, RateWindow()
        self._cache: Cache | None = None
        self._freshness: tuple[int, ...] | None = None
        self._fresh_at_s = -math.inf

    def look(self) -> Reading:
        """The reading of this moment; the last one if it is less than a second old."""
        now_s = self._clock()
        if self.readings and 0 <= now_s - self.readings[-1].at_s < 0.5 * INTERVAL_S:
            return self.readings[-1]
        reading = self._read(now_s)
        reading = replace(reading, rates=self._rates.add(now_s, reading.status))
        self.readings.append(reading)
        return reading

    def _read(self, now_s: float) -> Reading:
        try:
            found = file_identity(self._directory.catalogue)
            if self._cache is not None and self._cache.catalogue.identity != found:
                self.close()  # it is gone, or another cache is in its place
            if found is None:
                was_here = any(one.status is not None for one in self.readings)
                lost = "The cache is gone, or is being deleted" if was_here else "There is no cache yet"
                return Reading(self.path, now_s, None, f"{lost}: {self.path}.")
            if self._cache is None:
                self._cache = Cache(self.path)
            status = self._cache.status()
            if now_s - self._fresh_at_s >= _FRESHNESS_S:
                self._freshness, self._fresh_at_s = read_freshness(self._cache), now_s
        except (CacheStreamError, OSError) as error:  # it may be deleted at any moment
            self.close()
            return Reading(self.path, now_s, None, f"{type(error).__name__}: {error}")
        return Reading(self.path, now_s, status, freshness=self._freshness)

    def history(self) -> Any:
        """The recorded history of the cache's size: rows of `telemetry.ROW`."""
        return read_history(self._directory.worker_file("history"))

    def close(self) -> None:
        """Close the cache. The next look opens the one that is there by then."""
        self._fresh_at_s = -math.inf
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def read_freshness(cache: Cache) -> tuple[int, ...] | None:
    """The numbers of cached samples that were used 0, 1, 2, 3 to 4, … times, as `USES`; None without any."""
    ids, counts, uses = shard_uses(cache.catalogue)
    if not len(ids):
        return None
    places = np.searchsorted(USES, uses, side="right") - 1
    by_uses = np.bincount(places, weights=counts, minlength=len(USES))
    return tuple(int(count) for count in by_uses)
