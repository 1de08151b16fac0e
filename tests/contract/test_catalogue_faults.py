"""A catalogue that is overwritten, cut or unreadable for a moment ends no training and is not thrown away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs


def overwrite(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"\xff" * 64)


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


DAMAGES: Final = {"overwritten": overwrite, "cut": cut}
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


def numbers(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(256, "float32")}


def catalogue_of(cache: cs.Cache) -> str:
    return os.path.join(cache.path, "catalogue.sqlite")


@pytest.fixture(scope="module")
def filled_all_the_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cs.Cache]:
    """A cache that a worker fills."""
    cache = cs.Cache(tmp_path_factory.mktemp("faults") / "cache", "5MB", min_free=0)
    with cache, cs.start_worker(cache, numbers, num_workers=1, shard_size=100_000):
        cache.wait(200, 60)
        yield cache


@pytest.fixture
def running(filled_all_the_time: cs.Cache) -> Iterator[cs.Cache]:
    with filled_all_the_time as cache:  # closed after each test, which has opened another catalogue
        deadline_s = time.monotonic() + 60
        while True:  # the worker has mended what the test before has damaged
            try:
                cache.snapshot().close()
                break
            except cs.CacheError:
                assert time.monotonic() < deadline_s
        yield cache


@pytest.fixture
def resting(tmp_path: Path) -> Iterator[cs.Cache]:
    """A cache that no worker fills any more."""
    with cs.Cache(tmp_path / "cache", "5MB", min_free=0) as cache:
        source = cs.open_source([{"x": number} for number in range(64)])
        with cs.start_worker(cache, source, num_workers=1) as worker:
            worker.wait(60)
        yield cache


@damages
def test_training_goes_on_beside_a_worker_and_has_new_samples_once_the_catalogue_is_rebuilt(
    running: cs.Cache, damage: Callable[[str], None]
) -> None:
    with cs.EpochLoader(running, 16) as loader:
        assert list(loader)
        damage(catalogue_of(running))
        assert list(loader)
        assert list(loader)
        snapshots = running.status().snapshots
        deadline_s = time.monotonic() + 60
        while running.status().snapshots == snapshots:
            assert list(loader)
            assert time.monotonic() < deadline_s, "no new snapshot is taken"


@damages
@pytest.mark.parametrize(
    "look",
    [
        lambda cache: cache.num_samples,
        lambda cache: cache.status().num_samples,
        lambda cache: cache.wait(1, 60),
        lambda cache: len(cache.snapshot()),
    ],
    ids=["num_samples", "status", "wait", "snapshot"],
)
def test_who_looks_at_the_cache_waits_for_the_worker_to_rebuild_the_catalogue(
    running: cs.Cache, damage: Callable[[str], None], look: Callable[[cs.Cache], int]
) -> None:
    damage(catalogue_of(running))
    assert look(running) > 0


@damages
def test_without_a_worker_training_goes_on_and_who_looks_is_told_at_once_what_to_do(
    resting: cs.Cache, damage: Callable[[str], None]
) -> None:
    with cs.EpochLoader(resting, 16) as loader:
        assert len(list(loader)) == 4
        assert len(loader) == 4, (
            "the next epoch is prepared: its transaction would write what is damaged anew"
        )
        damage(catalogue_of(resting))
        began_s = time.monotonic()
        with pytest.raises(cs.CacheError, match="cachestream verify CACHE --repair"):
            resting.status()
        assert time.monotonic() - began_s < 5
        assert len(list(loader)) == 4
        assert len(list(loader)) == 4
        assert resting.verify(repair=True).ok
        assert len(list(loader)) == 4
        assert resting.num_samples == 64


_UNREADABLE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int fails(int fd) {
    char link[64], name[1024];
    int before = errno, is_missing = access(getenv("UNREADABLE_IF"), F_OK);
    errno = before;
    if (is_missing) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, name, sizeof name - 1);
    errno = before;
    if (size <= 0) return 0;
    name[size] = 0;
    return strstr(name, getenv("UNREADABLE")) != 0;
}
ssize_t pread64(int fd, void *bytes, size_t size, off64_t offset) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    if (fails(fd)) { errno = EIO; return -1; }
    return real(fd, bytes, size, offset);
}
"""
_TRAIN: Final = """
import os, sys, time
import cachestream as cs

def numbers(rng):
    return {"x": rng.random(256, "float32")}

flag = os.environ["UNREADABLE_IF"]
cache = cs.Cache(sys.argv[1], size_limit="5MB", min_free=0)
with cs.start_worker(cache, numbers, num_workers=1, shard_size=100_000):
    cache.wait(200, 60)
    loader = cs.EpochLoader(cache, 16)
    assert list(loader)
    before = os.stat(cache.path + "/catalogue.sqlite").st_ino
    open(flag, "w").close()
    epochs, end_s = 0, time.monotonic() + 2
    while time.monotonic() < end_s:
        epochs += len(list(loader)) > 0
    os.remove(flag)
    snapshots, end_s = cache.status().snapshots, time.monotonic() + 60
    while cache.status().snapshots == snapshots and time.monotonic() < end_s:
        list(loader)
    print(epochs > 0, cache.status().snapshots > snapshots)
    print(os.stat(cache.path + "/catalogue.sqlite").st_ino == before)
"""


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_catalogue_that_the_disk_does_not_read_for_a_while_ends_no_training_and_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "unreadable.c").write_text(_UNREADABLE)
    library = str(tmp_path / "unreadable.so")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "unreadable.c"), "-ldl"], check=True
    )
    trained = subprocess.run(
        [sys.executable, "-c", _TRAIN, str(tmp_path / "cache")],
        env={
            **os.environ,
            "LD_PRELOAD": library,
            "UNREADABLE": "catalogue.sqlite",
            "UNREADABLE_IF": str(tmp_path / "flag"),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert trained.stdout.split() == ["True", "True", "True"], trained.stderr[-3000:]
    assert not (tmp_path / "cache" / "catalogue.damaged").exists()
