"""The loader that training iterates: each iteration is an epoch over what is cached by then."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from cachestream.errors import ConfigError, EpochError
from cachestream.training.cursor import Cursor
from cachestream.training.dataset import EpochDataset
from cachestream.training.epoch import Request, Segment
from cachestream.training.options import EpochSettings, check_count, make_weights, refuse_unknown
from cachestream.training.prefetch import Engine, close_all
from cachestream.training.prepare import Preparer
from cachestream.training.ragged import Ragged
from cachestream.training.ranks import Deadlines, find_ranks
from cachestream.training.record import Recorder
from cachestream.training.samplers import SamplerLike
from cachestream.training.schedule import Schedule
from cachestream.training.state import from_state, to_state
from cachestream.training.stats import LoaderStats, Meter
from cachestream.training.transfer import BatchTransform, Transfer, make_transfer

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestream.storage.cache import Cache

__all__ = ["EpochLoader"]

_instances = itertools.count()
# Or half of what the trainer waits: the late rank is named before that is over.
_RANKS_DEADLINE_S: Final = 60.0


class EpochLoader:
    """Batches of a growing cache; every `iter()` is the next epoch, drawn from what is cached by then.

    A batch is a dict of tensors `[batch_size, ...]` (lists for str, bytes and fields whose shape varies), or a tuple
    or a bare value if the samples are. Tensors own their memory: change them, keep them. The next epoch is prepared
    during this one, so there is no gap between them. Under `torch.distributed` the ranks agree by themselves: all
    make the same number of steps, and no sample comes twice in an epoch.

    Args:
        cache: the `Cache` to draw from.
        batch_size: samples in a batch, on each rank.
        shuffle: a new pseudo-random order every epoch, from `seed`; otherwise in order of arrival.
        epoch_size: samples in an epoch, over all ranks. None: all that are cached, once. Fewer: the least used first.
            More: further passes over refreshed snapshots, so that epochs of a fixed length run over a growing cache.
        min_samples: how many must be cached before an epoch begins (None: one batch for each rank).
        turnover: the share of a full cache that an epoch leaves for the filling to replace.
        drop_last: whole batches only. Otherwise the rest makes one more batch, if it has a sample for each rank.
        device: where batches are delivered: None or "cpu", or "cuda" (pinned buffers, copied on a stream of its own).
        sampler: a torch sampler, or a function that gets the epoch's dataset and returns one; `shuffle` is ignored.
        batch_transform: called with every batch, on its device, in up to two threads at once.
        prefetch: batches gathered ahead.
        timeout_s: the longest wait for a batch; after it EpochError says what is going on.
        with_keys: batches hold their samples' keys, a list of str: the field "__key__", or a tuple's last one.
        record: a folder, one for each run: every epoch leaves its manifest there (its shards, order and batches).
        replay: a manifest, or a folder of them: those epochs again, the same batches for the same `batch_size` and number
            of ranks, otherwise the same samples in the same order. EpochError when their shards are not cached.
        weights: samples are drawn as often as the weights of their keys say: True for equal ones to begin with, or a
            mapping; `update_weights` changes them. Keys without a weight have the mean one. Implies `with_keys`.
        locality: shuffle within a window of so many samples, for caches larger than memory: batches come from as many
            samples at a time, which are read in long runs, from all over the cache. Let a window fit in memory twice.
        ragged: how fields come whose shape varies, and bytes: "list", "padded" (a `Padded`: values and lengths), "nested" (a
            jagged tensor), as one tensor without an object a sample; or a mapping of fields to these, str included.

    Raises ConfigError for arguments that cannot work; while iterating NotEnoughSamplesError, RankMismatchError,
    EpochError, and whatever `batch_transform` or `sampler` raise. Used by one thread, in the process that made it.
    """

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
        **unknown: object,
    ) -> None:
        refuse_unknown(unknown)
        if not hasattr(cache, "take_snapshot"):
            raise ConfigError(f"cache={cache!r}: give a cachestream.Cache, such as Cache('/scratch/train')")
        check_count("prefetch", prefetch)
        self.cache = cache
        self.batch_size = batch_size
        self._settings = EpochSettings(
            batch_size,
            shuffle,
            seed,
            epoch_size,
            min_samples,
            turnover,
            drop_last,
            sampler,
            timeout_s,
            with_keys=with_keys or bool(weights) or weights == {},
            weights=make_weights(weights),
            locality=locality,
            ragged=ragged,
        )
        self._settings.check()
        if replay is not None:
            self._settings = self._settings.of_replay(os.fspath(replay))
        self._recorder = None if record is None else Recorder(os.fspath(record), self._settings.to_record())
        self._schedule = Schedule(prefetch)
        self._engine = self._make_engine(make_transfer(device, prefetch + 2), batch_transform)
        # Not the loader but the engine is what the threads hold, so a forgotten loader ends them.
        weakref.finalize(self, self._engine.stop, join=False).atexit = False
        self._cursor: Cursor | None = None
        self._planned = Request(0, 0)
        self._wanted_epoch: int | None = None
        self._loaded: dict[str, Any] = {}
        self._meter = Meter()
        if self._settings.replay is not None:
            self._jump(Request(0, self._settings.replay.epochs[0]))

    def _make_engine(self, transfer: Transfer, transform: BatchTransform | None) -> Engine:
        settings, cache, closed = self._settings, self.cache, threading.Event()
        find = functools.partial(
            find_ranks,
            next(_instances),
            settings.to_compare(),
            cache.cache_id,
            Deadlines(0.9 * settings.timeout_s, min(_RANKS_DEADLINE_S, 0.5 * settings.timeout_s)),
            closed,
        )
        preparer = Preparer(cache, settings, find, closed)
        return Engine(self._schedule, preparer, transfer, transform, cache.quarantine, closed)

    # --- iterating

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch; one that was left early ends. One that no batch was taken of begins once more:
        frameworks call `iter()` to see whether they can.
        """
        began_s = self._meter.clock()
        self._engine.start()
        self._cursor = self._once_more() or self._begin()
        self._meter.epoch_begins()
        self._meter.between(self._meter.clock() - began_s)
        return _Batches(self, self._cursor)

    def _begin(self) -> Cursor:
        self._leave()
        self._apply_wanted_epoch()
        request, self._planned = self._planned, Request(0, self._planned.epoch + 1)
        close_all(self._schedule.begin(None, request.epoch))
        return Cursor(request.epoch, request.done, self._loaded if request.records else None)

    def _once_more(self) -> Cursor | None:
        """The running epoch from its beginning, if that is where it is and nothing else is wanted."""
        cursor = self._running
        if cursor is None or cursor.segment is not None or self._wanted_epoch not in {None, cursor.epoch}:
            return None
        self._wanted_epoch = None
        return Cursor(cursor.epoch, cursor.batches, cursor.loaded)

    def _next(self, cursor: Cursor) -> Any:
        if cursor is not self._cursor:
            raise EpochError(
                f"this iteration of epoch {cursor.epoch} has ended: the loader has begun another one, or was moved by "
                "set_epoch or load_state_dict"
            )
        if cursor.finished:
            raise StopIteration
        wait_s = 0.0 if cursor.parcel else self._fetch(cursor)
        if not cursor.parcel:
            self._leave()
            self._meter.between(wait_s)
            raise StopIteration
        delivery = cursor.parcel.popleft()
        cursor.batches = delivery.number
        self._meter.delivered(delivery.size, delivery.skipped, wait_s)
        return self._engine.transfer.receive(delivery.staged)

    def _fetch(self, cursor: Cursor) -> float:
        """Wait for the next batches; returns how long that took, in seconds."""
        began_s = self._meter.clock()
        try:
            parcel = self._schedule.take(cursor.epoch, self._settings.timeout_s)
        except Exception as error:
            if self._schedule.has_failed and cursor.segment is None:
                # Nothing of it was delivered: the next iteration tries again.
                self._planned, self._cursor = Request(0, cursor.epoch), None
            if isinstance(error, StopIteration):  # it would end the epoch as if all were well
                raise EpochError(
                    "the batch_transform or the sampler raised StopIteration; see its traceback"
                ) from error
            raise
        cursor.parcel = parcel.batches  # first: a warning may be made an error
        if parcel.segment is not cursor.segment:
            self._enter(cursor, parcel.segment)
        return self._meter.clock() - began_s

    def _enter(self, cursor: Cursor, segment: Segment) -> None:
        """The first batch of `segment` has come."""
        self._count_reuse(cursor)
        close_all(self._schedule.passed(segment))
        cursor.segment = segment
        self._meter.entered(segment.snapshot)
        if self._recorder is not None and (ranks := self._engine.preparer.ranks).leads:
            self._recorder.enter(segment, ranks.rank, ranks.size)
        if segment.missing:
            warnings.warn(
                f"{segment.missing} samples of epoch {cursor.epoch} are not cached any more since its state was "
                "saved, and are skipped",
                stacklevel=4,
            )

    def _leave(self) -> None:
        """The running epoch is over, at its end or before."""
        cursor = self._cursor
        if cursor is None or cursor.finished:
            return
        self._count_reuse(cursor)
        cursor.finished = True
        if cursor.segment is not None:
            close_all(self._schedule.ended(cursor.segment))
            cursor.segment = None  # and with it the maps
        cursor.parcel = deque()

    def _count_reuse(self, cursor: Cursor) -> None:
        segment = cursor.segment
        if segment is not None:
            self._meter.drawn(segment.snapshot, segment.share_drawn(cursor.batches - segment.request.done))

    def _apply_wanted_epoch(self) -> None:
        """Go where `set_epoch` has pointed, unless that is where the loader goes anyway."""
        wanted, self._wanted_epoch = self._wanted_epoch, None
        if wanted is not None and wanted != self._planned.epoch:
            self._jump(Request(0, wanted))

    def _jump(self, request: Request) -> None:
        self._planned = request
        close_all(self._schedule.jump(request))

    @property
    def _running(self) -> Cursor | None:
        return self._cursor if self._cursor is not None and not self._cursor.finished else None

    # --- epochs

    def __len__(self) -> int:
        """Batches on each rank in the running epoch, or else in the next one, which is then prepared."""
        cursor = self._running
        epoch = self._upcoming() if cursor is None else cursor.epoch
        return self._schedule.length(epoch, self._settings.timeout_s)

    def _upcoming(self) -> int:
        """The next epoch, which is being prepared from now on, if need be once more."""
        self._engine.start()
        self._apply_wanted_epoch()
        if self._schedule.has_failed:
            self._jump(self._planned)
        return self._planned.epoch

    @property
    def epoch(self) -> int:
        """The running epoch, or else the next one; the first is 0."""
        if self._wanted_epoch is not None:
            return self._wanted_epoch
        return self._planned.epoch if self._running is None else self._running.epoch

    @property
    def batches_done(self) -> int:
        """Batches of the running epoch that this rank was given, those before a checkpoint included; 0 between epochs."""
        return 0 if self._running is None else self._running.batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one. Its order depends on the seed and this number."""
        if type(epoch) is not int or epoch < 0:
            raise ConfigError(f"set_epoch({epoch!r}): give the number of an epoch, 0 or more")
        self._wanted_epoch = epoch

    @property
    def dataset(self) -> EpochDataset:
        """The samples that the running epoch is drawn from, or else the next one; good until that epoch ends."""
        cursor = self._running
        epoch = self._upcoming() if cursor is None else cursor.epoch
        self._schedule.length(epoch, self._settings.timeout_s)
        segment = self._schedule.current(epoch)
        if segment is None:
            raise EpochError(f"epoch {epoch} has been left; iterate the loader to begin the next one")
        return segment.dataset

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Where training is, as plain values: after the batches delivered, whatever was gathered ahead.

        Mid-epoch it names the shards and their order, and `load_state_dict` goes on at the exact next batch.
        """
        if self._recorder is not None:
            self._recorder.flush()
        weights = self._settings.weights
        return self._position() if weights is None else self._position() | {"weights": weights.to_state()}

    def _position(self) -> dict[str, Any]:
        cursor = self._running
        if cursor is None or cursor.segment is None:
            loaded = cursor.loaded if cursor is not None else self._loaded if self._planned.records else None
            return (
                loaded
                if loaded is not None and loaded["epoch"] == self.epoch
                else to_state(self.epoch, 0, None)
            )
        if cursor.batches >= cursor.segment.total:
            return to_state(cursor.epoch + 1, 0, None)
        return to_state(cursor.epoch, cursor.batches, cursor.segment)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`: the next iteration is its epoch, from the next batch on.

        Samples whose shards were evicted since are skipped, with a warning. Raises ConfigError for another value.
        """
        request = from_state(state)
        if self._settings.weights is not None and "weights" in state:
            self._settings.weights.load(state["weights"])
        self._leave()
        self._cursor = None
        self._wanted_epoch = None
        self._loaded = state
        self._jump(request)

    def update_weights(self, keys: Sequence[str], values: Any) -> None:
        """Give the samples of `keys` the weights `values` (numbers or a tensor `[n]`, finite, 0 or more): their losses,
        say. Epochs that are prepared from now on draw by them; ranks exchange theirs then. Needs `weights=`.
        """
        if self._settings.weights is None:
            raise ConfigError("update_weights() needs EpochLoader(weights=True)")
        self._settings.weights.update(keys, values)

    @property
    def stats(self) -> LoaderStats:
        """What was delivered and waited for, up to now."""
        epoch = self.epoch if self._cursor is None else self._cursor.epoch
        return self._meter.stats(epoch, self._engine.preparer.last_s)

    # --- the end

    def close(self) -> None:
        """End the threads and free the shards. Batches handed out stay good."""
        self._leave()
        if self._recorder is not None:
            self._recorder.close()
        self._engine.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running = "" if self._running is None else f" after {self._running.batches} batches"
        return (
            f"<EpochLoader epoch {self.epoch}{running}, batch_size {self.batch_size}, of {self.cache.path}>"
        )


class _Batches(Iterator[Any]):
    """One iteration of a loader."""

    def __init__(self, loader: EpochLoader, cursor: Cursor) -> None:
        self._loader = loader
        self._cursor = cursor

    def __next__(self) -> Any:
        return self._loader._next(self._cursor)
