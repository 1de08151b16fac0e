"""Errors of the system and of SQLite, translated to errors with advice."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from cachestream.errors import CacheError, CacheFullError, CacheLockedError, CacheStreamError
from cachestream.linux import NOT_A_FILE, kind_of, open_private, other_owner, remove

_PROBE_BYTES: Final = 4096
# Parts of SQLite's messages for invalid pages, and for unexpected tables and rows that violate constraints.
_UNREADABLE: Final = ("not a database", "malformed", "encrypted", "unsupported file format")
_DAMAGE: Final = ("no such", "has no column", "decode to UTF-8", "constraint failed", "mismatch")


class CatalogueDamagedError(CacheError):
    """The catalogue file is missing or invalid. It is rebuilt from the shards."""


class CatalogueUnreadableError(CatalogueDamagedError):
    """SQLite takes the catalogue for malformed. It says so of a sound file, too, that a disk does not read
    (EIO): only a check by a new connection tells.
    """


class DiskFailedError(CacheError):
    """The disk fails or takes no more writes. It may recover while the caller waits."""


# The class of an error of the system, and what to do about it.
_ADVICE: Final[dict[int, tuple[type[CacheError], str]]] = {
    errno.ENOSPC: (CacheFullError, "free some disk or lower the cache's limit"),
    errno.EDQUOT: (
        CacheFullError,
        "free some of what counts for the quota, have it raised, or lower the cache's limit",
    ),
    errno.EFBIG: (
        CacheFullError,
        "raise the limit on the size of files ('ulimit -f'), or give the worker a smaller shard_size",
    ),
    errno.EROFS: (
        DiskFailedError,
        "mount it for writing, or look into the system's log: disks that fail become so",
    ),
    errno.EMFILE: (CacheError, "raise the limit of open files ('ulimit -n')"),
    errno.ENFILE: (CacheError, "raise the limit of open files ('ulimit -n')"),
    errno.ENOMEM: (
        CacheError,
        "the process has too many maps ('sysctl vm.max_map_count') or no memory",
    ),
    errno.ENOENT: (CacheError, "somebody removed it, open the cache again"),
    **dict.fromkeys(
        (errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT),
        (DiskFailedError, "check the disk"),
    ),
}


def disk_error(path: str, error: OSError, doing: str = "") -> CacheError:
    """Translate `error` at `path` to a CacheFullError or another CacheError."""
    number = error.errno or 0
    if number in (errno.EACCES, errno.EPERM):
        return unwritable(path, error.strerror)
    kind_there = kind_of(path) if number in NOT_A_FILE else None
    if number == errno.ELOOP or kind_there == "symbolic link":
        return CacheError(f"{path} is a symbolic link; a cache does not follow links, remove it")
    if kind_there is not None:
        return CacheError(f"{path} is a {kind_there} in place of a file of the cache; remove it")
    kind, advice = _ADVICE.get(number, (CacheError, "check the disk"))
    return kind(f"{path}: {error.strerror}{doing and f' while {doing}'}; {advice}")


def lock_timeout(path: str, timeout_s: float) -> CacheLockedError:
    """The error of a lock on `path` that another process did not release within `timeout_s`."""
    return CacheLockedError(
        f"{path} was locked by another process for {timeout_s:.0f} s; "
        "look for a stopped or swapping process that uses this cache, then try again"
    )


def unwritable(path: str, said: str | None = None) -> CacheError:
    """A CacheError that says why `path` cannot be written."""
    what = f"{path} cannot be written{f' ({said})' if said else ''}"
    try:
        is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:  # missing, or not accessible
        is_read_only = False
    if is_read_only:
        return CacheError(
            f"{what}: it lies on a read-only mount, and whoever trains on a cache or fills it keeps leases "
            "and records in it; mount it for writing (in a container without ':ro')"
        )
    return CacheError(f"{what}; check its owner and permissions")


def check_own(folder: str) -> None:
    """Raise CacheError if `folder`, of a cache, belongs to another user; root would leave files there that
    this user cannot open.
    """
    with suppress(OSError):
        if (owner := other_owner(folder)) is not None:
            raise CacheError(
                f"{folder} cannot be written: it belongs to another user (uid {owner}), and only that user "
                "changes a cache; run as this user, or use a directory of your own"
            )


@contextmanager
def translated_disk_errors(path: str, doing: str = "") -> Iterator[None]:
    """Translate OSErrors, at the path that they name or at `path`."""
    try:
        yield
    except CacheStreamError:
        raise  # some are also OSErrors: NotEnoughSamplesError is a TimeoutError
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        raise disk_error(named, error, doing) from error


@contextmanager
def translated_sql_errors(path: str, timeout_s: float) -> Iterator[None]:
    """Translate errors of SQLite on the catalogue at `path`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        if "locked" in text or "busy" in text:
            raise lock_timeout(path, timeout_s) from error
        for kind, words in ((CatalogueUnreadableError, _UNREADABLE), (CatalogueDamagedError, _DAMAGE)):
            if any(word in text for word in words):
                raise kind(f"{path} is damaged ({text}); run 'cachestream verify CACHE --repair'") from error
        if "disk is full" in text:
            raise CacheFullError(f"{path}: the disk is full; free some space") from error
        if "readonly" in text or "unable to open" in text:
            raise unwritable(path, text) from error
        if "disk I/O error" not in text:
            raise CacheError(f"{path}: {text}; check the disk") from error
        if (refusal := _lack_of_space(path)) is not None:
            raise disk_error(path, refusal, "in a transaction") from error
        raise DiskFailedError(f"{path}: {text}; check the disk") from error


def _lack_of_space(path: str) -> OSError | None:
    """The error of writing past the size of the file at `path`, if it says that there is no space.

    SQLite reports a quota or a limit on file sizes as a disk I/O error.
    """
    probe = path + "-probe"
    try:
        fd = open_private(probe, os.O_WRONLY | os.O_CREAT)
        try:
            remove(probe)  # now it vanishes even if this process dies
            os.pwrite(fd, bytes(_PROBE_BYTES), os.stat(path).st_size)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error if isinstance(disk_error(path, error), CacheFullError) else None
    return None
