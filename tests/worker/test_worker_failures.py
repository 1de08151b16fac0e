"""Whatever a transform, a source or an odd sample does: the rest is cached once, the bad ones counted."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.errors import NotEnoughSamplesError, SourceUnavailableError, WorkerError
from tests.worker.sources import Faulty, Numbers, Ragged, Switched, misbehave
from tests.worker.support import (
    DEADLINE_S,
    failures_of,
    fill,
    is_running,
    keys_of,
    only_once,
    sampling_pids,
    stop_under_lock,
    wait_until,
)

KILLERS = {30: "os._exit0", 31: "os._exit1", 50: "os._exit3", 51: "os._exit4", 70: "segfault", 90: "loop"}
SKIPPED = {10: "raise", 20: "sys.exit", 40: "nonsense", 60: "none", 80: "memory", 85: "cancelled"}
FAULTS = tuple(sorted({**KILLERS, **SKIPPED}.items()))


def keys_but(units: set[int]) -> set[str]:
    return {f"{unit}/0" for unit in range(100) if unit not in units}


@pytest.mark.e2e
def test_whatever_a_transform_does_the_other_samples_are_cached(cache: Cache) -> None:
    def transform(sample: dict[str, npt.NDArray[Any]]) -> object:
        return misbehave(dict(FAULTS).get(int(sample["unit"]), ""), sample)

    class WithUnit(Numbers):
        def sample(self, unit: int, sample: int) -> tuple[str, object]:
            key, fields = super().sample(unit, sample)
            return key, {**fields, "unit": unit}

    source = WithUnit(100)
    with cs.start_worker(cache, source, num_workers=2, transform=transform, hang_timeout_s=2.0) as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status()
    assert only_once(cache) == keys_but(set(dict(FAULTS)))
    assert failures_of(cache) == {"transform": 4, "sample": 1, "quarantined": len(KILLERS)}
    reasons = {row.reason for row in status.failures if row.kind == "quarantined"}
    assert reasons == {
        "reading it ended the process with exit code 0, again and again",
        "reading it ended the process with exit code 1, again and again",
        "reading it ended the process with exit code 3, again and again",
        "reading it ended the process with exit code 4, again and again",
        "reading it ended the process by SIGSEGV, again and again",
        "reading it hung, again and again",
    }
    assert status.fill_message.startswith("11 skipped, most often: ")


@pytest.mark.e2e
def test_whatever_a_source_does_the_other_units_are_cached(cache: Cache) -> None:
    source = Faulty(100, faults=FAULTS)
    fill(cache, source, num_workers=2, hang_timeout_s=2.0)
    assert only_once(cache) == keys_but(set(dict(FAULTS)))
    assert failures_of(cache) == {"source": 4, "sample": 1, "quarantined": len(KILLERS)}


@pytest.mark.e2e
def test_samples_of_another_kind_are_skipped_and_shapes_that_differ_are_kept(cache: Cache) -> None:
    # Three processes claim two units at a time, so none begins with one of the odd units.
    with cs.start_worker(cache, Ragged(100), num_workers=3, order="sequential") as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status()
    assert only_once(cache) == keys_but({unit for unit in range(100) if unit % 10 == 9})
    assert failures_of(cache) == {"schema": 10}
    assert "rows" in status.failures[0].reason
    assert cache.schema is not None
    assert str(cache.schema) == "{name: str, rows: float32[?, ?]}"


@pytest.mark.e2e
def test_a_worker_whose_shards_are_taken_away_says_what_is_wrong(cache: Cache) -> None:
    away = f"{cache.directory.shards}-away"
    with cs.start_worker(cache, Numbers(None, pause_s=0.05), num_workers=1) as worker:
        cache.wait(1, DEADLINE_S)
        os.rename(cache.directory.shards, away)
        Path(cache.directory.shards).touch()
        try:
            with pytest.raises(
                WorkerError, match=r"shards.*(: Not a directory| is a file in place of a folder)"
            ):
                worker.wait(DEADLINE_S)
            wait_until(lambda: not worker.is_alive(), "the worker has ended")
        finally:
            os.unlink(cache.directory.shards)
            os.rename(away, cache.directory.shards)
    cache.recover()


@pytest.mark.e2e
def test_an_eviction_policy_that_fails_is_named_and_what_was_read_is_not_blamed(tmp_path: Path) -> None:
    def undecided(_rows: object) -> list[int]:
        raise ValueError("which one?")

    with (
        Cache(tmp_path / "cache", size_limit="1MB", min_free=0, eviction=undecided) as small,
        cs.start_worker(small, Numbers(None), num_workers=1) as worker,
    ):
        assert worker.wait(DEADLINE_S), "it is full, and rests"
        small.take_snapshot()[1].release()  # now something may go

        def wait() -> None:
            while worker.wait(DEADLINE_S):
                time.sleep(0.05)

        with pytest.raises(WorkerError, match="which one") as caught:
            wait()
    assert "what they read" not in str(caught.value).partition("Traceback")[0]


@pytest.mark.e2e
def test_a_process_that_is_stopped_is_replaced_and_accuses_nobody(cache: Cache) -> None:
    source = Numbers(75, pause_s=0.1)
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=2.0) as worker:
        cache.wait(1, DEADLINE_S)
        (pid,) = sampling_pids(cache)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not is_running(pid), "the stopped process was ended")
        assert worker.wait(DEADLINE_S)
        assert worker.status().worker is not None
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


def test_the_processor_time_of_a_process_that_died_counts_on(cache: Cache, tmp_path: Path) -> None:
    died = str(tmp_path / "died")

    def work(sample: Any) -> Any:
        until_s = time.process_time() + 0.1
        while not os.path.exists(died) and time.process_time() < until_s:
            pass
        if time.process_time() > 1.0 and not os.path.exists(died):
            open(died, "xb").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with cs.start_worker(cache, Numbers(20), num_workers=1, concurrency=1, transform=work) as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status().worker
    assert os.path.exists(died)
    assert status is not None
    assert status.totals.cpu_s > 0.8


@pytest.mark.slow  # the supervisor waits for the lock
def test_a_process_that_is_stopped_while_the_catalogue_is_locked_is_replaced(cache: Cache) -> None:
    """As by itself: the supervisor took its wait for the lock for a suspension of all processes."""
    source = Numbers(300, pause_s=0.01)
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=2.0) as worker:
        cache.wait(1, DEADLINE_S)
        (pid,) = sampling_pids(cache)
        stop_under_lock(cache, pid)
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_remote_that_refuses_everything_ends_the_worker_with_one_clear_error(
    tmp_path: Path, cache: Cache
) -> None:
    switch, journal = tmp_path / "switch", tmp_path / "journal"
    switch.write_text("refused", encoding="utf-8")
    source = Switched(300, switch=str(switch), journal=str(journal))
    with (
        cs.start_worker(cache, source, num_workers=2, concurrency=4) as worker,
        pytest.raises(WorkerError, match="20 units in a row cannot be read, the last one: no such bucket"),
    ):
        worker.wait(DEADLINE_S)
    assert len(journal.read_text().split()) < 150, "a retry storm"
    switch.write_text("ok", encoding="utf-8")
    fill(cache, source, num_workers=2)
    assert only_once(cache) == source.keys(), "what was refused was not given up"


@pytest.mark.e2e
def test_a_few_units_that_are_all_refused_end_the_worker_too(tmp_path: Path, cache: Cache) -> None:
    switch = tmp_path / "switch"
    switch.write_text("refused", encoding="utf-8")
    with (
        cs.start_worker(cache, Switched(5, switch=str(switch)), num_workers=1) as worker,
        pytest.raises(
            WorkerError, match="nothing could be read, 5 units refused, the last one: no such bucket"
        ),
    ):
        worker.wait(DEADLINE_S)


LATIN = os.fsdecode(b"\xe9t\xe9.jpg")  # a file's name that is not UTF-8


@pytest.mark.e2e
def test_an_outage_is_waited_out_and_costs_nothing(tmp_path: Path, cache: Cache) -> None:
    class Away(Switched):
        """Numbers whose remote is away at a path that is not UTF-8, while the file at `switch` says so."""

        def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            state = Path(self.switch).read_text(encoding="utf-8")
            for index, item in enumerate(Numbers.read(self, unit, rng)):
                if index == self.samples // 2 and state == "away":
                    raise SourceUnavailableError(f"{LATIN}: no answer")
                yield item

    switch = tmp_path / "switch"
    switch.write_text("ok", encoding="utf-8")
    source = Away(100, 4, pause_s=0.08, switch=str(switch))
    with cs.start_worker(cache, source, num_workers=2, concurrency=4) as worker:
        cache.wait(8, DEADLINE_S)
        switch.write_text("away", encoding="utf-8")
        status = worker.status
        wait_until(lambda: status().worker.totals.retries > 4, "the remote is tried again")  # type: ignore[union-attr]
        wait_until(lambda: "waiting for the remote" in status().worker.states, "it says so")  # type: ignore[union-attr]
        wait_until(lambda: "waiting for the remote: " in status().remote_message, "and what for")
        wait_until(lambda: "?t?.jpg: no answer" in status().remote_message, "it is named")
        with pytest.raises(NotEnoughSamplesError, match="waiting for the remote: "):
            cache.wait(10**6, 0.1)
        assert keys_of(cache), "training can go on"
        switch.write_text("ok", encoding="utf-8")
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}
    assert cache.status().remote_message == ""


@pytest.mark.e2e
def test_a_stop_during_an_outage_gives_nothing_up(tmp_path: Path, cache: Cache) -> None:
    switch = tmp_path / "switch"
    switch.write_text("away", encoding="utf-8")
    source = Switched(50, 2, switch=str(switch))
    worker = cs.start_worker(cache, source, num_workers=1)
    wait_until(lambda: cache.status().worker.totals.retries > 4, "it is tried")  # type: ignore[union-attr]
    worker.stop(DEADLINE_S)
    switch.write_text("ok", encoding="utf-8")
    fill(cache, source)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_odd_keys_and_bad_samples_cost_no_other_of_their_units_and_are_named(cache: Cache) -> None:
    class Odd(Numbers):
        """Numbers that know their places; the fourth unit's first samples have keys that are no str, others odd ones."""

        def sample(self, unit: int, sample: int) -> tuple[Any, Any]:
            key, fields = super().sample(unit, sample)
            odd = {
                (3, 0): None,
                (3, 1): 3,
                (3, 2): b"key",
                (3, 3): ("a", 1),
                (3, 4): Path("a"),
                (4, 0): LATIN,
            }
            return odd.get((unit, sample), key), {**fields, "unit": unit, "n": sample}

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if (sample["unit"], sample["n"]) in ((4, 0), (5, 30)):
            raise ValueError(f"cannot parse {LATIN}")
        return sample

    source = Odd(6, 50)
    fill(cache, source, transform=transform)
    assert only_once(cache) == source.keys() - {*(f"3/{sample}" for sample in range(5)), "4/0", "5/30"}
    assert failures_of(cache) == {"sample": 5, "transform": 2}
    failures = {row.reason: (row.example, row.count) for row in cache.status().failures}
    assert failures["its key is of type tuple: keys are str"] == ("unit 3: ('a', 1)", 1)
    assert failures["ValueError: cannot parse ?t?.jpg"][1] == 2


@pytest.mark.e2e
def test_each_sample_of_an_archive_that_cannot_be_used_is_counted(tmp_path: Path, cache: Cache) -> None:
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for number in range(10):
                data = b"seven" if number < 7 else b"7"
                member = tarfile.TarInfo(f"{number}.cls")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with cs.start_worker(cache, cs.TarSource(tmp_path), num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status()
    assert cache.num_samples == 6
    assert failures_of(cache) == {"sample": 14}
    assert status.skipped == 14
    assert status.worker is not None
    assert status.worker.totals.failures == 14
