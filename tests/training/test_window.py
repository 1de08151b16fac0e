"""The window: when the next segment is prepared, and the way of a batch from `next` to the part in C and back."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cachestream
from cachestream import EpochLoader
from cachestream.training.batches import memory
from cachestream.training.prepare import Pace
from cachestream.training.threads import Flag, Threads, use_one_torch_thread
from cachestream.training.window import Window
from tests.training.conftest import NewCache
from tests.worker.support import wait_until

PACKAGE: Final = str(Path(cachestream.__file__).parent)


@pytest.mark.skipif(memory.in_c is None, reason="installed without the part in C")
@pytest.mark.parametrize("container", ["dict", "tuple"])
def test_a_batch_takes_five_frames_and_six_files_to_the_part_in_c_and_back(
    container: str, cache_of: Any
) -> None:
    rows = [(np.full(600_001, i, np.uint8), i) for i in range(40)]
    samples = [{"x": x, "n": n} for x, n in rows] if container == "dict" else rows
    depth = deepest = 0
    files: set[str] = set()
    submitted: list[int] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        nonlocal depth, deepest
        ours = frame.f_code.co_filename.startswith(PACKAGE)
        if event == "call" and ours:
            depth += 1
            files.add(Path(frame.f_code.co_filename).name)
        elif event == "return" and ours:
            depth -= 1
        elif event == "c_call" and getattr(called, "__name__", "") in {"submit", "wait"} and ours:
            submitted.append(depth)

    with EpochLoader(cache_of(samples, [20, 20]), 4) as loader:
        for number, _ in enumerate(batches := iter(loader)):
            if number == 3:
                sys.setprofile(look)
                try:
                    next(batches)
                finally:
                    sys.setprofile(None)
    assert submitted
    assert max(submitted) <= 5, submitted
    assert len(files) <= 6, " ".join(sorted(files))


@given(st.lists(st.floats(0.02, 2.0), min_size=1, max_size=50), st.integers(1, 16))
def test_a_pace_lies_between_the_shortest_step_and_the_longest(steps_s: list[float], batches: int) -> None:
    pace, now_s = Pace(), 0.0
    pace.note(now_s, 0)
    for number, step_s in enumerate(steps_s, 1):
        now_s += step_s
        pace.note(now_s, number * batches)
        pace.note(now_s + 0.01, number * batches)
    assert pace.step_s is not None
    assert min(steps_s) * 0.999 <= pace.step_s * batches <= max(steps_s) * 1.001


def test_a_pause_is_forgotten_after_a_few_looks() -> None:
    pace, now_s = Pace(), 60.0
    assert pace.step_s is None
    for batches in range(20):
        pace.note(now_s, batches)
        now_s += 0.25
    assert pace.step_s == pytest.approx(0.25)


def test_a_flag_is_set_once_and_for_all() -> None:
    flag = Flag()
    assert not flag.wait(0.0)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait(60)
    flag.set()
    assert flag.is_set
    assert flag.wait(0.0)


def test_threads_do_what_they_were_given_and_end() -> None:
    together, threads = threading.Barrier(2, timeout=60), Threads("gather")
    threads.most = 2

    def meet() -> None:
        together.wait()  # neither goes on alone

    for _ in range(8):
        threads.submit(meet)
    threads.stop()
    assert threads.join(60)


def test_a_thread_of_one_is_about_the_thread_that_asks_and_no_other() -> None:
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
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_who_enters_a_segment_closes_those_before_it_also_one_without_a_batch() -> None:
    closed: list[str] = []
    window = Window(SimpleNamespace())  # type: ignore[arg-type]
    segments = [SimpleNamespace(close=partial(closed.append, name)) for name in ("a", "none of it", "c", "d")]
    window._readers = [SimpleNamespace(segment=segment, is_open=True) for segment in segments]  # type: ignore[misc]
    window.enter(segments[2])  # type: ignore[arg-type]
    assert closed == ["a", "none of it"]
    window.enter(segments[2])  # type: ignore[arg-type]
    assert [reader.segment for reader in window._readers] == segments[2:]


def test_a_report_is_there_before_the_first_batch(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        assert len(loader) == 4
        wait_until(lambda: cache.status().loaders, "a thread writes it")
        (report,) = cache.status().loaders
        assert (report.pid, report.batches) == (os.getpid(), 0)
    assert cache.status().loaders == ()
