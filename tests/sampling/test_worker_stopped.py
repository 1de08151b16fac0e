"""Processes that are stopped for a while (Ctrl-Z, a debugger, a suspended job): all go on when they do, and nobody is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cachestream as cs
from cachestream import Cache
from cachestream.storage import catalogue
from cachestream.storage.board import Board
from tests.sampling.sources import Numbers
from tests.sampling.support import DEADLINE_S, failures_of, only_once, wait_until


class Impatient(Numbers):
    """Numbers that are sampled by processes which wait for the catalogue for a moment only."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        setattr(catalogue, "LOCK_TIMEOUT_S", 0.1)  # noqa: B010  in the process that unpickles it


def test_a_reader_that_is_stopped_while_it_reads_holds_the_filling_up_and_does_not_end_it(
    cache: Cache,
) -> None:
    log = Path(cache.directory.worker_file("log.txt"))
    source = Impatient(200, pause_s=0.005)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(1, DEADLINE_S)
        with cache.catalogue.reading() as tables:
            tables.totals()
            wait_until(
                lambda: log.read_text(encoding="utf-8").count("was locked by another process") > 1,
                "the sampling process cannot commit, again and again",
            )
        assert worker.wait(DEADLINE_S)
        assert Board(cache.directory.worker_file("board")).restarts == 0, "it did not crash"
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}
