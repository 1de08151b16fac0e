"""The files that URLs stand for: folders, wildcards, ranges, and single files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fsspec.utils import get_protocol

from cachestream.errors import ConfigError, SourceError
from cachestream.listing.pages import S3Listing, Walk
from cachestream.listing.patterns import (
    MAGIC,
    WEB_MAGIC,
    common_root,
    expand_braces,
    extension_of,
    local_path,
    parent_of,
    split_wildcard,
)
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact


def find_files(remote: Remote, urls: Sequence[str], recursive: bool = True) -> tuple[str, list[str]]:
    """Return the root of the files that `urls` (of one protocol) name, and their paths, sorted and unique.

    The root ends in "/", or is "". Hidden files in folders are left out.

    Raises SourceError for files and folders that are missing, empty or forbidden, SourceUnavailableError for
    a remote that does not answer, ConfigError for URLs of several protocols and for several chained ones.
    """
    roots, paths = set[str](), list[str]()
    for url in urls:
        if get_protocol(url) != remote.protocol:
            raise ConfigError(
                f"{redact(urls[0])} and {redact(url)}: all URLs of one source must have the same scheme"
            )
        if "::" in url and (len(set(urls)) > 1 or len(expand_braces(url)) > 1):
            raise ConfigError(
                f"{redact(url)}: chained URLs share no filesystem; give one, with a wildcard for its files"
            )
        known = len(paths)
        for one in expanded(remote, url):
            # After the first file no other is looked up: a range may stand for a hundred thousand.
            listing, path = None, _path_by_looks(remote, one) if roots else ""
            if not path:
                listing, path = find(remote, one, recursive)
            names = [] if listing is None else listing.all()
            if listing is not None and (names or not path):
                roots.add(listing.root)
                paths += [listing.root + name for name in names]
            elif path and (listing is None or _is_file(remote, path)):
                roots.add(parent_of(path.partition("?")[0] if remote.is_web else path))
                paths.append(path)
        if len(paths) == known:
            raise SourceError(f"{redact(url)}: no files found; check the path or the pattern")
    return common_root(roots), sorted(set(paths))


def expanded(remote: Remote, url: str) -> list[str]:
    """Return what a URL with braces stands for; the name of a local file may contain some."""
    return [url] if remote.is_local and os.path.exists(local_path(url)) else expand_braces(url)


def _is_file(remote: Remote, path: str) -> bool:
    with map_errors(remote.shown(path), secrets=remote.secrets):
        return bool(remote.ask("info", path)["type"] != "directory")


def _path_by_looks(remote: Remote, url: str) -> str:
    """Return the path of a URL that names a file on a remote by its looks, or ""."""
    if remote.is_local or remote.is_web or not extension_of(url) or MAGIC.search(url):
        return ""
    return remote.path_of(url)


def find(remote: Remote, url: str, recursive: bool) -> tuple[S3Listing | Walk | None, str]:
    """Return the listing of the folder or wildcard that `url` names, and the path of the file that it names.

    Both, if it names a file unless the listing finds any.
    """
    with map_errors(redact(url), secrets=remote.secrets):
        return (
            _find_local(remote, url, recursive) if remote.is_local else _find_remote(remote, url, recursive)
        )


def _find_local(remote: Remote, url: str, recursive: bool) -> tuple[Walk | None, str]:
    path = local_path(url)
    if os.path.isdir(path):
        return Walk(remote, path.rstrip("/") + "/", "**" if recursive else "*"), ""
    if os.path.exists(path):
        return None, path
    root, pattern = split_wildcard(path)
    if not pattern:
        raise SourceError(f"{path}: no such file or folder; check the path")
    return Walk(remote, root, _with_end(pattern, url, recursive)), ""


def _with_end(pattern: str, url: str, recursive: bool) -> str:
    """Return the wildcard of a URL; one with "/" at its end names folders, and stands for their files."""
    return pattern.rstrip("/") + ("/**" if recursive else "/*") if url.endswith("/") else pattern


def _find_remote(remote: Remote, url: str, recursive: bool) -> tuple[S3Listing | Walk | None, str]:
    path, lister = remote.path_of(url), S3Listing if remote.is_s3 else Walk
    bare = path.partition("?")[0] if remote.is_web else path
    if remote.is_s3 and (not bare or MAGIC.search(bare.partition("/")[0])):
        raise SourceError("an S3 URL names one bucket: s3://bucket/…")
    root, pattern = split_wildcard(bare, WEB_MAGIC if remote.is_web else MAGIC)
    if pattern:
        if not remote.is_web and remote.ask("isfile", path):
            return None, path  # the name of a file may contain the signs of a wildcard
        return lister(remote, root, _with_end(pattern, url, recursive)), ""
    folder = lister(remote, root if path.strip("/") else "", "**" if recursive else "*")
    if url.endswith("/") or not path or (remote.is_s3 and "/" not in path):
        return folder, ""
    if remote.is_web:
        return None, path  # not looked up, as a signed URL may allow GET alone
    if not extension_of(path):
        return folder, path
    return (folder, "") if remote.ask("info", path)["type"] == "directory" else (None, path)
