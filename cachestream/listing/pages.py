"""Listings page by page, from any name on: samples can be read before a listing is complete.

S3 lists in the order of all paths. A local tree, and other remotes, are listed folder by folder in the same
order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

from fsspec import get_filesystem_class

from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.linux import filesystem_of, is_network_filesystem
from cachestream.listing.names import Page
from cachestream.listing.patterns import (
    MAGIC,
    expand_braces,
    extension_of,
    folder_filter,
    local_path,
    name_filter,
    split_wildcard,
    tell_of_dots,
    visible,
)
from cachestream.transport import metering
from cachestream.transport.driver import Caller, result_of
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

PAGE_TIMEOUT_S: Final = 300.0  # with the driver's own attempts
PAGE_NAMES: Final = 1000  # as many as S3 gives
FIRST_OF_DISKS: Final = 1_000_000  # a disk of this machine lists so many in 2 to 3 s
FIRST_OF_OTHERS: Final = 1000
MOST_FOLLOWING: Final = 16
_ENTRIES_PER_HEARTBEAT: Final = 8192
_CACHE_FILES: Final = frozenset({"cache.json", "catalogue.sqlite"})


def open_pages(remote: Remote, urls: Sequence[str], recursive: bool) -> S3Listing | Walk | None:
    """Return the listing of `urls` if these are one folder or wildcard; None: they are listed at once."""
    if len(urls) != 1 or "::" in urls[0] or remote.is_web or remote.has_versions:
        return None
    (url,) = urls
    if remote.is_local:
        path = local_path(url)
        return Walk(remote, path.rstrip("/") + "/") if recursive and os.path.isdir(path) else None
    path = str(get_filesystem_class(remote.protocol)._strip_protocol(url))
    root, pattern = split_wildcard(path)
    is_file = not pattern and extension_of(url)  # most likely
    if is_file or not root.strip("/") or expand_braces(url) != [url]:
        return None
    # The name of a file may contain the signs of a wildcard.
    if remote.is_s3:
        listing = S3Listing(remote, root, pattern, recursive)
        return None if pattern and listing.holds(pattern) else listing
    if not (pattern or recursive) or (pattern and "/" not in pattern):
        return None
    with map_errors(redact(url), secrets=remote.secrets):
        return None if pattern and remote.open_for_listing()[0].isfile(path) else Walk(remote, root, pattern)


# --- S3 ----------------------------------------------------------------------------------------


class UnorderedError(SourceError):
    """The store lists files in no order: the names after a given one cannot be requested."""


@dataclass(frozen=True, slots=True)
class S3Listing:
    """The files of a folder or of a wildcard on S3, a page at a time, from any name on.

    All paths begin with `root` ("bucket/folder/"). `pattern` is a wildcard below it, or "" for all files that
    are not hidden; of these, `recursive` includes those in folders. Picklable.
    """

    remote: Remote
    root: str
    pattern: str = ""
    recursive: bool = True

    @property
    def _prefix(self) -> str:
        return self.root + MAGIC.split(self.pattern, maxsplit=1)[0]

    @property
    def _is_flat(self) -> bool:
        """True if all files lie in one folder."""
        return "/" not in self.pattern and self.pattern != "**" if self.pattern else not self.recursive

    def num_first_names(self) -> int:
        """Return the number of names to list before the first sample. With 1, a single page is listed."""
        return 1

    def after(self, last: str, page_names: int = PAGE_NAMES) -> Iterator[Page]:
        """Yield the pages of names after `last`, "" for all.

        Raises the errors of `map_errors`, and UnorderedError for a store that lists out of order.
        """
        for names, is_last in self._pages(last, page_names):
            if any(b <= a for a, b in zip([last, *names], names, strict=False)):
                raise UnorderedError(
                    f"{self._shown}: this store does not list by name; "
                    "give first_names=None to list all before"
                )
            last = names[-1] if names else last
            yield Page(self.matching(names), is_last)

    def names(self) -> list[str]:
        """Return the names of all objects below the prefix, as the store orders them."""
        return [name for names, _ in self._pages("", PAGE_NAMES) for name in names]

    def first_names(self) -> list[str]:
        """Return the names of the first page of objects below the prefix."""
        return next(self._pages("", PAGE_NAMES))[0]

    def _pages(self, last: str, page_names: int) -> Iterator[tuple[list[str], bool]]:
        """Yield the names of the objects after `last`, page by page; True with the last page."""
        start, cut = (self.root + last) if last else "", len(self.root.partition("/")[2])
        for answer in self._answers(self._prefix, "/" if self._is_flat else "", start, page_names):
            keys = [str(entry["Key"]) for entry in answer.get("Contents", ())]
            # An object may have the name of the folder itself.
            yield [key[cut:] for key in keys if len(key) > cut], not answer.get("IsTruncated")

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
            is_hidden = () if self.pattern else f"{parent}."
            found += [one for one in folders if may_match(one) and not one.startswith(is_hidden)]
        return found

    @property
    def _shown(self) -> str:
        return redact(f"{self.remote.protocol}://{self._prefix}")

    def _answers(self, prefix: str, delimiter: str, start: str, names: int) -> Iterator[dict[str, Any]]:
        """Yield the answers of S3 for the paths that begin with `prefix` and come after `start`."""
        filesystem, _ = self.remote.open_for_listing()
        bucket, _, key = prefix.partition("/")
        options = {
            "Bucket": bucket,
            "Prefix": key,
            "Delimiter": delimiter,
            "MaxKeys": names,
            **({"StartAfter": start.partition("/")[2]} if start else {}),
            **filesystem.req_kw,
        }
        while True:
            with map_errors(self._shown, secrets=self.remote.secrets):
                asking = filesystem._call_s3("list_objects_v2", **options)
                answer = result_of(asyncio.run_coroutine_threadsafe(asking, filesystem.loop), PAGE_TIMEOUT_S)
            yield answer
            if not answer.get("IsTruncated"):
                return
            options["ContinuationToken"] = answer["NextContinuationToken"]

    def holds(self, name: str) -> bool:
        """Return whether there is an object with this name below the root."""
        key = (self.root + name).partition("/")[2]
        first = next(self._answers(self.root + name, "", "", 1))
        return any(entry["Key"] == key for entry in first.get("Contents", ()))

    def matching(self, names: list[str]) -> list[str]:
        """Return the names of files that match the wildcard, or that are not hidden in the folder."""
        if self.pattern:
            return name_filter(self.pattern)(names)
        tell_of_dots(self._shown, names)
        return visible("", names, self.recursive)


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
    """A lister of the folders below `root` ("/data/"), without hidden files and folders, and without caches.

    Links to folders are followed unless their target is found by its own path, or is a folder above the link.
    This depends on the target alone, so that a listing can be resumed anywhere.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._real = os.path.realpath(root).rstrip("/") + "/"

    def __call__(self, folder: str, _following: Sequence[str] = ()) -> Folder:
        """Return the contents of `folder`, in no order. Raises OSError."""
        files, subfolders, hidden = list[str](), list[str](), list[str]()
        try:
            with os.scandir((self._root + folder).rstrip("/") or "/") as entries:
                for number, entry in enumerate(entries):
                    if not number % _ENTRIES_PER_HEARTBEAT:
                        metering.fetched(0)
                    if entry.name.startswith("."):
                        hidden.append(entry.name)
                        continue
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
        tell_of_dots(self._root + folder, hidden)
        if folder and "shards" in subfolders and _CACHE_FILES.issubset(files):
            return Folder([], [])
        return Folder(files, subfolders)

    def _is_followed(self, folder: str, link: str) -> bool:
        target = os.path.realpath(link).rstrip("/") + "/"
        if target.startswith(self._real) and "/." not in target[len(self._real) - 1 :]:
            return False
        return not any(above.startswith(target) for above in real_paths(self._root, folder))


def real_paths(root: str, folder: str) -> Iterator[str]:
    """Yield the real paths of `root`, of the folders on the way to `folder` below it, and of `folder`."""
    for end in (0, *(end for end, letter in enumerate(folder, 1) if letter == "/")):
        yield os.path.realpath(root + folder[:end]).rstrip("/") + "/"


class GoneError(SourceUnavailableError):
    """The root is empty or missing, such as a mount point where nothing is mounted."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The files of a tree, in the order of their paths, a folder at a time, from any name on.

    All paths begin with `root` ("/data/train/"). `pattern` is a wildcard below it, or "" for all files that
    are not hidden. Picklable.
    """

    remote: Remote
    root: str
    pattern: str = ""

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

    def folders_in(self, parent: str) -> list[str]:
        """Return the folders ("a/b/") directly in `parent` ("a/"; "" for the root) whose files may match."""
        with closing(_FolderLister(self)) as lister:
            return [f"{parent}{name}/" for name in lister.for_folder(parent).subfolders]

    @property
    def shown(self) -> str:
        return redact(self.root if self.remote.is_local else f"{self.remote.protocol}://{self.root}")


class _FolderLister:
    """A lister of one folder after another; asynchronous drivers list the following ones in the meantime."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._may_match = folder_filter(walk.pattern)
        self._ahead: dict[str, concurrent.futures.Future[Any]] = {}
        self._local = LocalFolders(walk.root) if walk.remote.is_local else None
        self._filesystem: Any = None if walk.remote.is_local else walk.remote.open_for_listing()[0]

    def for_folder(self, folder: str, following: Sequence[str] = ()) -> Folder:
        """Return the contents of `folder`, without the folders that hold no files that match."""
        with map_errors(self._walk.shown + folder, secrets=self._walk.remote.secrets):
            if self._local is not None:
                found = self._local(folder, following)
            else:
                found = self._of_driver(folder, following)
        if not folder and not (found.files or found.subfolders):
            raise GoneError(
                f"{self._walk.shown}: there is nothing here at present; is it mounted, and the path right?"
            )
        if not found.is_there:
            self.for_folder("")  # an error if all is gone
        subfolders = [name for name in found.subfolders if self._may_match(f"{folder}{name}/")]
        return found._replace(subfolders=subfolders)

    def _of_driver(self, folder: str, following: Sequence[str]) -> Folder:
        path = (self._walk.root + folder).rstrip("/")
        try:
            entries = self._answer(folder, path, following)
        except (FileNotFoundError, NotADirectoryError):
            return Folder([], [], is_there=False)
        except EOFError as error:  # raised by ftplib when the server hangs up
            raise ConnectionError(f"the connection was closed {error}") from error
        finally:
            if (kept := getattr(self._filesystem, "dircache", None)) is not None:
                kept.clear()  # 2 kB for each file; `invalidate_cache` would forget more than listings
        files, subfolders, hidden = set[str](), set[str](), list[str]()
        for entry in entries:
            full = str(entry["name"])
            name = full.rstrip("/").rpartition("/")[2]
            if full.rstrip("/").lstrip("/") == path.lstrip("/"):
                continue  # object stores list placeholder files for folders
            if not self._walk.pattern and name.startswith("."):
                hidden.append(name)
            elif entry["type"] == "directory":
                subfolders.add(name)
            elif not full.endswith("/"):
                files.add(name)
        tell_of_dots(self._walk.shown + folder, hidden)
        return Folder(list(files), list(subfolders))

    def _answer(self, folder: str, path: str, following: Sequence[str]) -> list[dict[str, Any]]:
        filesystem = self._filesystem
        if not filesystem.async_impl:  # such drivers are not thread-safe
            return Caller().run(lambda: list(filesystem.ls(path, detail=True)), PAGE_TIMEOUT_S)
        for one in (folder, *following):
            if one not in self._ahead:
                asked = filesystem._ls((self._walk.root + one).rstrip("/"), detail=True)
                self._ahead[one] = asyncio.run_coroutine_threadsafe(asked, filesystem.loop)
        found: list[dict[str, Any]] = result_of(self._ahead.pop(folder), PAGE_TIMEOUT_S)
        return found

    def close(self) -> None:
        for future in self._ahead.values():
            future.cancel()
