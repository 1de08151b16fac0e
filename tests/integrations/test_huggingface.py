"""Accelerate and the Hugging Face Trainer take a loader as it is: not split again, epochs and lengths right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cachestream import ConfigError, EpochLoader, metrics
from cachestream.integrations.accelerate import prepare_loader
from cachestream.storage.locks import lock_file
from tests.support.caches import add_shard, numbered, set_fill_state
from tests.support.later import Later
from tests.training.conftest import NewCache

pytestmark = pytest.mark.e2e

if TYPE_CHECKING:
    import accelerate
    import transformers

    from cachestream.integrations import transformers as integration
else:
    accelerate, transformers = Later("accelerate"), Later("transformers")
    integration = Later("cachestream.integrations.transformers")


@pytest.fixture(autouse=True)
def _accelerate_begins_anew() -> Iterator[None]:
    """It keeps what it knows in class attributes."""
    yield
    states = accelerate.state
    for state in (states.AcceleratorState, states.GradientState, states.PartialState):
        state._reset_state()


def test_prepare_leaves_a_loader_alone_with_its_length_and_its_epochs(new_cache: NewCache) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with EpochLoader(new_cache(2, 8), 4) as loader:
        assert accelerator.prepare(loader) is loader
        mine = prepare_loader(accelerator, loader)
        assert accelerator.prepare(mine) is mine
        for epoch in range(3):
            assert (len(mine), mine.epoch) == (4, epoch)
            seen = sorted(n for batch in mine for n in batch["number"].tolist())
            assert seen == list(range(16))
        assert metrics(mine)["cachestream/batches"] == 12


def test_gradients_are_taken_at_the_end_of_every_epoch_and_gather_leaves_nothing_out(
    new_cache: NewCache,
) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(5, 1)
    with EpochLoader(new_cache(2, 9), 4, drop_last=False) as loader:
        model, optimiser, batches = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-6), prepare_loader(accelerator, loader)
        )
        stepped, gathered = [], []
        for _ in range(2):
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"]).mean())
                    optimiser.step()
                    optimiser.zero_grad()
                stepped.append(accelerator.sync_gradients)
                gathered += accelerator.gather_for_metrics(batch["number"]).tolist()
    assert stepped == [False, False, True, False, True] * 2
    assert sorted(gathered) == sorted(2 * list(range(18)))


def test_a_state_saved_by_accelerate_goes_on_at_the_exact_next_batch(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(3, 8)
    accelerator = accelerate.Accelerator(cpu=True)
    with EpochLoader(cache, 4) as loader:
        mine = prepare_loader(accelerator, loader)
        steps = [batch["number"].tolist() for batch in mine]
        for number, batch in enumerate(mine):
            steps.append(batch["number"].tolist())
            if number == 2:
                accelerator.save_state(str(tmp_path / "saved"))
    again = accelerate.Accelerator(cpu=True)
    with EpochLoader(cache, 4) as loader:
        resumed = prepare_loader(again, loader)
        again.load_state(str(tmp_path / "saved"))
        assert [batch["number"].tolist() for batch in resumed] == steps[6 + 3 :]
        assert loader.epoch == 2


def test_what_would_skip_or_split_batches_behind_the_loader_is_refused_in_a_sentence(
    new_cache: NewCache,
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with EpochLoader(new_cache(2, 8), 4) as loader:
        for batches in (loader, prepare_loader(accelerator, loader)):
            with pytest.raises(AttributeError, match=r"skip_first_batches\).* load_state_dict\(\) go on at"):
                accelerator.skip_first_batches(batches, 2)
            assert not hasattr(batches, "sampler")
        splitting = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True)
        )
        with pytest.raises(ConfigError, match="split_batches and dispatch_batches would have no effect"):
            prepare_loader(splitting, loader)


class Model(torch.nn.Module):
    """Notes the numbers of the samples it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)
        self.steps: list[list[int]] = []

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.steps.append(number.tolist())
        return {"loss": self.layer(x).mean()}


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-6,
        "num_train_epochs": 3,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return transformers.TrainingArguments(**settings | options)


def test_the_trainer_takes_whole_epochs_of_one_length_from_a_growing_cache(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(2, 8)
    model = Model()
    with EpochLoader(cache, 4, epoch_size=24, prefetch=1) as loader:
        trainer = integration.CacheTrainer(model, arguments(tmp_path), train_loader=loader)
        trainer.callback_handler.on_epoch_end = _then(
            trainer.callback_handler.on_epoch_end, lambda: add_shard(cache, numbered(1000, 8))
        )
        trainer.train()
        assert trainer.state.global_step == trainer.state.max_steps == 18
        assert loader.epoch == 2
        assert loader.stats.batches == 18
    assert len({n for step in model.steps[12:] for n in step}) == 24
    assert trainer.state.epoch == 3


def test_arguments_of_the_trainer_that_it_cannot_hear_are_refused(
    new_cache: NewCache, tmp_path: Path
) -> None:
    with EpochLoader(new_cache(2, 8), 4) as loader:
        for options, told in (
            ({"train_sampling_strategy": "group_by_length"}, "'group_by_length' .* would have no effect"),
            ({"auto_find_batch_size": True}, "auto_find_batch_size would have no effect"),
        ):
            with pytest.raises(ConfigError, match=told):
                integration.CacheTrainer(Model(), arguments(tmp_path, **options), train_loader=loader)
        with pytest.raises(ConfigError, match="give one of them"):
            integration.CacheTrainer(Model(), arguments(tmp_path), train_loader=loader, train_dataset=[1])


def _then(first: Any, second: Any) -> Any:
    def both(*given: Any) -> Any:
        second()
        return first(*given)

    return both


def test_a_resumed_trainer_goes_on_at_the_exact_next_batch(new_cache: NewCache, tmp_path: Path) -> None:
    cache = new_cache(3, 8)
    whole, rest = Model(), Model()
    saving = arguments(tmp_path, save_strategy="steps", save_steps=8)
    with EpochLoader(cache, 4, epoch_size=24) as loader:
        integration.CacheTrainer(whole, saving, train_loader=loader).train()
    with EpochLoader(cache, 4, epoch_size=24) as loader:
        trainer = integration.CacheTrainer(rest, arguments(tmp_path), train_loader=loader)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
        assert trainer.state.global_step == 18
    assert len(whole.steps) == 18
    assert rest.steps == whole.steps[8:]
    (tmp_path / "checkpoint-8" / "cachestream.json").unlink()
    with EpochLoader(cache, 4, epoch_size=24) as loader:
        trainer = integration.CacheTrainer(Model(), arguments(tmp_path), train_loader=loader)
        with pytest.raises(ConfigError, match="saved without cachestream's CacheCallback"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


@pytest.mark.parametrize(("before", "after", "step"), [(8, 4, 9), (4, 8, 14)])
def test_a_trainer_resumed_with_another_batch_size_goes_on_with_the_rest_of_the_epoch(
    before: int, after: int, step: int, new_cache: NewCache, tmp_path: Path
) -> None:
    """The Trainer counts epochs in steps of the new length, and would begin epoch 0, or 2, in place of 1."""
    cache = new_cache(6, 8)
    whole, rest = Model(), Model()
    saving = arguments(tmp_path, save_strategy="steps", save_steps=step)
    with EpochLoader(cache, before, epoch_size=48) as loader:
        integration.CacheTrainer(whole, saving, train_loader=loader).train()
    with EpochLoader(cache, after, epoch_size=48) as loader:
        trainer = integration.CacheTrainer(rest, arguments(tmp_path), train_loader=loader)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    expected = [n for batch in whole.steps[step:] for n in batch]
    seen = [n for batch in rest.steps for n in batch]
    assert len(seen) >= 32
    assert seen[: len(expected)] == expected[: len(seen)]


def test_the_trainer_warns_when_growing_epochs_have_no_fixed_size(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        trainer = integration.CacheTrainer(Model(), arguments(tmp_path, max_steps=2), train_loader=loader)
        told = integration.CacheCallback(loader)
        told.on_train_begin(trainer.args, trainer.state, trainer.control)  # complete: nothing to say
        set_fill_state(cache, "filling")
        lock = lock_file(cache.directory.worker_file("supervisor.lock"), timeout_s=60)
        assert lock is not None  # as long as it is held, a worker seems to run
        with pytest.warns(UserWarning, match="give the EpochLoader an epoch_size"):
            told.on_train_begin(trainer.args, trainer.state, trainer.control)
        lock.release()
