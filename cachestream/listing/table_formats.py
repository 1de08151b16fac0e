"""Tables whose rows a log names: Delta Lake, Apache Iceberg, Apache Hudi. Their folders are refused.

The Parquet files of such a table also hold rows that were deleted or replaced since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from cachestream.errors import ConfigError, SourceError, SourceUnavailableError
from cachestream.listing.file_list import FileList
from cachestream.listing.pages import PAGE_TIMEOUT_S
from cachestream.listing.patterns import parent_of
from cachestream.transport.driver import Caller
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

_LOGS: Final = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}
_METADATA, _METADATA_ENDINGS = "metadata", (".metadata.json", ".metadata.json.gz")
_MOST_ASKED: Final = 32  # folders of a remote
_AT_ONCE: Final = 16

ListEntries = Callable[[str], list[str]]


def refuse_tables(files: FileList) -> None:
    """Raise ConfigError if any of `files` belongs to a table of one of these formats.

    The listed names tell, and the folders in which the files lie and those above: on a disk all of them, on
    remotes that list folders the uppermost 32 that can be roots of tables. Raises SourceUnavailableError for
    a remote that does not answer.
    """
    found = next(filter(None, map(_named, files.names)), None)
    if found is not None:
        _refuse(found[0], files.shown_root + found[1])
    remote = files.remote
    if remote.is_local:
        folders = files.folders()
        folders |= {os.path.realpath(folder).rstrip("/") + "/" for folder in folders}
        for folder in sorted(_with_those_above(folders)):
            _refuse(_format_at(folder, _entries), folder)
    elif not remote.is_web:
        _ask(remote, _with_those_above(map(_above_partitions, files.folders())))


def _named(name: str) -> tuple[str, str] | None:
    """Return the format of the table to whose log a file belongs by its name, and the table's folder."""
    *above, last = name.split("/")
    for depth, folder in enumerate(above):
        if folder in _LOGS:
            return _LOGS[folder], "".join(f"{one}/" for one in above[:depth])
    if above[-1:] == [_METADATA] and last.endswith(_METADATA_ENDINGS):
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
    filesystem, _ = remote.open_for_listing()
    asked = sorted(folders, key=lambda folder: (folder.count("/"), folder))[:_MOST_ASKED]
    caller = None if filesystem.async_impl else Caller()  # such drivers are not thread-safe

    def entries(folder: str) -> list[str]:
        def names() -> list[str]:
            return [str(name) for name in filesystem.ls(folder, detail=False)]

        try:
            with map_errors(redact(folder), secrets=remote.secrets):
                return names() if caller is None else caller.run(names, PAGE_TIMEOUT_S)
        except SourceUnavailableError:
            raise
        except SourceError:  # there is none, or it may not be listed
            return []

    with ThreadPoolExecutor(_AT_ONCE if caller is None else 1) as pool:
        formats = list(pool.map(lambda folder: _format_at(folder, entries), asked))
    for folder, found in zip(asked, formats, strict=True):
        _refuse(found, redact(f"{remote.protocol}://{folder}"))


def _format_at(folder: str, entries: ListEntries) -> str:
    """Return the format of the table in `folder`, or ""."""
    for log, name in _LOGS.items():
        if entries(folder + log):
            return name
    inside = entries(folder + _METADATA)
    return "Apache Iceberg" if any(name.endswith(_METADATA_ENDINGS) for name in inside) else ""


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _refuse(found: str, where: str) -> None:
    if found:
        raise ConfigError(
            f"{where}: is a table of {found}, which is not read as such: its Parquet files also hold rows that were "
            "deleted or replaced, and only its log tells which; copy its rows with the library of that format into "
            "Parquet files in another folder, and open these"
        )
