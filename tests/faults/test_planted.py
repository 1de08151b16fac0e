"""The tests find what they are there for: of planted faults, each fails the test of the promise that it breaks."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.faults.planted import FAULTS, Fault, copy_project, plant

ROOT: Final = Path(__file__).parents[2]
ONE_TEST_S: Final = 60
ALL_S: Final = 900


def run_tests(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run `tests` over the package in `folder`, none of them twice, up to the first that fails."""
    options = (
        "-qx",
        "-m",
        "not slow",
        "--reruns=0",
        f"--timeout={ONE_TEST_S}",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ALL_S,
        check=False,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_test_exists(fault: Fault, tmp_path: Path) -> None:
    package = ROOT / "cachestream"
    shutil.copytree(package, tmp_path / "cachestream", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    path = plant(tmp_path / "cachestream", fault)
    changed = path.read_text(encoding="utf-8")
    assert changed != (package / path.relative_to(tmp_path / "cachestream")).read_text(encoding="utf-8")
    ast.parse(changed)
    file, _, function = fault.found_by.partition("::")
    assert not function or f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(ALL_S + 100)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_fails_the_test_of_the_promise_that_it_breaks(fault: Fault, tmp_path: Path) -> None:
    copy_project(ROOT, tmp_path)
    plant(tmp_path / "cachestream", fault)
    done = run_tests(tmp_path, fault.found_by)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-5000:] + done.stderr[-1000:]
    assert f"FAILED {fault.found_by}" in done.stdout, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(ALL_S + 100)
def test_without_a_fault_the_same_tests_pass(tmp_path: Path) -> None:
    copy_project(ROOT, tmp_path)
    done = run_tests(tmp_path, *(fault.found_by for fault in FAULTS))
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-5000:] + done.stderr[-1000:]
