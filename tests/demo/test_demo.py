"""The demo runs as users run it, only shorter, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from cachestream import Cache, EpochError
from cachestream.demo.data import PLACES, make_remote
from cachestream.demo.run import Size, train_ranks
from tests.worker.support import wait_until

ROOT: Final = Path(__file__).parents[2]
SHORT: Final = Size(num_samples=810, num_held_out=135, epochs=3, epoch_s=1.0, fetch_s=1.5)
TIMEOUT_S: Final = 180.0


def processes_of(folder: Path) -> list[str]:
    """The command lines that name `folder`, which torchrun's and the ranks' do."""
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


@contextmanager
def training_demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in a process of its own that works in `folder`, once its ranks train."""
    long = dataclasses.replace(SHORT, epochs=100)
    script = f"from cachestream.demo import Size, run; run(size={long})"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("epoch") for line in process.stdout)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_leaves_nothing(tmp_path: Path) -> None:
    with training_demo(tmp_path) as process:
        assert processes_of(tmp_path)
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
    assert process.returncode == -signal.SIGINT
    wait_until(lambda: not processes_of(tmp_path), "all of it ends")
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")}
    assert left == {"demo-output"}


@pytest.mark.slow
def test_a_killed_demo_takes_its_ranks_and_its_worker_with_it(tmp_path: Path) -> None:
    with training_demo(tmp_path) as process:
        process.kill()
    wait_until(lambda: not processes_of(tmp_path), "the ranks end")
    (work,) = tmp_path.glob("cachestream-demo-*")
    with Cache(work / "cache") as cache:
        wait_until(lambda: not cache.has_worker(), "the worker ends")


@pytest.mark.slow
def test_ranks_that_fail_say_why(tmp_path: Path) -> None:
    reason = r"rank \d: SourceError: .*held-out: no such file or folder"
    with pytest.raises(EpochError, match=reason):
        list(train_ranks(tmp_path, SHORT, 100_000, tmp_path / "log"))
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.e2e
def test_held_out_views_are_not_in_the_remote(tmp_path: Path) -> None:
    train_bytes = make_remote(tmp_path, 2 * PLACES, PLACES)
    trained, held_out = (
        {path.read_bytes() for path in (tmp_path / folder).rglob("*.jpg")} for folder in ("train", "held-out")
    )
    assert train_bytes == sum(map(len, trained))
    assert (len(trained), len(held_out)) == (2 * PLACES, PLACES)
    assert not trained & held_out
