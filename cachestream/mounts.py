"""What kind of filesystem a path lies on, and whether other machines hold it."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["filesystem_of", "is_network_filesystem"]

# Filesystems whose locks, sizes or speed other machines, or a remote store, have a say in.
_NETWORK_FILESYSTEM: Final = re.compile(
    r"9p|acfs|afs|beegfs|ceph|cifs|coda|davfs|gfs2|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|prl_fs|pvfs2"
    r"|smb3|smbfs|vboxsf|wekafs"
    r"|fuse\..*(s3|gcs|blob|rclone|sshfs|ceph|gluster|juice|goofys|dav|ftp|afs|hdfs|weka|quobyte|alluxio).*"
)
_OCTAL: Final = re.compile(rb"\\([0-3][0-7]{2})")  # how mountinfo writes blanks and backslashes


def is_network_filesystem(kind: str) -> bool:
    """Whether filesystems of this type, as `filesystem_of` gives it, lie elsewhere."""
    return _NETWORK_FILESYSTEM.fullmatch(kind) is not None


def filesystem_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """The type of the filesystem that holds `path`, or "" where the system does not tell."""
    try:
        with open(mountinfo, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        left, _, right = (part.split() for part in line.partition(b" - "))
        if len(left) < 5 or not right:
            continue
        mount = os.fsdecode(_OCTAL.sub(lambda digits: bytes([int(digits[1], 8)]), left[4]))
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of two at one place, the later one hides the other
            best, kind = mount, right[0].decode(errors="replace")
    return kind
