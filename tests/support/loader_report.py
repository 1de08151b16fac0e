"""A report of a loader, for what shows it."""

from __future__ import annotations

from cachestream.storage.telemetry import LoaderReport

LOADER = LoaderReport(
    *(3, 64, 4, 500, 50, 0, 1.0, 0.5, 0.5, 0.0, 8.0, 1.0, 0.1),
    pid=9,
    rank=0,
    ranks=1,
    reported_s=0.0,
    epochs=(),
)
