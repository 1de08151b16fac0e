"""The user's transform, applied to one sample, and the encoding of the samples that it returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from cachestream.config import with_generator
from cachestream.storage.telemetry import Slot
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import end_if_forked
from cachestream.worker.sampling.encode import Table, to_record
from cachestream.worker.sampling.unit import Unit
from cachestream.worker.sampling.unit_reader import sample_generator


class Several(list[Any]):
    """Several samples that a transform has made of one."""


def collected(made: Any) -> Any:
    """The result of a transform: `Several` for a list, or for all that a generator yields."""
    return Several(made) if isinstance(made, list | Iterator) else made


def to_records(made: Any, key: str) -> list[Table]:
    """The samples that a transform has made of the sample `key`, as tables of one row.

    Several samples have the keys `key/0`, `key/1`, …. Raises SampleError for a value that cannot be stored.
    """
    if not isinstance(made, Several):
        return [] if made is None else [to_record(made, key)]
    return [to_record(one, f"{key}/{number}") for number, one in enumerate(made)]


class Transformer:
    """Transforms samples; used by one thread at a time.

    `encoding_since_s`: the time at which the transform of the last sample had returned. `transform_s`: the
    time that transforms have taken.
    """

    def __init__(self, transform: Callable[..., Any] | None, slot: Slot) -> None:
        self._transform = None if transform is None else with_generator(transform)
        self._slot, self._pid = slot, os.getpid()
        self.encoding_since_s = self.transform_s = 0.0

    def apply(self, plan: PassPlan, unit: Unit, offset: int, sample: Any) -> Any:
        """The sample made of the one at `offset` of `unit`; the board shows the unit meanwhile.

        None for a sample that is dropped, a `Several` for several. Raises what the transform raises.
        """
        if self._transform is None:
            self.encoding_since_s = time.monotonic()
            return sample
        slot, begun_s = self._slot, time.monotonic()
        slot["transforming"], slot["beat_s"] = unit.position + 1, begun_s
        try:
            return collected(self._transform(sample, lambda: sample_generator(plan, unit.number, offset)))
        finally:
            end_if_forked(self._pid)
            slot["transforming"] = 0
            self.encoding_since_s = time.monotonic()
            took_s = self.encoding_since_s - begun_s
            self.transform_s += took_s
            slot["transform_s"] += took_s
