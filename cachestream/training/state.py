"""What a checkpoint holds of a loader: numbers and strings in one flat dict.

The running segment is JSON text: checkpoints that take nested values apart (torch.distributed.checkpoint) look for the
parts that a new loader has, which is in no segment yet.
"""

from __future__ import annotations

import json
from typing import Any, Final

from cachestream.errors import ConfigError
from cachestream.training.epoch import Request, Segment
from cachestream.training.resume import Record

__all__ = ["from_state", "to_state"]

_VERSION: Final = 3


def to_state(epoch: int, batches: int, segment: Segment | None) -> dict[str, Any]:
    """The state after `batches` delivered batches of `epoch`, the last of them from `segment`."""
    state: dict[str, Any] = {"version": _VERSION, "epoch": epoch, "batch": batches, "segment": None}
    if segment is None:
        return state
    within = batches - segment.request.done
    records = segment.records_after(within)
    values = {
        "index": segment.request.index,
        "drawn_by_all": segment.drawn_after(within),
        "caches": {cache_id: record.to_state() for cache_id, record in records.items()},
    }
    state["segment"] = json.dumps(values, separators=(",", ":"))
    return state


def from_state(state: dict[str, Any]) -> Request:
    """What to prepare to go on from `state`; raises ConfigError for what `to_state` has not made."""
    try:
        if state["version"] != _VERSION:
            raise ConfigError(
                f"this state has version {state['version']}, and this cachestream reads {_VERSION}"
            )
        epoch, batches, segment = int(state["epoch"]), int(state["batch"]), state["segment"]
        if epoch < 0 or batches < 0:
            raise ValueError(f"epoch {epoch}, batch {batches}")
        if segment is None:
            if batches:
                raise ConfigError(
                    f"this state is of batch {batches} of epoch {epoch}, and what the epoch was drawn from is missing; "
                    "pass all that state_dict() gave"
                )
            return Request(0, epoch)
        segment = json.loads(segment)
        records = {str(cache_id): Record.from_state(record) for cache_id, record in segment["caches"].items()}
        return Request(0, epoch, int(segment["index"]), batches, int(segment["drawn_by_all"]), None, records)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is no state of an EpochLoader ({error!r}); pass what state_dict() gave"
        ) from error
