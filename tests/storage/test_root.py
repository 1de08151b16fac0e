"""Root in a user's cache: the user keeps what is made there, and no link or race leads root to other files."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cachestream.errors import CacheError, ConfigError
from cachestream.linux import make_private_folder, open_private
from cachestream.storage.cache import Cache
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import Board, History
from cachestream.worker.attachments import Attachments
from tests.storage.support import NOBODY, as_nobody, assert_sound, content, needs_root, new_cache, publish


@needs_root
def test_what_root_makes_in_a_users_cache_is_that_users(tmp_path: Path) -> None:
    """Otherwise the user would be locked out of a cache that root has read once."""
    root, user = tmp_path / "cache", NOBODY
    with new_cache(root, "20MB") as cache:
        publish(cache, content(0))
    for path in (root, *root.rglob("*")):
        os.chown(path, user, user)
    (root / "cache.json").unlink()
    (root / "quarantine").rmdir()
    with Cache(root) as cache:
        publish(cache, content(10))
        snapshot, lease = cache.take_snapshot()
        assert snapshot.num_shards == 2
        cache.size_limit = "30MB"
        assert {os.stat(path).st_uid for path in (root, *root.rglob("*"))} == {user}
        lease.release()
    assert (root / "cache.json").stat().st_uid == user
    assert (root / "quarantine").stat().st_uid == user


@needs_root
def test_root_gives_nothing_away_that_was_there(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    secret.write_text("root's")
    (folder / "link").symlink_to(secret)
    os.link(secret, folder / "same")
    with pytest.raises(OSError, match="symbolic"):
        open_private(str(folder / "link"), os.O_RDWR | os.O_CREAT)
    os.close(open_private(str(folder / "same"), os.O_RDWR | os.O_CREAT))
    (folder / "own").touch()  # empty, as a new one is
    os.close(open_private(str(folder / "own"), os.O_RDWR | os.O_CREAT))
    (folder / "folder").mkdir()
    make_private_folder(str(folder / "folder"))
    make_private_folder(str(folder / "new"))
    owners = {path.name: path.lstat().st_uid for path in (secret, *folder.iterdir())}
    assert owners == {"secret": 0, "same": 0, "own": 0, "folder": 0, "link": 0, "new": NOBODY}


@pytest.fixture
def planted(fast_path: Path) -> Path:
    """A folder of root's that a user's link points to, and the user's cache beside it."""
    users, roots = fast_path / "cache", fast_path / "roots"
    roots.mkdir()
    (roots / "precious").write_text("root's")
    users.mkdir()
    os.chown(users, NOBODY, NOBODY)
    return roots


def of_root(roots: Path) -> bool:
    """Return whether the folder is unchanged: owned by root, with the same entries."""
    return os.listdir(roots) == ["precious"] and {
        path.stat().st_uid for path in (roots, roots / "precious")
    } == {0}


@needs_root
@pytest.mark.parametrize("name", ["shards", "leases", "worker", "quarantine"])
def test_root_that_opens_a_users_cache_follows_no_folder_that_is_a_link(
    planted: Path, fast_path: Path, name: str
) -> None:
    link = fast_path / "cache" / name
    assert as_nobody(link, lambda: os.symlink(planted, link)) == 0
    assert as_nobody(link, (fast_path / "cache" / "cache.json").touch) == 0
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        Cache(fast_path / "cache")
    assert of_root(planted)


@needs_root
def test_root_changes_nothing_through_a_folder_that_becomes_a_link_while_it_works(
    planted: Path, fast_path: Path
) -> None:
    """Covers each way to create, write, move or remove a file, after the user has replaced the folders by
    links.
    """
    with new_cache(fast_path / "cache") as cache:
        for first in range(0, 9, 3):
            publish(cache, content(first))
        cache.quarantine(1)
        _, lease = cache.take_snapshot()
        owner = Owner(cache.directory, "before")
        names = ("shards", "leases", "worker", "quarantine")
        for name in names:
            for file in (fast_path / "cache" / name).iterdir():
                (planted / file.name).write_text("root's")
        for extra in (
            "log.txt",
            "board",
            "history",
            "stop",
            "detached",
            "supervisor.lock",
            "000000000009.tmp",
        ):
            (planted / extra).write_text("root's")
        before = {path.name: path.stat().st_mtime_ns for path in planted.iterdir()}

        def plant() -> None:
            for name in names:
                path = fast_path / "cache" / name
                path.rename(path.with_suffix(".old"))
                path.symlink_to(planted)

        assert as_nobody(fast_path / "cache" / "x", plant) == 0
        wardens = Attachments(cache.directory)
        attempts: list[Callable[[], object]] = [
            lambda: publish(cache, content(12)),
            lambda: Owner(cache.directory, "another"),
            cache.take_snapshot,
            lambda: cache.evict(to=0),
            lambda: cache.quarantine(2),
            cache.clear,
            cache.recover,
            lambda: cache.verify(repair=True),
            wardens.attach_lock,
            wardens.attach,
            wardens.request_stop,
            wardens.clear_requests,
            lambda: Board(cache.directory.worker_file("board")),
            lambda: History(cache.directory.worker_file("history")).append(*[0] * 7),
            lambda: open_private(
                cache.directory.worker_file("log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
            ),
        ]
        for attempt in attempts:
            with pytest.raises((CacheError, ConfigError, OSError), match=r"symbolic link|Not a directory"):
                attempt()
        owner.release()
        lease.release()
    assert {path.name: path.stat().st_mtime_ns for path in planted.iterdir()} == before
    assert {path.stat().st_uid for path in (planted, *planted.iterdir())} == {0}


@needs_root
@pytest.mark.parametrize(
    "name", ["catalogue.sqlite", "catalogue.sqlite-journal", "cache.json", "opening.lock"]
)
def test_root_writes_to_no_file_that_a_user_has_a_link_lead_to(
    planted: Path, fast_path: Path, name: str
) -> None:
    """A former bug: an empty file behind a link was taken for a new catalogue."""
    (planted / "precious").write_bytes(b"")
    new_cache(fast_path / "cache").close()
    path = fast_path / "cache" / name
    path.unlink(missing_ok=True)
    assert as_nobody(path, lambda: os.symlink(planted / "precious", path)) == 0
    try:
        with Cache(fast_path / "cache", "5MB") as cache:
            publish(cache, content(0))
        assert name in ("cache.json", "opening.lock"), "one is replaced, the other not needed"
    except CacheError as error:
        assert f"{name} is a symbolic link; a cache does not follow links, remove it" in str(error)  # noqa: PT017
    assert (planted / "precious").read_bytes() == b""
    assert of_root(planted)


@needs_root
def test_root_gives_no_file_of_its_own_away_as_a_journal(fast_path: Path) -> None:
    """SQLite, run by root, gives the journal to the owner of the catalogue."""
    path = fast_path / "cache"
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    journal = path / "catalogue.sqlite-journal"
    with new_cache(path) as cache:
        publish(cache, content(0))
        (path / "notes").write_text("root's")
        assert as_nobody(journal, lambda: os.replace(path / "notes", journal)) == 0
        for attempt in (lambda: publish(cache, content(3)), cache.status, lambda: Cache(path)):
            with pytest.raises(CacheError, match=r"journal belongs to another user .*\(uid 0\); remove it"):
                attempt()
        assert (journal.stat().st_uid, journal.read_text()) == (0, "root's")
        journal.unlink()
        publish(cache, content(3))
        assert_sound(cache)


@needs_root
def test_a_folder_that_is_swapped_again_and_again_leads_root_nowhere(planted: Path, fast_path: Path) -> None:
    """A folder and a link to root's folder alternate at one name while root creates files there."""
    cache, folder = fast_path / "cache", fast_path / "cache" / "worker"

    def swap() -> None:
        folder.mkdir()
        (cache / "link").symlink_to(planted)
        stop = cache / "enough"
        while not stop.exists():
            for old, new in (("worker", "real"), ("link", "worker"), ("worker", "link"), ("real", "worker")):
                os.rename(cache / old, cache / new)

    user = multiprocessing.get_context("fork").Process(target=as_nobody, args=(cache / "x", swap))
    user.start()
    refused = made = 0
    deadline_s = time.monotonic() + 60
    while (refused < 50 or made < 50) and time.monotonic() < deadline_s:
        try:
            os.close(open_private(str(folder / f"file{made}"), os.O_WRONLY | os.O_CREAT))
            made_path = str(folder / f"folder{made}")
            make_private_folder(made_path)
            made += 1
        except OSError:
            refused += 1
    (cache / "enough").touch()
    user.join(60)
    assert user.exitcode == 0
    assert made
    assert refused
    assert of_root(planted)
    assert {path.stat().st_uid for path in folder.iterdir()} == {NOBODY}
