"""Replay: the recorded epochs again, from whichever cache holds their shards."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import ConfigError, EpochError
from cachestream.storage.contents import Contents
from cachestream.training.manifest import Manifest, Stretch, load_manifest, manifest_name
from cachestream.training.plan import count_batches
from cachestream.training.resume import Record, rebuild

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["Replay", "Rest"]

_NAME: Final = re.compile(r"epoch-([0-9]{6,})\.json")


@dataclass(frozen=True, slots=True)
class Rest:
    """What comes after a stretch in its epoch: for each, the samples of its order, and the batches that a batch
    sampler cut it into (0 where none did).
    """

    stretches: tuple[tuple[int, int], ...]

    def batches(self, batch_size: int, ranks: int) -> int:
        """How many batches these give each of `ranks`."""
        return sum(
            cut // ranks if cut else count_batches(samples, batch_size, ranks, drop_last=False)
            for samples, cut in self.stretches
        )


class Replay:
    """The manifests at `path`: one file, or a folder of them. Raises ConfigError where there are none."""

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

    def stretch(self, cache: Cache, epoch: int, index: int, leader: int) -> Record:
        """Stretch `index` of `epoch` over the shards of `cache`, for the cache whose first rank is `leader`.

        Raises EpochError when some of its shards are not cached.
        """
        manifest, stretches = self._stretches(epoch, leader)
        record = stretches[index].drawn()
        # Numbers below 0 are of shards that the epoch did without.
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
        """What comes after stretch `index` of `epoch`."""
        later = self._stretches(epoch, leader)[1][index + 1 :]
        return Rest(tuple((stretch.samples, _cut(stretch)) for stretch in later))

    def _path(self, epoch: int, leader: int) -> str:
        return self._single or os.path.join(self._folder, manifest_name(epoch, leader))

    def _stretches(self, epoch: int, leader: int) -> tuple[Manifest, list[Stretch]]:
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
