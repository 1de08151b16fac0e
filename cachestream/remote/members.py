"""The files of a sample in an archive → its fields, by their extensions."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Mapping
from typing import Any, Final

from cachestream.errors import ConfigError
from cachestream.remote import bounds
from cachestream.remote.decode import Buffer, decode_json_value, decode_value, decode_with
from cachestream.remote.foreign import decode_by_user
from cachestream.remote.functions import fingerprint_of
from cachestream.remote.grouping import Group
from cachestream.remote.images import AS_THEY_ARE, ImageOptions

__all__ = ["Decoders"]

Decoder = Callable[[bytes], Any]

_INTEGERS: Final = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})
_JSON: Final = frozenset({"json", "jsn"})
_TEXTS: Final = {"text": ".txt", "transcript": ".txt"}


def decode_integer(data: Buffer) -> int:
    """The number that a text holds."""
    value = int(bytes(data))
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer beyond 64 bits")
    return value


def decode_gzip(data: Buffer) -> bytes:
    """The bytes that gzip has packed."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        found = file.read(bounds.most_bytes() + 1)
    bounds.check(len(found))
    return found


class Decoders:
    """What is made of a file by its extension; `own` are the user's functions of bytes, by extension.

    The longest part of an extension that has a function of the user's decides: "seg.png" before
    "png". Nothing is unpickled unless such a function does it. What gzip has packed ("json.gz") is unpacked before, and
    keeps its name, as in WebDataset. `images` says what is made of images that
    none of them decodes.
    """

    def __init__(self, own: Mapping[str, Decoder] | None, images: ImageOptions = AS_THEY_ARE) -> None:
        self._images = images
        given = dict(own or {})
        for extension, decoder in given.items():
            if not str(extension).strip(".") or not callable(decoder):
                raise ConfigError(
                    f"decoders={{{extension!r}: {decoder!r}}}: give functions of bytes by extension, such as "
                    "{'pkl': pickle.loads}"
                )
        self._own = {str(extension).strip(".").lower(): decoder for extension, decoder in given.items()}
        self.identity = ",".join(
            f"{extension}:{fingerprint_of(decoder)}" for extension, decoder in sorted(self._own.items())
        )

    def sample(self, group: Group, where: str) -> dict[str, Any]:
        """The fields of a sample; `where` names its archive in messages. Raises SampleError."""
        sample: dict[str, Any] = {}
        for extension, data in group.files.items():
            value = self._value(extension, data, f"{where}#{group.shown_key}.{extension}")
            own = self._find(extension) or self._find(extension.removesuffix(".gz"))
            if isinstance(value, dict) and own is None:  # the arrays of an .npz
                sample.update({f"{extension}.{name}": array for name, array in value.items()})
            else:
                sample[extension] = value
        return sample

    def _find(self, extension: str) -> Decoder | None:
        while extension not in self._own:
            _, dot, extension = extension.partition(".")
            if not dot:
                return None
        return self._own[extension]

    def _value(self, extension: str, data: memoryview, where: str) -> Any:
        own = self._find(extension)
        if own is None and f".{extension}".endswith(".gz"):
            data = memoryview(decode_with(decode_gzip, data, ".gz file", where))
            extension = extension[:-3]
            own = self._find(extension)
        if own is not None:
            return decode_by_user(f"{where}: its decoder", own, data)
        last = extension.rpartition(".")[2]
        if last in _INTEGERS:
            return decode_with(decode_integer, data, "integer", where)
        if last in _JSON:
            return decode_with(decode_json_value, data, "JSON text", where)
        return decode_value(data, _TEXTS.get(last, f".{last}"), where, self._images)
