"""Windows of files of raw tokens, as nanoGPT, llm.c and Megatron-LM write them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.sources.api import (
    ArrayFile,
    ArrayLayout,
    Remote,
    RemoteObject,
    SampleError,
    classify,
    patiently,
    read_window,
)

logger = logging.getLogger("cachestream")

HEAD_BYTES: Final = 64 << 10
_INDEX_MAGIC: Final = b"MMIDIDX\0\0"
# By the code in the index; Megatron-LM's megatron/core/datasets/indexed_dataset.py.
_INDEX_DTYPES: Final = (None, "u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")
# The first number of the header of 1,024 bytes; llm.c's dev/data/data_common.py.
_HEADERS: Final = {20240520: "u2", 20240801: "u4"}
_HEADER_BYTES: Final = 1024
_LARGEST_VOCABULARY: Final = 1 << 20


class TokensFile(ArrayFile):
    """Tokens one after the other, in little-endian numbers, of which only the bytes of each window are read.

    `dtype` is that of the numbers. None: what the index `.idx` beside the file says (Megatron-LM), or the
    file's own header (llm.c). Without either the first tokens tell whether they are uint16 (nanoGPT) or
    uint32, which is logged. Thread-safe and picklable. Raises SampleError for a file that holds no tokens,
    and otherwise as `RemoteObject`.
    """

    array_endings = (".bin",)
    is_sample = True
    is_raw = True

    def __init__(
        self, remote: Remote, path: str, shown: str, dataset: str | None, dtype: str | None = None
    ) -> None:
        self._file, self.shown = RemoteObject(remote, path, shown), shown
        self._index = RemoteObject(remote, f"{path.removesuffix('.bin')}.idx", shown)
        self._layout = patiently(lambda: self._find_layout(dtype))
        self.shape, self.dtype = self._layout.shape, self._layout.dtype

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`."""
        return read_window(self._file, self._layout, start, size)

    def _find_layout(self, given: str | None) -> ArrayLayout:
        head = bytes(self._file.head(HEAD_BYTES))
        words = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
        offset, kind = 0, given
        if len(head) >= _HEADER_BYTES and words[0] in _HEADERS:
            offset, kind = _HEADER_BYTES, given or _HEADERS[int(words[0])]
        kind = kind or self._indexed_dtype()
        if kind is None:
            kind = "u4" if len(words) and words.max() < _LARGEST_VOCABULARY else "u2"
            _tell(self.shown, np.dtype(kind).name)
        dtype = np.dtype(kind).newbyteorder("<")
        count, rest = divmod(self._file.look().size_bytes - offset, dtype.itemsize)
        if rest or not count:
            raise SampleError(
                f"{self.shown}: {count * dtype.itemsize + rest:,} bytes are no tokens of {dtype.name}: give "
                "dtype="
            )
        return ArrayLayout(offset, (count,), dtype, False)

    def _indexed_dtype(self) -> str | None:
        """Return the type of the tokens that the index tells; None without an index."""
        try:
            head = bytes(self._index.head(18))
        except Exception as error:
            if classify(error) in ("missing", "denied"):
                return None
            raise
        code = head[17] if len(head) == 18 and head.startswith(_INDEX_MAGIC) else 0
        if not 0 < code < len(_INDEX_DTYPES):
            raise SampleError(f"{self.shown}: its index .idx is not one of Megatron-LM: give dtype=")
        return _INDEX_DTYPES[code]


@lru_cache(256)
def _tell(shown: str, name: str) -> None:
    logger.warning(
        "%s: has no header and no index that tell the type of its tokens: they are read as %s, as the first "
        "of them look; give dtype= to say it",
        shown,
        name,
    )
