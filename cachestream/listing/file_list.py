"""The files that URLs stand for, listed at once or page by page: their paths, keys, and names in messages."""

from __future__ import annotations

import copy
import glob
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import xxhash
from fsspec.utils import get_protocol, glob_translate

from cachestream.config import check_count
from cachestream.errors import ConfigError, SourceError
from cachestream.listing.manifest import Labels, Manifest, read_manifest, start_of
from cachestream.listing.names import Names, NamesBuilder
from cachestream.listing.pages import PAGE_NAMES, Page, Pages, UnorderedError, open_pages
from cachestream.listing.patterns import (
    MAGIC,
    WEB_MAGIC,
    common_root,
    expand_braces,
    extension_of,
    kind_of,
    local_path,
    parent_of,
    visible,
)
from cachestream.listing.walk import GoneError, LocalFolders, Walk, in_order, open_walk
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, public_name, redact

Url = str | os.PathLike[str]
FirstNames = int | Literal["auto"] | None

_SAMPLED_NAMES: Final = 10_000
_completion_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a list: `names` below `root`, and the `labels` of a manifest.

    There are four ways to come by the names, and `rest` tells whether they are all:

        all at once ─────────────┐             list_files: several URLs, ranges, or first_names=None
        from a manifest ─────────┤
                                 ├──▶ closed   rest is None
        by another process ──────┤                 ▲          over(names): as far as it has listed them
                                 │                 │
        the first pages ─────────┴──▶ open ────────┘          complete(): rest lists what comes after them
    """

    root: str = field(repr=False)  # may hold a password
    names: Names
    rest: Pages | Walk | None = None
    labels: Labels | None = None


class FileList:
    """The files of a folder, a wildcard, a `{000..127}` range, a list of these, or a Manifest, in order.

    `owner` is the caller's name in messages. `extensions` keeps the files with these endings. Of folders and
    wildcards, only the files with the `preferred` endings are kept if there are any. Picklable, small,
    thread-safe.

    `first_names`: the number of names to list at first where files are listed page by page ("auto": as many
    as take little time there). If there are more, the list `is_open` (see `Listing`): `more` lists the rest,
    possibly in another process, and `complete` lists it here.

    Raises ConfigError for URLs or options that cannot work, SourceError for what is missing, empty
    or forbidden, and SourceUnavailableError for a remote that does not answer.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url],
        storage_options: Mapping[str, Any] | None = None,
        *,
        owner: str,
        extensions: str | Iterable[str] | None = None,
        preferred: tuple[str, ...] = (),
        recursive: bool = True,
        labelled: bool = False,
        first_names: FirstNames = None,
    ) -> None:
        if first_names is not None and first_names != "auto":
            first_names = check_count("first_names", first_names)
        self._wanted = _as_extensions(extensions)
        self._kind = ""
        # Names were found in folders or by wildcards, without extensions= to choose among them.
        self.is_searched = False
        if isinstance(urls, Manifest):
            if urls.label is not None and not labelled:
                raise ConfigError(f"{owner} has labels of its own; leave out label= of the manifest")
            self.shown = urls.shown
            self.remote = Remote(start_of(urls, storage_options), storage_options)
            root, names, labels = read_manifest(urls, self.remote, storage_options, self._wanted)
            self._listing = Listing(root, names, labels=labels)
            self.identity = (*urls.identity, *_filters(self._wanted, True))
        else:
            patterns = _as_list(urls, owner)
            self.is_searched = extensions is None and not all(map(_is_a_file, patterns))
            self.remote = Remote(patterns[0], storage_options)
            more = f" and {len(patterns) - 1:,} more" if len(patterns) > 1 else ""
            self.shown = redact(patterns[0]) + more
            first = None if first_names is None else self._first_pages(patterns, recursive, first_names)
            self._listing = first or self._list_all(patterns, preferred, recursive)
            self.identity = _identity(self.remote, patterns, self._wanted, recursive)
        self._secret_names: Names | None = None
        if self.remote.is_web and any("?" in name or "@" in name for name in self.names):
            self._secret_names = self.names
            self._listing = replace(self._listing, names=Names(map(public_name, self.names)))
        root = self._listing.root
        scheme = "" if self.remote.is_local or "://" in root else f"{self.remote.protocol}://"
        self._shown_root = redact(scheme + root)

    def _list_all(self, patterns: Sequence[str], preferred: tuple[str, ...], recursive: bool) -> Listing:
        root, all_paths = list_files(self.remote, patterns, recursive)
        paths, wanted = all_paths, self._wanted
        if wanted:
            paths = [path for path in paths if redact(path).lower().endswith(wanted)]
            if not paths:
                raise SourceError(
                    f"{self.shown}: none of {len(all_paths):,} files ends in {', '.join(wanted)}; "
                    "check extensions="
                )
        elif preferred:
            paths = [path for path in paths if redact(path).lower().endswith(preferred)] or paths
        return Listing(root, Names(path[len(root) :] for path in paths))

    def _first_pages(
        self, patterns: Sequence[str], recursive: bool, first_names: int | Literal["auto"]
    ) -> Listing | None:
        """Return the first names, or all if these are few; None without names, and where there are no pages."""
        pages = open_pages(self.remote, patterns, recursive) or open_walk(self.remote, patterns, recursive)
        if pages is None:
            return None
        wanted, page_names = pages.usual_first(), PAGE_NAMES
        if first_names != "auto":
            wanted, page_names = first_names, min(PAGE_NAMES, first_names)
        found: list[str] = []
        rest: Pages | Walk | None = None
        try:
            for page in pages.after("", page_names):
                found += self._filtered(page.names)
                if not page.is_last and len(found) >= wanted:
                    rest = pages
                    break
        except (UnorderedError, GoneError):
            return None
        return Listing(pages.root, Names(found), rest) if found else None

    def _filtered(self, names: list[str]) -> list[str]:
        if self._wanted:
            return [name for name in names if redact(name).lower().endswith(self._wanted)]
        if self._kind:
            return [name for name in names if kind_of(extension_of(self.key_of(name))) == self._kind]
        return names

    # --- the names

    @property
    def names(self) -> Names:
        """The names below the root; those known so far while the list is open."""
        return self._listing.names

    @property
    def labels(self) -> Labels | None:
        """The labels that a manifest gives."""
        return self._listing.labels

    @property
    def digest(self) -> str:
        """A digest of the known files in their order, and of their labels."""
        return self.names.digest + ("" if self.labels is None else self.labels.digest)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_open(self) -> bool:
        """True while only the first names are known."""
        return self._listing.rest is not None

    def more(self, last: str) -> Iterator[Page]:
        """Yield the names of an open list that come after the name `last`, page by page."""
        assert self._listing.rest is not None
        for page in self._listing.rest.after(last):
            yield Page(self._filtered(page.names), page.is_last)

    def over(self, names: Names) -> FileList:
        """Return the same files with `names` as their listing, which another process has made."""
        made = copy.copy(self)
        made._listing = replace(self._listing, names=names, rest=None)
        return made

    def complete(self) -> None:
        """List the rest of an open list."""
        with _completion_lock:
            if not self.is_open:
                return
            names = NamesBuilder()
            for name in self.names:
                names.add(name)
            for page in self.more(self.names[-1]):
                for name in page.names:
                    names.add(name)
            self._listing = replace(self._listing, names=names.names(), rest=None)

    def folders_ahead(self, parent: str) -> set[str]:
        """Return the folders in `parent` ("a/", or "" for the root) that an open list has yet to list or end."""
        last, rest = self.names[-1], self._listing.rest
        beside = [] if rest is None else rest.folders_in(parent)
        return {folder[:-1] for folder in beside if folder > last or last.startswith(folder)}

    def kinds(self) -> Counter[str]:
        """Count the kinds of the known files, or of an even sample of them if there are many."""
        sampled = range(0, len(self), max(1, len(self) // _SAMPLED_NAMES))
        return Counter(kind_of(extension_of(self.key(index))) for index in sampled)

    def keep_only(self, kind: str) -> tuple[int, str]:
        """Leave out files that are not decoded as `kind`, among the names to come as well.

        Return the number of known files left out, and the key of the first of them.
        """
        self._kind = kind
        known = list(self.names)
        kept = self._filtered(known)
        if len(kept) == len(known):
            return 0, ""
        among = set(kept)
        if self._secret_names is not None:
            pairs = zip(self._secret_names, known, strict=True)
            self._secret_names = Names(secret for secret, name in pairs if name in among)
        self._listing = replace(self._listing, names=Names(kept))
        return len(known) - len(kept), self.key_of(next(name for name in known if name not in among))

    # --- one file

    def path(self, index: int) -> str:
        """Return the path of file `index` for the driver; may hold secrets."""
        return self._listing.root + (self._secret_names or self.names)[index]

    def key(self, index: int) -> str:
        """Return the path of file `index` below the common root of all, without a query."""
        return self.key_of(self.names[index])

    def key_of(self, name: str) -> str:
        """Return the key of the file with this name below the root."""
        if self.remote.is_web:
            name = name.partition("?")[0]
        if "?" in name or "://" in name:
            name = redact(name)
        return name if name.isascii() else os.fsencode(name).decode("utf-8", "replace")

    def where(self, index: int) -> str:
        """Return the path of file `index` as shown in messages."""
        return self._shown_root + self.key(index)


def _is_a_file(url: str) -> bool:
    """Return whether a URL looks like that of files: with an extension, and without a wildcard."""
    name = redact(url)
    return bool(extension_of(name)) and not any(mark in name for mark in "*?[")


def _as_list(urls: Url | Iterable[Url], owner: str) -> list[str]:
    given: list[Any] = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    if not given or not all(isinstance(url, str | os.PathLike) and os.fspath(url) for url in given):
        raise ConfigError(f"{owner} takes a path or URL, or a list of at least one of them")
    return [os.fspath(url) for url in given]


def _as_extensions(extensions: str | Iterable[str] | None) -> tuple[str, ...]:
    if extensions is None or extensions == "*":
        return ()
    given: list[Any] = [extensions] if isinstance(extensions, str) else list(extensions)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"extensions={extensions!r}: give endings such as ['.jpg', '.png']")
    return tuple(sorted({f".{one.lstrip('.').lower()}" for one in given}))


def _identity(
    remote: Remote, patterns: Sequence[str], wanted: tuple[str, ...], recursive: bool
) -> tuple[str, ...]:
    """Return the parts of a fingerprint that name the files: the URLs without secrets, and the filters."""
    where = [os.path.abspath(os.path.expanduser(url)) if remote.is_local and "://" not in url else redact(url)
             for url in patterns]  # fmt: skip
    parts = [where[0]]
    if len(where) > 1:
        text = chr(0).join(where).encode("utf-8", "surrogateescape")
        parts.append(f"{len(where)} urls {xxhash.xxh3_64_hexdigest(text)}")
    return (*parts, *_filters(wanted, recursive))


def _filters(wanted: tuple[str, ...], recursive: bool) -> tuple[str, ...]:
    """Return the parts of a fingerprint that name the filters."""
    parts = [f"extensions={','.join(wanted)}"] if wanted else []
    return (*parts, *(() if recursive else ("flat",)))


# --- listing at once ---------------------------------------------------------------------------


def list_files(remote: Remote, urls: Sequence[str], recursive: bool = True) -> tuple[str, list[str]]:
    """Return the root of the files that `urls` (of one protocol) name, and their paths, sorted and unique.

    The root ends in "/", or is "". Hidden files in folders are left out.

    Raises SourceError for files and folders that are missing, empty or forbidden, SourceUnavailableError for
    a remote that does not answer, ConfigError for URLs of several protocols.
    """
    for url in urls:
        if get_protocol(url) != remote.protocol:
            raise ConfigError(
                f"{redact(urls[0])} and {redact(url)}: all URLs of one source must have the same scheme"
            )
    # The name of a local file may contain braces.
    expanded = [
        (url, [url] if remote.is_local and os.path.exists(local_path(url)) else expand_braces(url))
        for url in urls
    ]
    find = _find_local if remote.is_local else _RemoteFinder(remote).find
    roots: set[str] = set()
    paths: list[str] = []
    for url, alternatives in expanded:
        known = len(paths)
        for one in alternatives:
            with map_errors(redact(one), secrets=remote.secrets):
                root, found = find(one, recursive, bool(roots))
            roots.add(root)
            paths.extend(found)
        if len(paths) == known:
            raise SourceError(f"{redact(url)}: no files found; check the path or the pattern")
    return common_root(roots), sorted(set(paths))


def _find_local(url: str, recursive: bool, _trusted: bool) -> tuple[str, list[str]]:
    """Return the root and the files of one URL."""
    path = local_path(url)
    if os.path.isdir(path):
        root = path.rstrip("/") + "/"
        folders = LocalFolders(root)
        runs = (names for names, _ in in_order(folders)) if recursive else [folders("").files]
        return root, [root + name for names in runs for name in names]
    if os.path.exists(path):
        return parent_of(path), [path]
    magic = MAGIC.search(path)
    if magic is None:
        raise SourceError(f"{path}: no such file or folder; check the path")
    return parent_of(path[: magic.start()]), list(filter(os.path.isfile, glob.iglob(path, recursive=True)))


class _RemoteFinder:
    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._filesystem, self._first_path = remote.open_for_listing()
        self._magic = WEB_MAGIC if remote.is_web else MAGIC

    def find(self, url: str, recursive: bool, trusted: bool) -> tuple[str, list[str]]:
        """Return the root and the files of one URL; a `trusted` URL of a file is not looked up."""
        path = self._first_path if "::" in url else str(self._filesystem._strip_protocol(url))
        bare = path.partition("?")[0]
        if self._remote.is_web and not self._magic.search(bare):
            # The file is not looked up, as a signed URL may allow GET alone.
            return self._folder(path, recursive) if path.endswith("/") else (parent_of(bare), [path])
        if self._remote.is_s3 and (not bare or MAGIC.search(bare.partition("/")[0])):
            raise SourceError("an S3 URL names one bucket: s3://bucket/…")
        magic = self._magic.search(path)
        if magic is not None:
            found = self._matching(path)
            return parent_of(path if found == [path] else path[: magic.start()]), found
        if trusted and extension_of(path):
            return parent_of(path), [path]
        if url.endswith("/") or not path:
            return self._folder(path, recursive)
        if not extension_of(path) and (below := self._folder(path, recursive))[1] not in ([], [path]):
            return below
        info = self._filesystem.info(path)
        return self._folder(path, recursive) if info["type"] == "directory" else (parent_of(path), [path])

    def _folder(self, path: str, recursive: bool) -> tuple[str, list[str]]:
        root = path.rstrip("/") + "/" if path.strip("/") else ""
        if self._remote.is_s3:  # the `find` of s3fs would keep a record of 2 kB for each file
            found = Pages.of(self._remote, path, recursive).paths()
        else:
            found = self._filesystem.find(path, maxdepth=None if recursive else 1)
        return root, visible(root, found, recursive)

    def _matching(self, pattern: str) -> list[str]:
        """Return the files that match; only the file with the name `pattern` if there is one."""
        if self._remote.is_s3:
            fits = re.compile(glob_translate(pattern)).match
            found = Pages.of(self._remote, pattern, recursive=True).paths()
            return [pattern] if pattern in found else [one for one in found if fits(one) and one[-1:] != "/"]
        if self._filesystem.isfile(pattern):
            return [pattern]
        entries = self._filesystem.glob(pattern, detail=True)
        return [path for path, info in entries.items() if info["type"] != "directory"]
