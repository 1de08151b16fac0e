"""The Hugging Face Trainer on an EpochLoader: a Trainer that takes the loader's batches as they are, and a
callback that saves and restores the loader's position.

The Trainer measures an epoch once, for its learning rate schedule: give the loader an `epoch_size`, so that
all epochs have that length while the cache grows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cachestream.errors import ConfigError, warn_caller
from cachestream.training.loader import EpochLoader

__all__ = ["CacheCallback", "CacheTrainer"]

_FILE: Final = "cachestream.json"


class CacheCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves the position of `loader` in the Trainer's checkpoints, and restores it when it resumes.

    It belongs to a `CacheTrainer`: other ones set an epoch that they count in steps, which loses the position
    where an epoch had another number of them. Resuming needs no skipping of batches: `args.ignore_data_skip`
    is set. Raises ConfigError for a checkpoint without the loader's state, and for arguments that ask for
    other batches than the loader's.
    """

    def __init__(self, loader: EpochLoader) -> None:
        self.loader = loader

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        args.ignore_data_skip = True
        # Before version 5 group_by_length was an argument of its own.
        strategy = "group_by_length" if getattr(args, "group_by_length", False) else ""
        strategy = strategy or getattr(args, "train_sampling_strategy", "random")
        if strategy != "random":
            raise ConfigError(
                f"'{strategy}' in the TrainingArguments would have no effect: the EpochLoader makes the "
                "batches. Give it shuffle=False, or a sampler= that sorts by length, and leave that argument "
                "out"
            )
        if args.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size would have no effect: the EpochLoader makes the batches; give it a "
                "smaller batch_size"
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step:
            file = _file(args, state)
            if not file.is_file():
                raise ConfigError(
                    f"{file} is not there: the checkpoint lies outside of output_dir, or was saved without "
                    "cachestream's CacheCallback; move it there, start anew, or train on without the "
                    "callback, from an epoch's beginning"
                )
            self.loader.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        if self.loader._options.epoch_size is None and self.loader.cache.fill_state() == "filling":
            warn_caller(
                "the Trainer holds all epochs to the length of the first one, and the cache is still "
                "filling: give the EpochLoader an epoch_size"
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # The state is of all ranks and caches: one rank's is enough.
        if state.is_world_process_zero or (args.save_on_each_node and state.is_local_process_zero):
            _file(args, state).write_text(json.dumps(self.loader.state_dict()), encoding="utf-8")


def _file(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}", _FILE)


class CacheTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer that trains from `train_loader`, not split again; other arguments are the Trainer's.

    `per_device_train_batch_size` becomes the loader's batch size; ConfigError if another one was given. For
    evaluation give `eval_dataset=cache.snapshot()`, or any other dataset.
    """

    def __init__(self, *args: Any, train_loader: EpochLoader, **options: Any) -> None:
        self.train_loader = train_loader
        options["callbacks"] = [*(options.get("callbacks") or ()), CacheCallback(train_loader)]
        super().__init__(*args, **options)
        if self.train_dataset is not None:
            raise ConfigError("train_dataset= and train_loader= do not go together: give one of them")
        given, devices = self.args.per_device_train_batch_size, max(1, self.args.n_gpu)
        if given * devices != train_loader.batch_size:
            if given != TrainingArguments.per_device_train_batch_size:
                raise ConfigError(
                    f"per_device_train_batch_size={given} would have no effect: the EpochLoader makes "
                    f"batches of {train_loader.batch_size}, for {devices} devices of this process; leave "
                    "that argument out, or give the loader another batch_size"
                )
            self.args.per_device_train_batch_size = max(1, train_loader.batch_size // devices)
        self._train_batch_size = train_loader.batch_size

    def num_examples(self, dataloader: Any) -> int:
        """The samples of an epoch on all ranks: the cache, `dataloader.dataset`, may hold more or fewer."""
        if not isinstance(dataloader, _WithoutSetEpoch):
            return int(super().num_examples(dataloader))
        return len(dataloader) * self.train_loader.batch_size * int(self.args.world_size)

    def get_train_dataloader(self) -> Any:
        return _WithoutSetEpoch(self.train_loader)


class _WithoutSetEpoch:
    """A loader, with all its attributes but `set_epoch`: every iteration is its next epoch anyway.

    The Trainer would set the epoch that it counts from its steps and the length of an epoch now. Resumed with
    another batch size that is another one than the loader's, and the restored position would be lost.
    """

    def __init__(self, loader: EpochLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in {"loader", "set_epoch"}:  # "loader" is not there yet while this is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)
