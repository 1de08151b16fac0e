"""Four trials of a sweep, each with a cache of its own, read the remote once: a job array on a Ray cluster.

    ray start --head
    python examples/trials.py s3://bucket/train /scratch/sweep --trial $SLURM_ARRAY_TASK_ID         (one of an array)
    python examples/trials.py                                               (all four here, on waves that it makes)

Each trial trains with another learning rate, from the first batch on. The last line of each tells what it read from the remote
itself; the rest came from the caches of the others.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import ray
import torch
from torch import nn

import cachestream as cs

TRIALS = 4
EPOCHS = 5


def make_waves(folder: Path) -> None:
    """Noisy waves of 1 to 6 periods, a file each."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(800):
        wave = np.sin(2 * np.pi * rng.uniform(1, 6) * np.linspace(0, 1, 256))
        np.save(folder / f"{number:04d}.npy", (wave + rng.normal(0, 0.1, 256)).astype(np.float32))


def run_trial(remote: str, cache: str, trial: int) -> None:
    model = nn.Sequential(nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 256))  # an autoencoder
    optimiser = torch.optim.AdamW(model.parameters(), lr=10.0 ** -(trial + 1))
    loader = cs.stream(remote, f"{cache}/{trial}", "500MB", batch_size=32, num_workers=1, share="sweep")
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for batch in loader:  # {"array": float32 [32, 256]}
            loss = nn.functional.mse_loss(model(batch["array"]), batch["array"])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    loader.worker.wait(timeout_s=120)
    worker = loader.worker.status().worker
    made = 0 if worker is None else worker.totals.samples
    print(
        f"trial {trial}: loss {loss:.3f}, {made} of {loader.cache.num_samples} samples read from the remote"
    )
    loader.close()


parser = argparse.ArgumentParser()
parser.add_argument("remote", nargs="?", default="waves")
parser.add_argument("cache", nargs="?", default="sweep")
parser.add_argument("--trial", type=int)
settings = parser.parse_args()
if settings.trial is not None:
    run_trial(settings.remote, settings.cache, settings.trial)
else:
    make_waves(Path("waves"))
    ray.init(num_cpus=2, log_to_driver=False)  # the trials find it
    trials = [
        subprocess.Popen([sys.executable, __file__, settings.remote, settings.cache, "--trial", str(trial)])
        for trial in range(TRIALS)
    ]
    sys.exit(max(trial.wait() for trial in trials))
