"""One file, one sample: images, arrays, JSON, text or bytes, wherever fsspec reaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from cachestream.errors import ConfigError, SourceError
from cachestream.remote.decode import decode_fields, extension_of, is_image
from cachestream.remote.fetch import fetch
from cachestream.remote.filesystem import Remote
from cachestream.remote.foreign import foreign_errors
from cachestream.remote.functions import fingerprint_of
from cachestream.remote.listing import list_files
from cachestream.remote.names import Names
from cachestream.remote.retry import map_errors, redact

__all__ = ["FileSource"]

Url = str | os.PathLike[str]


class FileSource:
    """The files of a folder, a wildcard, a `{000..127}` range, or a list of these; a unit is a file.

    A sample is a dict. Images (Pillow) have "image", uint8 `[3, H, W]` RGB; `.npy` "array"; `.npz`
    and objects in `.json` their own fields; text "text" (str); anything else "data" (bytes). The
    key is the path below the common root of all files.

    label: "folder" gives images an int "label", the place of their parent folder's name among all
    such names in order (`label_names`), as torchvision's ImageFolder does; there is none where
    all files lie in the root itself. A function of the key labels every file. None: no labels.

    storage_options go to fsspec's driver and may hold secrets: they are shown nowhere.
    extensions keeps only files that end so (".jpg", "png"); recursive=False keeps to the folder
    itself. Hidden files in folders are left out.

    Files are listed once, here; the source is picklable and small. Raises ConfigError for URLs or
    options that cannot work, SourceError for what is missing, empty or forbidden, and
    SourceUnavailableError for a remote that does not answer.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        storage_options: Mapping[str, Any] | None = None,
        label: str | Callable[[str], Any] | None = "folder",
        extensions: str | Iterable[str] | None = None,
        recursive: bool = True,
    ) -> None:
        patterns = _as_list(urls)
        if not (label is None or label == "folder" or callable(label)):
            raise ConfigError(f"label={label!r}: give 'folder', a function of the path, or None")
        wanted = _as_extensions(extensions)
        self._remote = Remote(patterns[0], storage_options)
        self._label = label
        self._shown = redact(patterns[0]) + (f" and {len(patterns) - 1:,} more" if len(patterns) > 1 else "")
        self._root, self._names = _list(self._remote, patterns, wanted, recursive, self._shown)
        scheme = "" if self._remote.is_local or "://" in self._root else f"{self._remote.protocol}://"
        self._shown_root = redact(scheme + self._root)
        self.listing_digest = self._names.digest
        self.fingerprint = _fingerprint(self._remote, patterns, label, wanted, recursive)
        self.label_names: tuple[str, ...] = ()
        if label == "folder":
            folders = {_folder_of(name) for name in self._names}
            self.label_names = tuple(sorted(folders)) if folders != {""} else ()
        self._label_index = {name: index for index, name in enumerate(self.label_names)}

    @property
    def num_units(self) -> int:
        return len(self._names)

    def key(self, unit: int) -> str:
        """The path of `unit` below the common root, without a query."""
        name = self._names[unit]
        if self._remote.is_web:
            name = name.partition("?")[0]
        if "?" in name or "://" in name:
            name = redact(name)
        return name if name.isascii() else os.fsencode(name).decode("utf-8", "replace")

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the one sample of the file `unit`. Raises as `Source.read` says."""
        key = self.key(unit)
        where = self._shown_root + key
        with map_errors(where, one_of_many=True, secrets=self._remote.secrets):
            data = fetch(self._remote, self._root + self._names[unit])
        extension = extension_of(key)
        sample = decode_fields(data, extension, where)
        if callable(self._label):
            with foreign_errors(f"label({key!r})"):
                sample["label"] = self._label(key)
        elif self.label_names and is_image(extension):
            sample["label"] = self._label_index[_folder_of(self._names[unit])]
        yield key, sample

    def __repr__(self) -> str:
        return f"<FileSource {self._shown}, {self.num_units:,} files>"


def _as_list(urls: Url | Iterable[Url]) -> list[str]:
    given: list[Any] = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    if not given or not all(isinstance(url, str | os.PathLike) and os.fspath(url) for url in given):
        raise ConfigError("FileSource takes a path or URL, or a list of at least one of them")
    return [os.fspath(url) for url in given]


def _as_extensions(extensions: str | Iterable[str] | None) -> tuple[str, ...]:
    if extensions is None:
        return ()
    given: list[Any] = [extensions] if isinstance(extensions, str) else list(extensions)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"extensions={extensions!r}: give endings such as ['.jpg', '.png']")
    return tuple(sorted({f".{one.lstrip('.').lower()}" for one in given}))


def _list(
    remote: Remote, patterns: Sequence[str], wanted: tuple[str, ...], recursive: bool, shown: str
) -> tuple[str, Names]:
    """The common root of all files, and their names below it, in order."""
    listing = list_files(remote, patterns, recursive)
    paths = listing.paths
    if not paths:
        raise SourceError(f"{shown}: no files found; check the path or the pattern")
    if wanted:
        paths = [path for path in paths if redact(path).lower().endswith(wanted)]
        if not paths:
            raise SourceError(
                f"{shown}: none of {len(listing.paths):,} files ends in {', '.join(wanted)}; check extensions="
            )
    length = len(listing.root)
    return listing.root, Names(path[length:] for path in paths)


def _fingerprint(
    remote: Remote, patterns: Sequence[str], label: Any, wanted: tuple[str, ...], recursive: bool
) -> str:
    where = [os.path.abspath(os.path.expanduser(url)) if remote.is_local and "://" not in url else redact(url)
             for url in patterns]  # fmt: skip
    parts = [where[0]]
    if len(where) > 1:
        parts.append(
            f"{len(where)} urls {xxhash.xxh3_64_hexdigest(chr(0).join(where).encode('utf-8', 'surrogateescape'))}"
        )
    parts.append(f"label={fingerprint_of(label) if callable(label) else label}")
    if wanted:
        parts.append(f"extensions={','.join(wanted)}")
    if not recursive:
        parts.append("flat")
    return "files:" + "|".join(parts)


def _folder_of(name: str) -> str:
    """The name of the folder that holds the file `name`; "" for the root."""
    return name.rpartition("/")[0].rpartition("/")[2]
