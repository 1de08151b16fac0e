"""The user's transform, applied to one sample, and the encoding of what it returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from cachestream.config import with_generator
from cachestream.storage.telemetry import Slot
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import end_if_forked
from cachestream.worker.sampling.encode import Table, to_record
from cachestream.worker.sampling.unit_reader import Unit, sample_generator


class Transformer:
    """Transforms and encodes samples; used by one thread at a time.

    `encoding_since_s`: the time at which the transform of the last sample had returned. `transform_s`: the time
    that transforms have taken.
    """

    def __init__(self, transform: Callable[..., Any] | None, slot: Slot) -> None:
        self._transform = None if transform is None else with_generator(transform)
        self._slot, self._pid = slot, os.getpid()
        self.encoding_since_s = self.transform_s = 0.0

    def record(self, plan: PassPlan, unit: Unit, offset: int, key: str, sample: Any) -> Table | None:
        """Return the sample at `offset` of `unit` as a table of one row; None if the transform drops it.

        Raises what the transform raises, and SampleError for a value that cannot be stored.
        """
        if self._transform is None:
            self.encoding_since_s = time.monotonic()
        else:
            sample = self._transformed(plan, unit, offset, sample)
        return None if sample is None else to_record(sample, key)

    def _transformed(self, plan: PassPlan, unit: Unit, offset: int, sample: Any) -> Any:
        """Apply the user's transform; the board shows the position of the unit meanwhile."""
        assert self._transform is not None
        slot, begun_s = self._slot, time.monotonic()
        slot["transforming"], slot["beat_s"] = unit.position + 1, begun_s
        try:
            return self._transform(sample, lambda: sample_generator(plan, unit.number, offset))
        finally:
            end_if_forked(self._pid)
            slot["transforming"] = 0
            self.encoding_since_s = time.monotonic()
            took_s = self.encoding_since_s - begun_s
            self.transform_s += took_s
            slot["transform_s"] += took_s
