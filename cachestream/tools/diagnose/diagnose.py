"""Measurement of every stage of a source by its real parts, in about ten seconds.

`list`: opening the source. `read`, `decode`, `transform`, `pack`: one unit after another, then as many reads
at once as a worker has (see `probe`). `write`: a file of 64 MiB in a temporary folder, synced. `transfer`:
the real loader over a cache of the packed samples there, warm, onto the accelerator if there is one.

Not measured: how the remote behaves at other times, and the model. Data that this machine has read before
comes from its memory.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Final

from cachestream.config import format_size
from cachestream.errors import CacheFullError, SourceError
from cachestream.sources.base import Source, as_incremental
from cachestream.sources.token_windows import apply_packing
from cachestream.storage.cache import Cache
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.publish import Publisher
from cachestream.storage.reservations import Owner
from cachestream.tools.bench import measure_loader
from cachestream.tools.diagnose.machine import existing_folder, synced_bytes_per_s
from cachestream.tools.diagnose.probe import SHARD_BYTES, Probe, Transform
from cachestream.tools.diagnose.stages import Findings, Stages, Throughput, judge
from cachestream.training.batches.transfer import accelerator
from cachestream.worker.sampling.packer import Packer

_UNITS_AT_MOST: Final = 100_000
_READS: Final = 16  # units that a sampling process reads at once
_READS_AT_MOST: Final = 128
_IN_FLIGHT_BYTES: Final = 1 << 30
_BATCHES: Final = (64, 4096)  # samples, the least and the most
_BATCH_BYTES: Final = 1 << 20
_REPEATS: Final = 16
_TRANSFER_S: Final = 1.0
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
    """Read the source `shown`, which `open_it` opens, for about `seconds`; find the stage that holds it up.

    `workers`: the sampling processes of a worker (default: one a core, at most 4). `folder`: the place of the
    temporary folder, best on the disk of the cache to be. `on_progress` gets a line before each step.

    Raises what `open_it` raises, SourceError if nothing can be read or used, ConfigError for a missing
    folder, and CacheFullError if the samples do not fit there.
    """
    cores = len(os.sched_getaffinity(0))
    workers = min(4, cores) if workers is None else workers
    place = existing_folder(folder or tempfile.gettempdir())
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
    alone = probe.run(0.0)  # pays for what is done once: imports, connections
    if not alone.num_samples:
        reason = probe.failure or "check the path, --format, that the remote answers and the transform ends"
        raise SourceError(f"{shown}: no usable sample in {alone.seconds:.1f} s; {reason}")
    packer, probe.packer = probe.packer, Packer()
    if (run := probe.run(seconds / 2)).num_samples:
        alone, packer = run, probe.packer
    if not packer.num_samples:
        raise SourceError(f"{shown}: the transform dropped all {alone.num_samples} samples that were read")
    # The reads of a worker, which hold samples in memory, and of which each has a unit.
    sample_bytes = max(alone.fetched_bytes / alone.num_samples, packer.size_bytes / packer.num_samples, 1)
    most = min(_READS_AT_MOST, num_units or _READS_AT_MOST, max(1, int(_IN_FLIGHT_BYTES / sample_bytes)))
    reads = min(_READS * workers, most)
    on_progress(f"reading {reads} units at once, for {seconds / 2:.3g} s")
    together = probe.run(seconds / 2, reads)
    on_progress(f"writing into a temporary folder in {place}, and loading from there")
    device = accelerator() or "cpu"
    stored = _store(packer, place, device)
    stages = Stages(list_s, num_units, growing is not None, alone, together, *stored, device, cores, workers)
    return Findings(shown, stages, judge(stages), len(probe.failed), probe.failure)


def _store(packer: Packer, place: str, device: str) -> tuple[Throughput, Throughput]:
    """Write `packer` into a cache below `place`, and load it onto `device`."""
    with (
        translated_disk_errors(place),
        tempfile.TemporaryDirectory(prefix="cachestream-diagnose-", dir=place) as folder,
        Cache(folder, "1GB", min_free=_MIN_FREE) as cache,
        Owner.temporary(cache.directory, "diagnose") as owner,
    ):
        publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)
        # Several times if it is small: an epoch of a few samples says little of the loader.
        repeats = min(_REPEATS, max(1, SHARD_BYTES // packer.size_bytes))
        for _ in range(repeats):
            if publisher.publish(packer.content({}), 0, ()) is None:
                raise CacheFullError(
                    f"no space for {format_size(packer.size_bytes)} in {place}; try --folder"
                )
        seconds = packer.size_bytes / synced_bytes_per_s(folder)
        sample_bytes = max(1, cache.size_bytes // cache.num_samples)
        batch_size = min(cache.num_samples, _BATCHES[1], max(_BATCHES[0], _BATCH_BYTES // sample_bytes))
        delivered = measure_loader(cache, batch_size, _TRANSFER_S, device=device)
        return Throughput(packer.num_samples, packer.size_bytes, seconds), delivered
