"""The settings of a cache, in `cache.json` alone: with a checksum, and written under the catalogue's write
lock.

A copy in a second file holds where the first is lost or damaged: a limit is not to become the default one.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import xxhash

from cachestream.config import format_size, parse_size
from cachestream.errors import CacheError, CacheFullError, ConfigError
from cachestream.linux import boot_id, open_private
from cachestream.schema import Split, check_holdout, check_split
from cachestream.storage.layout import Directory, free_bytes, replace_file
from cachestream.storage.os_errors import DiskFailedError, disk_error, translated_disk_errors

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.catalogue import Catalogue

MIN_LIMIT_BYTES: Final = 1_000_000
_DEFAULT_MIN_FREE: Final = "1GB"

logger = logging.getLogger("cachestream")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a cache; `holdout` is the share of its samples that is held out.

    `boot`: the run of the machine in which the cache was used last. `seal`: the digest of its catalogue when
    it was closed last. These two are not settings, and not part of the checksum.
    """

    cache_id: str
    size_limit: int
    min_free: int
    eviction: str
    holdout: float | None = None
    boot: str | None = None
    seal: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The settings proper."""
        found = {name: getattr(self, name) for name in ("cache_id", "size_limit", "min_free", "eviction")}
        return found if self.holdout is None else {**found, "holdout": self.holdout}

    @classmethod
    def default(cls, root: str) -> Settings:
        """The settings of a new cache at `root`."""
        limit_bytes = max(MIN_LIMIT_BYTES, int(0.8 * free_bytes(root)))
        return cls(uuid.uuid4().hex, limit_bytes, parse_size(_DEFAULT_MIN_FREE), "lru")


def parse_limit(size_limit: int | str) -> int:
    """Parse the limit in bytes; raises ConfigError for one that is too small for a cache."""
    limit_bytes = parse_size(size_limit, "size_limit")
    if limit_bytes < MIN_LIMIT_BYTES:
        raise ConfigError(
            f"size_limit={size_limit!r} is too small for a cache: its catalogue and one shard need at least "
            f"{format_size(MIN_LIMIT_BYTES)}"
        )
    return limit_bytes


def find_settings(directory: Directory) -> Settings | None:
    """The settings; None if both files are missing or damaged, or if there is no cache yet.

    Raises DiskFailedError for a file that the disk does not read now: defaults would take its place.
    """
    found = _read(directory.settings)
    return _read(directory.spare_settings) if found is None else found


def read_settings(directory: Directory) -> Settings:
    """The settings. Raises CacheError if they are lost."""
    found = find_settings(directory)
    if found is None:
        raise CacheError(
            f"{directory.settings} is missing or damaged; open the cache again, and set its limit "
            "('cachestream limit CACHE SIZE')"
        )
    return found


def write_settings(directory: Directory, settings: Settings) -> None:
    """Store the settings, and this run of the machine. Requires the catalogue's write lock, or the opening
    lock.
    """
    _write(directory.settings, settings)
    with suppress(CacheError):  # an older copy is better than none
        spare = _read(directory.spare_settings)
        if spare is None or spare.values != settings.values:
            _write(directory.spare_settings, settings)


def change_settings(directory: Directory, catalogue: Catalogue, **changes: Any) -> None:
    """Store changed settings; a full cache may have room then."""
    with catalogue.transaction() as tables:
        settings = replace(read_settings(directory), **changes)
        tables.note_room()
        write_settings(directory, settings)  # last: if it fails, nothing changes


def _read(path: str) -> Settings | None:
    """The settings in the file `path`; None if it is missing or its checksum is wrong."""
    try:
        with open(path, encoding="utf-8", opener=open_private) as file:
            saved = json.load(file)
        names = ("cache_id", "size_limit", "min_free", "eviction", "holdout", "boot", "seal")
        settings = Settings(**{name: saved[name] for name in names if name in saved})
        if "xxh3" in saved:
            return settings if saved["xxh3"] == _checksum(settings) else None
        kinds = (
            ("cache_id", str),
            ("size_limit", int),
            ("min_free", int),
            ("eviction", str),
        )  # of version 0.1.0
        return settings if all(isinstance(saved[name], kind) for name, kind in kinds) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    except OSError as error:
        failed = disk_error(path, error, "reading the settings")
        if isinstance(failed, DiskFailedError):
            raise failed from error
        return None


def _checksum(settings: Settings) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(settings.values).encode())


def _write(path: str, settings: Settings) -> None:
    noted = {"xxh3": _checksum(settings), "boot": boot_id(), "seal": settings.seal}
    data = json.dumps({"format": "cachestream", **settings.values, **noted}).encode()
    try:
        with translated_disk_errors(path, "saving the settings"):
            replace_file(path, data, durable=True)
    except CacheFullError:
        if not os.path.isfile(path):
            raise
        # The block of the old file takes it. While it is half written its checksum is wrong: then the copy
        # holds.
        with (
            translated_disk_errors(path, "saving the settings"),
            open(path, "r+b", opener=open_private) as file,
        ):
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


# --- the held-out share


def choose_split(cache: Cache, split: object, holdout: object) -> Split | None:
    """The requested split: "train" where only `holdout` is given, None where neither is.

    The share is stored in the cache and is the default from then on. Raises ConfigError for another one.
    """
    stored = read_settings(cache.directory).holdout
    if split is None and holdout is None:
        if stored is not None:
            logger.warning(
                "%s holds out %g of its samples, but all are read here, the held-out ones too: "
                "give split='train' to train",
                cache.path,
                stored,
            )
        return None
    name = check_split("train" if split is None else split)
    share = None if holdout is None else check_holdout(holdout)
    if stored is None and share is not None:
        with cache.catalogue.transaction():
            settings = read_settings(cache.directory)
            if (stored := settings.holdout) is None:
                settings = replace(settings, holdout=(stored := share))
                write_settings(cache.directory, settings)
    if stored is None:
        raise ConfigError(
            f"split={split!r}: {cache.path} holds nothing out so far; say which share, such as holdout=0.05"
        )
    if share not in (None, stored):
        raise ConfigError(
            f"holdout={share:g}: {cache.path} holds out {stored:g} of its samples, the same for all that use "
            "it; give that, or another directory ('cachestream clear' forgets it)"
        )
    return Split(name, stored)


def held_out_share(cache: Cache) -> tuple[float | None, int]:
    """The share that is held out (None: never requested), and the bytes of shards with nothing else."""
    with cache.catalogue.reading() as tables:
        return tables.holdout, tables.held_out()[1]
