"""Random transforms of batches: the same draws in every run; the trainer's own generators stay untouched."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from cachestream import Cache, EpochLoader
from tests.training.conftest import NewCache


def noisy(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """A transform as in the guide."""
    return batch | {"noise": torch.rand(4, generator=generator)}


def noise_of(batches: Any) -> list[list[float]]:
    return [batch["noise"].tolist() for batch in batches]


def states() -> tuple[bytes, str, object]:
    """The states of the trainer's generators."""
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state()), random.getstate()  # noqa: NPY002


def run(cache: Cache, epochs: int = 2, **options: Any) -> tuple[list[list[float]], list[list[float]]]:
    """The draws of a run's batches, and of a trainer's dropout."""
    torch.manual_seed(0)
    dropout, drawn, dropped = torch.nn.Dropout(0.5), [], []
    with EpochLoader(cache, 4, batch_transform=noisy, **options) as loader:
        for _ in range(epochs):
            for batch in loader:
                drawn += noise_of([batch])
                dropped.append(dropout(torch.ones(8)).tolist())
    return drawn, dropped


@pytest.mark.e2e
def test_the_draws_do_not_depend_on_the_thread(new_cache: NewCache) -> None:
    threads: set[str] = set()
    met = threading.Barrier(2)

    def waiting(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        try:
            met.wait(0.05)  # so that each of the two threads transforms some
        except threading.BrokenBarrierError:
            met.reset()
        return noisy(batch, generator)

    cache = new_cache(4, 10)
    with EpochLoader(cache, 4, batch_transform=noisy) as loader:
        expected = noise_of(loader)
    with EpochLoader(cache, 4, batch_transform=waiting) as loader:
        assert noise_of(loader) == expected
    assert threads <= {"cachestream-gather_0", "cachestream-gather_1"}


@pytest.mark.usefixtures("cuda")
def test_the_generator_is_on_the_batches_device(new_cache: NewCache) -> None:
    def on_device(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        assert generator.device == batch["x"].device
        return batch | {"noise": torch.rand(4, device=generator.device, generator=generator)}

    def drawn() -> list[list[float]]:
        with EpochLoader(cache, 4, device="cuda", batch_transform=on_device) as loader:
            assert loader.peek()["noise"].is_cuda
            return noise_of(loader)

    cache, before = new_cache(4, 10), torch.cuda.get_rng_state()
    assert drawn() == drawn()
    assert torch.equal(torch.cuda.get_rng_state(), before)
