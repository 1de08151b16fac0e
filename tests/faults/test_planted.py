"""The tests find what they are there for: of planted faults, each fails the test of the promise that it breaks."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.faults.__main__ import ALL_S, ROOT, find, run_tests
from tests.faults.planted import FAULTS, Fault, copy_project, planted

PACKAGE: Final = ROOT / "cachestream"
FOLDERS: Final = (
    *("transport", "listing", "sources", "storage", "worker", "training"),
    *("integrations", "cli", "dashboard", "tools", "ray"),
)


@cache
def functions_of(file: Path) -> frozenset[str]:
    """The names of the tests in `file`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.e2e
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_test_exists(fault: Fault) -> None:
    file, text = planted(PACKAGE, fault)
    assert text.encode() != file.data
    compile(text, str(file.path), "exec")
    test, _, function = fault.test.partition("::")
    assert function in functions_of(ROOT / test)


@pytest.mark.e2e
def test_there_are_sixty_faults_in_all_folders_and_each_breaks_something_else() -> None:
    assert len({fault.breaks for fault in FAULTS}) == len(FAULTS) >= 60
    assert len({planted(PACKAGE, fault)[1] for fault in FAULTS}) == len(FAULTS)
    homes = {planted(PACKAGE, fault)[0].path.relative_to(PACKAGE).parts[0] for fault in FAULTS}
    assert homes >= set(FOLDERS)


@pytest.mark.slow
@pytest.mark.timeout(ALL_S + 100)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_fails_the_test_of_the_promise_that_it_breaks(fault: Fault) -> None:
    found = find(fault, [fault.test])
    assert found.is_found, found.output


@pytest.mark.slow
@pytest.mark.timeout(ALL_S + 100)
def test_without_a_fault_the_same_tests_pass(tmp_path: Path) -> None:
    copy_project(ROOT, tmp_path)
    done = run_tests(tmp_path, sorted({fault.test for fault in FAULTS}))
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-5000:] + done.stderr[-1000:]
