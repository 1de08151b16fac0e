"""The examples of training run as a user runs them: torchrun with a checkpoint, and weights by key."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.distributed import run as torchrun

from tests.support.forked import fork_ranks, fork_script, run_forked
from tests.support.interpreters import QUICK

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_compares_weights_with_uniform_sampling_and_says_which_wins() -> None:
    done = fork_script(
        ROOT / "examples" / "importance.py",
        ("--seeds", 2, "--epochs", 2),
        cwd=ROOT,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr
    accuracies = {
        way: [float(text) for text in re.findall(r"([0-9.]+)%", line)]
        for way, line in re.findall(r"^  (\S.*?)  +(.*%)$", done.stdout, re.MULTILINE)
    }
    assert accuracies.keys() == {"uniform", "loss", "half and half"}
    assert all(len(curve) == 2 and curve[-1] > 60 for curve in accuracies.values())
    assert len(re.findall(r": (wins|loses|makes no difference that shows)$", done.stdout, re.MULTILINE)) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_example_of_a_long_tail_compares_what_two_policies_keep() -> None:
    done = fork_script(
        ROOT / "examples" / "long_tail.py",
        ("--seeds", 1, "--epochs", 6),
        cwd=ROOT,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\S+) +accuracy ([0-9.]+)% .*, ([0-9]+)% of the rare", done.stdout, re.MULTILINE)
    assert [eviction for eviction, _, _ in found] == ["lru", "least-weight"]
    assert all(float(accuracy) > 30 and int(rare) > 0 for _, accuracy, rare in found)


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_trains_under_torchrun_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for folder, count in (("train", 135), ("held-out", 16)):
        for label in ("dark", "bright"):
            (tmp_path / "images" / folder / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (40, 48, 3), dtype=np.uint8) + np.uint8(
                    120 * (label == "bright")
                )
                Image.fromarray(pixels).save(tmp_path / "images" / folder / label / f"{i:03d}.png")
    example = ROOT / "examples" / "train_ddp.py"
    options = (tmp_path / "images", tmp_path / "cache", "--size-limit", "20MB", "--epochs")
    first = fork_ranks(example, (*options, 2), (*options, 2), cwd=ROOT, timeout_s=300)
    assert first.count("right") == 2
    again = run_forked(
        torchrun.main,
        ("--standalone", "--nproc-per-node=2", example, *options, 3),
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": QUICK},
        timeout_s=300,
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("epoch 2: 270 samples")


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_draws_from_two_texts_what_was_planned() -> None:
    done = fork_script(
        ROOT / "examples" / "mixture.py",
        ("--epochs", 2, "--windows", 300),
        cwd=ROOT,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\w+): planned ([0-9.]+), drawn (\d+) ", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in lines] == ["prose", "code"]
    assert all(abs(float(planned) - int(drawn)) < 2 for _, planned, drawn in lines)  # 1 for each epoch
    assert sum(int(drawn) for _, _, drawn in lines) == 2 * 18 * 32


def test_the_example_is_short_enough_to_be_copied() -> None:
    assert len((ROOT / "examples" / "train_ddp.py").read_text().splitlines()) <= 80
