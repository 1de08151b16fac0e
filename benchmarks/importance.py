"""Weights by key, drawn and evicted by: `python -m benchmarks.importance`.

The demo's views of 135 places, as JPEG files, in front of a cache of a quarter of them and a remote so slow that an epoch
brings 6 % of the cache. A small network, from the same weights, trains for equally many steps, which also fetch equally
many samples, in three ways: drawn uniformly with "lru"; drawn by weights with "lru"; and drawn by weights with
"least-weight". Percent right of held-out views, alike many of each place, after a half and all of the steps.

- A long tail: places have from 100 views down to 2; the weight of a view is one by the square root of those of its place.
  As files in random order, in shards of eight; and as tars of one place.
- Wrong labels: 40 % of them. After a third of the steps, views with the smallest 60 % of an epoch's losses have weight 1,
  others 0.05 ("small loss", as in Co-teaching, arXiv:1804.06872).
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
from dataclasses import dataclass
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

SEEDS: Final = 3
MOST, LEAST, EQUAL = 100, 2, 30  # views of a place
STEPS: Final = 1000
BATCH: Final = 32
SHARE: Final = 0.25
TURNOVER: Final = 0.06
NOISE: Final = 0.4
WARM_UP: Final = STEPS // 3
LITTLE: Final = 0.05
FILLED_S: Final = 1.5
OVERHEAD_BYTES: Final = 700_000  # of a cache, beside its shards
SAMPLE_BYTES: Final = 3 * SIDE * SIDE * 1.15  # in small shards
WIDTH: Final = 12
ARMS: Final = {
    "uniform": ("lru", False),
    "drawn by weight": ("lru", True),
    "and evicted by weight": ("least-weight", True),
}


@dataclass(frozen=True, slots=True)
class Task:
    """Files or tars at `source`, and the labels that training sees, int64, by the number of a view."""

    source: Path
    counts: np.ndarray
    labels: np.ndarray
    is_noisy: bool = False


def choose(views: Path, folder: Path, counts: np.ndarray) -> None:
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


def make_tasks(folder: Path) -> tuple[dict[str, Task], Path]:
    """The tasks, and the folder of the held-out views."""
    make_remote(folder / "views", MOST * PLACES, 10 * PLACES)
    tail, rng = np.empty(PLACES, np.int64), np.random.default_rng(0)
    tail[rng.permutation(PLACES)] = np.round(MOST * (LEAST / MOST) ** (np.arange(PLACES) / (PLACES - 1)))
    equal = np.full(PLACES, EQUAL)
    for name, counts in (("tail", tail), ("equal", equal)):
        choose(folder / "views" / TRAIN, folder / name, counts)
    write_tars(folder / "tail", folder / "tars")
    right = np.arange(MOST * PLACES) % PLACES
    wrong = (right + rng.integers(1, PLACES, len(right))) % PLACES
    noisy = np.where(rng.random(len(right)) < NOISE, wrong, right)
    tasks = {
        "long tail, files": Task(folder / "tail", tail, right),
        "long tail, tars of a place": Task(folder / "tars", tail, right),
        "wrong labels, files": Task(folder / "equal", equal, noisy, is_noisy=True),
    }
    return tasks, folder / "views" / HELD_OUT


class Run:
    """A network that is trained on a task; `weighs`: with weights by key."""

    def __init__(self, task: Task, held_out: tuple[Tensor, Tensor], seed: int, *, weighs: bool) -> None:
        self.task, self.held_out, self.seed, self.weighs = task, held_out, seed, weighs
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
        losses: list[Tensor] = []
        for batch in loader:
            numbers = [number_of(key) for key in batch["__key__"]]
            losses.append(self.step(batch, torch.from_numpy(self.task.labels[numbers])))
            if self.steps in (STEPS // 2, STEPS):
                yield self.accuracy()
            if self.steps == STEPS:
                return
            if not keys:
                wait_for_filling(loader.cache)
            keys += batch["__key__"]
        if not self.weighs:
            return
        if not self.task.is_noisy:
            loader.update_weights(keys, self.task.counts[[number_of(key) % PLACES for key in keys]] ** -0.5)
        elif self.steps > WARM_UP:
            found = torch.cat(losses)
            loader.update_weights(keys, torch.where(found <= found.quantile(1 - NOISE), 1.0, LITTLE))

    def step(self, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Take a step; returns the losses, float32 `[BATCH]`."""
        images = augment({"image": batch["image"], "label": labels}, torch.default_generator)["image"]
        losses = functional.cross_entropy(
            self.network(functional.avg_pool2d(images, 2)), labels, reduction="none"
        )
        self.optimiser.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.schedule.step()
        self.steps += 1
        return losses.detach()

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


def measure(task: Task, held_out: tuple[Tensor, Tensor], arm: str, seed: int) -> list[float]:
    """Percent right after a half and all of the steps, and how many samples were fetched."""
    torch.set_num_threads(1)
    eviction, weighs = ARMS[arm]
    limit_bytes = OVERHEAD_BYTES + int(SHARE * task.counts.sum() * SAMPLE_BYTES)
    transform = shrink if task.source.name != "tars" else shrink_view
    with scratch() as folder, cs.Cache(folder, limit_bytes, min_free=0, eviction=eviction) as cache:
        options: dict[str, Any] = {"num_workers": 1, "shard_size": "56kB", "seed": seed}
        with cs.start_worker(cache, str(task.source), transform=transform, **options) as worker:
            worker.wait(120)
            cached = cache.num_samples
            found = Run(task, held_out, seed, weighs=weighs).train(cache)
            status = cache.status()
    fetched = status.num_samples + status.evicted_samples
    told = f"{cached} of {task.counts.sum()} cached, {fetched} fetched: {found}"
    print(f"{arm}, seed {seed}: {told}", file=sys.stderr, flush=True)
    return [*found, float(fetched)]


def main() -> None:
    figures: dict[str, float] = {}
    with scratch() as folder:
        tasks, views = make_tasks(folder)
        shown = list(read(views))
        images = functional.avg_pool2d(normalise(torch.stack([decode(jpeg) for _, jpeg, _ in shown])), 2)
        held_out = images, torch.tensor([place for _, _, place in shown])
        for name, task in tasks.items():
            for arm in ARMS:
                with ProcessPoolExecutor(SEEDS, get_context("spawn")) as processes:
                    runs = [*processes.map(partial(measure, task, held_out, arm), range(SEEDS))]
                half, end, fetched = zip(*runs, strict=True)
                row = f"{name}: {arm}"
                figures[f"{row} / half-way, %"] = statistics.mean(half)
                figures[f"{row} / at the end, %"] = statistics.mean(end)
                figures[f"{row} / least"], figures[f"{row} / most"] = min(end), max(end)
                figures[f"{row} / samples fetched"] = statistics.mean(fetched)
    emit(**figures)


if __name__ == "__main__":
    main()
