"""Waiting for samples: a cold start is the only time when training waits for the filling."""

from __future__ import annotations

import time
from typing import Final

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.layout import Directory
from cachestream.storage.status import describe_skipped, hindrance, state_of_filling

_WATCH_S: Final = 0.02
_ENDED: Final = ("complete", "full", "failed")


def wait_for_samples(
    directory: Directory,
    catalogue: Catalogue,
    min_samples: int,
    timeout_s: float | None,
) -> int:
    """Wait until `min_samples` are cached; how many there are.

    Raises NotEnoughSamplesError at the deadline (None: wait for ever), or at once when the filling has
    ended with fewer, or no more fit.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        with catalogue.reading() as tables:
            have = tables.totals()[1]
            if have >= min_samples:
                return have
            state, message = state_of_filling(directory, tables), str(tables.meta("fill_message", ""))
            late = deadline is not None and time.monotonic() >= deadline
            if state in _ENDED or late:
                message = message or hindrance(directory, tables) or describe_skipped(tables.failures())
        if state == "full":
            with catalogue.reading() as tables:
                limit = format_size(int(tables.meta("size_limit")))
            why = f"no more fit into its size_limit of {limit}"
            message = "raise that ('cachestream limit CACHE SIZE'), or ask for fewer samples"
        elif state in _ENDED:
            why = f"the filling is {state}"
        elif late:
            why = f"after {timeout_s:g} s the filling is '{state}'"
        else:
            time.sleep(_WATCH_S)  # SQLite cannot notify
            continue
        hint = message or "see 'cachestream status CACHE', or ask for fewer samples"
        raise NotEnoughSamplesError(
            f"{directory.root} holds {have} samples, {min_samples} were asked for, and {why}: {hint}"
        )
