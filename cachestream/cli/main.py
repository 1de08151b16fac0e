"""Entry point of the command `cachestream`: signals, output and exit codes. Every failure ends in one clear
line.

The command line is imported here, with Ctrl-C handled: the import takes a moment.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

from cachestream.errors import CacheStreamError, ConfigError
from cachestream.worker.processes import have_standard_files

PROBLEM: Final = 1
USAGE: Final = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; `arguments` are those of the process unless given."""
    have_standard_files()
    # A signal that is ignored, as under nohup, stays ignored.
    heeds_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupts:
        signal.signal(signal.SIGINT, _exit_at_once)
    app = importlib.import_module("cachestream.cli.app").app
    _make_outputs_writable()
    signal.signal(signal.SIGTERM, _on_terminate)
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    # Only this logger: storage drivers log where they found credentials.
    logging.getLogger("cachestream").setLevel(logging.INFO)
    try:
        if heeds_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(None if arguments is None else list(arguments))
    except CacheStreamError as error:
        _print_error(str(error))
        sys.exit(USAGE if isinstance(error, ConfigError) else PROBLEM)
    except OSError as error:  # a process's main: a full disk under stdout, a current folder that is gone
        _print_error(_describe(error))
        _drop_output()
        sys.exit(PROBLEM)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _exit_at_once(number: int, _frame: FrameType | None) -> None:
    """Exit without an exception, which modules that are being imported would report as their own error."""
    os._exit(128 + number)


def _on_terminate(number: int, _frame: FrameType | None) -> None:
    """Exit by an exception, as for Ctrl-C, so that a worker in the foreground is released."""
    sys.exit(128 + number)


def _describe(error: OSError) -> str:
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder is gone; change to another one, or give absolute paths"
    return f"{error.filename or 'the output'}: {error.strerror or error}"


def _print_error(line: str) -> None:
    sys.stderr.write(f"cachestream: {line}\n")


def _make_outputs_writable() -> None:
    """Open both outputs where they are closed, and escape characters that their encoding lacks."""
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Drop unwritten output: Python would try to write it again at exit, and complain."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
