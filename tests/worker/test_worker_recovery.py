"""A worker loses its catalogue, disk, descriptors or life: the filling goes on, or all are told."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import cachestream as cs
from cachestream import Cache, WorkerError
from cachestream.storage.status import lost_worker
from cachestream.storage.telemetry import Board
from cachestream.worker import attachments, health
from cachestream.worker.attachments import WorkerMonitor
from tests.worker.sources import Numbers, Switched
from tests.worker.support import (
    ATTACHING,
    DEADLINE_S,
    Processes,
    is_running,
    log_of,
    only_once,
    script,
    supervisor_pid,
    wait_until,
)

LONG: Final = Numbers(100_000, nbytes=20_000, pause_s=0.008)


def last_shard(cache: Cache) -> int:
    """The number of the newest shard that is there: more of them, whatever was evicted meanwhile."""
    return max([int(name.split(".")[0]) for name in os.listdir(cache.directory.shards)], default=0)


def wait_for_new_shards(cache: Cache, count: int = 5) -> None:
    """Until new shards come: their numbers go on after those of a catalogue that was made anew."""
    for _ in range(count):
        before = last_shard(cache)
        wait_until(lambda before=before: last_shard(cache) > before, "a new shard")  # type: ignore[misc]


@contextmanager
def training(cache: Cache) -> Iterator[cs.EpochLoader]:
    """Epoch after epoch over a cache, in another thread."""
    stop = threading.Event()
    with cs.EpochLoader(cache, batch_size=4) as loader:

        def train() -> None:
            while not stop.is_set():
                for _ in loader:
                    if stop.wait(0.02):
                        break

        thread = threading.Thread(target=train, name="trainer")
        thread.start()
        try:
            yield loader
        finally:
            stop.set()
            thread.join(DEADLINE_S)


def kill(cache: Cache) -> int:
    """Kill the worker; its process id."""
    pid = supervisor_pid(cache)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), "the supervisor is dead")
    return pid


def of_cachestream(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "cachestream")


@pytest.mark.e2e
def test_a_full_cache_whose_catalogue_is_lost_goes_on_being_filled(cache: Cache) -> None:
    cache.size_limit = "1MB"
    with (
        cs.start_worker(cache, LONG, num_workers=2, shard_size="60KB"),
        training(cache),
    ):
        wait_until(lambda: cache.status().evicted_shards > 10, "the cache is full, and turns over")
        os.unlink(cache.catalogue.path)
        assert cache.fill_state() == "filling"
        wait_until(lambda: "the catalogue was lost" in log_of(cache), "the log tells")
        wait_until(lambda: cache.status().evicted_shards > 10, "the cache turns over")
        wait_for_new_shards(cache)

        def is_recorded() -> bool:  # anew after each time that the catalogue was made, within a second
            with cache.catalogue.reading() as tables:
                return (tables.meta("fill_state"), tables.meta("is_looking")) == ("filling", 0)

        wait_until(is_recorded, "the state of the filling is in the new catalogue")


@pytest.mark.e2e
def test_waiting_for_a_pass_outlasts_the_catalogue(cache: Cache) -> None:
    """A new one counts passes from 1 again, which is not the end of the one that was waited for."""
    source = Numbers(100, pause_s=0.08)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
        cache.evict(to=0)

        def has_second_pass() -> bool:
            state = cache.filling.state()
            return state.phase == "filling" and state.last_pass is not None and state.last_pass.id == 2

        wait_until(has_second_pass, "the second pass")
        waits = threading.Thread(target=worker.wait, args=(DEADLINE_S,))
        waits.start()
        wait_until(lambda: cache.num_samples > 20, "samples of the second pass")
        os.unlink(cache.catalogue.path)
        waits.join(DEADLINE_S)
        assert cache.num_samples == 100
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_pass_that_makes_no_sense_has_the_catalogue_rebuilt_by_the_worker(cache: Cache) -> None:
    source = Numbers(400, pause_s=0.01)
    with cs.start_worker(cache, source, num_workers=2) as worker:
        cache.wait(40, DEADLINE_S)
        with cache.catalogue.transaction() as tables:
            tables.execute("UPDATE passes SET plan = replace(plan, 'shuffle', 'shuffld')")
        assert worker.wait(DEADLINE_S)
        log = log_of(cache)
    assert "the catalogue was lost" in log
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_worker_that_is_replaced_between_two_looks_is_waited_for(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = WorkerMonitor.will_replace

    def late_look(monitor: WorkerMonitor) -> bool:
        wait_until(cache.has_worker, "another one is there")
        return look(monitor)

    monkeypatch.setattr(WorkerMonitor, "will_replace", late_look)
    source = Numbers(100, pause_s=0.1)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(1, DEADLINE_S)
        kill(cache)
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_killed_supervisor_is_replaced_for_the_loader_of_a_stream(
    tmp_path: Path, processes: Processes
) -> None:
    with cs.stream(
        LONG, tmp_path / "cache", "1MB", min_free=0, batch_size=4, num_workers=1, shard_size="60KB"
    ) as loader:
        next(iter(loader))
        first = kill(loader.cache)
        wait_until(lambda: supervisor_pid(loader.cache) not in (0, first), "another one is there")
        before = loader.cache.num_samples
        wait_until(lambda: loader.cache.num_samples != before or next(iter(loader)) is None, "it fills")
    processes.wait_until_gone()


@pytest.mark.e2e
def test_of_many_who_need_a_killed_supervisor_one_replaces_it(
    cache: Cache, tmp_path: Path, processes: Processes
) -> None:
    """The one that had started it is gone, and those that had attached see to it."""
    with ExitStack() as stack:
        entered = []
        for rank in range(3):
            run = script(tmp_path / f"rank{rank}.py", ATTACHING, cache.path)
            entered.append(stack.enter_context(run))
            assert entered[-1].line() in ("started", "attached")
        for _ in range(2):
            first = kill(cache)
            wait_until(lambda first=first: supervisor_pid(cache) not in (0, first), "another one is there")  # type: ignore[misc]
            entered.pop(0).process.kill()
            wait_for_new_shards(cache, 1)
            wait_until(lambda: len(processes.called("cs-supervisor")) == 1, "it is the only one")
        for one in entered:
            one.tell()
            one.end()
    processes.wait_until_gone()


@pytest.mark.e2e
@pytest.mark.parametrize("end", ["stop", "complete", "failed"])
def test_a_worker_that_ends_in_order_is_not_replaced(
    cache: Cache, tmp_path: Path, processes: Processes, end: str
) -> None:
    switch = tmp_path / "switch"
    switch.write_text("refused" if end == "failed" else "ok", encoding="utf-8")
    source = Switched(30 if end != "stop" else None, pause_s=0.02, switch=str(switch))
    worker = cs.start_worker(cache, source, num_workers=1)
    if end == "stop":
        cs.Worker(cache, None, None).stop(60.0)
    elif end == "complete":
        assert worker.wait(DEADLINE_S)
        os.kill(supervisor_pid(cache), signal.SIGTERM)
    wait_until(lambda: not worker.is_alive(), "it has ended")
    wait_until(lambda: not worker._monitor._thread.is_alive(), "nobody looks after it")  # type: ignore[union-attr]
    assert not cache.has_worker()
    assert lost_worker(cache.directory) is None
    assert "without a word" not in cache.status().fill_message
    processes.wait_until_gone()
    worker.close()


@pytest.mark.e2e
def test_workers_that_are_killed_again_and_again_are_given_up_with_an_error_that_all_are_told(
    cache: Cache, processes: Processes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attachments, "_SETTLED_S", 1e6)  # however slow the machine, they die soon
    monkeypatch.setattr(attachments, "_LOOK_S", 0.1)
    monkeypatch.setattr(health, "_FIRST_PAUSE_S", 0.05)
    worker = cs.start_worker(cache, Numbers(None, pause_s=0.01), num_workers=1)
    killed = 0
    while cache.filling.state().phase != "failed":
        if cache.has_worker() and (pid := supervisor_pid(cache)) and is_running(pid):
            os.kill(pid, signal.SIGKILL)
            killed += 1
        assert killed < 50
        threading.Event().wait(0.1)
    assert 5 <= killed < 20
    with pytest.raises(WorkerError, match="its workers were killed 5 times within 10 minutes"):
        worker.wait(DEADLINE_S)
    wait_until(
        lambda: "is not filled any more: its workers were killed" in of_cachestream(caplog), "it is told"
    )
    assert cache.fill_state() == "failed"
    processes.wait_until_gone()
    worker.close()
    cache.recover()
    with cs.start_worker(cache, Numbers(None, pause_s=0.01), num_workers=1):
        before = cache.num_samples
        wait_until(lambda: cache.num_samples > before, "a new one fills")


class OnABadDisk(Numbers):
    """Numbers whose sampling processes get EIO for the space of every shard while the file `journal`.bad is there."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        allocate = os.posix_fallocate

        def refuse(fd: int, offset: int, size: int) -> None:
            if os.path.exists(self.journal + ".bad"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            allocate(fd, offset, size)

        setattr(os, "posix_fallocate", refuse)  # noqa: B010  in the process that unpickles it


@pytest.mark.e2e
def test_a_disk_that_fails_for_longer_than_a_crash_loop_takes_is_waited_for(
    cache: Cache, tmp_path: Path
) -> None:
    switch = tmp_path / "units"
    bad = Path(f"{switch}.bad")
    source = OnABadDisk(None, nbytes=20_000, pause_s=0.002, journal=str(switch))
    with cs.start_worker(cache, source, num_workers=2, shard_size="60KB") as worker:
        cache.wait(10, DEADLINE_S)
        bad.touch()
        wait_until(lambda: "Input/output error" in cache.status().disk_message, "the status names the disk")
        before = len(switch.read_text().split())
        for _ in range(50):
            assert cache.fill_state() == "filling"
            threading.Event().wait(0.05)
        assert len(switch.read_text().split()) - before < 500, "what cannot be kept is not fetched for ever"
        bad.unlink()
        wait_for_new_shards(cache, 3)
        wait_until(lambda: not cache.status().disk_message, "it names nothing any more")
        assert Board(cache.directory.worker_file("board")).restarts == 0
        assert worker.is_alive()
    only_once(cache)
    assert cache.verify().ok
