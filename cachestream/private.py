"""Files for their owner alone, and no way out of a cache: nothing in one is made, moved or removed through a link.

Whoever owns a cache may put a link anywhere in it, at any time. Root, who works in a user's cache, would follow it
and make, give away or remove files of its own. So every change goes by a descriptor of the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["make_private_folder", "move", "open_private", "remove"]

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS: Final = 100


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: the file it makes is readable by its owner only, and no child inherits it.

    A file that root makes in a user's folder is that user's. Links are not followed: they are no part of a cache.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not stop us
    if not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
        return os.open(path, flags)  # a look changes nothing, wherever it goes
    with _parent(path) as (name, folder):
        for _ in range(_ATTEMPTS if flags & os.O_CREAT else 0):
            try:
                fd = os.open(name, flags | os.O_EXCL, 0o600, dir_fd=folder)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
            else:
                _give(fd, folder)
                return fd
            with suppress(FileNotFoundError):  # removed since: try again
                return os.open(name, flags & ~os.O_CREAT, dir_fd=folder)
        return os.open(name, flags & ~os.O_CREAT, dir_fd=folder)


def make_private_folder(path: str) -> None:
    """Make the folder `path`, unless it is there; one that root makes in a user's folder is that user's."""
    with _parent(path) as (name, folder):
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise
            return
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not os.listdir(fd):  # another one of root's may have been moved there since
                _give(fd, folder)
        finally:
            os.close(fd)


def move(source: str, target: str) -> None:
    """Rename `source` to `target`, in place of the file that is there."""
    with _parent(source) as (old, old_folder), _parent(target) as (new, new_folder):
        os.replace(old, new, src_dir_fd=old_folder, dst_dir_fd=new_folder)


def remove(path: str) -> None:
    """Remove the file `path`; raises FileNotFoundError where there is none."""
    with _parent(path) as (name, folder):
        os.unlink(name, dir_fd=folder)


def _give(fd: int, folder: int) -> None:
    """Give what root has just made, and has open as `fd`, to whom `folder` belongs: it would be locked out else."""
    owner = os.fstat(folder)
    if os.geteuid() == 0 and owner.st_uid != 0:
        with suppress(OSError):  # some filesystems know no owners: there all are let in
            os.fchown(fd, owner.st_uid, owner.st_gid)


@contextmanager
def _parent(path: str) -> Iterator[tuple[str, int]]:
    """The last part of `path`, and a descriptor of the folder before it, to which no link leads. Errors name `path`."""
    *above, name = os.path.abspath(path).split("/")
    folder = os.open("/", _FOLDER)
    try:
        for part in above[1:]:
            outer, folder = folder, _enter(folder, part)
            os.close(outer)
        yield name, folder
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(folder)


def _enter(folder: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except NotADirectoryError as error:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, f"{name}: {os.strerror(errno.ELOOP)}") from error
        raise
