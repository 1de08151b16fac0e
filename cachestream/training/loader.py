"""The loader that a trainer iterates: each iteration is an epoch over the samples cached by then."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from cachestream.config import check_count, parse_path, parse_size, suggests_names, whole_number
from cachestream.errors import ConfigError
from cachestream.repr_html import table
from cachestream.storage.settings import choose_split
from cachestream.storage.view import make_view
from cachestream.training.background import Background
from cachestream.training.batches.transfer import make_transfer
from cachestream.training.epoch import Batches, Epochs
from cachestream.training.loader_options import (
    HINTS,
    LoaderOptions,
    check_objects,
    make_weights,
    warn_without_weights,
)
from cachestream.training.manifests import Recorder
from cachestream.training.mixture import Mixture
from cachestream.training.position import Position
from cachestream.training.replication import make_replication

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from cachestream.storage.cache import Cache
    from cachestream.storage.telemetry import LoaderStats
    from cachestream.storage.view import Condition
    from cachestream.training.batches.gather import Ragged
    from cachestream.training.batches.transfer import BatchTransform
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.samplers import SamplerLike


class EpochLoader:
    """Batches of a growing cache; every `iter()` is the next epoch, drawn from the samples cached by then.

    A batch is a dict of tensors `[batch_size, ...]` (lists for str, bytes and fields whose shape varies), or
    a tuple or a bare value if the samples are. Tensors own their memory: change them, keep them. The next
    epoch is prepared during this one, so there is no gap between them. Under `torch.distributed` the ranks
    agree by themselves: all ranks make the same number of steps, and no sample comes twice in a pass over the cache.

    Args:
        cache: the `Cache` to draw from.
        batch_size: samples in a batch, on each rank.
        shuffle: a new pseudo-random order every epoch, from `seed`; otherwise in order of arrival.
        epoch_size: samples in an epoch, over all ranks. None: all cached samples, once. Fewer: samples of the
            least used shards first. More: further passes over refreshed snapshots, so that epochs of a fixed
            length run over a growing cache.
        min_samples: the samples that must be cached before an epoch begins (None: a batch for each rank).
        turnover: the share of a full cache that an epoch leaves for the filling to replace.
        drop_last: whole batches only. Otherwise the remaining samples make one more, if each rank gets one.
        device: where batches are delivered: None or "cpu", or an accelerator that torch finds here ("cuda",
            "xpu", "mps"; with pinned buffers and a stream of its own, where it has them). Other ones than
            CUDA need torch 2.8.
        pinned_limit: the most pinned host memory for the batches on their way to the device, as bytes or
            "2GB". Those beyond it are gathered in ordinary memory, from which copies are slower. None: as much
            as the batches ahead take. Without a device it has no effect.
        sampler: a torch sampler, or a function of the epoch's dataset that returns one; replaces `shuffle`.
            Functions and samplers of your own run in the trainer's thread, once an epoch, with the global
            generators seeded and restored; torch's own run in the background.
        batch_transform: `fn(batch)` or `fn(batch, generator)`, called with every batch, on its device, in up
            to two threads at once. The `torch.Generator`, on that device, is seeded by (seed, epoch, batch,
            rank): the same draws in every run and after a resume, and none from the trainer's own generators.
            It goes to the second positional parameter without a default, or to one called `generator` or
            `rng` that is None by default.
        prefetch: batches gathered ahead.
        timeout_s: the longest wait for a batch, in seconds; after it EpochError with a diagnosis is raised.
        with_keys: batches hold the samples' keys, a list of str: field "__key__", or the last of a tuple.
        record: a folder, one for each run, for the manifest of each epoch (its shards, order and batches).
        replay: a manifest, or a folder of them, of epochs to repeat: the same batches for the same
            `batch_size` and number of ranks, otherwise the same samples in the same order. EpochError if
            their shards are not cached.
        weights: draw samples in proportion to the weights of their keys: True for initially equal ones, or a
            mapping; `update_weights` changes them. A key without a weight has the mean of the others. Implies
            `with_keys`.
        locality: shuffle within a window of so many samples, for caches larger than memory: a window is read
            in long runs from all over the cache. Two windows should fit in memory.
        ragged: the form of bytes and of fields whose shape varies: "list", "padded" (a `Padded`: values and
            lengths) or "nested" (a jagged tensor), the latter two without an object per sample; or a mapping
            of fields, str included, to these.
        split: "train", the samples that are not held out, or "held-out", the others: chosen by a hash of the
            key, the same on every run, node and resume. None: all samples, or "train" if `holdout` is given.
        holdout: the share of the samples that is held out, such as 0.05; the cache stores it for all users.
        mixture: the weights of the sources of a cache that is filled from `cs.mix`: a mapping by name, a
            sequence, or a function `fn(step)` of the batches since the beginning of training, or `fn(epoch)`.
            Rank 0 calls it, for all steps of an epoch, when the epoch is prepared: during the one before. An
            epoch has as many samples as without; a source with fewer than are drawn repeats. After every
            whole batch the samples of each source, over all ranks, differ from its share by less than 1.
        where: a function of one shard's columns (`ShardColumns`) that returns a mask, bool `[num_samples]`:
            the samples to draw from. It is called once for each shard, and its result remembered.
        columns: the fields that batches hold, in this order; others are not read. None: all.
        max_tokens: the budget of a batch, as `{field: tokens}`: the longest of its samples times their
            number, which is at most `batch_size`. Samples of like length come together, an epoch is at most
            one pass, and no batch is dropped for its size.
        group_by: the field by whose shape batches are formed: it is one tensor in each, `[B, *shape]`, also
            of images of several sizes. A shape with fewer samples than `batch_size` left makes a smaller batch,
            whatever `drop_last` says; of the last few batches each rank gets one, or none does.
        mesh: the torch DeviceMesh of all ranks, whose dimensions `replicate` names.
        replicate: the dimensions whose ranks get equal batches, `("tp", "cp")`; without `mesh` a number: so
            many consecutive ranks. Sizes are then over those with batches of their own. A state goes on with
            any other mesh. Ranks that get equal batches share a cache.

    Raises ConfigError for arguments that cannot work; while iterating NotEnoughSamplesError,
    RankMismatchError, EpochError, and whatever `batch_transform` or `sampler` raise. Used by one thread, in
    the process that made it.
    """

    @suggests_names(name="EpochLoader", hints=HINTS)
    def __init__(
        self,
        cache: Cache,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epoch_size: int | None = None,
        min_samples: int | None = None,
        turnover: float = 0.25,
        drop_last: bool = True,
        device: torch.device | str | int | None = None,
        pinned_limit: int | str | None = None,
        sampler: SamplerLike | None = None,
        batch_transform: BatchTransform | None = None,
        prefetch: int = 4,
        timeout_s: float = 120.0,
        with_keys: bool = False,
        record: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
        weights: bool | Mapping[str, float] | None = None,
        locality: int | None = None,
        ragged: Ragged = "list",
        split: str | None = None,
        holdout: float | None = None,
        mixture: Any = None,
        where: Condition | None = None,
        columns: Sequence[str] | None = None,
        max_tokens: Mapping[str, int] | None = None,
        group_by: str | None = None,
        mesh: DeviceMesh | None = None,
        replicate: int | str | Sequence[str] | None = None,
    ) -> None:
        check_objects(cache, batch_transform)
        prefetch = check_count("prefetch", prefetch)
        options = LoaderOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            epoch_size=epoch_size,
            min_samples=min_samples,
            turnover=turnover,
            drop_last=drop_last,
            timeout_s=timeout_s,
            sampler=sampler,
            weights=make_weights(weights),
            locality=locality,
            with_keys=with_keys,
            ragged=ragged,
            mixture=None if mixture is None else Mixture(mixture),
            max_tokens=max_tokens,
            group_by=group_by,
            view=make_view(where, columns),
            replication=make_replication(mesh, replicate),
        ).checked(replay)
        self._options = options = replace(options, split=choose_split(cache, split, holdout))
        warn_without_weights(cache, options)
        self.cache = cache
        self._pid = os.getpid()
        self.batch_size = options.batch_size
        folder = None if record is None else parse_path(record, "record")
        self._recorder = None if folder is None else Recorder(folder, options.to_record())
        pinned_bytes = None if pinned_limit is None else parse_size(pinned_limit, "pinned_limit")
        transfer = make_transfer(device, prefetch + 2, pinned_bytes)
        self._background = Background(cache, options, prefetch, transfer, batch_transform)
        weakref.finalize(self, self._background.stop, join=False).atexit = False
        self._epochs = Epochs(self._background, self._recorder, options)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch; one that was left early ends. An epoch of which no batch was taken begins
        again, because frameworks call `iter()` to test for iterability.
        """
        return Batches(self, self._epochs, self._epochs.begin())

    # --- epochs

    def __len__(self) -> int:
        """The number of batches on each rank in the running epoch, otherwise (also after a `break`) in the
        next one, which is then prepared.
        """
        return self._epochs.segment().total

    def peek(self) -> Any:
        """A copy of the first batch of the next iteration; the position does not change.

        Prepares the next epoch as `len` does, together with the other ranks. Raises EpochError during an
        iteration, and the errors of the first `next`.
        """
        return self._epochs.peek()

    def __getitem__(self, index: object) -> NoReturn:
        """Raise TypeError: batches come by iteration, samples by index from `cache.snapshot()`."""
        raise TypeError(
            "an EpochLoader gives batches by iteration, in place of a DataLoader: 'for batch in loader'. For "
            "samples by index, or for a DataLoader over them, use cache.snapshot()"
        )

    @property
    def sampler(self) -> NoReturn:
        """Raise AttributeError, which names the replacement for Accelerate's `skip_first_batches`."""
        raise AttributeError(
            "an EpochLoader has no sampler to skip batches by (skip_first_batches): its state_dict() and "
            "load_state_dict() go on at the exact next batch, and "
            "cachestream.integrations.accelerate.prepare_loader saves and loads them"
        )

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` gave; otherwise the running one, or else the next. The first is 0."""
        return self._epochs.epoch

    @property
    def batches_done(self) -> int:
        """Batches of the running epoch given to this rank, also before a checkpoint; 0 between epochs."""
        return self._epochs.batches_done or 0

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one. Its order depends on the seed and this number."""
        number = whole_number(epoch)
        if number is None or number < 0:
            raise ConfigError(f"set_epoch({epoch!r}): give the number of an epoch, 0 or more")
        self._epochs.set_epoch(number)

    @property
    def dataset(self) -> EpochDataset:
        """The samples that the running epoch, otherwise the next one, is drawn from; valid until its end."""
        return self._epochs.segment().dataset

    def update_weights(self, keys: Sequence[str], values: Any) -> None:
        """Give the samples of `keys` the weights `values` (numbers or a tensor `[n]`, finite, 0 or more),
        such as their losses. Epochs prepared from now on draw by them, after an exchange between the ranks.
        Raises ConfigError without `weights=`.
        """
        weights = self._options.weights
        if weights is None:
            raise ConfigError("update_weights() needs EpochLoader(weights=True)")
        weights.update(keys, values)

    @property
    def stats(self) -> LoaderStats:
        """Statistics of deliveries and waits so far."""
        return self._epochs.stats()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The state of training after the delivered batches, not those gathered ahead, as plain values.

        A mid-epoch state names the shards and their order: `load_state_dict` goes on at the exact batch.
        """
        return self._state()

    def _state(self, *, leaves: bool = False) -> dict[str, Any]:
        """The state; if the trainer `leaves` the epoch after these batches, that of the next one."""
        if self._recorder is not None:
            self._recorder.flush()
        weights = self._options.weights
        state = self._epochs.to_state(leaves)
        return state if weights is None else state | {"weights": weights.to_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`: the next iteration is its epoch, from the next batch on.

        Samples of shards evicted since are skipped, with a warning. Raises ConfigError for an invalid state.
        """
        position, weights = Position.from_state(state), self._options.weights
        for record in (position.records or {}).values():
            record.check_selection(self._options.split, selects=self._options.view.selects)
        if weights is not None and "weights" in state:
            weights.load(state["weights"])
        self._epochs.resume_from(position)

    # --- the end

    def close(self) -> None:
        """Stop the threads and release the shards. Delivered batches and `state_dict()` stay valid; an
        iteration in progress, in any thread, ends with EpochError.

        Does nothing in a forked child, where threads and locks belong to the parent.
        """
        if self._pid != os.getpid():
            return
        try:
            self._epochs.close()
            if self._recorder is not None:
                self._recorder.close()
        finally:
            self._background.stop()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an EpochLoader cannot be copied or pickled: its threads and leases are this process's. Make "
            f"another one, in another process over its own cs.Cache({str(self.cache.path)!r}); state_dict() "
            "tells it where to go on"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        done = self._epochs.batches_done
        running = "" if done is None else f" after {done} batches"
        return (
            f"<EpochLoader epoch {self.epoch}{running}, batch_size {self.batch_size}, of {self.cache.path}>"
        )

    def _repr_html_(self) -> str:
        rows = {
            "epoch": self.epoch,
            "batches of it": self.batches_done,
            "batch size": self.batch_size,
            "cache": self.cache.path,
        }
        return table("EpochLoader", rows) + self.stats._repr_html_()
