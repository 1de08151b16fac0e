"""One file, one sample: images, arrays, JSON, text or bytes, wherever fsspec reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cachestream.errors import ConfigError
from cachestream.remote.decode import decode_fields, extension_of, is_image
from cachestream.remote.fetch import fetch
from cachestream.remote.filelist import FileList, Url, check_unit
from cachestream.remote.foreign import foreign_errors
from cachestream.remote.functions import fingerprint_of
from cachestream.remote.images import ImageOptions, Size
from cachestream.remote.retry import map_errors

__all__ = ["FileSource"]


class FileSource:
    """The files of a folder, a wildcard, a `{000..127}` range, or a list of these; a unit is a file.

    A sample is a dict. Images (Pillow) have "image", uint8 `[3, H, W]` RGB; `.npy` "array"; `.npz`
    and objects in `.json` their own fields; text "text" (str); anything else "data" (bytes). The
    key is the path below the common root of all files.

    label: "folder" gives images an int "label", the place of their parent folder's name among all
    such names in order (`label_names`), as torchvision's ImageFolder does; there is none where
    all files lie in the root itself. A function of the key labels every file. None: no labels. Of a
    `Manifest` with labels: those, for every file.

    storage_options go to fsspec's driver and may hold secrets: they are shown nowhere.
    extensions keeps only files that end so (".jpg", "png"); recursive=False keeps to the folder
    itself. Hidden files in folders are left out.

    resize and crop are for images, see `ImageOptions`: the shorter side or (height, width), and the middle.

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
        resize: Size | None = None,
        crop: Size | None = None,
    ) -> None:
        self._images = ImageOptions(resize, crop)
        if not (label is None or label == "folder" or callable(label)):
            raise ConfigError(f"label={label!r}: give 'folder', a function of the path, or None")
        self._files = FileList(
            urls,
            storage_options,
            owner="FileSource",
            extensions=extensions,
            recursive=recursive,
            labelled=True,
        )
        self._remote = self._files.remote
        self._label = label
        self.listing_digest = self._files.digest
        labelled = f"label={fingerprint_of(label) if callable(label) else label}"
        where, *options = self._files.identity
        self.fingerprint = "files:" + "|".join((where, labelled, *options, *self._images.identity))
        self.label_names: tuple[str, ...] = ()
        self._labels = self._files.labels if label == "folder" else None
        if self._labels is not None:
            self.label_names = self._labels.names
        elif label == "folder":
            folders = {_folder_of(name) for name in self._files.names}
            self.label_names = tuple(sorted(folders)) if folders != {""} else ()
        self._label_index = {name: index for index, name in enumerate(self.label_names)}

    @property
    def num_units(self) -> int:
        return len(self._files)

    def key(self, unit: int) -> str:
        """The path of `unit` below the common root, without a query."""
        check_unit(self, unit, self.num_units)
        return self._files.key(unit)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the one sample of the file `unit`. Raises as `Source.read` says."""
        key = self.key(unit)
        where = self._files.where(unit)
        with map_errors(where, one_of_many=True, secrets=self._remote.secrets):
            data = fetch(self._remote, self._files.path(unit))
        extension = extension_of(key)
        sample = decode_fields(data, extension, where, self._images)
        if callable(self._label):
            with foreign_errors(f"label({key!r})"):
                sample["label"] = self._label(key)
        elif self._labels is not None:
            sample["label"] = self._labels[unit]
        elif self.label_names and is_image(extension):
            sample["label"] = self._label_index[_folder_of(self._files.names[unit])]
        yield key, sample

    def __repr__(self) -> str:
        return f"<FileSource {self._files.shown}, {self.num_units:,} files>"


def _folder_of(name: str) -> str:
    """The name of the folder that holds the file `name`; "" for the root."""
    return name.rpartition("/")[0].rpartition("/")[2]
