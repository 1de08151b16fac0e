"""The work of a loader in the background: one thread prepares segments, a few more gather batches."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from cachestream.errors import EpochError, warn_caller
from cachestream.training.prepare import Preparer
from cachestream.training.ranks import find_job, warn_if_early
from cachestream.training.stats import Meter
from cachestream.training.tasks import Gathering
from cachestream.training.threads import check_process, make_thread, start_once
from cachestream.training.window import CLOSED, Window

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.training.batches.transfer import BatchTransform, Transfer
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.rendezvous import ProcessGroup

_JOIN_S: Final = 5.0
_EXIT_JOIN_S: Final = 30.0  # longer than the ranks wait for an answer of their store
_EARLY: Final = "an EpochLoader was asked for its batches, length or dataset"

_started: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """The window of a loader and the threads behind it, which end with `stop`, with the loader, and with the
    interpreter. It holds no reference to the loader, so that a loader without references ends them.
    """

    def __init__(
        self,
        cache: Cache,
        options: LoaderOptions,
        prefetch: int,
        transfer: Transfer,
        transform: BatchTransform | None,
    ) -> None:
        self.transfer = transfer
        self.meter = Meter(cache.directory)
        self.gathering = Gathering(options, prefetch, transfer, transform, cache.quarantine)
        self.window = Window(self.gathering)
        self.preparer = Preparer(cache, options, self.window, self.meter)
        self._thread = make_thread(self.preparer.run, "prepare")
        self._warned_early = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the preparing thread, once. Raises EpochError in a forked child."""
        check_process(self._pid)
        if self.window.is_closed:
            raise EpochError(CLOSED)
        if self._thread.ident is not None:
            return
        self._warned_early = warn_if_early(
            _EARLY, "it answers for one process alone, until a later call finds the others"
        )
        _stop_all_at_exit()
        _started.add(self)
        try:
            start_once(self._thread)
        except EpochError:
            self.stop()
            raise

    def find_new_job(self) -> ProcessGroup | None:
        """The `torch.distributed` job of this process, for the next jump; None if it is known, or there is
        none.

        A job that has ended is kept: its ranks must not go on as single ones. Raises EpochError in a forked
        child.
        """
        job = find_job()
        if job is None or job == self.window.wanted.job:
            return None
        check_process(self._pid)
        if self.preparer.num_ranks == 1 and job.size > 1 and not self._warned_early:
            warn_caller(
                f"{_EARLY} before torch.distributed.init_process_group(), and answered for one process "
                f"alone: it is rank {job.rank} of {job.size} from now on, and its epochs are shorter. Call "
                "init_process_group() first"
            )
        return job

    def stop(self, join: bool = True, join_s: float = _JOIN_S) -> None:
        """Stop the threads and release the leases. With `join` wait up to `join_s` for each of them."""
        if self._pid != os.getpid():
            return
        self.preparer.stop()
        self.window.stop()
        self.transfer.close()
        if not join:
            return
        ended = self.gathering.close(join_s)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(join_s)
        ended = ended and not self._thread.is_alive()
        if ended:  # otherwise they are joined again at exit
            _started.discard(self)


def _stop_all_at_exit() -> None:
    """Have `_stop_all` run first at exit: a daemon thread that is then in torch crashes the process."""
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def _stop_all() -> None:
    for background in list(_started):
        background.stop(join_s=_EXIT_JOIN_S)
