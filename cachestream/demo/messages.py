"""Messages between the demo and its ranks, as JSON: settings in the command line, a line for each epoch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

RANKS: Final = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """The job of the ranks. The worker is limited to `bandwidth_bytes_per_s`; an epoch should
    take `epoch_s`.
    """

    remote: str
    held_out: str
    cache: str
    shard_bytes: int
    bandwidth_bytes_per_s: int
    epochs: int
    epoch_s: float
    min_samples: int
    batch_size: int = 64


@dataclass(frozen=True, slots=True)
class EpochDone:
    """One epoch of all ranks together.

    `samples` were trained on; at the end the cache holds `cached` ones, and `seen` is the share of the remote
    that was cached at some time. `wait`: the share of the epoch's `seconds` that the first rank waited for
    data. `time_s` is since 1970.
    """

    epoch: int
    samples: int
    cached: int
    seen: float
    seconds: float
    wait: float
    accuracy: float
    time_s: float


def encode(message: Settings | EpochDone) -> str:
    return json.dumps(dataclasses.asdict(message))


def decode(text: str) -> dict[str, Any]:
    """The fields in `text`, empty for a line of something else."""
    return json.loads(text) if text.startswith("{") else {}
