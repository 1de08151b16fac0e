"""Accounting of remote requests and bytes, and the bandwidth limit that all processes of a node share.

Sources call `asking` and `fetched`, and know nothing of budgets, counters or watchdogs. A sampling process
installs callbacks for them; by default there are none.

The file of a Throttle holds one number, the time up to which the bytes spent so far use the limit, so that a
process that dies leaves nothing to clean up. The algorithm is the generic cell rate algorithm (GCRA, ITU-T
I.371, virtual scheduling): a token bucket without a refill task.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from cachestream.errors import ConfigError
from cachestream.linux import boot_id, open_private

PIECE_BYTES: Final = 1 << 20  # the usual size of a piece of a fetch, which is reported as it arrives
TICK_S: Final = 0.5  # between two signs of life of a thread that waits
NO_LIMIT_BYTES: Final = 1 << 62
BURST_S: Final = 0.1
LOCK_TIMEOUT_S: Final = 2.0

# The time at which all is paid for (CLOCK_MONOTONIC, seconds), and the boot id.
_STATE: Final = struct.Struct("=d40s")
_PAID: Final = struct.Struct("=d")


def _ignore(nbytes: int = 0) -> None:
    """Do nothing: the callback of a process that installed none."""


_on_fetched: Callable[[int], None] = _ignore
_on_asking: Callable[[int], None] = _ignore
_on_slow_down: Callable[[], None] = _ignore
_request_bytes = NO_LIMIT_BYTES


def install(
    on_fetched: Callable[[int], None] | None,
    on_asking: Callable[[int], None] | None = None,
    on_slow_down: Callable[[], None] | None = None,
    request_bytes: int = NO_LIMIT_BYTES,
) -> None:
    """Install the callbacks of this process; None removes one.

    `on_fetched(nbytes)` is called when bytes arrive, `on_asking(nbytes)` before they are requested, if their
    number is known, and `on_slow_down()` when a remote answers that there are too many requests. All are
    called from any thread, also from several at once, in the context of the reader (`contextvars`), which
    crosses event loops and `asyncio.to_thread`; the first two may block to hold back the reader. A
    request asks for at most `request_bytes`. A callback may raise a CacheStreamError, or a BaseException that
    is no Exception; any other counts as an error of the remote.
    """
    global _on_fetched, _on_asking, _on_slow_down, _request_bytes
    _on_fetched = _ignore if on_fetched is None else on_fetched
    _on_asking = _ignore if on_asking is None else on_asking
    _on_slow_down = _ignore if on_slow_down is None else on_slow_down
    _request_bytes = request_bytes


def asking(nbytes: int) -> None:
    """Report that `nbytes` are about to be requested, in the context that will report them as `fetched`."""
    _on_asking(nbytes)


def at_most(nbytes: int = NO_LIMIT_BYTES) -> int:
    """Return how many of `nbytes` one request should ask for, if the rest can be requested later."""
    return min(nbytes, _request_bytes)


def slow_down() -> None:
    """Report that the remote asked for fewer requests."""
    _on_slow_down()


def fetched(nbytes: int) -> None:
    """Report that `nbytes` arrived, after each piece of a fetch; 0 is a sign of life without bytes."""
    _on_fetched(nbytes)


def wait(delay_s: float) -> None:
    """Wait `delay_s` seconds; report a sign of life at least once a second meanwhile."""
    deadline_s = time.monotonic() + delay_s
    while True:
        fetched(0)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(left_s, TICK_S))


class Throttle:
    """A limit of `bytes_per_s` for all Throttles on one file together.

    Safe between threads and processes, each of which opens the file itself. After an idle time the bytes of
    the first 0.1 s pass at once. `path` is created (mode 0600) if it is missing; its folder must exist.
    Raises OSError if there is no space for it.
    """

    def __init__(self, path: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"bandwidth limit {bytes_per_s!r}: must be above 0 bytes a second")
        self._bytes_per_s = float(bytes_per_s)
        self._lock = threading.Lock()
        self._fd = open_private(path, os.O_RDWR | os.O_CREAT)
        self._closer = weakref.finalize(self, os.close, self._fd)
        boot = boot_id().encode()
        with self._locked():
            state = os.pread(self._fd, _STATE.size, 0)
            # The monotonic clock restarts at boot: a time from before could block for days.
            if len(state) < _STATE.size or state[_PAID.size :].rstrip(b"\0") != boot:
                os.pwrite(self._fd, _STATE.pack(0.0, boot), 0)

    def __repr__(self) -> str:
        return f"<Throttle {self._bytes_per_s / 1e6:.3g} MB/s>"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file; continue without it after a deadline.

        A process that is stopped while it holds the lock must not stop the node. A missed update only lets a
        few bytes pass.
        """
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        held = False
        with self._lock:
            while not held and time.monotonic() < deadline_s:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    time.sleep(0.0002)
            try:
                yield
            finally:
                if held:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def reserve(self, nbytes: int) -> float:
        """Spend `nbytes` now; return the seconds to wait before the next request."""
        with self._locked():
            now_s = time.monotonic()
            paid_s: float = _PAID.unpack(os.pread(self._fd, _PAID.size, 0))[0]
            paid_s = max(paid_s, now_s) + nbytes / self._bytes_per_s  # the arrival rule of GCRA
            os.pwrite(self._fd, _PAID.pack(paid_s), 0)
        return max(0.0, paid_s - now_s - BURST_S)

    def spend(self, nbytes: int) -> None:
        """Spend `nbytes`; wait until they are paid for (see `wait`)."""
        if nbytes > 0:
            wait(self.reserve(nbytes))

    def close(self) -> None:
        """Close the file; the Throttle must not be used again."""
        self._closer()
