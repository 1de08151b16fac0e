"""What Linux lets a process say of its kin: when it dies with its parent, whose orphans it takes in, its name, its group."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = [
    "adopt_orphans",
    "die_with_parent",
    "end_group",
    "end_group_of_dead",
    "end_if_forked",
    "end_orphans",
    "look_after_orphans",
    "name_process",
]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_GRACE_S: Final = 1.0
_TICK_S: Final = 0.01
_ended: dict[int, float] = {}  # leaders of groups that were to end, and since when


def die_with_parent() -> None:
    """Be killed when the parent ends, however it does."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends; False where the system does not have that."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Be called `name` by `ps` and `top`, which show 15 characters of it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def end_group(pid: int) -> None:
    """Ask all in the group that the child `pid` leads to end; `look_after_orphans` kills those that have not a moment later.

    To be called before it is waited for: a number that is free again may be another's. Not killed at once, because
    multiprocessing has a process that then removes what others of the group have left in /dev/shm.
    """
    _ended[pid] = time.monotonic()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def end_group_of_dead(pid: int) -> None:
    """`end_group`, if the child `pid` has ended."""
    with suppress(ChildProcessError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            end_group(pid)


def end_if_forked(pid: int) -> None:
    """End a copy of process `pid` that the user's code has forked and let return from it: it would do its work too."""
    if os.getpid() != pid:
        os.write(
            2, b"a process that a transform or a source had forked came back from it; end it with os._exit\n"
        )
        os._exit(1)


def look_after_orphans(but: Collection[int]) -> int:
    """Wait for the adopted that have ended: nobody else does. Those of `but` have somebody who does.

    Children of our own session are not adopted, where each process that may leave orphans has a session of its own.
    Kills those of groups that were to end a moment ago; returns how many of them there still are.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:
        return 0  # a kernel that does not tell
    ours, left = os.getsid(0), []
    for pid in set(map(int, children.split())) - set(but):
        with suppress(ProcessLookupError, ChildProcessError):
            session = os.getsid(pid)
            if session != ours and os.waitpid(pid, os.WNOHANG) == (0, 0) and session in _ended:
                left.append(session)
                if time.monotonic() - _ended[session] >= _GRACE_S:
                    os.kill(pid, signal.SIGKILL)
    for session in _ended.keys() - set(left):
        if time.monotonic() - _ended[session] >= _GRACE_S:
            del _ended[session]
    return len(left)


def end_orphans() -> None:
    """Wait until none is left of the groups that were to end, which takes the moment that they have, and little more."""
    deadline_s = time.monotonic() + 2 * _GRACE_S
    while look_after_orphans(()) and time.monotonic() < deadline_s:
        time.sleep(_TICK_S)


def _prctl(option: int, value: object) -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(option, value) == 0)
    return False
