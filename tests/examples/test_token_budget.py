"""The example of selected samples and batches by tokens runs, and what it prints holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked import fork_script

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_selects_and_pads_less(tmp_path: Path) -> None:
    script = ROOT / "examples" / "token_budget.py"
    done = fork_script(script, (), cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)}, timeout_s=300)
    assert done.returncode == 0, done.stderr
    selected, cached = map(int, re.findall(r"selected (\d+) of (\d+)", done.stdout)[0])
    assert 1000 < selected < cached
    found = re.findall(r"(\w.*): (\d+) samples, (\d+) words in (\d+) batches, and ([\d.]+)% of", done.stdout)
    assert [name for name, *_ in found] == ["fixed batches", "max_tokens"]
    assert {int(samples) for _, samples, *_ in found} == {selected}
    assert len({words for _, _, words, *_ in found}) == 1
    assert float(found[1][-1]) < 20 < float(found[0][-1])
