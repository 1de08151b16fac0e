"""Locations of arrays: the files and folders that URLs with wildcards and ranges name."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field
from typing import Final

import fsspec

from cachestream.errors import ConfigError, SourceError
from cachestream.listing.patterns import MAGIC, expand_braces, local_path
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

HDF5_ENDINGS: Final = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
_ZARR: Final = re.compile(r"\.zarr(/|$)")
_IN_FILE: Final = re.compile(r"(.+\.(?:h5|hdf5|hdf|he5|nc))::/?([^:]+)", re.IGNORECASE | re.DOTALL)


def split_dataset(url: str) -> tuple[str, str | None]:
    """Split `file.h5::/group/data` into the file and the dataset's name, which is None for any other URL."""
    match = _IN_FILE.fullmatch(url)
    return (url, None) if match is None or "://" in match[2] else (match[1], match[2])


def is_zarr(path: str) -> bool:
    """Return whether `path` is a Zarr store, or an array in one: `a.zarr`, `a.zarr/group/image`."""
    return _ZARR.search(path) is not None


@dataclass(frozen=True, slots=True)
class Located:
    """The place of an array: its path for the driver, and the dataset in that file."""

    remote: Remote
    path: str = field(repr=False)  # may be signed
    dataset: str | None

    @property
    def shown(self) -> str:
        """The path as shown in messages."""
        scheme = "" if self.remote.is_local or "://" in self.path else f"{self.remote.protocol}://"
        return redact(scheme + self.path)

    @property
    def name(self) -> str:
        """A unique name: the path as shown, and the dataset in it."""
        return self.shown if self.dataset is None else f"{self.shown}::/{self.dataset.lstrip('/')}"


def locate(remote: Remote, url: str, dataset: str | None) -> list[Located]:
    """Return the arrays that `url` stands for; those found by a wildcard in the order of their names.

    Raises ConfigError for a dataset named twice, SourceError if a wildcard finds nothing, and the errors of
    `map_errors`.
    """
    outer, inner = split_dataset(url)
    if inner is not None and dataset is not None:
        raise ConfigError(f"{redact(url)}: give the dataset in the path or as dataset=, not both")
    with map_errors(redact(outer), secrets=remote.secrets):
        paths = _local(outer) if remote.is_local else _remote(remote, outer)
    if not paths:
        raise SourceError(f"{redact(outer)}: nothing found; check the path or the pattern")
    return [Located(remote, path, inner or dataset) for path in paths]


def _local(url: str) -> list[str]:
    path = local_path(url)
    if os.path.exists(path):  # a name may contain braces and stars
        return [path]
    paths = []
    for one in expand_braces(path):
        paths += sorted(glob.glob(one, recursive=True)) if MAGIC.search(one) else [one]
    return paths


def _remote(remote: Remote, url: str) -> list[str]:
    if "::" in url:
        return [remote.open_for_listing()[1]]
    strip = fsspec.get_filesystem_class(remote.protocol)._strip_protocol
    paths = [str(strip(one)) for one in expand_braces(url)]
    if remote.is_web or not any(map(MAGIC.search, paths)):  # in a web URL "?" begins a query
        return paths
    filesystem, _ = remote.open_for_listing()
    return [path for one in paths for path in sorted(filesystem.glob(one))]
