"""The plan of a run: a simulation of filling and training, by the library's own policies, without any I/O.

The sizes of shards, the victims of eviction, the shards that an epoch leaves out and those that it is drawn
from are chosen by the functions that a real cache uses. Time passes in events: a shard is published, an epoch
begins. Weeks of training take seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachestream.config import format_duration, format_size
from cachestream.errors import ConfigError
from cachestream.schema import IntArray, ShardRow
from cachestream.storage.eviction import Room, bytes_to_retire, choose_retiring, choose_victims
from cachestream.storage.reservations import HEADROOM_BYTES
from cachestream.storage.snapshots import select_shards
from cachestream.tools.diagnose import Stages, bullets
from cachestream.worker.sampling.shard_writer import max_age_s, target_bytes

_MOST_EPOCHS: Final = 20_000
# Simulated after all has been seen, or after an endless source has filled the cache.
_LATER_EPOCHS: Final = 20
_TURNOVERS: Final = (0.1, 0.25, 0.5, 0.75)
_START_S: Final = 1.0  # of a worker
_ENDLESS: Final = 1 << 50  # samples: more than any run trains on
_BETTER: Final = 0.9  # advice must bring at least a tenth


@dataclass(frozen=True, slots=True)
class Setup:
    """The run that is planned. Sizes in bytes, times in seconds.

    `num_samples` are on the remote (None: endless); `fetched_bytes` of each are fetched, and `cached_bytes`
    kept. The background brings `fill_per_s` samples a second, the first after `first_s`. The trainer takes a
    batch every `step_s`, for `duration_s` in all. The cache evicts by "lru".
    """

    num_samples: int | None
    fetched_bytes: float
    cached_bytes: float
    fill_per_s: float
    size_limit: int
    batch_size: int
    step_s: float
    duration_s: float
    first_s: float = 1.0
    turnover: float = 0.25
    min_samples: int = 0
    num_workers: int = 4
    shard_bytes: int = 64_000_000

    def check(self) -> None:
        """Raise ConfigError for a run that cannot be simulated."""
        numbers = asdict(self) | {"num_samples": self.whole}
        for name in ("num_samples", "cached_bytes", "fill_per_s", "size_limit", "batch_size", "step_s"):
            if not 0 < numbers[name] < math.inf:
                raise ConfigError(f"{name}={numbers[name]!r}: give a number above 0")
        if self.size_limit - HEADROOM_BYTES < self.batch_size * self.cached_bytes:
            raise ConfigError(
                f"a batch takes {format_size(self.batch_size * self.cached_bytes)}, more than a cache of "
                f"{format_size(self.size_limit)} holds: raise the limit, or take smaller batches"
            )

    @property
    def whole(self) -> int:
        """The samples on the remote; of an endless one, more than any run trains on."""
        return _ENDLESS if self.num_samples is None else self.num_samples


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """An epoch that begins at `at_s`, over `samples` samples.

    By its end, `seen` samples of the remote have been trained on.
    """

    at_s: float
    samples: int
    seen: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The course of a run; times in seconds from its begin, None for what does not come.

    `full_s`: the cache is full for the first time. `complete_s`: it holds all of the remote. `seen`: the
    samples of the remote that have been trained on, `seen_share` of all, which is reached at `seen_s`; None
    where it is endless. `uses`: how often a sample that was seen is trained on, on average. `waited_s`: the
    trainer waits for samples. `fetched_bytes`: the egress.
    """

    setup: Setup
    epochs: tuple[PlannedEpoch, ...]
    first_batch_s: float | None
    full_s: float | None
    complete_s: float | None
    seen_s: float | None
    seen: float
    seen_share: float | None
    uses: float
    waited_s: float
    fetched_bytes: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Labelled lines of 80 columns."""
        setup, last = self.setup, self.epochs[-1] if self.epochs else None
        first, middle = (self.epochs[place].samples if last else 0 for place in (0, len(self.epochs) // 2))
        remote, seen = "endless", f"{self.seen:,.0f} samples"
        if setup.num_samples is not None:
            remote = f"{setup.num_samples:,} samples, {format_size(setup.num_samples * setup.fetched_bytes)}"
            seen = f"{format_duration(self.seen_s)}; {self.seen_share:.1%} of it"
        how_much = "seen" if setup.num_samples is None else "all seen"
        filled = ("cache full", self.full_s) if self.complete_s is None else ("all cached", self.complete_s)
        lines = {
            "remote": remote,
            "filling": f"{setup.fill_per_s:,.0f} samples/s, "
            f"{format_size(setup.fill_per_s * setup.fetched_bytes)}/s from the remote",
            "first batch": format_duration(self.first_batch_s),
            "epochs": f"{first:,} samples at first, then {middle:,}, {last.samples if last else 0:,} at last",
            filled[0]: format_duration(filled[1]),
            how_much: f"{seen} in {format_duration(setup.duration_s)}",
            "uses": f"{self.uses:,.1f} times each sample that was seen",
            "waiting": f"{format_duration(self.waited_s)}, "
            f"{self.waited_s / setup.duration_s:.2%} of the time",
            "egress": format_size(self.fetched_bytes),
        }
        return "\n".join(f"{name:13}{line}" for name, line in lines.items())


class _Simulation:
    """The state of a simulated cache, its filling and its trainer."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._usable_bytes = setup.size_limit - HEADROOM_BYTES
        self._table: IntArray = np.empty((0, 5), np.int64)  # the fields of ShardRow, by shards
        self._fresh: list[tuple[int, ...]] = []  # published since the last epoch began
        self._gone: list[int] = []  # evicted since then
        self._evictable: deque[ShardRow] = deque()  # used and not leased, the first to evict first
        self._leased: IntArray = np.empty(0, np.int64)
        self._used_bytes = self._last_id = self._clock = 0
        self._left_in_pass = setup.whole
        self._last_of_first_pass = math.inf
        # For each process the time at which it publishes its open shard; those that wait for space apart.
        self._open = [self._next_shard(process, 0, setup.first_s) for process in range(setup.num_workers)]
        heapq.heapify(self._open)
        self._waiting: list[_Publication] = []
        self.num_samples = self.fetched = self.seen = 0
        self.full_s: float | None = None
        self.complete_s: float | None = None

    @property
    def next_s(self) -> float:
        """The time of the next publication; inf where filling waits or has ended."""
        return self._open[0].at_s if self._open else math.inf

    def _next_shard(self, process: int, number: int, since_s: float) -> _Publication:
        setup, elapsed_s = self._setup, since_s - self._setup.first_s
        per_s = setup.fill_per_s / setup.num_workers
        size_bytes = target_bytes(number, setup.shard_bytes, setup.size_limit // setup.num_workers)
        takes_s = min(size_bytes / (setup.cached_bytes * per_s), max_age_s(elapsed_s))
        takes_s = max(takes_s, 1.0 / per_s)
        return _Publication(since_s + takes_s, process, number, max(1, round(per_s * takes_s)))

    def fill(self, until_s: float) -> None:
        """Publish what is due by `until_s`."""
        while self.next_s <= until_s:
            due = heapq.heappop(self._open)
            samples = min(due.samples, self._left_in_pass)
            if not self._publish(samples, due.at_s):
                self._waiting.append(due)
                continue
            self._left_in_pass -= samples
            if not self._left_in_pass and not self._begin_pass():
                self._open, self._waiting, self.complete_s = [], [], due.at_s
                return
            heapq.heappush(self._open, self._next_shard(due.process, due.number + 1, due.at_s))

    def _begin_pass(self) -> bool:
        """Begin another pass over what was evicted; False if all of the remote is cached."""
        self._last_of_first_pass = min(self._last_of_first_pass, self._last_id)
        self._left_in_pass = self._setup.whole - self.num_samples
        return self._left_in_pass > 0

    def _publish(self, samples: int, now_s: float) -> bool:
        """Publish a shard, evicting others if needed; False if there is no space now."""
        size_bytes = math.ceil(samples * self._setup.cached_bytes)
        need_bytes = size_bytes - self._usable_bytes + self._used_bytes
        if need_bytes > 0 and self.full_s is None:
            self.full_s = now_s
        victims = choose_victims(self._evictable, need_bytes)
        freed_bytes = sum(row.size_bytes for row in victims)
        if self._used_bytes - freed_bytes + size_bytes > self._usable_bytes:
            return False
        for row in victims:
            self._evictable.popleft()
            self._gone.append(row.id)
        self._last_id += 1
        self._fresh.append((self._last_id, size_bytes, samples, 0, self._clock))
        self._used_bytes += size_bytes - freed_bytes
        self.num_samples += samples - sum(row.num_samples for row in victims)
        self.fetched += samples
        return True

    def begin_epoch(self, now_s: float) -> int:
        """Draw an epoch from the cache as it is; returns its number of samples."""
        stays = np.isin(self._table[:, 0], self._gone, invert=True)
        self._table = np.concatenate([self._table[stays], np.array(self._fresh, np.int64).reshape(-1, 5)])
        self._fresh, self._gone = [], []
        ids, _sizes, counts, uses, last_used = self._table.T
        order = np.lexsort([ids, last_used])  # "lru"
        is_leased = np.isin(ids, self._leased)
        chosen = select_shards(ids, counts, uses, self._retire(order, is_leased), None)
        is_new = (uses[chosen] == 0) & (ids[chosen] <= self._last_of_first_pass)
        self.seen += int(counts[chosen][is_new].sum())
        self._clock += 1
        self._leased = ids[chosen].copy()
        self._table[chosen, 3] += 1
        self._table[chosen, 4] = self._clock
        order = order[~np.isin(order, chosen) & (uses[order] > 0)]
        self._evictable = deque(ShardRow(*row) for row in self._table[order].tolist())
        for due in self._waiting:
            heapq.heappush(self._open, due._replace(at_s=now_s))
        self._waiting = []
        return int(counts[chosen].sum())

    def _retire(self, order: IntArray, is_leased: npt.NDArray[np.bool_]) -> IntArray:
        """The ids of the shards that retire, as a real snapshot chooses them: first those that already do,
        which the last epoch has left out.
        """
        setup = self._setup
        if not setup.turnover or not (self._open or self._waiting):
            return np.empty(0, np.int64)
        ids, sizes, counts, uses, _ = self._table[order[np.argsort(is_leased[order], kind="stable")]].T
        has_lost = self._last_id > len(self._table)
        is_endless = setup.num_samples is None
        remaining_bytes = math.inf if has_lost or is_endless else self._left_in_pass * setup.cached_bytes
        room = Room(self._usable_bytes, self._used_bytes)
        need_bytes = bytes_to_retire(room, setup.turnover, remaining_bytes, int(sizes.max()))
        return choose_retiring(ids, sizes, uses, counts, need_bytes, setup.min_samples)


class _Publication(NamedTuple):
    """The next shard of a process, its shard `number` (from 0): published at `at_s` with `samples`."""

    at_s: float
    process: int
    number: int
    samples: int


def simulate(setup: Setup) -> Forecast:
    """Simulate the run. Raises ConfigError for one that cannot be.

    The course repeats: the rest is extrapolated from the last 20 epochs after 20,000 epochs, or 20 epochs
    after all of the remote has been seen, or after an endless one has filled the cache.
    """
    setup.check()
    cache, epochs, fetched = _Simulation(setup), list[PlannedEpoch](), list[int]()
    now_s, waited_s, trained, seen_s, later = 0.0, 0.0, 0.0, None, 0
    wanted = max(setup.min_samples, setup.batch_size)
    while now_s < setup.duration_s and len(epochs) < _MOST_EPOCHS and later < _LATER_EPOCHS:
        began_s = now_s
        cache.fill(now_s)
        while cache.num_samples < wanted and cache.next_s <= setup.duration_s:
            now_s = max(now_s, cache.next_s)
            cache.fill(now_s)
        if cache.num_samples < setup.batch_size:
            now_s = setup.duration_s
            waited_s += now_s - began_s
            break
        waited_s += now_s - began_s
        samples = cache.begin_epoch(now_s)
        epochs.append(PlannedEpoch(now_s, samples, cache.seen))
        fetched.append(cache.fetched)
        batches = max(1, samples // setup.batch_size)
        batches = min(batches, math.ceil((setup.duration_s - now_s) / setup.step_s))
        trained += batches * setup.batch_size
        now_s += batches * setup.step_s
        if seen_s is None and cache.seen >= setup.whole:
            seen_s = now_s
        later += seen_s is not None or (setup.num_samples is None and cache.full_s is not None)
    cache.fill(min(now_s, setup.duration_s))
    rest_s, total, seen = max(0.0, setup.duration_s - now_s), float(cache.fetched), float(cache.seen)
    if rest_s and epochs:
        first = epochs[-_LATER_EPOCHS:][0]
        total += (
            rest_s * (cache.fetched - fetched[-_LATER_EPOCHS:][0]) / max(now_s - first.at_s, setup.step_s)
        )
        trained += rest_s / setup.step_s * setup.batch_size
        seen += rest_s * (seen - first.seen) / max(epochs[-1].at_s - first.at_s, setup.step_s)
        if seen_s is None and seen >= setup.whole:
            seen_s = now_s + rest_s * (setup.whole - cache.seen) / (seen - cache.seen)
        seen = min(seen, setup.whole)
    return Forecast(
        setup,
        tuple(epochs),
        first_batch_s=epochs[0].at_s if epochs else None,
        full_s=cache.full_s,
        complete_s=cache.complete_s,
        seen_s=seen_s,
        seen=seen,
        seen_share=None if setup.num_samples is None else seen / setup.num_samples,
        uses=trained / seen if seen else 0.0,
        waited_s=waited_s,
        fetched_bytes=total * setup.fetched_bytes,
    )


def setup_of(
    stages: Stages, num_samples: int | None, bandwidth_bytes_per_s: float | None, **run: Any
) -> Setup:
    """The setup of a `run` (its other fields) over a source of which `stages` was measured.

    `num_samples` of None: as units hold on average. Raises ConfigError where that is not known.
    """
    num_samples = num_samples or stages.num_samples
    if num_samples is None and stages.num_units is not None:
        raise ConfigError("how many samples SOURCE has is not known from its first ones: give --samples")
    link = bandwidth_bytes_per_s / stages.fetched_bytes if bandwidth_bytes_per_s else math.inf
    return Setup(
        num_samples=num_samples,
        fetched_bytes=stages.fetched_bytes,
        cached_bytes=stages.cached_bytes,
        fill_per_s=min(stages.fill_per_s, link),
        first_s=stages.list_s + _START_S,
        num_workers=stages.workers,
        **run,
    )


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The forecast of a run, advice, and the `price` of what is fetched, if it was asked for."""

    forecast: Forecast
    advice: tuple[str, ...]
    price: float | None

    @classmethod
    def of(cls, setup: Setup, stages: Stages | None = None, price_per_gb: float | None = None) -> RunPlan:
        forecast = simulate(setup)
        price = None if price_per_gb is None else forecast.fetched_bytes / 1e9 * price_per_gb
        return cls(forecast, tuple(_advice(forecast, stages)), price)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.forecast}" + ("" if self.price is None else f", {self.price:,.2f} to pay")]
        return "\n".join([*lines, *bullets(self.advice)])


def _advice(forecast: Forecast, stages: Stages | None) -> list[str]:
    """Changes of `size_limit`, `turnover` and `num_workers` that would be better, a sentence each."""
    setup, found = forecast.setup, []
    whole_bytes = setup.whole * setup.cached_bytes + HEADROOM_BYTES
    if setup.num_samples is not None and whole_bytes > setup.size_limit:
        found.append(
            f"size_limit={format_size(1.02 * whole_bytes)} would hold all, and fetch each sample once"
        )
    others = [(simulate(replace(setup, turnover=one)), one) for one in _TURNOVERS if one != setup.turnover]
    best, turnover = min(others, key=lambda other: (-other[0].seen, other[0].seen_s or 0.0))
    sooner = (best.seen_s or math.inf) < _BETTER * (forecast.seen_s or math.inf)
    if best.seen * _BETTER > forecast.seen or sooner:
        what = f"{best.seen:,.0f} samples"
        if best.seen_share is not None:
            what = f"{best.seen_share:.0%} of the remote (all: {format_duration(best.seen_s)})"
        found.append(
            f"turnover={turnover} would show {what}, for {format_size(best.fetched_bytes)} of egress"
        )
    is_link = stages is not None and setup.fill_per_s < stages.fill_per_s
    if stages is not None and not is_link and stages.binds in ("decode", "transform", "pack"):
        free = stages.cores - stages.workers
        found.append(
            f"the processor holds up the filling: num_workers={stages.cores} would bring more"
            if free > 0
            else "the processor holds up the filling: more cores, or a cheaper transform, would bring more"
        )
    return found
