"""Workers that begin before the listing has ended: a real S3 server, whose pages come when the test says so."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import cachestream as cs
from cachestream import Cache
from cachestream.formats.files import FileSource
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.tools.refetching import refetch
from tests.storage.support import shard_ids
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server, run_s3_server
from tests.worker.support import (
    DEADLINE_S,
    ROOT,
    Processes,
    fill,
    keys_of,
    kill_supervisor,
    listed,
    log_of,
    only_once,
    plan_of,
    stop_under_lock,
    wait_until,
)

FIRST = 40
PAGE = 1000
READ = PAGE // 25  # of each page
NAMES = FIRST + PAGE + 300


@pytest.fixture(scope="module")
def buckets() -> Iterator[Iterator[tuple[S3Server, str]]]:
    """Empty buckets on a server that keeps its listings: to list anew for each request takes it seconds."""
    with run_s3_server(fresh=False) as server:
        names = [f"growing-{number}" for number in range(20)]
        for name in names:
            server.bucket(name)  # before it lists the buckets
        yield iter([(server, name) for name in names])


def put(bucket: Path, names: list[str]) -> set[str]:
    """Objects of these names; the keys of those that are read."""
    for name in names:
        path = bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return {name for name in names if not name.endswith(".txt")}


def names_in(count: int) -> list[str]:
    """Names in two folders, of which "a-b/" is listed first; after the first ones only every 25th is read."""
    first = [f"a-b/{number:05d}.bin" for number in range(FIRST)]
    return first + [f"a/{n:05d}.{'txt' if n % 25 else 'bin'}" for n in range(count - FIRST)]


class Remote:
    """A bucket behind the proxy."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, bucket: str) -> None:
        proxy.target_port = server.port
        self.proxy, self.url = proxy, f"s3://{bucket}"
        self.folder = server.bucket(bucket)
        self.options = server.options_through(proxy.port)

    def open(self, **options: Any) -> FileSource:
        source = cs.open_source(
            self.url, storage_options=self.options, first_names=FIRST, extensions=["bin", "jpg"], **options
        )
        assert isinstance(source, FileSource)
        return source


@pytest.fixture
def remote(buckets: Iterator[tuple[S3Server, str]], s3_proxy: FaultyProxy) -> Remote:
    server, name = next(buckets)
    return Remote(server, s3_proxy, name)


def lister_pids(processes: Processes) -> list[int]:
    """The processes that list; there is one, or none while another is about to start."""
    return processes.called("cs-lister")


@pytest.mark.e2e
def test_samples_are_cached_while_the_listing_still_runs_and_the_next_pass_is_over_all_units(
    cache: Cache, remote: Remote, processes: Processes
) -> None:
    keys = put(remote.folder, names_in(NAMES))
    source = remote.open()
    remote.proxy.lists_allowed = 0
    with cs.start_worker(cache, source, num_workers=2, shard_size="2kB") as worker:
        cache.wait(FIRST, DEADLINE_S)
        assert len(only_once(cache)) == FIRST
        assert cache.fill_state() == "filling"
        assert cache.status().pass_done is None
        remote.proxy.lists_allowed = 1
        cache.wait(FIRST + READ, DEADLINE_S)
        assert listed(cache) == FIRST + READ
        for pid in lister_pids(processes):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: "the lister ended with code -15" in log_of(cache), "it counts as dead")
        remote.proxy.lists_allowed = None
        assert worker.wait(DEADLINE_S), "another one goes on"
        assert cache.status().pass_done == 1.0
        assert only_once(cache) == keys
        first = plan_of(cache)
        assert first.segments[:2] == (FIRST, FIRST + READ)
        assert source.is_listing, "the listing was done by the worker, not here"

        units = cache.status().worker.totals.units  # type: ignore[union-attr]
        assert units == len(keys)
        cache.evict(cache.size_bytes // 2)
        gone = len(keys) - cache.num_samples
        wait_until(lambda: plan_of(cache).ordinal == first.ordinal + 1, "another pass begins")
        wait_until(lambda: cache.num_samples == len(keys), "all is there again")
        assert worker.wait(DEADLINE_S)
        again = cache.status().worker.totals.units - units  # type: ignore[union-attr]
        # The last one of each process may have been published before it was known that its unit has no more.
        assert gone <= again <= gone + 2
    assert only_once(cache) == keys
    second = plan_of(cache)
    assert (second.num_units, second.listing, second.segments) == (len(keys), first.listing, ())


@pytest.mark.e2e
def test_after_kills_in_mid_listing_and_after_it_nothing_is_listed_again_and_no_object_comes_twice(
    cache: Cache, remote: Remote, processes: Processes
) -> None:
    keys = put(remote.folder, names_in(NAMES))
    source = remote.open()
    options: dict[str, Any] = {"num_workers": 1, "order": "sequential"}
    remote.proxy.lists_allowed = 1
    first = cs.start_worker(cache, source, **{**options, "num_workers": 2})
    wait_until(lambda: listed(cache) == FIRST + READ, "a page is stored")
    cache.wait(FIRST + 1, DEADLINE_S)
    remote.proxy.others_allowed = 0
    kill_supervisor(cache, processes, first)
    remote.proxy.lists, remote.proxy.lists_allowed = 0, None
    second = cs.start_worker(cache, remote.open(), **options)
    wait_until(lambda: listed(cache) == len(keys), "all is listed")
    assert remote.proxy.lists == 1 + 1 + 1, "the first names, the folders, and the page that was missing"
    kill_supervisor(cache, processes, second)
    assert cache.num_samples < len(keys)
    remote.proxy.others_allowed, remote.proxy.lists = None, 0
    fill(cache, remote.open(), **options)
    assert remote.proxy.lists == 1 + 1, "the first names, and the folders"
    assert only_once(cache) == keys


@pytest.mark.slow  # it waits for a process to be taken for dead: on a busy machine others are, too
def test_a_lister_that_was_stopped_is_ended_and_another_one_goes_on(
    cache: Cache, remote: Remote, processes: Processes
) -> None:
    keys = put(remote.folder, names_in(NAMES))
    source = remote.open()
    seen: set[int] = set()

    def has_stored_a_page() -> bool:
        # One that was ended as the machine was busy has lost its page.
        if new := set(lister_pids(processes)) - seen:
            seen.update(new)
            remote.proxy.lists_allowed = 1
        return listed(cache) == FIRST + READ

    def has_ended(pid: int) -> bool:
        if pid in lister_pids(processes):
            os.kill(pid, signal.SIGSTOP)  # again and again: whoever continues it is no part of this
            return False
        return True

    remote.proxy.lists_allowed = 0
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=8.0) as worker:
        wait_until(has_stored_a_page, "a page is stored")
        stopped = next(iter(lister_pids(processes)))
        wait_until(lambda: has_ended(stopped), "it is ended")
        assert listed(cache) == FIRST + READ
        remote.proxy.lists, remote.proxy.lists_allowed = 0, None
        assert worker.wait(DEADLINE_S)
    ended = log_of(cache).count("no sign of life")
    assert 1 <= remote.proxy.lists <= ended, "the page that was missing, and no other"
    assert only_once(cache) == keys


@pytest.mark.slow  # the supervisor waits for the lock
def test_a_lister_that_is_stopped_while_the_catalogue_is_locked_is_replaced(
    cache: Cache, remote: Remote, processes: Processes
) -> None:
    """It may hold the lock itself: the supervisor looks at its processes before it asks the catalogue."""
    keys = put(remote.folder, names_in(NAMES))
    source = remote.open()
    remote.proxy.lists_allowed = 1
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=8.0) as worker:
        wait_until(lambda: listed(cache) == FIRST + READ, "a page is stored")
        (stopped,) = lister_pids(processes)
        stop_under_lock(cache, stopped)
        remote.proxy.lists_allowed = None
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == keys


@pytest.mark.e2e
def test_a_lister_shows_life_while_the_remote_keeps_a_page_back(cache: Cache, remote: Remote) -> None:
    keys = put(remote.folder, names_in(NAMES))
    source = remote.open()
    remote.proxy.lists_allowed = 1
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=5.0) as worker:
        wait_until(lambda: listed(cache) == FIRST + READ, "a page is stored")
        since_s = time.monotonic()
        wait_until(lambda: time.monotonic() > since_s + 7.0, "longer than a process without life is borne")
        assert listed(cache) == FIRST + READ
        assert "no sign of life" not in log_of(cache)
        remote.proxy.lists_allowed = None
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == keys


@pytest.mark.slow
def test_when_the_catalogue_is_lost_in_mid_listing_what_is_cached_is_not_fetched_again(
    cache: Cache, remote: Remote, processes: Processes
) -> None:
    keys = put(remote.folder, names_in(NAMES))
    remote.proxy.lists_allowed = None
    source = remote.open()
    remote.proxy.lists_allowed = 1
    first = cs.start_worker(cache, source, num_workers=2)
    cache.wait(FIRST + 20, DEADLINE_S)
    kill_supervisor(cache, processes, first)
    os.unlink(cache.directory.catalogue)
    remote.proxy.lists_allowed = None
    fill(cache, remote.open(), num_workers=2)
    assert only_once(cache) == keys


@pytest.mark.slow
def test_a_start_on_a_complete_cache_finds_objects_that_were_added_and_rests_if_there_are_none(
    cache: Cache, s3_proxy: FaultyProxy, tmp_path: Path
) -> None:
    with run_s3_server(tmp_path / "s3") as fresh:
        remote = Remote(fresh, s3_proxy, "added")
        keys = put(remote.folder, names_in(300))
        fill(cache, remote.open(), num_workers=2)
        first = plan_of(cache)
        remote.proxy.requests = remote.proxy.lists = 0
        fill(cache, remote.open(), num_workers=2)
        assert plan_of(cache) == first
        assert remote.proxy.requests == remote.proxy.lists, "nothing was read again"
        keys |= put(remote.folder, ["b/new.bin", "c/new.bin"])
        with cs.start_worker(cache, remote.open(), num_workers=2) as worker:
            assert worker.wait(DEADLINE_S)
            assert cache.status().worker.totals.units == 2  # type: ignore[union-attr]
        assert only_once(cache) == keys
        assert plan_of(cache).num_units == len(keys)
        assert plan_of(cache).segments == ()
        keys |= put(remote.folder, ["a-a/first.bin", "b/another.bin"])
        (remote.folder / "a/00000.bin").unlink()
        with cs.start_worker(cache, remote.open(), num_workers=2) as worker:
            assert worker.wait(DEADLINE_S)
            assert cache.status().worker.totals.units == 2  # type: ignore[union-attr]
        assert only_once(cache) == keys, "what has gone from the remote stays until it is evicted"
        assert plan_of(cache).num_units == len(keys) - 1


def shard_digests(cache: Cache) -> set[str]:
    """The digests of the files of the shards."""
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(cache.path, "shards").iterdir()}


def trained(cache: Cache, **options: Any) -> list[list[str]]:
    """The keys of the batches of an epoch."""
    with cs.EpochLoader(cache, 8, with_keys=True, **options) as loader:
        return [batch["__key__"] for batch in loader]


@pytest.mark.slow
def test_epochs_over_a_pass_that_grew_come_back_byte_for_byte_in_other_caches_and_processes(
    cache: Cache, remote: Remote, tmp_path: Path
) -> None:
    keys = put(remote.folder, names_in(NAMES))
    options: dict[str, Any] = {"shard_size": "4kB", "num_workers": 2}
    source = remote.open()
    remote.proxy.lists_allowed = 1
    with cs.start_worker(cache, source, **options) as worker:
        cache.wait(FIRST + READ, DEADLINE_S)
        batches = [trained(cache, record=tmp_path / "early")]
        early = cache.num_shards
        remote.proxy.lists_allowed = None
        assert worker.wait(DEADLINE_S)
    assert len(plan_of(cache).segments) > 1
    before = shard_digests(cache)
    batches.append(trained(cache, record=tmp_path / "late"))
    cache.evict(0)
    report = refetch(tmp_path / "early", cache, remote.open())
    assert (report.failed, report.brought) == ([], early)
    assert trained(cache, replay=tmp_path / "early") == batches[0]
    cache.recover()  # removes the files of leases that have ended

    with Cache(tmp_path / "other", size_limit="50MB", min_free=0) as other:
        command = [
            sys.executable,
            "-m",
            "cachestream",
            "refetch",
            str(tmp_path / "late"),
            remote.url,
            other.path,
        ]
        command += [
            f"--storage-option={name}={remote.options[name]}" for name in ("key", "secret", "endpoint_url")
        ]
        command += ["--storage-option=client_kwargs.region_name=us-east-1"]
        command += [f"--source-option=first_names={FIRST}", '--source-option=extensions=["bin", "jpg"]']
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert shard_digests(other) == before
        assert trained(other, replay=tmp_path / "late") == batches[1]
        remote.proxy.requests = remote.proxy.lists = 0
        fill(other, remote.open(), **options)
        assert remote.proxy.requests == remote.proxy.lists, (
            "a worker that goes on there fetches nothing twice"
        )
        assert only_once(other) == keys


def labels_in(cache: Cache) -> dict[str, int]:
    """The labels of all samples."""
    found: dict[str, int] = {}
    for shard_id in shard_ids(cache):
        shard = MappedShard(shard_path(cache.path, shard_id))
        found.update(zip(shard.keys(), shard.array("label").tolist(), strict=True))
        shard.close()
    return found


def put_images(bucket: Path, names: list[str]) -> None:
    """The same small image under all `names`."""
    put(bucket, names)
    Image.new("RGB", (4, 4)).save(bucket / names[0])
    for name in names[1:]:
        shutil.copy(bucket / names[0], bucket / name)


@pytest.mark.e2e
def test_labelled_images_are_cached_after_one_page_and_those_of_a_deeper_folder_are_left_out_and_counted(
    cache: Cache, remote: Remote
) -> None:
    names = [f"a/{number:05d}.jpg" for number in range(0, PAGE, 25)]
    put_images(remote.folder, [*names, "a/z/1.jpg", "b/1.jpg"])
    put(remote.folder, [f"a/{number:05d}.txt" for number in range(PAGE) if number % 25])
    remote.proxy.lists_allowed = 2  # one page, and the folders
    source = cs.open_source(remote.url, storage_options=remote.options, extensions=["jpg"])
    assert isinstance(source, FileSource)
    assert source.label_names == ("a", "b")
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(8, DEADLINE_S)
        assert source.is_listing
        remote.proxy.lists_allowed = None
        assert worker.wait(DEADLINE_S)
        (failure,) = cache.status().failures
    assert "first_names=None" in failure.reason
    assert (failure.count, failure.example) == (1, f"{remote.url}/a/z/1.jpg")
    assert labels_in(cache) == {**dict.fromkeys(names, 0), "b/1.jpg": 1}


@pytest.mark.e2e
def test_what_needs_all_units_lists_them_before(cache: Cache, remote: Remote) -> None:
    keys = put(remote.folder, names_in(450))
    source = remote.open()
    source.complete()
    assert not source.is_listing
    weights = [1.0] * (source.num_units or 0)
    assert {source.key(unit) for unit in range(len(weights))} == keys
    fill(cache, source, order=weights)
    assert set(keys_of(cache)) <= keys
