"""Listings page by page, from any name on: samples can be read before a listing is complete.

S3 lists in the order of all paths. Any other tree is listed folder by folder in the same order.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.linux import filesystem_of, is_network_filesystem
from cachestream.listing.names import Page
from cachestream.listing.patterns import (
    MAGIC,
    folder_filter,
    name_filter,
    tell_of_dots,
    warn_of_denied,
)
from cachestream.transport import metering
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, patiently, redact

PAGE_NAMES: Final = 1000  # as many as S3 gives
FIRST_OF_DISKS: Final = 1_000_000  # a disk of this machine lists so many in 2 to 3 s
FIRST_OF_OTHERS: Final = 1000
MOST_FOLLOWING: Final = 16
_ENTRIES_PER_HEARTBEAT: Final = 8192
_CACHE_FILES: Final = frozenset({"cache.json", "catalogue.sqlite"})


class UnorderedError(SourceError):
    """The store lists files in no order: the names after a given one cannot be requested."""


class GoneError(SourceUnavailableError):
    """The root is empty or missing, such as a mount point where nothing is mounted."""


@dataclass(frozen=True, slots=True)
class S3Listing:
    """The files on S3 that match a wildcard, a page at a time, from any name on. Picklable.

    All paths begin with `root` ("bucket/folder/"). `pattern` is the wildcard below it: "**" for all files
    that are not hidden, "*" for those of the folder itself.
    """

    remote: Remote
    root: str
    pattern: str = "**"

    @property
    def _prefix(self) -> str:
        return self.root + MAGIC.split(self.pattern, maxsplit=1)[0]

    @property
    def _is_flat(self) -> bool:
        """True if all files lie in one folder."""
        return "/" not in self.pattern and self.pattern != "**"

    def num_first_names(self) -> int:
        """Return the number of names to list before the first sample. With 1, a single page is listed."""
        return 1

    def after(self, last: str, page_names: int = PAGE_NAMES) -> Iterator[Page]:
        """Yield the pages of names after `last`, "" for all.

        Raises the errors of `map_errors`, and UnorderedError for a store that lists out of order.
        """
        for page in self._pages(last, page_names):
            if any(b <= a for a, b in zip([last, *page.names], page.names, strict=False)):
                raise UnorderedError(
                    f"{self.remote.shown(self._prefix)}: this store does not list by name; "
                    "give first_names=None to list all before"
                )
            last = page.names[-1] if page.names else last
            yield page._replace(names=self._matching(page.names))

    def all(self) -> list[str]:
        """Return all names, as the store orders them."""
        return [name for page in self._pages("", PAGE_NAMES) for name in self._matching(page.names)]

    def _matching(self, names: list[str]) -> list[str]:
        tell_of_dots(self.remote.shown(self._prefix), names)
        return name_filter(self.pattern)(names)

    def _pages(self, last: str, page_names: int) -> Iterator[Page]:
        """Yield the names of the objects after `last`, page by page, whether they match or not."""
        start, cut = (self.root + last) if last else "", len(self.root.partition("/")[2])
        for answer in self._answers(self._prefix, "/" if self._is_flat else "", start, page_names):
            keys = [str(entry["Key"]) for entry in answer.get("Contents", ())]
            # An object may have the name of the folder itself.
            yield Page([key[cut:] for key in keys if len(key) > cut], not answer.get("IsTruncated"))

    def folders_in(self, parent: str) -> list[str]:
        """Return the folders ("a/b/") directly in `parent` ("a/", or "" for the root) whose files may match.

        Pages are requested until one holds files alone: folders after so many files are not found.
        """
        if self._is_flat:
            return []
        found, may_match = list[str](), folder_filter(self.pattern)
        cut = len(self.root.partition("/")[2])
        for answer in self._answers(self.root + parent if parent else self._prefix, "/", "", PAGE_NAMES):
            folders = [entry["Prefix"][cut:] for entry in answer.get("CommonPrefixes", ())]
            if not folders:
                break
            found += filter(may_match, folders)
        return found

    def _answers(self, prefix: str, delimiter: str, start: str, names: int) -> Iterator[dict[str, Any]]:
        """Yield the answers of S3 for the paths that begin with `prefix` and come after `start`."""
        bucket, _, key = prefix.partition("/")
        options = {"Bucket": bucket, "Prefix": key, "Delimiter": delimiter, "MaxKeys": names}
        if start:
            options["StartAfter"] = start.partition("/")[2]
        while True:
            with map_errors(self.remote.shown(self._prefix), secrets=self.remote.secrets):
                req_kw = self.remote.driver().filesystem.req_kw
                answer = self.remote.ask("call_s3", "list_objects_v2", **options, **req_kw)
            yield answer
            if not answer.get("IsTruncated"):
                return
            options["ContinuationToken"] = answer["NextContinuationToken"]


# --- trees of folders ---------------------------------------------------------------------------


class Folder(NamedTuple):
    """The contents of a folder: the names of files and of folders; `is_there` is false if it is gone."""

    files: list[str]
    subfolders: list[str]
    is_there: bool = True


# Takes a folder ("" is the root, others end in "/"), and the folders that it will be asked for next.
ListFolder = Callable[[str, Sequence[str]], Folder]


def in_order(list_folder: ListFolder, last: str = "") -> Iterator[tuple[list[str], bool]]:
    """Yield the paths below the root that come after `last`, in order, in runs of files of one folder.

    Each run comes with True if it is certainly the last. Folders before `last` are not listed.
    """
    pending: list[str | list[str]] = [""]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            folders = (next_one for next_one in reversed(pending) if isinstance(next_one, str))
            contents = list_folder(one, list(islice(folders, MOST_FOLLOWING)))
            pending += reversed(_items(one, contents, last))
        else:
            yield one, not pending


def _items(folder: str, contents: Folder, last: str) -> list[str | list[str]]:
    """Return the folders and runs of files of `folder` that come after `last`, in the order of paths."""
    # Folders are sorted with their "/", as "a.txt" comes before "a/b", and "a0" after it.
    paths = sorted(
        [folder + name for name in contents.files] + [f"{folder}{name}/" for name in contents.subfolders]
    )
    if last.startswith(folder):
        paths = [path for path in paths if path > last or (path[-1] == "/" and last.startswith(path))]
    if not contents.subfolders:
        return [paths] if paths else []
    items: list[str | list[str]] = []
    for is_folder, run in groupby(paths, lambda path: path[-1] == "/"):
        together = list(run)
        items += together if is_folder else [together]
    return items


class LocalFolders:
    """A lister of the folders below `root` ("/data/"), without caches.

    Links to folders are followed unless they lead to a folder above them, or, below `is_whole` trees, to one
    that is found by its own path. This depends on the target alone, so that a listing can be resumed
    anywhere.
    """

    def __init__(self, root: str, *, is_whole: bool = True) -> None:
        self._root, self._is_whole = root, is_whole
        self._real = os.path.realpath(root).rstrip("/") + "/"

    def __call__(self, folder: str, _following: Sequence[str] = ()) -> Folder:
        """Return the contents of `folder`, in no order. Raises OSError."""
        files, subfolders = list[str](), list[str]()
        try:
            with os.scandir((self._root + folder).rstrip("/") or "/") as entries:
                for number, entry in enumerate(entries):
                    if not number % _ENTRIES_PER_HEARTBEAT:
                        metering.fetched(0)
                    try:
                        is_file, is_dir = entry.is_file(), entry.is_dir()
                    except OSError as error:
                        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                            raise
                        continue  # a link that leads nowhere, like a dangling one
                    if is_file:
                        files.append(entry.name)
                    elif is_dir and (not entry.is_symlink() or self._is_followed(folder, entry.path)):
                        subfolders.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return Folder([], [], is_there=False)
        if folder and "shards" in subfolders and _CACHE_FILES.issubset(files):
            return Folder([], [])
        return Folder(files, subfolders)

    def _is_followed(self, folder: str, link: str) -> bool:
        target = os.path.realpath(link).rstrip("/") + "/"
        if self._is_whole and target.startswith(self._real) and "/." not in target[len(self._real) - 1 :]:
            return False
        ends = (0, *(end for end, letter in enumerate(folder, 1) if letter == "/"))
        above = (os.path.realpath(self._root + folder[:end]).rstrip("/") + "/" for end in ends)
        return not any(one.startswith(target) for one in above)


@dataclass(frozen=True, slots=True)
class Walk:
    """The files of a tree that match a wildcard, in the order of their paths, a folder at a time, from any
    name on. Picklable.

    All paths begin with `root` ("/data/train/"). `pattern` is as in `S3Listing`.
    """

    remote: Remote
    root: str
    pattern: str = "**"

    def num_first_names(self) -> int:
        """Return the number of names to list before the first sample: as many as take little time."""
        if self.remote.is_local and not is_network_filesystem(filesystem_of(os.path.realpath(self.root))):
            return FIRST_OF_DISKS
        return FIRST_OF_OTHERS

    def after(self, last: str, _page_names: int = 0) -> Iterator[Page]:
        """Yield the names after `last`, "" for all; a page is a run of files in one folder.

        Raises the errors of `map_errors`, and GoneError if the root is gone.
        """
        keep, is_last = name_filter(self.pattern), False
        with closing(_FolderLister(self)) as lister:
            for names, is_last in in_order(lister.for_folder, last):
                yield Page(keep(names), is_last)
        if not is_last:
            yield Page([], is_last=True)

    def all(self) -> list[str]:
        """Return all names; none if the root is empty or missing."""
        with suppress(GoneError):
            return [name for page in self.after("") for name in page.names]
        return []

    def folders_in(self, parent: str) -> list[str]:
        """Return the folders ("a/b/") directly in `parent` ("a/"; "" for the root) whose files may match."""
        with closing(_FolderLister(self)) as lister:
            return [f"{parent}{name}/" for name in lister.for_folder(parent).subfolders]


class _FolderLister:
    """A lister of one folder after another; asynchronous drivers list the following ones in the meantime."""

    def __init__(self, walk: Walk) -> None:
        self._walk, self._remote = walk, walk.remote
        self._shown = walk.remote.shown(walk.root)
        self._may_match = folder_filter(walk.pattern)
        self._ahead: dict[str, concurrent.futures.Future[Any]] = {}
        self._denied = ""
        is_local, is_whole = self._remote.is_local, walk.pattern == "**"
        self._list = LocalFolders(walk.root, is_whole=is_whole) if is_local else self._by_driver

    def for_folder(self, folder: str, following: Sequence[str] = ()) -> Folder:
        """Return the contents of `folder`, without the folders that hold no files that match.

        A wildcard leaves out the folders of this machine that may not be read, with a warning.
        """
        where = self._shown + redact(folder)
        with map_errors(where, secrets=self._remote.secrets):
            try:
                found = self._list(folder, following)
            except PermissionError:
                if not (folder and self._remote.is_local and self._walk.pattern != "**"):
                    raise
                self._denied = self._denied or folder
                warn_of_denied(self._shown, self._denied)
                return Folder([], [])
        if not folder and not (found.files or found.subfolders):
            raise GoneError(
                f"{self._shown}: there is nothing here at present; is it mounted, and the path right?"
            )
        if not found.is_there:
            self.for_folder("")  # an error if all is gone
        tell_of_dots(where, found.files + found.subfolders)
        subfolders = [name for name in found.subfolders if self._may_match(f"{folder}{name}/")]
        return found._replace(subfolders=subfolders)

    def _by_driver(self, folder: str, following: Sequence[str]) -> Folder:
        try:
            entries = patiently(partial(self._entries, folder, following))
        except (FileNotFoundError, NotADirectoryError):
            return Folder([], [], is_there=False)
        path, files, subfolders = self._path(folder).strip("/"), set[str](), set[str]()
        for entry in entries:
            full = str(entry["name"]).strip("/")
            above, _, name = full.rpartition("/")
            if full == path or (self._remote.has_queries and above != path):
                continue  # stores list placeholders for folders, web servers all that a page refers to
            if entry["type"] == "directory":
                subfolders.add(name)
            elif not str(entry["name"]).endswith("/"):
                files.add(name)
        return Folder(list(files), list(subfolders))

    def _entries(self, folder: str, following: Sequence[str]) -> list[dict[str, Any]]:
        driver = self._remote.driver()
        for one in (folder, *(following if driver.is_async else ())):
            if one not in self._ahead:
                self._ahead[one] = driver.submit(partial(driver.call, "ls", self._path(one), detail=True))
        try:
            return list(self._remote.answer_of(driver, self._ahead.pop(folder), self._remote.listing_s))
        finally:
            if (kept := getattr(driver.filesystem, "dircache", None)) is not None:
                kept.clear()  # 2 kB for each file; `invalidate_cache` would forget more than listings

    def _path(self, folder: str) -> str:
        path = self._walk.root + folder
        return path if self._remote.is_web else path.rstrip("/")

    def close(self) -> None:
        for future in self._ahead.values():
            future.cancel()
