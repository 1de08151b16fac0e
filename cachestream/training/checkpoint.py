"""An epoch's segment as plain values, from which another process can rebuild its exact order.

A record names the shards, the order of their samples, and the cuts made since: each resume cuts off the part
already trained on, and the samples of shards that are gone by then. Cuts hold for any batch size and world
size, because a plan's batches are runs of the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from cachestream.errors import ConfigError
from cachestream.permutation import Permutation
from cachestream.schema import IntArray, Snapshot, Split
from cachestream.training.plan import (
    ListedOrder,
    LocalOrder,
    SampleOrder,
    SequentialOrder,
    ShuffledOrder,
    TailOrder,
)

OrderKind = Literal["shuffled", "sequential", "listed", "local"]


@dataclass(frozen=True, slots=True)
class SegmentCut:
    """The order from `position` up to, and not including, `stop` (None: its end), without the
    shards `gone`.
    """

    position: int
    gone: tuple[int, ...] = ()
    stop: int | None = None

    def to_state(self) -> list[Any]:
        return [self.position, list(self.gone), *([] if self.stop is None else [self.stop])]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRecord:
    """A segment of an epoch: `drawn` samples of the shards, in a recorded order, less the cuts.

    `key` seeds the permutation of a "shuffled" order and of a "local" one, whose window and run length are in
    `local`. `listed` and `bounds` are a sampler's samples and batch ends. `split`: the split of the samples,
    None for all.
    """

    shard_ids: IntArray
    counts: IntArray
    kind: OrderKind
    drawn: int
    key: int = 0
    listed: IntArray | None = None
    bounds: IntArray | None = None
    cuts: tuple[SegmentCut, ...] = ()
    local: tuple[int, int] | None = None
    split: str | None = None

    def check_split(self, split: Split | None) -> None:
        """Raise ConfigError if the samples are not those of `split`."""
        asked = None if split is None else split.name
        if asked != self.split:
            raise ConfigError(
                f"this epoch was drawn with split={self.split!r}, and this EpochLoader has split={asked!r}; give it the same"
            )

    def cut(self, position: int, gone: tuple[int, ...] = (), stop: int | None = None) -> SegmentRecord:
        """The record from `position` of its present order up to, and not including, `stop`."""
        if not position and not gone and stop is None:
            return self
        return replace(self, cuts=(*self.cuts, SegmentCut(position, gone, stop)))

    def renumbered(self, shard_ids: IntArray) -> SegmentRecord:
        """The same order over the shards with the ids `shard_ids` (int64 `[num_shards]`)."""
        names = dict(zip(self.shard_ids.tolist(), shard_ids.tolist(), strict=True))
        cuts = tuple(replace(cut, gone=tuple(names[old] for old in cut.gone)) for cut in self.cuts)
        return replace(self, shard_ids=shard_ids, cuts=cuts)

    @property
    def gone(self) -> set[int]:
        """The ids of the shards whose samples were cut out."""
        return {shard_id for cut in self.cuts for shard_id in cut.gone}

    def to_state(self) -> dict[str, Any]:
        """The record as plain dicts, lists, numbers and strings, for checkpoints."""
        state: dict[str, Any] = {
            "shards": self.shard_ids.tolist(),
            "counts": self.counts.tolist(),
            "kind": self.kind,
            "drawn": self.drawn,
            "key": self.key,
            "cuts": [cut.to_state() for cut in self.cuts],
        }
        optional = {
            "listed": None if self.listed is None else self.listed.tolist(),
            "bounds": None if self.bounds is None else self.bounds.tolist(),
            "split": self.split,
            "local": None if self.local is None else list(self.local),
        }
        return state | {name: value for name, value in optional.items() if value is not None}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SegmentRecord:
        """The record of a state; raises ConfigError for a value that `to_state` did not return."""
        try:
            return cls(
                shard_ids=np.array(state["shards"], np.int64),
                counts=np.array(state["counts"], np.int64),
                kind=state["kind"],
                drawn=int(state["drawn"]),
                key=int(state["key"]),
                listed=_integers(state.get("listed")),
                bounds=_integers(state.get("bounds")),
                cuts=tuple(
                    SegmentCut(int(cut[0]), tuple(cut[1]), *map(int, cut[2:])) for cut in state["cuts"]
                ),
                local=_window_and_run(state.get("local")),
                split=state.get("split"),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is no state of an EpochLoader ({error!r}); pass what state_dict() gave"
            ) from error


def _integers(values: list[int] | None) -> IntArray | None:
    return None if values is None else np.array(values, np.int64)


def _window_and_run(values: list[int] | None) -> tuple[int, int] | None:
    if values is None:
        return None
    window, run = map(int, values)
    if window < 1 or run < 1:
        raise ValueError(f"a window of {window} samples in runs of {run}")
    return window, run


def rebuild(record: SegmentRecord) -> tuple[SampleOrder, IntArray | None]:
    """The order that `record` describes, in sample numbers of its own shards, and the bounds of a batch
    sampler.
    """
    starts = _starts(record.counts)
    order, bounds = _drawn_order(record, int(starts[-1])), record.bounds
    for cut in record.cuts:
        tail = TailOrder(order, min(cut.position, order.size), cut.stop)
        if bounds is not None:
            bounds = bounds if cut.stop is None else bounds[bounds <= cut.stop]
            bounds = bounds[np.searchsorted(bounds, cut.position) :] - cut.position
        if not cut.gone:
            order = tail
            continue
        indices = tail.at(np.arange(tail.size, dtype=np.int64))
        shards = np.searchsorted(starts, indices, side="right") - 1
        keep = ~np.isin(record.shard_ids[shards], cut.gone)
        order = ListedOrder(indices[keep])
        if bounds is not None:
            bounds = np.unique(np.concatenate([[0], np.cumsum(keep)])[bounds])
    return order, bounds


def translate(order: SampleOrder, record: SegmentRecord, snapshot: Snapshot) -> SampleOrder:
    """Translate `order` to sample numbers of `snapshot`, which holds the record's shards less those that are
    gone.
    """
    if np.array_equal(record.shard_ids, snapshot.shard_ids):
        return order
    starts = _starts(record.counts)
    indices = order.at(np.arange(order.size, dtype=np.int64))
    shards = np.searchsorted(starts, indices, side="right") - 1
    positions = np.searchsorted(snapshot.shard_ids, record.shard_ids[shards])
    return ListedOrder(_starts(snapshot.counts)[positions] + (indices - starts[shards]))


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _drawn_order(record: SegmentRecord, num_samples: int) -> SampleOrder:
    if record.listed is not None:
        return ListedOrder(record.listed)
    if record.kind == "sequential":
        return SequentialOrder(record.drawn)
    if record.local is not None:
        return LocalOrder(record.drawn, num_samples, *record.local, record.key)
    return ShuffledOrder(record.drawn, Permutation(num_samples, record.key))
