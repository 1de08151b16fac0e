"""A pass that is shared with a group of caches, as the supervisor answers for it: decisions, and copies of shards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cachestream import Cache
from cachestream.ray.copier import Copier
from cachestream.ray.group import HeldShard
from cachestream.ray.supervision import ALONE, SharedPass, SharingProcess
from cachestream.schema import Span
from cachestream.shard_format import encode_header
from cachestream.storage.publish import write_shard
from cachestream.storage.telemetry import Board
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.child_process import ChildProcess, Forks
from cachestream.worker.cluster import ClusterOptions
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import begin_or_resume
from cachestream.worker.planner import Planner
from cachestream.worker.requests import Requests
from cachestream.worker.sampling.messages import Publication
from cachestream.worker.user_order import UserOrder
from tests.storage.support import content, publish, shard_ids
from tests.worker.sources import Numbers

LENGTH = 30
SHARING = -2


class Answers:
    """The last answer, as a channel takes it."""

    def __init__(self) -> None:
        self.value: Any = None

    def answer(self, _number: int, value: Any) -> None:
        self.value = value


class NoForks:
    children: list[Any]

    def __init__(self) -> None:
        self.children = []

    def process(self, name: str, run: Any) -> ChildProcess:
        return ChildProcess(name, cast("Forks", self), run)


class Shared:
    """The supervisor of a cache in a group, without processes."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.channel = cache, Answers()
        job = WorkerOptions(num_workers=2, order="sequential").job(cache, Numbers(LENGTH))
        self.job = replace(job, cluster=ClusterOptions("auto", group="g"))
        begin_or_resume(cache, self.job, UserOrder(self.job))
        self.begin()

    def begin(self) -> None:
        job, cache = self.job, self.cache
        self.planner = Planner(job, cache, is_shared=True)
        board = Board(cache.directory.worker_file("board"))
        self.requests = Requests(job, cache, self.planner, board, lambda: False)
        forks = cast("Forks", NoForks())
        self.sharing = SharingProcess(job, cache, forks, self.planner, self.requests)

    def ask(self, kind: str, *arguments: Any) -> Any:
        """The answer to what the sharing process asks."""
        channel: Any = self.channel
        message = kind, 1, arguments
        if not self.sharing.handle(SHARING, channel, message):
            self.requests.handle(SHARING, channel, message)
        if isinstance(self.channel.value, BaseException):
            raise self.channel.value
        return self.channel.value

    @property
    def state(self) -> SharedPass:
        found: SharedPass = self.ask("shared_pass")
        return found

    @property
    def pass_id(self) -> int:
        return self.state.row.id

    def decide(self, *make: tuple[int, int]) -> None:
        self.ask("decide", self.pass_id, list(make))

    def copy(self, start: tuple[int, int], stop: tuple[int, int], positions: list[int], pass_id: int) -> bool:
        """Publish a copy of a shard of others, and forget it again; False if it is not wanted."""
        shard = content(1000)
        header = encode_header(shard)
        reserved = self.ask("reserve_now", (len(header) + shard.data_bytes,), True)
        written = write_shard(self.cache.directory, reserved[0], header, shard)
        publication = Publication(pass_id, (written,), (Span(start, stop),))
        is_published: bool = self.ask("import", publication, np.array(positions, np.int64))
        if is_published:
            self.cache.quarantine(written.id, "for the test")
        else:
            self.ask("cancel", reserved)
        return is_published

    def wanted(self, start: tuple[int, int], stop: tuple[int, int], plan: str) -> list[bool]:
        """For each position of a shard of others: True if this cache wants its samples there."""
        copier = Copier(None, self.job, self.cache, cast("SupervisorLink", self))
        shard = HeldShard("content", 1, 1000, plan, (Span(start, stop),))
        found: list[bool] = copier._is_wanted(shard, self.state).tolist()
        return found

    def copy_of_this(self, start: tuple[int, int], stop: tuple[int, int]) -> bool:
        positions = list(range(start[0], stop[0] + (stop[1] > 0)))
        return self.copy(start, stop, positions, self.pass_id)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    with Cache(tmp_path / "cache", size_limit="10MB", min_free=0) as cache:
        shared = Shared(cache)
        yield shared
        shared.requests.has_ended(SHARING)
        shared.requests.release()
        with cache.catalogue.reading() as tables:
            assert tables.unfinished() == []
        assert not [name for name in os.listdir(cache.directory.shards) if name.endswith(".tmp")]
        vars(shared).clear()


def test_what_the_group_gives_is_handed_out_and_what_it_takes_away_again_is_not(shared: Shared) -> None:
    assert shared.state.undecided == ((0, LENGTH),)
    assert shared.planner.take(0, 5) is None
    assert not shared.planner.is_handed_out
    shared.decide((0, 6))
    assert (shared.state.undecided, shared.state.making) == (((6, LENGTH),), ((0, 6),))
    taken = shared.planner.take(0, 2)
    assert taken is not None
    assert [unit.position for unit in taken.units] == [0, 1]
    shared.ask("share")
    assert (shared.state.undecided, shared.state.making) == (((2, LENGTH),), ((0, 2),))
    is_undecided = shared.state.is_undecided(np.array([0, 1, 2, LENGTH - 1, LENGTH]))
    assert is_undecided.tolist() == [False, False, True, True, False]
    with shared.planner.noted(0, [0, 1], ()):
        pass
    assert shared.planner.row.positions_done == 2


def test_the_number_of_blocks_that_could_be_taken_is_told(shared: Shared) -> None:
    assert shared.state.wants == 4
    shared.decide((3, 6))
    assert shared.state.wants == 1, "of one unit each, in so short a pass"


def test_a_decision_on_another_pass_decides_nothing(shared: Shared) -> None:
    shared.ask("decide", shared.pass_id + 1, [(0, 5)])
    assert shared.state.undecided == ((0, LENGTH),)


def test_decisions_outlast_the_supervisor_and_the_undecided_rest_is_that_of_the_group(shared: Shared) -> None:
    shared.decide((0, 6))
    assert shared.planner.take(0, 2) is not None
    shared.requests.record()
    shared.requests.release()
    alone = Planner(shared.job, shared.cache, is_shared=False)
    alone.begin()
    taken = alone.take(0, LENGTH)
    assert taken is not None
    assert [unit.position for unit in taken.units] == list(range(LENGTH)), (
        "without a group it makes all that is left"
    )
    shared.begin()
    assert shared.state.undecided == ((0, LENGTH),), "what no process has is for the group to decide"


def test_only_a_pass_of_which_nothing_is_done_follows_the_group(shared: Shared) -> None:
    pass_id = shared.pass_id
    assert not shared.ask("follow", pass_id + 1, 4)
    assert shared.ask("follow", pass_id, 4)
    assert (shared.pass_id, PassPlan.from_json(shared.state.row.plan).ordinal) == (pass_id, 4)
    recorded = shared.cache.filling.state().last_pass
    assert recorded is not None
    assert PassPlan.from_json(recorded.plan).ordinal == 4
    shared.decide((0, 2))
    assert not shared.ask("follow", pass_id, 5)
    assert PassPlan.from_json(shared.state.row.plan).ordinal == 4


def test_a_copy_is_published_only_where_nothing_is_made_and_wanted_where_nothing_is_held(
    shared: Shared,
) -> None:
    publish(shared.cache, content(10), spans=[Span((4, 1), (6, 2))], pass_id=shared.pass_id)
    held = shard_ids(shared.cache)
    shared.decide((10, 14))
    assert shared.planner.take(0, 2) is not None
    plan = shared.state.row.plan
    assert shared.copy_of_this((6, 2), (10, 0))
    assert not shared.copy_of_this((9, 0), (10, 1))
    assert not shared.copy_of_this((13, 0), (15, 0))
    assert shared.copy_of_this((14, 0), (LENGTH, 0))
    assert shared.wanted((3, 0), (4, 1), plan) == [True, True], "up to the samples that are held"
    assert shared.wanted((3, 0), (4, 2), plan) == [True, False]
    assert shared.wanted((5, 0), (8, 0), plan) == [False, False, True]
    assert shared.wanted((6, 2), (7, 0), plan) == [True]
    assert shared.wanted((9, 0), (11, 0), plan) == [True, False]
    assert shard_ids(shared.cache) == held, "a copy that is refused leaves nothing"


def test_what_was_copied_is_not_handed_out_though_the_group_goes_before_it_says_that_it_is_done(
    shared: Shared,
) -> None:
    publish(shared.cache, content(4), spans=[Span((2, 0), (6, 0))], pass_id=shared.pass_id)
    shared.decide((0, 8))
    taken = shared.planner.take(0, 8)
    assert taken is not None
    assert [unit.position for unit in taken.units] == [0, 1, 6, 7]


def test_of_an_earlier_pass_the_units_are_wanted_that_are_neither_made_nor_held(shared: Shared) -> None:
    assert shared.ask("follow", shared.pass_id, 3)
    current = shared.state.row.plan
    before = replace(PassPlan.from_json(current), ordinal=2).to_json()
    publish(shared.cache, content(10), spans=[Span((4, 1), (6, 2))], pass_id=shared.pass_id)
    shared.decide((10, 12))
    earlier = shared.ask("earlier", shared.job.fingerprint, before, LENGTH)
    assert earlier not in (0, shared.pass_id)
    assert shared.ask("earlier", shared.job.fingerprint, before, LENGTH) == earlier
    publish(shared.cache, content(20), spans=[Span((20, 0), (21, 0))], pass_id=earlier)
    assert shared.wanted((3, 0), (8, 0), before) == [True, False, False, False, True]
    assert shared.wanted((9, 0), (13, 0), before) == [True, False, False, True]
    assert shared.wanted((19, 0), (22, 0), before) == [True, False, True]
    later = replace(PassPlan.from_json(current), ordinal=4).to_json()
    assert not any(shared.wanted((3, 0), (8, 0), later))


def test_without_an_answer_some_positions_are_made_alone_until_the_group_answers(shared: Shared) -> None:
    shared.ask("group", "no cluster")
    assert shared.sharing.message == ALONE
    shared.sharing.tick(0.0, 0.0)
    assert shared.state.wants == 0
    making = sum(stop - start for start, stop in shared.state.making)
    assert 0 < making <= 4
    shared.ask("group", "")
    assert shared.sharing.message == ""
    shared.ask("share")
    shared.sharing.tick(time.monotonic(), 0.0)
    assert shared.state.undecided == ((0, LENGTH),)
