"""The places where a cache may lie, and its disk usage there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachestream.errors import ConfigError
from cachestream.linux import filesystem_of, is_network_filesystem
from cachestream.storage.cache import Cache
from cachestream.storage.reservations import disk_footprint, effective_limit
from tests.storage.support import (
    as_nobody,
    content,
    needs_root,
    new_cache,
    publish,
)


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
