"""The listing of a folder or wildcard on S3, page by page: samples can be read before it is complete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fsspec import get_filesystem_class
from fsspec.utils import glob_translate

from cachestream.errors import SourceError
from cachestream.listing.names import Page
from cachestream.listing.patterns import MAGIC, expand_braces, extension_of, parent_of, visible
from cachestream.transport.driver import result_of
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

PAGE_NAMES: Final = 1000  # as many as S3 gives
PAGE_TIMEOUT_S: Final = 300.0  # with the driver's own attempts


class UnorderedError(SourceError):
    """The store lists files in no order: the names after a given one cannot be requested."""


@dataclass(frozen=True, slots=True)
class S3Listing:
    """The files of a folder or of a wildcard on S3, a page at a time, from any name on.

    All paths begin with `root` ("bucket/folder/"); `prefix` and `delimiter` are those of the requests.
    `pattern` and `folder_pattern` are regular expressions for whole paths and for their folders, or "" for
    all. Picklable.
    """

    remote: Remote
    root: str
    prefix: str
    delimiter: str
    pattern: str
    recursive: bool
    folder_pattern: str = ""

    @classmethod
    def of(cls, remote: Remote, path: str, recursive: bool) -> S3Listing:
        """Return the listing of the folder or wildcard `path` ("bucket/folder"); `recursive`: for folders."""
        magic = MAGIC.search(path)
        if magic is None:
            root = path.rstrip("/") + "/"
            return cls(remote, root, root, "" if recursive else "/", "", recursive)
        wild, (folder, _, last) = path[magic.start() :], path.rpartition("/")
        delimiter = "" if "/" in wild or "**" in wild else "/"  # "/": all matches lie in one folder
        below = "" if "**" in last else glob_translate(folder)
        prefix = path[: magic.start()]
        return cls(remote, parent_of(prefix), prefix, delimiter, glob_translate(path), recursive, below)

    def num_first_names(self) -> int:
        """Return the number of names to list before the first sample. With 1, a single page is listed."""
        return 1

    def after(self, last: str, page_names: int = PAGE_NAMES) -> Iterator[Page]:
        """Yield the pages of names after `last`, "" for all.

        Raises the errors of `map_errors`, and UnorderedError for a store that lists out of order.
        """
        bucket, _, key = self.prefix.partition("/")
        start = (self.root + last).partition("/")[2] if last else ""
        for answer in self.answers(key, self.delimiter, start, page_names):
            keys: list[str] = [entry["Key"] for entry in answer.get("Contents", ())]
            if any(b <= a for a, b in zip([start, *keys], keys, strict=False)):
                raise UnorderedError(
                    f"{self._shown}: this store does not list by name; "
                    "give first_names=None to list all before"
                )
            start = keys[-1] if keys else start
            names = [path[len(self.root) :] for path in self.matching([f"{bucket}/{one}" for one in keys])]
            yield Page(names, not answer.get("IsTruncated"))

    def paths(self) -> list[str]:
        """Return the paths of all objects below the prefix, as the store orders them."""
        bucket, _, key = self.prefix.partition("/")
        return [
            f"{bucket}/{entry['Key']}"
            for answer in self.answers(key, self.delimiter, "", PAGE_NAMES)
            for entry in answer.get("Contents", ())
        ]

    def folders_in(self, parent: str) -> list[str]:
        """Return the folders ("a/b/") directly in `parent` ("a/", or "" for the root) whose files may match.

        Pages are requested until one holds files alone: folders after so many files are not found.
        """
        if self.delimiter:
            return []
        bucket, _, key = (self.root + parent if parent else self.prefix).partition("/")
        fits = re.compile(self.folder_pattern).match if self.folder_pattern else None
        cut, found = len(self.root), list[str]()
        for answer in self.answers(key, "/", "", PAGE_NAMES):
            paths = [f"{bucket}/{entry['Prefix']}" for entry in answer.get("CommonPrefixes", ())]
            if not paths:
                break
            if fits is not None:
                paths = [path for path in paths if fits(path[:-1])]
            elif not self.pattern:
                paths = [path for path in paths if not path.startswith(".", cut + len(parent))]
            found += [path[cut:] for path in paths]
        return found

    @property
    def _shown(self) -> str:
        return redact(f"{self.remote.protocol}://{self.prefix}")

    def answers(self, key: str, delimiter: str, start: str, names: int) -> Iterator[dict[str, Any]]:
        """Yield the answers of S3, page by page, for the prefix `key` and names after `start`."""
        filesystem, _ = self.remote.open_for_listing()
        options = {
            "Bucket": self.prefix.partition("/")[0],
            "Prefix": key,
            "Delimiter": delimiter,
            "MaxKeys": names,
            **({"StartAfter": start} if start else {}),
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

    def holds(self, path: str) -> bool:
        """Return whether there is an object with the name `path`."""
        key = path.partition("/")[2]
        first = next(self.answers(key, "", "", 1))
        return any(entry["Key"] == key for entry in first.get("Contents", ()))

    def matching(self, paths: list[str]) -> list[str]:
        """Return the paths of files that match the wildcard, or that are not hidden in the folder."""
        if not self.pattern:
            return visible(self.root, paths, self.recursive)
        fits = re.compile(self.pattern).match
        return [path for path in paths if fits(path) and not path.endswith("/")]


def open_s3_listing(remote: Remote, urls: Sequence[str], recursive: bool) -> S3Listing | None:
    """Return the listing of `urls` if these are one folder or wildcard on S3; None: list them at once."""
    if len(urls) != 1 or not remote.is_s3 or expand_braces(urls[0]) != [urls[0]]:
        return None
    path = str(get_filesystem_class(remote.protocol)._strip_protocol(urls[0]))
    if remote.has_versions or not path or MAGIC.search(path.partition("/")[0]):
        return None
    is_wild = MAGIC.search(path) is not None
    if not is_wild and extension_of(urls[0]):
        return None  # most likely a file
    listing = S3Listing.of(remote, path, recursive)
    return (
        None if is_wild and listing.holds(path) else listing
    )  # an object whose name contains wildcard signs
