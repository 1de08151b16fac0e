"""Where ranks meet: not where those before them met, and never waiting for a store that says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cachestream import RankMismatchError
from cachestream.training import meeting
from cachestream.training.meeting import Cancelled, Line, meet_at
from cachestream.training.ranks import Deadlines, StoreRanks, is_elastic

PATIENCE_S: Final = 180.0
SERVER: Final = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Dist:
    """What `torch.distributed` says in each thread, which stands for a rank; the store outlives them."""

    def __init__(self, server: Any, size: int) -> None:
        self.distributed_c10d = self
        self._server = server
        self._size = size
        self.local = threading.local()

    def get_rank(self) -> int:
        return int(self.local.rank)

    def get_world_size(self) -> int:
        return self._size

    def _get_default_store(self) -> Any:
        return TCPStore("127.0.0.1", self._server.port, is_master=False)


@pytest.fixture
def dist(job_server: Any, monkeypatch: pytest.MonkeyPatch) -> Dist:
    found = Dist(job_server, 3)
    monkeypatch.setattr(meeting, "dist", found)
    return found


def meet(dist: Dist, rank: int, name: str, life: int) -> list[str]:
    """What rank `rank` in its life number `life` learns of the others: the names of their caches."""
    dist.local.rank = rank
    never = threading.Event()
    line = meet_at(name, "the test", PATIENCE_S, PATIENCE_S, never)
    ranks = StoreRanks(line, rank, 3, Deadlines(PATIENCE_S), never)
    return ranks.meet({}, f"rank {rank} in life {life}")


def test_ranks_that_are_started_again_over_the_same_store_meet_one_another_and_not_their_past(
    dist: Dist,
) -> None:
    for life in range(3):
        with ThreadPoolExecutor(3) as pool:
            late = [pool.submit(meet, dist, rank, "again", life) for rank in (2, 1)]
            first = pool.submit(meet, dist, 0, "again", life)
            expected = [f"rank {rank} in life {life}" for rank in range(3)]
            assert [found.result(PATIENCE_S) for found in (first, *late)] == [expected] * 3


def test_a_rank_that_nobody_answers_names_rank_0_or_ends_when_closed(dist: Dist) -> None:
    dist.local.rank = 1
    with pytest.raises(RankMismatchError, match=r"rank 0 has not come to the test within 0\.2 s"):
        meet_at("alone", "the test", 0.2, PATIENCE_S, threading.Event())
    closed = threading.Event()
    closed.set()
    with pytest.raises(Cancelled):
        meet_at("alone", "the test", PATIENCE_S, PATIENCE_S, closed)


@pytest.fixture
def stoppable() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A store in a process of its own, and its port."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_call_to_a_store_that_says_nothing_ends_and_no_later_one_gets_its_answer(
    stoppable: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = stoppable
    line = Line(meeting._client("127.0.0.1", port, 4.0))
    line.call(lambda store: store.set("there", "1"))
    assert line.call(lambda store: store.check(["there"]))
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match="does not answer"):
            line.call(lambda store: store.check(["there"]))
    process.send_signal(signal.SIGCONT)
    with pytest.raises(RankMismatchError, match="does not answer"):
        line.call(lambda store: store.check(["not there"]))


@pytest.mark.parametrize(
    ("environment", "lingers"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
    ],
)
def test_only_ranks_that_torchrun_would_restart_have_their_worker_wait_for_them(
    environment: dict[str, str], lingers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_elastic() == lingers
