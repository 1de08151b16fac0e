"""The price of a small cache in accuracy: `python -m benchmarks.small_cache`.

A classifier of handwritten digits (scikit-learn's, enlarged to 64 × 64) after equally many steps, trained on all samples;
on a cache of a quarter of them that turns over, from tars in random order; and from tars of one class each. Means of
the seeds, in percent of a held-out tenth, and the points that the small caches are behind.
"""

from __future__ import annotations

import io
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import cachestream as cs
from benchmarks.measure import emit, scratch

SEEDS: Final = 3
TARS: Final = 20
STEPS: Final = 1500
STEP_S: Final = 0.01
BATCH: Final = 64
SIDE: Final = 64


def digits() -> tuple[np.ndarray, np.ndarray]:
    """float32 `[n, 1, 32, 32]` in 0 to 1, and labels int64 `[n]`, in an order of their own."""
    found = load_digits()
    images = np.kron(found.images.astype(np.float32) / 16, np.ones((SIDE // 8, SIDE // 8), np.float32))
    order = np.random.default_rng(0).permutation(len(images))
    return images[order, None], found.target[order].astype(np.int64)


def write_tars(folder: Path, images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> int:
    """The samples in `order` in 20 tars; returns their bytes."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(order, TARS)):
        with tarfile.open(folder / f"{number:03}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample in part.tolist():
                array = io.BytesIO()
                np.save(array, images[sample])
                for extension, data in (("npy", array.getvalue()), ("cls", str(labels[sample]).encode())):
                    member = tarfile.TarInfo(f"{sample:05}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return sum(path.stat().st_size for path in folder.iterdir())


def accuracy(
    tars: Path, cache_path: Path, limit_bytes: int, seed: int, held_out: tuple[np.ndarray, np.ndarray]
) -> float:
    """Percent right on the held-out samples after STEPS steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    options: dict[str, Any] = {
        "num_workers": 2,
        "shard_size": "400kB",
        "min_samples": 4 * BATCH,
        "batch_size": BATCH,
        "seed": seed,
    }
    with cs.stream(str(tars), cache=cache_path, size_limit=limit_bytes, **options) as loader:
        steps = 0
        while steps < STEPS:
            for batch in loader:
                begun_s = time.perf_counter()
                loss = nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                steps += 1
                if steps == STEPS:
                    break
                time.sleep(max(0.0, STEP_S - (time.perf_counter() - begun_s)))
    with torch.no_grad():
        found = model(torch.from_numpy(held_out[0])).argmax(1).numpy()
    return 100 * float((found == held_out[1]).mean())


def main() -> None:
    torch.set_num_threads(1)
    images, labels = digits()
    tenth = len(images) // 10
    held_out = images[:tenth], labels[:tenth]
    rest = np.arange(tenth, len(images))
    ways = {"random": rest, "sorted": rest[np.argsort(labels[rest], kind="stable")]}
    found: dict[str, list[float]] = {"all": [], "quarter": [], "quarter_of_sorted": []}
    with scratch() as folder:
        sizes = {name: write_tars(folder / name, images, labels, order) for name, order in ways.items()}
        for seed in range(SEEDS):
            quarter = sizes["random"] // 4 + (1 << 20)  # and what a cache keeps beside its shards
            for name, way, limit_bytes in (
                ("all", "random", 1 << 30),
                ("quarter", "random", quarter),
                ("quarter_of_sorted", "sorted", quarter),
            ):
                found[name].append(
                    accuracy(folder / way, folder / f"{name}-{seed}", limit_bytes, seed, held_out)
                )
    figures = {f"{name}_percent": statistics.mean(values) for name, values in found.items()}
    behind = {
        f"{name}_points_behind": statistics.mean(np.subtract(found["all"], found[name]))
        for name in found
        if name != "all"
    }
    emit(**figures, **behind)


if __name__ == "__main__":
    main()
