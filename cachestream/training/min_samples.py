"""The wait for samples at cold start: until there are enough, or an error says why there will not be."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.snapshots import count_samples
from cachestream.storage.status import describe_skipped, hindrance, remedy_for_skipped, warn_of_skipped
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.training.loader_options import LoaderOptions


_POLL_S: Final = 0.02
_WARN_AFTER_S: Final = 8.0
_WARN_RETRY_S: Final = 0.5
_LONGEST_POLL_S: Final = 0.5  # counted for one poll, which takes longer if the process was stopped (SIGSTOP)

logger = logging.getLogger("cachestream")


def wait_for_samples(
    cache: Cache,
    options: LoaderOptions,
    num_ranks: int,
    cancelled: Callable[[], bool],
    closed: threading.Event,
) -> None:
    """Wait until `cache` holds `min_samples`, or a batch for each of its `num_ranks` ranks.

    Raises NotEnoughSamplesError when there are and will be too few, and Cancelled.
    """
    whole = options.batch_size * num_ranks
    wanted = options.min_samples or whole
    least = options.min_samples or (whole if options.drop_last else num_ranks)
    # Shortly before the trainer's own timeout, because this error says more.
    give_up_s, warn_s = 0.9 * options.timeout_s, _WARN_AFTER_S
    waited_s, polled_s = 0.0, time.monotonic()
    while (have := count_samples(cache, options.split)) < wanted:
        state = cache.fill_state()
        ended = state in ("complete", "full", "failed")
        if ended or waited_s > give_up_s:
            # The last samples may have come between the count and the state.
            have = count_samples(cache, options.split)
            if have >= least:
                return
            raise NotEnoughSamplesError(_too_few(cache, options, have, least, state, ended))
        if waited_s > warn_s:
            warn_s = math.inf if _warn_why(cache, have, wanted) else waited_s + _WARN_RETRY_S
        if cancelled() or closed.wait(_POLL_S):
            raise Cancelled
        before_s, polled_s = polled_s, time.monotonic()
        waited_s += min(polled_s - before_s, _LONGEST_POLL_S)


def _warn_why(cache: Cache, have: int, wanted: int) -> bool:
    """Log why samples are missing; return whether the reason is known."""
    why = hindrance(cache.directory, cache.filling.state())
    if why:
        text = "no samples" if not have else f"{have} samples of {wanted}"
        logger.warning("%s holds %s so far: %s", cache.path, text, why)
    else:
        warn_of_skipped(cache)
    return bool(why)


def _too_few(cache: Cache, options: LoaderOptions, have: int, wanted: int, state: str, ended: bool) -> str:
    """The message for an epoch that needs `wanted` samples, with the reason and its remedy."""
    fill = cache.filling.state()
    failures, message = fill.failures, fill.message
    hindered = hindrance(cache.directory, fill)
    skipped = describe_skipped(failures)
    why = f"its filling is '{state}'" if ended else f"after {options.timeout_s:g} s it is '{state}'"
    if state == "full" and not hindered:
        why = f"no more fit into its size_limit of {format_size(cache.size_limit)}"
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
    of = "" if options.split is None else f" of the split '{options.split.name}'"
    text = f"{cache.path} holds {have} samples{of}, {wanted} are needed for an epoch, and {why}: {hint}"
    return f"{text} ({skipped})" if skipped and skipped not in hint else text
