"""JPEGs by libjpeg-turbo itself (simplejpeg), where it is installed: the pixels that Pillow gives, sooner."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["JPEG_FORMATS", "check_scans", "decode_turbo"]

JPEG_FORMATS: Final = ("JPEG", "MPO")
# Each scan of a progressive JPEG goes over all of its pixels, and may be a few bytes long: without a limit
# a small file takes minutes. (libjpeg-turbo, "Two Issues with the JPEG Standard".)
MAX_SCANS: Final = 100
_START_OF_SCAN: Final = b"\xff\xda"


@lru_cache(maxsize=1)
def _turbo() -> Any:
    """simplejpeg, or None."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def check_scans(image: Image.Image, data: bytes | bytearray | memoryview) -> None:
    """Raise ValueError for a progressive JPEG of more scans than any encoder writes."""
    if image.info.get("progressive"):
        count = bytes(data).count(_START_OF_SCAN)
        if count > MAX_SCANS:
            raise ValueError(f"a JPEG of {count} scans, {MAX_SCANS} at most")


def decode_turbo(
    data: bytes | bytearray | memoryview, image: Image.Image, scale: int
) -> npt.NDArray[np.uint8] | None:
    """uint8 `[H, W, 3]` RGB at 1/`scale` of the size; None where Pillow is to decode it.

    That is without simplejpeg, in other colours than RGB and grey, and for all that is damaged: so
    the same files are refused, for the same reasons, with and without it.
    """
    turbo = _turbo()
    if turbo is None or image.mode not in ("RGB", "L"):
        return None
    least = {} if scale == 1 else {"min_height": -(-image.height // scale), "min_width": -(-image.width // scale)}  # fmt: skip
    try:
        found: npt.NDArray[np.uint8] = turbo.decode_jpeg(data, "RGB", **least)
    except ValueError:
        return None
    expected = (-(-image.height // scale), -(-image.width // scale), 3)
    return found if found.shape == expected else None
