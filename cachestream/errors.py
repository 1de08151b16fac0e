"""The public errors: one class for each way a caller can react.

A message says what happened, where, and what to do next. All of them pickle, because they cross
process boundaries on their way from the sampling processes to the user.
"""

from __future__ import annotations

import sys
import warnings


class CacheStreamError(Exception):
    """The base of all cachestream errors."""


class ConfigError(CacheStreamError, ValueError):
    """An argument cannot work: change it."""


class SourceError(CacheStreamError):
    """The remote data cannot be read as asked (missing, forbidden, malformed)."""


class SampleError(SourceError):
    """Samples cannot be used: they are skipped and counted.

    `lost`: the number of samples that are skipped; above 1 where a unit breaks off before its end.
    """

    lost: int = 1


class SourceUnavailableError(SourceError):
    """The remote does not answer at present: it is retried with back-off."""


class CacheError(CacheStreamError):
    """The local cache cannot do what was asked."""


class CorruptShardError(CacheError):
    """A shard file is damaged or missing: it is put aside, training goes on without it."""


class CacheFullError(CacheError):
    """Space cannot be freed now: raise the limit, or close epochs that lease shards."""


class CacheLockedError(CacheError):
    """Another process held the catalogue's write lock past the deadline."""


class CacheVersionError(CacheError):
    """The cache was written by another version of cachestream that this one cannot read."""


class SchemaMismatchError(CacheError):
    """Samples have other fields or dtypes than those in the cache."""


class WorkerError(CacheStreamError):
    """The background worker failed; `remote_traceback` is the text of the child's traceback."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message, remote_traceback)
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = str(self.args[0])
        if not self.remote_traceback:
            return message
        return f"{message}\n\nThe worker's traceback:\n{self.remote_traceback.rstrip()}"


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The worker was not done within the deadline, and goes on: wait longer, or use what is cached."""


class EpochError(CacheStreamError):
    """An epoch cannot be prepared or continued."""


class NotEnoughSamplesError(EpochError, TimeoutError):
    """The cache does not hold enough samples: no more will come, or none came within the deadline."""


class RankMismatchError(EpochError):
    """The ranks of a distributed job could not agree on an epoch; the message names the rank."""


def warn_caller(message: str) -> None:
    """Warn `message` at the line of the caller's own code: the nearest one outside this package."""
    package, level = __name__.partition(".")[0], 2
    frame = sys._getframe(1)
    while (above := frame.f_back) and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = above, level + 1
    warnings.warn(message, stacklevel=level)
