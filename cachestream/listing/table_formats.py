"""Tables whose rows a log names: Delta Lake, Apache Iceberg, Apache Hudi. Their folders are refused.

The Parquet files of such a table also hold rows that were deleted or replaced since.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from cachestream.errors import ConfigError, SourceError, SourceUnavailableError
from cachestream.listing.file_list import FileList
from cachestream.listing.pages import GoneError, S3Listing, Walk
from cachestream.listing.patterns import parent_of
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

_LOGS: Final = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}
_METADATA: Final = "metadata"
_METADATA_NAME: Final = re.compile(r"(v\d+|\d{5,}-[0-9a-fA-F-]{36})(\.gz)?\.metadata\.json(\.gz)?")
_MOST_ASKED: Final = 32  # folders of a remote
_AT_ONCE: Final = 16


def refuse_tables(files: FileList) -> None:
    """Raise ConfigError if any of `files` belongs to a table of one of these formats.

    The listed names tell, and the folders in which the files or their partitions lie and those above: on a
    disk all of them, on remotes that list folders the uppermost 32. Raises SourceUnavailableError for a
    remote that does not answer.
    """
    found = next(filter(None, map(_named, files.names)), None)
    if found is not None:
        _refuse(found[0], files.shown_root + found[1])
    remote, folders = files.remote, set(map(_above_partitions, files.folders()))
    if remote.is_web:
        return
    if remote.is_local:
        folders |= {os.path.realpath(folder).rstrip("/") + "/" for folder in folders}
    asked = sorted(_with_those_above(folders), key=lambda folder: (folder.count("/"), folder))
    if not remote.is_local:
        asked = asked[:_MOST_ASKED]
    # Each thread would open a connection of its own to a blocking driver.
    at_once = 1 if remote.is_local or not remote.driver().is_async else _AT_ONCE
    with ThreadPoolExecutor(at_once) as pool:
        formats = list(pool.map(partial(_format_at, remote), asked))
    for folder, format_name in zip(asked, formats, strict=True):
        _refuse(format_name, remote.shown(folder))


def _named(name: str) -> tuple[str, str] | None:
    """Return the format of the table to whose log a file belongs by its name, and the table's folder."""
    *above, last = name.split("/")
    for depth, folder in enumerate(above):
        if folder in _LOGS:
            return _LOGS[folder], "".join(f"{one}/" for one in above[:depth])
    if above[-1:] == [_METADATA] and _METADATA_NAME.fullmatch(last):
        return "Apache Iceberg", "".join(f"{one}/" for one in above[:-1])
    return None


def _with_those_above(folders: Iterable[str]) -> set[str]:
    """Return the folders, which end in "/", and all that they lie in, up to the bucket or "/"."""
    found = set[str]()
    for folder in folders:
        one = folder
        while one and one not in found:
            found.add(one)
            one = parent_of(one[:-1])
    return found


def _above_partitions(folder: str) -> str:
    """Return the folder in which the folders of partitions, "date=2026-01-01/", above a file lie."""
    above = parent_of(folder[:-1])
    return _above_partitions(above) if "=" in folder[len(above) :] else folder


def _format_at(remote: Remote, folder: str) -> str:
    """Return the format of the table in `folder` of a remote, or ""."""
    for log, name in _LOGS.items():
        if _first_names(remote, f"{folder}{log}/"):
            return name
    # Of Iceberg's names "v1.metadata.json" comes after all others, which may fill a page of S3.
    names = [
        name for pattern in ("*", "v*") for name in _first_names(remote, f"{folder}{_METADATA}/", pattern)
    ]
    return "Apache Iceberg" if any(map(_METADATA_NAME.fullmatch, names)) else ""


def _first_names(remote: Remote, folder: str, pattern: str = "*") -> list[str]:
    """Return the names on the first page of a folder; none if it is absent, or may not be listed."""
    try:
        if remote.is_s3:  # s3fs would list all that lies beside a folder that is absent
            return next(S3Listing(remote, folder, pattern).after("")).names
        with map_errors(redact(folder), secrets=remote.secrets):
            # Other drivers may, too: they look for it in one request.
            if not remote.is_local and remote.ask("info", folder.rstrip("/"))["type"] != "directory":
                return []
        return next(Walk(remote, folder, pattern).after("")).names
    except SourceUnavailableError as error:
        if not isinstance(error, GoneError):
            raise
    except SourceError:
        pass
    return []


def _refuse(found: str, where: str) -> None:
    if found:
        raise ConfigError(
            f"{where}: is a table of {found}, which is not read as such: its Parquet files also hold rows "
            "that were deleted or replaced, and only its log tells which; copy its rows with the library of "
            "that format into Parquet files in another folder, and open these"
        )
