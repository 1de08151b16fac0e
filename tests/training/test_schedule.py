"""The schedule: the next segment is prepared as late as the pace allows, with the newest samples."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestream import EpochLoader
from cachestream.schema import Schema, Snapshot
from cachestream.training.batches.batch_queue import BatchGroup, QueuedBatch
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.transfer import BatchTransform, Staged
from cachestream.training.checkpoint import SegmentRecord
from cachestream.training.dataset import EpochDataset
from cachestream.training.gathering import use_one_torch_thread
from cachestream.training.plan import Plan, SequentialOrder
from cachestream.training.schedule import Pace, Schedule
from cachestream.training.segment import Request, Segment
from tests.training.conftest import NewCache

NOTHING = np.zeros(0, np.int64)


class Trainer:
    """A schedule with a running epoch of `batches`, and a fake clock."""

    def __init__(self, batches: int) -> None:
        self.now = 0.0
        self.schedule = Schedule(prefetch=4, clock=lambda: self.now)
        self.schedule.begin(0)
        asked = self.schedule.wait_request(0.0, 0.0)
        assert asked is not None
        request, due = asked
        assert due
        snapshot = Snapshot("id", "/", "/", Schema(()), NOTHING, NOTHING)
        segment = Segment(
            request,
            EpochDataset(snapshot),
            EpochMaps(snapshot),
            SequentialOrder(batches),
            Plan(batches, 1, 1, batches),
            0,
            batches,
            SegmentRecord(NOTHING, NOTHING, "sequential", batches),
        )
        assert self.schedule.add(segment)
        taken = self.schedule.next_segment()
        assert taken is segment
        self.segment = segment
        self.gathered = 0

    def gather(self, count: int = 1) -> None:
        for _ in range(count):
            self.gathered += 1
            delivery = QueuedBatch(Staged(self.gathered), self.gathered, 1, 0)
            assert self.schedule.put(BatchGroup(self.segment, deque([delivery])))

    def step(self, seconds: float) -> Any:
        """Train on one batch for `seconds`; another one is gathered meanwhile."""
        parcel = self.schedule.take(0, 1.0)
        self.now += seconds
        if self.gathered < self.segment.plan.num_batches:
            self.gather()
        return parcel.batches[0].staged.batch

    def is_due(self, ahead_s: float = 0.0) -> bool:
        asked = self.schedule.wait_request(ahead_s, 0.0)
        assert asked is not None
        return asked[1]


def test_once_all_batches_ahead_are_there_the_gathering_thread_rests_until_half_are_gone() -> None:
    trainer = Trainer(batches=100)
    trainer.gather(4)
    gathering = threading.Thread(target=trainer.gather, daemon=True)
    gathering.start()
    for number in (1, 2):
        gathering.join(0.2)
        assert gathering.is_alive(), f"{4 - number + 1} of 4 are there"
        assert trainer.schedule.take(0, 1.0).batches[0].number == number
    gathering.join(60.0)
    assert not gathering.is_alive()
    assert trainer.schedule.take(0, 1.0).batches[0].number == 3


class Promise(BatchGroup):
    """Batches that are gathered while they are taken, four ahead."""

    is_flow = True
    low = 25

    def __init__(self, segment: Segment, batches: int) -> None:
        super().__init__(segment)
        self.left = batches

    def __len__(self) -> int:
        return self.left

    @property
    def left(self) -> int:
        return self._left

    @left.setter
    def left(self, batches: int) -> None:
        self._left, self.num_ungathered = batches, max(0, batches - 4)


def promised(batches: int) -> tuple[Trainer, Promise]:
    trainer = Trainer(batches)
    flow = Promise(trainer.segment, batches)
    assert trainer.schedule.put(flow)
    assert trainer.schedule.take(0, 1.0) is flow
    return trainer, flow


@pytest.mark.parametrize(("step_s", "total"), [(1 / 1024, 1000), (1 / 16, 100), (1 / 4, 100)])
def test_what_is_promised_counts_as_gathered_only_when_it_is_asked_for(step_s: float, total: int) -> None:
    """The next segment is due when a second's worth is left, or a quarter is still to be gathered, as without
    flows.
    """
    trainer, flow = promised(total)
    assert not trainer.is_due()
    for taken in range(1, total):
        flow.left -= 1
        trainer.now += step_s
        trainer.schedule.advance(1)
        late = step_s * flow.left <= 1.0 and taken >= 3
        assert trainer.is_due() == (late or flow.num_ungathered <= 0.25 * total), f"{flow.left} left"


def test_a_flow_is_followed_until_it_is_low_or_unwanted() -> None:
    trainer, flow = promised(100)
    told: list[bool] = []
    following = threading.Thread(target=lambda: told.append(trainer.schedule.follow(flow)), daemon=True)
    following.start()
    for flow.left in range(99, 25, -1):
        trainer.now += 0.001
        trainer.schedule.advance(1)
    following.join(0.2)
    assert following.is_alive()
    flow.left = 25
    trainer.schedule.advance(1)
    following.join(60.0)
    assert told == [False]
    assert trainer.schedule.wanted(flow.segment.request)
    flow.left = 50
    trainer.schedule.begin(1)
    assert not trainer.schedule.follow(flow)
    assert not trainer.schedule.wanted(flow.segment.request)


def test_a_slow_trainer_is_helped_while_it_goes_on_and_left_alone_while_it_pauses() -> None:
    trainer, flow = promised(100)
    for _ in range(6):
        flow.left -= 1
        trainer.now += 0.02
        trainer.schedule.advance(1)
    assert trainer.schedule.follow(flow), "two batches are gone by now"
    told: list[bool] = []
    following = threading.Thread(target=lambda: told.append(trainer.schedule.follow(flow)), daemon=True)
    following.start()
    following.join(0.3)
    assert following.is_alive(), "nothing was taken since"
    flow.left -= 1
    trainer.now += 5.0
    trainer.schedule.advance(1)
    following.join(60.0)
    assert told == [True]


@pytest.mark.parametrize(("step_s", "woken"), [(0.001, True), (0.03, False)])
def test_a_slow_trainer_does_not_wake_the_gathering_thread_which_comes_by_itself(
    step_s: float, woken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A woken thread takes the GIL from the trainer."""
    trainer = Trainer(batches=100)
    trainer.gather(4)
    for number in range(1, 9):
        assert trainer.step(step_s) == number
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(trainer.schedule._room, "notify", lambda: calls.append("woken"))
        for left in (3, 2):
            trainer.schedule.take(0, 1.0)
            assert bool(calls) == (woken and left == 2)
        trainer.schedule.take(0, 1.0)
        assert calls[-1:] == ["woken"], "only one is left"
        trainer.gather(3)
        gathering = threading.Thread(target=trainer.gather, daemon=True)
        gathering.start()  # all are there: it rests
        if not woken:
            for _ in (3, 2):
                trainer.schedule.take(0, 1.0)
            gathering.join(60.0)
            assert not gathering.is_alive()
    if woken:
        for _ in (3, 2):
            trainer.schedule.take(0, 1.0)
        gathering.join(60.0)
        assert not gathering.is_alive()


def test_the_next_epoch_is_prepared_when_what_is_left_lasts_for_a_second() -> None:
    trainer = Trainer(batches=1000)
    trainer.gather(4)
    left = 1000
    while not trainer.is_due():
        assert trainer.step(0.002) == 1001 - left
        left -= 1
    assert 490 <= left <= 510


def test_it_is_prepared_earlier_when_that_took_longer_before() -> None:
    trainer = Trainer(batches=1000)
    trainer.gather(4)
    left = 1000
    while not trainer.is_due(ahead_s=2.0):
        trainer.step(0.004)
        left -= 1
    assert 490 <= left <= 510


def test_it_is_prepared_at_the_latest_when_three_quarters_are_gathered() -> None:
    trainer = Trainer(batches=100)
    trainer.gather(4)
    while not trainer.is_due():
        trainer.step(10.0)
    assert trainer.gathered == 75


def test_nothing_is_prepared_more_than_one_epoch_ahead_of_the_trainer() -> None:
    trainer = Trainer(batches=2)
    trainer.gather(2)
    assert trainer.is_due()
    asked = trainer.schedule.wait_request(0.0, 0.0)
    assert asked is not None
    following = trainer.segment
    following.request, following.total = asked[0], 2
    assert trainer.schedule.add(following)
    assert trainer.schedule.next_segment() is following
    trainer.gathered = 0
    trainer.gather(2)
    assert not trainer.is_due()
    trainer.schedule.begin(1)
    assert trainer.is_due()


def test_what_was_prepared_before_a_jump_is_void() -> None:
    trainer = Trainer(batches=100)
    trainer.gather(4)
    old = Request(0, 1)
    trainer.schedule.begin(4, Request(0, 5))
    assert trainer.segment.dataset._closed
    assert not trainer.schedule.put(BatchGroup(trainer.segment, deque([QueuedBatch(Staged(5), 5, 1, 0)])))
    assert not trainer.schedule.wanted(trainer.segment.request)
    assert trainer.schedule.superseded(old)
    asked = trainer.schedule.wait_request(0.0, 0.0)
    assert asked is not None
    assert (asked[0].epoch, asked[0].generation, asked[1]) == (5, 1, False)  # a batch is still being gathered


def test_the_lengths_of_epochs_that_were_jumped_away_from_are_forgotten(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 4) as loader:
        for _ in range(20):
            loader.set_epoch(0)
            assert len(loader) == len(list(loader)) == 2
        assert len(loader._position._schedule._chain.totals) <= 2


def test_one_thread_is_about_the_thread_that_asks_and_no_other() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen: list[int] = []

    def single() -> None:
        use_one_torch_thread()
        seen.append(torch.get_num_threads())
        late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        late.start()
        late.join(60)

    try:
        thread = threading.Thread(target=single)
        thread.start()
        thread.join(60)
        assert seen == [1, 3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transform", [None, lambda batch: {**batch, "y": batch["x"] + 1}])
@pytest.mark.parametrize("size", [500, 50_000, 500_000])  # small batches are sent a few at a time
def test_batches_on_a_gpu_keep_their_values_when_held_changed_and_used_on_other_streams(
    cache_of: Any, size: int, transform: BatchTransform | None
) -> None:
    cache = cache_of([{"x": torch.full((size,), float(i)), "number": i} for i in range(64)], [32, 32])
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    held = []
    with EpochLoader(cache, 4, device="cuda", batch_transform=transform) as loader:
        for _ in range(3):
            for batch in loader:
                assert batch["x"].is_cuda
                with torch.cuda.stream(other):
                    other.wait_stream(torch.cuda.current_stream())
                    for tensor in batch.values():
                        tensor.record_stream(other)
                    held.append((batch["number"].clone(), *batch["x"].aminmax(dim=1)))
                    if transform is not None:
                        assert torch.equal(batch["y"], batch["x"] + 1)
                torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
                batch["x"].fill_(-1)
    torch.cuda.synchronize()
    for number, least, most in held:
        assert torch.equal(least, number.float())
        assert torch.equal(most, number.float())


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def paced(steps_s: list[float]) -> Pace:
    """The pace of a trainer with these times per batch."""
    clock = Clock()
    pace = Pace(4, clock)
    pace.record(1)
    for step_s in steps_s:
        clock.now_s += step_s
        pace.record(1)
    return pace


@pytest.mark.parametrize("pause_s", [0.25, 30.0, 3600.0])
def test_a_trainer_that_pauses_is_no_slow_trainer(pause_s: float) -> None:
    assert not paced([0.008] * 10 + [pause_s] + [0.008] * 3).is_slow


def test_a_trainer_that_has_become_slow_is_a_slow_trainer() -> None:
    assert not paced([0.002] * 10).is_slow
    assert paced([0.002] * 10 + [0.05] * 5).is_slow


def test_a_trainer_that_took_its_first_batches_at_once_is_known_soon() -> None:
    """Some trainers take one batch ahead: the next segment is not prepared too early because of it."""
    assert paced([0.0001] + [1.0] * 10).time_until_taken(2) == pytest.approx(2.5, rel=0.2)


@given(st.lists(st.floats(0.02, 2.0), min_size=4, max_size=50))
def test_a_pace_lies_between_the_shortest_step_and_the_longest(steps_s: list[float]) -> None:
    """The time for two batches is that for two and a half steps."""
    pace = paced(steps_s)
    assert 2.5 * min(steps_s) * 0.999 <= pace.time_until_taken(2) <= 2.5 * max(steps_s) * 1.001


def test_until_the_pace_is_known_that_of_the_epoch_before_is_expected() -> None:
    """A short epoch ends before its pace is known; the next one must be prepared by then."""
    new = Pace(4, Clock())
    assert not new.should_prepare(200, 0, 0, 0.0)
    fast, slow = paced([0.002] * 10).for_next_epoch(), paced([0.2] * 10).for_next_epoch()
    assert fast.should_prepare(200, 0, 0, 0.0)
    assert not slow.should_prepare(200, 0, 0, 0.0)
    assert fast.for_next_epoch().should_prepare(200, 0, 0, 0.0), "nor was it known in the epoch between"
    assert not fast.is_slow
    assert not slow.is_slow, "which is told by this epoch's own pace only"
