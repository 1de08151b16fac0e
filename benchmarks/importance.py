"""Weights by key, drawn and evicted by: `python -m benchmarks.importance`.

The demo's views of 135 places, as JPEG files, in front of a cache of a quarter of them and a remote so slow that an epoch
brings 6 % of the cache. A small network, from the same weights, trains for equally many steps, which fetch about as many
samples, in four ways: drawn uniformly with "lru"; drawn by weights with "lru"; drawn by weights with "least-weight"; and so, with
these weights as the `order=` in which views are fetched. Percent right of held-out views, alike many of each place, after a half and
all of the steps.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
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
COLUMNS: Final = ("half-way, %", "at the end, %", "samples fetched")
SHARE: Final = 0.25
TURNOVER: Final = 0.06
FILLED_S: Final = 4.0
OVERHEAD_BYTES: Final = 700_000  # of a cache, beside its shards
SAMPLE_BYTES: Final = 3 * SIDE * SIDE * 1.15  # in small shards
WIDTH: Final = 12
ARMS: Final = {  # the eviction, and whether weights draw and order what is fetched
    "uniform": ("lru", False, False),
    "drawn by weight": ("lru", True, False),
    "and evicted by weight": ("least-weight", True, False),
    "and fetched by weight": ("least-weight", True, True),
}
FORMS: Final = {"files": "files", "tars of a place": "tars"}  # and their folders
Floats = npt.NDArray[np.floating[Any]]
Weigh = Callable[[list[str]], Floats]


def choose(views: Path, folder: Path, counts: IntArray) -> None:
    """Link the first `counts[place]` views of each place into `folder`."""
    for path in views.glob("*/*.jpg"):
        number = int(path.stem)
        if number // PLACES < counts[number % PLACES]:
            (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            (folder / path.parent.name / path.name).hardlink_to(path)


def write_tars(views: Mapping[str, list[Path]], folder: Path) -> None:
    """A tar of each of these lists of views."""
    folder.mkdir()
    for name, paths in views.items():
        with tarfile.open(folder / f"{name}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(paths):
                label = str(int(path.stem) % PLACES).encode()
                for ending, content in (("jpg", path.read_bytes()), ("cls", label)):
                    member = tarfile.TarInfo(f"{path.stem}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def number_of(key: str) -> int:
    """The number of a view in "place/000123.jpg" or "place.tar#000123"."""
    return int(re.findall(r"[0-9]{6}", key)[-1])


def make_sources(folder: Path) -> IntArray:
    """Write `folder`/files and `folder`/tars, and what is held out; returns how many views each place has."""
    make_remote(folder / "views", MOST * PLACES, 10 * PLACES)
    counts, rng = np.empty(PLACES, np.int64), np.random.default_rng(0)
    counts[rng.permutation(PLACES)] = np.round(MOST * (LEAST / MOST) ** (np.arange(PLACES) / (PLACES - 1)))
    choose(folder / "views" / TRAIN, folder / "files", counts)
    write_tars({place.name: [*place.iterdir()] for place in (folder / "files").iterdir()}, folder / "tars")
    return counts


def held_out_of(folder: Path) -> tuple[Tensor, Tensor]:
    """The held-out views as the network takes them, and their places."""
    shown = list(read(folder / "views" / HELD_OUT))
    images = functional.avg_pool2d(normalise(torch.stack([decode(jpeg) for _, jpeg, _ in shown])), 2)
    return images, torch.tensor([place for _, _, place in shown])


class Run:
    """A network that is trained on views; `weigh` returns the weights of the samples with these keys."""

    def __init__(self, held_out: tuple[Tensor, Tensor], seed: int, weigh: Weigh | None = None) -> None:
        self.held_out, self.seed, self.weigh = held_out, seed, weigh
        torch.manual_seed(seed)
        self.network = make_network(WIDTH)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimiser, 4e-3, total_steps=STEPS + 1)
        self.steps = 0

    def train(self, cache: cs.Cache) -> list[float]:
        """Percent right after a half and all of the steps."""
        options: dict[str, Any] = {"weights": True} if self.weigh else {"with_keys": True}
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
        if self.weigh:
            loader.update_weights(keys, self.weigh(keys))

    def step(self, images: Tensor, places: Tensor) -> None:
        images = augment({"image": images, "label": places}, torch.default_generator)["image"]
        scores = self.network(functional.avg_pool2d(images, 2))
        self.optimiser.zero_grad()
        functional.cross_entropy(scores, places).backward()  # type: ignore[no-untyped-call]
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


def run_over(source: Path, run: Run, num_views: int, eviction: Any, order: Any = "shuffle") -> list[float]:
    """What a run finds over a cache of a quarter of the views, and how many samples were fetched."""
    torch.set_num_threads(1)
    limit_bytes = OVERHEAD_BYTES + int(SHARE * num_views * SAMPLE_BYTES)
    transform = shrink if source.name == "files" else shrink_view
    options: dict[str, Any] = {"num_workers": 1, "shard_size": "56kB", "order": order, "seed": run.seed}
    with (
        scratch() as folder,
        cs.Cache(folder, limit_bytes, min_free=0, eviction=eviction) as cache,
        cs.start_worker(cache, str(source), transform=transform, **options) as worker,
    ):
        worker.wait(120)
        cached = cache.num_samples
        found = run.train(cache)
        status = cache.status()
    fetched = status.num_samples + status.evicted_samples
    told = f"{cached} of {num_views} cached, {fetched} fetched: {found}"
    print(f"{source.name}, {eviction}, seed {run.seed}: {told}", file=sys.stderr, flush=True)
    return [*found, float(fetched)]


def of_seeds(rows: Mapping[str, Callable[[int], list[float]]], columns: Sequence[str]) -> dict[str, float]:
    """Figures of each row: the means over the seeds of all `columns`, the least and the most of the second one."""
    figures: dict[str, float] = {}
    with ProcessPoolExecutor(SEEDS, get_context("spawn")) as processes:
        for row, measure in rows.items():
            runs = zip(*processes.map(measure, range(SEEDS)), strict=True)
            found = dict(zip(columns, runs, strict=True))
            end = found[columns[1]]
            figures |= {f"{row} / {column}": statistics.mean(values) for column, values in found.items()}
            figures |= {f"{row} / least at the end": min(end), f"{row} / most": max(end)}
    return figures


def inverse_root(counts: IntArray, keys: list[str]) -> Floats:
    """One by the square root of the number of views of its place, for each of `keys`."""
    weights: Floats = counts[[number_of(key) % PLACES for key in keys]] ** -0.5
    return weights


def same_in_all(weights: Floats, _progress: float) -> Floats:
    return weights


def measure(
    sources: Path, counts: IntArray, held_out: tuple[Tensor, Tensor], form: str, arm: str, seed: int
) -> list[float]:
    """Percent right after a half and all of the steps, and how many samples were fetched."""
    eviction, draws, fetches = ARMS[arm]
    source = sources / FORMS[form]
    run = Run(held_out, seed, partial(inverse_root, counts) if draws else None)
    order: Any = "shuffle"
    if fetches:
        units, rng = cs.open_source(str(source)), np.random.default_rng(0)
        keys = [next(iter(units.read(unit, rng)))[0] for unit in range(units.num_units or 0)]
        order = partial(same_in_all, inverse_root(counts, keys))
    return run_over(source, run, int(counts.sum()), eviction, order)


def main() -> None:
    with scratch() as folder:
        counts = make_sources(folder)
        held_out = held_out_of(folder)
        rows = {
            f"{form}: {arm}": partial(measure, folder, counts, held_out, form, arm)
            for form, arm in product(FORMS, ARMS)
        }
        emit(**of_seeds(rows, COLUMNS))


if __name__ == "__main__":
    main()
