"""A disk that other programs have filled: the cache can be made smaller, and a new limit stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs

LIMIT = "6MB"
OPEN = "import sys, cachestream as cs; print(cs.Cache(sys.argv[1]).size_limit)"


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.random(2000)}


def limit_in_another_process(path: Path) -> tuple[str, str]:
    """The limit of the cache as a new process finds it, and what that process logs."""
    command = [sys.executable, "-c", OPEN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


def mount(path: Path, *arguments: str) -> None:
    """Mount a disk of the test's own at `path`, or skip the test."""
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.strip()}")


@pytest.fixture(scope="module", params=["tmpfs", pytest.param("ext4", marks=pytest.mark.e2e)])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk with a cache full of samples, the same for all tests."""
    folder = tmp_path_factory.mktemp("disk")
    disk = folder / "disk"
    if request.param == "tmpfs":
        mount(disk, "-t", "tmpfs", "-o", "size=12m", "tmpfs")
    else:
        image = folder / "image"
        with open(image, "wb") as file:
            file.truncate(24_000_000)
        if not shutil.which("mkfs.ext4"):
            pytest.skip("no mkfs.ext4 here")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        mount(disk, "-o", "loop", str(image))
    try:
        with (
            cs.Cache(disk / "cache", LIMIT, min_free=0) as cache,
            cs.start_worker(cache, draw, num_workers=1, shard_size="100KB", when_full="stop") as worker,
        ):
            worker.wait(60)
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def full_disk(filled: Path) -> Iterator[Path]:
    """The same disk without a free byte; the cache in it is as it was."""
    saved = filled.parent / "saved"
    shutil.copytree(filled / "cache", saved)
    theirs = filled / "theirs"
    with open(theirs, "ab", buffering=0) as file:
        for piece in (4096, 1):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError:
                pass
    assert os.statvfs(filled).f_bavail == 0
    yield filled
    theirs.unlink()
    shutil.rmtree(filled / "cache")
    shutil.move(saved, filled / "cache")


def by_evict(path: Path) -> None:
    with cs.Cache(path) as cache:
        assert cache.evict("2MB") > 0


def by_a_lower_limit(path: Path) -> None:
    with cs.Cache(path) as cache:
        cache.size_limit = "2MB"


def by_opening_with_a_lower_limit(path: Path) -> None:
    cs.Cache(path, "2MB").close()


def by_clear(path: Path) -> None:
    with cs.Cache(path) as cache:
        cache.clear()


def by_the_command(path: Path) -> None:
    subprocess.run([sys.executable, "-m", "cachestream", "limit", str(path), "2MB"], check=True, timeout=60)


@pytest.mark.parametrize(
    "make_smaller", [by_evict, by_a_lower_limit, by_opening_with_a_lower_limit, by_clear, by_the_command]
)
def test_a_cache_on_a_disk_without_a_free_byte_can_be_made_smaller(
    full_disk: Path, make_smaller: Callable[[Path], None]
) -> None:
    path = full_disk / "cache"
    make_smaller(path)
    assert os.statvfs(full_disk).f_bavail * os.statvfs(full_disk).f_frsize > 3_000_000
    with cs.Cache(path) as cache:
        assert cache.size_bytes <= 2_000_000
        assert cache.verify().ok


def test_a_limit_that_is_set_on_a_full_disk_is_the_limit_for_the_next_process(full_disk: Path) -> None:
    by_a_lower_limit(full_disk / "cache")
    assert limit_in_another_process(full_disk / "cache") == ("2000000\n", "")


@pytest.fixture
def disk_without_inodes(tmp_path: Path) -> Iterator[Path]:
    """A disk with a cache of a few shards, on which no file can be made."""
    disk = tmp_path / "disk"
    mount(disk, "-t", "tmpfs", "-o", "size=30m,nr_inodes=200", "tmpfs")
    try:
        with (
            cs.Cache(disk / "cache", "3MB", min_free=0) as cache,
            cs.start_worker(cache, draw, num_workers=1, shard_size="100KB", when_full="stop") as worker,
        ):
            worker.wait(60)
        (disk / "theirs").mkdir()
        number = 0
        while os.statvfs(disk).f_ffree:
            (disk / "theirs" / str(number)).touch()
            number += 1
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.e2e
def test_a_cache_on_a_disk_without_a_free_inode_can_be_made_smaller_and_keeps_its_limit(
    disk_without_inodes: Path,
) -> None:
    path = disk_without_inodes / "cache"
    with cs.Cache(path) as cache:
        shards = cache.num_shards
        assert cache.evict("2MB") > 0
        assert cache.num_shards < shards
        assert cache.verify().ok
        for number in range(shards):  # what the eviction gave back
            try:
                (disk_without_inodes / "theirs" / f"more-{number}").touch()
            except OSError:
                break
        cache.size_limit = "1.5MB"
        assert cache.size_limit == 1_500_000
    shutil.rmtree(disk_without_inodes / "theirs")
    assert limit_in_another_process(path) == ("1500000\n", "")


def test_a_limit_that_cannot_be_stored_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with cs.Cache(tmp_path / "cache", LIMIT, min_free=0) as cache:
        settings = tmp_path / "cache" / "cache.json"
        settings.unlink()
        settings.mkdir()
        with pytest.raises(cs.CacheError, match=r"cache\.json is a directory .*; remove it"):
            cache.size_limit = "5MB"
        assert cache.size_limit == 6_000_000
        settings.rmdir()
        cache.size_limit = "5MB"
    with cs.Cache(tmp_path / "cache") as cache:
        assert cache.size_limit == 5_000_000
