"""Waiting for samples at a cold start, the only time when training waits for the filling."""

from __future__ import annotations

import time
from typing import Final

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.filling import Filling
from cachestream.storage.layout import Directory
from cachestream.storage.status import describe_skipped, hindrance, read_filling

_WATCH_S: Final = 0.02
_ENDED: Final = ("complete", "full", "failed")


def wait_for_samples(
    directory: Directory, filling: Filling, min_samples: int, timeout_s: float | None
) -> int:
    """Wait until `min_samples` are cached and return the number of samples.

    Raises NotEnoughSamplesError at the deadline (None: no deadline), or at once when the filling has ended
    with fewer, or no more fit.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        state, fill = read_filling(directory, filling)
        have = fill.num_samples
        if have >= min_samples:
            return have
        late = deadline is not None and time.monotonic() >= deadline
        if state == "full":
            why = f"no more fit into its size_limit of {format_size(fill.size_limit)}"
        elif state in _ENDED:
            why = f"the filling is {state}"
        elif late:
            why = f"after {timeout_s:g} s the filling is '{state}'"
        else:
            time.sleep(_WATCH_S)  # SQLite cannot notify
            continue
        hint = fill.message or hindrance(directory, fill) or describe_skipped(fill.failures)
        if state == "full":
            hint = "raise that ('cachestream limit CACHE SIZE'), or ask for fewer samples"
        hint = hint or "see 'cachestream status CACHE', or ask for fewer samples"
        raise NotEnoughSamplesError(
            f"{directory.root} holds {have} samples, {min_samples} were asked for, and {why}: {hint}"
        )
