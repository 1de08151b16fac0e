"""Wrong labels, and weights by small loss: `python -m benchmarks.wrong_labels`.

The network, the cache and the slow remote of `benchmarks.importance`, over equally many views of all places, some of which have the
label of another place. Single views are wrong, in files in random order and shards of eight; or all views of a tar, each of which
has 24 views of 24 places. A view is suspect if the network gives its label less than a third of the probability that it gives to
the labels of an epoch on average. Five ways: drawn uniformly with "lru"; drawn by weights, a tenth for what is suspect; drawn by
them with "least-weight"; and drawn uniformly with a function for `eviction=`, which evicts the shards of the least mean probability
first, or those that are suspect, and the rest as "lru" does. Beside these, uniformly over right labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

import cachestream as cs
from benchmarks.importance import (
    COLUMNS,
    Floats,
    Run,
    held_out_of,
    number_of,
    of_seeds,
    run_over,
    write_tars,
)
from benchmarks.measure import emit, scratch
from cachestream.demo.data import PLACES, TRAIN, make_remote
from cachestream.schema import IntArray, ShardRow

VIEWS: Final = 24 * PLACES
OF_TAR: Final = 24
SUSPECT: Final = 1 / 3  # of the mean probability
LEAST: Final = 0.1  # the weight of what is suspect
ARMS: Final = {  # the eviction, and whether weights draw
    "uniform, all labels right": ("lru", False),
    "uniform": ("lru", False),
    "drawn by weight": ("lru", True),
    "and evicted by weight": ("least-weight", True),
    "uniform, least probable evicted first": ("least probable", False),
    "uniform, suspect evicted first": ("suspect", False),
}
FORMS: Final = {  # the source, the share that is wrong, and how many neighbours are wrong together
    "a fifth of the views wrong": ("files", 0.2, 1),
    "a fifth of the tars wrong": ("tars", 0.2, OF_TAR),
    "two fifths of the tars wrong": ("tars", 0.4, OF_TAR),
}


def make_sources(folder: Path) -> None:
    """Write `folder`/files and `folder`/tars, of neighbours by number, and what is held out."""
    make_remote(folder / "views", VIEWS, 10 * PLACES)
    (folder / "files").symlink_to(folder / "views" / TRAIN)
    tars: dict[str, list[Path]] = {}
    for path in (folder / "files").glob("*/*.jpg"):
        tars.setdefault(f"{int(path.stem) // OF_TAR:03}", []).append(path)
    write_tars(tars, folder / "tars")


def make_labels(seed: int, share: float, together: int) -> IntArray:
    """The labels by the numbers of views, a `share` of them wrong."""
    rng, right = np.random.default_rng(seed), np.arange(VIEWS) % PLACES
    is_wrong = np.repeat(rng.permutation(VIEWS // together) < share * (VIEWS // together), together)
    return (right + is_wrong * rng.integers(1, PLACES, VIEWS)) % PLACES


def by_small_loss(_keys: Sequence[str], losses: Floats) -> Floats:
    probabilities = np.exp(-losses)
    return np.where(probabilities < SUSPECT * probabilities.mean(), LEAST, 1.0)


class ByProbability:
    """A function for `eviction=`: the shards of the least mean probability first, or those that are `suspect`."""

    def __init__(self, *, suspect: bool) -> None:
        self.suspect = suspect
        self.keys: dict[int, list[str]] = {}  # of each shard
        self.probabilities: dict[str, float] = {}

    def __call__(self, rows: Sequence[ShardRow]) -> list[ShardRow]:
        mean = float(np.mean([*self.probabilities.values()])) if self.probabilities else 1.0

        def place(row: ShardRow) -> tuple[float, int, int]:
            found = [self.probabilities.get(key, mean) for key in self.keys.get(row.id, [])]
            probability = float(np.mean(found)) if found else mean
            return (probability >= SUSPECT * mean if self.suspect else probability, row.last_used, row.id)

        return sorted(rows, key=place)


class WrongRun(Run):
    """A run that tells a policy of its losses, and counts the wrong labels of its last epoch."""

    policy: ByProbability | None = None
    wrong_percent: float = 0.0

    def begin(self, loader: cs.EpochLoader) -> None:
        keys, snapshot = loader.dataset.keys(), loader.dataset.snapshot
        numbers = np.array([number_of(key) for key in keys])
        self.wrong_percent = 100 * float(np.mean(self.labels[numbers] != numbers % PLACES))
        if self.policy is not None:
            ends = np.cumsum(snapshot.counts).tolist()
            for shard_id, start, stop in zip(snapshot.shard_ids.tolist(), [0, *ends], ends, strict=False):
                self.policy.keys[shard_id] = keys[start:stop]
        super().begin(loader)

    def end(self, loader: cs.EpochLoader, keys: list[str], losses: Floats) -> None:
        super().end(loader, keys, losses)
        if self.policy is not None:
            self.policy.probabilities.update(zip(keys, np.exp(-losses).tolist(), strict=True))


def measure(folder: Path, held_out: tuple[Tensor, Tensor], form: str, arm: str, seed: int) -> list[float]:
    """Percent right after a half and all of the steps, samples fetched, and percent wrong in the last epoch."""
    (source, share, together), (eviction, draws) = FORMS[form], ARMS[arm]
    labels = make_labels(seed, 0 if arm.endswith("right") else share, together)
    run = WrongRun(labels, held_out, seed, by_small_loss if draws else None)
    policy: Any = eviction
    if eviction not in ("lru", "least-weight"):
        policy = run.policy = ByProbability(suspect=eviction == "suspect")
    found = run_over(folder / source, run, VIEWS, policy)
    return [*found, run.wrong_percent]


def main() -> None:
    with scratch() as folder:
        make_sources(folder)
        held_out = held_out_of(folder)
        rows = {
            f"{form}: {arm}": partial(measure, folder, held_out, form, arm)
            for form, arm in product(FORMS, ARMS)
        }
        emit(**of_seeds(rows, (*COLUMNS, "wrong in the last epoch, %")))


if __name__ == "__main__":
    main()
