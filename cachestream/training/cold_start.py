"""Waiting for samples at cold start: until there are enough, or it is known, and said why, that there will not be."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.holdout import count_samples
from cachestream.storage.status import describe_skipped, hindrance, remedy_for_skipped, warn_of_skipped
from cachestream.training.loader_options import EpochSettings
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache


_WATCH_S: Final = 0.02
_SILENT_S: Final = 8.0
_LOOK_AGAIN_S: Final = 0.5
_LONGEST_S: Final = 0.5  # of a look: more where the process was stopped, and nobody has kept it waiting

logger = logging.getLogger("cachestream")


class ColdStart:
    """Waits for the samples that an epoch of `settings` takes from `cache`, until `closed`."""

    def __init__(self, cache: Cache, settings: EpochSettings, closed: threading.Event) -> None:
        self._cache = cache
        self._settings = settings
        self._closed = closed

    def wait(self, share: int, cancelled: Callable[[], bool]) -> None:
        """Wait until a batch for each of the `share` ranks of the cache is there, or what the user wants to begin with.

        Raises NotEnoughSamplesError when there are, and will be, too few, and Cancelled.
        """
        settings = self._settings
        whole = settings.batch_size * share
        wanted = settings.min_samples or whole
        least = settings.min_samples or (whole if settings.drop_last else share)
        # A moment before the trainer gives up waiting for its batch: this error says more.
        give_up_s, speak_s = 0.9 * settings.timeout_s, _SILENT_S
        waited_s, looked_s = 0.0, time.monotonic()
        while (have := count_samples(self._cache, settings.split)) < wanted:
            state = self._cache.fill_state()
            ended = state in ("complete", "full", "failed")
            late = waited_s > give_up_s
            if ended or late:
                # Asked again: the last samples may have come between the count and the state.
                have = count_samples(self._cache, settings.split)
                if have >= least:
                    return
                raise NotEnoughSamplesError(self._too_few(have, least, state, ended))
            if waited_s > speak_s:
                speak_s = math.inf if self._tell_why(have, wanted) else waited_s + _LOOK_AGAIN_S
            if cancelled() or self._closed.wait(_WATCH_S):
                raise Cancelled
            before_s, looked_s = looked_s, time.monotonic()
            waited_s += min(looked_s - before_s, _LONGEST_S)

    def _tell_why(self, have: int, wanted: int) -> bool:
        """Say what the samples are waited for, if it is known; returns whether it is."""
        why = hindrance(self._cache.directory, self._cache.filling.state())
        if why:
            told = "no samples" if not have else f"{have} samples of {wanted}"
            logger.warning("%s holds %s so far: %s", self._cache.path, told, why)
        else:
            warn_of_skipped(self._cache)
        return bool(why)

    def _too_few(self, have: int, wanted: int, state: str, ended: bool) -> str:
        fill = self._cache.filling.state()
        failures, message = fill.failures, fill.message
        hindered = hindrance(self._cache.directory, fill)
        skipped = describe_skipped(failures)
        why = (
            f"its filling is '{state}'" if ended else f"after {self._settings.timeout_s:g} s it is '{state}'"
        )
        if state == "full" and not hindered:
            why = f"no more fit into its size_limit of {format_size(self._cache.size_limit)}"
            hint = "raise that ('cachestream limit CACHE SIZE'), or use a smaller batch_size or min_samples"
        elif state == "none":
            hint = "start a worker (cs.start_worker, or 'cachestream worker')"
        elif state == "failed":
            hint = message or "see 'cachestream status CACHE'"
        elif hindered and (state == "full" or not ended):
            hint = hindered
        elif not have and message:
            hint = f"{message}; correct what fails and start again"
        elif sum(one.count for one in failures) > have:
            hint = f"{skipped}; {remedy_for_skipped(failures, fill.source or '')}"
        elif ended:
            hint = "use a smaller batch_size or min_samples, drop_last=False, or more data"
        else:
            hint = "does the worker run and the remote answer? See 'cachestream status CACHE', or raise timeout_s"
        of = "" if self._settings.split is None else f" of the split '{self._settings.split.name}'"
        told = f"{self._cache.path} holds {have} samples{of}, {wanted} are needed for an epoch, and {why}: {hint}"
        return f"{told} ({skipped})" if skipped and skipped not in hint else told
