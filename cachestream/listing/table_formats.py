"""Tables whose rows a log names: Delta Lake, Apache Iceberg, Apache Hudi. Their folders are refused.

The Parquet files of such a table also hold rows that were deleted or replaced since.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Final

from cachestream.errors import ConfigError, SourceError, SourceUnavailableError
from cachestream.listing.file_list import FileList
from cachestream.listing.pages import PAGE_TIMEOUT_S, S3Listing
from cachestream.listing.patterns import parent_of
from cachestream.transport.driver import Caller
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
    if remote.is_local:
        folders |= {os.path.realpath(folder).rstrip("/") + "/" for folder in folders}
        for folder in sorted(_with_those_above(folders)):
            _refuse(_format_at(folder, _local_names), folder)
    elif not remote.is_web:
        _ask(remote, _with_those_above(folders))


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


def _ask(remote: Remote, folders: set[str]) -> None:
    asked = sorted(folders, key=lambda folder: (folder.count("/"), folder))
    if remote.protocol == "hf":
        asked = [folder for folder in asked if _is_in_repository(folder)]
    filesystem, _ = remote.open_for_listing()
    caller = None if filesystem.async_impl else Caller()  # such drivers are not thread-safe

    def names(folder: str) -> Iterable[str]:
        try:
            if remote.is_s3:  # pages, as s3fs lists all that lies beside a folder that is absent
                # Of Iceberg's names "v1.metadata.json" comes after all others, which may fill a page.
                patterns = ("", "v*") if folder.endswith(f"{_METADATA}/") else ("",)
                return chain.from_iterable(S3Listing(remote, folder, one).first_names() for one in patterns)
            with map_errors(redact(folder), secrets=remote.secrets):
                return (caller or Caller()).run(lambda: _names_in(filesystem, folder), PAGE_TIMEOUT_S)
        except SourceUnavailableError:
            raise
        except SourceError:  # there is none, or it may not be listed
            return []

    asked = asked[:_MOST_ASKED]
    with ThreadPoolExecutor(_AT_ONCE if caller is None else 1) as pool:
        formats = list(pool.map(lambda folder: _format_at(folder, names), asked))
    for folder, found in zip(asked, formats, strict=True):
        _refuse(found, redact(f"{remote.protocol}://{folder}"))


def _is_in_repository(folder: str) -> bool:
    """Return whether a folder of Hugging Face, "datasets/user/repository/", is a repository or lies in
    one.
    """
    return folder.count("/") >= (3 if folder.partition("/")[0] in ("datasets", "spaces", "buckets") else 2)


def _names_in(filesystem: Any, folder: str) -> list[str]:
    # Drivers may list all that lies beside a folder that is absent; they look for it in one request.
    if filesystem.info(folder.rstrip("/"))["type"] != "directory":
        return []
    return [str(name).rstrip("/").rpartition("/")[2] for name in filesystem.ls(folder, detail=False)]


def _format_at(folder: str, names: Callable[[str], Iterable[str]]) -> str:
    """Return the format of the table in `folder`, or ""; `names` yields the names in a folder, none if
    absent.
    """
    for log, name in _LOGS.items():
        if any(names(f"{folder}{log}/")):
            return name
    return "Apache Iceberg" if any(map(_METADATA_NAME.fullmatch, names(f"{folder}{_METADATA}/"))) else ""


def _local_names(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries)


def _refuse(found: str, where: str) -> None:
    if found:
        raise ConfigError(
            f"{where}: is a table of {found}, which is not read as such: its Parquet files also hold rows that were "
            "deleted or replaced, and only its log tells which; copy its rows with the library of that format into "
            "Parquet files in another folder, and open these"
        )
