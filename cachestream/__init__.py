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
    from cachestream.integrations.metrics import metrics
    from cachestream.remote.arrays import ArraySource
    from cachestream.remote.arrow_files import ArrowSource
    from cachestream.remote.datasets import DatasetSource
    from cachestream.remote.files import FileSource
    from cachestream.remote.functions import CallableSource
    from cachestream.remote.images import ImageOptions
    from cachestream.remote.iterables import IterableSource
    from cachestream.remote.lines import LinesSource
    from cachestream.remote.litdata import LitDataSource
    from cachestream.remote.manifest import Manifest
    from cachestream.remote.mds import MDSSource
    from cachestream.remote.mix import mix
    from cachestream.remote.open import open_source
    from cachestream.remote.source import Source
    from cachestream.remote.tables import ParquetSource
    from cachestream.remote.tars import TarSource
    from cachestream.remote.tfrecords import TFRecordSource
    from cachestream.sampling.worker import Worker, start_worker
    from cachestream.storage.cache import Cache
    from cachestream.streaming import stream
    from cachestream.training.batches import collate
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader import EpochLoader
    from cachestream.training.ragged import Padded

__all__ = [
    "ArraySource",
    "ArrowSource",
    "Cache",
    "CacheError",
    "CacheFullError",
    "CacheLockedError",
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
    "Source",
    "SourceError",
    "SourceUnavailableError",
    "TFRecordSource",
    "TarSource",
    "Worker",
    "WorkerError",
    "WorkerTimeoutError",
    "collate",
    "metrics",
    "mix",
    "open_source",
    "start_worker",
    "stream",
]
__version__ = "0.1.0"

# Where a name lives; whatever is public and not named here is an error class.
_HOMES: Final[dict[str, str]] = {
    "ArraySource": "remote.arrays",
    "ArrowSource": "remote.arrow_files",
    "Cache": "storage.cache",
    "CallableSource": "remote.functions",
    "DatasetSource": "remote.datasets",
    "EpochDataset": "training.dataset",
    "EpochLoader": "training.loader",
    "FileSource": "remote.files",
    "ImageOptions": "remote.images",
    "LinesSource": "remote.lines",
    "LitDataSource": "remote.litdata",
    "MDSSource": "remote.mds",
    "IterableSource": "remote.iterables",
    "Manifest": "remote.manifest",
    "Padded": "training.ragged",
    "ParquetSource": "remote.tables",
    "Source": "remote.source",
    "TFRecordSource": "remote.tfrecords",
    "TarSource": "remote.tars",
    "Worker": "sampling.worker",
    "collate": "training.batches",
    "metrics": "integrations.metrics",
    "mix": "remote.mix",
    "open_source": "remote.open",
    "start_worker": "sampling.worker",
    "stream": "streaming",
}


if not TYPE_CHECKING:  # a type checker that saw this would accept any name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'cachestream' has no attribute '{name}'")
        value = getattr(import_module(f"cachestream.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
