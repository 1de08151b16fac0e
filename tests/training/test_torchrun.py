"""Ranks that torchrun starts keep the heaviest samples of the cache that they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import cachestream as cs
from tests.training.scripts.ports import free_port
from tests.training.sources import Single
from tests.training.test_turnover import LIMIT_BYTES, SAMPLE_BYTES
from tests.worker.support import wait_until

ROOT: Final = Path(__file__).parents[2]
LESS: Final = Single(800, SAMPLE_BYTES)  # so few that all has come after a few epochs


def run_ranks(script: str, out: Path, *arguments: object) -> list[Any]:
    """What the two ranks of a job have written."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(f"--master-port={free_port()}", "--module", f"tests.training.scripts.{script}"),
            *map(str, (out, *arguments)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_ranks_of_a_cache_that_evicts_by_weight_keep_the_heaviest(tmp_path: Path) -> None:
    heavy = set(range(0, LESS.num_units, 40))
    options = {
        "turnover": 0.12,
        "weights": {str(n): 20.0 if n in heavy else 1.0 for n in range(LESS.num_units)},
    }
    (tmp_path / "options.json").write_text(json.dumps(options))
    with (
        cs.Cache(tmp_path / "cache", LIMIT_BYTES, min_free=0, eviction="least-weight") as cache,
        cs.start_worker(cache, LESS, num_workers=1, shard_size="16kB"),
    ):
        wait_until(lambda: cache.fill_state() == "full", "the cache is full")
        ranks = run_ranks("turning", tmp_path, 8, cache.path)
        status = cache.status()
    assert status.evicted_samples + status.num_samples > LESS.num_units, "all has come"
    assert status.evicted_unused_samples == 0
    last = {n for epochs in ranks for n in epochs[-1]}
    assert len(last) < LESS.num_units / 2
    assert len(last & heavy) > 0.8 * len(heavy)
