"""The notebook runs from top to bottom, as a reader runs it, and is kept without its outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.interpreters import QUICK

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT: Final = Path(__file__).parents[2]
NOTEBOOK: Final = ROOT / "examples" / "photographs.ipynb"
HELD_BACK: Final = """
def resize(sample, resized=[]):
    resized.append(sample["label"])
    while len(resized) > 150 and not (folder / "first epoch is over").exists():
        time.sleep(0.05)"""


@pytest.fixture
def book() -> Any:
    found = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(found)
    return found


def test_the_notebook_is_kept_without_outputs_and_named_where_it_is_looked_for(book: Any) -> None:
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}
    assert "`photographs.ipynb`" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the packages' own
def test_the_notebook_runs_and_its_epochs_grow(
    book: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PYTHONPATH": QUICK, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        environment[name] = str(tmp_path / name.lower())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel sets its own
    # However slow the machine is, some photographs arrive only after the first epoch.
    for cell in book.cells:
        cell.source = cell.source.replace("def resize(sample):", HELD_BACK).replace(
            "    seconds.append(", '    (folder / "first epoch is over").touch()\n    seconds.append('
        )
    source = "".join(cell.source for cell in book.cells)
    assert HELD_BACK in source
    assert '"first epoch is over").touch()' in source
    book.cells[-1].source += "\nprint(*samples)"
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute(
        env=os.environ.copy()
    )
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    samples = [int(number) for number in code[-1].outputs[-1].text.split()]
    assert samples == sorted(samples)
    assert samples[0] < samples[-1] == 900
    shown = {kind for cell in code for output in cell.outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= shown
    assert not list(tmp_path.glob("photographs-*"))  # it removes what it has made
