"""Parts of local files where they lie in the page cache: for windows that need little of what they span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachestream.mapping import FileMap

__all__ = ["mapped_spans"]

READAHEAD_BYTES: Final = 128 << 10  # what a page fault reads at once, usually


def mapped_spans(mapped: FileMap, spans: Sequence[tuple[int, int]]) -> list[memoryview] | None:
    """The bytes of `spans` of a mapped file, read-only and not copied; None before Linux 5.14.

    The pages are brought in first, by a call that raises OSError where a plain access would end the
    process with SIGBUS.
    """
    for start, stop in spans:
        if stop - start > READAHEAD_BYTES and not mapped.is_cached(start, stop):
            mapped.ask_for(start, stop)
        if start < stop and not mapped.bring_in(start, stop):
            return None
    whole = mapped.array().data
    return [whole[start:stop] for start, stop in spans]
