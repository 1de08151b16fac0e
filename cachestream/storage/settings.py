"""The settings of a cache: stored in its catalogue, and copied to a small file that outlives the catalogue.

A process that changes them holds the opening lock: the copies are written in the order of the changes.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Final

import xxhash

from cachestream.config import format_size, parse_size
from cachestream.errors import CacheError, CacheFullError, ConfigError
from cachestream.linux import boot_id, open_private
from cachestream.schema import Split, check_holdout, check_split
from cachestream.storage.layout import free_bytes, replace_file
from cachestream.storage.locks import locked
from cachestream.storage.os_errors import (
    DiskFailedError,
    disk_error,
    lock_timeout,
    translated_disk_errors,
)

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.catalogue import Catalogue
    from cachestream.storage.layout import Directory

MIN_LIMIT_BYTES: Final = 1_000_000
_DEFAULT_MIN_FREE: Final = "1GB"
_OPEN_TIMEOUT_S: Final = 60.0
_KEYS: Final = ("cache_id", "size_limit", "min_free", "eviction")

logger = logging.getLogger("cachestream")


def parse_limit(size_limit: int | str) -> int:
    """Parse the limit in bytes; raises ConfigError for one that is too small for a cache."""
    limit_bytes = parse_size(size_limit, "size_limit")
    if limit_bytes < MIN_LIMIT_BYTES:
        raise ConfigError(
            f"size_limit={size_limit!r} is too small for a cache: its catalogue and one shard need at least "
            f"{format_size(MIN_LIMIT_BYTES)}"
        )
    return limit_bytes


def opening_lock(directory: Directory) -> AbstractContextManager[None]:
    """Keep other processes from making the catalogue and from changing settings."""
    path = directory.opening_lock
    return locked(path, _OPEN_TIMEOUT_S, lock_timeout(path, _OPEN_TIMEOUT_S))


def change_settings(directory: Directory, catalogue: Catalogue, changes: Mapping[str, Any]) -> None:
    """Store settings; a full cache may have room then.

    The copy is written first, as it holds where the two differ: settings that it cannot take do not change.
    """
    with opening_lock(directory):
        stored = _stored(catalogue)
        _write_copy(directory, {**stored, **changes})
        try:
            with catalogue.transaction() as tables:
                for key, value in changes.items():
                    tables.set_setting(key, value)
                tables.resume_filling()
        except BaseException:
            with suppress(CacheError):
                _write_copy(directory, stored)
            raise


def compare_copy(directory: Directory, catalogue: Catalogue) -> None:
    """Correct the settings by their checksummed copy: a bit flip could make the limit any number."""
    if _checked_copy(directory) == _stored(catalogue) and noted_boot(directory)[0] == boot_id():
        return
    with opening_lock(directory):
        saved, stored = _checked_copy(directory), _stored(catalogue)
        # A process killed between the two stored or deleted the held-out share in the catalogue alone.
        known = {key: value for key, value in (saved or {}).items() if key in stored}
        wrong = [key for key in known if known[key] != stored[key]]
        if wrong:
            logger.warning(
                "%s: the catalogue and cache.json differ in %s; the latter holds", directory.root, wrong
            )
            with catalogue.transaction() as tables:
                for key in wrong:
                    tables.set_setting(key, known[key])
        save_copy(directory, catalogue)


def initial_settings(directory: Directory) -> dict[str, Any]:
    """The settings of a new catalogue: those of the copy, or defaults."""
    return _checked_copy(directory) or {
        "cache_id": uuid.uuid4().hex,
        "size_limit": max(MIN_LIMIT_BYTES, int(0.8 * free_bytes(directory.root))),
        "min_free": parse_size(_DEFAULT_MIN_FREE),
        "eviction": "lru",
    }


def _stored(catalogue: Catalogue) -> dict[str, Any]:
    """The settings in the catalogue; None for one whose key was lost by a bit flip."""
    with catalogue.reading() as tables:
        values = tables.all_meta()
    return _selected(dict.fromkeys(_KEYS) | values)


def _selected(values: Mapping[str, Any]) -> dict[str, Any]:
    keys = [*_KEYS, "holdout"] if "holdout" in values else _KEYS
    return {key: values[key] for key in keys}


def _checked_copy(directory: Directory) -> dict[str, Any] | None:
    """The copy of the settings; None if it is missing or its checksum is wrong.

    Raises DiskFailedError for one that the disk does not read now: defaults would take its place.
    """
    try:
        with open(directory.settings, encoding="utf-8", opener=open_private) as file:
            saved = json.load(file)
        settings = _selected(saved)
        return settings if saved["xxh3"] == _checksum(settings) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    except OSError as error:
        failed = disk_error(directory.settings, error, "reading the settings")
        if isinstance(failed, DiskFailedError):
            raise failed from error
        return None


def _checksum(settings: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(settings).encode())


def save_copy(directory: Directory, catalogue: Catalogue, seal: str = "") -> None:
    """Copy the settings to the file from which a lost catalogue is restored. Requires the opening lock."""
    _write_copy(directory, _stored(catalogue), seal)


def noted_boot(directory: Directory) -> tuple[str | None, str]:
    """The boot in which the cache was used last (None: not noted), and the catalogue's digest when it was closed."""
    try:
        with open(directory.settings, encoding="utf-8", opener=open_private) as file:
            saved = json.load(file)
        return saved.get("boot"), str(saved.get("seal", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, ""


def _write_copy(directory: Directory, settings: dict[str, Any], seal: str = "") -> None:
    saved = {"format": "cachestream", **settings, "xxh3": _checksum(settings), "boot": boot_id()}
    text = json.dumps(saved | ({"seal": seal} if seal else {}))
    try:
        with translated_disk_errors(directory.settings, "saving the settings"):
            replace_file(directory.settings, text.encode(), durable=True)
    except CacheFullError:
        if not os.path.isfile(directory.settings):
            raise
        # The block of the old file takes it. A copy that is cut short fails its checksum: then the catalogue
        # holds.
        with (
            translated_disk_errors(directory.settings, "saving the settings"),
            open(directory.settings, "r+b", opener=open_private) as file,
        ):
            file.write(text.encode())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


# --- the held-out share


def choose_split(cache: Cache, split: object, holdout: object) -> Split | None:
    """The requested split: "train" where only `holdout` is given, None where neither is.

    The share is stored in the cache and is the default from then on. Raises ConfigError for another one.
    """
    with cache.catalogue.reading() as tables:
        stored = tables.holdout
    if split is None and holdout is None:
        if stored is not None:
            logger.warning(
                "%s holds out %g of its samples, and they are among those that are read here: "
                "say split='train' to train",
                cache.path,
                stored,
            )
        return None
    name = check_split("train" if split is None else split)
    share = None if holdout is None else check_holdout(holdout)
    if stored is None and share is not None:
        with opening_lock(cache.directory):
            with cache.catalogue.transaction() as tables:
                if (stored := tables.holdout) is None:
                    tables.hold_out(share)
                    stored = share
            save_copy(cache.directory, cache.catalogue)
    if stored is None:
        raise ConfigError(
            f"split={split!r}: {cache.path} holds nothing out so far; say which share, such as holdout=0.05"
        )
    if share not in (None, stored):
        raise ConfigError(
            f"holdout={share:g}: {cache.path} holds out {stored:g} of its samples, the same for all that use it; "
            "give that, or another directory ('cachestream clear' forgets it)"
        )
    return Split(name, stored)


def held_out_share(cache: Cache) -> tuple[float | None, int]:
    """The share that is held out (None: never requested), and the bytes of shards with nothing else."""
    with cache.catalogue.reading() as tables:
        return tables.holdout, tables.held_out()[1]
