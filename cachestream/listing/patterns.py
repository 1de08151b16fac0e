"""Patterns: the sorted paths of the files that URLs, folders, wildcards and `{000..127}` ranges name."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Final, NamedTuple

from fsspec.asyn import sync
from fsspec.utils import get_protocol, glob_translate

from cachestream.errors import ConfigError, SourceError
from cachestream.transport import metering
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

MOST_FOLLOWING: Final = 16
_ENTRIES_PER_HEARTBEAT: Final = 8192
_CACHE_FILES: Final = frozenset({"cache.json", "catalogue.sqlite"})


class Folder(NamedTuple):
    """The contents of a folder: the names of files and of folders; `is_there` is false if it is gone."""

    files: list[str]
    subfolders: list[str]
    is_there: bool = True


Listed = Callable[[str, Sequence[str]], Folder]


def in_order(listed: Listed, last: str = "") -> Iterator[tuple[list[str], bool]]:
    """Yield the paths below the root that come after `last`, in order, in runs of files of one folder.

    Each run comes with whether it is certainly the last. `listed(folder, following)` returns the contents of
    `folder` ("" is the root, others end in "/"); `following` are the folders that will be requested next, as
    far as they are known. Folders before `last` are not requested.
    """
    pending: list[str | list[str]] = [""]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            folders = (next_one for next_one in reversed(pending) if isinstance(next_one, str))
            pending += reversed(_items(one, listed(one, list(islice(folders, MOST_FOLLOWING))), last))
        else:
            yield one, not pending


def _items(folder: str, holds: Folder, last: str) -> list[str | list[str]]:
    """Return the folders and runs of files of `folder` that come after `last`, in the order of paths."""
    # Folders are sorted with their "/", as "a.txt" comes before "a/b", and "a0" after it.
    paths = sorted(
        [folder + name for name in holds.files] + [f"{folder}{name}/" for name in holds.subfolders]
    )
    if last.startswith(folder):
        paths = [path for path in paths if path > last or (path[-1] == "/" and last.startswith(path))]
    if not holds.subfolders:
        return [paths] if paths else []
    items: list[str | list[str]] = []
    for is_folder, run in groupby(paths, lambda path: path[-1] == "/"):
        together = list(run)
        items += together if is_folder else [together]
    return items


class LocalFolders:
    """A lister of the folders below `root` ("/data/"), without hidden files and folders, and without caches.

    Links to folders are followed unless their target is found by its own path, or is a folder above the link.
    This depends on the target alone, so that a listing can be resumed anywhere.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._real = os.path.realpath(root).rstrip("/") + "/"

    def __call__(self, folder: str, _following: Sequence[str] = ()) -> Folder:
        """Return the contents of `folder`, in no order. Raises OSError."""
        files, subfolders = list[str](), list[str]()
        try:
            with os.scandir((self._root + folder).rstrip("/") or "/") as entries:
                for number, entry in enumerate(entries):
                    if not number % _ENTRIES_PER_HEARTBEAT:
                        metering.fetched(0)
                    if entry.name.startswith("."):
                        continue
                    if entry.is_file():
                        files.append(entry.name)
                    elif entry.is_dir() and (not entry.is_symlink() or self._is_followed(folder, entry.path)):
                        subfolders.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return Folder([], [], is_there=False)
        if folder and "shards" in subfolders and _CACHE_FILES.issubset(files):
            return Folder([], [])
        return Folder(files, subfolders)

    def _is_followed(self, folder: str, link: str) -> bool:
        target = os.path.realpath(link).rstrip("/") + "/"
        if target.startswith(self._real) and "/." not in target[len(self._real) - 1 :]:
            return False
        return not any(above.startswith(target) for above in self._ancestors(folder))

    def _ancestors(self, folder: str) -> Iterable[str]:
        """Return the real paths of the root, of the folders above `folder`, and of `folder`."""
        yield self._real
        for end, letter in enumerate(folder, 1):
            if letter == "/":
                yield os.path.realpath(self._root + folder[:end]).rstrip("/") + "/"


MAX_EXPANDED: Final = 10_000_000
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
MAGIC: Final = re.compile(r"[*?\[]")
_WEB_MAGIC: Final = re.compile(r"[*\[]")  # in a web URL "?" begins a query


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files found: `paths` are sorted and unique, and begin with `root` (which ends in "/", or is "")."""

    root: str
    paths: list[str] = field(repr=False)  # may be signed


def _alternatives(inside: str) -> list[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",")
    first, last, step = match[1], match[2], int(match[3] or 1)
    if step < 1 or abs(int(last) - int(first)) // step >= MAX_EXPANDED:
        raise ConfigError(f"{{{inside}}}: a range of 1 to {MAX_EXPANDED:,} numbers is needed")
    padded = any(len(n.lstrip("-")) > 1 and n.lstrip("-").startswith("0") for n in (first, last))
    width = max(len(first), len(last)) if padded else 0
    direction = 1 if int(first) <= int(last) else -1
    return [f"{n:0{width}d}" for n in range(int(first), int(last) + direction, step * direction)]


def expand_braces(pattern: str) -> list[str]:
    """Expand `{000..127}` and `{train,val}` in `pattern` as a shell does."""
    expanded = [""]
    end = 0
    for match in _BRACES.finditer(pattern):
        if ".." not in match[1] and "," not in match[1]:
            continue
        options = _alternatives(match[1])
        if len(expanded) * len(options) > MAX_EXPANDED:
            raise ConfigError(f"{redact(pattern)}: expands to more than {MAX_EXPANDED:,} URLs")
        literal = pattern[end : match.start()]
        expanded = [f"{head}{literal}{option}" for head in expanded for option in options]
        end = match.end()
    return [head + pattern[end:] for head in expanded]


def list_files(remote: Remote, urls: Sequence[str], recursive: bool = True) -> FoundFiles:
    """List the files that `urls` (of one protocol) name. Hidden files in folders are left out.

    Raises SourceError for files and folders that are missing, empty or forbidden, SourceUnavailableError for
    a remote that does not answer, ConfigError for URLs of several protocols.
    """
    for url in urls:
        if get_protocol(url) != remote.protocol:
            raise ConfigError(
                f"{redact(urls[0])} and {redact(url)}: all URLs of one source must have the same scheme"
            )
    expanded = [(url, _expand_one(remote, url)) for url in urls]
    finder = _LocalFinder(remote) if remote.is_local else _RemoteFinder(remote)
    roots: set[str] = set()
    paths: list[str] = []
    for url, alternatives in expanded:
        known = len(paths)
        for one in alternatives:
            with map_errors(redact(one), secrets=remote.secrets):
                root, found = finder.find(one, recursive, trusted=bool(roots))
            roots.add(root)
            paths.extend(found)
        if len(paths) == known:
            raise SourceError(f"{redact(url)}: no files found; check the path or the pattern")
    return FoundFiles(_common_root(roots), sorted(set(paths)))


def _expand_one(remote: Remote, url: str) -> list[str]:
    if remote.is_local and os.path.exists(local_path(url)):  # a file whose name contains braces
        return [url]
    return expand_braces(url)


def _common_root(roots: Iterable[str]) -> str:
    common: list[str] | None = None
    for root in roots:
        parts = root.split("/")[:-1]
        if common is None:
            common = parts
        else:
            same = [a == b for a, b in zip(common, parts, strict=False)]
            common = common[: same.index(False) if False in same else len(same)]
    # A URL's scheme or host alone is no root.
    return "/".join(common) + "/" if common and common[-1:] != [""] else ""


def _parent(path: str) -> str:
    return path[: path.rfind("/") + 1]


# --- local -------------------------------------------------------------------------------------


def local_path(url: str) -> str:
    return os.path.abspath(os.path.expanduser(url.removeprefix("file://").removeprefix("local://")))


def _below(root: str, recursive: bool) -> Iterator[list[str]]:
    folders = LocalFolders(root)
    return (names for names, _ in in_order(folders)) if recursive else iter([folders("").files])


class _LocalFinder:
    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def find(self, url: str, recursive: bool, trusted: bool) -> tuple[str, list[str]]:
        """Return the root and the files of one URL."""
        path = local_path(url)
        if os.path.isdir(path):
            root = path.rstrip("/") + "/"
            return root, [root + name for names in _below(root, recursive) for name in names]
        if os.path.exists(path):
            return _parent(path), [path]
        magic = MAGIC.search(path)
        if magic is None:
            raise SourceError(f"{path}: no such file or folder; check the path")
        return _parent(path[: magic.start()]), list(filter(os.path.isfile, glob.iglob(path, recursive=True)))


# --- fsspec ------------------------------------------------------------------------------------


def visible(root: str, paths: Iterable[str], recursive: bool) -> list[str]:
    """Return `paths` without hidden files, files in hidden folders, and placeholders for folders."""
    length = len(root)
    return [
        path
        for path in paths
        if not path.endswith("/")
        and not path.startswith(".", length)
        and "/." not in path[length:]
        and (recursive or "/" not in path[length:])
    ]


def s3_delimiter(pattern: str, first_magic: int) -> str:
    """Return the delimiter to list by: "/" if all matches lie in one folder, "" if some may lie deeper."""
    wild = pattern[first_magic:]
    return "" if "/" in wild or "**" in wild else "/"


class _RemoteFinder:
    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._filesystem, self._first_path = remote.open_for_listing()
        self._magic = _WEB_MAGIC if remote.is_web else MAGIC

    def find(self, url: str, recursive: bool, trusted: bool) -> tuple[str, list[str]]:
        """Return the root and the files of one URL; a `trusted` URL of a file is not looked up."""
        path = self._path(url)
        bare = path.partition("?")[0]
        if self._remote.is_web and not self._magic.search(bare):
            # The file is not looked up, as a signed URL may allow GET alone.
            return self._folder(path, recursive) if path.endswith("/") else (_parent(bare), [path])
        magic = self._magic.search(path)
        if magic is not None:
            found = self._matching(path, magic.start())
            return _parent(path if found == [path] else path[: magic.start()]), found
        if trusted and extension_of(path):
            return _parent(path), [path]
        if url.endswith("/") or not path:
            return self._folder(path, recursive)
        if not extension_of(path) and (below := self._folder(path, recursive))[1] not in ([], [path]):
            return below
        info = self._filesystem.info(path)
        return self._folder(path, recursive) if info["type"] == "directory" else (_parent(path), [path])

    def _path(self, url: str) -> str:
        if "::" in url:
            return self._first_path
        return str(self._filesystem._strip_protocol(url))

    def _folder(self, path: str, recursive: bool) -> tuple[str, list[str]]:
        root = path.rstrip("/") + "/" if path.strip("/") else ""
        if self._remote.is_s3:
            found = self._s3_names(root, "" if recursive else "/")
        else:
            found = self._filesystem.find(path, maxdepth=None if recursive else 1)
        return root, visible(root, found, recursive)

    def _matching(self, pattern: str, first_magic: int) -> list[str]:
        """Return the files that match; only the file with the name `pattern` if there is one."""
        if self._remote.is_s3:
            fits = re.compile(glob_translate(pattern)).match
            found = self._s3_names(pattern[:first_magic], s3_delimiter(pattern, first_magic))
            if pattern in found:
                return [pattern]
            return [path for path in found if fits(path) and not path.endswith("/")]
        if self._filesystem.isfile(pattern):
            return [pattern]
        entries = self._filesystem.glob(pattern, detail=True)
        return [path for path, info in entries.items() if info["type"] != "directory"]

    def _s3_names(self, prefix: str, delimiter: str) -> list[str]:
        """Return the names of the objects whose "bucket/key" begins with `prefix`.

        The `find` of s3fs would keep a record of 2 kB for each.
        """
        bucket, _, key = prefix.partition("/")
        if not bucket or MAGIC.search(bucket):
            raise SourceError("an S3 URL names one bucket: s3://bucket/…")

        async def collect() -> list[str]:
            pages = self._filesystem._iterdir(bucket, delimiter=delimiter, prefix=key)
            return [entry["name"] async for entry in pages if entry["type"] == "file"]

        names: list[str] = sync(self._filesystem.loop, collect)
        return names


def _extensions(names: str) -> frozenset[str]:
    return frozenset(f".{name}" for name in names.split())


IMAGE_EXTENSIONS: Final = _extensions(
    "avif bmp gif j2k jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tif tiff webp"
)


TEXT_EXTENSIONS: Final = _extensions(
    "cls csv htm html jsonl log markdown md rst srt text toml tsv txt vtt xml yaml yml"
)


_KINDS: Final = {
    **dict.fromkeys(IMAGE_EXTENSIONS, "image"),
    **dict.fromkeys(TEXT_EXTENSIONS, "text"),
    ".npy": "array",
    ".npz": "arrays",
    ".json": "json",
}


def extension_of(path: str) -> str:
    """Return the last extension of `path` in lower case, with its dot: ".jpg"; "" if there is none."""
    return os.path.splitext(path)[1].lower()


def is_image(extension: str) -> bool:
    return extension in IMAGE_EXTENSIONS


def kind_of(extension: str) -> str:
    """Return the kind of a file: "image", "array", "text", "data", or "arrays" or "json" with own fields."""
    return _KINDS.get(extension, "data")
