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
from cachestream.training.batch_producer import use_one_torch_thread
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.prefetcher import BatchGroup, QueuedBatch
from cachestream.training.batches.transfer import BatchTransform, Staged
from cachestream.training.dataset import EpochDataset
from cachestream.training.plan import OrderRecord, Plan, SequentialOrder
from cachestream.training.schedule import Pace, Schedule
from cachestream.training.segment import Request, Segment

NOTHING = np.zeros(0, np.int64)
BATCHES = 1000


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
            OrderRecord(NOTHING, NOTHING, "sequential", batches),
        )
        assert self.schedule.add(segment)
        taken = self.schedule.next_segment()
        assert taken is segment
        self.segment = segment
        self.gathered = 0

    def gather(self, count: int = 1) -> None:
        for _ in range(count):
            self.gathered += 1
            batch = QueuedBatch(Staged(self.gathered), self.gathered, 1, 0)
            assert self.schedule.put(BatchGroup(self.segment, deque([batch])))

    def step(self, seconds: float) -> Any:
        """Train on one batch for `seconds`; another one is gathered meanwhile."""
        group = self.schedule.take(0, 1.0)
        self.now += seconds
        if self.gathered < self.segment.plan.num_batches:
            self.gather()
        return group.batches[0].staged.batch

    def is_due(self, ahead_s: float = 0.0) -> bool:
        asked = self.schedule.wait_request(ahead_s, 0.0)
        assert asked is not None
        return asked[1]


@pytest.mark.e2e
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


class Prefetched(BatchGroup):
    """Batches that are gathered while they are taken, four ahead."""

    is_prefetched = True
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


def prefetched(batches: int) -> tuple[Trainer, Prefetched]:
    trainer = Trainer(batches)
    group = Prefetched(trainer.segment, batches)
    assert trainer.schedule.put(group)
    assert trainer.schedule.take(0, 1.0) is group
    return trainer, group


@pytest.mark.parametrize(("step_s", "total"), [(1 / 1024, 1000), (1 / 16, 100), (1 / 4, 100)])
def test_a_prefetched_batch_counts_as_gathered_only_when_it_is_submitted(step_s: float, total: int) -> None:
    """The next segment is due when a second's worth is left, or a quarter is still to be gathered, as for
    other groups.
    """
    trainer, group = prefetched(total)
    assert not trainer.is_due()
    for taken in range(1, total):
        group.left -= 1
        trainer.schedule.advance(1)
        trainer.now += step_s
        late = step_s * group.left <= 1.0 and taken >= 4
        assert trainer.is_due() == (late or group.num_ungathered <= 0.25 * total), f"{group.left} left"


def test_the_gathering_thread_waits_until_a_prefetched_group_is_low_or_unwanted() -> None:
    trainer, group = prefetched(100)
    told: list[bool] = []
    waiting = threading.Thread(target=lambda: told.append(trainer.schedule.wait_low(group)), daemon=True)
    waiting.start()
    for group.left in range(99, 25, -1):
        trainer.now += 0.001
        trainer.schedule.advance(1)
    waiting.join(0.2)
    assert waiting.is_alive()
    group.left = 25
    trainer.schedule.advance(1)
    waiting.join(60.0)
    assert told == [True]
    group.left = 50
    trainer.schedule.begin(1)
    assert not trainer.schedule.wait_low(group)


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


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transform", [None, lambda batch: {**batch, "y": batch["x"] + 1}])
@pytest.mark.parametrize("size", [500, 50_000, 300_000])  # small batches are sent a few at a time
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


def paced(steps_s: list[float], batches: int = 1) -> Pace:
    """The pace of a trainer with these times for `batches` batches each."""
    clock = Clock()
    pace = Pace(4, clock)
    pace.record(batches, batches)
    for step_s in steps_s:
        clock.now_s += step_s
        pace.record(batches, batches)
    return pace


@given(st.lists(st.floats(0.02, 2.0), min_size=4, max_size=50), st.integers(1, 16))
def test_a_pace_lies_between_the_shortest_step_and_the_longest(steps_s: list[float], batches: int) -> None:
    pace, left = paced(steps_s, batches), BATCHES // batches
    assert not pace.should_prepare(left * batches, 0, 0, left * min(steps_s) * 0.999)
    assert pace.should_prepare(left * batches, 0, 0, left * max(steps_s) * 1.001)


def test_a_trainer_that_took_its_first_batches_at_once_is_known_soon() -> None:
    """Some trainers take one batch ahead: the next segment is not prepared too early because of it."""
    pace = paced([0.0001] + [1.0] * 10)
    assert not pace.should_prepare(BATCHES, 0, 0, 0.8 * BATCHES)
    assert pace.should_prepare(BATCHES, 0, 0, 1.2 * BATCHES)


@pytest.mark.parametrize("pause_s", [0.25, 30.0, 3600.0])
def test_a_trainer_that_pauses_has_its_next_segment_when_most_is_gathered(pause_s: float) -> None:
    pace = paced([0.008] * 10 + [pause_s] + [0.008] * 3)
    assert pace.should_prepare(BATCHES, 750, 0, 0.0)


@pytest.mark.parametrize("pause_s", [0.25, 30.0, 3600.0])
@pytest.mark.parametrize("batches", [1, 8])
def test_a_pause_is_forgotten_when_as_many_batches_have_followed(pause_s: float, batches: int) -> None:
    """A first step compiles, or the disk stalls: the next segment of a short epoch must not come too late."""
    for before in (0, 5):
        pace = paced([0.008] * before + [pause_s] + [0.008] * (2 * before + 9), batches)
        left = BATCHES * batches  # takes 8 s
        assert pace.should_prepare(left, 0, 0, 9.0)
        assert not pace.should_prepare(left, 0, 0, 7.0)


def test_until_the_pace_is_known_that_of_the_epoch_before_is_expected() -> None:
    """A short epoch ends before its pace is known; the next one must be prepared by then."""
    new = Pace(4, Clock())
    assert not new.should_prepare(200, 0, 0, 0.0)
    fast, slow = paced([0.002] * 10).for_next_epoch(), paced([0.2] * 10).for_next_epoch()
    assert fast.should_prepare(200, 0, 0, 0.0)
    assert not slow.should_prepare(200, 0, 0, 0.0)
    assert fast.for_next_epoch().should_prepare(200, 0, 0, 0.0), "nor was it known in the epoch between"
