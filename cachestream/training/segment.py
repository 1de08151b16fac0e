"""Segments, the parts of an epoch that are prepared ahead, and the requests for them.

An epoch is a chain of segments, each a pass over one snapshot: one segment, unless `epoch_size` asks for more
samples than are cached; then further passes follow over new snapshots, until the epoch is full. The state of
training after any batch is the request for the rest.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from cachestream.errors import ConfigError
from cachestream.training.plan import OrderRecord, rebuild

if TYPE_CHECKING:
    from cachestream.schema import Snapshot
    from cachestream.training.batches.mapped_shards import EpochMaps, SampleLocations
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.mixture import SegmentSources
    from cachestream.training.plan import Plan, SampleOrder

_VERSION: Final = 3  # of states
_MOST_TOGETHER: Final = 16
_TOGETHER_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for segment `index` of `epoch`, after `done` batches of it, for which all ranks together drew
    `drawn` samples.

    `total`: the number of batches in the epoch, None until its first segment is agreed. `generation`: the
    number of jumps (set_epoch, load_state_dict) so far; a jump makes earlier segments stale. `records`: the
    segment to resume, from a checkpoint, for each cache by its id. `first_step`: the number of batches in all
    epochs before.
    """

    generation: int
    epoch: int
    index: int = 0
    done: int = 0
    drawn: int = 0
    total: int | None = None
    records: Mapping[str, OrderRecord] | None = None
    first_step: int = 0

    def to_state(self) -> dict[str, Any]:
        """The request as the `state_dict` of a loader.

        The records are JSON text: torch.distributed.checkpoint flattens nested values and then expects the
        same keys in a new loader's state, which has no records yet.
        """
        state: dict[str, Any] = {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self.done,
            "segment": None,
        }
        if self.records is not None:
            values = {
                "index": self.index,
                "drawn_by_all": self.drawn,
                "caches": {cache_id: record.to_state() for cache_id, record in self.records.items()},
            }
            state["segment"] = json.dumps(values, separators=(",", ":"))
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Request:
        """The request of a state; raises ConfigError for a value that `to_state` did not return."""
        try:
            if state["version"] != _VERSION:
                raise ConfigError(
                    f"this state has version {state['version']}, and this cachestream reads {_VERSION}"
                )
            epoch, done, segment = int(state["epoch"]), int(state["batch"]), state["segment"]
            first_step = int(state.get("first_step", 0))
            if epoch < 0 or done < 0 or first_step < 0:
                raise ValueError(f"epoch {epoch}, batch {done}")
            if segment is None:
                if done:
                    raise ConfigError(
                        f"this state is of batch {done} of epoch {epoch}, and what the epoch was drawn from is missing; "
                        "pass all that state_dict() gave"
                    )
                return cls(0, epoch, first_step=first_step)
            values = json.loads(segment)
            records = {
                str(cache_id): OrderRecord.from_state(record) for cache_id, record in values["caches"].items()
            }
            drawn = int(values["drawn_by_all"])
            return cls(0, epoch, int(values["index"]), done, drawn, None, records, first_step)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"this is no state of an EpochLoader ({error!r}); pass what state_dict() gave"
            ) from error


@dataclass(slots=True, eq=False)
class Segment:
    """A prepared pass, with everything that this rank needs to gather its batches.

    `rank`: the number of this rank among the `plan.ranks` that share the order. `total`: the number of
    batches in the epoch. `missing`: the number of samples that a checkpoint names and the cache no longer
    has. `caches`: the records of the job's caches by id, each with the number of its ranks; empty if all
    ranks share one. `locations`: those of the samples, in blocks. `transform_key`: seeds the generators of
    `batch_transform`. `sources`: those of a mixture.
    """

    request: Request
    dataset: EpochDataset
    maps: EpochMaps
    order: SampleOrder
    plan: Plan
    rank: int
    total: int
    record: OrderRecord
    missing: int = 0
    caches: dict[str, tuple[OrderRecord, int]] = field(default_factory=dict)
    locations: Iterable[SampleLocations] = ()
    transform_key: int = 0
    sources: SegmentSources | None = None

    @property
    def last(self) -> bool:
        """True if the epoch ends with this segment."""
        return self.request.done + self.plan.num_batches >= self.total

    @property
    def end_step(self) -> int:
        """The number of batches up to the end of the epoch."""
        return self.request.first_step + self.total

    @property
    def snapshot(self) -> Snapshot:
        return self.dataset.snapshot

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the job."""
        return sum(ranks for _, ranks in self.caches.values()) or self.plan.ranks

    @property
    def batch_bytes(self) -> int:
        """The mean size of a batch, in bytes; of fields whose shape varies, by the shards mapped so far."""
        fixed = sum(field.row_bytes for field in self.snapshot.schema.fields)
        samples = self.plan.mean_batch
        return int(max(self.plan.batch_size, samples) * fixed + samples * self.maps.varying_bytes())

    @property
    def batches_together(self) -> int:
        """The number of batches gathered and queued at once: several small ones, to save wake-ups."""
        return max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // max(1, self.batch_bytes)))

    def drawn_after(self, batches: int) -> int:
        """The samples that all ranks of the job have drawn after `batches` batches of this segment."""
        return self.request.drawn + self.plan.position(batches) * self.num_ranks // self.plan.ranks

    def next_request(self) -> Request:
        """The request for the epoch's next segment, or the next epoch."""
        request = self.request
        if self.last:
            return Request(request.generation, request.epoch + 1, first_step=self.end_step)
        return Request(
            request.generation,
            request.epoch,
            request.index + 1,
            request.done + self.plan.num_batches,
            self.drawn_after(self.plan.num_batches),
            self.total,
            first_step=request.first_step,
        )

    def share_drawn(self, batches: int) -> float:
        """The share of the snapshot in the first `batches` batches of all ranks."""
        return self.plan.position(batches) / max(1, self.snapshot.num_samples)

    def rest_after(self, done: int) -> Request:
        """The request for the rest of the epoch after `done` batches, the last of them from this segment."""
        batches, request = done - self.request.done, self.request
        if done >= self.total:
            return Request(0, request.epoch + 1, first_step=self.end_step)
        left = {self.snapshot.cache_id: self.record.cut(self.plan.position(batches))}
        for cache_id, (record, ranks) in self.caches.items():
            bounds = None if record.bounds is None else rebuild(record)[1]  # of that cache's own batches
            plan = replace(self.plan, num_samples=record.drawn, ranks=ranks, bounds=bounds)
            left.setdefault(cache_id, record.cut(plan.position(batches)))
        drawn = self.drawn_after(batches)
        return Request(0, request.epoch, request.index, done, drawn, None, left, request.first_step)

    def close(self) -> None:
        """Release the lease on the shards; maps in use by a gather stay until it ends."""
        self.dataset.close()


class SegmentChain:
    """The segments from the trainer's to the next one to prepare. Not thread-safe.

    `next` requests the segment that follows all prepared ones. A request is stale once its generation or its
    epoch is past; `failure` is the error of one that is not. `open` are the segments that hold a lease,
    oldest first; `retired` are those that the trainer is done with, which are to be closed.
    """

    def __init__(self) -> None:
        self.next = Request(0, 0)
        self.prepared: deque[Segment] = deque()
        self.open: list[Segment] = []
        self.retired: deque[Segment] = deque()
        self.failure: tuple[Request, BaseException] | None = None
        self.generation = 0
        self.trained_epoch = -1

    def begin(self, epoch: int, request: Request | None) -> None:
        """Move on to `epoch`, and with `request` to a new generation that begins with it."""
        if request is not None:
            # A new generation renames the rounds in which ranks agree, so that a failed one can be repeated.
            self.generation += 1
            self.next = replace(request, generation=self.generation)
            self.failure = None
        elif self.next.epoch < epoch:
            end_step = self.next.first_step + (self.next.total or 0)
            self.next = Request(self.generation, epoch, first_step=end_step)
        self.trained_epoch = epoch
        self.prepared = deque(s for s in self.prepared if not self.is_stale(s.request))
        if self.failure is not None and self.is_stale(self.failure[0]):
            self.failure = None
        self.retire(lambda segment: self.is_stale(segment.request))

    def add(self, segment: Segment) -> None:
        self.prepared.append(segment)
        self.open.append(segment)
        self.next = segment.next_request()

    def current(self, epoch: int) -> Segment | None:
        """The oldest segment of `epoch` that is still open."""
        return next((segment for segment in self.open if segment.request.epoch == epoch), None)

    def is_stale(self, request: Request) -> bool:
        return request.generation != self.generation or request.epoch < self.trained_epoch

    def retire(self, done: Callable[[Segment], bool]) -> None:
        self.retired += [segment for segment in self.open if done(segment)]
        self.open = [segment for segment in self.open if not done(segment)]

    def retire_before(self, segment: Segment) -> None:
        """Retire the segments before `segment`, if that is open."""
        before = self.open[: self.open.index(segment)] if segment in self.open else []
        self.retire(lambda other: other in before)

    def close_retired(self) -> None:
        """Release the leases of the retired segments. The next call completes one that was interrupted."""
        for segment in tuple(self.retired):
            segment.close()
            with suppress(ValueError):  # another thread has closed it, too
                self.retired.remove(segment)
