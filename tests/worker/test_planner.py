"""What the supervisor hands out: units that are not cached, each once, and suspects alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache
from cachestream.formats.files import FileSource
from cachestream.listing.names import Mark, NamesWriter
from cachestream.schema import Span
from cachestream.worker.health import Death, suspects_of
from cachestream.worker.job import Job
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.listings import Listings
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import MOST_UNITS, begin_next, begin_or_resume, block_size
from cachestream.worker.planner import Planner
from cachestream.worker.user_order import UserOrder
from tests.storage.support import content, publish
from tests.worker.sources import Numbers

UNITS = 20
CRASH = Death(0.0, -signal.SIGSEGV, suspects=1)


class Filling:
    """A supervisor's planner, and what it has handed out to processes by their numbers."""

    def __init__(self, cache: Cache, units: int = UNITS) -> None:
        self.cache = cache
        self.job = WorkerOptions(num_workers=2, order="sequential").job(cache, Numbers(units))
        self.order = UserOrder(self.job)
        begin_or_resume(cache, self.job, self.order)
        self.begin()

    def begin(self) -> None:
        """Go on as another supervisor does."""
        self.planner = Planner(self.job, self.cache, is_shared=False)
        self.planner.begin()

    def take(self, owner: int = 0, most: int = 5) -> list[int]:
        """The positions that the process gets; none for none."""
        taken = self.planner.take(owner, most)
        return [] if taken is None else [unit.position for unit in taken.units]

    def finish(self, owner: int, *positions: int) -> None:
        with self.planner.noted(owner, positions, ()):
            self.record()

    def record(self) -> None:
        with self.cache.catalogue.transaction() as tables:
            tables.record_progress(self.planner.row)

    def crash(self, owner: int, *positions: int) -> None:
        """The process dies of one of those that it reads."""
        self.planner.has_died(owner, suspects_of(CRASH, positions))


@pytest.fixture
def filling(cache: Cache) -> Filling:
    return Filling(cache)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="10MB", min_free=0) as cache:
        yield cache


@pytest.mark.parametrize("length", [1, 1000, 10**9])
@pytest.mark.parametrize("processes", [1, 7, 128])
def test_blocks_are_small_enough_that_all_processes_have_work(length: int, processes: int) -> None:
    size = block_size(length, processes)
    assert 1 <= size <= MOST_UNITS
    assert size == 1 or size * processes * 16 <= length
    assert block_size(None, processes) > 0


def test_each_unit_is_handed_out_once_and_those_of_a_process_that_ends_go_to_another(
    filling: Filling,
) -> None:
    assert filling.take(0) == [0, 1, 2, 3, 4]
    assert filling.take(1) == [5, 6, 7, 8, 9]
    filling.finish(0, 0, 2)
    with filling.planner.noted(0, (), [(3, 7)]):
        pass
    filling.planner.has_died(0)
    assert filling.take(1, 2) == [1, 3]
    assert [unit.first for unit, _ in filling.planner._units([(3, 7)])] == [7]
    rest = filling.take(2, 100)
    assert rest == [4, *range(10, UNITS)]
    assert (filling.planner.is_open, filling.planner.is_handed_out) == (True, True)
    for owner, positions in ((1, [1, 3, 5, 6, 7, 8, 9]), (2, rest)):
        filling.finish(owner, *positions)
    assert (filling.planner.is_open, filling.planner.row.is_done) == (False, True)


def test_a_unit_that_was_begun_goes_on_from_where_it_was(filling: Filling) -> None:
    filling.take(0, 3)
    with filling.planner.noted(0, [0], [(1, 7)]):
        filling.record()
    filling.begin()
    taken = filling.planner.take(5, 3)
    assert taken is not None
    assert [(unit.position, unit.first) for unit in taken.units] == [(1, 7), (2, 0), (3, 0)]


def test_what_could_not_be_recorded_is_not_done(filling: Filling) -> None:
    assert filling.take(0, 3) == [0, 1, 2]
    before = filling.planner.row
    with pytest.raises(ZeroDivisionError), filling.planner.noted(0, [0, 1], [(2, 5)]):
        1 // (filling.planner.row.positions_done - 2)
    assert filling.planner.row == before
    filling.planner.has_died(0)
    assert filling.take(1, 3) == [0, 1, 2]


def test_units_that_are_cached_are_passed_over_and_those_in_part_say_what_is(filling: Filling) -> None:
    cache, pass_id = filling.cache, filling.planner.row.id
    publish(cache, content(0), pass_id=pass_id, spans=[Span((0, 0), (7, 0)), Span((9, 2), (9, 5))])
    everything = filling.take(0, UNITS)
    filling.finish(0, *everything)
    assert begin_next(cache, filling.job, filling.order, is_due=True)
    filling.begin()
    taken = filling.planner.take(0, 3)
    assert taken is not None
    assert [(unit.position, list(unit.cached)) for unit in taken.units] == [
        (7, []),
        (8, []),
        (9, [(2, 5)]),
    ]
    assert filling.planner.passed_over
    assert filling.planner.is_dirty
    assert filling.planner.row.positions_done == 7


def test_a_pass_of_which_all_is_cached_is_done_without_a_unit(filling: Filling) -> None:
    cache, pass_id = filling.cache, filling.planner.row.id
    publish(cache, content(0), pass_id=pass_id, spans=[Span((0, 0), (UNITS, 0))])
    filling.finish(0, *filling.take(0, UNITS))
    assert begin_next(cache, filling.job, filling.order, is_due=True)
    filling.begin()
    assert filling.take() == []
    assert not filling.planner.is_open
    assert filling.planner.row.is_done


def test_a_suspect_is_read_by_a_process_that_reads_nothing_beside_it(filling: Filling) -> None:
    planner = filling.planner
    filling.take(0, 3)
    filling.take(1, 3)
    filling.crash(0, 0, 2)
    assert [suspect.position for suspect in planner.row.suspects] == [0, 2]
    assert filling.take(1, 4) == [1, 6, 7, 8], "no suspects"
    assert filling.take(1, UNITS) == list(range(9, UNITS))
    assert filling.take(1) == []
    assert [planner.wants_idle] == [True], "it is to publish what it has first"
    taken = planner.take(0, 5)
    assert taken is not None
    assert (taken.alone, [unit.position for unit in taken.units]) == (True, [0])
    assert filling.take(0) == [], "nothing beside it"
    assert [planner.wants_idle] == [False]
    filling.finish(0, 0)
    assert [suspect.position for suspect in planner.row.suspects] == [2], "it was read without a crash"
    assert filling.take(0) == [2]


def test_an_error_leaves_a_suspect_one(filling: Filling) -> None:
    filling.take(0, 1)
    filling.crash(0, 0)
    assert filling.take(1, UNITS) == list(range(1, UNITS))
    assert filling.take(0) == [0]
    before = filling.planner.row.suspects
    with pytest.raises(ZeroDivisionError), filling.planner.noted(0, [0], ()):
        1 // len(filling.planner.row.suspects)
    assert filling.planner.row.suspects == before
    assert filling.take(0) == [], "it reads the suspect"


def test_a_unit_of_which_two_processes_died_is_given_up_and_counted(filling: Filling) -> None:
    planner = filling.planner
    filling.take(0, 2)
    filling.crash(0, 0, 1)
    filling.finish(1, *filling.take(1, UNITS))
    filling.record()
    filling.begin()
    planner = filling.planner
    assert filling.take(0) == [0]
    filling.crash(0, 0)
    assert filling.take(0) == []
    (failure,) = planner.failures
    assert (failure.kind, failure.count, failure.example) == ("quarantined", 1, "unit 0")
    assert failure.reason == "reading it ended the process by SIGSEGV, again and again"
    assert planner.is_dirty
    assert planner.passed_over, "another look is due: there may be others"
    assert filling.take(0) == [1]
    filling.finish(0, 1)
    assert planner.row.is_done
    assert planner.row.suspects == ()


def test_a_process_is_suspected_of_nothing_that_it_had_finished(filling: Filling) -> None:
    filling.take(0, 2)
    filling.finish(0, 0)
    filling.crash(0, 0, 7)
    assert filling.planner.row.suspects == ()


@pytest.fixture
def grows(tmp_path: Path) -> Callable[[], Any]:
    """A source of files of which the first two are listed at once."""
    folder = tmp_path / "files"
    for number in range(6):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "a.bin").write_bytes(b"x")
    return lambda: FileSource(folder, first_names=2, label=None)


def test_a_pass_grows_by_what_is_listed_and_what_is_cached_of_it_stays_passed_over(
    cache: Cache, grows: Callable[[], Any]
) -> None:
    """After the loss of a catalogue the shards alone tell what is cached."""
    source = grows()
    names = [f"{number}/a.bin" for number in range(6)]
    job = WorkerOptions(num_workers=1, order="sequential").job(cache, source)
    assert job.growing
    listings = Listings(cache.directory)
    writer = NamesWriter(listings.current, Mark("listing-0", job.fingerprint))
    writer.add(names[:4], is_complete=False)
    plan = PassPlan("sequential", 0, 0, 0, "", 0, growing=True)
    plan = plan.grown(4, listings.load().digest, is_complete=False)
    fill = {"source": job.fingerprint, "plan": plan.to_json(), "length": 4, "spans": [[0, 0, 3, 0]]}
    publish(cache, content(0, 4, fill=fill))
    os.unlink(cache.catalogue.path)
    cache.rebuild()
    begin_or_resume(cache, job, UserOrder(job))
    planner = Planner(job, cache, is_shared=False)
    planner.begin()

    def take() -> list[int]:
        taken = planner.take(0, 10)
        return [] if taken is None else [unit.number for unit in taken.units]

    assert take() == [3]
    assert take() == []
    assert [planner.is_handed_out] == [False], "the listing goes on"
    writer.add(names[4:], is_complete=True)
    writer.close()
    assert take() == [4, 5]
    assert planner.is_handed_out
    assert planner.plan is not None
    assert (planner.plan.num_units, planner.plan.segments, planner.plan.growing) == (6, (4, 6), False)
    recorded = cache.filling.state().last_pass
    assert recorded is not None
    assert (recorded.plan, recorded.length) == (planner.plan.to_json(), 6)


def test_a_pass_that_grows_past_an_earlier_listing_still_finds_what_is_cached_of_that(
    cache: Cache, grows: Callable[[], Any]
) -> None:
    """The names that came since the last look at what is cached are known, too."""
    source = grows()
    names = [f"{number}/a.bin" for number in range(6)]
    job = WorkerOptions(num_workers=1, order="sequential").job(cache, source)
    listings = Listings(cache.directory)
    earlier = NamesWriter(listings.current, Mark("listing-00000000000e", job.fingerprint))
    earlier.add(names[1:5], is_complete=True)
    earlier.close()
    plan = PassPlan("sequential", 0, 0, 4, listings.load().digest, 4)
    fill = {"source": job.fingerprint, "plan": plan.to_json(), "length": 4, "spans": [[2, 0, 4, 0]]}
    publish(cache, content(0, 4, fill=fill))
    os.unlink(cache.catalogue.path)
    cache.rebuild()
    begin_or_resume(cache, job, UserOrder(job))
    writer = NamesWriter(listings.current, Mark("listing-000000000001", job.fingerprint))
    writer.add(names[:2], is_complete=False)
    planner = Planner(job, cache, is_shared=False)
    planner.begin()

    def take() -> list[int]:
        taken = planner.take(0, 10)
        return [] if taken is None else [unit.number for unit in taken.units]

    assert take() == [0, 1]
    writer.add(names[2:], is_complete=True)
    writer.close()
    assert take() == [2, 5], "3 and 4 are cached"


def test_a_pass_that_replaces_samples_of_units_not_listed_yet_is_resumed_by_each_later_worker(
    cache: Cache, grows: Callable[[], Any]
) -> None:
    made = WorkerOptions(num_workers=1, order="sequential", on_change="replace").job(cache, grows())
    old, new, other = (replace(made, transform=f"1:{name}") for name in ("old", "new", "other"))

    def start(job: Job) -> int:
        begin_or_resume(cache, job, UserOrder(job))
        cache.filling.record_transform(job.transform)
        row = cache.filling.state().last_pass
        assert row is not None
        return row.id

    first = start(old)
    publish(cache, content(0, fill={"transform": "1:old"}), pass_id=first, spans=[Span((0, 0), (3, 0))])
    second = start(new)
    assert second > first
    assert start(new) == second
    assert start(replace(other, on_change="keep")) == second, "which adds samples of its own"
    assert start(new) > second
