"""Transactions of the catalogue are isolated between threads, processes and forks."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from cachestream.errors import CacheLockedError
from cachestream.storage import catalogue as module
from cachestream.storage.cache import Cache
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.filling import LabelNames
from tests.storage.support import Line, fork


def can_write(path: str) -> bool:
    """Return whether another process gets the write lock now."""

    def attempt(line: Line) -> None:
        module.LOCK_TIMEOUT_S = 0.05  # type: ignore[misc]
        other = Catalogue(path)
        try:
            with other.transaction():
                line.say("yes")
        except CacheLockedError:
            line.say("no")

    child = fork(attempt)
    answer = child.hear()
    assert child.wait() == 0
    return answer == "yes"


def test_a_pass_after_earlier_ones_has_an_id_above_zero(cache: Cache) -> None:
    with cache.catalogue.transaction() as tables:
        assert tables.earlier_pass("{}", 10) == -1
    assert cache.status().pass_number == 1
    with cache.catalogue.transaction() as tables:
        assert tables.insert_pass('{"ordinal":1}', 10, 0) == 1
        assert tables.insert_pass('{"ordinal":2}', None, 0) == 2


def test_a_transaction_is_all_or_nothing(cache: Cache) -> None:
    def fail_half_way() -> None:
        with cache.catalogue.transaction() as tables:
            tables.set_meta("a", 1)
            tables.add("b", 1 // 0)

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    with cache.catalogue.transaction() as tables:
        assert tables.meta("a") is None
        tables.set_meta("a", 2)
    with cache.catalogue.reading() as tables:
        assert tables.meta("a") == 2


@pytest.mark.e2e
def test_a_writer_keeps_other_processes_out_until_it_commits(cache: Cache) -> None:
    with cache.catalogue.transaction():
        assert not can_write(cache.catalogue.path)
    assert can_write(cache.catalogue.path)


@pytest.mark.e2e
def test_opening_the_cache_again_in_one_process_leaves_the_locks_of_the_first(cache: Cache) -> None:
    """Closing any descriptor of a file drops all POSIX locks that the process holds on it."""
    with cache.catalogue.transaction():
        second = Catalogue(cache.catalogue.path)
        assert second.problem() is None
        assert not can_write(cache.catalogue.path)
        second.close()
        assert not can_write(cache.catalogue.path), "SQLite itself knows of this"
        del second
        gc.collect()
        assert not can_write(cache.catalogue.path)


def test_threads_take_turns(cache: Cache) -> None:
    def count() -> None:
        for _ in range(50):
            with cache.catalogue.transaction() as tables:
                tables.add("turns", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with cache.catalogue.reading() as tables:
        assert tables.meta("turns") == 200


@pytest.mark.e2e
def test_waiting_for_a_stopped_writer_ends_at_the_deadline_with_what_to_look_for(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(line: Line) -> None:
        with cache.catalogue.transaction():
            line.say("in")
            line.wait_for_word()

    child = fork(hold)
    assert child.hear() == "in"
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    other = Catalogue(cache.catalogue.path)
    with pytest.raises(CacheLockedError, match="look for a stopped or swapping process"), other.transaction():
        pass
    child.kill()
    with other.transaction():
        pass
    other.close()


@pytest.mark.e2e
def test_a_fork_waits_for_the_transactions_of_other_threads(cache: Cache) -> None:
    """Otherwise the child's SQLite would believe that it holds its parent's lock, and write without one."""
    inside, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with cache.catalogue.transaction() as tables:
            inside.set()
            go_on.wait(120)
            tables.set_meta("written", "by the parent")

    def read_and_write(line: Line) -> None:
        with cache.catalogue.transaction() as tables:
            line.say(str(tables.meta("written")))
            line.wait_for_word()
            tables.set_meta("written", "by the child")

    thread = threading.Thread(target=write)
    thread.start()
    assert inside.wait(120)
    waker = threading.Timer(0.1, go_on.set)
    waker.start()
    child = fork(read_and_write)
    assert go_on.is_set(), "the fork came before the transaction had ended"
    assert child.hear() == "by the parent"
    assert not can_write(cache.catalogue.path), "the child's lock is a real one"
    child.tell()
    assert child.wait() == 0
    thread.join()
    waker.join()
    with cache.catalogue.reading() as tables:
        assert tables.meta("written") == "by the child"


@pytest.mark.e2e
def test_a_child_that_ends_leaves_its_parents_connection_as_it_was(cache: Cache) -> None:
    with cache.catalogue.transaction():

        def use(line: Line) -> None:
            del line
            gc.collect()

        assert fork(use).wait() == 0
        assert not can_write(cache.catalogue.path)


@pytest.mark.e2e
def test_catalogues_that_are_dropped_are_forgotten_and_closed(cache: Cache) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return len(module._catalogues), sum(target == cache.catalogue.path for target in targets)

    before = count()
    for _ in range(20):
        with Catalogue(cache.catalogue.path).reading() as tables:
            tables.totals()
    catalogues, files = count()
    assert catalogues <= before[0], "those of other tests may go meanwhile"
    assert files == before[1]


def test_nested_readers_see_what_the_transaction_around_them_wrote(cache: Cache) -> None:
    with cache.catalogue.transaction() as tables:
        tables.set_meta("a", 1)
        with cache.catalogue.reading() as inner:
            assert inner.meta("a") == 1


def test_a_pass_that_is_void_leaves_the_digest_of_the_transform(cache: Cache) -> None:
    """It was recorded before, and tells whether another transform has made the samples."""
    cache.filling.record_transform("3.12:abc")
    state = cache.filling.adopt("source", "data", LabelNames(0, ""), lambda _: True)
    assert (state.source, state.transform) == ("source", "3.12:abc")
