"""The cache directory: its files, its owner, its disk usage, and the quarantine for damaged shards."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from cachestream.config import parse_path
from cachestream.errors import ConfigError
from cachestream.linux import (
    filesystem_of,
    is_network_filesystem,
    kind_of,
    move,
    open_private,
    other_owner,
    remove,
)
from cachestream.storage.os_errors import check_own, translated_disk_errors

TEMPORARY_SUFFIX: Final = ".tmp"
OWNER_SUFFIX: Final = ".owner"
BLOCK_BYTES: Final = 4096
_MAX_QUARANTINED: Final = 4
_QUARANTINE_DIVISOR: Final = 20  # the quarantine takes at most one part in this many of the limit
_MAX_PATH_BYTES: Final = 500  # SQLite allows 512, with its own suffixes
_FOLDERS: Final = ("shards", "leases", "worker", "quarantine")
# Part of a new filesystem's root. Any other file in a directory that is not a cache belongs to a user.
_HARMLESS: Final = frozenset({"lost+found"})


class Directory:
    """The paths inside the cache at `root`."""

    def __init__(self, root: str) -> None:
        self.root: Final = root
        self.catalogue: Final = os.path.join(root, "catalogue.sqlite")
        self.settings: Final = os.path.join(root, "cache.json")
        self.spare_settings: Final = os.path.join(root, "cache.spare.json")
        # Held by whoever makes the catalogue.
        self.opening_lock: Final = os.path.join(root, "opening.lock")
        self.shards: Final = os.path.join(root, "shards")
        self.leases: Final = os.path.join(root, "leases")
        self.quarantine: Final = os.path.join(root, "quarantine")
        self.worker: Final = os.path.join(root, "worker")
        # Held by the worker.
        self.supervisor_lock: Final = self.worker_file("supervisor.lock")

    def worker_file(self, name: str) -> str:
        return os.path.join(self.worker, name)

    def owner_file(self, name: str) -> str:
        """The file that the process which writes under `name` keeps locked for as long as it lives."""
        return os.path.join(self.leases, name + OWNER_SUFFIX)

    def temporary_shard(self, shard_id: int) -> str:
        """The path under which a shard is written, beside its final path: one listing sees it once."""
        return os.path.join(self.shards, f"{shard_id:012d}{TEMPORARY_SUFFIX}")


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """Return the cache directory at `path`, created if need be (mode 0700); `~` is the user's home.

    Raises ConfigError for a place where a cache cannot be kept safely: a network filesystem (no reliable
    locks), a file, a directory that belongs to another user or that everybody may write to, or one inside
    another cache.
    """
    given = parse_path(path, "cache")
    if not given or "://" in given:
        where = given.partition("://")[0] + "://…" if "://" in given else "''"  # it may hold a password
        raise ConfigError(f"{where} is no local directory; give the cache one on a disk of this machine")
    try:
        root = os.path.realpath(given)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{given!r} is relative to the current folder, which is gone; give an absolute path"
        ) from error
    if len(os.fsencode(Directory(root).catalogue)) > _MAX_PATH_BYTES:
        raise ConfigError(f"{root} is too long a path for SQLite; give a directory nearer to the root")
    if os.path.exists(root) and not os.path.isdir(root):
        raise ConfigError(f"{root} is a file; give a directory for the cache")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{root} cannot be created ({error.strerror}); choose another directory") from error
    _check_owner(root)
    kind = filesystem_of(root)
    if is_network_filesystem(kind):
        raise ConfigError(
            f"{root} lies on a network filesystem ({kind}), where file locks are not reliable; "
            "choose a directory on a local disk of this machine"
        )
    directory = Directory(root)
    _check_folders(root)
    if not all(os.path.isdir(os.path.join(root, name)) for name in _FOLDERS):
        _create_folders(directory)
    return directory


def _check_folders(root: str) -> None:
    """Raise ConfigError for a place inside another cache, and for what is no folder in place of one."""
    outer = os.path.dirname(root)
    while outer != os.path.dirname(outer):
        if all(map(os.path.exists, (Directory(outer).catalogue, Directory(outer).settings))):
            raise ConfigError(
                f"{root} lies inside the cache {outer}, whose limit holds for all of its directory; "
                "choose a directory outside it"
            )
        outer = os.path.dirname(outer)
    for name in _FOLDERS:
        path = os.path.join(root, name)
        if os.path.islink(path):
            raise ConfigError(
                f"{path} is a symbolic link, and what lies behind it cannot be held within the limit; "
                "remove it, or put the whole cache there"
            )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise ConfigError(
                f"{path} is a {kind_of(path) or 'file'} in place of a folder of the cache; remove it"
            )


def _create_folders(directory: Directory) -> None:
    with translated_disk_errors(directory.root, "listing it"):
        known = set(os.listdir(directory.root)) - _HARMLESS
    if known and not known & {*_FOLDERS, "cache.json", "catalogue.sqlite"}:
        raise ConfigError(
            f"{directory.root} holds other files ({', '.join(sorted(known)[:3])}); give the cache a "
            "directory of its own"
        )
    check_own(directory.root)
    for name in _FOLDERS:
        path = os.path.join(directory.root, name)
        with translated_disk_errors(path, "creating it"):
            os.makedirs(path, mode=0o700, exist_ok=True)


def _check_owner(root: str) -> None:
    # Another user's cache may be looked at; `check_own` refuses what changes it.
    if (owner := other_owner(root)) is not None and not os.path.exists(Directory(root).catalogue):
        raise ConfigError(f"{root} belongs to another user (uid {owner}); choose a directory of your own")
    mode = os.stat(root).st_mode
    if mode & stat.S_IWOTH:
        is_shared = mode & stat.S_ISVTX
        raise ConfigError(
            f"{root} is a shared temporary directory; give the cache a directory of its own inside it"
            if is_shared
            else f"{root} may be written by everybody; run 'chmod o-w' on it or choose another directory"
        )


def accounted_bytes(info: os.stat_result) -> int:
    """The accounted size of a file: its allocated blocks, but no less than its length.

    Some filesystems allocate later (ZFS) or compress.
    """
    return max(allocated_bytes(info), -(-info.st_size // BLOCK_BYTES) * BLOCK_BYTES)


def allocated_bytes(info: os.stat_result) -> int:
    """The bytes that a file occupies on disk."""
    return info.st_blocks * 512


def overhead_bytes(directory: Directory) -> int:
    """Allocated bytes of everything in the cache except shards, published or being written."""
    with translated_disk_errors(directory.root, "measuring it"):
        return allocated_bytes(os.stat(directory.root)) + bytes_below(
            directory.root, skipped=directory.shards
        )


def bytes_below(folder: str, skipped: str = "") -> int:
    """Allocated bytes below `folder`, without what the folder `skipped` holds. Files may vanish meanwhile."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += allocated_bytes(entry.stat(follow_symlinks=False))
            if entry.path != skipped and entry.is_dir(follow_symlinks=False):
                total += bytes_below(entry.path)
    return total


def size_of_file(path: str) -> int:
    """Allocated bytes of the file at `path`; 0 if it is missing."""
    try:
        return allocated_bytes(os.lstat(path))
    except FileNotFoundError:
        return 0


def remove_if_there(path: str) -> bool:
    """Remove the file at `path`, or what lies in its place; return whether there was anything."""
    try:
        remove(path)
    except FileNotFoundError:
        return False
    return True


def replace_file(path: str, data: bytes, *, durable: bool = False) -> None:
    """Replace the file at `path` by one that holds `data`: whole, and readable by its owner only.

    With `durable`, a power cut leaves the old file or the new one.
    """
    temporary = path + ".new"
    remove_if_there(temporary)  # no file perhaps
    try:
        with open(temporary, "wb", opener=open_private) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        move(temporary, path)
    finally:
        remove_if_there(temporary)


def free_bytes(root: str) -> int:
    """The bytes that this user may still write on the disk that holds `root`."""
    info = os.statvfs(root)
    return info.f_bavail * info.f_frsize


def move_aside(directory: Directory, path: str, limit_bytes: int) -> None:
    """Move the shard file `path`, if it exists, into the quarantine, or remove it if there is no room.

    The newest few are kept, up to a share of `limit_bytes`.
    """
    with translated_disk_errors(path, "putting it aside"):
        aside = os.path.join(directory.quarantine, os.path.basename(path))
        try:
            try:
                move(path, aside)
            except (IsADirectoryError, NotADirectoryError):  # they do not replace each other
                remove_if_there(aside)
                move(path, aside)
        except FileNotFoundError:
            return
        total_bytes = 0
        newest_first = sorted(os.listdir(directory.quarantine), reverse=True)
        for number, name in enumerate(newest_first):
            quarantined = os.path.join(directory.quarantine, name)
            total_bytes += size_of_file(quarantined)
            if number >= _MAX_QUARANTINED or total_bytes > limit_bytes // _QUARANTINE_DIVISOR:
                remove_if_there(quarantined)
