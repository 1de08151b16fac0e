"""The files that a source reads, listed once: where each lies, its key, and how it is shown in messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from cachestream.errors import ConfigError, SourceError
from cachestream.remote.filesystem import Remote
from cachestream.remote.labels import Labels, LabelsBuilder
from cachestream.remote.listing import list_files
from cachestream.remote.manifest import Manifest, first_url, path_of
from cachestream.remote.names import Names, NamesBuilder
from cachestream.remote.retry import redact

__all__ = ["FileList", "Url", "check_unit"]

Url = str | os.PathLike[str]


def check_unit(source: object, unit: int, num_units: int | None) -> None:
    """Raise SourceError unless `unit` is one of `num_units` (None: endless)."""
    if unit < 0 or (num_units is not None and unit >= num_units):
        last = "" if num_units is None else f" to {num_units - 1:,}"
        raise SourceError(f"{source!r} has no unit {unit}: its units are numbered from 0{last}")


class FileList:
    """The files of a folder, a wildcard, a `{000..127}` range, or a list of these, in order; or of a Manifest.

    `owner` is who asks, for messages. `extensions` keeps only files that end so; of folders and
    wildcards `preferred` endings do, where there are any. Picklable, small, thread-safe.

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
    ) -> None:
        wanted = _as_extensions(extensions)
        self.labels: Labels | None = None
        if isinstance(urls, Manifest):
            if urls.label is not None and not labelled:
                raise ConfigError(f"{owner} has labels of its own; leave out label= of the manifest")
            self.shown = urls.shown
            self.remote = Remote(first_url(urls, storage_options), storage_options)
            self._root, self.names, self.labels = self._read(urls, storage_options, wanted)
            self.identity = (*urls.identity, *_narrowed(wanted, True))
        else:
            patterns = _as_list(urls, owner)
            self.remote = Remote(patterns[0], storage_options)
            more = f" and {len(patterns) - 1:,} more" if len(patterns) > 1 else ""
            self.shown = redact(patterns[0]) + more
            self._root, paths = self._list(patterns, wanted, preferred, recursive)
            length = len(self._root)
            self.names = Names(path[length:] for path in paths)
            self.identity = _identity(self.remote, patterns, wanted, recursive)
        scheme = "" if self.remote.is_local or "://" in self._root else f"{self.remote.protocol}://"
        self._shown_root = redact(scheme + self._root)
        self.digest = self.names.digest + ("" if self.labels is None else self.labels.digest)

    def _read(
        self, manifest: Manifest, storage_options: Mapping[str, Any] | None, wanted: tuple[str, ...]
    ) -> tuple[str, Names, Labels | None]:
        """The common root of what a manifest lists, and the names below it; the labels, if it has any."""
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
        self, patterns: Sequence[str], wanted: tuple[str, ...], preferred: tuple[str, ...], recursive: bool
    ) -> tuple[str, list[str]]:
        listing = list_files(self.remote, patterns, recursive)
        paths = listing.paths
        if not paths:
            raise SourceError(f"{self.shown}: no files found; check the path or the pattern")
        if wanted:
            paths = [path for path in paths if redact(path).lower().endswith(wanted)]
            if not paths:
                raise SourceError(
                    f"{self.shown}: none of {len(listing.paths):,} files ends in {', '.join(wanted)}; check extensions="
                )
        elif preferred:
            paths = [path for path in paths if redact(path).lower().endswith(preferred)] or paths
        return listing.root, paths

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Where file `index` lies, for the driver; may hold secrets."""
        return self._root + self.names[index]

    def key(self, index: int) -> str:
        """The path of file `index` below the common root of all, without a query."""
        name = self.names[index]
        if self.remote.is_web:
            name = name.partition("?")[0]
        if "?" in name or "://" in name:
            name = redact(name)
        return name if name.isascii() else os.fsencode(name).decode("utf-8", "replace")

    def where(self, index: int) -> str:
        """File `index` as messages show it."""
        return self._shown_root + self.key(index)


def _as_list(urls: Url | Iterable[Url], owner: str) -> list[str]:
    given: list[Any] = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    if not given or not all(isinstance(url, str | os.PathLike) and os.fspath(url) for url in given):
        raise ConfigError(f"{owner} takes a path or URL, or a list of at least one of them")
    return [os.fspath(url) for url in given]


def _as_extensions(extensions: str | Iterable[str] | None) -> tuple[str, ...]:
    if extensions is None:
        return ()
    given: list[Any] = [extensions] if isinstance(extensions, str) else list(extensions)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"extensions={extensions!r}: give endings such as ['.jpg', '.png']")
    return tuple(sorted({f".{one.lstrip('.').lower()}" for one in given}))


def _identity(
    remote: Remote, patterns: Sequence[str], wanted: tuple[str, ...], recursive: bool
) -> tuple[str, ...]:
    """What names the files in a fingerprint: the URLs without their secrets, and what is left out."""
    where = [os.path.abspath(os.path.expanduser(url)) if remote.is_local and "://" not in url else redact(url)
             for url in patterns]  # fmt: skip
    parts = [where[0]]
    if len(where) > 1:
        text = chr(0).join(where).encode("utf-8", "surrogateescape")
        parts.append(f"{len(where)} urls {xxhash.xxh3_64_hexdigest(text)}")
    return (*parts, *_narrowed(wanted, recursive))


def _narrowed(wanted: tuple[str, ...], recursive: bool) -> tuple[str, ...]:
    """What names, in a fingerprint, the files that are left out."""
    parts = [f"extensions={','.join(wanted)}"] if wanted else []
    return (*parts, *(() if recursive else ("flat",)))
