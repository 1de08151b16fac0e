"""The samples of a snapshot that a rank gets in each batch: pure functions, any batch in O(1).

The samples are cut into runs of consecutive ones, as they lie in the shards. The runs are put into a
pseudo-random order, and then each stretch of `window` samples of that order is shuffled. So batches come from
`window` samples at a time, which fit in memory; each run is read as a whole, once an epoch; and a window
holds runs from all over the cache.

Such two-level shuffles are common: MosaicML Streaming's `py1b` shuffles shards and then blocks of
`shuffle_block_size` samples; WebDataset shuffles shards and then draws from a buffer of samples, as tf.data
does (`buffer_size`). Blocks are used here rather than a buffer, because any position in them is computed by
itself: a resume needs only a number. The beginning of the first run is drawn too, so that runs and windows
have other borders every epoch.

An order lists the samples of a segment (a pass over one snapshot, or a part of it); a plan cuts the order
into batches for every rank. Neither holds anything per sample, unless a sampler gave a list.

A record is an order as plain values: another process rebuilds the exact order from it. It names the shards,
the order of their samples, and the cuts made since: each resume cuts off the part already trained on, and the
samples of shards that are gone by then. Cuts hold for any batch size and world size, because a plan's batches
are runs of the order.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from cachestream.errors import ConfigError
from cachestream.permutation import Permutation, mix_key
from cachestream.schema import IntArray, Snapshot, Split

OrderKind = Literal["shuffled", "sequential", "listed", "local"]
RUNS_A_SHARD: Final = 16  # of 4 MiB at the usual size of shards: a disk reads them as quickly as whole shards
_RUNS_KEY: Final = 1
_START_KEY: Final = 2
_WINDOW_KEY: Final = 3


def run_length(counts: IntArray) -> int:
    """The number of samples in a run, for shards of `counts` samples: a sixteenth of the largest."""
    return max(1, int(counts.max(initial=1)) // RUNS_A_SHARD)


@dataclass(frozen=True, slots=True)
class LocalOrder:
    """The first `size` of `num_samples`, shuffled within windows of `window` samples made of runs of `run`.

    A bijection of range(num_samples) for given (num_samples, window, run, key); see the module for the
    algorithm. The last run, if it is shorter than the others, comes last.
    """

    size: int
    num_samples: int
    window: int
    run: int
    key: int

    def at(self, positions: IntArray) -> IntArray:
        """The sample indices at `positions` (int64 `[n]`, each in range(size)), int64 `[n]`."""
        windows = positions // self.window
        firsts = windows * self.window
        within = positions - firsts
        if len(windows) and windows[0] == windows[-1] and (windows == windows[0]).all():
            return self._samples(firsts + self._shuffle(int(windows[0])).at(within))
        shuffled = np.empty_like(positions)
        for number in np.unique(windows).tolist():
            here = np.flatnonzero(windows == number)
            shuffled[here] = firsts[here] + self._shuffle(number).at(within[here])
        return self._samples(shuffled)

    def needs(self, position: int) -> tuple[int, int]:
        """The range [first, end) in the order of runs that must be read when `position` is reached.

        It is the window of `position`, and of the next window as large a part as has passed of this one, so
        that the load on the disk is steady.
        """
        window = position - position % self.window
        end = min(-(-self.size // self.window) * self.window, self.num_samples)
        return window, min(position + self.window, end)

    def stretches(self, first: int, last: int) -> tuple[IntArray, IntArray]:
        """The samples at positions [first, last) of the order of runs, as stretches of consecutive samples:
        the first of each and the one after its last, int64 `[n]` each.
        """
        if first >= last:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        cuts = np.arange(first - first % self.run + self.run, last, self.run, dtype=np.int64)
        begins, ends = np.concatenate([[first], cuts]), np.concatenate([cuts, [last]])
        samples = self._samples(begins)
        stops = samples + ends - begins
        # A run may pass the end of the last shard; it continues in the first.
        over = stops[stops > self.num_samples] - self.num_samples
        starts = np.concatenate([samples, np.zeros(len(over), np.int64)])
        return starts, np.concatenate([np.minimum(stops, self.num_samples), over])

    def _samples(self, positions: IntArray) -> IntArray:
        """The samples at `positions` in the order of runs."""
        whole = self.num_samples // self.run
        runs = positions // self.run
        rows = positions - runs * self.run
        if whole > 1:
            full = runs < whole
            runs[full] = _permutation(whole, mix_key(self.key, _RUNS_KEY)).at(runs[full])
        start = mix_key(self.key, _START_KEY) % self.num_samples
        found: IntArray = (runs * self.run + rows + start) % self.num_samples
        return found

    def _shuffle(self, window: int) -> Permutation:
        length = min(self.window, self.num_samples - window * self.window)
        return _permutation(length, mix_key(self.key, _WINDOW_KEY, window))


@lru_cache(maxsize=64)
def _permutation(n: int, key: int) -> Permutation:
    return Permutation(n, key)


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """The first `size` samples as they lie in the snapshot: shard by shard, in order of arrival."""

    size: int

    def at(self, positions: IntArray) -> IntArray:
        return positions


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """The first `size` of a pseudo-random permutation of all samples."""

    size: int
    permutation: Permutation

    def at(self, positions: IntArray) -> IntArray:
        return self.permutation.at(positions)


@dataclass(frozen=True, slots=True, eq=False)
class ListedOrder:
    """A list of samples, int64 `[size]`: those of a sampler, or the rest of an interrupted epoch."""

    indices: IntArray

    @property
    def size(self) -> int:
        return len(self.indices)

    def at(self, positions: IntArray) -> IntArray:
        return self.indices[positions]


@dataclass(frozen=True, slots=True)
class TailOrder:
    """Another order from position `start` up to, and not including, `stop` (None: its end)."""

    order: SampleOrder
    start: int
    stop: int | None = None

    @property
    def size(self) -> int:
        stop = self.order.size if self.stop is None else min(self.stop, self.order.size)
        return max(0, stop - self.start)

    def at(self, positions: IntArray) -> IntArray:
        return self.order.at(positions + self.start)


# A sequence of `size` sample indices; `at` gives those at any positions.
SampleOrder: TypeAlias = LocalOrder | SequentialOrder | ShuffledOrder | ListedOrder | TailOrder


def count_batches(num_samples: int, batch_size: int, ranks: int, drop_last: bool) -> int:
    """The number of batches for each of `ranks`, the same for all.

    With `drop_last` only whole batches count. Without it, the remaining samples make one more batch, in
    shares that differ by at most one sample, if there is at least one for each rank; fewer are dropped.
    """
    full, rest = divmod(num_samples, batch_size * ranks)
    return full + (not drop_last and rest >= ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`num_batches` batches for each of `ranks`, cut from an order of `num_samples`.

    Batch i of all ranks together is a run of the order, so a resume needs only a position in the order.
    `bounds` (int64 `[n + 1]`) are the ends of a batch sampler's batches, which ranks take in turns.
    """

    num_samples: int
    batch_size: int
    ranks: int
    num_batches: int
    bounds: IntArray | None = None

    @property
    def mean_batch(self) -> float:
        """The mean number of samples of a batch."""
        if self.bounds is None:
            return self.batch_size
        return int(self.bounds[-1]) / max(1, len(self.bounds) - 1)

    def position(self, batch_index: int) -> int:
        """The position in the order at which batch `batch_index` of all ranks begins."""
        if self.bounds is not None:
            return int(self.bounds[min(batch_index * self.ranks, len(self.bounds) - 1)])
        return min(batch_index * self.batch_size * self.ranks, self.num_samples)

    def spans(self, rank: int, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """Batches range(`first`, `stop`) of `rank` as runs of the order: starts and ends, int64 `[n]`."""
        numbers = np.arange(first, stop, dtype=np.int64)
        if self.bounds is not None:
            own = numbers * self.ranks + rank
            return self.bounds[own], self.bounds[own + 1]
        together = self.batch_size * self.ranks
        begins = numbers * together
        shares, extra = np.divmod(np.minimum(self.num_samples - begins, together), self.ranks)
        starts = begins + rank * shares + np.minimum(rank, extra)
        return starts, starts + shares + (rank < extra)


class Listed:
    """Sample numbers that no rule gives, `values` int64 `[n]`, and their text in states, which is made once:
    a state in mid-epoch refers to it and to a position.
    """

    __slots__ = ("_text", "values")

    def __init__(self, values: IntArray, text: str = "") -> None:
        self.values = values
        self._text = text

    @property
    def text(self) -> str:
        """The bytes of a number, and the numbers in as many bytes as the largest takes, in base64."""
        if not self._text:
            width = max(1, -(-int(self.values.max(initial=0)).bit_length() // 8))
            packed = self.values.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
            self._text = f"{width}:{base64.b64encode(packed).decode()}"
        return self._text

    @classmethod
    def from_state(cls, state: str | list[int]) -> Listed:
        """The numbers of a text; of a list in states and manifests of earlier versions."""
        if isinstance(state, list):
            return cls(np.array(state, np.int64))
        width, _, packed = state.partition(":")
        taken = np.frombuffer(base64.b64decode(packed, validate=True), np.uint8).reshape(-1, int(width))
        values = np.zeros((len(taken), 8), np.uint8)
        values[:, : int(width)] = taken
        return cls(values.reshape(-1).view("<i8").astype(np.int64), state)


@dataclass(frozen=True, slots=True)
class OrderCut:
    """The order in range(`position`, `stop`) (None: up to its end), without the shards `gone`."""

    position: int
    gone: tuple[int, ...] = ()
    stop: int | None = None

    def to_state(self) -> list[Any]:
        return [self.position, list(self.gone), *([] if self.stop is None else [self.stop])]


@dataclass(frozen=True, slots=True, eq=False)
class OrderRecord:
    """The order of a segment as plain values: `drawn` samples of the shards, less the cuts.

    `key` seeds the permutation of a "shuffled" order and of a "local" one, whose window and run length are in
    `local`. `listed` and `bounds` are a sampler's samples and batch ends. `split`: the split of the samples,
    None for all. `selected`: a hash of the rows of each shard that a condition selects, None without one.
    """

    shard_ids: IntArray
    counts: IntArray
    kind: OrderKind
    drawn: int
    key: int = 0
    listed: Listed | None = None
    bounds: IntArray | None = None
    cuts: tuple[OrderCut, ...] = ()
    local: tuple[int, int] | None = None
    split: str | None = None
    selected: IntArray | None = None

    def check_selection(self, split: Split | None, *, selects: bool) -> None:
        """Raise ConfigError if the samples are not those of `split`, or if they are those of a condition and
        this loader has none (`selects`), or the other way round.
        """
        if selects != (self.selected is not None):
            drawn, has = ("without", "has one") if selects else ("with", "has none")
            raise ConfigError(
                f"this epoch was drawn {drawn} where=, and this EpochLoader {has}; give it the same condition"
            )
        asked = None if split is None else split.name
        if asked != self.split:
            raise ConfigError(
                f"this epoch was drawn with split={self.split!r}, and this EpochLoader has split={asked!r}; "
                "give it the same"
            )

    def cut(self, position: int, gone: tuple[int, ...] = (), stop: int | None = None) -> OrderRecord:
        """The record from `position` of its present order up to, and not including, `stop`."""
        if not position and not gone and stop is None:
            return self
        return replace(self, cuts=(*self.cuts, OrderCut(position, gone, stop)))

    def renumbered(self, shard_ids: IntArray) -> OrderRecord:
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
        if self.listed is not None:
            state["listed"] = self.listed.text
        for name in ("bounds", "split", "selected", "local"):
            if (value := getattr(self, name)) is not None:
                state[name] = value.tolist() if isinstance(value, np.ndarray) else value
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> OrderRecord:
        """The record of a state.

        Raises KeyError, IndexError, TypeError or ValueError for a value that `to_state` did not return.
        """
        return cls(
            shard_ids=np.array(state["shards"], np.int64),
            counts=np.array(state["counts"], np.int64),
            kind=state["kind"],
            drawn=int(state["drawn"]),
            key=int(state["key"]),
            listed=None if state.get("listed") is None else Listed.from_state(state["listed"]),
            bounds=_integers(state.get("bounds")),
            cuts=tuple(OrderCut(int(cut[0]), tuple(cut[1]), *map(int, cut[2:])) for cut in state["cuts"]),
            local=_window_and_run(state.get("local")),
            split=state.get("split"),
            selected=_integers(state.get("selected")),
        )


def _integers(values: list[int] | None) -> IntArray | None:
    return None if values is None else np.array(values, np.int64)


def _window_and_run(values: list[int] | None) -> tuple[int, int] | None:
    if values is None:
        return None
    window, run = map(int, values)
    if window < 1 or run < 1:
        raise ValueError(f"a window of {window} samples in runs of {run}")
    return window, run


def rebuild(record: OrderRecord) -> tuple[SampleOrder, IntArray | None]:
    """The order of `record`, in sample numbers of its own shards, and the bounds of a batch sampler."""
    order, bounds = _drawn_order(record), record.bounds
    for cut in record.cuts:
        tail = TailOrder(order, min(cut.position, order.size), cut.stop)
        if bounds is not None:
            bounds = bounds if cut.stop is None else bounds[bounds <= cut.stop]
            bounds = bounds[np.searchsorted(bounds, cut.position) :] - cut.position
        if not cut.gone:
            order = tail
            continue
        indices, shards = _located(tail, record)
        keep = ~np.isin(record.shard_ids[shards], cut.gone)
        order = ListedOrder(indices[keep])
        if bounds is not None:
            bounds = np.unique(np.concatenate([[0], np.cumsum(keep)])[bounds])
    return order, bounds


def translate(order: SampleOrder, record: OrderRecord, snapshot: Snapshot) -> SampleOrder:
    """Translate `order` to sample numbers of `snapshot`: of the record's shards that are left."""
    if np.array_equal(record.shard_ids, snapshot.shard_ids):
        return order
    indices, shards = _located(order, record)
    positions = np.searchsorted(snapshot.shard_ids, record.shard_ids[shards])
    rows = indices - _starts(record.counts)[shards]
    return ListedOrder(_starts(snapshot.counts)[positions] + rows)


def _located(order: SampleOrder, record: OrderRecord) -> tuple[IntArray, IntArray]:
    """The samples of `order`, and the indices of their shards in `record`, int64 `[n]` each."""
    indices = order.at(np.arange(order.size, dtype=np.int64))
    return indices, np.searchsorted(_starts(record.counts), indices, side="right") - 1


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _drawn_order(record: OrderRecord) -> SampleOrder:
    num_samples = int(record.counts.sum())
    if record.listed is not None:
        return ListedOrder(record.listed.values)
    if record.kind == "sequential":
        return SequentialOrder(record.drawn)
    if record.local is not None:
        return LocalOrder(record.drawn, num_samples, *record.local, record.key)
    return ShuffledOrder(record.drawn, Permutation(num_samples, record.key))
