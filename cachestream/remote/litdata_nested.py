"""Lists and dicts as LitData packs them (its `json` leaves): tags, counts and values, or JSON text.

(litdata 0.2.76, streaming/serializers.py, `_nested_loads`; all numbers little-endian.)
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np

__all__ = ["parse_nested"]

_LAST_TAG: Final = 0x20  # JSON text begins with something above
_JSON, _STRS, _I64S, _F64S, _BOOLS, _DICT, _RECORDS, _STR, _I64, _F64, _BOOL, _NONE = range(12)
# In records a value's kind is one of these, and else packed as above.
_RECORD_KINDS: Final = {0x10: _NONE, 0x11: _STR, 0x12: _I64, 0x13: _F64, 0x14: _BOOL}
_U32: Final = struct.Struct("<I")


def parse_nested(data: memoryview) -> Any:
    """The value in `data`. Raises ValueError or LookupError for what is malformed, RecursionError for what is too deep."""
    if not len(data) or data[0] > _LAST_TAG:
        return json.loads(bytes(data))
    return _Parser(data).value()


class _Parser:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._place = 0

    def value(self) -> Any:
        return self._tagged(self._byte())

    def _byte(self) -> int:
        value = self._data[self._place]
        self._place += 1
        return value

    def _bytes(self, nbytes: int) -> memoryview:
        found = self._data[self._place : self._place + nbytes]
        if len(found) < nbytes:
            raise ValueError("it ends early")
        self._place += nbytes
        return found

    def _count(self) -> int:
        """How many items follow: each takes a byte at least."""
        (count,) = _U32.unpack(self._bytes(_U32.size))
        if count > len(self._data):
            raise ValueError(f"{count} items in {len(self._data)} bytes")
        return int(count)

    def _text(self) -> str:
        return str(self._bytes(self._count()), "utf-8")

    def _tagged(self, tag: int) -> Any:
        if tag == _JSON:
            return json.loads(bytes(self._bytes(self._count())))
        if tag == _STRS:
            return [self._text() for _ in range(self._count())]
        if tag in (_I64S, _F64S):
            return np.frombuffer(self._bytes(8 * self._count()), "<i8" if tag == _I64S else "<f8").tolist()
        if tag == _BOOLS:
            return list(map(bool, self._bytes(self._count())))
        if tag == _DICT:
            return {self._text(): self.value() for _ in range(self._count())}
        if tag == _RECORDS:
            return self._records()
        return self._scalar(tag)

    def _scalar(self, tag: int) -> Any:
        if tag == _STR:
            return self._text()
        if tag in (_I64, _F64):
            return struct.unpack("<q" if tag == _I64 else "<d", self._bytes(8))[0]
        if tag == _BOOL:
            return bool(self._byte())
        if tag != _NONE:
            raise ValueError(f"the tag {tag}, which is not known")
        return None

    def _records(self) -> list[dict[str, Any]]:
        count, num_keys = self._count(), self._count()
        keys = [self._text() for _ in range(num_keys)]
        return [{key: self._scalar(_RECORD_KINDS[self._byte()]) for key in keys} for _ in range(count)]
