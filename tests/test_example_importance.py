"""The example of weights by key runs, and says what it found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked import fork_script

ROOT = Path(__file__).parents[1]


@pytest.mark.usefixtures("forked")
def test_the_example_compares_weights_with_uniform_sampling_and_says_which_wins() -> None:
    done = fork_script(
        ROOT / "examples" / "importance.py",
        ("--seeds", 2, "--epochs", 2),
        cwd=ROOT,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr
    accuracies = {
        way: [float(text) for text in re.findall(r"([0-9.]+)%", line)]
        for way, line in re.findall(r"^  (\S.*?)  +(.*%)$", done.stdout, re.MULTILINE)
    }
    assert accuracies.keys() == {"uniform", "loss", "half and half"}
    assert all(len(curve) == 2 and curve[-1] > 60 for curve in accuracies.values())
    assert len(re.findall(r": (wins|loses|makes no difference that shows)$", done.stdout, re.MULTILINE)) == 6
