"""The options of an `EpochLoader`, checked, and hints for arguments that belong elsewhere."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import (
    SHORTEST_S,
    check_count,
    check_seconds,
    check_share,
    parse_path,
)
from cachestream.errors import ConfigError
from cachestream.storage.view import ALL, View
from cachestream.training.alike_batches import check_max_tokens
from cachestream.training.batches.gather import Ragged, check_ragged
from cachestream.training.manifests import Replay
from cachestream.training.replication import Replication
from cachestream.training.samplers import check_sampler
from cachestream.training.weights import KeyWeights

if TYPE_CHECKING:
    from cachestream.schema import Split
    from cachestream.storage.cache import Cache
    from cachestream.training.mixture import Mixture
    from cachestream.training.samplers import SamplerLike

logger = logging.getLogger("cachestream")
HINTS: Final = {
    "transform": "give it to start_worker (it runs before caching), or batch_transform= for work on whole batches",
    **dict.fromkeys(
        ("num_workers", "worker_init_fn", "persistent_workers", "multiprocessing_context"),
        "one thread gathers at memory speed, and no process is needed; decoding runs in "
        "start_worker(num_workers=)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The options of an `EpochLoader`; see there."""

    batch_size: int
    shuffle: bool
    seed: int
    epoch_size: int | None
    min_samples: int | None
    turnover: float
    drop_last: bool
    timeout_s: float
    sampler: SamplerLike | None
    weights: KeyWeights | None
    locality: int | None
    with_keys: bool
    ragged: Ragged
    mixture: Mixture | None = None
    replay: Replay | None = None
    split: Split | None = None
    max_tokens: Mapping[str, int] | None = None
    group_by: str | None = None
    view: View = ALL
    replication: Replication = Replication()  # noqa: RUF009  frozen

    def to_compare(self) -> dict[str, Any]:
        """The options that must be equal on all ranks."""
        given = ("sampler", "replay", "weights", "mixture")
        optional = {name: getattr(self, name) is not None for name in given}
        return self._in_common() | optional | {"where": self.view.selects} | self.replication.identity

    def to_record(self) -> dict[str, Any]:
        """The options that a manifest states. `sampler` is its class, "weights" or "mixture"."""
        by = None if self.sampler is None else type(self.sampler).__name__
        by = by if self.mixture is None else "mixture"
        return self._in_common() | {"sampler": by if self.weights is None else "weights"}

    def _in_common(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "epoch_size", "drop_last", "locality")
        split = {} if self.split is None else {"split": self.split.name, "holdout": self.split.holdout}
        tokens = {} if self.max_tokens is None else {"max_tokens": dict(self.max_tokens)}
        groups = {} if self.group_by is None else {"group_by": self.group_by}
        return {name: getattr(self, name) for name in names} | split | tokens | groups

    def checked(self, replay: str | os.PathLike[str] | None) -> LoaderOptions:
        """These options with plain numbers, and with the manifests at `replay`, which say what is drawn.

        Raises ConfigError for wrong options, and for those that do not go together.
        """
        counts: dict[str, int] = {"batch_size": check_count("batch_size", self.batch_size)}
        for name in ("epoch_size", "min_samples", "locality"):
            value = getattr(self, name)
            if value is not None:
                counts[name] = check_count(name, value)
        check_ragged(self.ragged)
        check_share("turnover", self.turnover)
        check_seconds("timeout_s", self.timeout_s, SHORTEST_S)
        seed = check_count("seed", self.seed, -math.inf)
        draws = ("sampler", "weights", "mixture", "locality", "max_tokens", "group_by")
        given = [f"{name}=" for name in draws if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} do not go together: each says what is drawn")
        if not self.shuffle and (self.locality is not None or self.mixture is not None):
            raise ConfigError(f"{given[0]} is a way to shuffle: it goes together with shuffle=True")
        if self.sampler is not None:
            check_sampler(self.sampler)
        if self.max_tokens is not None:
            check_max_tokens(self.max_tokens)
        if self.group_by is not None:
            check_group_by(self.group_by, self.ragged)
        with_keys = self.with_keys or self.weights is not None
        options = replace(self, seed=seed, with_keys=with_keys, **counts)  # type: ignore[arg-type]
        return options if replay is None else options._of_replay(parse_path(replay, "replay"))

    def _of_replay(self, path: str) -> LoaderOptions:
        for name in ("epoch_size", "min_samples", "sampler", "weights", "locality", "mixture", "max_tokens"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}= and replay= do not go together: the manifest says what is drawn")
        # Orders end where the recorded ones did: the samples at the end were a batch, and are not dropped.
        return replace(self, drop_last=False, replay=Replay(path))


def check_group_by(group_by: object, ragged: Ragged) -> None:
    """Raise ConfigError unless `group_by` names a field that `ragged` does not name."""
    if not isinstance(group_by, str):
        raise ConfigError(
            f"group_by={group_by!r}: give the name of the field by whose shape batches are formed"
        )
    if isinstance(ragged, Mapping) and group_by in ragged:
        raise ConfigError(
            f"group_by= and ragged= both name {group_by!r}: of one shape, it is a tensor; leave it out of "
            "ragged="
        )


def make_weights(weights: object) -> KeyWeights | None:
    """The weights for `weights=`: None, initially equal ones, or those of a mapping."""
    if weights is None or weights is False:
        return None
    if weights is True or isinstance(weights, Mapping):
        return KeyWeights(None if weights is True else weights)
    raise ConfigError(
        f"weights={type(weights).__name__}: give True, or a mapping of keys to weights; for weights by "
        "position sampler=lambda dataset: WeightedRandomSampler(weights_of(dataset), len(dataset))"
    )


def warn_without_weights(cache: Cache, options: LoaderOptions) -> None:
    """Warn of a loader to train with that has no weights, over a cache that evicts by weight."""
    trains = options.replay is None and (options.split is None or not options.split.held_out)
    if trains and options.weights is None and cache.eviction == "least-weight":
        words = "%s evicts by weight, and this loader has no weights: its shards count as average; give weights=True"
        logger.warning(words, cache.path)


def check_objects(cache: object, batch_transform: object) -> None:
    """Raise ConfigError unless `cache` is a cache and `batch_transform`, if any, a function."""
    if not hasattr(cache, "take_snapshot"):
        raise ConfigError(f"cache={cache!r}: give a cachestream.Cache, such as Cache('/scratch/train')")
    if batch_transform is not None and not callable(batch_transform):
        raise ConfigError(
            f"batch_transform={batch_transform!r}: give a function of a batch, and perhaps a generator"
        )
