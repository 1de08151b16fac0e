"""The cache directory: what lies where, who may use it, and how much disk it takes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cachestream.errors import CacheError, ConfigError
from cachestream.storage.shard import shard_path

__all__ = ["Directory", "free_bytes", "open_directory", "overhead_bytes", "sync_folder"]

_NETWORK_FILESYSTEMS: Final = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "fuse.cephfs",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.mount-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "gfs2",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "smb3",
        "smbfs",
    ]
)


@dataclass(frozen=True, slots=True)
class Directory:
    """The paths inside the cache at `root`."""

    root: str

    @property
    def catalogue(self) -> str:
        return os.path.join(self.root, "catalogue.sqlite")

    @property
    def settings(self) -> str:
        """A copy of the settings, for when the catalogue is lost."""
        return os.path.join(self.root, "cache.json")

    @property
    def shards(self) -> str:
        return os.path.join(self.root, "shards")

    @property
    def leases(self) -> str:
        return os.path.join(self.root, "leases")

    @property
    def quarantine(self) -> str:
        return os.path.join(self.root, "quarantine")

    @property
    def worker(self) -> str:
        return os.path.join(self.root, "worker")

    def temporary_shard(self, shard_id: int) -> str:
        """Where a shard is written. Beside its final place, so that one listing sees it once."""
        return os.path.join(self.shards, f"{shard_id:012d}.tmp")

    def bytes_of(self, shard_ids: Iterable[int]) -> int:
        """What the files of shards that are being written, or being evicted, occupy."""
        total = 0
        for shard_id in shard_ids:
            for path in (self.temporary_shard(shard_id), shard_path(self.root, shard_id)):
                with suppress(FileNotFoundError):
                    total += allocated_bytes(os.stat(path))
        return total

    def worker_file(self, name: str) -> str:
        return os.path.join(self.worker, name)


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """The cache directory at `path`, created if need be (mode 0700).

    Raises ConfigError for a place where a cache cannot be kept safely: a network filesystem (no
    reliable locks), a file, a directory that belongs to somebody else or that everybody may write to.
    """
    root = os.path.realpath(os.fspath(path))
    if os.path.exists(root) and not os.path.isdir(root):
        raise ConfigError(f"{root} is a file; give a directory for the cache")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{root} cannot be created ({error.strerror}); choose another directory") from error
    _check_owner(root)
    kind = filesystem_of(root)
    if kind in _NETWORK_FILESYSTEMS:
        raise ConfigError(
            f"{root} lies on a network filesystem ({kind}), where file locks are not reliable; "
            "choose a directory on a local disk of this machine"
        )
    directory = Directory(root)
    folders = ("shards", "leases", "worker", "quarantine")
    if not all(os.path.isdir(os.path.join(root, name)) for name in folders):
        _create_folders(directory, folders)
    return directory


def _create_folders(directory: Directory, folders: tuple[str, ...]) -> None:
    known = set(os.listdir(directory.root))
    if known and not known & {*folders, "cache.json", "catalogue.sqlite"}:
        raise ConfigError(
            f"{directory.root} holds other files ({', '.join(sorted(known)[:3])}); give the cache a directory of its own"
        )
    try:
        for name in folders:
            os.makedirs(os.path.join(directory.root, name), mode=0o700, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"{directory.root} cannot be written ({error.strerror}); check its permissions"
        ) from error


def _check_owner(root: str) -> None:
    info = os.stat(root)
    if info.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ConfigError(
            f"{root} belongs to another user (uid {info.st_uid}); choose a directory of your own"
        )
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{root} may be written by everybody; run 'chmod o-w' on it or choose another directory"
        )
    if info.st_mode & stat.S_ISVTX and info.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{root} is a shared temporary directory; give the cache a directory of its own inside it"
        )


def filesystem_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """The type of the filesystem that holds `path`, or "" where the system does not tell."""
    try:
        with open(mountinfo, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def allocated_bytes(info: os.stat_result) -> int:
    """What a file occupies on disk."""
    return info.st_blocks * 512


def overhead_bytes(directory: Directory) -> int:
    """Allocated bytes of everything in the cache but published shards and shards being written."""
    total = allocated_bytes(os.stat(directory.root))
    with os.scandir(directory.root) as entries:
        for entry in entries:
            total += _size_of(entry)
    for folder in (directory.leases, directory.worker, directory.quarantine):
        with os.scandir(folder) as entries:
            total += sum(map(_size_of, entries))
    return total


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return allocated_bytes(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return 0  # removed meanwhile by its owner


def free_bytes(root: str) -> int:
    """What this user may still write on the disk that holds `root`."""
    info = os.statvfs(root)
    return info.f_bavail * info.f_frsize


def sync_folder(folder: str) -> None:
    """Make renames and unlinks in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
