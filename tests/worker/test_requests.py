"""The requests of sampling processes, where samples of another transform are replaced."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache
from cachestream.errors import CacheFullError
from cachestream.schema import Span
from cachestream.storage.tables import REPLACED, FailureRow
from cachestream.storage.telemetry import Board
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.passes import begin_or_resume
from cachestream.worker.planner import Planner
from cachestream.worker.requests import Requests
from cachestream.worker.sampling.messages import Publication
from cachestream.worker.user_order import UserOrder
from tests.storage.support import content, publish
from tests.worker.sources import Numbers

UNITS = 20
SHARD_BYTES = 100_000


class Channel:
    """The supervisor's end of a process that keeps what it is told."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.told: list[Any] = []

    def answer(self, _number: int, value: Any) -> None:
        self.answers.append(value)

    def tell(self, *message: Any) -> None:
        self.told.append(message)


@dataclasses.dataclass
class Full:
    """A full cache, each shard of two units that another transform made; a process has half of the units."""

    requests: Requests
    channel: Any
    cache: Cache

    def wants(self, size_bytes: int) -> None:
        self.requests.handle(0, self.channel, ("reserve", 1, ((size_bytes,),)))

    def serve(self, later_s: float) -> None:
        self.requests.serve(time.monotonic() + later_s)

    @property
    def replaced(self) -> int:
        with self.cache.catalogue.reading() as tables:
            return len(tables.shard_ids(REPLACED))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    with Cache(tmp_path / "cache", size_limit="10MB", min_free=0) as cache:
        made = WorkerOptions(num_workers=1, order="sequential").job(cache, Numbers(UNITS))
        job = dataclasses.replace(made, transform="1:old")
        begin_or_resume(cache, job, UserOrder(job))
        pass_id = cache.filling.state().last_pass.id  # type: ignore[union-attr]
        for first in range(0, UNITS, 2):
            shard = content(first, 2, SHARD_BYTES, fill={"transform": "1:old"})
            publish(cache, shard, pass_id=pass_id, spans=[Span((first, 0), (first + 2, 0))])
        job = dataclasses.replace(job, transform="1:new", on_change="replace")
        begin_or_resume(cache, job, UserOrder(job))
        planner = Planner(job, cache, is_shared=False)
        board = Board(cache.directory.worker_file("board"))
        board.reset(1, 1, 0.0)
        requests, channel = Requests(job, cache, planner, board, lambda: False), Channel()
        found = Full(requests, channel, cache)
        requests.has_started(0, found.channel)
        assert planner.take(0, UNITS // 2) is not None
        cache.size_limit = cache.size_bytes + cache.reservations.measure().headroom_bytes
        yield found
        requests.release()
        vars(found).clear()  # pytest keeps it, and with it the files that are open


def test_no_more_is_replaced_for_want_of_space_than_is_wanted_however_long_an_epoch_holds_it(
    full: Full,
) -> None:
    _, lease = full.cache.take_snapshot()
    full.wants(SHARD_BYTES + 20_000)
    for later_s in range(5):
        full.serve(10 * later_s)
        assert (full.replaced, full.channel.answers) == (2, [])
    lease.release()
    full.serve(100)
    assert len(full.channel.answers) == 1
    assert full.replaced == 0


def test_a_process_waits_on_where_the_disk_is_too_full_to_record_what_is_replaced(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise CacheFullError("no space left")

    monkeypatch.setattr(full.requests._publisher, "commit", refuses)
    full.wants(SHARD_BYTES)
    full.serve(0)
    assert full.requests.is_pressed
    assert full.channel.answers == []
    monkeypatch.undo()
    full.serve(10)
    assert len(full.channel.answers) == 1


@pytest.mark.parametrize("skipped", [False, True])
def test_a_unit_of_which_nothing_is_left_replaces_its_samples_unless_some_were_skipped(
    full: Full, skipped: bool
) -> None:
    row = full.cache.filling.state().last_pass
    assert row is not None
    failures = (FailureRow("transform", "it fails", 2, "0"),) if skipped else ()
    full.requests.publish(0, Publication(row.id, (), (Span((0, 0), (2, 0)),), (0, 1), (), failures))
    assert full.replaced == (0 if skipped else 1)
    assert full.cache.num_samples == UNITS - (0 if skipped else 2)
