"""The examples of the frameworks, run as a user runs them, with the real frameworks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from PIL import Image
from torch.distributed import run as torchrun

from cachestream import Cache
from tests.support.forked import fork_ranks, fork_script, run_forked
from tests.support.interpreters import QUICK

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
FRAMEWORKS: Final = (
    "accelerate_loop",
    "hf_trainer",
    "lightning_ddp",
    "mp_spawn",
    "ray_train",
    "trials",
    "two_hosts",
)
EPOCH: Final = re.compile(r"^epoch (\d+): (\d+) (?:batches|steps)", re.MULTILINE)
TWO_RANKS: Final = ("--standalone", "--nproc-per-node=2")
Run = Callable[..., str]


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark and bright images: 64 of each to train on, 8 of each held out."""
    root = tmp_path_factory.mktemp("remote")
    rng = np.random.default_rng(0)
    for part, count in (("train", 64), ("held-out", 8)):
        for label, name in enumerate(("dark", "bright")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (40, 48, 3)) + 120 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:03d}.png")
    return root


@pytest.fixture
def run(tmp_path: Path, forked: None) -> Iterator[Run]:
    """Runs an example in an empty folder, by torchrun if it gets options, and returns what it prints."""
    short = tempfile.mkdtemp(prefix="cs-")  # Ray makes sockets below it, whose paths may not be long
    environment = {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # where it was, if a signal ends it
        "PYTHONPATH": QUICK,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": short,
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def start(
        name: str, *arguments: str | Path, torchrun_options: tuple[str, ...] = (), timeout_s: float = 300
    ) -> str:
        command = (EXAMPLES / f"{name}.py", *arguments)
        if torchrun_options:
            options = (*torchrun_options, *command)
            done = run_forked(
                torchrun.main, options, cwd=tmp_path, environment=environment, timeout_s=timeout_s
            )
        elif name == "mp_spawn":  # its ranks are new interpreters, whatever starts them
            done = fork_script(
                EXAMPLES / "mp_spawn.py",
                arguments,
                cwd=tmp_path,
                environment=environment,
                timeout_s=timeout_s,
            )
        else:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=tmp_path,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    yield start
    shutil.rmtree(short, ignore_errors=True)


def epochs(printed: str) -> list[tuple[int, int]]:
    """The (number, batches or steps) of the epochs that an example has told of."""
    return [(int(number), int(count)) for number, count in EPOCH.findall(printed)]


def cached(folder: Path) -> int:
    """The number of samples cached in `folder`, which nobody uses any more."""
    with Cache(folder) as cache:
        assert cache.status().leases == 0
        return cache.num_samples


@pytest.mark.slow
def test_the_example_for_lightning_trains_two_processes(remote: Path, run: Run) -> None:
    first = epochs(run("lightning_ddp", remote, "cache", "--epochs", "2"))
    assert [number for number, _ in first] == [0, 1]
    assert all(1 <= count <= 2 for _, count in first)


@pytest.mark.slow
def test_the_example_for_lightning_goes_on_where_it_was(remote: Path, run: Run, tmp_path: Path) -> None:
    run("lightning_ddp", remote, "cache", "--epochs", "2")
    more = run("lightning_ddp", remote, "cache", "--epochs", "3", "--devices", "1")
    assert epochs(more) == [(2, 4)]  # one process: twice the batches
    assert "100.0% right" in more
    assert cached(tmp_path / "cache" / "train") == 128


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_for_accelerate_trains_two_processes(remote: Path, tmp_path: Path) -> None:
    options = (remote / "train", "cache", "--epochs", "3")
    printed = fork_ranks(
        EXAMPLES / "accelerate_loop.py",
        *(options, options),
        cwd=tmp_path,
        environment={"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        timeout_s=300,
    )
    assert [number for number, _ in epochs(printed)] == [0, 1, 2]
    assert all(
        1 <= count <= 2 for _, count in epochs(printed)
    )  # 128 samples, 2 processes, 32 a batch: split once
    assert "batches on each of 2" in printed
    assert cached(tmp_path / "cache") >= 64


@pytest.mark.slow
def test_the_example_for_the_trainer_has_equal_epochs_in_two_processes(
    remote: Path, run: Run, tmp_path: Path
) -> None:
    options = ("--epochs", "3", "--epoch-size", "128", "--cpu")
    printed = run("hf_trainer", remote, "cache", *options, torchrun_options=TWO_RANKS)
    assert epochs(printed) == [(1, 2), (2, 4), (3, 6)]  # 128 samples, 2 processes, 32 a batch: split once
    assert cached(tmp_path / "cache" / "train") >= 64


@pytest.mark.e2e
def test_the_example_for_multiprocessing_spawn_trains_two_processes(
    remote: Path, run: Run, tmp_path: Path
) -> None:
    printed = run("mp_spawn", remote / "train", "cache", "--epochs", "3", "--epoch-size", "128")
    assert epochs(printed) == [(0, 2), (1, 2), (2, 2)]
    assert cached(tmp_path / "cache") >= 64


@pytest.mark.slow  # Ray takes half a minute to start, and as long to end
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_the_example_for_ray_trains_two_workers(remote: Path, run: Run, tmp_path: Path) -> None:
    printed = run("ray_train", remote / "train", "cache", "--epochs", "3", timeout_s=280)
    assert [number for number, _ in epochs(printed)] == [2]
    assert 3 <= epochs(printed)[0][1] <= 6
    assert cached(tmp_path / "cache") >= 64


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_the_trials_of_a_sweep_read_each_sample_once_for_all(run: Run, tmp_path: Path) -> None:
    printed = run("trials", timeout_s=280)
    made = [int(count) for count in re.findall(r"([0-9]+) of 800 samples read from the remote", printed)]
    assert len(made) == 4
    assert sum(made) == 800
    assert all(cached(tmp_path / "sweep" / str(trial)) == 800 for trial in range(4))


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_second_of_two_hosts_fills_its_cache_from_that_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "waves").mkdir()
    for number in range(128):
        np.save(tmp_path / "waves" / f"{number:03d}.npy", np.full(256, number, np.float32))
    hosts = (("waves", "host-0", "--epochs", "1"), ("host-0", "host-1", "--from-cache", "--epochs", "1"))
    printed = fork_ranks(EXAMPLES / "two_hosts.py", *hosts, cwd=tmp_path, timeout_s=300)
    assert "host-0: 128 samples" in printed
    assert "host-1: 128 samples" in printed


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_fits_on_a_page_and_is_named_in_the_index(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 80
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
