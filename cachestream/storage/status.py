"""What a look at a cache tells, as frozen values and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachestream.config import format_size
from cachestream.storage.board import Totals
from cachestream.storage.tables import FailureRow

__all__ = ["CacheStatus", "VerifyReport", "WorkerStatus", "describe_skipped", "remedy_for_skipped"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The running worker: its processes, and what they have done since it started `uptime_s` ago. No `states`, and zeros, where
    another version of cachestream started it.
    """

    pid: int
    uptime_s: float
    restarts: int
    states: tuple[str, ...]
    totals: Totals

    @property
    def samples_per_s(self) -> float:
        return self.totals.samples / max(self.uptime_s, 1e-9)

    @property
    def fetched_bytes_per_s(self) -> float:
        return self.totals.fetched_bytes / max(self.uptime_s, 1e-9)


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """A cache at one moment.

    `size_bytes` is what the whole directory occupies on disk. `evicted_unused_samples` were evicted before an epoch used
    them, which only a lower limit, `min_free` and `evict` do. `fill_state` is "filling", "complete",
    "full", "stopped", "failed" or "none"; `fill_message` says why, or what it waits for, and `epoch_waits` how often
    that was the next epoch. `pass_number` counts passes over the remote from 1 (0: none
    yet); `pass_done` is the share of its units that are done, or None for an endless source, and while the
    source `is_listing`: then `num_units` are those that are listed so far. `disk_message` says that the disk is full,
    `remote_message` what the worker waits for that does not answer. `holdout`: the share of the samples that is held out,
    None where none is; `held_out_samples`: those of them that are cached, as far as they have been counted.
    """

    path: str
    cache_id: str
    size_bytes: int
    size_limit: int
    min_free: int
    eviction: str
    num_shards: int
    num_samples: int
    leases: int
    leased_bytes: int
    reserved_bytes: int
    evicted_shards: int
    evicted_samples: int
    evicted_unused_samples: int
    epoch_waits: int
    snapshots: int
    schema: str | None
    source: str | None
    num_units: int | None
    fill_state: str
    fill_message: str
    pass_number: int
    pass_done: float | None
    skipped: int
    failures: tuple[FailureRow, ...]
    quarantined: int
    worker: WorkerStatus | None
    is_listing: bool = False
    disk_message: str = ""
    remote_message: str = ""
    holdout: float | None = None
    held_out_samples: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        done = "" if self.pass_done is None else f", pass {self.pass_number} {self.pass_done:.0%}"
        return (
            f"{self.num_samples} samples in {self.num_shards} shards, {format_size(self.size_bytes)} of "
            f"{format_size(self.size_limit)}, {self.fill_state}{done}"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found: damaged and missing shards, files nobody knows, and what was done.

    `ok` is true when nothing is wrong any more: nothing was found, or all of it was repaired.
    """

    num_shards: int
    num_samples: int
    corrupt: tuple[str, ...]
    missing: tuple[int, ...]
    orphans: tuple[str, ...]
    catalogue_problem: str | None
    repaired: bool

    @property
    def problems(self) -> int:
        found = len(self.corrupt) + len(self.missing) + len(self.orphans)
        return found + (self.catalogue_problem is not None)

    @property
    def ok(self) -> bool:
        return self.repaired or self.problems == 0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.num_shards} shards, {self.num_samples} samples: all sound"
        found = (
            f"{len(self.corrupt)} corrupt, {len(self.missing)} missing, {len(self.orphans)} unknown files"
            + (f", catalogue: {self.catalogue_problem}" if self.catalogue_problem else "")
        )
        action = "repaired" if self.repaired else "run 'cachestream verify CACHE --repair'"
        return f"{self.num_shards} shards: {found}; {action}"


def describe_skipped(failures: Sequence[FailureRow]) -> str:
    """How many samples were skipped, and the reason of most; "" if none was. `failures` have the most frequent first."""
    if not failures:
        return ""
    most = failures[0]
    example = f" (first: {most.example})" if most.example else ""
    return f"{sum(one.count for one in failures)} skipped, most often: {most.kind}: {most.reason}{example}"


# The kind of source, as its fingerprint begins → the option that makes its samples alike.
_REMEDIES: Final = {
    "files:": "leave files of other kinds out with extensions=, ",
    "tfrecords:": "say what each feature is to be with features=, ",
    **dict.fromkeys(("parquet:", "mds:", "litdata:"), "choose the columns that all have with columns=, "),
}
_WITH_DEFAULTS: Final = (
    *("files:", "tars:", "tfrecords:", "parquet:", "lines:", "arrow:", "dataset:", "iterable:"),
)


def remedy_for_skipped(failures: Sequence[FailureRow], source: str) -> str:
    """The way out where too much was skipped; `failures` have the most frequent first, `source` is the fingerprint."""
    if failures[0].kind != "schema":
        return "correct what fails and start again"
    return (
        "most of the first samples decided what fields all have: "
        + "".join(words for kind, words in _REMEDIES.items() if source.startswith(kind))
        + ("give those that some lack a default with fields=, " if source.startswith(_WITH_DEFAULTS) else "")
        + "or make all alike in transform=; then 'cachestream clear CACHE' and start again"
    )
