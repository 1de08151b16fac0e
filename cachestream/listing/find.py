"""The files that URLs stand for, found all at once: folders, wildcards, ranges, and single files."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from fsspec.utils import get_protocol

from cachestream.errors import ConfigError, SourceError
from cachestream.listing.pages import LocalFolders, S3Listing, in_order, real_paths
from cachestream.listing.patterns import (
    MAGIC,
    WEB_MAGIC,
    as_in_shell,
    common_root,
    expand_braces,
    extension_of,
    local_path,
    name_filter,
    parent_of,
    split_wildcard,
    tell_of_dots,
    visible,
)
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact


def find_files(remote: Remote, urls: Sequence[str], recursive: bool = True) -> tuple[str, list[str]]:
    """Return the root of the files that `urls` (of one protocol) name, and their paths, sorted and unique.

    The root ends in "/", or is "". Hidden files in folders are left out.

    Raises SourceError for files and folders that are missing, empty or forbidden, SourceUnavailableError for
    a remote that does not answer, ConfigError for URLs of several protocols and for several chained ones.
    """
    for url in urls:
        if get_protocol(url) != remote.protocol:
            raise ConfigError(
                f"{redact(urls[0])} and {redact(url)}: all URLs of one source must have the same scheme"
            )
        if "::" in url and (len(set(urls)) > 1 or len(expand_braces(url)) > 1):
            raise ConfigError(
                f"{redact(url)}: chained URLs share no filesystem; give one, with a wildcard for its files"
            )
    finder = None if remote.is_local else _RemoteFinder(remote)
    find = _find_local if finder is None else finder.find
    roots: set[str] = set()
    paths: list[str] = []
    for url in urls:
        known = len(paths)
        local = local_path(url) if finder is None else ""
        if local and os.path.isfile(local):  # most of a long list: looked up once
            roots.add(parent_of(local))
            paths.append(local)
            continue
        # The name of a local file may contain braces.
        for one in [url] if local and os.path.exists(local) else expand_braces(url):
            # After the first file no other is looked up: a range may stand for a hundred thousand.
            if roots and finder is not None and (path := finder.file(one)):
                roots.add(parent_of(path))
                paths.append(path)
                continue
            with map_errors(redact(one), secrets=remote.secrets):
                root, found = find(one, recursive)
            roots.add(root)
            paths.extend(found)
        if len(paths) == known:
            raise SourceError(f"{redact(url)}: no files found; check the path or the pattern")
    return common_root(roots), sorted(set(paths))


def _find_local(url: str, recursive: bool) -> tuple[str, list[str]]:
    """Return the root and the files of one URL."""
    path = local_path(url)
    if os.path.isdir(path):
        root = path.rstrip("/") + "/"
        folders = LocalFolders(root)
        runs = (names for names, _ in in_order(folders)) if recursive else [folders("").files]
        return root, [root + name for names in runs for name in names]
    if os.path.exists(path):
        return parent_of(path), [path]
    root, pattern = split_wildcard(path)
    if not pattern:
        raise SourceError(f"{path}: no such file or folder; check the path")
    found = list(filter(os.path.isfile, glob.iglob(path, recursive=True)))
    if "**" in pattern.split("/"):
        circular = {folder for folder in set(map(parent_of, found)) if _is_circular(root, folder)}
        found = [one for one in found if parent_of(one) not in circular]
    return root, found


def _is_circular(root: str, folder: str) -> bool:
    """Return whether a link on the way from `root` to `folder` leads back to a folder above it."""
    passed = list(real_paths(root, folder[len(root) :]))
    return len(set(passed)) < len(passed)


class _RemoteFinder:
    """A finder of the files of one URL after another on a remote, by one filesystem."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._filesystem, self._first_path = remote.open_for_listing()
        self._magic = WEB_MAGIC if remote.is_web else MAGIC

    def file(self, url: str) -> str:
        """Return the path of a URL that names a file by its looks, or ""."""
        path = self._path(url)
        is_file = extension_of(path) and not self._remote.is_web and not self._magic.search(path)
        return path if is_file else ""

    def _path(self, url: str) -> str:
        return self._first_path if "::" in url else str(self._filesystem._strip_protocol(url))

    def find(self, url: str, recursive: bool) -> tuple[str, list[str]]:
        """Return the root and the files of one URL."""
        path = self._path(url)
        bare = path.partition("?")[0]
        if self._remote.is_web and not self._magic.search(bare):
            # The file is not looked up, as a signed URL may allow GET alone.
            return self._folder(path, recursive) if path.endswith("/") else (parent_of(bare), [path])
        if self._remote.is_s3 and (not bare or MAGIC.search(bare.partition("/")[0])):
            raise SourceError("an S3 URL names one bucket: s3://bucket/…")
        if self._magic.search(path):
            return self._matching(path)
        if url.endswith("/") or not path:
            return self._folder(path, recursive)
        if not extension_of(path) and (below := self._folder(path, recursive))[1] not in ([], [path]):
            return below
        info = self._filesystem.info(path)
        return self._folder(path, recursive) if info["type"] == "directory" else (parent_of(path), [path])

    def _folder(self, path: str, recursive: bool) -> tuple[str, list[str]]:
        if self._remote.is_s3:  # the `find` of s3fs would keep a record of 2 kB for each file
            root, _ = split_wildcard(path)
            listing = S3Listing(self._remote, root, "", recursive)
            return root, [root + name for name in listing.matching(listing.names())]
        root = path.rstrip("/") + "/" if path.strip("/") else ""
        found = self._filesystem.find(path, maxdepth=None if recursive else 1)
        tell_of_dots(redact(root), (one[len(root) :] for one in found))
        return root, visible(root, found, recursive)

    def _matching(self, path: str) -> tuple[str, list[str]]:
        """Return the root and the files that match; only the file with the name `path` if there is one."""
        root, pattern = split_wildcard(path, self._magic)
        if self._remote.is_s3:
            listing = S3Listing(self._remote, root, pattern)
            names = listing.names()
            if pattern not in names:
                return root, [root + name for name in listing.matching(names)]
        elif not self._filesystem.isfile(path):
            entries = self._filesystem.glob(as_in_shell(path), detail=True)
            files = [name for name, info in entries.items() if info["type"] != "directory"]
            shown = name_filter(pattern)([name[len(root) :] for name in files])
            return root, [root + name for name in shown]
        return parent_of(path), [path]
