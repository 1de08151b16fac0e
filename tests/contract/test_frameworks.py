"""Frameworks that train from a loader: a resumed fit is the uninterrupted one, and what they report is true."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cachestream as cs
from tests.support.later import Later

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import transformers

    from cachestream.integrations import lightning as lightning_integration
    from cachestream.integrations import transformers as transformers_integration
    from tests.integrations import lightning_model as models
else:
    pl, transformers = Later("lightning.pytorch"), Later("transformers")
    lightning_integration = Later("cachestream.integrations.lightning")
    transformers_integration = Later("cachestream.integrations.transformers")
    models = Later("tests.integrations.lightning_model")

pytestmark = [
    pytest.mark.e2e,
    # Lightning's own: how many cores there are, that a progress bar is off, and what torch deprecates.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BATCHES = 7  # of 4 samples, in an epoch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cs.Cache]:
    samples = [{"x": np.full(5, n, np.float32), "number": n} for n in range(4 * BATCHES)]
    with cs.Cache(tmp_path_factory.mktemp("frameworks") / "cache", "20MB", min_free=0) as cache:
        with cs.start_worker(cache, samples, num_workers=1) as worker:
            worker.wait(timeout_s=60)
        yield cache


def lightning_trainer(folder: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(options.get("callbacks")),
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**settings | options)


def every_save(folder: Path) -> list[Any]:
    """Callbacks that save after each step, after each validation, and at the end of each epoch."""
    saver = pl.callbacks.ModelCheckpoint
    return [
        saver(folder / "step", save_top_k=-1, filename="{step}", every_n_train_steps=1),
        saver(
            folder / "validation", save_top_k=-1, filename="{step}", save_on_train_epoch_end=False, mode="max"
        ),
        saver(folder / "epoch", save_top_k=-1, filename="{step}", save_on_train_epoch_end=True),
    ]


def lightning_fit(cache: cs.Cache, trainer: pl.Trainer, saved: Path | None = None) -> list[list[int]]:
    """The batches of a fit, from the beginning or from a checkpoint."""
    model = models.Model()
    validation: Any = torch.utils.data.DataLoader([{"x": torch.zeros(5)}] * 2)  # type: ignore[arg-type]
    with cs.EpochLoader(cache, 4, seed=3) as loader:
        trainer.fit(model, loader, validation, ckpt_path=saved)
    return [batch for epoch in model.epochs for batch in epoch]


VALIDATIONS: dict[str, dict[str, Any]] = {
    "never": {"limit_val_batches": 0},
    "each epoch": {},
    "twice": {"val_check_interval": 0.5},
    "every 2": {"val_check_interval": 2},
    "every 5 of all": {"val_check_interval": 5, "check_val_every_n_epoch": None},
}


@pytest.mark.parametrize(
    ("limit", "steps", "validates", "until"),
    [(limit, steps, validates, "max_epochs") for limit, steps in ((3, 3), (0.6, 4)) for validates in VALIDATIONS]
    + [(3, 3, "never", "max_steps"), (3, 3, "twice", "max_steps")]
    + [(1.0, BATCHES, "never", "max_steps"), (1.0, BATCHES, "twice", "max_epochs")],
)  # fmt: skip
def test_a_lightning_fit_resumed_from_any_checkpoint_gives_the_batches_of_the_uninterrupted_fit(
    limit: float, steps: int, validates: str, until: str, cache: cs.Cache, tmp_path: Path
) -> None:
    validate = VALIDATIONS[validates]
    length = {"max_epochs": 2} if until == "max_epochs" else {"max_steps": 2 * steps, "max_epochs": -1}
    options: dict[str, Any] = {"limit_train_batches": limit, **length, **validate}
    whole = lightning_fit(
        cache, lightning_trainer(tmp_path, callbacks=every_save(tmp_path / "saved"), **options)
    )
    assert len(whole) == 2 * steps
    saved = list((tmp_path / "saved").rglob("*.ckpt"))
    kinds = {"step", "epoch"} | (set() if validates == "never" else {"validation"})
    assert {file.parent.name for file in saved} == kinds
    wrong = [
        f"{file.parent.name} {file.name}"
        for file in saved
        if lightning_fit(cache, lightning_trainer(tmp_path, **options), file)
        != whole[int(file.stem.removeprefix("step=")) :]
    ]
    assert not wrong


@pytest.mark.parametrize("limit", [1.0, 5])
def test_a_lightning_fit_with_more_steps_goes_on_in_the_epoch_that_max_steps_cut_off(
    limit: float, cache: cs.Cache, tmp_path: Path
) -> None:
    def steps(number: int, **options: Any) -> pl.Trainer:
        return lightning_trainer(
            tmp_path, max_steps=number, max_epochs=-1, limit_train_batches=limit, **options
        )

    whole = lightning_fit(cache, steps(12))
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="cut", save_on_train_epoch_end=True)
    assert lightning_fit(cache, steps(3, callbacks=[saver])) == whole[:3]
    assert lightning_fit(cache, steps(12), tmp_path / "cut.ckpt") == whole[3:]


def test_a_lightning_fit_that_skips_the_rest_of_an_epoch_is_resumed_with_the_next_one(
    cache: cs.Cache, tmp_path: Path
) -> None:
    class Skipping(models.Model):
        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if index == 3 else None

    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    whole, rest = Skipping(), Skipping()
    with cs.EpochLoader(cache, 4) as loader:
        lightning_trainer(tmp_path, max_epochs=3, callbacks=[saver]).fit(whole, loader)
    with cs.EpochLoader(cache, 4) as loader:
        lightning_trainer(tmp_path, max_epochs=3).fit(rest, loader, ckpt_path=tmp_path / "step=6.ckpt")
    assert rest.epochs == whole.epochs[2:]


def test_a_lightning_fit_begins_with_the_rest_of_the_epoch_of_a_loader_that_was_resumed_before(
    cache: cs.Cache, tmp_path: Path
) -> None:
    model = models.Model()
    with cs.EpochLoader(cache, 4) as loader:
        whole = [batch["number"].tolist() for _ in range(2) for batch in loader]
    with cs.EpochLoader(cache, 4) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        state = loader.state_dict()
    with cs.EpochLoader(cache, 4) as loader:
        loader.load_state_dict(state)
        lightning_trainer(tmp_path, max_epochs=2).fit(model, loader)
    assert model.epochs == [whole[2:BATCHES], whole[BATCHES:]]


def test_a_data_module_of_limited_epochs_goes_on_with_the_next_epoch_in_a_later_fit(
    cache: cs.Cache, tmp_path: Path
) -> None:
    def make() -> cs.EpochLoader:
        return cs.EpochLoader(cache, 4)

    whole, parts = models.Model(), models.Model()
    lightning_trainer(tmp_path, max_epochs=2, limit_train_batches=3).fit(
        whole, datamodule=lightning_integration.CacheDataModule(make)
    )
    data = lightning_integration.CacheDataModule(make)
    for _ in range(2):
        lightning_trainer(tmp_path, max_epochs=1, limit_train_batches=3).fit(parts, datamodule=data)
    assert parts.epochs == whole.epochs


def scheduled_model(kind: str) -> Any:
    """A model whose schedule has as many steps as Lightning expects."""

    class Scheduled(models.Model):
        def configure_optimizers(self) -> Any:
            optimiser = torch.optim.SGD(self.parameters(), lr=1e-6)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-6, total_steps=steps)
            if kind == "CosineAnnealingLR":
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
            return [optimiser], [{"scheduler": schedule, "interval": "step"}]

    return Scheduled()


@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR"])
def test_a_schedule_of_steps_from_the_first_epoch_of_a_cache_that_is_still_filling_is_warned_of(
    kind: str, tmp_path: Path
) -> None:
    with cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache:
        worker = cs.start_worker(cache, _endless, num_workers=1, shard_size="10kB")
        with worker, cs.EpochLoader(cache, 4, min_samples=64) as growing:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                lightning_trainer(tmp_path, max_epochs=1).fit(scheduled_model(kind), growing)
            (words,) = [str(one.message) for one in told if f"{kind} ends after" in str(one.message)]
            assert "give the EpochLoader an epoch_size" in words
            with cs.EpochLoader(cache, 4, epoch_size=32) as fixed, warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*ends after")
                lightning_trainer(tmp_path, max_epochs=1).fit(scheduled_model(kind), fixed)
                lightning_trainer(tmp_path, max_steps=3).fit(scheduled_model(kind), growing)


def _endless(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(5, np.float32), "number": int(rng.integers(1 << 40))}


class _Counting(torch.nn.Module):
    """Counts the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)
        self.trained = 0

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self.trained += len(number)
        return {"loss": self.layer(x).mean()}


@pytest.mark.parametrize("length", [{"num_train_epochs": 2}, {"max_steps": 7}])
def test_the_trainer_of_hugging_face_reports_the_samples_that_it_was_trained_on(
    length: dict[str, Any], cache: cs.Cache, tmp_path: Path
) -> None:
    settings = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **length
    )
    model = _Counting()
    with cs.EpochLoader(cache, 4, epoch_size=16) as loader:
        trainer = transformers_integration.CacheTrainer(model, settings, train_loader=loader)
        metrics = trainer.train().metrics
    told = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert told == pytest.approx(model.trained, rel=0.02)


def test_a_batch_size_that_is_not_the_loaders_is_refused_by_the_trainer_of_hugging_face(
    cache: cs.Cache, tmp_path: Path
) -> None:
    def make(size: int) -> Any:
        settings = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=size
        )
        return transformers_integration.CacheTrainer(_Counting(), settings, train_loader=loader)

    with cs.EpochLoader(cache, 4) as loader:
        with pytest.raises(cs.ConfigError, match=r"per_device_train_batch_size=16 .* batches of 4"):
            make(16)
        assert make(4).args.per_device_train_batch_size == 4
        assert make(8).args.per_device_train_batch_size == 4  # the default of transformers
