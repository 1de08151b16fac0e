"""Packages of plug-ins, laid on the path as pip lays them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cachestream.sources import registry as plugins

__all__ = ["forget_plugins", "lay_package", "lay_site"]

MODULE: Final = """
import numpy as np
class PairSource:
    num_units = 2
    def __init__(self, urls, *, times=1):
        self.fingerprint, self.times = f"pairs:{urls}", times
    def read(self, unit, rng):
        yield str(unit), {"x": np.full(2, unit * self.times)}
def open_pairs(urls, **options):
    return PairSource(urls, times=options["times"])
def decode(data):
    return np.frombuffer(data, np.uint8) * 2
def halves(data):
    return {"left": data[:1], "right": data[1:]}
def damaged(data):
    raise ValueError("no header")
number = 3
"""


def lay_site(folder: Path) -> Path:
    """A folder for the path, with the module `pairs_plugin`."""
    folder.mkdir()
    (folder / "pairs_plugin.py").write_text(MODULE, encoding="utf-8")
    return folder


def lay_package(
    site: Path, name: str, *, sources: dict[str, str] | None = None, decoders: dict[str, str] | None = None
) -> None:
    """Lay the metadata of a package `name` with these entry points in `site`."""
    info = site / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n", encoding="utf-8")
    groups = {"cachestream.sources": sources or {}, "cachestream.decoders": decoders or {}}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    forget_plugins()


def forget_plugins() -> None:
    """Have this process look again for what is installed."""
    plugins._installed.cache_clear()
    plugins.load_plugin.cache_clear()
