"""The files that URLs stand for, listed at once or page by page: their paths, keys, and names in messages."""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Literal

import xxhash

from cachestream import tracing
from cachestream.config import check_count
from cachestream.errors import ConfigError, SourceError
from cachestream.listing.find import expanded, find, find_files
from cachestream.listing.manifest import Labels, Manifest, read_manifest, start_of
from cachestream.listing.names import Names, Page
from cachestream.listing.pages import PAGE_NAMES, GoneError, S3Listing, UnorderedError, Walk
from cachestream.listing.patterns import (
    MAGIC,
    absolute,
    extension_of,
    kind_of,
    parent_of,
)
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import public_name, redact

Url = str | os.PathLike[str]
FirstNames = int | Literal["auto"] | None

_SAMPLED_NAMES: Final = 10_000
_completion_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a list: `names` below `root`, and the `labels` of a manifest.

    The names come in one of four ways. They are all if `rest` is None; otherwise `rest` lists the next ones:

        all at once ─────────────┐             find_files: several URLs, ranges, or first_names=None
        from a manifest ─────────┤
                                 ├──▶ closed   rest is None
        by another process ──────┤                 ▲          over(names): as far as it has listed them
                                 │                 │
        the first pages ─────────┴──▶ open ────────┘          complete(): rest lists what comes after them
    """

    root: str = field(repr=False)  # may hold a password
    names: Names
    rest: S3Listing | Walk | None = None
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
        self._is_kept: Callable[[str], bool] | None = None
        self.in_folders = False  # names were found in folders or by wildcards
        self.is_searched = False  # the same, without extensions= to choose among them
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
            self.in_folders = not all(map(_is_a_file, patterns))
            self.is_searched = extensions is None and self.in_folders
            self.remote = Remote(patterns[0], storage_options)
            more = f" and {len(patterns) - 1:,} more" if len(patterns) > 1 else ""
            self.shown = redact(patterns[0]) + more
            with tracing.span("list"):
                first = None if first_names is None else self._first_pages(patterns, recursive, first_names)
                self._listing = first or self._list_all(patterns, preferred, recursive)
            self.identity = _identity(patterns, self._wanted, recursive)
        self._secret_names: Names | None = None
        if self.remote.has_queries and any("?" in name or "@" in name for name in self.names):
            self._secret_names = self.names
            self._listing = replace(self._listing, names=Names(map(public_name, self.names)))
        self.shown_root = self.remote.shown(self._listing.root)

    @classmethod
    def of_one(cls, url: str, storage_options: Mapping[str, Any] | None) -> FileList:
        """Return the list of what lies at `url`, a file or a folder that is read as one; nothing is looked
        up.
        """
        made = cls.__new__(cls)
        made._wanted, made._is_kept, made._secret_names = (), None, None
        made.in_folders = made.is_searched = False
        made.shown, made.remote = redact(url), Remote(url, storage_options)
        root = parent_of(url)
        made._listing, made.shown_root = Listing(root, Names([url[len(root) :]])), redact(root)
        made.identity = _identity([url], (), True)
        return made

    def _list_all(self, patterns: Sequence[str], preferred: tuple[str, ...], recursive: bool) -> Listing:
        root, all_paths = find_files(self.remote, patterns, recursive)
        paths = _ending_in(all_paths, self._wanted or (preferred if self.is_searched else ()))
        if self._wanted and not paths:
            raise SourceError(
                f"{self.shown}: none of {len(all_paths):,} files ends in {', '.join(self._wanted)}; "
                "check extensions="
            )
        return Listing(root, Names(path[len(root) :] for path in paths or all_paths))

    def _first_pages(
        self, urls: Sequence[str], recursive: bool, first_names: int | Literal["auto"]
    ) -> Listing | None:
        """Return the first names of one folder or wildcard, or all if these are few; None without names."""
        is_one = len(urls) == 1 and "::" not in urls[0] and expanded(self.remote, urls[0]) == [urls[0]]
        rest = find(self.remote, urls[0], recursive)[0] if is_one and not self.remote.is_web else None
        if rest is None:
            return None
        wanted, page_names = rest.num_first_names(), PAGE_NAMES
        if first_names != "auto":
            wanted, page_names = first_names, min(PAGE_NAMES, first_names)
        found: list[str] = []
        try:
            for page in rest.after("", page_names):
                found += self._filtered(page.names)
                if page.is_last or len(found) >= wanted:
                    break
        except (UnorderedError, GoneError):
            return None
        return Listing(rest.root, Names(found), None if page.is_last else rest) if found else None

    def _filtered(self, names: list[str]) -> list[str]:
        found = _ending_in(names, self._wanted)
        keep = self._is_kept
        return found if keep is None else [name for name in found if keep(self.key_of(name))]

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
        made._listing, made._secret_names = replace(self._listing, names=names, rest=None), None
        return made

    def complete(self) -> None:
        """List the rest of an open list."""
        with _completion_lock:
            if not self.is_open:
                return
            rest = chain.from_iterable(page.names for page in self.more(self.names[-1]))
            self._listing = replace(self._listing, names=Names(chain(self.names, rest)), rest=None)

    def folders_ahead(self, parent: str) -> set[str]:
        """Return the folders in `parent` ("a/"; the root: "") that an open list has not listed to the end."""
        last, rest = self.names[-1], self._listing.rest
        beside = [] if rest is None else rest.folders_in(parent)
        return {folder[:-1] for folder in beside if folder > last or last.startswith(folder)}

    def kinds(self) -> Counter[str]:
        """Count the kinds of the known files, or of an even sample of them if there are many."""
        sampled = range(0, len(self), max(1, len(self) // _SAMPLED_NAMES))
        return Counter(kind_of(extension_of(self.key(index))) for index in sampled)

    def keep_only(self, keep: Callable[[str], bool]) -> list[str]:
        """Leave out files whose keys `keep` refuses, among the names to come as well.

        Return the keys of the known files that are left out.
        """
        self._is_kept = keep
        known = list(self.names)
        kept = self._filtered(known)
        if len(kept) == len(known):
            return []
        among = set(kept)
        if self._secret_names is not None:
            pairs = zip(self._secret_names, known, strict=True)
            self._secret_names = Names(secret for secret, name in pairs if name in among)
        self._listing = replace(self._listing, names=Names(kept))
        return [self.key_of(name) for name in known if name not in among]

    # --- one file

    def path(self, index: int) -> str:
        """Return the path of file `index` for the driver; may hold secrets."""
        return self._listing.root + (self._secret_names or self.names)[index]

    def key(self, index: int) -> str:
        """Return the path of file `index` below the common root of all, without a query."""
        return self.key_of(self.names[index])

    def key_of(self, name: str) -> str:
        """Return the key of the file with this name below the root."""
        if self.remote.has_queries:
            name = name.partition("?")[0]
        if "?" in name or "://" in name:
            name = redact(name)
        return name if name.isascii() else os.fsencode(name).decode("utf-8", "replace")

    def where(self, index: int) -> str:
        """Return the path of file `index` as shown in messages."""
        return self.shown_root + self.key(index)

    def folders(self) -> set[str]:
        """Return the folders of the known files, as paths for the driver that end in "/"."""
        root = self._listing.root
        return {root + name[: name.rfind("/") + 1] for name in self.names}


def _ending_in(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """Return the `names` with one of these endings; without endings, all."""
    return [name for name in names if redact(name).lower().endswith(endings)] if endings else names


def _is_a_file(url: str) -> bool:
    """Return whether a URL looks like that of files: with an extension, and without a wildcard."""
    name = redact(url)
    return bool(extension_of(name)) and not MAGIC.search(name)


def _as_items(given: Any) -> list[Any]:
    """Return the items of an iterable; a text, a path or anything else as the only one."""
    is_one = isinstance(given, str | os.PathLike) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def _as_list(urls: Url | Iterable[Url], owner: str) -> list[str]:
    given = _as_items(urls)
    if not given or not all(isinstance(url, str | os.PathLike) and os.fspath(url) for url in given):
        raise ConfigError(f"{owner} takes a path or URL, or a list of at least one of them")
    return [os.fspath(url) for url in given]


def _as_extensions(extensions: str | Iterable[str] | None) -> tuple[str, ...]:
    if extensions is None or extensions == "*":
        return ()
    given = _as_items(extensions)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"extensions={extensions!r}: give endings such as ['.jpg', '.png']")
    return tuple(sorted({f".{one.lstrip('.').lower()}" for one in given}))


def _identity(patterns: Sequence[str], wanted: tuple[str, ...], recursive: bool) -> tuple[str, ...]:
    """Return the parts of a fingerprint that name the files: the URLs without secrets, and the filters."""
    where = [redact(absolute(url)) for url in patterns]
    parts = [where[0]]
    if len(where) > 1:
        text = chr(0).join(where).encode("utf-8", "surrogateescape")
        parts.append(f"{len(where)} urls {xxhash.xxh3_64_hexdigest(text)}")
    return (*parts, *_filters(wanted, recursive))


def _filters(wanted: tuple[str, ...], recursive: bool) -> tuple[str, ...]:
    """Return the parts of a fingerprint that name the filters."""
    parts = [f"extensions={','.join(wanted)}"] if wanted else []
    return (*parts, *(() if recursive else ("flat",)))
