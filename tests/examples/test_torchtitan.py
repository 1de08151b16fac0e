"""torchtitan's own trainer with our loader: training steps of two ranks, a checkpoint, and the exact way on from it."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import cachestream as cs
from tests.support import titan_on_cpu
from tests.support.forked import run_forked

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = "torchtitan_tokens"
SEQ_LEN: Final = 32
LOSS: Final = re.compile(r"step: +(\d+) .*?loss: +([\d.]+)")
pytestmark = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan"),
    pytest.mark.usefixtures("forked"),
]


def train(folder: Path, outputs: str, *options: str) -> tuple[int, dict[int, str], str]:
    """The exit status, the loss of each step that rank 0 has logged, and all that was printed."""
    done = run_forked(
        titan_on_cpu.main,
        (
            *("--experimental.custom_import", EXAMPLE, "--job.custom_config_module", EXAMPLE),
            *("--model.name", "llama3_cached", "--model.flavor", "debugmodel"),
            *("--training.dataset_path", str(folder / "*.npy"), "--cached.folder", str(folder / "cache")),
            *(
                "--training.seq_len",
                str(SEQ_LEN),
                "--training.local_batch_size",
                "2",
                "--training.steps",
                "6",
            ),
            # gloo cannot reduce as FSDP asks it to
            *("--parallelism.data_parallel_replicate_degree", "2"),
            *("--parallelism.data_parallel_shard_degree", "1"),
            *("--checkpoint.enable", "--checkpoint.interval", "3", "--checkpoint.no_last_save_model_only"),
            *("--metrics.log_freq", "1", "--metrics.disable_color_printing", "--job.dump_folder", outputs),
            *(
                "--lr_scheduler.warmup_steps",
                "1",
                "--optimizer.lr",
                "3e-3",
            ),  # the loss of few steps falls by far
            *options,
        ),
        cwd=folder,
        environment={
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        },
        timeout_s=240,
    )
    printed = done.stdout + done.stderr
    return done.returncode, {int(step): loss for step, loss in LOSS.findall(printed)}, printed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two arrays of the same few tokens, which are soon learnt, and a cache of more windows than a run draws."""
    rng = np.random.default_rng(0)
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", rng.integers(0, 4, 50 * (SEQ_LEN + 1), dtype=np.uint16))
    tokens = cs.open_source(str(tmp_path / "*.npy"), window=(SEQ_LEN + 1,))
    with cs.Cache(tmp_path / "cache", "200GB") as cache, cs.start_worker(cache, tokens, num_workers=1):
        cache.wait(min_samples=200, timeout_s=60)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchtitan_trains_two_ranks_and_goes_on_at_the_exact_next_batch(folder: Path) -> None:
    status, losses, printed = train(folder, "whole")
    assert status == 0, printed[-4000:]
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    shutil.copytree(folder / "whole" / "checkpoint" / "step-3", folder / "again" / "checkpoint" / "step-3")
    status, resumed, printed = train(folder, "again")
    assert status == 0, printed[-4000:]
    assert resumed == {step: loss for step, loss in losses.items() if step > 3}


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_ranks_of_tensor_parallelism_train_on_equal_batches(folder: Path) -> None:
    alone = ("--parallelism.data_parallel_replicate_degree", "1")
    status, losses, printed = train(folder, "tensor", *alone, "--parallelism.tensor_parallel_degree", "2")
    assert status == 0, printed[-4000:]
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert float(losses[6]) < 0.8 * float(losses[1]), losses


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_example_refuses_a_pipeline(folder: Path) -> None:
    alone = ("--parallelism.data_parallel_replicate_degree", "1")
    status, _, printed = train(folder, "refused", *alone, "--parallelism.pipeline_parallel_degree", "2")
    assert status != 0
    assert "give cs.stream a mesh= and replicate=" in printed
