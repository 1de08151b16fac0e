"""The engine of a sampling process, which reads units: its interface, and that of local threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from cachestream.sources.base import reads_from_disk
from cachestream.storage.layout import Directory
from cachestream.storage.telemetry import Slot
from cachestream.worker.job import Job, Payload
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling.fetcher import Delivery, Fetcher, ReadTuner
from cachestream.worker.sampling.unit import Stall, UnitRead
from cachestream.worker.sampling.unit_reader import FetchMeter, UnitReader

BUFFER_BYTES: Final = 64 * 2**20
_WINDOW: Final = 4  # units submitted ahead, in multiples of the concurrency


class UnitFetcher(Protocol):
    """Reads the submitted units, and delivers the samples of each in their order; see `Fetcher`."""

    def __len__(self) -> int: ...
    @property
    def awaited(self) -> UnitRead | None: ...
    def stalls(self) -> tuple[list[Stall], bool]: ...
    def submit(self, unit_reads: list[UnitRead]) -> None: ...
    def wake(self) -> None: ...
    def next(self, timeout_s: float) -> Delivery | None: ...


class Engine(Protocol):
    """The part of a sampling process that reads units: in its own threads, or elsewhere.

    `transform` is applied to the samples that are delivered. `window`: the number of units submitted ahead.
    """

    @property
    def fetcher(self) -> UnitFetcher: ...
    @property
    def transform(self) -> Callable[..., Any] | None: ...
    @property
    def window(self) -> int: ...
    def use_plan(self, plan: PassPlan) -> None:
        """Read units of the pass `plan` from now on."""

    def tick(self) -> None:
        """Adapt to what the last reads brought; called several times a second."""

    def unit_came(self) -> None:
        """Note that a unit came without an error."""

    def stop(self) -> None:
        """End the reading; what has not been delivered is dropped."""


class LocalEngine:
    """Reads units in threads of this process, as many at once as pays."""

    def __init__(self, job: Job, payload: Payload, slot: Slot, stop: threading.Event) -> None:
        self.transform = payload.transform
        self.window = _WINDOW * job.concurrency
        meter = FetchMeter(slot, job.bandwidth_bytes_per_s, Directory(job.root).worker_file("budget"))
        self._reader = UnitReader(
            payload.source,
            meter,
            stop,
            hang_timeout_s=job.hang_timeout_s,
            in_rows=payload.transform is None,
        )
        from_disk = reads_from_disk(payload.source)
        self.fetcher = Fetcher(
            self._reader.read, job.concurrency, BUFFER_BYTES, self._reader.meter.beat, may_read_here=from_disk
        )
        is_limited = job.bandwidth_bytes_per_s is not None
        self._tuner = ReadTuner(self.fetcher, slot, job.concurrency, only_trials=from_disk or is_limited)

    def use_plan(self, plan: PassPlan) -> None:
        self._reader.plan = plan

    def tick(self) -> None:
        self._tuner.tick(self._reader.meter.take_throttled)

    def unit_came(self) -> None:
        self._tuner.unit_came()

    def stop(self) -> None:
        self.fetcher.stop()
