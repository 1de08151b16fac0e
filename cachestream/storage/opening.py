"""Opening a cache: create it, check it, rebuild a lost catalogue, and store the settings that are given."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import xxhash

from cachestream.config import format_size, parse_size
from cachestream.errors import CacheError, CacheLockedError, ConfigError
from cachestream.linux import move, open_private, remove
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.eviction import ORDERS, EvictionPolicy
from cachestream.storage.layout import (
    Directory,
    allocated_bytes,
    free_bytes,
    overhead_bytes,
    remove_if_there,
    size_of_file,
)
from cachestream.storage.locks import lock_file
from cachestream.storage.os_errors import CatalogueDamagedError, translated_disk_errors
from cachestream.storage.recovery import rebuild
from cachestream.storage.tables import Tables

MIN_LIMIT_BYTES: Final = 1_000_000
DEFAULT_MIN_FREE: Final = "1GB"
_OPEN_TIMEOUT_S: Final = 60.0
_SAVE_ATTEMPTS: Final = 3
_SAVE_TIMEOUT_S: Final = 1.0
_SAVED_KEYS: Final = ("cache_id", "size_limit", "min_free", "eviction")
_OPTIONAL_KEYS: Final = ("holdout",)


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


def open_catalogue(directory: Directory, given: dict[str, Any]) -> Catalogue:
    """Return the catalogue of `directory`, created or rebuilt if need be, with the settings `given` stored.

    A damaged catalogue is kept as `catalogue.damaged`, if the limit leaves room for it, and rebuilt from the
    shards. The same happens when it is lost while open.
    """
    catalogue = Catalogue(directory.catalogue, partial(_make_or_rebuild, directory))
    try:
        usable = catalogue.check()
    except CatalogueDamagedError:
        usable = False
    if not usable:
        catalogue.heal()
    with suppress(CacheError):  # where nothing can be written, or not now
        _compare_settings(directory, catalogue)
    stored = _read_meta(catalogue)
    changed = {key: value for key, value in given.items() if value is not None and stored.get(key) != value}
    if changed:
        with catalogue.transaction() as tables:
            for key, value in changed.items():
                tables.set_meta(key, value)
        save_settings(directory, catalogue)
    return catalogue


def _compare_settings(directory: Directory, catalogue: Catalogue) -> None:
    """Compare the settings with their checksummed copy: a bit flip could make the limit any number.

    Another process may be storing both at this moment. If they still differ after a second, the copy wins.
    """
    deadline_s = time.monotonic() + _SAVE_TIMEOUT_S
    while True:
        stored, saved = _read_meta(catalogue), _checked_settings(directory)
        wrong = [key for key in _SAVED_KEYS if saved is not None and stored.get(key) != saved[key]]
        if saved is not None and not wrong:
            return
        if saved is None or time.monotonic() > deadline_s:
            break
        time.sleep(0.02)  # another process may be setting it
    if saved is not None:
        logger.warning(
            "%s: the catalogue and cache.json differ in %s; the latter holds", directory.root, wrong
        )
        with catalogue.transaction() as tables:
            for key in wrong:
                tables.set_meta(key, saved[key])
    save_settings(directory, catalogue)


def _read_meta(catalogue: Catalogue) -> dict[str, Any]:
    with catalogue.reading() as tables:
        return tables.all_meta()


def _make_or_rebuild(directory: Directory, catalogue: Catalogue) -> None:
    with _opening_lock(directory), translated_disk_errors(directory.root, "making its catalogue"):
        settings = _default_settings(directory) | _valid_settings(directory)
        try:
            if catalogue.check(thoroughly=True):
                return  # another process has repaired it
        except CatalogueDamagedError:
            _set_aside(directory, settings["size_limit"])

        def fill(tables: Tables) -> None:
            for key, value in settings.items():
                tables.set_meta(key, value)
            tables.set_meta("catalogue_id", uuid.uuid4().hex)  # a new one for each catalogue
            rebuild(directory, tables)

        catalogue.create(fill)
        save_settings(directory, catalogue)


def _set_aside(directory: Directory, limit_bytes: int) -> None:
    """Move a damaged catalogue away, or remove it if the cache is too full to keep it."""
    aside = os.path.join(directory.root, "catalogue.damaged")
    with translated_disk_errors(directory.catalogue, "putting it aside"):
        remove_if_there(aside)
        if not os.path.lexists(directory.catalogue):
            return
        with os.scandir(directory.shards) as entries:
            used = sum(allocated_bytes(entry.stat(follow_symlinks=False)) for entry in entries)
        # The new catalogue will be as large, and so will its journal.
        used += overhead_bytes(directory) + 2 * size_of_file(directory.catalogue)
        if used <= limit_bytes:
            move(directory.catalogue, aside)
        else:
            remove(directory.catalogue)
        # SQLite would not apply this journal to an empty file, but it is of no use.
        remove_if_there(directory.catalogue + "-journal")


def _default_settings(directory: Directory) -> dict[str, Any]:
    return {
        "cache_id": uuid.uuid4().hex,
        "size_limit": max(MIN_LIMIT_BYTES, int(0.8 * free_bytes(directory.root))),
        "min_free": parse_size(DEFAULT_MIN_FREE),
        "eviction": "lru",
    }


def _valid_settings(directory: Directory) -> dict[str, Any]:
    """The valid values in the copy of the settings."""
    try:
        saved = _read_settings(directory)
        valid = {
            "cache_id": isinstance(saved["cache_id"], str),
            "size_limit": type(saved["size_limit"]) is int and saved["size_limit"] >= MIN_LIMIT_BYTES,
            "min_free": type(saved["min_free"]) is int and saved["min_free"] >= 0,
            "eviction": saved["eviction"] in ORDERS,
            "holdout": type(saved.get("holdout")) is float and 0 < saved["holdout"] < 1,
        }
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return {key: saved[key] for key, good in valid.items() if good}


def _read_settings(directory: Directory) -> Any:
    with open(directory.settings, encoding="utf-8", opener=open_private) as file:
        return json.load(file)


def _checked_settings(directory: Directory) -> dict[str, Any] | None:
    """The copy of the settings; None if it is missing or its checksum is wrong."""
    try:
        saved = _read_settings(directory)
        settings = {key: saved[key] for key in _SAVED_KEYS}
        settings |= {key: saved[key] for key in _OPTIONAL_KEYS if key in saved}
        return settings if saved["xxh3"] == _checksum(settings) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _checksum(settings: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(settings).encode())


def save_settings(directory: Directory, catalogue: Catalogue) -> None:
    """Copy the settings to a small file, from which a lost catalogue is restored.

    The copy is repeated until nothing has changed meanwhile: of two processes that change a setting at once,
    the later one to copy may have read the earlier value.
    """
    saved = ""
    while (text := _settings_text(catalogue)) != saved:
        _write_settings(directory, text)
        saved = text


def _settings_text(catalogue: Catalogue) -> str:
    stored = _read_meta(catalogue)
    settings = {key: stored[key] for key in _SAVED_KEYS}
    settings |= {key: stored[key] for key in _OPTIONAL_KEYS if key in stored}
    return json.dumps({"format": "cachestream", **settings, "xxh3": _checksum(settings)})


def _write_settings(directory: Directory, text: str) -> None:
    with translated_disk_errors(directory.settings, "saving the settings"):
        for _ in range(_SAVE_ATTEMPTS):
            temporary = f"{directory.settings}.{uuid.uuid4().hex}"
            try:
                with open(temporary, "x", encoding="utf-8", opener=open_private) as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                move(temporary, directory.settings)
                return
            except FileNotFoundError:
                continue  # a worker that is just starting has removed it as a leftover
            finally:
                remove_if_there(temporary)


def policy_name(policy: EvictionPolicy | None) -> str | None:
    """The stored value for a policy. A function is known only to the process that gave it."""
    return None if policy is None or callable(policy) else policy


@contextmanager
def _opening_lock(directory: Directory) -> Iterator[None]:
    lock = lock_file(os.path.join(directory.root, "opening.lock"), timeout_s=_OPEN_TIMEOUT_S)
    if lock is None:
        raise CacheLockedError(
            f"{directory.root} is being opened by another process for {_OPEN_TIMEOUT_S:.0f} s"
        )
    try:
        yield
    finally:
        lock.release()
