"""What a checkpoint holds of a loader: plain dicts, lists, numbers and strings."""

from __future__ import annotations

from typing import Any, Final

from cachestream.errors import ConfigError
from cachestream.training.epoch import Request, Segment
from cachestream.training.resume import Record

__all__ = ["from_state", "to_state"]

_VERSION: Final = 1


def to_state(epoch: int, batches: int, segment: Segment | None) -> dict[str, Any]:
    """The state after `batches` delivered batches of `epoch`, the last of them from `segment`."""
    state: dict[str, Any] = {"version": _VERSION, "epoch": epoch, "batch": batches, "segment": None}
    if segment is None:
        return state
    within = batches - segment.request.done
    records = segment.records_after(within)
    state["segment"] = {
        "index": segment.request.index,
        "drawn": segment.request.drawn + segment.plan.position(within),
        "caches": {cache_id: record.to_state() for cache_id, record in records.items()},
    }
    return state


def from_state(state: dict[str, Any]) -> Request:
    """What to prepare to go on from `state`; raises ConfigError for what `to_state` has not made."""
    try:
        if state["version"] != _VERSION:
            raise ConfigError(
                f"this state has version {state['version']}, and this cachestream reads {_VERSION}"
            )
        epoch, batches, segment = int(state["epoch"]), int(state["batch"]), state["segment"]
        if segment is None:
            return Request(0, epoch)
        records = {str(cache_id): Record.from_state(record) for cache_id, record in segment["caches"].items()}
        return Request(0, epoch, int(segment["index"]), batches, int(segment["drawn"]), None, records)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is no state of an EpochLoader ({error!r}); pass what state_dict() gave"
        ) from error
