"""The rendezvous of ranks: apart from that of earlier runs, and with a deadline for a store that does not
answer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Final

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cachestream import RankMismatchError
from cachestream.training import rendezvous
from cachestream.training.ranks import Deadlines, StoreRanks, find_share, is_elastic
from cachestream.training.rendezvous import Cancelled, ProcessGroup, StoreConnection, meet_at
from cachestream.training.threads import Flag
from tests.storage.support import Line, fork

PATIENCE_S: Final = 180.0


def serve(line: Line) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line.say(str(store.port))
    line.wait_for_word()


class Dist:
    """A stand-in for `torch.distributed` whose store outlives the jobs."""

    def __init__(self, server: Any) -> None:
        self.distributed_c10d = self
        self._server = server

    def _get_default_store(self) -> Any:
        return TCPStore("127.0.0.1", self._server.port, is_master=False)


@pytest.fixture
def dist(job_server: Any, monkeypatch: pytest.MonkeyPatch) -> Dist:
    found = Dist(job_server)
    monkeypatch.setattr(rendezvous, "dist", found)
    return found


def meet(dist: Dist, rank: int, name: str, life: int, size: int = 3) -> list[str]:
    """The names of the other ranks' caches that rank `rank` learns after restart `life`."""
    never = Flag()
    line = meet_at(ProcessGroup(rank, size, None), name, "the test", PATIENCE_S, PATIENCE_S, never)
    ranks = StoreRanks(line, rank, size, Deadlines(PATIENCE_S), never)
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


def test_a_rank_comes_though_its_trainer_waits_for_long_on_the_connection_of_the_job(
    dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.5)
    of_the_job, other = dist._get_default_store(), dist._get_default_store()
    connections = [other, of_the_job]
    monkeypatch.setattr(dist, "_get_default_store", connections.pop)
    with ThreadPoolExecutor(2) as pool:
        trainer = pool.submit(of_the_job.get, "a key of the trainer")
        time.sleep(0.1)  # until it waits
        late = pool.submit(meet, dist, 1, "long", 0, 2)
        while len(connections) > 1:
            time.sleep(0.01)
        time.sleep(1.0)
        other.set("a key of the trainer", "1")
        assert trainer.result(PATIENCE_S) == b"1"
        expected = [f"rank {rank} in life 0" for rank in range(2)]
        assert [meet(dist, 0, "long", 0, 2), late.result(PATIENCE_S)] == [expected] * 2


@pytest.mark.e2e
def test_a_rank_that_nobody_answers_names_rank_0_or_ends_when_closed(dist: Dist) -> None:
    job = ProcessGroup(1, 3, None)
    with pytest.raises(RankMismatchError, match=r"rank 0 has not come to the test within 0\.2 s"):
        meet_at(job, "alone", "the test", 0.2, PATIENCE_S, Flag())
    closed = Flag()
    closed.set()
    with pytest.raises(Cancelled):
        meet_at(job, "alone", "the test", PATIENCE_S, PATIENCE_S, closed)


@pytest.fixture
def stoppable() -> Iterator[tuple[int, int]]:
    """The process id of a store in a process of its own, and its port."""
    child = fork(serve)
    try:
        yield child.pid, int(child.hear())
    finally:
        child.kill()


@pytest.mark.e2e
def test_a_call_to_a_store_that_says_nothing_ends_and_no_later_one_gets_its_answer(
    stoppable: tuple[int, int],
) -> None:
    pid, port = stoppable
    line = StoreConnection(rendezvous._client("127.0.0.1", port, PATIENCE_S), 2.0)
    line.call(lambda store: store.set("there", "1"))
    assert line.call(lambda store: store.check(["there"]))
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match="does not answer"):
            line.call(lambda store: store.check(["there"]))
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(RankMismatchError, match="does not answer"):
        line.call(lambda store: store.check(["not there"]))


@pytest.mark.e2e
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_a_store_whose_host_is_gone_is_an_error_that_names_it_within_the_deadline(
    how: signal.Signals, stoppable: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, port = stoppable
    dist = Dist(SimpleNamespace(port=port))
    store = dist._get_default_store()
    monkeypatch.setattr(dist, "_get_default_store", lambda: store)
    monkeypatch.setattr(rendezvous, "dist", dist)
    os.kill(pid, how)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    began_s = time.monotonic()
    for rank in range(2):
        with pytest.raises(RankMismatchError, match=f"at 127.0.0.1:{port} does not answer .* see its log"):
            meet_at(ProcessGroup(rank, 2, None), "gone", "the test", 2.0, 2.0, Flag())
    assert time.monotonic() - began_s < 60


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


def test_a_stream_that_comes_before_the_ranks_know_one_another_says_that_nodes_have_no_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_share("cache", 1.0) is None  # one node: nothing to share, and no warning
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(
        UserWarning, match=r"cs\.stream was called before .* WORLD_SIZE is 4: a node with a cache"
    ):
        assert find_share("cache", 1.0) is None
