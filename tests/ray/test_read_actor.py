"""An actor that reads answers in time: with samples, or with nothing for as long as its reads show life."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cachestream import Cache
from cachestream.ray.read_actor import UnitsReader
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling.unit import Unit
from tests.worker.sources import Named

HANG_S = 4.0
released = threading.Event()


@dataclass(frozen=True)
class Blocked(Named):
    """Units of which nothing comes until `released`."""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        released.wait(60)
        yield from super().read(unit, rng)


@pytest.mark.e2e
def test_an_actor_answers_while_its_reads_show_life_and_not_while_they_hang(cache: Cache) -> None:
    released.clear()
    source = Blocked(units=2, samples=3)
    job = WorkerOptions(num_workers=1, order="sequential", hang_timeout_s=HANG_S).job(cache, source)
    reader = UnitsReader(job, actors=1)
    try:
        begun_s = time.monotonic()
        beat = reader.read(PassPlan("sequential", 0, 1, 2, "", 2), [Unit(0, 0)])
        assert (beat.chunks, beat.ends) == ([], [])
        assert time.monotonic() - begun_s < HANG_S / 4
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(reader.read, None, [])
            while time.monotonic() - begun_s < HANG_S:
                try:
                    assert not answer.result(HANG_S / 4).ends
                except NotYet:
                    break
                answer = thread.submit(reader.read, None, [])
            else:
                pytest.fail("an actor whose read hangs says that it shows life")
            assert time.monotonic() - begun_s > HANG_S / 2
            released.set()
            found = answer.result(60)
        while not found.ends:
            found = reader.read(None, [])
        assert found.ends == [(0, None)]
    finally:
        released.set()
        reader._engine.stop()
