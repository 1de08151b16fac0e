"""The listing of a folder or wildcard on S3, page by page: samples can be read before it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from cachestream.errors import SourceError
from cachestream.listing.names import Page
from cachestream.listing.patterns import MAGIC, folder_filter, name_filter, visible
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

    All paths begin with `root` ("bucket/folder/"). `pattern` is a wildcard below it, or "" for all files that
    are not hidden; of these, `recursive` includes those in folders. Picklable.
    """

    remote: Remote
    root: str
    pattern: str = ""
    recursive: bool = True

    @property
    def _prefix(self) -> str:
        return self.root + MAGIC.split(self.pattern, maxsplit=1)[0]

    @property
    def _is_flat(self) -> bool:
        """True if all files lie in one folder."""
        return "/" not in self.pattern and "**" not in self.pattern if self.pattern else not self.recursive

    def num_first_names(self) -> int:
        """Return the number of names to list before the first sample. With 1, a single page is listed."""
        return 1

    def after(self, last: str, page_names: int = PAGE_NAMES) -> Iterator[Page]:
        """Yield the pages of names after `last`, "" for all.

        Raises the errors of `map_errors`, and UnorderedError for a store that lists out of order.
        """
        for names, is_last in self._pages(last, page_names):
            if any(b <= a for a, b in zip([last, *names], names, strict=False)):
                raise UnorderedError(
                    f"{self._shown}: this store does not list by name; "
                    "give first_names=None to list all before"
                )
            last = names[-1] if names else last
            yield Page(self.matching(names), is_last)

    def names(self) -> list[str]:
        """Return the names of all objects below the prefix, as the store orders them."""
        return [name for names, _ in self._pages("", PAGE_NAMES) for name in names]

    def _pages(self, last: str, page_names: int) -> Iterator[tuple[list[str], bool]]:
        """Yield the names of the objects after `last`, page by page; True with the last page."""
        start, cut = (self.root + last) if last else "", len(self.root.partition("/")[2])
        for answer in self._answers(self._prefix, "/" if self._is_flat else "", start, page_names):
            keys = [str(entry["Key"]) for entry in answer.get("Contents", ())]
            # An object may have the name of the folder itself.
            yield [key[cut:] for key in keys if len(key) > cut], not answer.get("IsTruncated")

    def folders_in(self, parent: str) -> list[str]:
        """Return the folders ("a/b/") directly in `parent` ("a/", or "" for the root) whose files may match.

        Pages are requested until one holds files alone: folders after so many files are not found.
        """
        if self._is_flat:
            return []
        found, may_match = list[str](), folder_filter(self.pattern)
        cut = len(self.root.partition("/")[2])
        for answer in self._answers(self.root + parent if parent else self._prefix, "/", "", PAGE_NAMES):
            folders = [entry["Prefix"][cut:] for entry in answer.get("CommonPrefixes", ())]
            if not folders:
                break
            is_hidden = () if self.pattern else f"{parent}."
            found += [one for one in folders if may_match(one) and not one.startswith(is_hidden)]
        return found

    @property
    def _shown(self) -> str:
        return redact(f"{self.remote.protocol}://{self._prefix}")

    def _answers(self, prefix: str, delimiter: str, start: str, names: int) -> Iterator[dict[str, Any]]:
        """Yield the answers of S3, page by page, for paths that begin with `prefix` and come after `start`."""
        filesystem, _ = self.remote.open_for_listing()
        bucket, _, key = prefix.partition("/")
        options = {
            "Bucket": bucket,
            "Prefix": key,
            "Delimiter": delimiter,
            "MaxKeys": names,
            **({"StartAfter": start.partition("/")[2]} if start else {}),
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

    def holds(self, name: str) -> bool:
        """Return whether there is an object with this name below the root."""
        key = (self.root + name).partition("/")[2]
        first = next(self._answers(self.root + name, "", "", 1))
        return any(entry["Key"] == key for entry in first.get("Contents", ()))

    def matching(self, names: list[str]) -> list[str]:
        """Return the names of files that match the wildcard, or that are not hidden in the folder."""
        return name_filter(self.pattern)(names) if self.pattern else visible("", names, self.recursive)
