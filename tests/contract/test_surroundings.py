"""The user's modules, prints and environment do not disturb the processes of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A program with an eviction function, a transform and modules of its own, beside it or in the working directory.
PROGRAM = """
import sys, json, types, random
sys.path.insert(0, sys.argv[2])
import cachestream as cs
import printing_module
if __name__ == "__main__":
    cache = cs.Cache(sys.argv[1], "10MB", min_free=0, eviction=printing_module.evict)
    with cs.start_worker(cache, [{"x": 1}, {"x": 2}], num_workers=1, transform=printing_module.transform) as worker:
        worker.wait(100)
    print("cached", sorted(int(cache.snapshot()[i]["x"]) for i in range(2)))
"""
PRINTING = """
import os, sys
print("." * 9000, end="", flush=True)
os.write(1, b"loaded")
def evict(rows):
    return rows
def transform(sample):
    import own_module
    print(".", end="")
    return {"x": sample["x"] + own_module.ONE}
"""


def run(folder: Path, working: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "printing_module.py").write_text(PRINTING)
    (folder / "own_module.py").write_text("ONE = 1\n")
    return subprocess.run(
        [sys.executable, str(folder / "program.py"), str(working / "cache"), str(folder)],
        cwd=working,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", [pytest.param("", marks=pytest.mark.e2e), "1"])
def test_modules_that_print_do_not_disturb_the_answer_of_the_worker(tmp_path: Path, unbuffered: str) -> None:
    done = run(tmp_path, tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert "cached [2, 3]" in done.stdout, done.stderr


@pytest.mark.e2e
def test_a_module_in_the_working_directory_does_not_take_the_place_of_a_standard_one(tmp_path: Path) -> None:
    folder, working = tmp_path / "scripts", tmp_path / "working"
    for one in (folder, working):
        one.mkdir()
    for name in ("json", "os", "types", "random", "typing", "cachestream", "numpy"):
        (working / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    done = run(folder, working)
    assert "cached [2, 3]" in done.stdout, done.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.e2e
def test_a_module_beside_the_script_that_the_program_did_not_get_is_not_given_to_the_worker(
    tmp_path: Path,
) -> None:
    """The program has the standard modules already when it adds the folder to its path."""
    folder, modules = tmp_path / "scripts", tmp_path / "modules"
    for one in (folder, modules):
        one.mkdir()
    for name in ("types", "json", "random", "queue", "signal"):
        (modules / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    (folder / "program.py").write_text(PROGRAM)
    (modules / "printing_module.py").write_text(PRINTING)
    (modules / "own_module.py").write_text("ONE = 1\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM.replace(
                "import sys,", "import cachestream as cs\ncs.start_worker\ncs.EpochLoader\nimport sys,"
            ),
            str(tmp_path / "cache"),
            str(modules),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert "cached [2, 3]" in done.stdout, done.stderr
    assert not (tmp_path / "executed").exists()
