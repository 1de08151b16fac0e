"""Ranks that torchrun starts again find their cache and its worker within seconds, and every wait for others is announced."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from tests.training.scripts.ports import free_port

ROOT: Final = Path(__file__).parents[2]
# A start takes 2 s on an idle machine; it must not wait for a process that is gone.
START_S: Final = 60.0

# Rank 1 comes late to the first stream, rank 0 to the second.
LATE_RANKS: Final = """
import logging, os, sys, time
import numpy, torch.distributed as dist
import cachestream as cs

logging.basicConfig(format="%(message)s")
dist.init_process_group("gloo")
rank = dist.get_rank()
for late in (1, 0):
    dist.barrier()
    if rank == late:
        time.sleep(8)
    cs.stream(lambda rng: {"x": rng.random(8)}, f"{sys.argv[1]}/{late}", "20MB", min_free=0, batch_size=4, num_workers=1,
              timeout_s=20).close()
dist.destroy_process_group()
"""

# Each life but the last ends in another way: the dying rank and its last moment are those of the restart's number.
RESTARTED: Final = """
import json, os, signal, sys, time
import numpy, torch, torch.distributed as dist
import cachestream as cs

rank, life, out = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
moments = ["in stream", "after it", "first batch", "in the epoch", "between epochs", "never"]


def die(*_):
    if life % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if life % 3 == 1:
        raise RuntimeError("planned")
    os.kill(os.getpid(), signal.SIGTERM)


def reach(moment):
    if moment == moments[life] and rank == life % 2:
        die()


dist.init_process_group("gloo")
if moments[life] == "in stream" and rank == 0:
    signal.signal(signal.SIGALRM, die)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
began = time.monotonic()
loader = cs.stream(lambda rng: {"x": rng.random(64)}, f"{out}/cache", "20MB", min_free=0, batch_size=4, num_workers=1)
took_s = time.monotonic() - began
with open(f"{out}/{life}.{rank}.json", "w") as file:
    json.dump({"took_s": took_s, "attached": loader.worker.attached}, file)
reach("after it")
for epoch in range(2):
    for number, batch in enumerate(loader):
        reach("first batch")
        if number == 3:
            reach("in the epoch")
        dist.all_reduce(torch.ones(1))
    reach("between epochs")
loader.close()
dist.destroy_process_group()
"""


def draw(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(8)}


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of 2 on one node, at its first start, which torchrun would start again."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_first_start_under_torchrun_says_that_its_kept_store_may_hang_a_restart(
    torchrun: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cs.Cache(tmp_path / "cache", "20MB", min_free=0)

    def told() -> int:
        caplog.clear()
        cs.stream(draw, cache, batch_size=4).close()
        return caplog.text.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")

    with cs.start_worker(cache, draw, num_workers=1):
        assert told() == 1
        torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert told() == 0, "once a run is enough"
        torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        torchrun.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        assert told() == 0, "each start has a store of its own"


@pytest.mark.e2e
def test_a_start_that_waits_for_another_process_says_so_while_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cs.Cache(tmp_path / "cache", "20MB", min_free=0)
    path = tmp_path / "cache" / "worker" / "attach.lock"
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        release = threading.Timer(18.0, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        with cs.start_worker(cache, draw, num_workers=1):
            release.join()
    assert (
        f"its worker has not started within 15 s (the call gives up after three minutes at most): another process holds {path}"
        in (caplog.text)
    )


def run(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.e2e
def test_ranks_that_wait_in_stream_for_a_late_one_name_it_before_they_give_up(tmp_path: Path) -> None:
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [run("-c", LATE_RANKS, str(tmp_path), RANK=str(rank), **job) for rank in range(2)]
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "rank 0 waits, and gives up after 18 s: rank 1 has not come to cs.stream within 5." in said[0]
    assert "rank 1 has waited 5." in said[1]
    assert "s for rank 0 to come to cs.stream, and gives up after 18 s" in said[1]


@pytest.mark.e2e
def test_no_restart_waits_in_stream_for_those_that_died_whatever_they_died_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    job = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=5"),
        *(str(script), str(tmp_path)),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    said = job.communicate(timeout=280)[1]
    assert job.returncode == 0, said[-5000:]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in said
    for life in range(1, 6):
        for rank in range(2):
            found = json.loads((tmp_path / f"{life}.{rank}.json").read_text())
            assert found["took_s"] < START_S, (life, rank)
