"""A long tail through a small cache: rare classes are drawn more often, and their shards stay when others are evicted.

    python examples/long_tail.py            (needs scikit-learn, which ships the data; two minutes)

Handwritten digits of scikit-learn, from 140 of one digit down to 3 of another, and a cache of a third of them that turns
over slowly. Each sample weighs one by the number of its class. Twice: with eviction="lru", where a rare digit
is away most of the time, and with eviction="least-weight". The last lines give the accuracy on held-out digits,
which are equally many of each, and how many of the rare ones the last epochs were drawn from.
"""

import argparse
import statistics
import tempfile
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import cachestream as cs

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()

COUNTS = np.round(140 * (3 / 140) ** (np.arange(10) / 9)).astype(int)  # of the digits 0 to 9
RARE = 6  # and above
SIDE = 64

images, labels = load_digits(return_X_y=True)
images = np.kron(images.reshape(-1, 8, 8) / 16, np.ones((SIDE // 8, SIDE // 8))).astype("float32")
of_digit = [np.flatnonzero(labels == digit) for digit in range(10)]
held_out = np.concatenate([found[-30:] for found in of_digit])
chosen = np.concatenate([found[:count] for found, count in zip(of_digit, COUNTS, strict=True)])
samples = [{"x": images[i], "y": int(labels[i])} for i in chosen]
weights = {
    str(position): 1 / COUNTS[labels[i]] for position, i in enumerate(chosen)
}  # the key of a list is the position


def train(folder: str, eviction: str, seed: int) -> tuple[float, float]:
    """Accuracy on what is held out, and the share of the rare digits in each of the last epochs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    rare: list[int] = []  # how many different ones each epoch had
    with cs.stream(
        samples,
        cache=folder,
        size_limit=700_000 + len(samples) // 3 * images[0].nbytes,
        min_free=0,
        eviction=eviction,
        weights=weights,
        batch_size=16,
        min_samples=100,
        turnover=0.06,  # twice that goes in an epoch: the rest must have room for what is rare
        num_workers=1,
        shard_size="35kB",  # two samples: a shard of many weighs as much as any other
        seed=seed,
        prefetch=1,
    ) as loader:
        for _ in range(args.epochs):
            keys: set[str] = set()
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                keys.update(key for key, y in zip(batch["__key__"], batch["y"], strict=True) if y >= RARE)
                time.sleep(0.06)  # as of a larger model: the remote keeps up
            rare.append(len(keys))
    with torch.inference_mode():
        found = model(torch.from_numpy(images[held_out])).argmax(1).numpy()
    last = statistics.mean(rare[-5:]) / float(COUNTS[RARE:].sum())
    return float((found == labels[held_out]).mean()), last


def main() -> None:
    print(f"{len(samples)} digits, {COUNTS.tolist()} of each; means and spreads of {args.seeds} seeds")
    for eviction in ("lru", "least-weight"):
        with tempfile.TemporaryDirectory() as folder:
            runs = [train(f"{folder}/{seed}", eviction, seed) for seed in range(args.seeds)]
        right, held = zip(*runs, strict=True)
        spread = f"{min(right):.1%} to {max(right):.1%}"
        print(
            f"{eviction:14} accuracy {statistics.mean(right):.1%} ({spread}), {statistics.mean(held):.0%} of the rare digits at hand"
        )


if __name__ == "__main__":
    main()
