"""Without the options of a cluster no process of a worker loads Ray, or what uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachestream import Cache
from tests.worker.support import run_python

SCRIPT = """
import sys
import cachestream as cs
import cachestream.worker.supervisor

def loaded(rng):
    return {"names": " ".join(name for name in sys.modules if "ray" in name.split("."))}

cache = cs.Cache(sys.argv[1], size_limit="20MB")
with cs.start_worker(cache, cs.CallableSource(loaded, num_units=1), num_workers=1) as worker:
    worker.wait(timeout_s=60)
((_, sample),) = cs.CacheSource(sys.argv[1]).read(0, None)
print("sampling:", sample["names"])
print("supervisor:", loaded(None)["names"])
"""


@pytest.mark.e2e
def test_no_process_loads_ray(tmp_path: Path) -> None:
    found = run_python(SCRIPT, str(tmp_path / "cache"))
    assert found.splitlines() == ["sampling: ", "supervisor: "]
    assert Cache(tmp_path / "cache").num_samples == 1
