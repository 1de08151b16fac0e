"""Files with one sample each: images, arrays, JSON, text or bytes, on any remote of fsspec."""

from __future__ import annotations

import codecs
import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, FirstNames, Url, check_unit, folder_of
from cachestream.listing.names import AnyNames
from cachestream.listing.pages import Page
from cachestream.listing.patterns import extension_of, is_image, kind_of
from cachestream.sources.decode.images import Buffer, ImageOptions, Size
from cachestream.sources.decode.values import decode_fields
from cachestream.sources.fields import Defaults
from cachestream.sources.functions import fingerprint_of
from cachestream.sources.user_code import foreign_errors
from cachestream.transport.fetch import fetch
from cachestream.transport.remote_errors import map_errors

logger = logging.getLogger("cachestream")

_KIND_NAMES: Final = {
    "image": "images",
    "text": "texts",
    "array": ".npy files",
    "arrays": ".npz files",
    "json": ".json files",
    "data": "files as bytes",
}
_INDEX_HEAD_BYTES: Final = 512
_INDEX_TITLES: Final = (b"<title>index of /", b"<title>directory listing for /")


class FileSource:
    """The files of a folder, a wildcard, a `{000..127}` range, or a list of these; a unit is a file.

    A sample is a dict. Images (Pillow) have the field "image", uint8 `[3, H, W]` RGB; `.npy` "array"; `.npz`
    and objects in `.json` their own fields; text "text" (str); anything else "data" (bytes). The key is the
    path below the common root of all files.

    label: "folder" gives images an int "label", the rank of their parent folder's name among the names of all
    folders with images (`label_names`), as torchvision's ImageFolder does; images that all lie in the root
    have none. While a listing grows, the names are those of the folders beside the folder of the first files;
    images in other folders are skipped and counted. A function of the key labels every file. None: no labels.
    With a `Manifest` that has labels, every file has its own.

    storage_options are passed to fsspec's driver and may hold secrets, which are shown nowhere. extensions
    keeps the files with these endings (".jpg", "png"); recursive=False keeps those in the folder itself.
    Hidden files in folders are left out. Without extensions, one kind of files is kept of folders and
    wildcards: images, if they are a tenth as many as any other kind, else the most frequent kind. The number
    of files left out is logged. extensions="*" keeps all, for a transform that makes their samples alike.

    fields: a default for each optional field, `{"caption": ""}`, for samples that lack it. encoding: that of
    text and JSON. resize and crop are for images: the shorter side or (height, width), and the centre; see
    `ImageOptions`.

    first_names: a tree of folders, or on S3 any folder or wildcard, with more files than this number is not
    listed to its end here: a worker with the order "shuffle" or "sequential" begins with the first files
    while the rest is listed. "auto": 1,000 (a page of S3), or 1,000,000 on a local disk. Any other use of the
    number of units lists all at once; so does None.

    Other files are listed once, here; the source is picklable and small. Raises ConfigError for invalid URLs
    or options, SourceError for files that are missing, empty or forbidden, and SourceUnavailableError for a
    remote that does not answer.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url] | FileList,
        *,
        storage_options: Mapping[str, Any] | None = None,
        label: str | Callable[[str], Any] | None = "folder",
        extensions: str | Iterable[str] | None = None,
        recursive: bool = True,
        resize: Size | None = None,
        crop: Size | None = None,
        first_names: FirstNames = "auto",
        fields: Mapping[str, Any] | None = None,
        encoding: str = "utf-8",
    ) -> None:
        self._defaults = Defaults(fields)
        self._encoding = check_encoding(encoding)
        self._images = ImageOptions(resize, crop)
        if not (label is None or label == "folder" or callable(label)):
            raise ConfigError(f"label={label!r}: give 'folder', a function of the path, or None")
        if isinstance(urls, FileList):  # `open_source` has listed them to choose a source
            self._files = copy.copy(urls)
        else:
            self._files = FileList(
                urls,
                storage_options,
                owner="FileSource",
                extensions=extensions,
                recursive=recursive,
                labelled=True,
                first_names=first_names,
            )
        self._left_out = 0
        self._keep_one_kind()
        self._remote = self._files.remote
        self._label = label
        labelled = f"label={fingerprint_of(label) if callable(label) else label}"
        where, *options = self._files.identity
        options += [*self._images.identity, *self._defaults.identity]
        options += [f"encoding={encoding}"] if self._encoding != "utf-8-sig" else []
        self.fingerprint = "files:" + "|".join((where, labelled, *options))
        self._labels = self._files.labels if label == "folder" else None
        self._name_labels(() if self._labels is None else self._labels.names)
        if self._labels is None and label == "folder":
            self._label_by(self._files.folders(_takes_label))

    def _keep_one_kind(self) -> None:
        if not self._files.is_searched:
            return
        counts = Counter(map(kind_of, self._files.some_extensions()))
        if len(counts) < 2:
            return
        kind = chosen_kind(counts)
        left_out, example = self._files.keep_only(kind)
        self._left_out = left_out
        if left_out:
            listed = "the first " if self._files.is_open else ""
            logger.warning(
                "%s: %s are read, and %d of %s%d files, of other kinds (such as %s), left out; "
                "to read several kinds, name them with extensions=",
                self._files.shown,
                _KIND_NAMES[kind],
                left_out,
                listed,
                left_out + len(self._files.first),
                example,
            )

    def _label_by(self, folders: frozenset[str]) -> None:
        self._name_labels(tuple(sorted(folders)) if folders != {""} else ())

    def _name_labels(self, names: tuple[str, ...]) -> None:
        self._label_names = names
        self._label_index = {name: index for index, name in enumerate(names)} if self._labels is None else {}

    @property
    def num_units(self) -> int:
        self._settle()
        return len(self._files.names)

    @property
    def listing_digest(self) -> str:
        """A digest of the list of files: the same for the same files in the same order."""
        self._settle()
        return self._files.digest

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the folders by label; () without labels, or with labels of another kind."""
        return self._label_names

    def _settle(self) -> None:
        """Complete the listing. Labels change only if an image lies in a folder without one."""
        if self._files.is_open:
            self._files.complete()
            if self._label == "folder":
                folders = self._files.folders(_takes_label)
                if not folders <= set(self._label_names):
                    self._label_by(folders)

    # --- a listing that goes on (see `GrowingSource`)

    @property
    def is_listing(self) -> bool:
        """True while only the first names are listed."""
        return self._files.is_open

    @property
    def first_names(self) -> AnyNames:
        """The names listed so far."""
        return self._files.first

    def more_names(self, last: str) -> Iterator[Page]:
        """Yield the pages of names after `last`."""
        return self._files.more(last)

    def over(self, names: AnyNames) -> FileSource:
        """Return the same source over the listing `names`, as far as that has come."""
        made = copy.copy(self)
        made._files = self._files.over(names)
        return made

    def key(self, unit: int) -> str:
        """Return the path of `unit` below the common root, without a query."""
        if not 0 <= unit < len(self._files.first):
            check_unit(self, unit, self.num_units)
        return self._files.key(unit)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the one sample of the file `unit`. Raises the errors of `Source.read`."""
        key = self.key(unit)
        where = self._files.where(unit)
        extension = extension_of(key)
        folder = folder_of(self._files.name(unit)) if self._label_index and _takes_label(key) else None
        if folder is not None and folder not in self._label_index:
            raise SampleError(
                f"{where}: has no label: while a listing grows, only folders beside those of the first files "
                "have one; clear the cache, and give first_names=None to list all before, label= a function of "
                "the path, or label=None"
            )
        with map_errors(where, one_of_many=True, secrets=self._remote.secrets):
            data = fetch(self._remote, self._files.path(unit))
        if self._remote.is_web and not extension and _is_index_page(data):
            raise SampleError(
                f"{where}: is the server's page about a folder: end its URL with '/' to read its files"
            )
        sample = decode_fields(data, extension, where, self._images, self._encoding)
        if callable(self._label):
            with foreign_errors(f"label({key!r})"):
                sample["label"] = self._label(key)
        elif self._labels is not None:
            sample["label"] = self._labels[unit]
        elif folder is not None:
            sample["label"] = self._label_index[folder]
        yield key, self._defaults.fill(sample)

    def __repr__(self) -> str:
        more = " and more" if self._files.is_open else ""
        left_out = f", {self._left_out:,} of other kinds left out" if self._left_out else ""
        return f"<FileSource {self._files.shown}, {len(self._files.first):,} files{more}{left_out}>"


def chosen_kind(counts: Counter[str]) -> str:
    """Return the kind to read: images if they are a tenth as many as the most frequent kind, else that."""
    most, count = counts.most_common(1)[0]
    return "image" if 10 * counts["image"] >= count else most


def check_encoding(encoding: str) -> str:
    """Return the name of the codec for `encoding`; for UTF-8, the one that skips a byte order mark.

    Raises ConfigError for an unknown encoding.
    """
    try:
        name = codecs.lookup(encoding).name
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f"encoding={encoding!r}: give the name of a codec of Python's, such as 'latin-1'"
        ) from error
    return "utf-8-sig" if name == "utf-8" else name


def _takes_label(key: str) -> bool:
    """Return whether the file `key` gets the label of its folder."""
    return is_image(extension_of(key))


def _is_index_page(data: Buffer) -> bool:
    """Return whether `data` is a folder's index page as made by a usual server (Apache, nginx, Python's)."""
    head = bytes(memoryview(data)[:_INDEX_HEAD_BYTES]).lower()
    return any(title in head for title in _INDEX_TITLES)
