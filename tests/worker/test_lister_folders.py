"""Workers that begin before a tree of folders is listed to its end: on a real FTP server, and on this machine's disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.formats.files import FileSource
from tests.support.ftp import PASSWORD, FTPServer, run_ftp_server
from tests.worker.support import (
    DEADLINE_S,
    Processes,
    fill,
    kill_supervisor,
    listed,
    log_of,
    only_once,
    plan_of,
    wait_until,
)

A_FOLDER = 10
FIRST = 2 * A_FOLDER
FOLDERS = 12


def put(root: Path, folders: list[str]) -> set[str]:
    """Files in each of `folders`; their keys."""
    keys = {f"{folder}/{number:02d}.bin" for folder in folders for number in range(A_FOLDER)}
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())
    return keys


def names_of(folders: range) -> list[str]:
    """Folders in one another, every third of them."""
    return [f"{number:02d}/in/deeper" if number % 3 == 0 else f"{number:02d}" for number in folders]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FTPServer]:
    """Not one of the processes of a test."""
    with run_ftp_server(tmp_path_factory.mktemp("ftp")) as started:
        yield started


@pytest.fixture
def tree(server: FTPServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder of the test's own on the server, which holds nothing back at its end."""
    yield str(request.node.originalname)
    server.hang_up_after = None
    server.allow(None)


def on(server: FTPServer, tree: str) -> FileSource:
    return FileSource(
        f"ftp://127.0.0.1/{tree}", storage_options=server.options, first_names=FIRST, label=None
    )


@pytest.mark.e2e
def test_files_of_the_first_folders_are_cached_while_the_others_are_not_listed_yet(
    cache: Cache, server: FTPServer, tree: str
) -> None:
    keys = put(server.root / tree, names_of(range(FOLDERS)))
    options: dict[str, Any] = {"num_workers": 1, "concurrency": 2}
    source = on(server, tree)
    server.allow(0)
    with cs.start_worker(cache, source, **options) as worker:
        cache.wait(FIRST, DEADLINE_S)
        assert len(only_once(cache)) == FIRST
        assert cache.fill_state() == "filling"
        assert cache.status().is_listing
        server.allow(None)
        assert worker.wait(DEADLINE_S)
        assert cache.status().pass_done == 1.0
    assert only_once(cache) == keys
    assert plan_of(cache).segments[0] == FIRST

    keys |= put(server.root / tree, ["00", "03/in/new"])
    with cs.start_worker(cache, on(server, tree), **options) as worker:
        assert worker.wait(DEADLINE_S)
        units = cache.status().worker.totals.units  # type: ignore[union-attr]
        # The last one before may have been published before it was known that its unit has no more.
        assert 2 * A_FOLDER <= units <= 2 * A_FOLDER + 1
    assert only_once(cache) == keys
    for path in Path(cache.directory.worker).iterdir():
        assert PASSWORD.encode() not in path.read_bytes(), path


@pytest.mark.e2e
def test_after_a_kill_in_mid_listing_no_folder_is_listed_again_but_the_last_one(
    cache: Cache, processes: Processes, server: FTPServer, tree: str
) -> None:
    keys = put(server.root / tree, [f"{number:02d}" for number in range(FOLDERS)])
    source = on(server, tree)
    server.allow(3)
    first = cs.start_worker(cache, source, num_workers=1, concurrency=2)
    wait_until(lambda: listed(cache) > FIRST, "a page is stored")
    wait_until(lambda: cache.num_samples == listed(cache), "all that is listed is cached")
    kill_supervisor(cache, processes, first)
    stored = listed(cache) // A_FOLDER
    assert 2 < stored < FOLDERS
    server.allow(None)
    server.asked.clear()
    source = on(server, tree)
    assert server.asked == [f"/{tree}", f"/{tree}/00", f"/{tree}/01"], "the first names"
    server.asked.clear()
    fill(cache, source, concurrency=2)
    assert set(server.asked) == {
        f"/{tree}",
        *(f"/{tree}/{number:02d}" for number in range(stored - 1, FOLDERS)),
    }
    assert only_once(cache) == keys


@pytest.mark.e2e
def test_a_connection_that_ends_in_mid_listing_is_taken_up_again(
    cache: Cache, server: FTPServer, tree: str
) -> None:
    keys = put(server.root / tree, names_of(range(FOLDERS)))
    source = on(server, tree)
    server.hang_up_after, server.hang_ups = 3, 0
    fill(cache, source, concurrency=2)
    assert server.hang_ups == 1
    assert only_once(cache) == keys


@pytest.mark.e2e
def test_a_lister_shows_life_while_a_driver_that_is_not_asynchronous_waits_for_a_folder(
    cache: Cache, server: FTPServer, tree: str
) -> None:
    keys = put(server.root / tree, names_of(range(FOLDERS)))
    source = on(server, tree)
    server.allow(0)
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=5.0) as worker:
        cache.wait(FIRST, DEADLINE_S)
        since_s = time.monotonic()
        wait_until(lambda: time.monotonic() > since_s + 7.0, "longer than a process without life is borne")
        assert listed(cache) == FIRST
        assert "no sign of life" not in log_of(cache)
        server.allow(None)
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == keys


@pytest.mark.e2e
@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_a_local_tree_is_cached_once_whenever_its_worker_is_killed(
    cache: Cache, processes: Processes, tmp_path: Path, order: str
) -> None:
    root = tmp_path / "tree"
    keys = put(root, names_of(range(30)))
    for count in (1, FIRST + 1, 10 * A_FOLDER):
        worker = cs.start_worker(
            cache, FileSource(root, first_names=FIRST), num_workers=2, order=order, shard_size="4kB"
        )
        cache.wait(count, DEADLINE_S)
        kill_supervisor(cache, processes, worker)
    fill(cache, FileSource(root, first_names=FIRST), num_workers=2, order=order, shard_size="4kB")
    assert only_once(cache) == keys
    assert list(cache.status().failures) == []
    whole = FileSource(root, first_names=None)
    assert (plan_of(cache).num_units, plan_of(cache).listing) == (len(keys), whole.listing_digest)
