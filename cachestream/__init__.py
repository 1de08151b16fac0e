"""A growing local sample cache for PyTorch training.

Importing this does nothing and loads nothing else: each public name is loaded from its module when
it is first used (PEP 562), so a process that only fills or inspects a cache never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cachestream.errors import (
        CacheError,
        CacheFullError,
        CacheLockedError,
        CacheStreamError,
        CacheVersionError,
        ConfigError,
        CorruptShardError,
        EpochError,
        NotEnoughSamplesError,
        RankMismatchError,
        SampleError,
        SchemaMismatchError,
        SourceError,
        SourceUnavailableError,
        WorkerError,
        WorkerTimeoutError,
    )
    from cachestream.formats.arrow import ArrowSource
    from cachestream.formats.cache import CacheSource
    from cachestream.formats.files import FileSource
    from cachestream.formats.lines import LinesSource
    from cachestream.formats.litdata import LitDataSource
    from cachestream.formats.mds import MDSSource
    from cachestream.formats.parquet import ParquetSource
    from cachestream.formats.tar import TarSource
    from cachestream.formats.tfrecord import TFRecordSource
    from cachestream.integrations.decode_images import decode_images
    from cachestream.listing.manifest import Manifest
    from cachestream.sources.arrays import ArraySource
    from cachestream.sources.base import Source
    from cachestream.sources.datasets import CallableSource, DatasetSource, IterableSource
    from cachestream.sources.decode.images import ImageOptions
    from cachestream.sources.open import mix, open_source
    from cachestream.sources.token_windows import pack_tokens
    from cachestream.storage.cache import Cache
    from cachestream.storage.shard import ShardColumns
    from cachestream.streaming import stream
    from cachestream.tracing import trace
    from cachestream.training.batches.collate import collate
    from cachestream.training.batches.gather import Padded
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader import EpochLoader
    from cachestream.training.stats import metrics
    from cachestream.worker.worker import Worker, start_worker

__all__ = [
    "ArraySource",
    "ArrowSource",
    "Cache",
    "CacheError",
    "CacheFullError",
    "CacheLockedError",
    "CacheSource",
    "CacheStreamError",
    "CacheVersionError",
    "CallableSource",
    "ConfigError",
    "CorruptShardError",
    "DatasetSource",
    "EpochDataset",
    "EpochError",
    "EpochLoader",
    "FileSource",
    "ImageOptions",
    "IterableSource",
    "LinesSource",
    "LitDataSource",
    "MDSSource",
    "Manifest",
    "NotEnoughSamplesError",
    "Padded",
    "ParquetSource",
    "RankMismatchError",
    "SampleError",
    "SchemaMismatchError",
    "ShardColumns",
    "Source",
    "SourceError",
    "SourceUnavailableError",
    "TFRecordSource",
    "TarSource",
    "Worker",
    "WorkerError",
    "WorkerTimeoutError",
    "collate",
    "decode_images",
    "metrics",
    "mix",
    "open_source",
    "pack_tokens",
    "start_worker",
    "stream",
    "trace",
]
__version__ = "0.1.0"

# Where a name lives; whatever is public and not named here is an error class.
_HOMES: Final[dict[str, str]] = {
    "ArraySource": "sources.arrays",
    "ArrowSource": "formats.arrow",
    "Cache": "storage.cache",
    "CacheSource": "formats.cache",
    "CallableSource": "sources.datasets",
    "DatasetSource": "sources.datasets",
    "EpochDataset": "training.dataset",
    "EpochLoader": "training.loader",
    "FileSource": "formats.files",
    "ImageOptions": "sources.decode.images",
    "LinesSource": "formats.lines",
    "LitDataSource": "formats.litdata",
    "MDSSource": "formats.mds",
    "IterableSource": "sources.datasets",
    "Manifest": "listing.manifest",
    "Padded": "training.batches.gather",
    "ShardColumns": "storage.shard",
    "ParquetSource": "formats.parquet",
    "Source": "sources.base",
    "TFRecordSource": "formats.tfrecord",
    "TarSource": "formats.tar",
    "Worker": "worker.worker",
    "collate": "training.batches.collate",
    "decode_images": "integrations.decode_images",
    "metrics": "training.stats",
    "mix": "sources.open",
    "open_source": "sources.open",
    "pack_tokens": "sources.token_windows",
    "start_worker": "worker.worker",
    "stream": "streaming",
    "trace": "tracing",
}


if not TYPE_CHECKING:  # a type checker that saw this would accept any name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'cachestream' has no attribute '{name}'")
        from cachestream.config import collection_paused

        with collection_paused():
            value = getattr(import_module(f"cachestream.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
