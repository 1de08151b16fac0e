"""The numbers of a loader and its cache as one flat dict, for TensorBoard, Weights & Biases and the like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachestream.errors import ConfigError
from cachestream.storage.status import CacheStatus
from cachestream.storage.telemetry import LoaderStats

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.training.loader import EpochLoader

__all__ = ["metrics"]


def metrics(
    loader: EpochLoader | None = None, cache: Cache | None = None, *, prefix: str = "cachestream/"
) -> dict[str, float]:
    """Counters and rates of a loader and its cache: names such as "cachestream/data_wait_share" to numbers.

    Args:
        loader: an EpochLoader; its numbers are of this rank. Its cache is included.
        cache: a cache, without a loader, or instead of the loader's.
        prefix: the beginning of every name.

    Of the loader: `epoch`, `epoch_samples` and `epoch_shards` (what the epoch is drawn from), `batches`,
    `samples` and `skipped_samples` (since the loader was made), `samples_per_s` and `data_wait_share` (of
    this epoch: 0.1 is a tenth of the time spent waiting for data), `data_wait_s`, `epoch_gap_s`, `prepare_s`,
    `reuse_factor` (samples drawn over distinct ones). Of the cache: `cache_samples`, `cache_shards`,
    `cache_bytes`, `cache_limit_bytes`, `cache_used_share`, `cache_leased_bytes`, `evicted_samples`,
    `evicted_unused_samples` (before an epoch used them), `failed_samples`, `quarantined_shards`,
    `epoch_waits` (how often a full cache waited for the next epoch), `fill_pass` and `fill_pass_done` (the
    share; not there for a source without an end). Of the running worker, zeros without one:
    `fill_samples_per_s`, `fill_bytes_per_s`, `fill_space_wait_s`, `fill_restarts`, `fill_processes`.

    A call reads the cache's catalogue: milliseconds, so every few steps rather than every step.
    Raises ConfigError without either of them, CacheError when the cache cannot be read.
    """
    if loader is None and cache is None:
        raise ConfigError("metrics(): give a loader, or cache=, to look at")
    if loader is not None and not hasattr(loader, "stats"):
        raise ConfigError(
            f"metrics({loader!r}): give an EpochLoader; a cache goes by its name, metrics(cache=…)"
        )
    found: dict[str, float] = {}
    if loader is not None:
        found |= _of_loader(loader.stats)
        cache = loader.cache if cache is None else cache
    if cache is not None:
        found |= _of_cache(cache.status())
    return {f"{prefix}{name}": value for name, value in found.items()}


def _of_loader(stats: LoaderStats) -> dict[str, float]:
    return {
        "epoch": stats.epoch,
        "epoch_samples": stats.epoch_samples,
        "epoch_shards": stats.shards,
        "batches": stats.batches,
        "samples": stats.samples,
        "skipped_samples": stats.skipped,
        "samples_per_s": stats.samples_per_s,
        "data_wait_share": stats.epoch_wait_share,
        "data_wait_s": stats.wait_s,
        "epoch_gap_s": stats.gap_s,
        "prepare_s": stats.prepare_s,
        "reuse_factor": stats.reuse_factor,
    }


def _of_cache(status: CacheStatus) -> dict[str, float]:
    worker = status.worker
    found: dict[str, float] = {
        "cache_samples": status.num_samples,
        "cache_shards": status.num_shards,
        "cache_bytes": status.size_bytes,
        "cache_limit_bytes": status.size_limit,
        "cache_used_share": status.size_bytes / max(1, status.size_limit),
        "cache_leased_bytes": status.leased_bytes,
        "evicted_samples": status.evicted_samples,
        "evicted_unused_samples": status.evicted_unused_samples,
        "failed_samples": status.skipped,
        "quarantined_shards": status.quarantined,
        "epoch_waits": status.epoch_waits,
        "fill_pass": status.pass_number,
        "fill_samples_per_s": 0.0 if worker is None else worker.samples_per_s,
        "fill_bytes_per_s": 0.0 if worker is None else worker.fetched_bytes_per_s,
        "fill_space_wait_s": 0.0 if worker is None else worker.totals.space_wait_s,
        "fill_restarts": 0 if worker is None else worker.restarts,
        "fill_processes": 0 if worker is None else len(worker.states),
    }
    if status.pass_done is not None:
        found["fill_pass_done"] = status.pass_done
    return found
