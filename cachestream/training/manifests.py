"""Manifests of epochs: written beside the training, and replayed.

A manifest is a JSON file that describes an epoch: its shards by content, their order, and its cuts into
batches. An epoch is a chain of segments, each a run of batches from one set of shards: one segment for each
pass over the cache, and one more for each resume of the job. The command line reads manifests, so nothing
here imports torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestream.errors import CacheStreamError, ConfigError, EpochError, warn_caller
from cachestream.storage.leases import Lease, join_lease
from cachestream.storage.shard import Content, Contents
from cachestream.storage.snapshots import sample_counts
from cachestream.training.plan import OrderRecord, count_batches, rebuild

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.training.position import Segment

_FORMAT: Final = "cachestream epoch"
_VERSION: Final = 1
_NAME: Final = re.compile(r"epoch-([0-9]{6,})(\.rank[0-9]+)?\.json")  # the first rank of a cache, if not 0
_COUNTS: Final = ("index", "done", "batches", "samples", "batch_size", "ranks")  # of a segment
_CLOSE_S: Final = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSegment:
    """`batches` batches for each of the `ranks` that shared the order, after `done` batches of the epoch.

    `samples` samples of the order were drawn for them. `record` numbers shards as the manifest does.
    """

    index: int
    done: int
    batches: int
    samples: int
    batch_size: int
    ranks: int
    record: OrderRecord

    def to_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS} | {"order": self.record.to_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RecordedSegment:
        counts = {name: int(state[name]) for name in _COUNTS}
        return cls(**counts, record=OrderRecord.from_state(state["order"]))

    def until(self, done: int) -> RecordedSegment:
        """The segment, cut off after `done` batches of the epoch."""
        if done >= self.done + self.batches:
            return self
        batches = max(0, done - self.done)
        bounds = rebuild(self.record)[1]
        step = batches * self.ranks
        samples = step * self.batch_size if bounds is None else int(bounds[step])
        return replace(self, batches=batches, samples=min(samples, self.samples))

    def drawn(self) -> OrderRecord:
        """The record of the samples that were drawn."""
        return self.record.cut(0, stop=self.samples)

    def batches_for(self, batch_size: int, ranks: int) -> int:
        """The number of batches that a replay gives each of `ranks`, with a smaller last one."""
        bounds = rebuild(self.drawn())[1]
        if bounds is not None and len(bounds) > 1:
            return (len(bounds) - 1) // ranks
        return count_batches(self.samples, batch_size, ranks, drop_last=False)


@dataclass(frozen=True, slots=True, eq=False)
class EpochManifest:
    """An epoch as it was trained on one cache: `shards` are those that its segments name.

    `settings` describe the job for readers: world size, seed and the like.
    """

    epoch: int
    settings: dict[str, Any]
    shards: tuple[Content, ...]
    segments: tuple[RecordedSegment, ...]

    def continued(self, segment: RecordedSegment, contents: Iterable[Content]) -> EpochManifest:
        """The epoch with `segment` in place of all from its first batch on. `contents` are the shards of
        `segment`, with the ids that it uses.
        """
        numbers = {(shard.shard_id, shard.hash): number for number, shard in enumerate(self.shards)}
        shards = list(self.shards)
        names: dict[int, int] = {}
        for content in contents:
            identity = content.shard_id, content.hash
            if identity not in numbers:
                numbers[identity] = len(shards)
                shards.append(content)
            names[content.shard_id] = numbers[identity]
        # Shards that were gone already get negative numbers, which are never looked up.
        ids = np.array([names.get(old, -1 - old) for old in segment.record.shard_ids.tolist()], np.int64)
        before = [old.until(segment.done) for old in self.segments if old.done < segment.done]
        added = replace(segment, record=segment.record.renumbered(ids))
        return replace(self, shards=tuple(shards), segments=(*before, added))


def manifest_name(epoch: int, leader: int) -> str:
    """The file name for `epoch` on the cache whose first rank is `leader`."""
    return f"epoch-{epoch:06d}.json" if not leader else f"epoch-{epoch:06d}.rank{leader}.json"


def save_manifest(path: str, manifest: EpochManifest) -> None:
    """Write `manifest` atomically. Raises OSError."""
    fills: dict[str, int] = {}
    shards = []
    for shard in manifest.shards:
        head = {name: value for name, value in shard.fill.items() if name != "spans"}
        fill = fills.setdefault(json.dumps(head), len(fills))
        shards.append([shard.shard_id, shard.num_samples, shard.hash, fill, shard.fill.get("spans")])
    values = {
        "format": _FORMAT,
        "version": _VERSION,
        "epoch": manifest.epoch,
        "settings": manifest.settings,
        "stretches": [segment.to_state() for segment in manifest.segments],
        "fills": [json.loads(text) for text in fills],
        "shards": shards,
    }
    temporary = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(values, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def load_manifest(path: str) -> EpochManifest:
    """Read the manifest at `path`; raises ConfigError for a missing file or another format."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        if values["format"] != _FORMAT or values["version"] != _VERSION:
            raise ConfigError(
                f"{path} is a {values['format']} of version {values['version']}, and this cachestream reads "
                f"version {_VERSION}"
            )
        fills = values["fills"]
        shards = [
            Content(shard_id, count, name, dict(fills[fill]) | ({} if spans is None else {"spans": spans}))
            for shard_id, count, name, fill, spans in values["shards"]
        ]
        segments = tuple(map(RecordedSegment.from_state, values["stretches"]))
        return EpochManifest(int(values["epoch"]), values["settings"], tuple(shards), segments)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give the manifest of an epoch"
        ) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no manifest of an epoch ({error!r}); EpochLoader(record=FOLDER) writes them"
        ) from error


class Recorder:
    """A writer of manifests into `folder`, in a thread of its own. Used from the training thread.

    `settings` go into each manifest. One that cannot be written, or not in time, is a warning.
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
        """Wait up to `_CLOSE_S` for the manifests; later ones are still written in the background."""
        late = wait(self._sent, _CLOSE_S).not_done
        if self._thread is not None:
            self._thread.shutdown(wait=not late)
            self._thread = None
        self._warn()
        self._warn_of_late(late)

    def _warn(self) -> None:
        done = [future for future in self._sent if future.done()]
        self._sent = [future for future in self._sent if not future.done()]
        for error in filter(None, (future.exception() for future in done)):
            warn_caller(f"an epoch could not be recorded: {error}")

    def _warn_of_late(self, late: set[Future[None]]) -> None:
        if late:
            warn_caller(
                f"{len(late)} of the manifests in {self._folder} are not written after {_CLOSE_S:g} s, and "
                "will be when the disk answers: do not replay from there before; record= a folder on a "
                "faster disk"
            )

    def _write(self, segment: Segment, lease: Lease, leader: int, world_size: int) -> None:
        position, plan, snapshot = segment.position, segment.plan, segment.snapshot
        try:
            contents = self._contents.read(snapshot.root, snapshot.shard_ids.tolist())
        finally:
            lease.release()
        path = os.path.join(self._folder, manifest_name(position.epoch, leader))
        settings = self._settings | {"world_size": world_size, "cache_id": snapshot.cache_id}
        manifest = EpochManifest(position.epoch, settings, (), ())
        if position.done:
            with suppress(CacheStreamError):  # there is none where the epoch began elsewhere
                manifest = load_manifest(path)
        recorded = RecordedSegment(
            position.index,
            position.done,
            plan.num_batches,
            plan.position(plan.num_batches),
            plan.batch_size,
            plan.ranks,
            segment.record,
        )
        save_manifest(path, manifest.continued(recorded, contents))


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
        self.epochs = sorted({int(match[1]) for match in names if match is not None})
        if not self.epochs:
            raise ConfigError(
                f"replay={path!r} holds no manifests (epoch-000000.json, …); EpochLoader(record=…) writes "
                "them"
            )

    def segment(self, cache: Cache, epoch: int, index: int, leader: int) -> OrderRecord:
        """Segment `index` of `epoch` with the shard ids of `cache`, whose first rank is `leader`.

        Raises EpochError when some of its shards are not cached.
        """
        manifest, segments = self._segments(epoch, leader)
        record = segments[index].drawn()
        # Negative numbers stand for shards that were gone when the epoch was recorded.
        numbers = record.shard_ids.tolist()
        needed = {number: manifest.shards[number] for number in numbers if number >= 0}
        found = self._contents.find(cache.path, sample_counts(cache.catalogue), needed.values())
        missing = [shard for shard in needed.values() if shard.hash not in found]
        if missing:
            raise EpochError(
                f"{len(missing)} of the {len(needed)} shards of epoch {epoch} are not cached in {cache.path} "
                f"({sum(shard.num_samples for shard in missing)} samples): bring them back with "
                f"'cachestream refetch {self._path(epoch, leader)} SOURCE {cache.path}'"
            )
        ids = [found[needed[number].hash] if number >= 0 else number for number in numbers]
        return record.renumbered(np.array(ids, np.int64))

    def batches_after(self, epoch: int, index: int, leader: int, batch_size: int, ranks: int) -> int:
        """The number of batches that the segments after segment `index` of `epoch` give each of `ranks`."""
        later = self._segments(epoch, leader)[1][index + 1 :]
        return sum(segment.batches_for(batch_size, ranks) for segment in later)

    def _path(self, epoch: int, leader: int) -> str:
        return self._single or os.path.join(self._folder, manifest_name(epoch, leader))

    def _segments(self, epoch: int, leader: int) -> tuple[EpochManifest, list[RecordedSegment]]:
        if epoch not in self.epochs:
            raise EpochError(
                f"epoch {epoch} is not recorded in {self._folder}, which holds the epochs "
                f"{_ranges(self.epochs)}"
            )
        manifest = self._load(self._path(epoch, leader))
        return manifest, [segment for segment in manifest.segments if segment.batches]


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
