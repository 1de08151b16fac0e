"""The command line, in processes of its own or in this one, and what it says."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from cachestream import Cache
from cachestream.cli.main import main
from cachestream.storage.status import CacheStatus
from tests.support.forked import run_forked

COUNT: Final = 60
TIMEOUT_S: Final = 180  # only what hangs takes so long, also on a busy machine
COMMAND: Final = [sys.executable, "-m", "cachestream"]


def cli(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    if not any(name.startswith("PYTHON") for name in environment or ()):
        return run_forked(main, arguments, cwd=cwd, environment=environment, timeout_s=TIMEOUT_S)
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def cli_here(capfd: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Call the command line in this process: any exception but the exit fails the test."""
    capfd.readouterr()
    logger, on_terminate = logging.getLogger("cachestream"), signal.getsignal(signal.SIGTERM)
    handlers, level = logging.root.handlers, logger.level
    try:
        logging.root.handlers = []  # the command line logs to its standard error
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
    finally:
        logging.root.handlers = handlers
        logger.setLevel(level)
        signal.signal(signal.SIGTERM, on_terminate)
    shown, code = capfd.readouterr(), exit_.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(list(map(str, arguments)), code, shown.out, shown.err)


def done(result: subprocess.CompletedProcess[str]) -> str:
    """The output of a command that must have succeeded."""
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one clear line of a command that must have failed with `code`."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    return result.stderr


@contextmanager
def running(*arguments: object, stdout: Any = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """The command line in the background, killed at the end if need be."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def look(cache: Path) -> CacheStatus:
    """The cache as this process sees it."""
    with Cache(cache) as opened:
        return opened.status()


def fill_command(images: Path, cache: Path, *more: object) -> list[object]:
    return ["worker", images, cache, "--size-limit", "50MB", "--min-free", 0, "--workers", 1, *more]
