"""Weights by key, drawn and evicted by: `python -m benchmarks.importance`.

The demo's views of 135 places, as JPEG files, in front of a cache of a quarter of them and a remote so slow that an epoch
brings 6 % of the cache. A small network, from the same weights, trains for equally many steps, which also fetch equally
many samples, in three ways: drawn uniformly with "lru"; drawn by weights with "lru"; and drawn by weights with
"least-weight". Percent right of held-out views, alike many of each place, after a half and all of the steps.

Places have from 100 views down to 2 (a long tail), and a view weighs one by the square root of those of its place. They are
files in random order, in shards of eight; and tars of one place.
"""

from __future__ import annotations

import io
import re
import statistics
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import cachestream as cs
from benchmarks.measure import emit, scratch
from benchmarks.peers.accuracy.shrinking import shrink_view
from benchmarks.peers.accuracy.views import decode, read
from cachestream.demo.data import HELD_OUT, PLACES, SIDE, TRAIN, make_remote, shrink
from cachestream.demo.train import augment, make_network, normalise
from cachestream.schema import IntArray

SEEDS: Final = 3
MOST, LEAST = 100, 2  # views of a place
STEPS: Final = 1000
BATCH: Final = 32
SHARE: Final = 0.25
TURNOVER: Final = 0.06
FILLED_S: Final = 1.5
OVERHEAD_BYTES: Final = 700_000  # of a cache, beside its shards
SAMPLE_BYTES: Final = 3 * SIDE * SIDE * 1.15  # in small shards
WIDTH: Final = 12
ARMS: Final = {
    "uniform": ("lru", False),
    "drawn by weight": ("lru", True),
    "and evicted by weight": ("least-weight", True),
}


def choose(views: Path, folder: Path, counts: IntArray) -> None:
    """Link the first `counts[place]` views of each place into `folder`."""
    for path in views.glob("*/*.jpg"):
        number = int(path.stem)
        if number // PLACES < counts[number % PLACES]:
            (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            (folder / path.parent.name / path.name).hardlink_to(path)


def write_tars(files: Path, folder: Path) -> None:
    """A tar for each place."""
    folder.mkdir()
    for place in sorted(files.iterdir()):
        with tarfile.open(folder / f"{place.name}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(place.iterdir()):
                label = str(int(path.stem) % PLACES).encode()
                for ending, content in (("jpg", path.read_bytes()), ("cls", label)):
                    member = tarfile.TarInfo(f"{path.stem}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def number_of(key: str) -> int:
    """The number of a view in "place/000123.jpg" or "place.tar#000123"."""
    return int(re.findall(r"[0-9]{6}", key)[-1])


def make_sources(folder: Path) -> tuple[dict[str, Path], IntArray, Path]:
    """Folders of files and of tars, how many views of each place they have, and the folder of the held-out views."""
    make_remote(folder / "views", MOST * PLACES, 10 * PLACES)
    counts, rng = np.empty(PLACES, np.int64), np.random.default_rng(0)
    counts[rng.permutation(PLACES)] = np.round(MOST * (LEAST / MOST) ** (np.arange(PLACES) / (PLACES - 1)))
    choose(folder / "views" / TRAIN, folder / "files", counts)
    write_tars(folder / "files", folder / "tars")
    return (
        {"files": folder / "files", "tars of a place": folder / "tars"},
        counts,
        folder / "views" / HELD_OUT,
    )


class Run:
    """A network that is trained on views, `counts` of each place; `weighs`: with weights by key."""

    def __init__(self, counts: IntArray, held_out: tuple[Tensor, Tensor], seed: int, *, weighs: bool) -> None:
        self.counts, self.held_out, self.seed, self.weighs = counts, held_out, seed, weighs
        torch.manual_seed(seed)
        self.network = make_network(WIDTH)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimiser, 4e-3, total_steps=STEPS + 1)
        self.steps = 0

    def train(self, cache: cs.Cache) -> list[float]:
        """Percent right after a half and all of the steps."""
        options: dict[str, Any] = {"weights": True} if self.weighs else {"with_keys": True}
        found: list[float] = []
        with cs.EpochLoader(cache, BATCH, seed=self.seed, turnover=TURNOVER, prefetch=1, **options) as loader:
            while self.steps < STEPS:
                found += self.epoch(loader)
        return found

    def epoch(self, loader: cs.EpochLoader) -> Iterator[float]:
        keys: list[str] = []
        for batch in loader:
            self.step(batch["image"], torch.tensor([number_of(key) % PLACES for key in batch["__key__"]]))
            if self.steps in (STEPS // 2, STEPS):
                yield self.accuracy()
            if self.steps == STEPS:
                return
            if not keys:
                wait_for_filling(loader.cache)
            keys += batch["__key__"]
        if self.weighs:
            loader.update_weights(keys, self.counts[[number_of(key) % PLACES for key in keys]] ** -0.5)

    def step(self, images: Tensor, places: Tensor) -> None:
        images = augment({"image": images, "label": places}, torch.default_generator)["image"]
        loss = functional.cross_entropy(self.network(functional.avg_pool2d(images, 2)), places)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.schedule.step()
        self.steps += 1

    @torch.inference_mode()
    def accuracy(self) -> float:
        self.network.eval()
        found = torch.cat([self.network(part).argmax(1) for part in torch.split(self.held_out[0], 256)])
        self.network.train()
        return 100 * float((found == self.held_out[1]).float().mean())


def wait_for_filling(cache: cs.Cache) -> None:
    """Wait until filling has replaced what the epoch left out, as a slow step would."""
    waits, until_s = cache.status().epoch_waits, time.monotonic() + FILLED_S
    while cache.status().epoch_waits == waits and time.monotonic() < until_s:
        time.sleep(0.02)


def measure(
    source: Path, counts: IntArray, held_out: tuple[Tensor, Tensor], arm: str, seed: int
) -> list[float]:
    """Percent right after a half and all of the steps, and how many samples were fetched."""
    torch.set_num_threads(1)
    eviction, weighs = ARMS[arm]
    limit_bytes = OVERHEAD_BYTES + int(SHARE * counts.sum() * SAMPLE_BYTES)
    transform = shrink if source.name != "tars" else shrink_view
    with scratch() as folder, cs.Cache(folder, limit_bytes, min_free=0, eviction=eviction) as cache:
        options: dict[str, Any] = {"num_workers": 1, "shard_size": "56kB", "seed": seed}
        with cs.start_worker(cache, str(source), transform=transform, **options) as worker:
            worker.wait(120)
            cached = cache.num_samples
            found = Run(counts, held_out, seed, weighs=weighs).train(cache)
            status = cache.status()
    fetched = status.num_samples + status.evicted_samples
    told = f"{cached} of {counts.sum()} cached, {fetched} fetched: {found}"
    print(f"{arm}, seed {seed}: {told}", file=sys.stderr, flush=True)
    return [*found, float(fetched)]


def main() -> None:
    figures: dict[str, float] = {}
    with scratch() as folder:
        sources, counts, views = make_sources(folder)
        shown = list(read(views))
        images = functional.avg_pool2d(normalise(torch.stack([decode(jpeg) for _, jpeg, _ in shown])), 2)
        held_out = images, torch.tensor([place for _, _, place in shown])
        for name, source in sources.items():
            for arm in ARMS:
                with ProcessPoolExecutor(SEEDS, get_context("spawn")) as processes:
                    runs = [*processes.map(partial(measure, source, counts, held_out, arm), range(SEEDS))]
                half, end, fetched = zip(*runs, strict=True)
                row = f"{name}: {arm}"
                figures[f"{row} / half-way, %"] = statistics.mean(half)
                figures[f"{row} / at the end, %"] = statistics.mean(end)
                figures[f"{row} / least"], figures[f"{row} / most"] = min(end), max(end)
                figures[f"{row} / samples fetched"] = statistics.mean(fetched)
    emit(**figures)


if __name__ == "__main__":
    main()
