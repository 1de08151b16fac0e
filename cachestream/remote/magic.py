"""What bytes are an image, by how they begin: for fields that have no file name to tell."""

from __future__ import annotations

from typing import Final

from cachestream.remote.decode import Buffer

__all__ = ["looks_like_image"]

_BEGINNINGS: Final = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\x00",  # TIFF, either way round
    b"MM\x00*",
    b"\x00\x00\x00\x0cjP  \r\n",  # JPEG 2000
)


def looks_like_image(data: Buffer) -> bool:
    """Whether `data` begins as one of the usual image formats; BMP and PNM, which begin as text may, do not count."""
    head = bytes(data[:16])
    return (
        head.startswith(_BEGINNINGS)
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        or (head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"))
    )
