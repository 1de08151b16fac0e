"""Lightning's hooks for epochs that grow; the same for `lightning` and `pytorch_lightning`.

Lightning measures a loader once, and holds every later epoch to that length. It loads a loader's state only
when the checkpoint is from the middle of an epoch. These hooks correct both between epochs, in the fit loop's
attributes. Nothing here imports Lightning: the two packages have the same classes twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

from cachestream.errors import warn_caller
from cachestream.training.loader import EpochLoader
from cachestream.training.stats import metrics

_LOADERS: Final = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


class EpochHooks:
    """Gives every epoch and validation of an EpochLoader its own length, and a resumed loader its state."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Before the progress bar, which reads the length in this hook. Lightning walks the old list.
        trainer.callbacks = [self, *(other for other in trainer.callbacks if other is not self)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop
        combined = loop._combined_loader
        ended = (
            getattr(loop, "restarted_on_epoch_end", False) and loop.epoch_loop.batch_progress.is_last_batch
        )
        if ended and _loaders(trainer):
            # With `max_steps` Lightning would end that epoch once more, with a batch of the next one.
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            loop._restarting = loop.epoch_loop.restarting = False
        states = getattr(loop, "_combined_loader_states_to_load", [])
        if states and _loaders(trainer):
            # The checkpoint is from the end of an epoch: Lightning would begin with epoch 0 again.
            combined._load_state_dicts(states)
            loop._combined_loader_states_to_load = []
            iter(loop._data_fetcher)
            _measure(trainer)
            iter(loop._data_fetcher)
        _warn_of_schedule(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        combined, loops = trainer.fit_loop._combined_loader, checkpoint["loops"]["fit_loop"]["state_dict"]
        if _loaders(trainer):
            # Lightning leaves an epoch at `limit_train_batches`, but would save its rest.
            stateful = [loader for loader in combined.flattened if hasattr(loader, "load_state_dict")]
            loops["combined_loader"] = [
                _state(trainer, loader) if isinstance(loader, EpochLoader) else state
                for loader, state in zip(stateful, loops["combined_loader"], strict=True)
            ]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        loaders = _loaders(trainer)
        if loaders and trainer.overfit_batches:
            _keep_batches(trainer.fit_loop, trainer.limit_train_batches)
            return
        begun = [loader for loader in loaders if loader.batches_done]
        for loader in begun:  # left after its last batch, or resumed by the user in mid-epoch
            iter(loader)
        if loaders:
            _measure(trainer)
        if begun and not trainer.fit_loop._data_fetcher.fetched:
            iter(trainer.fit_loop._data_fetcher)  # which Lightning calls only between two epochs

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":  # otherwise Lightning has measured the loaders just now
            keep = _keep_batches if trainer.overfit_batches else _measure_validation
            keep(trainer.fit_loop.epoch_loop.val_loop, trainer.limit_val_batches)


def _keep_batches(loop: Any, limit: int | float) -> None:
    """Give `loop` the first batches of this epoch in every one, as `overfit_batches` asks for.

    Otherwise every epoch of an EpochLoader would be drawn anew.
    """
    loaders = list(loop._combined_loader.flattened)
    ours = [index for index, loader in enumerate(loaders) if isinstance(loader, EpochLoader)]
    for index in ours:
        loaders[index] = list(itertools.islice(loaders[index], _limited(len(loaders[index]), limit)))
    if ours:
        loop._combined_loader.flattened = loaders
        iter(loop._data_fetcher)


def _loaders(trainer: Any) -> list[EpochLoader]:
    """The EpochLoaders that `trainer` trains from."""
    combined = trainer.fit_loop._combined_loader
    found = [] if combined is None else combined.flattened
    return [loader for loader in found if isinstance(loader, EpochLoader)]


def _state(trainer: Any, loader: EpochLoader) -> dict[str, Any]:
    """The state of a training loader: of the next epoch if Lightning has had the last batch of this one."""
    return loader._state(leaves=trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def _warn_of_schedule(trainer: Any) -> None:
    """Warn of a learning rate schedule that ends at a step computed from a first epoch that later ones
    exceed.
    """
    growing = any(
        loader._options.epoch_size is None and loader.cache.fill_state() == "filling"
        for loader in _loaders(trainer)
    )
    limit = trainer.limit_train_batches
    fixed = trainer.max_steps != -1 or (isinstance(limit, int) and limit == trainer.fit_loop.max_batches)
    for config in trainer.lr_scheduler_configs if growing and not fixed else ():
        # OneCycleLR raises ValueError after its last step; CosineAnnealingLR begins to rise again.
        end = getattr(config.scheduler, "total_steps", None) or getattr(config.scheduler, "T_max", None)
        if config.interval == "step" and end is not None:
            warn_caller(
                f"{type(config.scheduler).__name__} ends after {end} steps, and epochs get longer while the "
                "cache is filling: give the EpochLoader an epoch_size, or the Trainer max_steps, and the "
                "schedule that many steps"
            )


def _measure(trainer: Any) -> None:
    """Give the fit loop the lengths of the epoch to come, as it measured those of the first one."""
    loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader
    combined.limits = limits = [
        _limited(len(loader) - loader.batches_done, trainer.limit_train_batches)
        if isinstance(loader, EpochLoader)
        else limit
        for loader, limit in zip(combined.flattened, combined.limits, strict=True)
    ]
    loop.max_batches = min(limits) if combined._mode == "min_size" else max(limits)
    interval = trainer.val_check_interval
    if isinstance(interval, float) and getattr(trainer, "_val_check_time_interval", None) is None:
        trainer.val_check_batch = max(1, int(loop.max_batches * interval))


def _measure_validation(loop: Any, limit: int | float) -> None:
    """Give the validation that has begun the lengths of its own epoch, in place of the first one's.

    The iterator stays: Lightning may have taken a batch ahead.
    """
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    if any(isinstance(loader, EpochLoader) for loader in combined.flattened):
        loop._max_batches = [
            _limited(len(loader), limit) if isinstance(loader, EpochLoader) else batches
            for loader, batches in zip(combined.flattened, loop._max_batches, strict=True)
        ]
        combined.limits = combined._iterator.limits = loop.max_batches  # fewer for the sanity check
        if fetcher.length is not None:
            fetcher.length = len(combined)


def _limited(length: int, limit: int | float) -> int:
    """`length` under Lightning's `limit_train_batches` or `limit_val_batches`, a number or a share."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))


class MetricsHooks:
    """Logs `cs.metrics` of the training loader every `every_n_steps` batches and at the end of epochs."""

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and (trainer.fit_loop.total_batch_idx + 1) % self.every_n_steps == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._log(trainer)

    @staticmethod
    def _log(trainer: Any) -> None:
        for loader in _loaders(trainer)[:1]:
            found = metrics(loader)
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class DataHooks:
    """A data module's hooks: loaders are made on each rank, and closed when Lightning is done with them.

    Args:
        train, val, test: a loader, or a function that makes one: it is called in each process that trains
            (also under the spawn strategies), where the ranks know each other. What a function made is closed
            after the run; a later run's goes on at the state that it had.
    """

    trainer: Any
    callback: Callable[[], EpochHooks]

    def __init__(
        self,
        train: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        val: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        test: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        super().__init__()
        self._given = {"train": train, "val": val, "test": test}
        self.loaders: dict[str, Any] = {}
        self._states: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        if not any(isinstance(callback, EpochHooks) for callback in self.trainer.callbacks):
            # Where this package is used without being installed, and so its entry point is not there.
            self.trainer.callbacks = [self.callback(), *self.trainer.callbacks]
        for name in _LOADERS.get(stage, ()):
            source: Any = self._given[name]
            if name not in self.loaders and source is not None:
                self.loaders[name] = loader = source() if callable(source) else source
                if name in self._states:
                    loader.load_state_dict(self._states.pop(name))

    def teardown(self, stage: str) -> None:
        for name in _LOADERS.get(stage, ()):
            loader = self.loaders.pop(name, None)
            if callable(self._given[name]) and isinstance(loader, EpochLoader):
                self._states[name] = _state(self.trainer, loader) if name == "train" else loader.state_dict()
                loader.close()

    def train_dataloader(self) -> Any:
        return self.loaders["train"]

    def val_dataloader(self) -> Any:
        return self.loaders.get("val", [])

    def test_dataloader(self) -> Any:
        return self.loaders["test"]


def make_classes(callback: type, data_module: type, module: str) -> tuple[type[Any], type[Any], type[Any]]:
    """The `CacheCallback`, `MetricsCallback` and `CacheDataModule` of one of the Lightnings, in `module`."""

    def make(name: str, hooks: type, base: type, **attributes: Any) -> type[Any]:
        return type(name, (hooks, base), {"__doc__": hooks.__doc__, "__module__": module, **attributes})

    of_epochs = make("CacheCallback", EpochHooks, callback)
    of_metrics = make("MetricsCallback", MetricsHooks, callback)
    return of_epochs, of_metrics, make("CacheDataModule", DataHooks, data_module, callback=of_epochs)
