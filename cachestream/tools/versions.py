"""The versions of cachestream and of what it uses, without importing any of it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from cachestream import __version__

_PACKAGES: Final = ("torch", "numpy", "fsspec", "s3fs", "pillow", "pyarrow")


def versions() -> dict[str, str]:
    """The versions of cachestream, of Python and of the packages that matter, by name."""
    found = {"cachestream": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
