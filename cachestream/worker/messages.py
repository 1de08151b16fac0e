"""The messages between the supervisor and its processes: frozen values, which pickle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachestream.schema import IntArray, Schema, Span
from cachestream.storage.progress import PassRow, Positions
from cachestream.storage.publish import WrittenShard
from cachestream.storage.tables import FailureRow


@dataclass(frozen=True, slots=True)
class FillStatus:
    """The state of the cache as far as a sampling process has to know it.

    `holdout`: the share of the samples that is held out, None without one; `held_out_bytes`: the bytes of the
    shards that hold nothing else.
    """

    limit_bytes: int
    has_samples: bool
    holdout: float | None = None
    held_out_bytes: int = 0


@dataclass(slots=True)
class News:
    """The last that a sampling process has heard of the cache: its status, and its fields once they are
    decided.
    """

    status: FillStatus
    schema: Schema | None


@dataclass(frozen=True, slots=True)
class Publication:
    """Shards that were written, and the progress of the pass to be committed with them.

    `finished`: positions that are done. `advanced`: for others, the offset up to which their samples are.
    """

    pass_id: int
    shards: tuple[WrittenShard, ...]
    spans: tuple[Span, ...]
    finished: tuple[int, ...] = ()
    advanced: tuple[tuple[int, int], ...] = ()
    failures: tuple[FailureRow, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedPass:
    """The current pass of a cache that shares its filling.

    `undecided`: positions on which the group decides. `making`: positions that sampling processes have, or
    may take; `offered`: the number of those that they may take, in blocks.
    """

    row: PassRow
    undecided: tuple[Positions, ...]
    making: tuple[Positions, ...]
    offered: int

    def is_making(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """For each of `positions`: True if a sampling process of this cache makes it, or may."""
        starts, stops = np.array(self.making, np.int64).reshape(-1, 2).T
        begun = np.searchsorted(np.sort(starts), positions, side="right")
        is_in: npt.NDArray[np.bool_] = begun > np.searchsorted(np.sort(stops), positions, side="right")
        return is_in | (positions >= self.row.next_position)


@dataclass(frozen=True, slots=True)
class Import:
    """A shard of another cache that was written here, to be published unless this cache has or makes its
    samples.

    In the current pass, which may be another one than theirs, they are at `positions`.
    """

    publication: Publication
    positions: IntArray
