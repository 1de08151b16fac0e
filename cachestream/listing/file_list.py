"""The files that a source reads, listed once: their paths, their keys, and their names in messages."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import xxhash

from cachestream.config import check_count, whole_number
from cachestream.errors import ConfigError, SourceError
from cachestream.listing.manifest import Labels, LabelsBuilder, Manifest, first_url, path_of
from cachestream.listing.names import AnyNames, Names, NamesBuilder
from cachestream.listing.pages import PAGE_NAMES, Page, Pages, UnorderedError, open_pages
from cachestream.listing.patterns import extension_of, kind_of, list_files
from cachestream.listing.walk import GoneError, Walk, open_walk
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import public_name, redact

Url = str | os.PathLike[str]
FirstNames = int | Literal["auto"] | None

_SAMPLED_NAMES: Final = 10_000
_completion_lock = threading.Lock()


def whole_units(num_units: Any, owner: str = "") -> int | None:
    """Return the number of units as an int, or None for an endless source.

    Raises ConfigError for anything but None and whole numbers from 1 on.
    """
    if num_units is None:
        return None
    count = whole_number(num_units)
    if count is None or count < 1:
        raise ConfigError(
            f"{owner and f'{owner}: '}num_units={num_units!r}: must be a whole number, 1 or more (without units "
            "there is nothing to read), or None for an endless source"
        )
    return count


def check_unit(source: object, unit: int, num_units: int | None) -> None:
    """Raise SourceError unless `unit` is one of `num_units` (None: endless)."""
    if unit < 0 or (num_units is not None and unit >= num_units):
        last = "" if num_units is None else f" to {num_units - 1:,}"
        raise SourceError(f"{source!r} has no unit {unit}: its units are numbered from 0{last}")


class FileList:
    """The files of a folder, a wildcard, a `{000..127}` range, a list of these, or a Manifest, in order.

    `owner` is the caller's name in messages. `extensions` keeps the files with these endings. Of folders and
    wildcards, only the files with the `preferred` endings are kept if there are any. Picklable, small,
    thread-safe.

    `first_names`: the number of names to list at first where files are listed page by page ("auto": as many
    as take little time there). If there are more, the list `is_open`: `more` lists the rest, possibly in
    another process, and the first access to any of it lists all of it here.

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
        self._wanted = wanted = _as_extensions(extensions)
        self._kind = ""
        # Names were found in folders or by wildcards, without extensions= to choose among them.
        self.is_searched = False
        self._pages: Pages | Walk | None = None
        self._names: AnyNames
        self._secret_names: Names | None = None
        self.labels: Labels | None = None
        if isinstance(urls, Manifest):
            if urls.label is not None and not labelled:
                raise ConfigError(f"{owner} has labels of its own; leave out label= of the manifest")
            self.shown = urls.shown
            self.remote = Remote(first_url(urls, storage_options), storage_options)
            self._root, self._names, self.labels = self._read_manifest(urls, storage_options, wanted)
            self.identity = (*urls.identity, *_filters(wanted, True))
        else:
            patterns = _as_list(urls, owner)
            self.is_searched = extensions is None and not all(map(_is_a_file, patterns))
            self.remote = Remote(patterns[0], storage_options)
            more = f" and {len(patterns) - 1:,} more" if len(patterns) > 1 else ""
            self.shown = redact(patterns[0]) + more
            self._root, self._names = self._list(patterns, preferred, recursive, first_names)
            self.identity = _identity(self.remote, patterns, wanted, recursive)
        if self.remote.is_web and any("?" in name or "@" in name for name in self._names):
            self._secret_names = Names(self._names)
            self._names = Names(map(public_name, self._names))
        scheme = "" if self.remote.is_local or "://" in self._root else f"{self.remote.protocol}://"
        self._shown_root = redact(scheme + self._root)

    @property
    def digest(self) -> str:
        """A digest of all files in their order, and of their labels."""
        return self.names.digest + ("" if self.labels is None else self.labels.digest)

    @property
    def names(self) -> AnyNames:
        """All names below the root. An open list is completed first."""
        self.complete()
        return self._names

    @property
    def is_open(self) -> bool:
        """True while only the first names are known."""
        return self._pages is not None

    @property
    def first(self) -> AnyNames:
        """The names known so far."""
        return self._names

    def more(self, last: str) -> Iterator[Page]:
        """Yield the names of an open list that come after the name `last`, page by page."""
        assert self._pages is not None
        for page in self._pages.after(last):
            yield Page(self._filtered(page.names), page.is_last)

    def over(self, names: AnyNames) -> FileList:
        """Return the same files with `names` as their listing, which another process has made."""
        made = copy.copy(self)
        made._names, made._pages = names, None
        return made

    def folders(self, accepts: Callable[[str], bool]) -> frozenset[str]:
        """Return the names of the folders that hold files for whose keys `accepts` is true; "" for the root.

        Of an open list, which stays open, these are the folders of the known files, and those beside the
        folder of the uppermost known file that have not been listed yet, whatever they hold. Others, such as
        deeper ones, are not found.
        """
        found = set[str]()
        for name in self._names:
            if (folder := name.rpartition("/")[0]) not in found and accepts(self._key_of(name)):
                found.add(folder)
        if self._pages is not None:
            uppermost, last = min(found, key=lambda one: (one.count("/"), one), default=""), self._names[-1]
            beside = self._pages.folders_in(uppermost[: uppermost.rfind("/") + 1])
            found |= {folder[:-1] for folder in beside if folder > last or last.startswith(folder)}
        return frozenset(folder.rpartition("/")[2] for folder in found)

    def complete(self) -> None:
        """List the rest of an open list."""
        if not self.is_open:
            return
        with _completion_lock:
            if self._pages is None:
                return  # another thread was first
            names = NamesBuilder()
            for name in self._names:
                names.add(name)
            for page in self.more(self._names[-1]):
                for name in page.names:
                    names.add(name)
            self._names, self._pages = names.names(), None

    def some_extensions(self) -> Iterator[str]:
        """Return the extensions of the known names, or of an even sample of them if there are many."""
        names = self._names
        return (
            extension_of(self._key_of(names[i]))
            for i in range(0, len(names), max(1, len(names) // _SAMPLED_NAMES))
        )

    def keep_only(self, kind: str) -> tuple[int, str]:
        """Leave out files that are not decoded as `kind`, among the names to come as well.

        Return the number of known files left out, and the key of the first of them.
        """
        self._kind = kind
        known = list(self._names)
        kept = self._filtered(known)
        if len(kept) == len(known):
            return 0, ""
        self._names, among = Names(kept), set(kept)
        return len(known) - len(kept), self._key_of(next(name for name in known if name not in among))

    def _filtered(self, names: list[str]) -> list[str]:
        if self._wanted:
            return [name for name in names if redact(name).lower().endswith(self._wanted)]
        if self._kind:
            return [name for name in names if kind_of(extension_of(self._key_of(name))) == self._kind]
        return names

    def _read_manifest(
        self, manifest: Manifest, storage_options: Mapping[str, Any] | None, wanted: tuple[str, ...]
    ) -> tuple[str, Names, Labels | None]:
        """Return the common root of the files in a manifest, their names below it, and their labels."""
        path, names, labels = path_of(self.remote), NamesBuilder(), LabelsBuilder()
        for url, label in manifest.rows(storage_options):
            if not wanted or redact(url).lower().endswith(wanted):
                names.add(path(url))
                if manifest.label is not None:
                    labels.add(label)
        if not len(names):
            raise SourceError(
                f"{self.shown}: no file of the manifest ends in {', '.join(wanted)}; check extensions="
            )
        root = "" if names.folder.endswith("://") else names.folder  # not up to a URL's scheme alone
        return root, names.names(root), None if manifest.label is None else labels.labels()

    def _list(
        self, patterns: Sequence[str], preferred: tuple[str, ...], recursive: bool, first_names: FirstNames
    ) -> tuple[str, Names]:
        if first_names is not None:
            pages = open_pages(self.remote, patterns, recursive) or open_walk(
                self.remote, patterns, recursive
            )
            if pages is not None and (found := self._first_pages(pages, first_names)) is not None:
                return pages.root, found
        listing = list_files(self.remote, patterns, recursive)
        paths, wanted = listing.paths, self._wanted
        if wanted:
            paths = [path for path in paths if redact(path).lower().endswith(wanted)]
            if not paths:
                raise SourceError(
                    f"{self.shown}: none of {len(listing.paths):,} files ends in {', '.join(wanted)}; "
                    "check extensions="
                )
        elif preferred:
            paths = [path for path in paths if redact(path).lower().endswith(preferred)] or paths
        length = len(listing.root)
        return listing.root, Names(path[length:] for path in paths)

    def _first_pages(self, pages: Pages | Walk, first_names: int | Literal["auto"]) -> Names | None:
        """Return the first names and leave the list open; all names if these are few; None without names."""
        wanted, page_names = pages.usual_first, PAGE_NAMES
        if first_names != "auto":
            wanted, page_names = first_names, min(PAGE_NAMES, first_names)
        found: list[str] = []
        try:
            for page in pages.after("", page_names):
                found += self._filtered(page.names)
                if not page.is_last and len(found) >= wanted:
                    self._pages = pages
                    break
        except (UnorderedError, GoneError):
            return None
        return Names(found) if found else None

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of file `index` below the root, without the secrets of its URL."""
        return self._names[index] if index < len(self._names) else self.names[index]

    def path(self, index: int) -> str:
        """Return the path of file `index` for the driver; may hold secrets."""
        return self._root + (self.name(index) if self._secret_names is None else self._secret_names[index])

    def key(self, index: int) -> str:
        """Return the path of file `index` below the common root of all, without a query."""
        return self._key_of(self.name(index))

    def _key_of(self, name: str) -> str:
        if self.remote.is_web:
            name = name.partition("?")[0]
        if "?" in name or "://" in name:
            name = redact(name)
        return name if name.isascii() else os.fsencode(name).decode("utf-8", "replace")

    def where(self, index: int) -> str:
        """Return the path of file `index` as shown in messages."""
        return self._shown_root + self.key(index)


def folder_of(name: str) -> str:
    """Return the name of the folder that holds the file `name`; "" for the root."""
    return name.rpartition("/")[0].rpartition("/")[2]


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
