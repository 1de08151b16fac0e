"""A process that is stopped while it has the catalogue open (Ctrl-Z, a debugger): all go on when it does."""

from __future__ import annotations

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.storage.telemetry import Board
from tests.worker.sources import Numbers
from tests.worker.support import (
    DEADLINE_S,
    failures_of,
    log_of,
    only_once,
    wait_until,
)


@pytest.mark.e2e
def test_a_reader_that_is_stopped_while_it_reads_holds_the_filling_up_and_does_not_end_it(
    cache: Cache,
) -> None:
    source = Numbers(200, pause_s=0.005)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(1, DEADLINE_S)
        with cache.catalogue.reading() as tables:
            tables.totals()
            wait_until(
                lambda: "was locked by another process" in log_of(cache), "the supervisor cannot commit"
            )
        assert worker.wait(DEADLINE_S)
        assert Board(cache.directory.worker_file("board")).restarts == 0, "it did not crash"
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}
