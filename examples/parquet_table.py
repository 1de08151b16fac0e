"""Train from Parquet in the layout of Hugging Face's image sets: a struct of bytes and path, and a label.

    python examples/parquet_table.py "hf://datasets/ylecun/mnist/mnist/train-*.parquet" \
        "hf://datasets/ylecun/mnist/mnist/test-*.parquet" /scratch/mnist     (needs huggingface_hub)
    python examples/parquet_table.py            (makes tables of small pictures in ./parquet-demo, and reads those)

Only the two columns that are named are fetched. The last line is the accuracy on the second table.
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn

import cachestream as cs


def picture(shape: int, rng: np.random.Generator) -> bytes:
    """A disc, a square or a cross somewhere in noise, as PNG."""
    y, x = np.abs(np.mgrid[:28, :28] - rng.uniform(10, 18, (2, 1, 1)))
    inside = [x**2 + y**2 < 60, np.maximum(x, y) < 7, np.minimum(x, y) < 2][shape]
    pixels = np.clip(inside * 90 + rng.normal(80, 40, (28, 28)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def make_tables(folder: Path) -> tuple[str, str]:
    """Four tables to train on and one that is held out, 240 pictures each, in row groups of 60."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train-0", "train-1", "train-2", "train-3", "test-0")):
        rng = np.random.default_rng(number)
        labels = rng.integers(0, 3, 240)
        images = [{"bytes": picture(label, rng), "path": None} for label in labels]
        rows = {"image": images, "label": labels, "unused": [b"not fetched" * 100] * 240}
        pq.write_table(pa.table(rows), folder / f"{name}.parquet", row_group_size=60)
    return str(folder / "train-*.parquet"), str(folder / "test-*.parquet")


demo = Path("parquet-demo")
train, test = sys.argv[1:3] if len(sys.argv) > 3 else make_tables(demo)
cache = sys.argv[3] if len(sys.argv) > 3 else demo / "cache"

network = nn.Sequential(
    nn.BatchNorm2d(3),
    nn.Conv2d(3, 8, 5),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 5),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(network.parameters(), 3e-3)
options: dict[str, Any] = {"columns": ["image", "label"], "resize": (28, 28)}
with cs.stream(
    train, cache, "1GB", batch_size=32, epoch_size=960, min_samples=200, num_workers=2, **options
) as loader:
    for epoch in range(3):
        losses = []
        for batch in loader:  # {"image": uint8 [32, 3, 28, 28], "label": int64 [32]}
            loss = nn.functional.cross_entropy(network(batch["image"] / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: of {loader.cache.num_samples:,} pictures, loss {np.mean(losses):.2f}")

# What is small can be read without a cache.
source, rng = cs.open_source(test, **options), np.random.default_rng(0)
samples = [sample for unit in range(source.num_units or 0) for _, sample in source.read(unit, rng)]
images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
with torch.inference_mode():
    found = network.eval()(images / 255).argmax(1).numpy()
print(
    f"{np.mean(found == [sample['label'] for sample in samples]):.1%} of {len(samples):,} held-out pictures are right"
)
