"""What a background process has from whoever started it, and must not keep: signals, and standard input and output."""

from __future__ import annotations

import os
import signal

__all__ = ["begin_clean", "have_standard_files", "let_go_of_terminal"]


def begin_clean() -> None:
    """Not as the caller may be: deaf to its children's deaths and to signals, or without standard files.

    A signal that is ignored or blocked stays so in what a process starts.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    have_standard_files()


def have_standard_files() -> None:
    """Open those of standard input and outputs that are closed: the first file opened would take their place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)  # a Python started without standard error has no sys.stderr
    os.close(fd)


def let_go_of_terminal() -> None:
    """The worker outlives the terminal it was started from, and must not write to it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
