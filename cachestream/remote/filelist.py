"""The files that a source reads, listed once: where each lies, its key, and how it is shown in messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from cachestream.errors import ConfigError, SourceError
from cachestream.remote.filesystem import Remote
from cachestream.remote.listing import list_files
from cachestream.remote.names import Names
from cachestream.remote.retry import redact

__all__ = ["FileList", "Url", "check_unit"]

Url = str | os.PathLike[str]


def check_unit(source: object, unit: int, num_units: int | None) -> None:
    """Raise SourceError unless `unit` is one of `num_units` (None: endless)."""
    if unit < 0 or (num_units is not None and unit >= num_units):
        last = "" if num_units is None else f" to {num_units - 1:,}"
        raise SourceError(f"{source!r} has no unit {unit}: its units are numbered from 0{last}")


class FileList:
    """The files of a folder, a wildcard, a `{000..127}` range, or a list of these, in order.

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
    ) -> None:
        patterns = _as_list(urls, owner)
        wanted = _as_extensions(extensions)
        self.remote = Remote(patterns[0], storage_options)
        self.shown = redact(patterns[0]) + (f" and {len(patterns) - 1:,} more" if len(patterns) > 1 else "")
        self._root, paths = self._list(patterns, wanted, preferred, recursive)
        length = len(self._root)
        self.names = Names(path[length:] for path in paths)
        scheme = "" if self.remote.is_local or "://" in self._root else f"{self.remote.protocol}://"
        self._shown_root = redact(scheme + self._root)
        self.digest = self.names.digest
        self.identity = _identity(self.remote, patterns, wanted, recursive)

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
    if wanted:
        parts.append(f"extensions={','.join(wanted)}")
    if not recursive:
        parts.append("flat")
    return tuple(parts)
