"""The samples of units, transformed and encoded one by one or in columns, for the open shard."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cachestream.config import with_generator
from cachestream.errors import SampleError
from cachestream.schema import HELD_OUT
from cachestream.storage.telemetry import Slot
from cachestream.worker.encode import SampleChunk, Table, runs, to_record
from cachestream.worker.order import gaps, is_covered
from cachestream.worker.packer import decode_key, encode_key
from cachestream.worker.processes import end_if_forked
from cachestream.worker.shard_writer import MOST_HELD_OUT, ShardWriter
from cachestream.worker.unit_reader import sample_generator
from cachestream.worker.units import Unit, UnitRead


class QuarantinedError(SampleError):
    """A unit that has killed the process too often."""


class SampleEncoder:
    """Encodes the samples of units into the open shard of `writer`, in the order in which they come.

    A sample is transformed first. One that cannot be used is skipped and counted.
    """

    def __init__(
        self, writer: ShardWriter, transform: Callable[..., Any] | None, slot: Slot, stop: threading.Event
    ) -> None:
        self._writer, self._slot, self._stop = writer, slot, stop
        self._transform = None if transform is None else with_generator(transform)
        self._pid = os.getpid()

    def add(self, unit_read: UnitRead, chunk: SampleChunk) -> bool:
        """Add the samples of `chunk`; False if the process is to stop before the last of them."""
        if isinstance(chunk.samples, Table):
            return self._add_table(unit_read, chunk, chunk.samples)
        writer, room_bytes = self._writer, 0
        for offset, key, sample in zip(chunk.offsets, chunk.keys, chunk.samples, strict=True):
            if self._stop.is_set():
                return False
            if room_bytes <= 0:
                room_bytes = writer.make_room()
            before_bytes = writer.open.size_bytes
            self._add(unit_read, offset, key, sample)
            room_bytes -= writer.open.size_bytes - before_bytes
            self._add_progress(unit_read, offset, offset + 1)
        return True

    def _add(self, unit_read: UnitRead, offset: int, key: object, sample: Any) -> None:
        writer = self._writer
        if not isinstance(key, str):  # sources are user code
            error = SampleError(f"its key is of type {type(key).__name__}: keys are str")
            writer.skip("sample", error, f"unit {unit_read.unit.number}: {key!r}")
            return
        if writer.open.holdout.share is not None and not self._is_wanted(
            unit_read.unit, offset, encode_key(key)
        ):
            return
        try:
            sample = self._transformed(sample, unit_read.unit, offset)
            if sample is None:
                self._slot["dropped"] += 1
                return
            begun_s = time.monotonic()
            record = to_record(sample)
        except SampleError as error:
            writer.skip("sample", error, key)
        except BaseException as error:  # noqa: BLE001  transforms raise anything; signals raise nothing here
            writer.skip("transform", error, key)
        else:
            writer.take((key, record), record.nbytes)
            self._slot["pack_s"] += time.monotonic() - begun_s

    def _transformed(self, sample: Any, unit: Unit, offset: int) -> Any:
        """Apply the user's transform; the board shows the position of the unit meanwhile."""
        if self._transform is None:
            return sample
        slot, plan, begun_s = self._slot, self._writer.plan, time.monotonic()
        assert plan is not None
        slot["alone"], slot["beat_s"] = unit.position + 1, begun_s
        try:
            return self._transform(sample, lambda: sample_generator(plan, unit.number, offset))
        finally:
            end_if_forked(self._pid)
            slot["alone"] = 0
            slot["transform_s"] += time.monotonic() - begun_s

    def _is_wanted(self, unit: Unit, offset: int, key: bytes) -> bool:
        """True if a sample is to be cached: no shard of its split holds it, and there is room for it."""
        writer, holdout = self._writer, self._writer.open.holdout
        split = holdout.split_of(key)
        if unit.parts and is_covered(unit.parts[split - 1], offset):
            writer.open.left_out.add(split)
            return False
        if split != HELD_OUT or not holdout.is_full:
            return True
        if holdout.comes_once:
            reason = (
                f"held-out samples take {MOST_HELD_OUT:.0%} of size_limit, and no more are kept: raise it"
            )
            writer.skip("held-out", SampleError(f"{reason}, or hold out less"), decode_key(key))
        else:
            self._slot["dropped"] += 1
        return False

    def _wanted_rows(self, unit: Unit, offsets: Sequence[int], table: Table) -> Table:
        """The rows of `table` that are to be cached."""
        if self._writer.open.holdout.share is None:
            return table
        samples = enumerate(zip(offsets, table.keys, strict=True))
        rows = [row for row, (offset, key) in samples if self._is_wanted(unit, offset, key)]
        return table if len(rows) == len(table) else table.take(rows)

    def _add_table(self, unit_read: UnitRead, chunk: SampleChunk, table: Table) -> bool:
        """Add samples that came in columns, as many at a time as the open shard takes."""
        writer, each_bytes = self._writer, max(1, chunk.nbytes // len(table))
        start = 0
        while start < len(table):
            if self._stop.is_set():
                return False
            stop = min(len(table), start - (-writer.make_room() // each_bytes))
            begun_s = time.monotonic()
            part = table.cut(start, stop)
            if writer.is_large(part.nbytes):
                stop, part = start + 1, table.cut(start, start + 1)  # rows may be of very different sizes
            wanted = self._wanted_rows(unit_read.unit, chunk.offsets[start:stop], part)
            if len(wanted):
                writer.take(wanted, wanted.nbytes)
            self._slot["pack_s"] += time.monotonic() - begun_s
            for first, last in runs(chunk.offsets[start:stop]):
                self._add_progress(unit_read, first, last)
            start = stop
        return True

    def _add_progress(self, unit_read: UnitRead, start: int, stop: int) -> None:
        unit_read.done = stop
        self._writer.open.progress.add_samples(unit_read.claim_id, unit_read.unit.position, start, stop)

    def finish(self, unit_read: UnitRead, *, was_suspect: bool) -> None:
        """Count the unit as done, with its error if it has one."""
        writer, unit, error = self._writer, unit_read.unit, unit_read.error
        writer.begin_shard()
        progress = writer.open.progress
        if was_suspect:
            progress.cleared_suspects.append(unit.position)
        if error is not None:
            kind = "sample" if isinstance(error, SampleError) else "source"
            kind = "quarantined" if isinstance(error, QuarantinedError) else kind
            writer.skip(kind, error, f"unit {unit.number}")
            progress.done += kind != "quarantined"
        # No shard holds a unit that failed: the next pass tries it again.
        rest = [] if unit.is_cached or error is not None else gaps(unit.cached, unit_read.done)
        progress.finish_unit(unit_read.claim_id, unit.position, rest)
        self._slot["units"] += not unit.is_cached
