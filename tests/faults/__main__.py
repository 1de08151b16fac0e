"""Plant each fault in a copy of the project, and print which test finds it: `python -m tests.faults [-j 2] [NAME ...]`.

NAME: a part of what the fault breaks; all faults without one. Each is planted and the test of `found_by` is run;
with `--all` all of `tests/contract` up to the first test that fails. The list is what the
commits of a rebuild are held against: it ends in exit code 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.faults.planted import FAULTS, Fault, copy_with

__all__ = ["Outcome", "find", "run_tests"]

ROOT: Final = Path(__file__).parents[2]
ONE_TEST_S: Final = 400  # longer than the deadlines of the tests themselves
ALL_S: Final = 1800
_FAILED: Final = re.compile(r"^(FAILED|ERROR) (\S+?)(?:\[.*?\])?(?: - (.*))?$", re.MULTILINE)
# Errors by which a test says what it saw: `(one,) = found` is an assertion, too, and so are the
# deadline of a command, and a parser of what it prints.
_SEEN: Final = re.compile(
    r"assert |AssertionError|Failed: (?!Timeout)|cachestream\.errors\.|ExceptionGroup: Hypothesis|ValueError: .* to unpack|json\.decoder\.JSONDecodeError|subprocess\.TimeoutExpired"
)
# Only the plugins that the tests need: others take seconds to load, once for each fault.
_OPTIONS: Final = (
    "-qx", "--tb=short", "--durations=0", "-m", "not slow", f"--timeout={ONE_TEST_S}",
    "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """The test that failed under a fault, and its error in one line; "" for none. `output` is that of the tests."""

    test: str
    error: str
    seconds: float
    output: str

    @property
    def is_found(self) -> bool:
        """True if the test failed by what it saw, or by an error of cachestream's: a crash or a timeout finds nothing."""
        return bool(self.test) and _SEEN.match(self.error) is not None


def run_tests(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `tests` over the package in `folder`, up to the first that fails."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "500",  # the line of a test that failed ends with its error
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile the package anew
    return subprocess.run(
        [sys.executable, "-m", "pytest", *_OPTIONS, *tests],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ALL_S,
        check=False,
    )


def _end_left_behind(folder: str) -> None:
    """End the processes that run over `folder`: a fault may keep a worker from ending."""
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError):  # ended meanwhile, or another user's
            if f"\0PYTHONPATH={folder}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def find(fault: Fault, tests: Sequence[str]) -> Outcome:
    """Run `tests` over a copy of the project with `fault`."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as folder:
        copy_with(ROOT, Path(folder), fault)
        done = run_tests(Path(folder), tests)
        _end_left_behind(folder)
    told = _FAILED.findall(done.stdout) if done.returncode == pytest.ExitCode.TESTS_FAILED else []
    # What a test that fails has left open is an ERROR, too, and says less.
    _, test, error = max(told, default=("", "", ""))
    return Outcome(test, error, time.monotonic() - began_s, done.stdout[-5000:] + done.stderr[-1000:])


def main() -> int:
    """Print a line for each fault; return 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--all", action="store_true", help="run all of tests/contract, not found_by alone")
    given = parser.parse_args()
    wanted = [one for one in FAULTS if not given.names or any(name in one.breaks for name in given.names)]

    def look(fault: Fault) -> Outcome:
        return find(fault, ["tests/contract" if given.all else fault.test])

    lost = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for fault, found in zip(wanted, pool.map(look, wanted), strict=True):
            lost += not found.is_found
            by = found.test.removeprefix("tests/contract/") if found.is_found else "NOT FOUND"
            sys.stdout.write(f"{fault.breaks}\n    {by} ({found.seconds:.0f} s) {found.error[:150]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - lost} of {len(wanted)} faults are found\n")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
