"""Opening a cache: create it, check it, rebuild a lost catalogue, and store what the caller sets."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cachestream.config import format_size, parse_size
from cachestream.errors import CacheLockedError, ConfigError
from cachestream.storage.catalogue import Catalogue, CatalogueDamagedError
from cachestream.storage.directory import Directory, free_bytes
from cachestream.storage.eviction import EvictionPolicy
from cachestream.storage.locks import lock_file
from cachestream.storage.verify import rebuild

__all__ = ["MIN_LIMIT_BYTES", "open_catalogue", "parse_limit", "save_settings"]

MIN_LIMIT_BYTES: Final = 1_000_000
DEFAULT_MIN_FREE: Final = "1GB"
_OPEN_TIMEOUT_S: Final = 60.0
_SAVED: Final = ("cache_id", "size_limit", "min_free", "eviction")


def parse_limit(size_limit: int | str) -> int:
    """The limit in bytes; raises ConfigError for one that no cache fits in."""
    limit_bytes = parse_size(size_limit, "size_limit")
    if limit_bytes < MIN_LIMIT_BYTES:
        raise ConfigError(
            f"size_limit={size_limit!r} is too small for a cache: its catalogue and one shard need at least "
            f"{format_size(MIN_LIMIT_BYTES)}"
        )
    return limit_bytes


def open_catalogue(directory: Directory, given: dict[str, Any]) -> Catalogue:
    """The catalogue of `directory`, made or rebuilt if need be, with the settings `given` stored.

    A damaged catalogue is kept aside as `catalogue.damaged` and rebuilt from the shards.
    """
    catalogue = Catalogue(directory.catalogue)
    try:
        catalogue.check()
        usable = catalogue.is_created
    except CatalogueDamagedError:
        usable = False
    if not usable:
        with _only_one(directory):
            _make_or_rebuild(directory, catalogue, given)
    stored = _stored(catalogue)
    changed = {key: value for key, value in given.items() if value is not None and stored.get(key) != value}
    if changed:
        with catalogue.transaction() as tables:
            for key, value in changed.items():
                tables.set_meta(key, value)
        save_settings(directory, catalogue)
    return catalogue


def _stored(catalogue: Catalogue) -> dict[str, Any]:
    with catalogue.reading() as tables:
        return tables.all_meta()


def _make_or_rebuild(directory: Directory, catalogue: Catalogue, given: dict[str, Any]) -> None:
    try:
        catalogue.check()
        if catalogue.is_created:
            return  # another process was faster
    except CatalogueDamagedError:
        catalogue.close()
        os.replace(directory.catalogue, os.path.join(directory.root, "catalogue.damaged"))
        _remove_if_there(directory.catalogue + "-journal")
    settings = _default_settings(directory) | _saved_settings(directory)
    settings |= {key: value for key, value in given.items() if value is not None}
    catalogue.create(settings)
    rebuild(directory, catalogue)
    save_settings(directory, catalogue)


def _default_settings(directory: Directory) -> dict[str, Any]:
    return {
        "cache_id": uuid.uuid4().hex,
        "size_limit": max(MIN_LIMIT_BYTES, int(0.8 * free_bytes(directory.root))),
        "min_free": parse_size(DEFAULT_MIN_FREE),
        "eviction": "lru",
    }


def _saved_settings(directory: Directory) -> dict[str, Any]:
    try:
        with open(directory.settings, encoding="utf-8") as file:
            saved = json.load(file)
        return {key: saved[key] for key in _SAVED if key in saved}
    except (OSError, ValueError, TypeError):
        return {}


def save_settings(directory: Directory, catalogue: Catalogue) -> None:
    """Copy the settings to a small file, from which a lost catalogue gets them back."""
    stored = _stored(catalogue)
    temporary = os.path.join(directory.root, f"cache.json.{uuid.uuid4().hex}")
    with open(temporary, "x", encoding="utf-8", opener=_private) as file:
        json.dump({"format": "cachestream", **{key: stored[key] for key in _SAVED}}, file)
    os.replace(temporary, directory.settings)


def policy_name(policy: EvictionPolicy | None) -> str | None:
    """What the catalogue stores of a policy: a function is known only to the process that gave it."""
    return None if policy is None or callable(policy) else policy


@contextmanager
def _only_one(directory: Directory) -> Iterator[None]:
    lock = lock_file(os.path.join(directory.root, "opening.lock"), timeout_s=_OPEN_TIMEOUT_S)
    if lock is None:
        raise CacheLockedError(
            f"{directory.root} is being opened by another process for {_OPEN_TIMEOUT_S:.0f} s"
        )
    try:
        yield
    finally:
        lock.release()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _remove_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
