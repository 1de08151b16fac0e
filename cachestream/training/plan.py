"""Which samples of a snapshot a rank gets in which batch: pure, and any batch is reached at once.

An order lists the samples of a segment (a pass over one snapshot, or a part of it); a plan cuts the order
into batches for every rank. Neither holds anything per sample, unless a sampler gave a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cachestream.model import IntArray
from cachestream.permutation import Permutation

__all__ = [
    "ListedOrder",
    "Order",
    "Plan",
    "SequentialOrder",
    "ShuffledOrder",
    "TailOrder",
    "count_batches",
]


class Order(Protocol):
    """A sequence of `size` sample indices."""

    @property
    def size(self) -> int:
        """How many samples the order lists."""
        ...

    def at(self, positions: IntArray) -> IntArray:
        """The sample indices at `positions` (int64 `[n]`, each in range(size)), int64 `[n]`."""
        ...


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
    """Samples as listed, int64 `[size]`: what a sampler gave, or what is left of an interrupted epoch."""

    indices: IntArray

    @property
    def size(self) -> int:
        return len(self.indices)

    def at(self, positions: IntArray) -> IntArray:
        return self.indices[positions]


@dataclass(frozen=True, slots=True)
class TailOrder:
    """Another order from position `start` on, up to, not with, `stop` (None: to its end)."""

    order: Order
    start: int
    stop: int | None = None

    @property
    def size(self) -> int:
        stop = self.order.size if self.stop is None else min(self.stop, self.order.size)
        return max(0, stop - self.start)

    def at(self, positions: IntArray) -> IntArray:
        return self.order.at(positions + self.start)


def count_batches(num_samples: int, batch_size: int, ranks: int, drop_last: bool) -> int:
    """How many batches each of `ranks` gets: the same number for all.

    With `drop_last` only whole ones. Without it, the samples that remain make one more batch, in shares
    that differ by at most one sample, if there is at least one for each rank; fewer are dropped.
    """
    full, rest = divmod(num_samples, batch_size * ranks)
    return full + (not drop_last and rest >= ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`num_batches` batches for each of `ranks`, cut from an order of `num_samples`.

    Batch i of all ranks together is a run of the order, so a position in the order is all that resume
    needs. `bounds` (int64 `[n + 1]`) are the ends of batches that a batch sampler cut; ranks take them
    in turns.
    """

    num_samples: int
    batch_size: int
    ranks: int
    num_batches: int
    bounds: IntArray | None = None

    @property
    def num_full(self) -> int:
        """How many batches have `batch_size` samples on all ranks."""
        return min(self.num_batches, self.num_samples // (self.batch_size * self.ranks))

    def position(self, batch_index: int) -> int:
        """Where in the order batch `batch_index` begins, over all ranks."""
        if self.bounds is not None:
            return int(self.bounds[min(batch_index * self.ranks, len(self.bounds) - 1)])
        return min(batch_index * self.batch_size * self.ranks, self.num_samples)

    def span(self, rank: int, batch_index: int) -> tuple[int, int]:
        """Batch `batch_index` of `rank` as a run of the order: its first position and the one after its last."""
        if not (0 <= batch_index < self.num_batches and 0 <= rank < self.ranks):
            raise IndexError(
                f"batch {batch_index} of rank {rank}, of {self.num_batches} for {self.ranks} ranks"
            )
        if self.bounds is not None:
            place = batch_index * self.ranks + rank
            return int(self.bounds[place]), int(self.bounds[place + 1])
        start = self.position(batch_index)
        if batch_index < self.num_full:
            return start + rank * self.batch_size, start + (rank + 1) * self.batch_size
        share, extra = divmod(self.num_samples - start, self.ranks)
        first = start + rank * share + min(rank, extra)
        return first, first + share + (rank < extra)

    def spans(self, rank: int, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """As `span`, of batches `first` to `stop`: their first positions, and those after their last, int64 `[n]`."""
        whole = min(stop, self.num_full) if self.bounds is None else first
        starts = (np.arange(first, whole) * self.ranks + rank) * self.batch_size
        rest = [self.span(rank, number) for number in range(max(first, whole), stop)]
        others = np.array(rest, np.int64).reshape(-1, 2)
        return (
            np.concatenate([starts, others[:, 0]]),
            np.concatenate([starts + self.batch_size, others[:, 1]]),
        )
