"""What is no regular file in place of one of the cache's: it is replaced, removed, or named; nothing waits for it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np
import pytest

import cachestream as cs

HANGS_S: Final = 60
KINDS: Final = ("directory", "named pipe", "socket", "symbolic link", "device")
# Names that are opened as they lie there: the error names what is in their place.
NAMED: Final = ("catalogue.sqlite", "catalogue.sqlite-journal")
NAMED_BY_WORKERS: Final = ("attach.lock", "supervisor.lock", "launch.lock", "board", "log.txt")
FOLDERS: Final = ("shards", "leases", "worker", "quarantine")
# Names at which only a new file is put, or that are removed or passed over.
REPLACED: Final = (
    "opening.lock",  # nobody opens it while the catalogue is sound
    "cache.spare.json",
    "catalogue.new",
    "catalogue.damaged",
    "cache.json.new",
    "leases/1-a.lease",
    "leases/1-a.owner",
    "quarantine/000000000001.safetensors",
    "shards/000000000001.safetensors",
    "shards/000000000002.tmp",
    "shards/000000000900.safetensors",
    "worker/history.new",
    "worker/log.txt.1",
    "worker/budget",
    "worker/stop",
    "worker/detached",
    "worker/1-a-0.attached",
    "worker/loader-1-a",
    "worker/listing.json",
    "worker/listing.json.new",
    "worker/order-1.npy",
)


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.random(2000)}


def plant(path: Path, kind: str) -> None:
    """Put something of this kind in place of the file at `path`."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
        (path / "inside").touch()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "symbolic link":
        path.symlink_to("/etc/hostname")
    elif kind == "socket":
        short = f"/tmp/{os.getpid()}-socket"  # a socket's path has 107 bytes at most
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(short)
        shutil.move(short, path)
    elif os.geteuid() == 0:
        os.mknod(path, 0o020600, os.makedev(1, 5))
    else:
        pytest.skip("only root makes devices")


@contextmanager
def without_a_hang(what: object) -> Iterator[None]:
    """Fail if the block takes longer than only what hangs does."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of a few shards, with all that a worker and an epoch leave in it."""
    path = tmp_path_factory.mktemp("made") / "cache"
    with (
        cs.Cache(path, "2MB", min_free=0) as cache,
        cs.start_worker(cache, draw, num_workers=1, shard_size="100KB", when_full="stop") as worker,
    ):
        worker.wait(60)
        cache.snapshot().close()
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "cache"))


def fill_and_stop(cache: cs.Cache) -> None:
    with cs.start_worker(cache, draw, num_workers=1, shard_size="100KB", when_full="stop") as worker:
        worker.wait(HANGS_S)


def use(path: Path) -> None:
    """Do all that needs no worker."""
    with cs.Cache(path) as cache:
        cache.status()
        cache.snapshot().close()
        cache.size_limit = "1.5MB"
        assert cache.evict("1MB") > 0
        assert cache.verify(repair=True).ok
        assert cache.verify().ok
        cache.clear()
        assert cache.num_samples == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_must_be_opened_as_it_lies_is_named_with_what_to_do(
    made: Path, tmp_path: Path, kind: str
) -> None:
    for name in NAMED:
        path = Path(shutil.copytree(made, tmp_path / name))
        plant(path / name, kind)
        with (
            without_a_hang(name),
            pytest.raises(cs.CacheError, match=rf"{name} is a {kind}.* remove it$"),
        ):
            use(path)
        if kind == "directory":
            shutil.rmtree(path / name)
        else:
            (path / name).unlink()
        use(path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_at_a_name_that_is_only_written_or_removed_is_in_nobodys_way(path: Path, kind: str) -> None:
    for name in REPLACED:
        plant(path / name, kind)
    with without_a_hang("using it"):
        use(path)
    with without_a_hang("filling it"), cs.Cache(path) as cache:
        fill_and_stop(cache)
        assert cache.num_samples > 0
        assert cache.verify().ok


@pytest.mark.parametrize("kind", ["named pipe", "socket", "device", "regular file"])
@pytest.mark.parametrize("name", FOLDERS)
def test_what_lies_in_place_of_a_folder_is_named(path: Path, name: str, kind: str) -> None:
    if kind == "regular file":
        shutil.rmtree(path / name)
        (path / name).touch()
    else:
        plant(path / name, kind)
    with pytest.raises(
        cs.ConfigError, match=rf"{name} is a .*(file|{kind}) in place of a folder .*; remove it"
    ):
        cs.Cache(path)


@pytest.mark.parametrize("kind", ["named pipe", "directory"])
@pytest.mark.parametrize("name", NAMED_BY_WORKERS)
def test_a_worker_that_cannot_start_for_what_lies_in_a_files_place_names_it(
    path: Path, name: str, kind: str
) -> None:
    plant(path / "worker" / name, kind)
    with (
        without_a_hang(name),
        cs.Cache(path) as cache,
        pytest.raises(cs.CacheError, match=rf"worker/{name} is a {kind} .*; remove it"),
    ):
        fill_and_stop(cache)


def test_a_named_pipe_in_place_of_the_history_is_replaced_and_the_worker_ends_with_its_trainer(
    path: Path,
) -> None:
    plant(path / "worker/history", "named pipe")
    with without_a_hang("the worker"), cs.Cache(path, "3MB") as cache:
        fill_and_stop(cache)
        assert not cache.has_worker()
    assert (path / "worker/history").is_file()


@pytest.mark.parametrize("kind", ["directory", "named pipe"])
def test_epochs_and_repairs_go_on_when_something_else_lies_in_the_place_of_a_shard(
    path: Path, kind: str
) -> None:
    shards = sorted((path / "shards").glob("*.safetensors"))
    with cs.Cache(path) as cache, without_a_hang("the epoch"):
        samples = cache.num_samples
        plant(shards[0], kind)
        loader = cs.EpochLoader(cache, batch_size=1, min_samples=1)
        assert 0 < sum(1 for _ in loader) < samples
        loader.close()
        report = cache.verify(repair=True)
        assert report.ok, str(report)
        assert cache.verify().problems == 0
        assert not shards[0].exists()


def test_a_folder_among_the_shards_that_is_not_the_caches_stays_and_is_named(path: Path) -> None:
    (path / "shards/notes").mkdir()
    (path / "shards/notes/mine").touch()
    with cs.Cache(path) as cache:
        report = cache.verify(repair=True)
        assert not report.ok
        assert str(report).endswith(f"remove {path}/shards/notes/, which is not the cache's")
    assert (path / "shards/notes/mine").exists()


def test_a_cache_inside_the_directory_of_another_is_refused(path: Path) -> None:
    places: list[Callable[[], cs.Cache]] = [
        lambda: cs.Cache(path / "inner"),
        lambda: cs.Cache(path / "shards" / "deep" / "inner"),
    ]
    for place in places:
        with pytest.raises(cs.ConfigError, match=r"lies inside the cache .*; choose a directory outside it"):
            place()
