"""The loaders that are compared, each with the settings that it is tried at.

FFCV is not among them: pip alone does not install it, since it is compiled against an OpenCV of the system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ENTRIES", "Entry"]

_WORKERS: Final = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table: `module` of this folder with `option`, with each number of worker processes."""

    title: str
    module: str
    option: str = ""
    workers: tuple[int, ...] = _WORKERS
    kind: str = "peer"  # or "limit", "ours", or "loader": a peer that takes the DataLoader's place


ENTRIES: Final = (
    Entry("memcpy", "memcpy", workers=(0,), kind="limit"),
    Entry("gather into a reused buffer, one thread", "limits", "one thread", (0,), "limit"),
    Entry("gather into a reused buffer, torch's threads", "limits", "", (0,), "limit"),
    Entry("**cachestream `EpochLoader`**", "ours", "EpochLoader", (0,), "ours"),
    Entry("**cachestream `DataLoader(EpochDataset)`**", "ours", "DataLoader", kind="ours"),
    Entry("memmap, batched by hand, malloc kept", "memmap", "batched, malloc kept"),
    Entry("memmap, batched by hand", "memmap", "batched"),
    Entry("memmap, per item", "memmap", "per item"),
    Entry("file a sample", "files"),
    Entry("wids", "tars", "wids"),
    Entry("WebDataset", "tars", "webdataset"),
    Entry("LitData", "lit"),
    Entry('LitData, `batch_decode="all"`', "lit", "all"),
    Entry("MosaicML Streaming", "mosaic"),
    Entry("TFRecord (`tfrecord`)", "records"),
    Entry("Grain", "grains", kind="loader"),
    Entry("SPDL", "threads", workers=(0, 1), kind="loader"),
)
