"""The manifest of an epoch: its shards by content, their order, and how it was cut into batches, as a JSON
file.

An epoch is a chain of stretches, each a run of batches from one set of shards: one stretch for each pass over
the cache, and one more for each resume of the job. The command line reads manifests, so
nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cachestream.errors import ConfigError
from cachestream.storage.contents import Content
from cachestream.training.checkpoint import SegmentRecord, rebuild

_FORMAT: Final = "cachestream epoch"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """`batches` batches for each of the `ranks` that shared the order, after `done` batches of the epoch.

    `samples` samples of the order were drawn for them. The shards of `record` are numbered by their index in
    the manifest.
    """

    index: int
    done: int
    batches: int
    samples: int
    batch_size: int
    ranks: int
    record: SegmentRecord

    def until(self, done: int) -> Stretch:
        """The stretch, cut off after `done` batches of the epoch."""
        if done >= self.done + self.batches:
            return self
        batches = max(0, done - self.done)
        bounds = rebuild(self.record)[1]
        step = batches * self.ranks
        samples = step * self.batch_size if bounds is None else int(bounds[step])
        return replace(self, batches=batches, samples=min(samples, self.samples))

    def drawn(self) -> SegmentRecord:
        """The record of the samples that were drawn."""
        return self.record.cut(0, stop=self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class EpochManifest:
    """An epoch as it was trained on one cache: `shards` are those that its stretches name.

    `settings` describe the job for readers: world size, seed and the like.
    """

    epoch: int
    settings: dict[str, Any]
    shards: tuple[Content, ...]
    stretches: tuple[Stretch, ...]

    def with_stretch(self, stretch: Stretch, contents: Iterable[Content]) -> EpochManifest:
        """The epoch, continued with `stretch` from its beginning; its shards have the ids in `contents`."""
        places = {(shard.shard_id, shard.hash): place for place, shard in enumerate(self.shards)}
        shards = list(self.shards)
        names: dict[int, int] = {}
        for content in contents:
            identity = content.shard_id, content.hash
            if identity not in places:
                places[identity] = len(shards)
                shards.append(content)
            names[content.shard_id] = places[identity]
        # Shards that were gone already get negative numbers, which are never looked up.
        ids = np.array([names.get(old, -1 - old) for old in stretch.record.shard_ids.tolist()], np.int64)
        before = [old.until(stretch.done) for old in self.stretches if old.done < stretch.done]
        added = replace(stretch, record=stretch.record.renumbered(ids))
        return replace(self, shards=tuple(shards), stretches=(*before, added))


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
        "stretches": [_to_state(stretch) for stretch in manifest.stretches],
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
                f"{path} is a {values['format']} of version {values['version']}, and this cachestream reads version {_VERSION}"
            )
        fills = values["fills"]
        shards = [
            Content(shard_id, count, name, dict(fills[fill]) | ({} if spans is None else {"spans": spans}))
            for shard_id, count, name, fill, spans in values["shards"]
        ]
        stretches = tuple(map(_from_state, values["stretches"]))
        return EpochManifest(int(values["epoch"]), values["settings"], tuple(shards), stretches)
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


def _to_state(stretch: Stretch) -> dict[str, Any]:
    names = ("index", "done", "batches", "samples", "batch_size", "ranks")
    return {name: getattr(stretch, name) for name in names} | {"order": stretch.record.to_state()}


def _from_state(state: dict[str, Any]) -> Stretch:
    names = ("index", "done", "batches", "samples", "batch_size", "ranks")
    return Stretch(
        **{name: int(state[name]) for name in names}, record=SegmentRecord.from_state(state["order"])
    )
