"""Real jobs of real processes: torchrun with gloo, and ranks that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache
from tests.training.conftest import NewCache
from tests.training.scripts.ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = "tests.training.scripts.train"


def results(out: Path, ranks: range | list[int]) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in ranks]


def test_two_ranks_under_torchrun_train_disjoint_and_equal_epochs_over_a_growing_cache(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(3, 20)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    subprocess.run(
        [*command, "--module", SCRIPT, cache.path, str(tmp_path), "epochs"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
        capture_output=True,
    )
    first, second = results(tmp_path, range(2))
    assert first["weight"] == second["weight"]
    for mine, theirs in zip(first["epochs"], second["epochs"], strict=True):
        assert [len(step) for step in mine] == [len(step) for step in theirs]
    drawn = [
        sorted(n for steps in epoch for step in steps for n in step)
        for epoch in zip(first["epochs"], second["epochs"], strict=True)
    ]
    assert drawn[0] == drawn[1] == list(range(60))
    assert drawn[-1] == list(range(80))
    assert cache.status().leases == 0


class Ranks:
    """Two ranks started by hand, so that nobody else tidies up when one of them is killed."""

    def __init__(self, cache: Cache, out: Path) -> None:
        port = str(free_port())
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", SCRIPT, cache.path, str(out), "survive"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "OMP_NUM_THREADS": "1",
                },
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        give_up = time.monotonic() + 300
        while not all((out / f"{rank}.pid").exists() for rank in range(2)):
            assert time.monotonic() < give_up, "the ranks have not come to their third epoch"
            time.sleep(0.02)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(60)


@pytest.mark.parametrize(
    ("how", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGKILL, 0)], ids=str
)
def test_a_rank_that_is_killed_or_stopped_is_an_error_on_the_other_within_the_deadline(
    how: signal.Signals, victim: int, new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(2, 20)
    ranks = Ranks(cache, tmp_path)
    try:
        ranks.processes[victim].send_signal(how)
        ranks.processes[1 - victim].wait(180)
        (told,) = results(tmp_path, [1 - victim])
        assert told["error"] == "RankMismatchError"
        # The default deadline is 60 s; here it is cut to half of the loader's timeout of 12 s.
        assert told["waited_s"] < 50
        if victim == 1:
            assert f"rank 1 (pid {ranks.processes[1].pid} on" in told["message"]
        else:
            assert "the process that hosts it" in told["message"]
    finally:
        ranks.end()
    cache.evict(0)
    assert cache.num_shards == 0
