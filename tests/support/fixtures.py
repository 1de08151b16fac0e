"""Fixtures for tests that need a remote, or a disk of their own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestream.transport import metering, remote_errors
from tests.support.forked import start_server
from tests.support.proxy import FaultyProxy, run_proxy
from tests.support.s3 import S3Server, run_s3_server
from tests.support.supervisors import Supervisors, installed
from tests.support.unruly import UnrulyServer, run_unruly_server

_numbers = itertools.count()
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for the session; a test makes buckets of its own in it."""
    with run_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def device() -> str | None:
    """The kind of this machine's accelerator, None without one. It is started: its driver keeps files open."""
    import torch  # not by tests that need none of it

    from cachestream.training.batches.transfer import accelerator

    kind = accelerator()
    if kind is not None:
        torch.zeros(1, device=kind)
    return kind


@pytest.fixture
def cuda(device: str | None) -> None:
    """Skip the test where there is no CUDA device."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def forked() -> None:
    """The server of `tests.support.forked` runs, with an environment that no test has changed."""
    start_server()


@pytest.fixture(scope="session")
def supervisors() -> Iterator[Supervisors]:
    """The process of `tests.support.supervisors`."""
    running = Supervisors()
    yield running
    running.close()


@pytest.fixture(scope="module")
def quick_supervisors(supervisors: Supervisors) -> Iterator[None]:
    """Supervisors that this process starts are forked, which saves each a second of a processor."""
    with installed(supervisors):
        yield


@pytest.fixture(scope="module")
def unruly_server() -> Iterator[UnrulyServer]:
    """A web server whose files fail as their paths say."""
    with run_unruly_server() as running:
        yield running


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> Path:
    """The folder of an empty bucket of the test's own; its name is the folder's."""
    return s3_server.bucket(f"bucket-{next(_numbers)}")


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    """A network before `s3_server` that fails on command."""
    with run_proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the back-off: a request that failed is made again at once."""
    monkeypatch.setattr(remote_errors, "BACKOFF_START_S", 0.02)
    monkeypatch.setattr(remote_errors, "BACKOFF_LIMIT_S", 0.02)


@pytest.fixture
def fetched() -> Iterator[list[int]]:
    """The bytes that sources of this process say have come, one number a report."""
    seen: list[int] = []
    metering.install(seen.append)
    yield seen
    metering.install(None)


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory, or an ordinary one: kills lose nothing there, and syncs cost nothing."""
    usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 200 * 2**20
    path = Path(tempfile.mkdtemp(prefix="cachestream-", dir=MEMORY if usable else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB of its own, where the test may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:  # lazily: the traceback of a failed test may hold a file open, and pytest removes the folder at the end
        subprocess.run(["umount", "--lazy", str(path)], check=True)
