"""What Linux lets a process say of its kin: when it dies with its parent, whose orphans it takes in, its name, its group."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = [
    "adopt_orphans",
    "die_with_parent",
    "end_group",
    "end_if_forked",
    "kill_group",
    "name_process",
    "reap_orphans",
]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36


def die_with_parent() -> None:
    """Be killed when the parent ends, however it does."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends; False where the system does not have that."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Be called `name` by `ps` and `top`, which show 15 characters of it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def kill_group(pid: int) -> None:
    """Kill the child `pid` and all in the group that it leads. To be called before it is waited for: a number that is
    free again may be another's.
    """
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_group(pid: int) -> None:
    """If the child `pid` has ended, kill what it has left of its group. To be called before it is waited for."""
    with suppress(ChildProcessError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            kill_group(pid)


def end_if_forked(pid: int) -> None:
    """End a copy of process `pid` that the user's code has forked and let return from it: it would do its work too."""
    if os.getpid() != pid:
        os.write(
            2, b"a process that a transform or a source had forked came back from it; end it with os._exit\n"
        )
        os._exit(1)


def reap_orphans(but: Collection[int]) -> None:
    """Wait for the adopted that have ended: nobody else does. Those of `but` have somebody who does.

    Children of our own session are not adopted, where each process that may leave orphans has a session of its own.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:
        return  # a kernel that does not tell
    ours = os.getsid(0)
    for pid in set(map(int, children.split())) - set(but):
        with suppress(ProcessLookupError, ChildProcessError):
            if os.getsid(pid) != ours:
                os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: object) -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(option, value) == 0)
    return False
