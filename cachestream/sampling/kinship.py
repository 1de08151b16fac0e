"""What Linux lets a process say of its kin: when it dies with its parent, whose orphans it takes in, its name."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress
from typing import Final

__all__ = ["adopt_orphans", "die_with_parent", "name_process"]

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


def _prctl(option: int, value: object) -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(option, value) == 0)
    return False
