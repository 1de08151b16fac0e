"""One run, in a process of its own: `python -m benchmarks.peers.accuracy.train prepare|train MODULE FOLDER …`.

`prepare` writes the views in FOLDER/views to the module's bucket. `train` goes on with a JSON object of the settings: it
trains until the budget is over and prints the held-out accuracy of the weights that it kept on the way. The clock
starts before the loader is made and never stops; accuracy is worked out when the loader's time is over.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.accuracy.views import BATCH, Batches, Feed, Remote, decode, read
from cachestream.demo.train import augment, make_network, normalise

__all__ = ["Outcome", "Settings"]

WIDTH: Final = 16
LEARNING_RATE: Final = 2e-3
MARKS: Final = 60  # times at which the weights are kept
HELD_OUT_BATCH: Final = 256
GRACE_S: Final = 1.0  # after the budget, in which a batch may still come, to no avail


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run. `folder` is empty and its own; `views` holds train and held-out."""

    seed: int
    seconds: float
    option: str
    endpoint_url: str
    key: str
    secret: str
    shards: int
    folder: str
    views: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run: `accuracy` on the held-out views at `times_s`; how much it trained, and waited."""

    times_s: list[float]
    accuracy: list[float]
    samples: int
    waited: float  # share of the budget
    first_batch_s: float


class _Run:
    """The network on its way through the budget."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.network = make_network(WIDTH)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), LEARNING_RATE, weight_decay=0.01)
        self.kept: list[tuple[float, dict[str, Tensor]]] = []
        self.samples, self.first_s = 0, seconds
        self.waited_s = self.asked_s = 0.0

    def train(self, batches: Batches, begun_s: float) -> None:
        """Train until the budget is over; no batch that comes later counts."""
        for images, labels in batches:
            came_s = time.perf_counter() - begun_s
            if came_s >= self.seconds:
                return
            self.waited_s += came_s - self.asked_s
            self.first_s = min(self.first_s, came_s)
            self._step(images, labels)
            self.asked_s = min(time.perf_counter() - begun_s, self.seconds)
            if self.asked_s >= self.seconds * (len(self.kept) + 1) / MARKS:
                self.keep(self.asked_s)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        if images.shape[0] != BATCH:
            raise AssertionError(f"a batch of {images.shape[0]}: all are to train on batches of {BATCH}")
        batch = augment({"image": images, "label": labels}, torch.default_generator)
        loss = functional.cross_entropy(self.network(batch["image"]), batch["label"])
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.samples += BATCH

    def keep(self, at_s: float) -> None:
        """Keep the weights as they are, for each mark that has passed."""
        weights = copy.deepcopy(self.network.state_dict())
        while len(self.kept) < MARKS and at_s >= self.seconds * (len(self.kept) + 1) / MARKS:
            self.kept.append((self.seconds * (len(self.kept) + 1) / MARKS, weights))

    def outcome(self, held_out: Path) -> Outcome:
        self.keep(self.seconds)
        found = [*read(held_out)]
        images = normalise(torch.stack([decode(jpeg) for _, jpeg, _ in found]))
        labels = torch.tensor([place for _, _, place in found])
        return Outcome(
            times_s=[at_s for at_s, _ in self.kept],
            accuracy=[_accuracy(self.network, weights, images, labels) for _, weights in self.kept],
            samples=self.samples,
            waited=(self.waited_s + self.seconds - self.asked_s) / self.seconds,
            first_batch_s=self.first_s,
        )


@torch.inference_mode()
def _accuracy(network: nn.Module, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> float:
    network.load_state_dict(weights)
    network.eval()
    cuts = range(0, len(labels), HELD_OUT_BATCH)
    parts = ((images[i : i + HELD_OUT_BATCH], labels[i : i + HELD_OUT_BATCH]) for i in cuts)
    return sum(int((network(part).argmax(1) == label).sum()) for part, label in parts) / len(labels)


class _OverError(Exception):
    """The budget is over, and the loader has not answered."""


def _end(*_: object) -> None:
    raise _OverError


def _train(feed: Feed, settings: Settings) -> Outcome:
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    run = _Run(settings.seconds)
    remote = Remote(
        settings.endpoint_url, settings.key, settings.secret, settings.shards, Path(settings.folder)
    )
    begun_s = time.perf_counter()
    feeding = feed.batches(remote, settings.seed, settings.option)
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, settings.seconds + GRACE_S)
    with contextlib.suppress(_OverError):  # no batch came any more
        run.train(feeding, begun_s)
    signal.setitimer(signal.ITIMER_REAL, 0)
    feeding.close()
    return run.outcome(Path(settings.views, "held-out"))


def main() -> None:
    warnings.simplefilter("ignore")  # the peers' own
    logging.disable(logging.WARNING)
    task, module, *rest = sys.argv[1:]
    feed = cast("Feed", import_module(f"benchmarks.peers.accuracy.{module}"))
    if task == "prepare":
        views_at, root = map(Path, rest)
        bucket = root / feed.BUCKET
        bucket.mkdir(parents=True, exist_ok=True)
        feed.prepare(views_at / "train", bucket)
        return
    told: dict[str, Any] = json.loads(rest[0])
    outcome = _train(feed, Settings(**told))
    print(json.dumps(asdict(outcome)), flush=True)
    os._exit(0)  # some loaders' processes hold up an ordinary end


if __name__ == "__main__":
    main()
