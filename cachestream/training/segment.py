"""Segments, the parts of an epoch that are prepared ahead, and the requests for them.

An epoch is a chain of segments, each a pass over one snapshot: one segment, unless `epoch_size` asks for more
samples than are cached; then further passes follow over new snapshots, until the epoch is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cachestream.schema import Snapshot
from cachestream.training.batches.locations import LocationsAhead
from cachestream.training.batches.mapped_shards import EpochMaps, fixed_row_bytes
from cachestream.training.batches.ragged import Ragged
from cachestream.training.checkpoint import SegmentRecord
from cachestream.training.dataset import EpochDataset
from cachestream.training.plan import Plan, SampleOrder

_MOST_TOGETHER: Final = 16
_TOGETHER_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for segment `index` of `epoch`, after `done` batches of it, for which all ranks together drew
    `drawn` samples.

    `total`: the number of batches in the epoch, None until its first segment is agreed. `generation`: the
    number of jumps (set_epoch, load_state_dict) so far; a jump makes earlier segments stale. `records`: the
    segment to resume, from a checkpoint, for each cache by its id.
    """

    generation: int
    epoch: int
    index: int = 0
    done: int = 0
    drawn: int = 0
    total: int | None = None
    records: Mapping[str, SegmentRecord] | None = None

    @property
    def name(self) -> str:
        return f"{self.generation}.{self.epoch}.{self.index}"


@dataclass(slots=True, eq=False)
class Segment:
    """A prepared pass, with everything that this rank needs to gather its batches.

    `rank`: the number of this rank among the `plan.ranks` that share the order. `missing`: the number of
    samples that a checkpoint names and the cache no longer has. `others`: the records of the job's other
    caches by id, each with the number of its ranks. `opened_ahead`: no more shards are to be opened before
    they are needed. `with_keys`: batches hold their samples' keys. `ragged`: the form of fields whose shape
    varies. `locations`: those of the samples, computed in the background. `transform_key`: seeds the
    generators of `batch_transform`.
    """

    request: Request
    dataset: EpochDataset
    maps: EpochMaps
    order: SampleOrder
    plan: Plan
    rank: int
    total: int
    record: SegmentRecord
    missing: int = 0
    others: dict[str, tuple[SegmentRecord, int]] = field(default_factory=dict)
    opened_ahead: bool = False
    with_keys: bool = False
    ragged: Ragged = "list"
    locations: LocationsAhead | None = None
    transform_key: int = 0

    @property
    def last(self) -> bool:
        """True if the epoch ends with this segment."""
        return self.request.done + self.plan.num_batches >= self.total

    @property
    def snapshot(self) -> Snapshot:
        return self.dataset.snapshot

    @property
    def batch_bytes(self) -> int:
        """The size of a batch's fields of fixed shape, in bytes."""
        return self.plan.batch_size * sum(map(fixed_row_bytes, self.snapshot.schema.fields))

    @property
    def batches_together(self) -> int:
        """The number of batches gathered and queued at once: several small ones, to save wake-ups
        of threads.
        """
        return max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // max(1, self.batch_bytes)))

    def drawn_after(self, batches: int) -> int:
        """The number of samples that all ranks of the job have drawn after `batches` batches of
        this segment.
        """
        world = sum(ranks for _, ranks in self.others.values()) or self.plan.ranks
        return self.request.drawn + self.plan.position(batches) * world // self.plan.ranks

    def next_request(self) -> Request:
        """The request for the epoch's next segment, or the next epoch."""
        request = self.request
        if self.last:
            return Request(request.generation, request.epoch + 1)
        return Request(
            request.generation,
            request.epoch,
            request.index + 1,
            request.done + self.plan.num_batches,
            self.drawn_after(self.plan.num_batches),
            self.total,
        )

    def share_drawn(self, batches: int) -> float:
        """The share of the snapshot in the first `batches` batches of all ranks."""
        return self.plan.position(batches) / max(1, self.snapshot.num_samples)

    def records_after(self, batches: int) -> dict[str, SegmentRecord]:
        """The rest of the segment after `batches` batches, for each cache of the job by its id."""
        left = {self.snapshot.cache_id: self.record.cut(self.plan.position(batches))}
        for cache_id, (record, ranks) in self.others.items():
            left.setdefault(cache_id, record.cut(replace(self.plan, ranks=ranks).position(batches)))
        return left

    def close(self) -> None:
        """Release the lease on the shards; maps in use by a gather stay until it ends."""
        self.dataset.close()
