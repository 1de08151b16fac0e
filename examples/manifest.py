"""Train from a list of files, a CSV with labels, by a curriculum: what is clear first, what is noisy later.

    python examples/manifest.py s3://bucket/train.csv /scratch/train    (columns "path", "shape", "noise")
    python examples/manifest.py                     (makes pictures and their list in ./manifest-demo, and reads those)

A column of the list is the label, by its name; another one shapes the order in which the files come. The bandwidth of
the demonstration is limited, to show it: as the cache grows, so does the noise of what it holds.
"""

import csv
import sys
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

import cachestream as cs


def make_list(folder: Path) -> str:
    """1,000 pictures of discs and squares in more and less noise, and the list of them."""
    rng = np.random.default_rng(0)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = ["path,shape,noise"]
    for number in range(1000):
        y, x = np.abs(np.mgrid[:24, :24] - rng.uniform(8, 16, (2, 1, 1)))
        shape, noise = ("disc", "square")[number % 2], rng.random()
        inside = x**2 + y**2 < 40 if shape == "disc" else np.maximum(x, y) < 5.6
        pixels = 100 + 60 * inside + 60 * noise * rng.normal(size=(24, 24))
        path = f"pictures/{number:04d}.png"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / path)
        lines.append(f"{path},{shape},{noise:.3f}")
    (folder / "train.csv").write_text("\n".join(lines))
    return str(folder / "train.csv")


demo = Path("manifest-demo")
listed, cache = sys.argv[1:3] if len(sys.argv) > 2 else (make_list(demo), demo / "cache")
with fsspec.open(listed, "rt") as file:
    named = [(Path(row["path"]).name, float(row["noise"])) for row in csv.DictReader(file)]
noise_of = dict(named)
noises = np.array([noise for _, noise in named])  # a unit is a file, in the order of the list


def clear_first(progress: float) -> npt.NDArray[np.bool_]:
    """Which files may come next: a tenth of the noise at first, all of it when half of the pass is over."""
    return noises <= 0.1 + 1.8 * progress


source = cs.FileSource(cs.Manifest(listed, label="shape"), resize=(24, 24))
network = nn.Sequential(
    nn.BatchNorm2d(3),
    nn.Conv2d(3, 16, 5),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 16, 5),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64, len(source.label_names)),
)
optimizer = torch.optim.Adam(network.parameters(), 3e-3)
limit = None if len(sys.argv) > 2 else "200KB/s"
loader = cs.stream(
    source,
    cache,
    "1GB",
    order=clear_first,
    bandwidth_limit=limit,
    batch_size=32,
    epoch_size=768,
    with_keys=True,
)
for epoch in range(5):
    noise, right = 0.0, []
    for batch in loader:  # {"image": uint8 [32, 3, 24, 24], "label": int64 [32], "__key__": names of files}
        scores = network(batch["image"] / 255)
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, batch["label"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        right.append((scores.argmax(1) == batch["label"]).float().mean().item())
        noise = max(noise, *(noise_of[Path(key).name] for key in batch["__key__"]))
    cached = f"{loader.cache.num_samples:,} pictures, noise up to {noise:.2f}"
    print(f"epoch {epoch}: {cached}, {np.mean(right):.1%} right")
loader.close()
