"""The messages between the supervisor and its processes: frozen values, which pickle."""

from __future__ import annotations

from dataclasses import dataclass

from cachestream.schema import Schema, Span
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
