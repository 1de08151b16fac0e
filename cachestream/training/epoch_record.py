"""Epochs recorded as manifests beside the training, and replayed from them."""

from __future__ import annotations

import os
import re
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestream.errors import CacheStreamError, ConfigError, EpochError
from cachestream.storage.contents import Contents
from cachestream.storage.leases import Lease, join_lease
from cachestream.training.checkpoint import SegmentRecord, rebuild
from cachestream.training.epoch_manifest import (
    EpochManifest,
    Stretch,
    load_manifest,
    manifest_name,
    save_manifest,
)
from cachestream.training.plan import count_batches
from cachestream.training.segment import Segment

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache


_CLOSE_S: Final = 30.0


class Recorder:
    """A writer of manifests into `folder`, in a thread of its own. Used from the training thread.

    `settings` go into each manifest. A manifest that cannot be written, or not in time, is a warning:
    training goes on.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"record={folder!r} cannot be made ({error.strerror}); give a folder for manifests"
            ) from error
        self._folder = folder
        self._settings = settings
        self._contents = Contents()
        self._thread: ThreadPoolExecutor | None = None
        self._sent: list[Future[None]] = []
        self._pid = os.getpid()

    def enter(self, segment: Segment, leader: int, world_size: int) -> None:
        """Record `segment`, whose first batch has come, on `leader`, the first rank of the cache."""
        self._warn()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "cachestream-record")
        # A lease of its own, because the epoch may end before the headers of its shards are read.
        lease = join_lease(segment.snapshot.lease)
        self._sent.append(self._thread.submit(self._write, segment, lease, leader, world_size))

    def flush(self) -> None:
        """Wait up to `_CLOSE_S` until all manifests are written, so that a checkpoint's epoch is recorded.

        Does not wait in a forked child, whose parent writes.
        """
        if self._pid == os.getpid():
            self._warn_of_late(wait(self._sent, _CLOSE_S).not_done)

    def close(self) -> None:
        """Wait up to `_CLOSE_S` for the manifests to be written; later ones are still written in the
        background.
        """
        thread, self._thread = self._thread, None
        late = wait(self._sent, _CLOSE_S).not_done
        if thread is not None:
            thread.shutdown(wait=not late)
        self._warn()
        self._warn_of_late(late)

    def _warn(self) -> None:
        done = [future for future in self._sent if future.done()]
        self._sent = [future for future in self._sent if not future.done()]
        for error in filter(None, (future.exception() for future in done)):
            warnings.warn(f"an epoch could not be recorded: {error}", stacklevel=5)

    def _warn_of_late(self, late: set[Future[None]]) -> None:
        if late:
            warnings.warn(
                f"{len(late)} of the manifests in {self._folder} are not written after {_CLOSE_S:g} s, and will be when "
                "the disk answers: do not replay from there before; record= a folder on a faster disk",
                stacklevel=4,
            )

    def _write(self, segment: Segment, lease: Lease, leader: int, world_size: int) -> None:
        request, plan, snapshot = segment.request, segment.plan, segment.snapshot
        try:
            contents = self._contents.read(snapshot.root, snapshot.shard_ids.tolist())
        finally:
            lease.release()
        path = os.path.join(self._folder, manifest_name(request.epoch, leader))
        settings = self._settings | {"world_size": world_size, "cache_id": snapshot.cache_id}
        manifest = EpochManifest(request.epoch, settings, (), ())
        if request.done:
            manifest = _known(path, manifest)
        stretch = Stretch(
            request.index,
            request.done,
            plan.num_batches,
            plan.position(plan.num_batches),
            plan.batch_size,
            plan.ranks,
            segment.record,
        )
        save_manifest(path, manifest.with_stretch(stretch, contents))


def _known(path: str, fresh: EpochManifest) -> EpochManifest:
    """The manifest of a resumed epoch at `path`, or `fresh` if there is none."""
    try:
        return load_manifest(path)
    except CacheStreamError:
        return fresh


_NAME: Final = re.compile(r"epoch-([0-9]{6,})\.json")


@dataclass(frozen=True, slots=True)
class Rest:
    """The later stretches of an epoch: for each, the samples of its order, and the number of a batch
    sampler's batches (0 without one).
    """

    stretches: tuple[tuple[int, int], ...]

    def batches(self, batch_size: int, ranks: int) -> int:
        """The number of batches that these stretches give each of `ranks`."""
        return sum(
            cut // ranks if cut else count_batches(samples, batch_size, ranks, drop_last=False)
            for samples, cut in self.stretches
        )


class Replay:
    """The manifests at `path`, one file or a folder of them. Raises ConfigError if there are none."""

    def __init__(self, path: str) -> None:
        self._single = path if not os.path.isdir(path) else None
        self._folder = path
        self._contents = Contents()
        self._load = lru_cache(maxsize=2)(load_manifest)
        if self._single is not None:
            self.epochs = [self._load(path).epoch]
            return
        names = [_NAME.fullmatch(name) for name in os.listdir(path)]
        self.epochs = sorted(int(match[1]) for match in names if match is not None)
        if not self.epochs:
            raise ConfigError(
                f"replay={path!r} holds no manifests (epoch-000000.json, …); EpochLoader(record=…) writes them"
            )

    def stretch(self, cache: Cache, epoch: int, index: int, leader: int) -> SegmentRecord:
        """Stretch `index` of `epoch` with the shard ids of `cache`, whose first rank is `leader`.

        Raises EpochError when some of its shards are not cached.
        """
        manifest, stretches = self._stretches(epoch, leader)
        record = stretches[index].drawn()
        # Negative numbers stand for shards that were gone when the epoch was recorded.
        needed = {place: manifest.shards[place] for place in record.shard_ids.tolist() if place >= 0}
        found = self._contents.find(cache, needed.values())
        missing = [shard for shard in needed.values() if shard.hash not in found]
        if missing:
            raise EpochError(
                f"{len(missing)} of the {len(needed)} shards of epoch {epoch} are not cached in {cache.path} "
                f"({sum(shard.num_samples for shard in missing)} samples): bring them back with "
                f"'cachestream refetch {self._path(epoch, leader)} SOURCE {cache.path}'"
            )
        ids = [found[needed[place].hash] if place >= 0 else place for place in record.shard_ids.tolist()]
        return record.renumbered(np.array(ids, np.int64))

    def rest(self, epoch: int, index: int, leader: int) -> Rest:
        """The stretches after stretch `index` of `epoch`."""
        later = self._stretches(epoch, leader)[1][index + 1 :]
        return Rest(tuple((stretch.samples, _cut(stretch)) for stretch in later))

    def _path(self, epoch: int, leader: int) -> str:
        return self._single or os.path.join(self._folder, manifest_name(epoch, leader))

    def _stretches(self, epoch: int, leader: int) -> tuple[EpochManifest, list[Stretch]]:
        if epoch not in self.epochs:
            raise EpochError(
                f"epoch {epoch} is not recorded in {self._folder}, which holds the epochs {_ranges(self.epochs)}"
            )
        manifest = self._load(self._path(epoch, leader))
        return manifest, [stretch for stretch in manifest.stretches if stretch.batches]


def _cut(stretch: Stretch) -> int:
    bounds = rebuild(stretch.drawn())[1]
    return 0 if bounds is None else len(bounds) - 1


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
