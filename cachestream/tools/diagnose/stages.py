"""The stages of a sample's way, and which of them holds up the rest: pure, from figures to a verdict.

Rates compare the stages: samples a second that one would let through if all others took no time. Reading is what came
when as many units were read at once as a worker reads. The stages that calculate share the cores; a transform that
waits holds up its sampling process; the disk and the loader do one thing at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

BUSY: Final = 0.8  # of the cores, or of the one core that the interpreter's lock leaves to Python
_MOSTLY: Final = 0.5
_AT_ONCE_S: Final = 0.05
_ONE_INTERPRETER: Final = 1.3  # above that many cores, it is not the interpreter's lock that holds it up


@dataclass(frozen=True, slots=True)
class Crowd:
    """What came of `reads` units that were read at once for `seconds`, decoded but not transformed.

    `busy_cores`: how many cores this process used meanwhile; `wanted_cores`: and waited for. `decoding`: the share of the readers' time
    that did not pass in reading, None where the source does not tell. `slowed_down`: answers that there are too many
    requests. `machine_cores`: how many of the cores that this process may use were busy, whoever used them; None where
    the system does not tell.
    """

    reads: int
    num_samples: int
    fetched_bytes: int
    seconds: float
    busy_cores: float
    wanted_cores: float
    decoding: float | None = None
    slowed_down: int = 0
    machine_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """Samples that were written and synced, and the time it takes as a part of full shards."""

    num_samples: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoaderRate:
    """What the loader delivers of what is cached, onto `device`, beside one thread's memcpy."""

    samples_per_s: float
    bytes_per_s: float
    memcpy_bytes_per_s: float
    device: str


@dataclass(frozen=True, slots=True)
class Stages:
    """Figures of one source. Times in seconds; those of stages for all `num_samples` together, one after another.

    `num_units`: None for an endless source; `is_listing` while more are to be listed. `fetched_bytes`: 0 where the
    source does not tell. `read_s` is waiting for bytes and asking for them, of which `read_cpu_s` kept the processor
    busy; `decode_s` and `pack_s` are processor time; `transform_s` (None: there is none) is its whole time, of which
    `transform_cpu_s` kept the processor busy. `written` and `delivery` are None where they could not be measured.
    `cores` may be used; `workers` sampling processes are what a worker would have. `has_turbo`: whether the faster
    decoder of JPEGs is installed.
    """

    list_s: float
    num_units: int | None
    is_listing: bool
    num_samples: int
    fetched_bytes: int
    read_s: float
    read_cpu_s: float
    decode_s: float
    transform_s: float | None
    transform_cpu_s: float
    pack_s: float
    written: Written | None
    crowd: Crowd
    delivery: LoaderRate | None
    cores: int
    workers: int
    has_turbo: bool

    # --- samples a second that each stage would let through

    @property
    def remote_has_more(self) -> bool:
        """Whether it was not the remote that held up the reads: the processor did, or they were done at once."""
        crowd = self.crowd
        if crowd.seconds < _AT_ONCE_S:
            return True
        if crowd.decoding is not None and crowd.decoding > _MOSTLY:
            return True  # threads also wait for memory, and for one another
        return crowd.wanted_cores >= BUSY * self.cores or BUSY <= crowd.busy_cores <= _ONE_INTERPRETER

    @property
    def alone_per_s(self) -> float:
        """Samples a second that came of one unit after another, their decoding left out."""
        return _rate(self.num_samples, self.read_s)

    @property
    def read_per_s(self) -> float:
        """Samples a second that came; if `remote_has_more`, more would."""
        crowd = self.crowd
        came = _rate(crowd.num_samples, crowd.seconds) if crowd.num_samples else 0.0
        if crowd.num_samples < 2 * crowd.reads and self.fetched_bytes and crowd.fetched_bytes:
            # Large units: few had come to an end of a sample when the time was up.
            came = max(came, crowd.fetched_bytes / crowd.seconds * self.num_samples / self.fetched_bytes)
        if not came:
            return self.alone_per_s
        # A source of the user's own that lets one call at a time through does so in each process.
        one_by_one = not self.fetched_bytes and crowd.reads > 1 and came < 2 * self.alone_per_s
        return came * self.workers if one_by_one and not self.remote_has_more else came

    @property
    def more_reads_help(self) -> bool:
        """Whether many reads at once brought nearly as many times as much: latency holds them up, not bandwidth."""
        crowd = self.crowd
        if not self.fetched_bytes or crowd.reads < 2 or not self.read_s:
            return True
        gain = crowd.fetched_bytes / crowd.seconds / (self.fetched_bytes / self.read_s)
        return gain >= math.sqrt(crowd.reads)  # the middle between no gain and all of it

    @property
    def others_crowd(self) -> bool:
        """Whether other programs left no core to spare while many units were read at once."""
        return (self.crowd.machine_cores or 0.0) >= BUSY * self.cores

    @property
    def cpu_s(self) -> dict[str, float]:
        """Processor time of each stage."""
        return {
            "read": self.read_cpu_s,
            "decode": self.decode_s,
            "transform": self.transform_cpu_s,
            "pack": self.pack_s,
        }

    @property
    def processor_per_s(self) -> float:
        """Samples a second that all stages which calculate let through together."""
        return self.cores * _rate(self.num_samples, sum(self.cpu_s.values()))

    def calculated_per_s(self, stage: str) -> float:
        """Samples a second that one of `cpu_s` would let through, with all cores for itself."""
        return self.cores * _rate(self.num_samples, self.cpu_s[stage])

    @property
    def transform_per_s(self) -> float:
        """Samples a second that the transform lets through: one at a time in each process."""
        at_once = self.workers * _rate(self.num_samples, self.transform_s or 0.0)
        return min(at_once, self.calculated_per_s("transform"))

    @property
    def write_per_s(self) -> float:
        """Samples a second that the disk takes; any number where that was not measured."""
        return math.inf if self.written is None else _rate(self.written.num_samples, self.written.seconds)

    @property
    def fill_per_s(self) -> float:
        """Samples a second that a worker fills a cache with, at most."""
        read = math.inf if self.remote_has_more else self.read_per_s
        return min(read, self.processor_per_s, self.transform_per_s, self.write_per_s)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds up the rest: `binds` is "remote" (how long it takes to answer), "network" (how much comes at a time),
    "machine" (other programs on it, so that the network's part is not seen), "requests" (the processor's work on them), "decode", "transform", "pack", "disk" or "transfer"; `because` says why,
    `what_next` what to do about it. `samples_per_s`: what it lets through.
    """

    binds: str
    samples_per_s: float
    because: str
    what_next: tuple[str, ...]


def judge(stages: Stages) -> Verdict:
    """The stage that lets the fewest samples through."""
    rates = {
        "processor": stages.processor_per_s,
        "transform": stages.transform_per_s,
        "disk": stages.write_per_s,
    }
    if not stages.remote_has_more:
        rates["read"] = stages.read_per_s
    if stages.delivery is not None:
        rates["transfer"] = stages.delivery.samples_per_s
    slowest = min(rates, key=lambda name: rates[name])
    binds = slowest
    if slowest == "processor":
        costs = stages.cpu_s
        binds = max(costs, key=lambda name: costs[name])
        binds = "requests" if binds == "read" else binds
    elif slowest == "read":
        binds = "remote" if stages.more_reads_help else "machine" if stages.others_crowd else "network"
    return Verdict(binds, rates[slowest], _because(binds, stages), _what_next(binds, stages))


_BECAUSE: Final = {
    "disk": "the disk takes samples more slowly than they come",
    "transfer": "batches are delivered more slowly than samples come",
}
_WORK: Final = {
    "requests": ("asking for bytes", "read"),
    "decode": ("decoding", "decode"),
    "transform": ("the transform", "transform"),
    "pack": ("packing samples into columns", "pack"),
}


def _because(binds: str, stages: Stages) -> str:
    if binds == "network":
        return f"{stages.crowd.reads} reads at once bring hardly more than one: the bandwidth is used up, or the server"
    if binds == "machine":
        others = max(0.0, (stages.crowd.machine_cores or 0.0) - stages.crowd.busy_cores)
        return (
            f"{stages.crowd.reads} reads at once bring hardly more than one, while other programs keep {others:.1f} of "
            f"{stages.cores} cores busy"
        )
    if binds == "remote":
        few = stages.crowd.reads < 2 or not stages.fetched_bytes
        return "reads wait for answers" + ("" if few else ", and many at once bring more")
    if binds in _BECAUSE:
        return _BECAUSE[binds]
    if binds == "transform" and _transform_waits(stages):
        return "the transform waits, and holds up its process"
    what, stage = _WORK[binds]
    share = stages.cpu_s[stage] / max(sum(stages.cpu_s.values()), 1e-9)
    return f"{what} keeps the processor busy, {share:.0%} of its work"


def _transform_waits(stages: Stages) -> bool:
    return stages.transform_cpu_s < (stages.transform_s or 0.0) / 2


_SMALLER: Final = (
    "make samples smaller before they are cached: --resize, --crop, a transform that keeps uint8"
)
_NEXT: Final[dict[str, tuple[str, ...]]] = {
    "network": (
        "fetch fewer bytes: smaller files, only the columns or windows that are needed",
        "look for a limit on the way: the link, a proxy, the bucket's own; or run nearer to the data",
    ),
    "machine": (
        "look again while nothing else runs here: only then is it seen what the network brings",
        "a server of the remote on this machine, as for tests, is such a program: run it on another",
    ),
    "requests": (
        "larger units need fewer requests: tars, Parquet or MDS instead of small files, larger windows of arrays",
        "more processes: --workers, up to the number of cores",
    ),
    "transform": (
        "move random augmentation to batch_transform, which works on whole batches while training",
        "let it do less for each sample, or crop and resize while decoding (--resize, --crop)",
    ),
    "disk": (_SMALLER, "put the cache on a faster disk; try one by --folder"),
    "transfer": (_SMALLER, "give batches that are smaller in bytes; see 'cachestream bench CACHE' for the loader alone"),
}  # fmt: skip


def _what_next(binds: str, stages: Stages) -> tuple[str, ...]:
    more = f"more processes: --workers above {stages.workers}"
    if binds == "remote":
        steps = [] if stages.crowd.slowed_down else [f"{more}, each reads up to 16 units at once"]
        if stages.crowd.slowed_down:
            steps.append("it answers that there are too many requests: fewer, larger units")
        if stages.num_units is not None and stages.num_units <= stages.crowd.reads:
            steps = [f"there are only {stages.num_units} units to read at once: smaller ones, more of them"]
        return (*steps, "larger units (tars instead of small files), or run nearer to the data")
    if binds == "decode":
        steps = ["images: --resize and --crop; large JPEGs are then unpacked at a part of their size"]
        if not stages.has_turbo:
            steps.append("JPEGs: a faster decoder, pip install 'cachestream[jpeg]'")
        steps.append(
            more if stages.workers < stages.cores else "more cores, or data that is quicker to decode"
        )
        return tuple(steps)
    if binds == "pack":
        columns = (
            "leave out the transform: sources of columns (Parquet, TFRecord) are then packed many at once"
        )
        steps = [_SMALLER, "give samples fewer fields, with fixed shapes"]
        return tuple(steps if stages.transform_s is None else [*steps, columns])
    if binds == "transform":
        return (
            *((more,) if _transform_waits(stages) or stages.workers < stages.cores else ()),
            *_NEXT[binds],
        )
    return _NEXT[binds]
