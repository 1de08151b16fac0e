"""A listing page by page, so that what is listed first can be read before the rest is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fsspec import get_filesystem_class
from fsspec.asyn import sync
from fsspec.utils import glob_translate

from cachestream.errors import SourceError
from cachestream.remote.decode import extension_of
from cachestream.remote.filesystem import Remote
from cachestream.remote.listing import MAGIC, expand_braces, visible
from cachestream.remote.retry import map_errors, redact

__all__ = ["Page", "Pages", "UnorderedError", "open_pages"]

PAGE_NAMES: Final = 1000  # as many as S3 gives
MOST_REQUESTS: Final = 64  # for the names of folders, before the first sample


class UnorderedError(SourceError):
    """A store that lists its files in no order: what comes after a name cannot be asked for."""


class Page(NamedTuple):
    """Names below the root, in order and after those of the page before; `is_last` ends the listing."""

    names: list[str]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Pages:
    """The files of a folder or of a wildcard on S3, a page at a time, from anywhere on.

    `root` ("bucket/folder/") is what all paths begin with, `prefix` what is asked for; `pattern` is a
    regular expression of whole paths, or "" for a folder. Picklable; holds what `Remote` does.
    """

    remote: Remote
    root: str
    prefix: str
    delimiter: str
    pattern: str
    recursive: bool

    def after(self, last: str, page_names: int = PAGE_NAMES) -> Iterator[Page]:
        """The pages of what comes after the name `last`, "" for all.

        Raises what `map_errors` does, and SourceError for a store that lists out of order.
        """
        keep = self._keeper()
        bucket, _, key = self.prefix.partition("/")
        start = (self.root + last).partition("/")[2] if last else ""
        for answer in self._answers(key, self.delimiter, start, page_names):
            keys: list[str] = [entry["Key"] for entry in answer.get("Contents", ())]
            if any(b <= a for a, b in zip([start, *keys], keys, strict=False)):
                raise UnorderedError(
                    f"{self._shown}: this store does not list by name; give first_names=None to list all before"
                )
            start = keys[-1] if keys else start
            yield Page(keep([f"{bucket}/{one}" for one in keys]), not answer.get("IsTruncated"))

    def folders(self, depth: int, keep: Callable[[str], bool]) -> frozenset[str] | None:
        """The names of all folders that hold files, if none lies more than `depth` below the root.

        "" stands for the root itself. `keep` says which names below the root count. None where it would
        take too many requests to find out.
        """
        _, _, key = self.root.partition("/")
        length, found = len(key), set()
        level, asked = [key], 0
        for _ in range(depth):
            below: list[str] = []
            for folder in level:
                for answer in self._answers(folder, "/", "", PAGE_NAMES):
                    asked += 1
                    if asked > MOST_REQUESTS:
                        return None
                    files = [entry["Key"] for entry in answer.get("Contents", ())]
                    inner = [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]
                    below += [one for one in inner if not one.startswith(".", len(folder))]
                    if any(not name.endswith("/") and keep(name[length:]) for name in files):
                        found.add(_last_part(folder[length:]))
            level = below
        found.update(_last_part(folder[length:]) for folder in level)
        return frozenset(found)

    @property
    def _shown(self) -> str:
        return redact(f"{self.remote.protocol}://{self.prefix}")

    def _answers(self, key: str, delimiter: str, start: str, names: int) -> Iterator[dict[str, Any]]:
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
                answer = sync(filesystem.loop, filesystem._call_s3, "list_objects_v2", **options)
            yield answer
            if not answer.get("IsTruncated"):
                return
            options["ContinuationToken"] = answer["NextContinuationToken"]

    def _keeper(self) -> Callable[[list[str]], list[str]]:
        cut = len(self.root)
        fits = re.compile(self.pattern).match if self.pattern else None

        def keep(paths: list[str]) -> list[str]:
            if fits is None:
                return [path[cut:] for path in visible(self.root, paths, self.recursive)]
            return [path[cut:] for path in paths if fits(path) and not path.endswith("/")]

        return keep


def _last_part(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def open_pages(remote: Remote, urls: Sequence[str], recursive: bool) -> Pages | None:
    """The pages of what `urls` name; None for what is listed at once: anything but one folder on S3."""
    if len(urls) != 1 or not remote.is_s3 or expand_braces(urls[0]) != [urls[0]]:
        return None
    path = str(get_filesystem_class(remote.protocol)._strip_protocol(urls[0]))
    if remote.has_versions or not path or MAGIC.search(path.partition("/")[0]):
        return None
    magic = MAGIC.search(path)
    if magic is not None:
        prefix = path[: magic.start()]
        delimiter = "" if "/" in path[magic.start() :] else "/"
        root = prefix[: prefix.rfind("/") + 1]
        return Pages(remote, root, prefix, delimiter, glob_translate(path), recursive)
    if extension_of(path) and not urls[0].endswith("/"):
        return None  # most likely a file
    root = path.rstrip("/") + "/"
    return Pages(remote, root, root, "" if recursive else "/", "", recursive)
