"""A sampling process: it reads units, transforms, packs and writes what its supervisor hands out.

The process may be killed at any point: what it has not had published, another one does again. It uses no
catalogue and takes no locks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from cachestream import tracing
from cachestream.errors import SampleError, SourceError, SourceUnavailableError, WorkerError
from cachestream.linux import name_process
from cachestream.schema import Schema
from cachestream.sources.base import as_incremental, stored_names
from cachestream.storage.layout import Directory
from cachestream.storage.progress import PassRow
from cachestream.storage.telemetry import ENDED, FETCHING, NO_REMOTE, NOTHING_FREE, STARTING, Slot, board_text
from cachestream.transport import object_limit
from cachestream.worker.channel import SupervisorGoneError, SupervisorLink
from cachestream.worker.job import Job, Payload, unpack
from cachestream.worker.listings import Listings
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import EXIT_RESTART, end_soon, exit_code, exit_now, heed_signals
from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.engine import Engine, LocalEngine
from cachestream.worker.sampling.fetcher import Delivery
from cachestream.worker.sampling.messages import FillStatus, News
from cachestream.worker.sampling.publisher import BEAT_S, StartAgainError
from cachestream.worker.sampling.shard_writer import SampleEncoder, ShardWriter
from cachestream.worker.sampling.unit import Unit, UnitRead

_FATAL_REFUSALS: Final = 20
_QUIET_S: Final = 5.0  # without a byte: then the board says so
_STEPS: Final = 8  # in which the units of a window are delivered, at least
_STEP_S: Final = 0.005
_LEFT: Final = 0.75  # of the window: with fewer units in flight, more are asked for


class Sampler:
    """Fills a cache from one process: `slot` of the board.

    Units that the remote refused are held back until others come: if the remote refuses many in a row, none
    of them is done.
    """

    def __init__(
        self,
        job: Job,
        payload: Payload,
        link: SupervisorLink,
        slot: Slot,
        engine: Engine,
        writer: ShardWriter,
        inbox: deque[tuple[Any, ...]],
        stop: threading.Event,
    ) -> None:
        self._job, self._link, self._slot, self._stop = job, link, slot, stop
        self._is_shared = job.cluster is not None and bool(job.cluster.group)
        self._writer, self._inbox = writer, inbox
        self._encoder = SampleEncoder(writer, engine.transform, slot, stop)
        self._engine, self._fetcher = engine, engine.fetcher
        self._listing = stored_names(payload.source)
        self._wanted_s: float | None = None  # since when more units are asked for
        self._has_ended = False  # there are no more
        self._is_to_flush = False  # the supervisor waits for what this process has
        self._refused: list[UnitRead] = []
        self._reads_alone = False  # a unit that may have ended other processes
        self._arrived_s, self._arrived_bytes = time.monotonic(), 0
        self._cpu_s = 0.0  # as counted

    def run(self) -> None:
        """Work until all units are done, or until told to stop."""
        try:
            while not self._stop.is_set():
                self._heed_messages()
                self._beat(self._fetch_state())
                if not len(self._fetcher) and (self._has_ended or self._is_to_flush):
                    self._skip_last_refused()
                    if self._has_ended:
                        break
                    self._is_to_flush = False
                    self._writer.flush()
                self._ask_for_units()
                self._step()
            self._writer.publish_all()
        finally:
            self._engine.stop()

    def _step(self) -> None:
        """Wait for a delivery, and take more that are there by then: as many as take a few milliseconds, so that
        shards are published and more units asked for in time.
        """
        since_s, timeout_s = time.monotonic(), min(BEAT_S, self._writer.due_in_s())
        for _ in range(max(1, self._engine.window // _STEPS)):
            begun_s = time.monotonic()
            delivery = self._fetcher.next(timeout_s)
            ended_s = time.monotonic()
            self._slot["fetch_wait_s"] += ended_s - begun_s
            tracing.add("wait", begun_s, ended_s)
            if delivery is None:
                break
            self._deliver(delivery)
            self._arrived_s, timeout_s = time.monotonic(), 0.0
            if self._arrived_s - since_s > _STEP_S:
                break
        self._count_cpu()
        self._engine.tick()
        self._writer.flush_if_due()

    def _count_cpu(self) -> None:
        """Add the processor's time since the last call: the slot keeps the sums of earlier processes."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        self._slot["cpu_s"] += self._cpu_s - before_s

    def _fetch_state(self) -> int:
        """The state of the process while it waits for the next unit; shows a stalled unit on the board."""
        stalls, all_wait = self._fetcher.stalls()
        quiet = "" if stalls else self._quiet_message()
        self._slot["silence"] = board_text(stalls[0].reason if stalls else quiet)
        if self._is_shared and self._wanted_s is not None and not len(self._fetcher):
            return NOTHING_FREE
        return NO_REMOTE if all_wait or quiet else FETCHING

    def _quiet_message(self) -> str:
        """A message if the next unit has brought nothing for long and no attempt has failed; else ""."""
        now_s, fetched, unit_read = time.monotonic(), int(self._slot["fetched_bytes"]), self._fetcher.awaited
        if unit_read is None or fetched != self._arrived_bytes:
            self._arrived_s, self._arrived_bytes = now_s, fetched
        silent_s = now_s - self._arrived_s
        if unit_read is None or silent_s < _QUIET_S:
            return ""
        return f"nothing has come for {silent_s:.0f} s, next is unit {unit_read.unit.number}"

    def _beat(self, state: int) -> None:
        self._slot["state"] = state
        self._slot["beat_s"] = time.monotonic()

    # --- intake

    def _ask_for_units(self) -> None:
        """Ask for more units if few are in flight; with none in flight, publish what there is meanwhile."""
        now_s, in_flight = time.monotonic(), len(self._fetcher)
        if self._wanted_s is None and not self._has_ended and in_flight <= _LEFT * self._engine.window:
            self._wanted_s = now_s
            self._link.tell("want", self._engine.window - in_flight)
        elif self._wanted_s is not None and not in_flight and now_s - self._wanted_s >= BEAT_S:
            self._writer.flush()

    def _heed_messages(self) -> None:
        """Act on what the supervisor has told since the last call."""
        while self._inbox:
            kind, *arguments = self._inbox.popleft()
            if kind == "units":
                self._take_units(*arguments)
            elif kind == "flush":
                self._is_to_flush = True
            elif kind == "end":
                self._has_ended, self._wanted_s = True, None

    def _take_units(self, row: PassRow, units: tuple[Unit, ...], alone: bool) -> None:
        self._wanted_s = None
        before = self._writer.row
        if before is None or before.plan != row.plan:
            if before is not None:
                self._writer.publish_all()  # the pass has grown: all positions of a shard are of one plan
            plan = PassPlan.from_json(row.plan)
            self._load_names(plan)
            self._writer.row, self._writer.plan = row, plan
            self._engine.use_plan(plan)
            self._slot["pass_id"] = row.id
        self._reads_alone = alone
        if alone:
            self._writer.publish_all()  # the progress of other units must not be lost with this one
        self._fetcher.submit([UnitRead(unit) for unit in units])

    def _load_names(self, plan: PassPlan) -> None:
        """Load the names of all units of the pass."""
        if self._listing is not None:
            try:
                self._listing.reach(plan.num_units or 0)
            except SourceError as error:
                raise WorkerError(str(error)) from error

    # --- delivery

    def _deliver(self, delivery: Delivery) -> None:
        unit_read = delivery.unit_read
        for chunk in delivery.chunks:
            self._skip_refused()
            self._beat(FETCHING)
            if not self._encode(unit_read, chunk):
                return  # the process is to stop: another one will read the rest again
        if delivery.finished and not self._gave_up(unit_read):
            self._finish(unit_read)

    def _encode(self, unit_read: UnitRead, chunk: SampleChunk) -> bool:
        """Encode the samples of `chunk`; False if the process is to stop before the last of them.

        A trace shows them together: first the time of their transforms, then that of packing.
        """
        if not tracing.is_on():
            return self._encoder.add(unit_read, chunk)
        begun_s, before_s = time.monotonic(), self._encoder.transform_s
        goes_on = self._encoder.add(unit_read, chunk)
        transformed_s = begun_s + self._encoder.transform_s - before_s
        tracing.add("transform", begun_s, transformed_s, samples=len(chunk.offsets))
        tracing.add("pack", transformed_s, time.monotonic(), samples=len(chunk.offsets))
        return goes_on

    def _finish(self, unit_read: UnitRead) -> None:
        if _is_refusal(unit_read.error) and not self._reads_alone:
            self._hold_back(unit_read)
            return
        self._engine.unit_came()
        self._skip_refused()
        self._encoder.finish(unit_read)

    def _hold_back(self, unit_read: UnitRead) -> None:
        """Hold back a unit that the remote refused: if it refuses many in a row, none of them is done."""
        self._refused.append(unit_read)
        if len(self._refused) >= _FATAL_REFUSALS:
            raise WorkerError(
                f"{len(self._refused)} units in a row cannot be read, the last one: {unit_read.error}"
            )

    def _skip_refused(self) -> None:
        """Skip the refused units, each for its own reason, as the remote answers for others."""
        for unit_read in self._refused:
            self._encoder.finish(unit_read)
        self._refused.clear()

    def _skip_last_refused(self) -> None:
        if not self._refused:
            return
        self._writer.publish_all()
        if not self._writer.status.has_samples:
            raise WorkerError(
                f"nothing could be read, {len(self._refused)} units refused, the last one: "
                f"{self._refused[-1].error}"
            )
        self._skip_refused()

    def _gave_up(self, unit_read: UnitRead) -> bool:
        """True if reading ended only because the process is to stop: the unit is not done."""
        return self._stop.is_set() and isinstance(unit_read.error, SourceUnavailableError)


def _is_refusal(error: BaseException | None) -> bool:
    """True if the error may hold for the whole source, such as bad credentials or a missing bucket."""
    return isinstance(error, SourceError) and not isinstance(error, SampleError)


# Makes the engine of a job, which counts in the slot and ends at the stop.
MakeEngine = Callable[[Job, Payload, Slot, threading.Event], Engine]


def run(
    end: socket.socket,
    job: Job,
    index: int,
    slot: Slot,
    status: FillStatus,
    schema: Schema | None,
    make_engine: MakeEngine = LocalEngine,
    later: tuple[type[Exception], ...] = (),
) -> int:
    """Be sampling process `index` of `job`; does not return.

    After an error of the classes `later` another process goes on in a moment.
    """
    stop = threading.Event()
    heed_signals(stop)
    name_process(f"cs-sampler-{index}")
    tracing.join(job.trace, f"sampler {index}")
    slot["pid"], slot["state"], slot["beat_s"] = os.getpid(), STARTING, time.monotonic()
    inbox: deque[tuple[Any, ...]] = deque()
    news = News(status, schema)
    object_limit.set_cache_limit(status.limit_bytes)
    wake: list[Callable[[], None]] = []
    was_told: list[bool] = []  # to stop

    def on_message(kind: str, *arguments: Any) -> None:
        if kind == "stop":
            was_told.append(True)
            stop.set()
        elif kind == "schema":
            (news.schema,) = arguments
        elif kind == "status":
            (news.status,) = arguments
            object_limit.set_cache_limit(news.status.limit_bytes)
        else:
            inbox.append((kind, *arguments))
        for one in wake:
            one()

    def work() -> None:
        link = SupervisorLink(end, on_message, lambda: end_soon(stop))
        payload: Payload = unpack(job.payload)
        if (source := as_incremental(payload.source)) is not None:
            payload = replace(payload, source=source.over(Listings(Directory(job.root)).load()))
        writer = ShardWriter(job, link, slot, news, stop)
        engine = make_engine(job, payload, slot, stop)
        wake.append(engine.fetcher.wake)
        Sampler(job, payload, link, slot, engine, writer, inbox, stop).run()

    restart = (StartAgainError, SupervisorGoneError)
    code = exit_code(work, fatal=WorkerError, restart=restart, later=later)
    if not code and stop.is_set() and not was_told:
        code = EXIT_RESTART  # by a signal from outside: another process goes on
    slot["state"] = ENDED  # tells an orderly end from one caused by a sample or a signal
    exit_now(code)
    return code
