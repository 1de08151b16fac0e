"""`cachestream demo`: makes the remote, starts the ranks, draws, and cleans up."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Final

from cachestream.config import format_size
from cachestream.demo.data import PLACES, SIDE, make_remote
from cachestream.errors import ConfigError, EpochError
from cachestream.storage.cache import Cache
from cachestream.storage.recovery import VerifyReport
from cachestream.storage.status import CacheStatus
from cachestream.storage.telemetry import read_history
from cachestream.tools.plots import figure_class, plot_growth
from cachestream.worker.worker import Worker

RANKS: Final = 2
CACHE: Final = "cache"
PLOT: Final = "demo.png"
LOG: Final = "ranks.log"
_TITLE: Final = "cachestream demo: two ranks train on a growing, limited cache of a slow remote"
_HEADING: Final = "epoch  samples  cached  remote seen  samples/s   wait  accuracy"
_SAMPLE_BYTES: Final = 3 * SIDE * SIDE + 64
_END_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the demo: fetching the remote once takes `fetch_s`; the cache holds `cached_share` of it."""

    num_samples: int = 6000
    num_held_out: int = 4 * PLACES
    epochs: int = 10
    epoch_s: float = 4.0
    fetch_s: float = 32.0
    cached_share: float = 0.55
    min_samples: int = 2 * PLACES

    @property
    def limit_bytes(self) -> int:
        return int(self.num_samples * self.cached_share * _SAMPLE_BYTES)


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

    def __str__(self) -> str:
        return (
            f"{self.epoch:5}{self.samples:9,}{self.cached:8,}{self.seen:13.0%}"
            f"{self.samples / self.seconds:11,.0f}{self.wait:7.1%}{self.accuracy:10.1%}"
        )


def run(
    output: str | os.PathLike[str] = "demo-output", *, keep: bool = False, size: Size | None = None
) -> int:
    """Train two ranks on a growing cache of a slow remote, and show it; 0 if all went well, else 1.

    The plot and the ranks' log go to the folder `output`; the remote and the cache to a temporary folder,
    which is removed at the end unless `keep`. Raises ConfigError for what is missing, EpochError if the ranks
    fail.
    """
    size, folder = size or Size(), Path(output)
    figure_class()  # what is missing is said now, and not after the training
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder for the plot cannot be made: {error}; give another --output"
        ) from error
    work = Path(tempfile.mkdtemp(prefix="cachestream-demo-"))
    try:
        _say(f"remote   making {size.num_samples:,} JPEG views of {PLACES} places in photographs …")
        bandwidth = int(make_remote(work, size.num_samples, size.num_held_out) / size.fetch_s)
        problems = _train(work, folder, bandwidth, size)
    finally:
        if keep:
            _say(f"Remote and cache are kept in {work}.")
        else:
            shutil.rmtree(work)
    for problem in problems:
        sys.stderr.write(f"cachestream demo: {problem}; see {folder / LOG}\n")
    return 1 if problems else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _train(work: Path, folder: Path, bandwidth_bytes_per_s: int, size: Size) -> list[str]:
    """Train, draw and tell the result; returns what went wrong."""
    whole, speed = format_size(size.num_samples * _SAMPLE_BYTES), format_size(bandwidth_bytes_per_s)
    _say(f"         {format_size(bandwidth_bytes_per_s * size.fetch_s)}, limited to {speed}/s")
    _say(f"cache    limited to {format_size(size.limit_bytes)}; all of it, decoded, would take {whole}")
    _say(f"ranks    starting {RANKS} …\n")
    epochs: list[EpochDone] = []
    with Cache(work / CACHE, size.limit_bytes, min_free="100MB") as cache:
        try:
            with closing(train_ranks(work, size, bandwidth_bytes_per_s, folder / LOG)) as done:
                for event in done:
                    if not epochs:
                        _say(_HEADING)
                    epochs.append(event)
                    _say(str(event))
        finally:
            Worker(cache, None, None).stop(_END_S)  # it ends after the ranks: then its cache can be removed
        accuracy = [(event.time_s, event.accuracy) for event in epochs]
        history = read_history(cache.directory.worker_file("history"))
        plot_growth(history, folder / PLOT, _TITLE, accuracy)
        status = cache.status()
        _say(
            f"\n{_summary(epochs, status, int(history['size_bytes'].max()))}\nPlot of growth and accuracy: "
            f"{folder / PLOT}"
        )
        return problems(status, cache.verify())


def _summary(epochs: list[EpochDone], status: CacheStatus, peak_bytes: int) -> str:
    last, waited = epochs[-1], sum(event.wait * event.seconds for event in epochs)
    return (
        f"{last.accuracy:.0%} accuracy after {last.epoch} epochs. {last.seen:.0%} of the remote went through "
        f"a cache of {format_size(peak_bytes)} at most\n(limit {format_size(status.size_limit)}); "
        f"{status.evicted_samples:,} samples were evicted, and training waited "
        f"{waited / sum(event.seconds for event in epochs):.1%} of its time."
    )


def problems(status: CacheStatus, report: VerifyReport) -> list[str]:
    """Failed expectations, a line each."""
    found = []
    if (over := status.size_bytes - status.size_limit) > 0:
        found.append(f"the cache takes {over:,} bytes more than its limit of {status.size_limit:,}")
    if status.skipped:
        reasons = ", ".join(sorted({failure.reason for failure in status.failures}))
        found.append(f"{status.skipped} samples were skipped: {reasons}")
    if not report.ok:
        found.append(f"the cache is not sound: {report}")
    return found


def train_ranks(
    work: Path, size: Size, bandwidth_bytes_per_s: int, log: Path
) -> Generator[EpochDone, None, None]:
    """Yield the epochs of ranks under torchrun, which work in the folder `work`; their stderr goes to `log`.

    Closing the generator ends them. They have a session of their own: Ctrl-C reaches this process alone, and
    they end in order. If this process is killed, the first rank's next report fails, and so all end. Raises
    EpochError with their reasons if they fail.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "--log-dir", str(work / "torchrun")),
        *("-m", "cachestream.demo.train", str(work), json.dumps(asdict(size)), str(bandwidth_bytes_per_s)),
    ]
    failures = []
    with (
        open(log, "wb") as errors,
        Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=errors, text=True, start_new_session=True) as ranks,
    ):
        try:
            assert ranks.stdout is not None
            for line in ranks.stdout:
                if line.startswith("{"):  # other lines are of libraries
                    values = json.loads(line)
                    if "failure" in values:
                        failures.append(values["failure"])
                    else:
                        yield EpochDone(**values)
            if code := ranks.wait(_END_S):
                reasons = "; ".join(failures) or f"exit code {code}"
                raise EpochError(f"the demo's ranks failed: {reasons}; see {log}")
        finally:
            ranks.terminate()  # torchrun passes it on; nothing happens if it has ended
            try:
                ranks.wait(_END_S)
            except TimeoutExpired:
                ranks.kill()  # its ranks end at their next report, or when they miss each other
