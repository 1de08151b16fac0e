"""The command line for tests: `python -m cachestream`, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

DEADLINE_S: Final = 150.0


@contextmanager
def _as_a_program(arguments: list[str], cwd: Path | None, environment: dict[str, str]) -> Iterator[None]:
    """What a program may change in its process is as before at the end."""
    logger, root = logging.getLogger("cachestream"), logging.getLogger()
    level, handlers = logger.level, root.handlers
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    here, modules = os.getcwd(), set(sys.modules)
    os.chdir(cwd or here)
    root.handlers = []  # the command line logs to its standard error
    try:
        with (
            mock.patch.object(sys, "argv", ["cachestream", *arguments]),
            mock.patch.object(sys, "path", list(sys.path)),
            mock.patch.dict(os.environ, environment),
        ):
            yield
    finally:
        os.chdir(here)
        for name in set(sys.modules) - modules:  # what the command has loaded from the current folder
            if cwd is not None and Path(getattr(sys.modules[name], "__file__", None) or "/").parent == cwd:
                del sys.modules[name]
        root.handlers = handlers
        logger.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)


def call(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has loaded everything: milliseconds. What it raises fails the test."""
    command, code = list(map(str, arguments)), None
    out, err = io.StringIO(), io.StringIO()
    with (
        _as_a_program(command, cwd, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_module("cachestream", run_name="__main__", alter_sys=True)
        except SystemExit as exit_:
            code = exit_.code
    return subprocess.CompletedProcess(command, int(code or 0), out.getvalue(), err.getvalue())


def done(*arguments: object, cwd: Path | None = None, **environment: str) -> str:
    """The data of a command that must have succeeded."""
    result = call(*arguments, cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def told(*arguments: object, cwd: Path | None = None, **environment: str) -> Any:
    """The JSON of a command that must have succeeded."""
    return json.loads(done(*arguments, "--json", cwd=cwd, **environment))


def refused(code: int, *arguments: object, cwd: Path | None = None, **environment: str) -> str:
    """The message of a command that must have ended with `code`, without data and without a traceback."""
    result = call(*arguments, cwd=cwd, **environment)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@contextmanager
def program(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which is killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cachestream", *map(str, arguments)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
