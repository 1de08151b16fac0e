"""Does training more often on what the model finds hard pay? Weights by key against uniform sampling, on real digits.

    python examples/importance.py            (needs scikit-learn, which ships the data; a minute)

The 1,797 handwritten digits of scikit-learn, a quarter held out, a small network, several seeds and the same number
of steps for all. Three ways to draw: uniformly; in proportion to each sample's last loss; and half and half, as the
loss plus the mean loss. `loader.update_weights(keys, losses)` is all it takes. The last lines say who has won.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import cachestream as cs

parser = argparse.ArgumentParser()
parser.add_argument("--seeds", type=int, default=10)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--noise", type=float, default=0.0, help="share of the training labels that are wrong")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(images / 16, labels, test_size=0.25, random_state=0)
wrong = torch.rand(len(train_y), generator=torch.Generator().manual_seed(0)) < args.noise
train_y = torch.where(wrong, (torch.as_tensor(train_y) + 1) % 10, torch.as_tensor(train_y))
held_out = torch.as_tensor(test_x, dtype=torch.float32), torch.as_tensor(test_y)
samples = [{"x": x.astype("float32"), "y": int(y)} for x, y in zip(train_x, train_y, strict=True)]

WAYS = ("uniform", "loss", "half and half")


def train(cache: cs.Cache, way: str, seed: int) -> Iterator[float]:
    """Accuracy on what is held out, after each epoch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"weights": True} if way != "uniform" else {}
    with cs.EpochLoader(cache, 32, seed=seed, prefetch=1, **options) as loader:
        for _ in range(args.epochs):
            for batch in loader:
                losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
                optimiser.zero_grad()
                losses.mean().backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                if way != "uniform":
                    weights = losses.detach() + (losses.mean().detach() if way == "half and half" else 0)
                    loader.update_weights(batch["__key__"], weights)
            with torch.inference_mode():
                yield float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        cs.Cache(f"{folder}/cache", size_limit="50MB", min_free=0) as cache,
    ):
        with cs.start_worker(cache, samples, num_workers=1, shard_size="100KB") as worker:
            worker.wait(60)
        curves = {way: [list(train(cache, way, seed)) for seed in range(args.seeds)] for way in WAYS}
    print(f"accuracy on held-out digits, mean of {args.seeds} seeds, after each epoch:")
    for way in WAYS:
        means = [statistics.mean(column) for column in zip(*curves[way], strict=True)]
        print(f"  {way:14}" + "".join(f"{mean:7.1%}" for mean in means))
    for way in WAYS[1:]:
        for place, when in ((0, "the first epoch"), (args.epochs // 2, "half of them"), (-1, "the last")):
            gains = [
                mine[place] - its[place] for mine, its in zip(curves[way], curves["uniform"], strict=True)
            ]
            mean = statistics.mean(gains)
            # Twice the standard error of the mean of the paired differences.
            error = 2 * statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("inf")
            verdict = (
                "wins" if mean > error else "loses" if mean < -error else "makes no difference that shows"
            )
            print(f"{way} against uniform after {when}: {mean:+.2%} ± {error:.2%}: {verdict}")


if __name__ == "__main__":
    main()
