"""The training that each rank of the demo runs: `torchrun --nproc-per-node 2 -m cachestream.demo.train SETTINGS`.

All ranks do the same; cachestream sees to it that one worker runs, and that they agree on every epoch.
The first rank reports on stdout, a line an event.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import cachestream as cs
from cachestream.demo.data import SIDE, shrink
from cachestream.demo.messages import Begun, EpochDone, EpochProgress, Event, Failed, Settings, encode
from cachestream.demo.network import augment, make_network, normalise

_PROGRESS_S: Final = 0.2
_MEASURED_STEPS: Final = 36
_WARM_UP_STEPS: Final = 6
_FEWEST_STEPS: Final = 10
_LEARNING_RATE: Final = 4e-3


def main(arguments: list[str]) -> None:
    settings = Settings.from_json(arguments[0])
    device, backend = _hardware(settings.ranks)
    dist.init_process_group(backend)
    try:
        _Rank(settings, device, backend).run()
    except Exception as error:
        _write(Failed(dist.get_rank(), f"{type(error).__name__}: {error}"))
        raise
    finally:
        dist.destroy_process_group()


def _hardware(ranks: int) -> tuple[torch.device, str]:
    """A GPU for each rank and NCCL; with fewer GPUs gloo, on a shared one or on the CPU."""
    gpus = torch.cuda.device_count()
    torch.set_num_threads(max(1, min(4, len(os.sched_getaffinity(0)) // ranks)))
    if not gpus:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", dist.get_node_local_rank() % gpus)
    torch.cuda.set_device(device)
    return device, "nccl" if gpus >= ranks else "gloo"


def _say(event: Event) -> None:
    if dist.get_rank() == 0:
        _write(event)


def _write(event: Event) -> None:
    sys.stdout.write(encode(event) + "\n")
    sys.stdout.flush()


@dataclass(slots=True)
class _Trainer:
    """The network, its copies on all ranks kept equal, and its optimiser."""

    network: nn.Module
    model: nn.Module
    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def new(cls, device: torch.device, total_steps: int) -> _Trainer:
        torch.manual_seed(0)
        network = make_network().to(device)
        model = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
        optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, _LEARNING_RATE, total_steps=total_steps + 1, pct_start=0.1
        )
        return cls(network, model, optimiser, schedule)

    def step(self, images: Tensor, labels: Tensor) -> None:
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.schedule.step()


class _Rank:
    """One rank's part of the demo."""

    def __init__(self, settings: Settings, device: torch.device, backend: str) -> None:
        self.settings = settings
        self.device = device
        self.backend = backend
        self.cache = cs.Cache(settings.cache)

    def run(self) -> None:
        settings = self.settings
        held_out = self._held_out()
        speed = self._measure()
        epoch_size = self._epoch_size(speed)
        _say(Begun(str(self.device), self.backend, speed, epoch_size))
        steps = epoch_size // (settings.batch_size * settings.ranks)
        trainer = _Trainer.new(self.device, settings.epochs * steps)
        with (
            cs.start_worker(
                self.cache,
                settings.remote,
                num_workers=2,
                transform=shrink,
                shard_size=settings.shard_bytes,
                bandwidth_limit=settings.bandwidth_bytes_per_s,
            ),
            cs.EpochLoader(
                self.cache,
                settings.batch_size,
                epoch_size=epoch_size,
                min_samples=settings.min_samples,
                batch_transform=augment,
                device=self.device,
            ) as loader,
        ):
            for _ in range(settings.epochs):
                self._epoch(loader, trainer, held_out)

    def _measure(self) -> float:
        """Samples a second that all ranks train on when no data has to be waited for."""
        batch_size = self.settings.batch_size
        trainer = _Trainer.new(self.device, _MEASURED_STEPS)
        images = torch.randn(batch_size, 3, SIDE, SIDE, device=self.device)
        labels = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        steps, began_s = 0, time.perf_counter()
        for step in range(_MEASURED_STEPS):
            if step == _WARM_UP_STEPS:
                self._finish_work()
                steps, began_s = 0, time.perf_counter()
            trainer.step(images, labels)
            steps += 1
        self._finish_work()
        return self._sum(steps * batch_size / (time.perf_counter() - began_s))

    def _epoch_size(self, samples_per_s: float) -> int:
        """As many samples as take about `epoch_s`: epochs of one length, on slow machines and fast ones."""
        at_once = self.settings.batch_size * self.settings.ranks
        return at_once * max(_FEWEST_STEPS, round(samples_per_s * self.settings.epoch_s / at_once))

    def _epoch(self, loader: cs.EpochLoader, trainer: _Trainer, held_out: tuple[Tensor, Tensor]) -> None:
        before = loader.stats
        began_s = told_s = time.perf_counter()
        drawn_from: dict[int, int] = {}  # shard → samples
        for done, batch in enumerate(loader, 1):
            snapshot = loader.dataset.snapshot  # a new one for every pass over the cache
            drawn_from.update(zip(snapshot.shard_ids.tolist(), snapshot.counts.tolist(), strict=True))
            trainer.step(batch["image"], batch["label"])
            if time.perf_counter() - told_s > _PROGRESS_S:
                told_s = time.perf_counter()
                _say(EpochProgress(loader.epoch + 1, done, len(loader)))
        self._finish_work()
        seconds, after = time.perf_counter() - began_s, loader.stats
        self._check_agreement(after.epoch, after.batches, drawn_from)
        _say(
            EpochDone(
                epoch=after.epoch + 1,
                samples=int(self._sum(after.samples - before.samples)),
                cached=sum(drawn_from.values()),
                seen=self._seen(),
                reuse=after.reuse_factor,
                seconds=seconds,
                wait=(after.wait_s - before.wait_s) / seconds,
                gap_s=after.gap_s,
                accuracy=self._accuracy(trainer.network, *held_out),
                time_s=time.time(),
            )
        )

    def _check_agreement(self, epoch: int, batches: int, drawn_from: dict[int, int]) -> None:
        """Raise RankMismatchError unless all ranks were on the same epoch, over the same shards, for as long."""
        everyone: list[Any] = [None] * self.settings.ranks
        dist.all_gather_object(everyone, (epoch, batches, drawn_from))
        if any(other != everyone[0] for other in everyone):
            raise cs.RankMismatchError(f"the ranks trained on different epochs: {everyone}")

    def _seen(self) -> float:
        status = self.cache.status()
        return 1.0 if status.pass_number > 1 else status.pass_done or 0.0

    def _held_out(self) -> tuple[Tensor, Tensor]:
        """The rank's share of the held-out views: float32 `[N, 3, SIDE, SIDE]` and int64 `[N]`."""
        source = cs.open_source(self.settings.held_out)
        rng = np.random.default_rng(0)
        mine = range(dist.get_rank(), source.num_units or 0, self.settings.ranks)
        views = [shrink(sample) for unit in mine for _, sample in source.read(unit, rng)]
        images = torch.from_numpy(np.stack([view["image"] for view in views]))
        labels = torch.tensor([view["label"] for view in views])
        return normalise(images).to(self.device), labels.to(self.device)

    @torch.inference_mode()
    def _accuracy(self, network: nn.Module, images: Tensor, labels: Tensor) -> float:
        network.eval()
        right = (network(images).argmax(1) == labels).sum().item()
        network.train()
        return self._sum(right) / self._sum(len(labels))

    def _sum(self, number: float) -> float:
        """The sum of what all ranks give."""
        total = torch.tensor(float(number), device=self.device)
        dist.all_reduce(total)
        return float(total)

    def _finish_work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


if __name__ == "__main__":
    main(sys.argv[1:])
