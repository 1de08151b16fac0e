"""Patterns of URLs and paths: `{000..127}` ranges, wildcards, roots, kinds of files by endings. No I/O."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from cachestream.errors import ConfigError
from cachestream.transport.remote_errors import redact

logger = logging.getLogger("cachestream")

MAX_EXPANDED: Final = 10_000_000
MAGIC: Final = re.compile(r"[*?\[]")
WEB_MAGIC: Final = re.compile(r"[*\[]")  # in a web URL "?" begins a query
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")


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
    """Expand `{000..127}` and `{train,val}` in `pattern` as a shell does; other braces stay as they are."""
    expanded = [""]
    end = 0
    for match in _BRACES.finditer(pattern):
        if "," not in match[1] and _RANGE.fullmatch(match[1]) is None:
            continue
        options = _alternatives(match[1])
        if len(expanded) * len(options) > MAX_EXPANDED:
            raise ConfigError(f"{redact(pattern)}: expands to more than {MAX_EXPANDED:,} URLs")
        literal = pattern[end : match.start()]
        expanded = [f"{head}{literal}{option}" for head in expanded for option in options]
        end = match.end()
    return [head + pattern[end:] for head in expanded]


def local_path(url: str) -> str:
    path = url.removeprefix("file://").removeprefix("local://")
    is_absolute = path[:1] == "/" and path[-1] != "/" and "//" not in path and "/." not in path
    return path if is_absolute else os.path.abspath(os.path.expanduser(path))


def absolute(url: str) -> str:
    """Return `url`; a path of this machine as an absolute one."""
    return url if "://" in url or "::" in url else local_path(url)


def parent_of(path: str) -> str:
    """Return the folder of `path` with its "/"; "" if `path` lies in none."""
    return path[: path.rfind("/") + 1]


def split_wildcard(path: str, magic: re.Pattern[str] = MAGIC) -> tuple[str, str]:
    """Split `path` into a folder, with its "/", and the wildcard below it; "" if there is none."""
    match = magic.search(path)
    if match is None:
        return path.rstrip("/") + "/", ""
    root = parent_of(path[: match.start()])
    return root, path[len(root) :]


# --- wildcards: "*", "?" and "[…]" in a level, and "**" for any number of levels --------------------------

# A sign matches no hidden name: only a level that begins with "." does, as in a shell.
_SHOWN: Final = r"(?!\.)"
# A bracket without a sign in it is no set, and stands for itself: "[]", "[!]".
_SIGN: Final = re.compile(r"(\*+|\?|\[(?:!|(?!!))(?s:.)[^\]]*\])")


def _level(level: str) -> str:
    """Return the regular expression for one level of a wildcard."""
    texts = _SIGN.split(level)
    texts[::2] = map(re.escape, texts[::2])
    for place, sign in enumerate(texts[1::2]):
        if sign[0] == "[":
            inside = re.sub(r"([\\\[&~|])", r"\\\1", sign[1:-1])
            texts[2 * place + 1] = f"(?!/)[{'^' + inside[1:] if inside.startswith('!') else inside}]"
        else:
            texts[2 * place + 1] = "[^/]" if sign == "?" else "[^/]+" if sign == level else "[^/]*"
    return ("" if level.startswith(".") else _SHOWN) + "".join(texts)


def _compiled(expression: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{redact(pattern)}: not a wildcard: {error}") from None


def name_filter(pattern: str) -> Callable[[list[str]], list[str]]:
    """Return a function that selects the names of files that match a wildcard."""
    if pattern == "**":
        return lambda names: [
            name for name in names if name[0] != "." and "/." not in name and name[-1] != "/"
        ]
    *folders, last = pattern.split("/")
    above = (rf"(?:{_SHOWN}[^/]*/)*" if level == "**" else f"{_level(level)}/" for level in folders)
    deep = rf"(?:{_SHOWN}[^/]*/)*" if last == "**" else ""
    fits = _compiled("".join((*above, deep, _level(last))), pattern).fullmatch
    return lambda names: [name for name in names if fits(name)]


def folder_filter(pattern: str) -> Callable[[str], object]:
    """Return a predicate that is true for a folder ("a/b/") that may hold files that match, at any depth."""
    levels = pattern.split("/")
    deep = levels.index("**") if "**" in levels else len(levels) - 1
    inside = ""
    if deep < len(levels) - 1 or levels[-1] == "**":
        has_dots = any(level.startswith(".") for level in levels[deep:])
        inside = rf"(?:{'' if has_dots else _SHOWN}[^/]*/)*"
    for level in reversed(levels[:deep]):
        inside = f"(?:{_level(level)}/{inside})?"
    return _compiled(inside, pattern).fullmatch


def common_root(roots: Iterable[str]) -> str:
    """Return the deepest folder that holds all `roots`, with its "/"; "" if that is no more than a scheme."""
    parts = [root.split("/")[:-1] for root in roots]
    first, last = min(parts), max(parts)  # what these two share, all in between share
    differ = [a != b for a, b in zip(first, last, strict=False)]
    common = first[: [*differ, True].index(True)]
    return "/".join(common) + "/" if any(common[-1:]) else ""


@lru_cache(1024)
def warn_of_denied(root: str, example: str) -> None:
    """Warn, once, of folders below `root` in which a wildcard may not look."""
    logger.warning(
        "%s: folders that may not be read are left out, such as %s; to read them, check their permissions",
        root,
        example,
    )


@lru_cache(1024)
def _warn_of_dots(where: str, count: int, example: str) -> None:
    """Warn, once, of what is left out in `where` since its names begin with two dots."""
    logger.warning(
        "%s: files and folders whose names begin with '..' are left out, as all hidden ones: %d here (such "
        "as %s); to read them, rename them, or open such a folder by its own path",
        where,
        count,
        example,
    )


def tell_of_dots(where: str, names: Iterable[str]) -> None:
    """Warn if any of `names` below the folder `where` is in a folder, or is a file, that begins with two
    dots.
    """
    dotted = [name for name in names if name.startswith("..") or "/.." in name]
    if dotted:
        _warn_of_dots(where, len(dotted), dotted[0][:200])


# --- kinds of files ----------------------------------------------------------------------------


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


COMPRESSED_ENDINGS: Final[dict[str, str]] = {
    **dict.fromkeys((".gz", ".tgz"), "gzip"),
    **dict.fromkeys((".bz2", ".tbz2", ".tbz"), "bzip2"),
    **dict.fromkeys((".xz", ".txz"), "xz"),
    **dict.fromkeys((".zst", ".tzst"), "zstd"),
}


def extension_of(path: str) -> str:
    """Return the last extension of `path` in lower case, with its dot: ".jpg"; "" if there is none."""
    return os.path.splitext(path)[1].lower()


def is_image(extension: str) -> bool:
    return extension in IMAGE_EXTENSIONS


def kind_of(extension: str) -> str:
    """Return the kind of a file: "image", "array", "text", "data", or "arrays" or "json" with own fields."""
    return _KINDS.get(extension, "data")
