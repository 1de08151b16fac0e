"""The example of packed tokens, run as a user runs it: the model learns, from windows that read as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.forked import fork_script

pytestmark = pytest.mark.usefixtures("forked")
ROOT: Final = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_of_packed_tokens_learns(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = ROOT / "examples" / "pack_tokens.py"
    done = fork_script(script, cwd=tmp_path, environment=environment, timeout_s=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    losses = [float(loss) for loss in re.findall(r"loss (?:fell to )?([0-9.]+)", done.stdout)]
    assert losses[0] > 5.8  # log(2000) is 7.6
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"^10\d\d windows of 129 tokens", done.stdout, re.MULTILINE)
