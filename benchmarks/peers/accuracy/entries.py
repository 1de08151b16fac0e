"""The loaders that are compared, and their lines in the plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ENTRIES", "OURS", "Entry"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the plot: `module` of this folder with `option`, over what the module `data` (or it itself) prepared."""

    title: str
    module: str
    option: str = ""
    colour: str = "0.5"
    line: str = "-"
    data: str = ""
    repeats: bool = False  # a part of the data that was chosen beforehand: it does not stream

    @property
    def prepared_by(self) -> str:
        return self.data or self.module


OURS: Final = "cachestream"
ENTRIES: Final = (
    Entry("WebDataset", "tars", "", "C1"),
    Entry("WebDataset, `cache_dir`, resampled", "tars", "cache", "C1", "--"),
    Entry("MosaicML Streaming", "mosaic", "", "C2"),
    Entry("LitData", "lit", "", "C3"),
    Entry("LitData, `subsample=0.1`", "lit", "0.1", "C3", "--", repeats=True),
    Entry(OURS, "ours", "", "C0", data="tars"),
    Entry(f"{OURS}, MosaicML's shards", "ours", "mds", "C0", "--", data="mosaic"),
)
