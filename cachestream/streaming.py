"""`stream`: the cache, its worker and its loader in one call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

from cachestream.config import SHORTEST_S, check_seconds, keywords_of, suggests_names
from cachestream.errors import ConfigError
from cachestream.sources.base import is_source
from cachestream.sources.open import SOURCE_OPTIONS, Unopened, open_source
from cachestream.storage.cache import Cache
from cachestream.training.loader import EpochLoader
from cachestream.training.ranks import find_share, is_elastic, warn_of_kept_store
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.worker import Worker, start_worker

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from cachestream.storage.eviction import EvictionPolicy
    from cachestream.storage.view import Condition
    from cachestream.training.batches.gather import Ragged
    from cachestream.training.batches.transfer import BatchTransform
    from cachestream.training.samplers import SamplerLike

_CACHE_OPTIONS: Final = ("min_free", "eviction")
_TIMEOUT_S: Final = 120.0  # the loader's
_LINGER_S: Final = 120.0  # in which torchrun has started the ranks again, and they have loaded torch
logger = logging.getLogger("cachestream")


class SourceOptions(TypedDict, total=False):
    """The options of `open_source`, which say what they mean; each belongs to some sources."""

    check_crc: bool
    check_hashes: bool
    columns: Sequence[str] | None
    compression: str | None
    crop: int | tuple[int, int] | None
    dataset: str | None
    decode_images: bool
    decoders: Mapping[str, Any] | None
    delimiter: str | None
    dtype: Any
    encoding: str | None
    extensions: Sequence[str] | str | None
    features: Mapping[str, Any] | None
    fields: Any
    first_names: int | str | None
    format: str | None
    jitter: Any
    label: Any
    manifest: bool | Mapping[str, Any] | None
    max_object_size: int | str | None
    nulls: Any
    num_units: int | None
    raw: Any
    recursive: bool
    resize: int | tuple[int, int] | None
    samples_per_visit: int | None
    shards: Any
    storage_options: Mapping[str, Any] | None
    stride: Any
    thread_safe: bool
    window: Any
    windows: Any


class StreamOptions(SourceOptions, total=False):
    """The options of `stream`: those of `Cache`, `open_source`, `start_worker` and `EpochLoader`."""

    min_free: int | str | None
    eviction: EvictionPolicy | None
    # start_worker
    bandwidth_limit: int | str | None
    concurrency: int
    detach: bool
    engine: str
    hang_timeout_s: float
    holdout: float | None
    linger_s: float
    on_change: str
    order: Any
    partition: tuple[int, int] | str | None
    ray_options: Mapping[str, Any] | None
    seed: int
    shard_size: int | str | None
    share: str | None
    share_required: bool
    when_full: str
    # EpochLoader
    batch_transform: BatchTransform | None
    device: torch.device | str | int | None
    drop_last: bool
    epoch_size: int | None
    group_by: str | None
    locality: int | None
    max_tokens: Mapping[str, int] | None
    mesh: DeviceMesh | None
    min_samples: int | None
    mixture: Any
    pinned_limit: int | str | None
    prefetch: int
    ragged: Ragged
    record: str | os.PathLike[str] | None
    replay: str | os.PathLike[str] | None
    replicate: int | str | Sequence[str] | None
    sampler: SamplerLike | None
    shuffle: bool
    split: str | None
    timeout_s: float
    turnover: float
    weights: bool | Mapping[str, float] | None
    where: Condition | None
    with_keys: bool


class StreamLoader(EpochLoader):
    """An EpochLoader that also holds its cache and the worker that fills it.

    `close` also releases the worker, which stops unless other processes use it.
    """

    def __init__(self, cache: Cache, worker: Worker, batch_size: int, **options: Any) -> None:
        super().__init__(cache, batch_size, **options)
        self.cache = cache
        self.worker = worker

    def close(self) -> None:
        super().close()
        self.worker.close()

    def __exit__(self, *error: object) -> None:
        if any(error) and self.worker.linger_s:
            super().close()  # the process dies of the error; the worker stays for the process that follows
        else:
            self.close()


@suggests_names(StreamOptions.__annotations__)
def stream(
    source: Any,
    cache: str | os.PathLike[str] | Cache,
    size_limit: int | str | None = None,
    *,
    batch_size: int,
    transform: Callable[..., Any] | None = None,
    num_workers: int | None = None,
    **options: Unpack[StreamOptions],
) -> StreamLoader:
    """Fill a cache from `source` in the background, and iterate epochs over what it holds.

    Every iteration over the loader is a new epoch over what is cached by then; the first begins with the
    first batch that has arrived. Call it the same on every rank of a distributed job: one rank's worker runs,
    the others attach, and all ranks agree on the epochs. Where the ranks have several caches (one a node),
    the worker of each reads a share of its own, unless `partition` is given. Where torchrun restarts ranks
    (`--max-restarts`) a worker goes on for two minutes (`linger_s`) after they have failed, so that they find
    it at work.

    Args:
        source: a path or URL, a wildcard, a list of them, a Source, a map-style Dataset or a function.
        cache: a directory on a local disk, or a Cache.
        size_limit: the most that the cache may take on the disk, such as "200GB".
        batch_size: samples per batch on each rank.
        transform: `fn(sample) -> sample | None` or `fn(sample, rng)`, run once per sample in the background.
        num_workers: sampling processes.
        options: any option of `Cache` (min_free, eviction), `open_source` (storage_options, label, …),
            `start_worker` (order, bandwidth_limit, shard_size, …) and `EpochLoader` (shuffle,
            epoch_size, min_samples, turnover, device, …). `seed` goes to both.

    Batches are dicts of tensors `[B, ...]` (tuples for samples that were tuples), lists for str, bytes
    and fields whose shape varies. Raises ConfigError for what cannot work, and RankMismatchError when a rank
    of the job does not call it, too.
    """
    timeout_s = options.get("timeout_s", _TIMEOUT_S)
    check_seconds("timeout_s", timeout_s, SHORTEST_S)
    source_options = _selected(options, SOURCE_OPTIONS)
    # A path or dataset is opened while the worker's Python starts.
    source = open_source(source, **source_options) if is_source(source) else Unopened(source, source_options)
    worker_options = {
        "transform": transform,
        "num_workers": num_workers,
        **_selected(options, keywords_of(start_worker)),
    }
    weights = options.get("weights")
    unweighed = (weights is None or weights is False) and options.get("replay") is None
    if unweighed and options.get("eviction") == "least-weight":
        raise ConfigError(
            "eviction='least-weight' evicts by the weights of samples, and there are none: give weights=True "
            "and call update_weights, or choose another policy"
        )
    # Before a cache is made.
    WorkerOptions(**_selected(worker_options, WorkerOptions.__dataclass_fields__)).check()
    settings = {**_selected(options, _CACHE_OPTIONS), "size_limit": size_limit}
    if not isinstance(cache, Cache):
        cache = Cache(cache, **settings)
    else:
        _set(cache, settings)
    worker = start_worker(cache, source, **(_defaults_from_job(cache, options, timeout_s) | worker_options))
    try:
        return StreamLoader(
            cache, worker, batch_size, **_selected(options, keywords_of(EpochLoader.__init__))
        )
    except BaseException:
        worker.close()
        raise


def _defaults_from_job(cache: Cache, options: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
    """The defaults of `partition` and `linger_s` for the worker of this cache, in a distributed job."""
    warn_of_kept_store()
    found: dict[str, Any] = {"linger_s": _LINGER_S if is_elastic() else 0.0}
    if "partition" not in options and options.get("share") is None:  # caches of a group share one pass
        found["partition"] = find_share(cache.cache_id, 0.9 * timeout_s)
        if found["partition"] is not None:
            logger.info("%s is cache %d (from 0) of %d in this job", cache.path, *found["partition"])
    return found


def _set(cache: Cache, settings: Mapping[str, Any]) -> None:
    """Apply the settings that are not None to `cache`: the limit last, because it evicts by the others."""
    for name, value in settings.items():
        if value is not None:
            setattr(cache, name, value)


def _selected(options: Mapping[str, object], names: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}
