"""Measurement of every stage of a source by its real parts, in about ten seconds.

`list`: opening the source. `read`, `decode`, `transform`, `pack`: one unit after another, then as many reads
at once as a worker has (see `probe`). `write`: the packed samples, as shards of a real cache in a temporary
folder, synced. `transfer`: the real loader over that cache, warm, onto the accelerator if there is one.

Not measured: how the remote behaves at other times, and the model. Data that this machine has read before
comes from its memory.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Final

from cachestream.config import format_size
from cachestream.errors import CacheFullError, CacheStreamError, ConfigError, SourceError
from cachestream.sources.base import Source, as_incremental
from cachestream.sources.token_windows import apply_packing
from cachestream.storage.cache import Cache
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import PROCESSES_AT_MOST
from cachestream.tools.bench import measure_loader
from cachestream.tools.diagnose.probe import SHARD_BYTES, Probe, Transform
from cachestream.tools.diagnose.stages import Findings, Measurement, Stages, Throughput, judge
from cachestream.training.batches.transfer import accelerator
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.sampling.packer import Packer

_UNITS_AT_MOST: Final = 100_000
_READS: Final = 16  # units that a sampling process reads at once
_READS_AT_MOST: Final = 128
_IN_FLIGHT_BYTES: Final = 1 << 30
_BATCHES: Final = (64, 4096)  # samples, the least and the most
_BATCH_BYTES: Final = 1 << 20
_REPEATS: Final = 16
_REMOVALS: Final = 10
_TRANSFER_S: Final = 1.0
_CACHE_LIMIT: Final = "1GB"
_MIN_FREE: Final = "200MB"


def diagnose(
    shown: str,
    open_it: Callable[[], Source],
    transform: Transform | None = None,
    *,
    seconds: float = 5.0,
    workers: int | None = None,
    folder: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Read the source that `open_it` opens, called `shown`, for about `seconds`, and find the stage that
    holds it up.

    `workers`: the sampling processes of a worker (default: one a core, at most 4). `folder`: the place of the
    temporary folder, best on the disk of the cache to be. `on_progress` gets a line before each step.

    Raises what `open_it` raises, SourceError if nothing can be read or used, and ConfigError for a missing
    folder.
    """
    cores = len(os.sched_getaffinity(0))
    workers = min(4, cores) if workers is None else workers
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"--folder {folder!r}: no such folder; give one on the disk of the cache to be")
    if not 1 <= workers <= PROCESSES_AT_MOST:
        raise ConfigError(f"--workers {workers}: give a whole number from 1 to {PROCESSES_AT_MOST}")
    on_progress("listing")
    begun_s = time.perf_counter()
    source, transform = apply_packing(open_it(), transform)
    growing = as_incremental(source)
    num_units = source.num_units if growing is None else len(growing.first_names)
    list_s = time.perf_counter() - begun_s
    everything = range(_UNITS_AT_MOST if num_units is None else num_units)
    order = random.Random(11).sample(everything, min(len(everything), _UNITS_AT_MOST))
    on_progress(f"reading one unit after another, for {seconds / 2:.3g} s")
    probe = Probe(source, order, transform)
    first = alone = probe.run(0.0)  # pays for what is done once: imports, connections
    if not first.num_samples:
        reason = probe.failure or "check the path, --format, that the remote answers and the transform ends"
        raise SourceError(f"{shown}: no usable sample in {first.seconds:.1f} s; {reason}")
    small = packer = probe.packer
    probe.packer = Packer()
    if (run := probe.run(seconds / 2)).num_samples:
        alone, packer = run, probe.packer
    reads = _reads_at_once(alone, packer, num_units, workers)
    on_progress(f"reading {reads} units at once, for {seconds / 2:.3g} s")
    together = probe.run(seconds / 2, reads)
    place = tempfile.gettempdir() if folder is None else folder
    on_progress(f"writing into a temporary folder in {place}, and loading from there")
    device = accelerator() or "cpu"
    written, delivered, notes = _store(small, packer, place, device)
    is_listing, has_transform = growing is not None, transform is not None
    measured = alone, together, written, delivered, device
    stages = Stages(list_s, num_units, is_listing, has_transform, *measured, cores, workers)
    return Findings(shown, stages, judge(stages), notes, len(probe.failed), probe.failure)


def _reads_at_once(alone: Measurement, packer: Packer, num_units: int | None, workers: int) -> int:
    """The reads of a worker, bounded by the number of units and by the memory for samples, which are read
    whole.
    """
    packed_bytes = packer.size_bytes / max(1, packer.num_samples)
    sample_bytes = max(alone.fetched_bytes / alone.num_samples, packed_bytes, 1)
    fitting = max(1, int(_IN_FLIGHT_BYTES / sample_bytes))
    return min(_READS * workers, _READS_AT_MOST, num_units or _READS_AT_MOST, fitting)


def _store(
    small: Packer, packer: Packer, place: str, device: str
) -> tuple[Throughput | None, Throughput | None, tuple[str, ...]]:
    """Write `packer` into a cache below `place`, and load it onto `device`; with notes on what failed."""
    if not packer.num_samples:
        return None, None, ("Not measured: writing and loading, because the transform dropped all samples.",)
    written = delivered = None
    notes: tuple[str, ...] = ()
    # Not tempfile.TemporaryDirectory: a thread of an interrupted loader may put a file there while it is
    # removed.
    folder = os.path.join(place, f"cachestream-diagnose-{secrets.token_hex(8)}")
    try:
        os.mkdir(folder, 0o700)
        with Cache(folder, _CACHE_LIMIT, min_free=_MIN_FREE) as cache:
            written = _write(cache, small if small.num_samples else packer, packer)
            delivered = _deliver(cache, device)
    except (CacheStreamError, OSError, RuntimeError) as error:  # RuntimeError: torch's, of the device
        what = "loading" if written else "writing and loading"
        notes = (f"Not measured: {what}, because of {type(error).__name__}: {redact_text(str(error))}",)
    finally:
        for _ in range(_REMOVALS):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.lexists(folder):
                break
    return written, delivered, notes


def _write(cache: Cache, small: Packer, packer: Packer) -> Throughput:
    """Publish `packer`, several times if it is small: an epoch over a handful of samples says little of the
    loader.

    `small` measures the fixed cost of a shard, of which only the share of a full shard counts.
    """
    owner = Owner(cache.directory, f"diagnose-{secrets.token_hex(6)}")
    repeats = min(_REPEATS, max(1, SHARD_BYTES // packer.size_bytes))
    try:
        publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)
        _publish(publisher, cache, small)  # pays for what is done once
        fixed_s = _publish(publisher, cache, small)
        whole_s = sum(_publish(publisher, cache, packer) for _ in range(repeats))
    finally:
        owner.release()
    num_bytes = repeats * packer.size_bytes
    growing_s = max(0.0, whole_s - fixed_s * repeats)
    seconds = min(whole_s, growing_s + fixed_s * num_bytes / SHARD_BYTES)
    return Throughput(repeats * packer.num_samples, num_bytes, seconds)


def _publish(publisher: Publisher, cache: Cache, packer: Packer) -> float:
    begun_s = time.perf_counter()
    if publisher.publish([packer.content({})], [], UnitProgress(0)) is None:
        raise CacheFullError(f"no space for {format_size(packer.size_bytes)} in {cache.path}; try --folder")
    return time.perf_counter() - begun_s


def _deliver(cache: Cache, device: str) -> Throughput:
    sample_bytes = max(1, cache.size_bytes // cache.num_samples)
    batch_size = min(cache.num_samples, _BATCHES[1], max(_BATCHES[0], _BATCH_BYTES // sample_bytes))
    return measure_loader(cache, batch_size, _TRANSFER_S, device=device)
