"""The values of the model: the speeds of a node, a run, an arrangement of nodes, and the outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from cachestream.permutation import mix_key
from cachestream.storage.reservations import HEADROOM_BYTES

__all__ = ["Arrangement", "Calibration", "Outcome", "Setup"]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The speeds of one node. `source`: "measured" or "assumed".

    `remote_bytes_per_s`: from the remote; `copy_bytes_per_s`: a shard from another node; `shard_overhead_s`: for each shard that
    is published, whatever its size; `decode_s`: a sample on one processor.
    """

    remote_bytes_per_s: float
    copy_bytes_per_s: float
    shard_overhead_s: float
    decode_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Setup:
    """A run. `fetched_bytes` of the remote make a shard of `shard_bytes`; a unit of the source is one shard.

    `job_bytes_per_s` and `requests_per_s` (of `request_bytes` each) bound all nodes together. A node fails once in `mtbf_s`
    on average (inf: never), but at least one in a run; an empty node replaces it after `replace_s`. `mtbf_s` is that of the
    training of Llama 3: 419 unexpected interruptions of 2,048 nodes in 54 days (arXiv:2407.21783).
    `unevenness`: the standard deviation of the logarithm of the speeds of nodes; those above the median count as the median.
    """

    nodes: int
    num_shards: int
    shard_bytes: int
    fetched_bytes: int
    samples_per_shard: int
    limit_bytes: int
    processors: int
    job_bytes_per_s: float
    calibration: Calibration
    requests_per_s: float = 5500.0
    request_bytes: float = 8e6
    epoch_s: float = 3600.0
    duration_s: float = 86_400.0
    turnover: float = 0.25
    min_samples: int = 4096
    mtbf_s: float = 2048 * 54 * 86_400 / 419
    replace_s: float = 300.0
    unevenness: float = 0.1
    seed: int = 0

    @property
    def shards_in_cache(self) -> int:
        return max(1, (self.limit_bytes - HEADROOM_BYTES) // self.shard_bytes)

    @property
    def own_s(self) -> float:
        """The time that a node itself takes for a shard that it fetches."""
        decoding_s = self.calibration.decode_s * self.samples_per_shard / self.processors
        return decoding_s + self.calibration.shard_overhead_s

    @property
    def copy_s(self) -> float:
        """The time that a copy of a shard to another node takes."""
        return self.shard_bytes / self.calibration.copy_bytes_per_s + self.calibration.shard_overhead_s

    def failures(self) -> list[tuple[float, int]]:
        """The times of failures, with the node: at even intervals, one at least."""
        if math.isinf(self.mtbf_s):
            return []
        number = max(1, round(self.nodes * self.duration_s / self.mtbf_s))
        nodes = np.random.default_rng(mix_key(self.seed, self.nodes)).integers(self.nodes, size=number)
        return [((i + 0.5) / number * self.duration_s, node) for i, node in enumerate(nodes.tolist())]


class Arrangement(Enum):
    """Who fetches, and who keeps."""

    ALONE = "alone"  # every node, in an order of its own
    PARTITION = "partition"  # every node its share
    SHARE = "share"  # one node fetches a shard, and all others copy it


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a run; inf for what did not come. `full_s`: of the median node, `full_p99_s`: of the 99th of 100.

    `distinct_samples`: those that the caches hold together. `seen_share`: of the data set, by one node. `first_s`: all nodes have
    `min_samples`, so that the trainer can begin. `waiting_s`: the trainer, until then and from each failure until the replaced
    node has as much. `reread_bytes`: fetched again, since nodes failed. `warm_s`: from a failure until the replaced node has
    what it had, the median.
    """

    full_s: float
    full_p99_s: float
    distinct_samples: int
    seen_share: float
    egress_bytes: float
    copied_bytes: float
    first_s: float
    waiting_s: float
    failures: int
    reread_bytes: float
    warm_s: float
