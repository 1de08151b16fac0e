"""The example of a trace runs, and its picture shows every process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.support.forked import fork_script

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_writes_a_trace_and_draws_it(tmp_path: Path) -> None:
    arguments = ("--seconds", "0.5", "--output", str(tmp_path / "trace.json"))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = fork_script(
        ROOT / "examples" / "trace.py", arguments, cwd=tmp_path, environment=environment, timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"prepare", "read", "publish"}
    with Image.open(tmp_path / "trace.png") as picture:
        assert picture.width > 800
