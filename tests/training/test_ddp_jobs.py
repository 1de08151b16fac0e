"""Jobs of real processes with gloo: ranks that are killed, that come early, and that are made anew."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache, EpochLoader
from cachestream.training.manifests import load_manifest
from tests.support.forked import fork_process
from tests.training.conftest import NewCache
from tests.training.scripts import train
from tests.training.scripts.ports import free_port

pytestmark = pytest.mark.usefixtures("forked")


def results(out: Path, ranks: range | list[int]) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in ranks]


class Ranks:
    """Ranks started without a launcher, so that the others stay when one of them is killed."""

    def __init__(self, cache: Cache, out: Path, mode: str, size: int = 2) -> None:
        job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = [
            fork_process(
                train.main,
                (cache.path, out, mode),
                environment={**job, "RANK": str(rank)},
                output=out / f"rank {rank}",
            )
            for rank in range(size)
        ]

    def wait_for_pids(self, out: Path) -> None:
        give_up = time.monotonic() + 300
        while not all((out / f"{rank}.pid").exists() for rank in range(2)):
            assert time.monotonic() < give_up, "the ranks have not come to their third epoch"
            time.sleep(0.02)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(60)
            process.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("how", "victim", "is_locked"),
    [
        (signal.SIGKILL, 1, False),
        (signal.SIGKILL, 0, False),
        pytest.param(signal.SIGSTOP, 1, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_or_stopped_is_an_error_on_the_other_within_the_deadline(
    how: signal.Signals, victim: int, is_locked: bool, new_cache: NewCache, tmp_path: Path
) -> None:
    """Also of a rank that is stopped while it reads the catalogue (`is_locked`), which nobody can change then."""
    cache = new_cache(2, 20)
    ranks = Ranks(cache, tmp_path, "survive")
    try:
        ranks.wait_for_pids(tmp_path)
        pid = ranks.processes[1].pid
        with cache.catalogue.reading() if is_locked else nullcontext() as tables:
            if tables is not None:
                tables.totals()
            os.kill(ranks.processes[victim].pid or 0, how)
            ranks.processes[1 - victim].join(180)
        (told,) = results(tmp_path, [1 - victim])
        assert told["error"] == "RankMismatchError", told["message"]
        # The default deadline is 60 s; here it is cut to half of the loader's timeout of 8 s.
        assert told["waited_s"] < 50
        if victim == 1:
            assert f"rank 1 (pid {pid} on" in told["message"]
        else:
            assert "the process that hosts it" in told["message"]
    finally:
        ranks.end()
    cache.evict(0)
    assert cache.num_shards == 0


def run(cache: Cache, out: Path, mode: str, size: int) -> list[dict[str, Any]]:
    ranks = Ranks(cache, out, mode, size)
    try:
        for process in ranks.processes:
            process.join(300)
        assert [process.exitcode for process in ranks.processes] == [0] * size
    finally:
        ranks.end()
    return results(out, range(size))


@pytest.mark.e2e
def test_ranks_that_ask_before_they_know_one_another_are_told_and_share_the_samples_from_then_on(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(4, 24)
    with EpochLoader(cache, 4, record=tmp_path / "alone") as loader:
        batches = iter(loader)
        before = [n for _ in range(6) for n in next(batches)["number"].tolist()]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        assert len(list(batches)) == 18
    ranks = run(cache, tmp_path, "early", 2)
    for name in ranks[0]["given"]:
        shares = [rank["given"][name] for rank in ranks]
        expected = set(range(96)) - set(before if name == "resumed" else ())
        assert sorted(n for share in shares for n in share) == sorted(expected), name
        assert len(shares[0]) == len(shares[1])
    whole = {"len": [24, 12], "resumed": [24, 15], "recorded": [24, 12], "replayed": [24, 12]}
    for rank in ranks:
        assert rank["lengths"] == whole
        assert "epoch 0 was begun before torch.distributed.init_process_group()" in rank["error"]
        assert rank["epoch"] == 2  # the one that was left, and the next one
        told = [text for text in rank["told"] if "before torch.distributed.init_process_group()" in text]
        assert len(told) >= 6
    assert all("it is rank 0 of 2 from now on" in text for text in ranks[0]["told"])
    assert all("WORLD_SIZE is 2: it answers for one process alone" in text for text in ranks[1]["told"])
    assert load_manifest(str(tmp_path / "recorded" / "epoch-000000.json")).settings["world_size"] == 2
    assert cache.status().leases == 0
