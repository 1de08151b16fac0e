"""Catalogues that are lost, damaged, or of another version are rebuilt, and no sample is cached twice."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cachestream import linux
from cachestream.errors import CacheError
from cachestream.storage import publish as publish_module
from cachestream.storage.cache import Cache
from cachestream.storage.catalogue import APPLICATION_ID, SCHEMA_VERSION
from cachestream.storage.os_errors import CatalogueDamagedError
from cachestream.storage.publish import CatalogueReplacedError, Progress, Publisher
from cachestream.storage.reservations import Owner
from tests.storage.support import Line, assert_sound, content, fork, keys_in, publish, shard_ids, worker_runs


@pytest.fixture
def filled(cache: Cache) -> Cache:
    for first in range(0, 12, 3):
        publish(cache, content(first))
    return cache


ALL = sorted(f"k{i}" for i in range(12))


def truncate_to(size: int) -> Callable[[str], None]:
    return lambda path: os.truncate(path, size)


def garbage(path: str) -> None:
    Path(path).write_bytes(os.urandom(50_000))


def damaged_pages(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xaa" * (os.path.getsize(path) - 4096))


def of_another_program(application: int, version: int) -> Callable[[str], None]:
    def write(path: str) -> None:
        os.unlink(path)
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE theirs (x)")
        other.execute(f"PRAGMA application_id = {application}")
        other.execute(f"PRAGMA user_version = {version}")
        other.commit()
        other.close()

    return write


DAMAGES = {
    "deleted": os.unlink,
    "emptied": truncate_to(0),
    "cut to a byte": truncate_to(1),
    "cut to half a header": truncate_to(50),
    "cut to a page": truncate_to(4096),
    "cut to five pages": truncate_to(5 * 4096),
    "garbage": garbage,
    "damaged pages": damaged_pages,
    "another program's": of_another_program(0, 0),
    "another program's with a version": of_another_program(0, 1),
    "another program's with an id": of_another_program(77, 0),
    "an empty one of ours": of_another_program(APPLICATION_ID, SCHEMA_VERSION),
}


@pytest.mark.e2e
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_catalogue_that_is_lost_while_it_is_open_is_rebuilt_by_the_next_repair(
    filled: Cache, damage: Callable[[str], None]
) -> None:
    with filled.catalogue.reading() as tables:  # pages of it are in SQLite's memory
        tables.totals()
    damage(filled.catalogue.path)
    with suppress(CatalogueDamagedError):  # pages that SQLite has in memory may hide the damage
        publish(filled, content(12))
    assert not filled.verify().ok
    assert filled.verify(repair=True).ok
    publish(filled, content(15))
    assert set(keys_in(filled)) >= {*ALL, "k15", "k16", "k17"}
    assert_sound(filled)


@pytest.mark.e2e
def test_a_lost_catalogue_is_waited_for_while_a_worker_runs_and_else_an_error_says_what_to_do(
    filled: Cache,
) -> None:
    def use(line: Line) -> None:
        line.say(str(filled.num_samples))
        line.wait_for_word()
        line.say("waiting")
        line.say(str(filled.num_samples))

    with worker_runs(filled):
        child = fork(use)
        assert child.hear() == "12"
        os.unlink(filled.catalogue.path)
        child.tell()
        assert child.hear() == "waiting"
        time.sleep(0.1)
        filled.rebuild()
        assert child.hear() == "12"
        assert child.wait() == 0
    os.unlink(filled.catalogue.path)
    with pytest.raises(CatalogueDamagedError, match="is missing; run 'cachestream verify CACHE --repair'"):
        filled.status()
    filled.rebuild()
    assert_sound(filled)


def test_a_catalogue_that_another_process_has_rebuilt_is_not_rebuilt_again(filled: Cache) -> None:
    assert filled.num_samples == 12
    os.unlink(filled.catalogue.path)
    Cache(filled.path).close()
    before = filled.filling.state().catalogue_id
    os.unlink(filled.catalogue.path)
    Cache(filled.path).close()
    rebuilt = os.stat(filled.catalogue.path)
    filled.rebuild()
    assert os.stat(filled.catalogue.path).st_ino == rebuilt.st_ino
    assert filled.filling.state().catalogue_id != before


def test_a_rebuilt_catalogue_with_the_inode_of_the_lost_one_is_not_rebuilt_again(filled: Cache) -> None:
    before = filled.filling.state().catalogue_id
    aside = filled.catalogue.path + ".aside"
    os.rename(filled.catalogue.path, aside)
    with pytest.raises(CatalogueDamagedError, match="is missing"):
        filled.status()
    os.rename(aside, filled.catalogue.path)
    filled.rebuild()
    assert filled.filling.state().catalogue_id == before


@pytest.mark.e2e
def test_processes_that_have_it_open_follow_to_the_rebuilt_catalogue(filled: Cache, fast_path: Path) -> None:
    def use(line: Line) -> None:
        line.say(str(filled.num_samples))
        line.wait_for_word()
        publish(filled, content(100))
        line.say(str(filled.num_samples))

    child = fork(use)
    assert child.hear() == "12"
    os.unlink(filled.catalogue.path)
    with Cache(fast_path / "cache") as other:
        assert other.num_samples == 12
        child.tell()
        assert child.hear() == "15"
        assert other.num_samples == 15
        assert filled.num_samples == 15
        assert child.wait() == 0
        assert_sound(other)


@pytest.mark.e2e
def test_several_that_find_it_lost_at_once_rebuild_it_once(filled: Cache) -> None:
    garbage(filled.catalogue.path)

    def use(line: Line) -> None:
        line.say("ready")
        line.wait_for_word()
        cache = Cache(filled.path)
        line.say(f"{cache.num_samples} {shard_ids(cache)}")

    filled.close()
    children = [fork(use) for _ in range(4)]
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.tell()
    assert {child.hear() for child in children} == {"12 [1, 2, 3, 4]"}
    assert [child.wait() for child in children] == [0] * 4
    assert_sound(filled)


def test_a_shard_written_while_the_catalogue_was_rebuilt_is_given_up_and_not_entered_twice(
    filled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = linux.move

    def lose(source: str, target: str) -> None:
        real(source, target)
        os.unlink(filled.catalogue.path)
        assert Cache(filled.path).num_shards == 5, "the rebuild has adopted it"

    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "move", lose)
        with pytest.raises(CatalogueReplacedError, match="what is not cached is to be fetched again"):
            publish(filled, content(12))
    assert shard_ids(filled) == [1, 2, 3, 4, 5]
    assert_sound(filled)


def test_a_shard_whose_file_a_rebuild_removes_is_no_fault_of_the_disk(
    filled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = linux.move

    def lose(source: str, target: str) -> None:
        os.unlink(filled.catalogue.path)
        assert Cache(filled.path).num_shards == 4, "the rebuild has removed what was being written"
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "move", lose)
        with pytest.raises(CatalogueReplacedError):
            publish(filled, content(12))
    assert shard_ids(filled) == [1, 2, 3, 4]
    assert_sound(filled)


@pytest.mark.parametrize("how", ["doomed", "gone"])
def test_a_shard_whose_space_others_have_taken_for_a_dead_process_s_is_not_entered(
    filled: Cache, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its file is removed, or is about to be."""
    real, owner = linux.move, Owner(filled.directory, "slow")

    def clear(source: str, target: str) -> None:
        real(source, target)
        owner.release()
        if how == "gone":
            filled.recover()
        else:
            with filled.catalogue.transaction() as tables:
                assert tables.bury((row.id, row.owner) for row in tables.unfinished()) == [5]

    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "move", clear)
        with pytest.raises(CacheError, match="another process has released the reservation of shard 5"):
            publish(filled, content(12), owner=owner.name)
    assert shard_ids(filled) == [1, 2, 3, 4]
    assert_sound(filled)


def test_what_was_done_in_a_lost_catalogue_is_no_progress_of_the_next(filled: Cache) -> None:
    """The ids are the same but have another meaning."""

    def begin_pass() -> int:
        with filled.catalogue.transaction() as tables:
            return tables.insert_pass("{}", 100, 0)

    owner = Owner(filled.directory, "before")
    publisher = Publisher(filled.directory, filled.catalogue, filled.reservations, owner.name)
    mine = begin_pass()
    row = filled.filling.state().last_pass
    assert row is not None
    assert row.id == mine
    os.unlink(filled.catalogue.path)
    filled.rebuild()
    assert begin_pass() == mine
    done = Progress(replace(row, next_position=50))
    attempts: tuple[Callable[[], object], ...] = (
        lambda: publisher.commit((), mine, (), done),
        lambda: publisher.publish(content(12), mine, ()),
        publisher.check_same,
    )
    for attempt in attempts:
        with pytest.raises(CatalogueReplacedError):
            attempt()
    owner.release()
    assert filled.filling.state().positions_done == 0
    assert_sound(filled)


@pytest.mark.e2e
def test_of_many_who_set_the_limit_at_once_the_last_is_in_the_copy_of_the_settings(
    filled: Cache, fast_path: Path
) -> None:
    def set_limits(first: int) -> None:
        with Cache(fast_path / "cache") as other:
            for number in range(first, first + 20):
                other.size_limit = 3_000_000 + number

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(set_limits, range(0, 80, 20)))
    last = filled.size_limit
    filled.close()
    os.unlink(filled.catalogue.path)
    with Cache(fast_path / "cache") as rebuilt:
        assert rebuilt.size_limit == last


def test_a_shard_of_an_unknown_origin_is_adopted_and_one_that_is_broken_put_aside(filled: Cache) -> None:
    filled.close()
    shards = Path(filled.directory.shards)
    (shards / "000000000002.safetensors").write_bytes(b"broken")
    (shards / "000000000900.tmp").write_bytes(b"half")
    odd = content(50, fill={"source": 5, "plan": [1], "length": "x", "spans": None})
    whole = content(
        53, fill={"source": "s", "plan": "{}", "length": 9, "spans": [[0, 0, 3, 0], [5, 0, 6, 2]]}
    )
    publish(filled, odd)
    publish(filled, whole)
    os.unlink(filled.catalogue.path)
    filled.rebuild()
    assert shard_ids(filled) == [1, 3, 4, 5, 6]
    with filled.catalogue.reading() as tables:
        (row,) = tables.passes()
        assert (row.plan, row.length, row.next_position) == ("{}", 9, 0)
        assert tables.spans()[row.id].tolist() == [[0, 0, 3, 0], [5, 0, 6, 2]]
        assert tables.meta("source") == "s"
        assert tables.meta("quarantined") == 1
    assert sorted(os.listdir(shards)) == [f"{i:012d}.safetensors" for i in (1, 3, 4, 5, 6)]
    assert_sound(filled)


def test_a_file_that_repair_removes_under_an_older_copy_of_the_catalogue_is_nobody_else_s_by_then(
    filled: Cache, fast_path: Path
) -> None:
    """A worker that publishes meanwhile gets another id."""
    filled.close()
    shutil.copy(filled.catalogue.path, fast_path / "older")
    assert publish(filled, content(12)) == 5
    filled.close()
    shutil.copy(fast_path / "older", filled.catalogue.path)
    report = filled.verify(repair=True)
    assert [Path(path).name for path in report.orphans] == ["000000000005.safetensors"]
    assert publish(filled, content(15)) == 6
    assert_sound(filled)


def test_a_damaged_catalogue_is_found_by_verify_and_rebuilt_by_repair(filled: Cache) -> None:
    damaged_pages(filled.catalogue.path)
    other = Cache.__new__(Cache)  # as it was opened before the damage
    other.__dict__.update(filled.__dict__)
    report = other.verify()
    assert not report.ok
    assert report.catalogue_problem
    assert "verify CACHE --repair" in str(report)
    report = other.verify(repair=True)
    assert report.ok
    assert report.repaired
    assert report.num_samples == 12
    assert keys_in(filled) == ALL
    assert_sound(filled)


@pytest.mark.parametrize(
    "numbers",
    [{"length": 2**70}, {"spans": [[0, 0, 2**70, 0]]}, {"spans": [[float("inf"), 0, 1, 0]]}],
    ids=["length", "spans", "infinite"],
)
def test_a_shard_that_tells_of_numbers_no_catalogue_holds_is_entered_without_them(
    filled: Cache, numbers: dict[str, object]
) -> None:
    told = {"source": "test", "plan": "[]", "length": 9, "spans": [], **numbers}
    publish(filled, content(12, fill=told))
    os.unlink(filled.catalogue.path)
    assert filled.verify(repair=True).ok
    assert keys_in(filled) == sorted([*ALL, "k12", "k13", "k14"])
    with filled.catalogue.reading() as tables:
        assert tables.passes() == []


def test_a_shard_that_was_made_to_hold_no_samples_is_put_aside(filled: Cache) -> None:
    """It would stand for the samples in its spans, which would never be fetched again."""
    one = content(12, 1)
    columns = [
        replace(column, shape=(1,), data=column.data[:8])
        if column.name.endswith("#offsets")
        else replace(column, shape=(0, *column.shape[1:]), data=column.data[:0])
        for column in one.columns
    ]
    forged = replace(one, num_samples=0, columns=tuple(columns))
    publish(filled, forged)
    os.unlink(filled.catalogue.path)
    filled.rebuild()
    assert filled.status().quarantined == 1
    assert keys_in(filled) == ALL
    assert_sound(filled)
