"""The reading of one unit: the samples that are wanted, and nothing of the source after the last of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.sources.base import Rows, Source
from cachestream.storage.telemetry import MAIN, private_slot
from cachestream.transport import metering
from cachestream.transport.driver import LateCallsError
from cachestream.worker.order import END, Offsets, PassPlan, is_covered
from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.unit import Unit, UnitRead
from cachestream.worker.sampling.unit_reader import FetchMeter, UnitReader

SAMPLES = 12
RANGES = st.lists(
    st.tuples(st.integers(0, SAMPLES), st.integers(1, SAMPLES) | st.just(END)).filter(lambda r: r[0] < r[1]),
    max_size=3,
)


@dataclass
class Counted:
    """One unit of 12 samples; `taken` are the offsets that were asked for."""

    taken: list[int] = field(default_factory=list)
    num_units: int = 1
    fingerprint: str = "counted"

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for offset in range(SAMPLES):
            self.taken.append(offset)
            yield str(offset), {"x": np.int64(offset)}


@dataclass
class CountedRows(Counted):
    """The same samples, three at a time."""

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows]:
        for offset in range(0, SAMPLES, 3):
            self.taken += range(offset, offset + 3)
            yield Rows([str(offset + i) for i in range(3)], {"x": np.arange(offset, offset + 3)})


@pytest.fixture(scope="module", autouse=True)
def _no_meter_stays() -> Iterator[None]:
    yield
    metering.install(None)


def read(source: Source, unit: Unit, *, in_rows: bool = False) -> list[int]:
    """The offsets of the samples of `unit` that come."""
    reader = UnitReader(
        source, FetchMeter(private_slot()), threading.Event(), hang_timeout_s=30.0, in_rows=in_rows
    )
    reader.plan = PassPlan("sequential", 0, 0, 1, "", 1)
    found: list[int] = []
    for chunk in reader.read(UnitRead(unit), 0):
        assert isinstance(chunk, SampleChunk)
        found += chunk.offsets
    return found


@given(st.integers(0, SAMPLES), RANGES, st.booleans())
def test_the_wanted_samples_come_and_the_source_is_not_read_after_the_last(
    first: int, cached: Offsets, in_rows: bool
) -> None:
    source = CountedRows() if in_rows else Counted()
    found = read(source, Unit(0, 0, first, cached), in_rows=in_rows)
    assert found == [at for at in range(first, SAMPLES) if not is_covered(cached, at)]
    if is_covered(cached, END - 1):  # the cache holds the end of the unit: the last wanted sample is known
        step = 3 if in_rows else 1
        wanted = range(first, min(start for start, stop in cached if stop == END))
        last = max((at for at in wanted if not is_covered(cached, at)), default=-1)
        assert len(source.taken) == min(SAMPLES, (last // step + 1) * step)
    else:
        assert source.taken == list(range(SAMPLES)), "only the source knows where the unit ends"


def test_a_process_whose_calls_never_return_ends_and_tries_no_further() -> None:
    class Late(Counted):
        def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            raise LateCallsError("64 calls have not returned")

    stop = threading.Event()
    reader = UnitReader(Late(), FetchMeter(private_slot()), stop, hang_timeout_s=30.0)
    reader.plan = PassPlan("sequential", 0, 0, 1, "", 1)
    with pytest.raises(LateCallsError):
        list(reader.read(UnitRead(Unit(0, 0, 0, ())), 0))
    assert stop.is_set()


@pytest.mark.parametrize("number", [0, MAIN])
def test_a_reading_thread_shows_life_and_the_main_thread_as_itself_too(number: int) -> None:
    slot = private_slot()
    reader = UnitReader(Counted(), FetchMeter(slot), threading.Event(), hang_timeout_s=30.0)
    reader.plan = PassPlan("sequential", 0, 0, 1, "", 1)
    assert list(reader.read(UnitRead(Unit(0, 0, 0, ())), number))
    assert slot["read_beats_s"][number] > 0
    assert (slot["beat_s"] > 0) == (number == MAIN), (
        "it reads by itself, and has no time to show life otherwise"
    )
