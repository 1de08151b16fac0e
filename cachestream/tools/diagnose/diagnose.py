"""The bottleneck in filling from a source, and in training on it: every stage by its real parts, in ten seconds.

`list`: making the source. `read` and `decode`, `transform`, `pack`: one unit after another (see `probing`), then as
many at once as a worker reads (see `crowding`). `write`: what was packed, as shards of a real cache in a temporary
folder, synced. `transfer`: the real loader over that cache, warm, onto the GPU if there is one; beside memcpy.

What it cannot tell: how the remote behaves at other times, or asked for more at once; what your model takes. Data
that this machine has read before comes from its memory.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from cachestream.config import format_size
from cachestream.errors import CacheFullError, CacheStreamError, ConfigError
from cachestream.sources.base import Source
from cachestream.storage.cache import Cache
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import PROCESSES_AT_MOST
from cachestream.tools.bench import measure_loader, memcpy_bytes_per_s
from cachestream.tools.diagnose.findings import Findings
from cachestream.tools.diagnose.probing import SHARD_BYTES, SequentialRun, Transform, Units, read_together
from cachestream.tools.diagnose.stages import LoaderRate, Stages, Written, judge
from cachestream.training.batches.transfer import has_cuda
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.packer import Packer

_READS: Final = 16  # units that a sampling process reads at once
_READS_AT_MOST: Final = 128
_READS_AT_LEAST: Final = 4
_IN_FLIGHT_BYTES: Final = 1 << 30  # of samples, which are read whole
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
    """Read what `open_it` opens, called `shown`, for about `seconds`, and tell what holds up the rest.

    `workers`: as many sampling processes as a worker would have (default: one a core, at most 4). `folder`: where the
    temporary folder is made, best on the disk of the cache to be; it is gone at the end, whatever happens.
    `on_progress` gets a line before each step.

    Raises what `open_it` does, SourceError if nothing can be read or used, and ConfigError for a folder that is none.
    """
    cores = len(os.sched_getaffinity(0))
    workers = min(4, cores) if workers is None else workers
    _check(folder, workers)
    on_progress("listing")
    begun_s = time.perf_counter()
    source = open_it()
    units = Units(source)
    list_s = time.perf_counter() - begun_s
    on_progress(f"reading one unit after another, for {seconds / 2:.3g} s")
    alone = SequentialRun(shown, source, units, transform)
    alone.run(seconds / 2)
    reads = _reads_at_once(alone, units, workers)
    on_progress(f"reading {reads} units at once, for {seconds / 2:.3g} s")
    crowd = read_together(source, units, transform, _first_unread(alone, units, reads), reads, seconds / 2)
    place = tempfile.gettempdir() if folder is None else folder
    on_progress(f"writing into a temporary folder in {place}, and loading from there")
    stored = _store(alone, place)
    stages = Stages(
        **asdict(alone.account) | {"transform_s": None if transform is None else alone.account.transform_s},
        list_s=list_s,
        num_units=units.count,
        is_listing=units.is_listing,
        written=stored.written,
        crowd=crowd,
        delivery=stored.delivery,
        cores=cores,
        workers=workers,
        has_turbo=importlib.util.find_spec("simplejpeg") is not None,
    )
    return Findings(shown, stages, judge(stages), place, stored.notes, alone.skipped, alone.failure)


def _check(folder: str | None, workers: int) -> None:
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"--folder {folder!r}: no such folder; give one on the disk of the cache to be")
    if not 1 <= workers <= PROCESSES_AT_MOST:
        raise ConfigError(f"--workers {workers}: give a whole number from 1 to {PROCESSES_AT_MOST}")


def _reads_at_once(alone: SequentialRun, units: Units, workers: int) -> int:
    """As many as a worker's, of the units that there are, and of what memory they may take."""
    each_bytes = max(alone.account.fetched_bytes, sum(packer.size_bytes for packer in alone.packers), 1)
    fitting = max(_READS_AT_LEAST, _IN_FLIGHT_BYTES * alone.account.num_samples // each_bytes)
    return min(_READS * workers, _READS_AT_MOST, units.count or _READS_AT_MOST, fitting)


def _first_unread(alone: SequentialRun, units: Units, reads: int) -> int:
    """The first unit that was not read yet, where `reads` of them are left; otherwise the same ones again."""
    enough = units.count is None or alone.units_read + reads <= units.count
    return alone.units_read if enough else 0


@dataclass(slots=True)
class _StoredSamples:
    """What became of the samples: `notes` say why not all of it was measured."""

    written: Written | None = None
    delivery: LoaderRate | None = None
    notes: tuple[str, ...] = ()


def _store(alone: SequentialRun, place: str) -> _StoredSamples:
    """Write what was packed into a cache of its own below `place`, and deliver it from there."""
    stored = _StoredSamples()
    if not alone.packers:
        stored.notes = ("Not measured: writing and loading, because the transform dropped all samples.",)
        return stored
    # Not tempfile.TemporaryDirectory: Ctrl-C inside of it leaves a folder behind.
    folder = os.path.join(place, f"cachestream-diagnose-{secrets.token_hex(8)}")
    try:
        os.mkdir(folder, 0o700)
        with Cache(folder, _CACHE_LIMIT, min_free=_MIN_FREE) as cache:
            stored.written = _write(cache, alone)
            stored.delivery = _deliver(cache)
    except (CacheStreamError, OSError, RuntimeError) as error:  # RuntimeError: torch's, of the device
        what = "loading" if stored.written else "writing and loading"
        reason = f"{type(error).__name__}: {redact_text(str(error))}"
        stored.notes = (f"Not measured: {what}, because of {reason}",)
    finally:
        try:
            _remove(folder)
        except BaseException:  # Ctrl-C while it goes
            _remove(folder)
            raise
    return stored


def _remove(folder: str) -> None:
    for _ in range(_REMOVALS):  # a thread of a loader that was interrupted may put a file there meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return


def _write(cache: Cache, alone: SequentialRun) -> Written:
    """Publish the packed samples, some times if they are few: an epoch over a handful says little of the loader.

    What a shard costs however small it is counts by their part of a full one.
    """
    owner = Owner(cache.directory, f"diagnose-{secrets.token_hex(6)}")
    try:
        publisher = Publisher(cache.directory, cache.catalogue, cache.admission, owner.name)
        _publish(publisher, cache, alone.one)  # pays for what is done once
        small_s = _publish(publisher, cache, alone.one)
        each_bytes = sum(packer.size_bytes for packer in alone.packers)
        shards = list(alone.packers) * min(_REPEATS, max(1, SHARD_BYTES // each_bytes))
        whole_s = sum(_publish(publisher, cache, packer) for packer in shards)
    finally:
        owner.release()
    num_bytes = sum(packer.size_bytes for packer in shards)
    growing_s = max(0.0, whole_s - small_s * len(shards))
    seconds = min(whole_s, growing_s + small_s * num_bytes / SHARD_BYTES)
    return Written(sum(packer.num_samples for packer in shards), num_bytes, seconds)


def _publish(publisher: Publisher, cache: Cache, packer: Packer) -> float:
    begun_s = time.perf_counter()
    if publisher.publish(packer.content({}), [], UnitProgress(0)) is None:
        raise CacheFullError(f"no space for {format_size(packer.size_bytes)} in {cache.path}; try --folder")
    return time.perf_counter() - begun_s


def _deliver(cache: Cache) -> LoaderRate:
    num_samples = cache.num_samples
    each_bytes = max(1, cache.size_bytes // num_samples)
    batch_size = min(num_samples, _BATCHES[1], max(_BATCHES[0], _BATCH_BYTES // each_bytes))
    device = "cuda" if has_cuda() else "cpu"
    rate = measure_loader(cache, batch_size, _TRANSFER_S, device=device)
    return LoaderRate(rate.samples_per_s, rate.bytes_per_s, memcpy_bytes_per_s(), device)
