"""PyTorch Lightning trains from a loader as it is: growing epochs, validation in between, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cachestream import Cache, EpochLoader
from tests.support.caches import add_shard, numbered
from tests.support.later import Later
from tests.training.conftest import NewCache

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from cachestream.integrations import lightning as integration
    from tests.integrations import lightning_model as models
else:
    pl = Later("lightning.pytorch")
    integration = Later("cachestream.integrations.lightning")
    models = Later("tests.integrations.lightning_model")

pytestmark = [
    pytest.mark.e2e,
    # Lightning's own: how many cores there are, that a progress bar is off, and what torch deprecates.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**settings | options)


def flat(epoch: list[list[int]]) -> list[int]:
    return sorted(n for batch in epoch for n in batch)


def grow(cache: Cache, *after: int) -> Callable[[int], None]:
    """Adds 8 samples after the epochs `after`."""

    def at_epoch_end(epoch: int) -> None:
        if epoch in after:
            add_shard(cache, numbered(1000 + 8 * epoch, 8))

    return at_epoch_end


def test_a_plain_fit_takes_the_whole_of_every_epoch_of_a_growing_cache(
    new_cache: NewCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # no thread that watches the bars
    cache = new_cache(2, 8)

    class Bar(pl.callbacks.TQDMProgressBar):
        totals: list[int]

        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            super().on_train_epoch_start(trainer, *_)
            self.totals = [*getattr(self, "totals", []), int(self.train_progress_bar.total or 0)]

    bar = Bar()
    model = models.Model(grow(cache, 0, 1, 2, 3))
    with EpochLoader(cache, 4, prefetch=1) as loader, EpochLoader(cache, 4) as held_out:
        fitting = trainer(
            tmp_path, max_epochs=5, callbacks=[bar], enable_progress_bar=True, val_check_interval=0.5
        )
        fitting.fit(model, loader, held_out)
    assert [len(epoch) for epoch in model.epochs] == model.bars == bar.totals
    assert model.bars[0] == 4
    assert model.bars[-1] > model.bars[0]
    assert model.bars == sorted(model.bars)
    for epoch in model.epochs:
        assert len(set(flat(epoch))) == len(flat(epoch)) == 4 * len(epoch)
    ends = [sum(model.bars[:n]) for n in range(6)]
    halves = [start + int(0.5 * count) for start, count in zip(ends, model.bars, strict=False)]
    assert set(halves) <= set(model.validated_after)
    assert cache.status().leases == 0


@pytest.mark.parametrize("limit", [3, 0.5])
def test_limit_train_batches_is_heard_in_every_epoch(
    limit: float, new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(2, 8)
    model = models.Model(grow(cache, 0, 1))
    with EpochLoader(cache, 4) as loader:
        trainer(tmp_path, max_epochs=4, limit_train_batches=limit).fit(model, loader)
        assert loader.epoch == 3
    counts = [len(epoch) for epoch in model.epochs]
    assert counts == [3] * 4 if limit == 3 else (counts[0] == 2 and counts[-1] in {3, 4})


@pytest.mark.parametrize(("asked", "count"), [(2, 2), (0.5, 3)])
def test_overfit_batches_gives_the_same_batches_in_every_epoch_and_every_validation(
    asked: float, count: int, new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(3, 8)
    validated: list[list[int]] = []

    class Validated(models.Model):
        def validation_step(self, batch: dict[str, Any], index: int) -> None:
            validated.append(batch["number"].tolist())

    model = Validated(grow(cache, 0, 1, 2))
    with EpochLoader(cache, 4) as loader, EpochLoader(cache, 4, seed=1) as held_out:
        trainer(tmp_path, max_epochs=4, overfit_batches=asked).fit(model, loader, held_out)
    assert [len(epoch) for epoch in model.epochs] == [count] * 4
    assert model.epochs[1:] == model.epochs[:1] * 3
    assert len(validated) == 4 * count
    assert validated == validated[:count] * 4


@pytest.mark.parametrize(
    ("place", "limit"), [("alone", 1.0), ("alone", 0.5), ("before a stream", 1.0), ("after a stream", 1.0)]
)
def test_every_validation_of_a_fit_takes_the_whole_of_a_growing_held_out_split(
    place: str, limit: float, new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(2, 8)
    validated: list[list[int]] = []
    lengths: list[tuple[int, float]] = []
    held: list[set[int]] = []

    class Validating(models.Model):
        def on_validation_epoch_start(self) -> None:
            validated.append([])
            lengths.append((len(held_out), self.trainer.num_val_batches[mine]))

        def validation_step(self, batch: dict[str, Any], index: int, dataloader_idx: int = 0) -> None:
            if dataloader_idx == mine:
                validated[-1] += batch["number"].tolist()

        def on_validation_end(self) -> None:
            with cache.snapshot(split="held-out") as samples:
                held.append({int(samples[n]["number"]) for n in range(len(samples))})
            add_shard(cache, numbered(1000 + 16 * len(held), 16))

    class Stream(torch.utils.data.IterableDataset[int]):
        """Has no length, so that Lightning takes a batch ahead."""

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with (
        EpochLoader(cache, 4, holdout=0.5) as loader,
        EpochLoader(cache, 1, split="held-out", prefetch=1, drop_last=False) as held_out,
    ):
        stream = torch.utils.data.DataLoader(Stream())
        places: dict[str, list[Any]] = {
            "alone": [held_out],
            "before a stream": [held_out, stream],
            "after a stream": [stream, held_out],
        }
        loaders = places[place]
        mine = loaders.index(held_out)
        trainer(tmp_path, max_epochs=4, num_sanity_val_steps=2, limit_val_batches=limit).fit(
            Validating(), loader, loaders
        )
    assert len(validated) == 5
    assert len(validated[0]) == 2  # the sanity check
    for seen, (length, told) in zip(validated[1:], lengths[1:], strict=True):
        assert len(seen) == len(set(seen)) == told == int(limit * length)
    assert lengths[-1] > lengths[0]
    # An epoch is prepared during the one before it.
    assert lengths[-1][0] >= len(held[2])
    if limit == 1.0:
        assert held[2] <= set(validated[-1])


def test_a_data_module_makes_its_loaders_where_training_runs_closes_them_and_goes_on(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache, held_out = new_cache(2, 8), new_cache(1, 8, first=500)
    made: list[EpochLoader] = []

    def train() -> EpochLoader:
        made.append(EpochLoader(cache, 4))
        return made[-1]

    data = integration.CacheDataModule(
        train, val=lambda: EpochLoader(held_out, 3, shuffle=False, drop_last=False)
    )
    model = models.Model()
    for max_epochs in (1, 2):
        trainer(tmp_path, max_epochs=max_epochs).fit(model, datamodule=data)
    assert [flat(epoch) for epoch in model.epochs] == [list(range(16))] * 3
    assert len(made) == 2
    assert made[1].epoch == 3  # the next one
    assert model.validated_after == [4, 8, 12]
    assert cache.status().leases == 0


def test_a_data_module_gives_the_trainer_the_callback_where_there_is_no_entry_point(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(1, 8)
    model = models.Model(grow(cache, 0, 1))
    fitting = trainer(tmp_path, max_epochs=3)
    ours = integration.CacheCallback
    fitting.callbacks = [other for other in fitting.callbacks if not isinstance(other, ours)]  # type: ignore[attr-defined]
    fitting.fit(model, datamodule=integration.CacheDataModule(lambda: EpochLoader(cache, 4)))
    assert sum(isinstance(other, ours) for other in fitting.callbacks) == 1  # type: ignore[attr-defined]
    assert len(model.epochs[-1]) > 2


def test_the_callback_is_in_every_trainer_and_leaves_other_loaders_alone(tmp_path: Path) -> None:
    model = models.Model()
    samples = [{"x": torch.ones(5), "number": n} for n in range(12)]
    fitting = trainer(tmp_path, max_epochs=2)
    assert sum(isinstance(callback, integration.CacheCallback) for callback in fitting.callbacks) == 1  # type: ignore[attr-defined]
    fitting.fit(model, torch.utils.data.DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    assert [flat(epoch) for epoch in model.epochs] == [list(range(12))] * 2


def test_metrics_go_to_the_loggers_of_the_trainer(new_cache: NewCache, tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path, name="log")
    with EpochLoader(new_cache(2, 8), 4) as loader:
        fitting = trainer(tmp_path, max_epochs=2, logger=logger, log_every_n_steps=1)
        fitting.callbacks.append(integration.MetricsCallback(every_n_steps=3))  # type: ignore[attr-defined]
        fitting.fit(models.Model(), loader)
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("cachestream/samples")
    seen = [int(float(cell)) for line in lines[1:] if (cell := line.split(",")[column])]
    assert seen == [12, 16, 24, 32]


def test_the_older_package_of_lightning_has_the_same(new_cache: NewCache, tmp_path: Path) -> None:
    import pytorch_lightning as older

    from cachestream.integrations import pytorch_lightning as its

    cache = new_cache(2, 8)
    lengths: list[float] = []

    class OlderModel(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(5))
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Any], index: int) -> None:
            assert len(batch["number"]) == 4

        def on_train_epoch_end(self) -> None:
            lengths.append(self.trainer.fit_loop.epoch_loop.batch_progress.current.completed)
            add_shard(cache, numbered(1000 + 8 * self.current_epoch, 8))

        def configure_optimizers(self) -> None: ...

    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    fitting = older.Trainer(accelerator="cpu", max_epochs=4, default_root_dir=tmp_path, **quiet)
    data = its.CacheDataModule(lambda: EpochLoader(cache, 4, prefetch=1))
    fitting.fit(OlderModel(), datamodule=data)
    assert any(isinstance(callback, its.CacheCallback) for callback in fitting.callbacks)  # type: ignore[attr-defined]
    assert lengths[0] == 4
    assert lengths[-1] > 4
