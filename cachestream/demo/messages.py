"""Messages between the demo and its ranks: one line of JSON each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What the ranks are to do. The worker is limited to `bandwidth_bytes_per_s`; an epoch is to take `epoch_s`."""

    remote: str
    held_out: str
    num_samples: int
    cache: str
    shard_bytes: int
    bandwidth_bytes_per_s: int
    ranks: int
    epochs: int
    epoch_s: float
    min_samples: int
    batch_size: int = 64

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Begun:
    """Training is about to begin: on what, how fast without waiting for data, and so how large an epoch is."""

    device: str
    backend: str
    samples_per_s: float
    epoch_samples: int


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """`done` of the `total` batches of `epoch` (from 1) are trained on."""

    epoch: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class EpochDone:
    """One epoch, of all ranks together.

    `samples` were trained on, drawn from the `cached` ones; `seen` is the share of the remote that
    was cached at some time; `reuse` is samples drawn over different ones, since the start. `wait` is the share of the
    epoch's `seconds` that the first rank waited for data, `gap_s` its loader's time between the epochs.
    `time_s` is since 1970.
    """

    epoch: int
    samples: int
    cached: int
    seen: float
    reuse: float
    seconds: float
    wait: float
    gap_s: float
    accuracy: float
    time_s: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank has ended with an error."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}"


Event = Begun | EpochProgress | EpochDone | Failed
_KINDS = {kind.__name__: kind for kind in (Begun, EpochProgress, EpochDone, Failed)}


def encode(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)})


def decode(line: str) -> Event | None:
    """The event in `line`; None for a line that is none."""
    try:
        values = json.loads(line)
        return _KINDS[values.pop("event")](**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
