"""The places where a cache may lie, and its disk usage there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cachestream.errors import CacheError, ConfigError
from cachestream.linux import filesystem_of, is_network_filesystem
from cachestream.storage import layout as module
from cachestream.storage.cache import Cache
from cachestream.storage.layout import open_directory
from cachestream.storage.reservations import disk_footprint, effective_limit
from cachestream.storage.telemetry import Board
from tests.storage.support import (
    as_nobody,
    assert_sound,
    content,
    disk_bytes,
    needs_root,
    new_cache,
    publish,
    worker_runs,
)


def test_what_is_created_belongs_to_its_user_alone(cache: Cache) -> None:
    publish(cache, content(0))
    _, lease = cache.take_snapshot()
    cache.quarantine(1)
    for folder, folders, files in os.walk(cache.path):
        for name in folders:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o700, name
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600, name
    assert stat.S_IMODE(os.stat(cache.path).st_mode) == 0o700
    lease.release()


def test_an_empty_folder_and_a_fresh_disk_become_a_cache(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with new_cache(tmp_path) as cache:
        assert cache.path == str(tmp_path)


def test_a_path_with_anything_in_it_works(tmp_path: Path) -> None:
    with new_cache(tmp_path / "ä ?#%25&mode=ro\udcff") as cache:
        publish(cache, content(0))
        assert cache.num_samples == 3


def test_a_path_may_begin_at_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder named '~' is created, which a user would remove with 'rm -r ~'."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with new_cache(Path("~/cache")) as cache:
        assert cache.path == str(tmp_path / "home" / "cache")
        publish(cache, content(0))
        shown = subprocess.run(
            [sys.executable, "-m", "cachestream", "status", "~/cache"],
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert b"3 in 1 shard" in shown.stdout
    assert os.listdir(tmp_path) == ["home"]


def path_of(num_bytes: int, base: Path) -> Path:
    """A path of this length below `base`."""
    path = str(base)
    while len(path) < num_bytes:
        left = num_bytes - len(path) - 1
        path += "/" + "x" * min(200 if left != 201 else 199, left)
    return Path(path)


def test_a_path_that_is_too_long_for_the_catalogue_is_refused_and_a_shorter_one_works(tmp_path: Path) -> None:
    with new_cache(path_of(480, tmp_path)) as cache:
        publish(cache, content(0))
        assert cache.num_samples == 3
    with pytest.raises(
        ConfigError, match="is too long a path for SQLite; give a directory nearer to the root"
    ):
        Cache(path_of(490, tmp_path))


@pytest.mark.parametrize("path", ["", "s3://bucket/cache", "file:///tmp/cache"])
def test_what_is_no_local_directory_is_refused(path: str) -> None:
    with pytest.raises(
        ConfigError, match="is no local directory; give the cache one on a disk of this machine"
    ):
        open_directory(path)


@pytest.mark.parametrize("path", [None, 5, "a\0b", b"a\0b", ["a"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^cache=.*: give a path, such as '/scratch/train'"):
        Cache(path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; give a directory for the cache"):
        Cache(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be created"):
        Cache(tmp_path / "file" / "cache")


def test_a_folder_of_somebodys_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(
        ConfigError, match=r"holds other files \(thesis.tex\); give the cache a directory of its own"
    ):
        Cache(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_folder_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by everybody; run 'chmod o-w'"):
        Cache(tmp_path)
    tmp_path.chmod(0o1777)
    with pytest.raises(
        ConfigError, match="a shared temporary directory; give the cache a directory of its own inside"
    ):
        Cache(tmp_path)


def test_a_link_to_the_cache_is_followed_and_a_link_inside_it_refused(tmp_path: Path) -> None:
    with new_cache(tmp_path / "real") as cache:
        publish(cache, content(0))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with Cache(tmp_path / "link") as cache:
        assert cache.path == str(tmp_path / "real")
        assert cache.num_samples == 3
    (tmp_path / "real" / "shards").rename(tmp_path / "elsewhere")
    (tmp_path / "real" / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="shards is a symbolic link"):
        Cache(tmp_path / "real")


@needs_root
def test_a_directory_of_another_user_is_refused(fast_path: Path) -> None:
    path = fast_path / "theirs"
    path.mkdir()
    os.chown(path, 1234, 1234)
    path.chmod(0o755)

    def attempt() -> None:
        with pytest.raises(ConfigError, match=r"belongs to another user \(uid 1234\)"):
            Cache(path)

    assert as_nobody(path, attempt) == 0


@needs_root
def test_a_read_only_cache_can_be_looked_at_and_writers_get_one_clear_error(fast_path: Path) -> None:
    path = fast_path / "cache"
    with new_cache(path) as cache:
        publish(cache, content(0))
        Path(cache.directory.supervisor_lock).touch()
        Board(cache.directory.worker_file("board")).reset(1234, 2, 5.0)
    for folder, _, files in os.walk(path):
        os.chmod(folder, 0o555)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o444)

    def attempt() -> None:
        cache = Cache(path)
        assert cache.num_samples == 3
        status = cache.status()
        assert status.num_shards == 1
        assert status.worker is not None
        assert status.worker.pid == 1234
        assert "3 samples in 1 shards" in repr(cache)
        assert cache.verify().ok
        cannot = "cannot be written"
        for write in (
            lambda: publish(cache, content(3)),
            cache.take_snapshot,
            lambda: setattr(cache, "size_limit", "3MB"),
            lambda: cache.evict(to=0),
            cache.clear,
            lambda: cache.quarantine(1),
            lambda: Cache(path, "2MB"),
        ):
            with pytest.raises(CacheError, match=cannot):
                write()
        assert cache.num_samples == 3

    with worker_runs(cache):
        assert as_nobody(path, attempt) == 0


@needs_root
def test_a_place_where_nothing_may_be_created_is_refused(fast_path: Path) -> None:
    fast_path.chmod(0o755)

    def attempt() -> None:
        with pytest.raises(ConfigError, match=r"cannot be created \(Permission denied\); choose another"):
            Cache(fast_path / "a" / "cache")
        with pytest.raises(ConfigError, match="belongs to another user"):
            Cache(empty)

    empty = fast_path / "empty"
    empty.mkdir()
    os.chown(empty, 1234, 1234)
    assert as_nobody(empty, attempt) == 0


MOUNTS = """\
22 27 0:21 / / rw,relatime - ext4 /dev/vda rw
23 22 0:22 / /data rw,relatime shared:1 master:2 - nfs4 host:/data rw
24 22 0:23 / /data/local rw - xfs /dev/vdb rw
25 22 0:24 / /with\\040blank rw - fuse.sshfs host: rw
26 22 0:25 / /data\u00e4 rw - cifs //host/share rw
27 22 0:26 / /twice rw - ext4 /dev/vdc rw
28 22 0:27 / /twice rw - lustre mds rw
29 22 0:28 / /broken

30 22 0:29 / /gcs rw - fuse.gcsfuse bucket rw
31 22 0:30 / /overlay rw - overlay overlay rw
32 22 0:31 / /podman rw - fuse.fuse-overlayfs fuse-overlayfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "refused"),
    [
        ("/home/me", "ext4", False),
        ("/data/x", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/local/x", "xfs", False),
        ("/with blank/x", "fuse.sshfs", True),
        ("/data\u00e4/x", "cifs", True),
        ("/twice", "lustre", True),
        ("/broken/x", "ext4", False),
        ("/gcs", "fuse.gcsfuse", True),
        ("/overlay", "overlay", False),
        ("/podman", "fuse.fuse-overlayfs", False),
    ],
)
def test_the_filesystem_of_a_path_is_that_of_the_last_longest_mount_above_it(
    tmp_path: Path, path: str, kind: str, refused: bool
) -> None:
    forged = tmp_path / "mountinfo"
    forged.write_bytes(MOUNTS.encode() + b"33 22 0:32 / /\xff rw - nfs h rw\n")
    assert filesystem_of(path, str(forged)) == kind
    assert is_network_filesystem(kind) == refused


def test_a_network_filesystem_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = tmp_path / "mountinfo"
    forged.write_text(
        f"22 27 0:21 / / rw - ext4 /dev/vda rw\n23 22 0:22 / {tmp_path}/nas rw - nfs4 host:/data rw\n"
    )
    monkeypatch.setattr(module, "filesystem_of", partial(filesystem_of, mountinfo=str(forged)))
    with pytest.raises(
        ConfigError, match=r"network filesystem \(nfs4\), where file locks are not reliable; choose"
    ):
        Cache(tmp_path / "nas" / "cache")
    Cache(tmp_path / "local").close()
    assert filesystem_of("/", str(tmp_path / "none")) == ""


def test_everything_in_the_directory_counts_foreign_files_and_folders_too(cache: Cache) -> None:
    publish(cache, content(0))
    assert cache.size_bytes == disk_bytes(cache.path)
    before = cache.size_bytes
    theirs = Path(cache.path) / "theirs" / "deep"
    theirs.mkdir(parents=True)
    (theirs / "file").write_bytes(b"x" * 100_000)
    (Path(cache.path) / "worker" / "log.txt").write_bytes(b"x" * 50_000)
    (Path(cache.path) / "link").symlink_to("/usr")
    assert cache.size_bytes == disk_bytes(cache.path)
    assert cache.size_bytes >= before + 150_000
    assert_sound(cache)


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, 100_000, 10**7, 64 * 10**6])
def test_a_file_never_occupies_more_than_its_footprint(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        if size_bytes:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        os.fsync(file.fileno())
    occupied = path.stat().st_blocks * 512
    assert occupied <= disk_footprint(size_bytes) <= size_bytes * 1.005 + 2 * 4096


@pytest.mark.parametrize(
    ("limit", "used", "free", "min_free", "effective"),
    [
        (1000, 100, 5000, 0, 1000),
        (1000, 100, 500, 0, 600),  # the disk is smaller than the limit
        (1000, 100, 500, 300, 300),
        (1000, 400, 100, 300, 200),  # others have filled the disk: we owe them 200
        (1000, 100, 0, 5000, -4900),
    ],
)
def test_the_limit_in_force_is_what_others_leave_of_the_disk(
    limit: int, used: int, free: int, min_free: int, effective: int
) -> None:
    assert effective_limit(limit, used, free, min_free) == effective
