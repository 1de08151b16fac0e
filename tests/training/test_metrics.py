"""`cs.metrics`: a flat dict of numbers that is true, and that loggers take."""

from __future__ import annotations

from pathlib import Path

import pytest

import cachestream as cs
from tests.training.conftest import NewCache


@pytest.mark.e2e
def test_the_metrics_of_a_cache_alone_tell_of_its_worker(tmp_path: Path) -> None:
    cache = cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0)
    with cs.start_worker(cache, [{"x": float(i)} for i in range(50)], num_workers=1) as worker:
        worker.wait(timeout_s=180)
        found = cs.metrics(cache=cache, prefix="train_")
        assert found["train_cache_samples"] == 50
        assert found["train_fill_pass"] == 1
        assert found["train_fill_pass_done"] == 1
    assert not any("batches" in name for name in found)
    cache.close()


@pytest.mark.parametrize("arguments", [(), ("a cache",)])
def test_metrics_of_nothing_or_of_something_else_say_what_to_give(arguments: tuple[str, ...]) -> None:
    with pytest.raises(cs.ConfigError, match=r"EpochLoader|a loader"):
        cs.metrics(*arguments)  # type: ignore[arg-type]


@pytest.mark.e2e
def test_tensorboard_takes_the_metrics_as_scalars(new_cache: NewCache, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    logged = []
    with cs.EpochLoader(new_cache(2, 8), 4) as loader, SummaryWriter(tmp_path / "log") as writer:
        for epoch in range(3):
            for _ in loader:
                pass
            logged.append(cs.metrics(loader))
            for name, value in logged[-1].items():
                writer.add_scalar(name, value, epoch)
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    assert set(events.Tags()["scalars"]) == set(logged[0])
    for name in logged[0]:
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert told == [(epoch, pytest.approx(found[name])) for epoch, found in enumerate(logged)]
