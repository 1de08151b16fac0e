"""Positions in training, and segments, the parts of an epoch that are prepared ahead.

An epoch is a chain of segments, each a pass over one snapshot: one segment, unless `epoch_size` asks for more
samples than are cached; then further passes follow over new snapshots, until the epoch is full. The state of
training after any batch is the position of the rest, and a segment is prepared from a position alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from cachestream.errors import ConfigError
from cachestream.training.plan import OrderRecord, rebuild

if TYPE_CHECKING:
    from cachestream.schema import Snapshot
    from cachestream.training.batches.mapped_shards import EpochMaps
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.mixture import SegmentSources
    from cachestream.training.plan import Plan, SampleOrder

_VERSION: Final = 4  # of states
_READ: Final = (3, _VERSION)
_BETWEEN: Final = ";"  # two orders
_MOST_TOGETHER: Final = 16
_TOGETHER_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """Segment `index` of `epoch`, after `done` batches of it, for which all ranks together drew `drawn`
    samples.

    `total`: the number of batches in the epoch, None until its first segment is agreed. `records`: the
    segment to resume, from a checkpoint, for each cache by its id. `first_step`: the number of batches in all
    epochs before.
    """

    epoch: int
    index: int = 0
    done: int = 0
    drawn: int = 0
    total: int | None = None
    records: Mapping[str, OrderRecord] | None = None
    first_step: int = 0

    def to_state(self) -> dict[str, Any]:
        """The position as the `state_dict` of a loader.

        The records are JSON text: torch.distributed.checkpoint flattens nested values and then expects the
        same keys in a new loader's state, which has no records yet.
        """
        state: dict[str, Any] = {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self.done,
            "segment": None,
            "orders": None,
        }
        if self.records is not None:
            values: dict[str, Any] = {
                "index": self.index,
                "drawn_by_all": self.drawn,
                "caches": {cache_id: record.to_state() for cache_id, record in self.records.items()},
            }
            # Beside the JSON and not in it: a long order is not copied, let alone encoded, for each state.
            listed = [record for record in values["caches"].values() if "listed" in record]
            if listed:
                texts = [record["listed"] for record in listed]
                state["orders"] = texts[0] if len(texts) == 1 else _BETWEEN.join(texts)
                for number, record in enumerate(listed):
                    record["listed"] = number
            state["segment"] = json.dumps(values, separators=(",", ":"))
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Position:
        """The position of a state; raises ConfigError for a value that `to_state` did not return."""
        try:
            if state["version"] not in _READ:
                raise ConfigError(
                    f"this state has version {state['version']}, and this cachestream reads {_READ[0]} to "
                    f"{_VERSION}"
                )
            epoch, done, segment = int(state["epoch"]), int(state["batch"]), state["segment"]
            first_step = int(state.get("first_step", 0))
            if epoch < 0 or done < 0 or first_step < 0:
                raise ValueError(f"epoch {epoch}, batch {done}")
            if segment is None:
                if done:
                    raise ConfigError(
                        f"this state is of batch {done} of epoch {epoch}, and what the epoch was drawn from "
                        "is missing; pass all that state_dict() gave"
                    )
                return cls(epoch, first_step=first_step)
            values = json.loads(segment)
            orders = None if state["version"] < _VERSION else state["orders"]
            texts = [] if orders is None else orders.split(_BETWEEN)
            named = [record for record in values["caches"].values() if isinstance(record.get("listed"), int)]
            if len(named) != len(texts):
                raise ValueError(f"{len(texts)} orders for {len(named)} caches")
            for record in named:
                record["listed"] = texts[record["listed"]]
            records = {
                str(cache_id): OrderRecord.from_state(record) for cache_id, record in values["caches"].items()
            }
            drawn = int(values["drawn_by_all"])
            return cls(epoch, int(values["index"]), done, drawn, None, records, first_step)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"this is no state of an EpochLoader ({error!r}); pass what state_dict() gave"
            ) from error


@dataclass(slots=True, eq=False)
class Segment:
    """A prepared pass, with everything that this rank needs to gather its batches.

    `rank`: the number of this rank's batches among the `plan.ranks` that share the order. `total`: the number
    of batches in the epoch. `is_resumed`: it goes on with an order that was drawn before. `missing`: the
    number of samples that a checkpoint names and the cache no longer has, or the job no cache for. `caches`:
    the records of the job's caches by id, each with the number of its ranks; empty if all ranks share one.
    `transform_key`: seeds the generators of `batch_transform`. `sources`: those of a mixture. `has_others`:
    the job has several ranks.
    """

    position: Position
    dataset: EpochDataset
    maps: EpochMaps
    order: SampleOrder
    plan: Plan
    rank: int
    total: int
    record: OrderRecord
    missing: int = 0
    is_resumed: bool = False
    caches: dict[str, tuple[OrderRecord, int]] = field(default_factory=dict)
    transform_key: int = 0
    sources: SegmentSources | None = None
    has_others: bool = False

    @property
    def last(self) -> bool:
        """True if the epoch ends with this segment."""
        return self.position.done + self.plan.num_batches >= self.total

    @property
    def end_step(self) -> int:
        """The number of batches up to the end of the epoch."""
        return self.position.first_step + self.total

    @property
    def snapshot(self) -> Snapshot:
        return self.dataset.snapshot

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the job that get batches of their own."""
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
        return self.position.drawn + self.plan.position(batches) * self.num_ranks // self.plan.ranks

    def next_position(self) -> Position:
        """The position of the epoch's next segment, or of the next epoch."""
        position = self.position
        if self.last:
            return Position(position.epoch + 1, first_step=self.end_step)
        return replace(
            position,
            index=position.index + 1,
            done=position.done + self.plan.num_batches,
            drawn=self.drawn_after(self.plan.num_batches),
            total=self.total,
            records=None,
        )

    def share_drawn(self, batches: int) -> float:
        """The share of the snapshot in the first `batches` batches of all ranks."""
        return self.plan.position(batches) / max(1, self.snapshot.num_samples)

    def position_after(self, done: int) -> Position:
        """The position after `done` batches of the epoch, the last of them from this segment."""
        batches, position = done - self.position.done, self.position
        if done >= self.total:
            return Position(position.epoch + 1, first_step=self.end_step)
        left = {self.snapshot.cache_id: self.record.cut(self.plan.position(batches))}
        for cache_id, (record, ranks) in self.caches.items():
            bounds = None if record.bounds is None else rebuild(record)[1]  # of that cache's own batches
            plan = replace(self.plan, num_samples=record.drawn, ranks=ranks, bounds=bounds)
            left.setdefault(cache_id, record.cut(plan.position(batches)))
        drawn = self.drawn_after(batches)
        return replace(position, done=done, drawn=drawn, total=None, records=left)

    def close(self) -> None:
        """Release the lease on the shards; maps in use by a gather stay until it ends."""
        self.dataset.close()
